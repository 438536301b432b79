"""The peers where an addition and a ReLU follow: relu(batch_norm(x) + addend)."""

import mxnet as mx
from peer_torch import TorchPeer
from peers import OPERATORS, MXNetPeers

import mxbn


class FusedPeers(MXNetPeers):
    """mxbn's one operator, and the three that it takes the place of."""

    names = ("mxbn", "mxbn unfused", "built-in")

    def __init__(self, arrays):
        super().__init__(arrays)
        self.data["addend"] = mx.nd.array(arrays.addend)
        self.gradients["addend"] = mx.nd.zeros_like(self.x)

    def call(self, peer, kind, data, parameters, attributes):
        x, addend = data
        if peer == "mxbn":
            attributes = {**attributes, "addend": addend, "act_type": "relu"}
            return getattr(mxbn, kind).BatchNorm(x, *parameters, **attributes)
        package = OPERATORS[peer.split()[0]]
        y = getattr(package, kind).BatchNorm(x, *parameters, **attributes)
        return getattr(mx, kind).relu(y + addend)


class FusedTorchPeer(TorchPeer):
    """The same by PyTorch, whose addition and ReLU give new tensors, as in its own networks."""

    def __init__(self, torch, arrays):
        super().__init__(torch, arrays)
        self.addend = self._tensor(arrays.addend)

    def _forward(self, train):
        normalize, _ = super()._forward(train)
        results = []

        def forward():
            normalize()
            results[:] = [self.torch.relu(self.out + self.addend)]

        return forward, lambda: self._numpy(results[0])

    def _backward(self, train):
        forward, _ = self._forward(train)
        forward()
        y, head = self.torch.relu(self.out + self.addend), self.dy.clone()
        let_through = self.torch.ops.aten.threshold_backward.grad_input

        def behind_relu(backward):
            def run():
                let_through(head, y, 0, grad_input=self.dy)
                backward()

            return run

        plain = super()._backward(train)
        return {way: (behind_relu(call), result) for way, (call, result) in plain.items()}
