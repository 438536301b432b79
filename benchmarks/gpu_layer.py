"""A batch normalization of torch's CUDA tensors, by mxbn and by torch."""

from types import SimpleNamespace

from gpu_cases import EPS, View
from gpu_values import MOMENTUM

from mxbn import _gpu

IMPLEMENTATIONS = {0: "torch's own", 1: "cuDNN"}


class Layer:
    """Random data, in `places` of memory, and what is normalized with it.

    Everything runs on torch's current device and stream.
    """

    def __init__(self, torch, case, dtype, places=1):
        self.torch, self.dtype, self.view = torch, dtype, View.of(case.shape, case.axis)
        self.last = case.axis == -1
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.queue = {
            "device": torch.cuda.current_device(),
            "stream": torch.cuda.current_stream().cuda_stream,
        }
        self.places = [self._place(case.shape) for _ in range(places)]
        channels = self.view.channels
        self.gamma, self.beta, self.moving_mean = (self._random(channels) for _ in range(3))
        self.moving_var = 1 + self._random(channels) ** 2
        self.mean, self.inv_std, self.dgamma, self.dbeta = (
            self._random(channels) for _ in range(4)
        )
        self.saved = self._random(2 * channels + 1, "float64")
        self.workspace = self._random(1, "float64")

    def _random(self, shape, dtype="float32"):
        dtype = getattr(self.torch, dtype)
        return self.torch.randn(shape, generator=self.generator, device="cuda", dtype=dtype)

    def _place(self, shape):
        x, dy, out = (self._random(shape, self.dtype) for _ in range(3))
        return SimpleNamespace(x=x.mul_(2).add_(1), dy=dy, out=out)

    def _allocate(self, doubles):
        if self.workspace.numel() < doubles:
            self.workspace = self._random(doubles, "float64")
        return self.workspace.data_ptr()

    def _start(self, function, tensors, **numbers):
        tensors.update(gamma=self.gamma, saved=self.saved)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        arguments = _gpu.Arguments(**self.view._asdict(), **pointers, **numbers)
        function(arguments, self.dtype, self._allocate, **self.queue)

    def forward(self, place, train):
        tensors = {"x": place.x, "out": place.out, "first": self.mean, "second": self.inv_std}
        tensors.update(beta=self.beta, moving_mean=self.moving_mean, moving_var=self.moving_var)
        numbers = {"eps": EPS, "momentum": MOMENTUM, "use_batch": train, "step": train}
        self._start(_gpu.forward, tensors, **numbers)

    def backward(self, place):
        tensors = {"x": place.x, "dy": place.dy, "out": place.out}
        self._start(_gpu.backward, {**tensors, "first": self.dgamma, "second": self.dbeta})

    def _in_torchs_order(self, tensor):
        return tensor.movedim(-1, 1) if self.last else tensor

    def torch_forward(self, place, train):
        return self.torch.nn.functional.batch_norm(
            self._in_torchs_order(place.x), self.moving_mean, self.moving_var, self.gamma,
            self.beta, train, 1 - MOMENTUM, EPS,
        )  # fmt: skip

    def torch_save(self, place):
        """Do the training forward that torch_backward is of; return what computed it, in words."""
        _, *saved, implementation = self.torch._batch_norm_impl_index(
            self._in_torchs_order(place.x), self.gamma, self.beta, self.moving_mean,
            self.moving_var, True, 1 - MOMENTUM, EPS, self.torch.backends.cudnn.enabled,
        )  # fmt: skip
        place.saved = (implementation, *saved)
        return IMPLEMENTATIONS.get(implementation, f"implementation {implementation}")

    def torch_backward(self, place):
        """What autograd calls for the derivative of batch_norm, without its work on the host."""
        implementation, mean, inv_std, reserved = place.saved
        return self.torch.ops.aten._batch_norm_impl_index_backward(
            implementation, self._in_torchs_order(place.x), self._in_torchs_order(place.dy),
            self.gamma, self.moving_mean, self.moving_var, mean, inv_std, True, EPS,
            [True, True, True], reserved,
        )  # fmt: skip
