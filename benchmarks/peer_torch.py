"""PyTorch as a peer, where it can be imported."""

import sys

from peers import EPS, MOMENTUM


def load(folder, threads):
    """Import torch, also from `folder`, and return it, or the reason why it is left out."""
    if folder:
        sys.path.append(folder)  # at the end: MXNet must find its own, older NumPy first
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return None, f"{type(error).__name__}: {error}"
    torch.set_num_threads(threads)
    return torch, None


class TorchPeer:
    """The functions below `torch.nn.BatchNorm2d`, without its autograd."""

    def __init__(self, torch, arrays):
        self.torch = torch
        self.last = arrays.axis == -1 and arrays.x.ndim > 2
        self.x, self.dy = self._tensor(arrays.x), self._tensor(arrays.dy)
        self.out = torch.zeros_like(self.x)
        gamma, beta, mean, var = (
            torch.from_numpy(value.copy()) for value in arrays.parameters.values()
        )
        self.gamma, self.beta, self.moving = gamma, beta, (mean, var)
        self.per_channel = [torch.zeros_like(gamma) for _ in range(2)]

    def _tensor(self, array):
        """Return a copy in the same order in memory, with PyTorch's order of the axes."""
        tensor = self.torch.from_numpy(array.copy())
        return tensor.movedim(-1, 1) if self.last else tensor

    def _numpy(self, tensor):
        return (tensor.movedim(1, -1) if self.last else tensor).numpy()

    def ways(self, work):
        if work == "inference forward":
            return {("PyTorch", "out"): self._forward(train=False)}
        if work == "training forward":
            return {("PyTorch", "out"): self._forward(train=True)}
        return self._backward(train=work == "training backward")

    def _forward(self, train):
        normalize = self.torch.ops.aten.native_batch_norm.out
        mean, invstd = self.per_channel
        moving = [each.clone() for each in self.moving]  # training steps them
        arguments = (self.x, self.gamma, self.beta, *moving, train, 1 - MOMENTUM, EPS)

        def forward():
            normalize(*arguments, out=self.out, save_mean=mean, save_invstd=invstd)

        return forward, lambda: self._numpy(self.out)

    def _backward(self, train):
        torch = self.torch
        _, mean, invstd = torch.native_batch_norm(
            self.x, self.gamma, self.beta, None, None, True, 0.0, EPS
        )
        arguments = (self.dy, self.x, self.gamma, *self.moving, mean, invstd, train, EPS)
        mask = [True, True, True]
        dgamma, dbeta = self.per_channel
        write = torch.ops.aten.native_batch_norm_backward.out
        compute = torch.ops.aten.native_batch_norm_backward.default
        results = [self.out]

        def into_given():
            write(*arguments, mask, out0=self.out, out1=dgamma, out2=dbeta)
            results[0] = self.out

        def into_new():
            results[0] = compute(*arguments, mask)[0]

        # The first may compute into new tensors and copy them, so both are tried.
        return {
            ("PyTorch", "out"): (into_given, lambda: self._numpy(results[0])),
            ("PyTorch", "new"): (into_new, lambda: self._numpy(results[0])),
        }
