"""Beside convolutions, whose blocked arrays MXNet hands on: right every time, however it runs."""

import mxnet as mx
import numpy as np
import pytest
from helpers import CONTEXT, check, nd
from mxnet import autograd
from mxnet.gluon import nn

import mxbn
from mxbn import reference

ROUNDS, CALLS = 20, 10  # calls in a round run without waiting for one another
CONVOLUTIONS = {1: nn.Conv1D, 2: nn.Conv2D, 3: nn.Conv3D}
SPATIAL = {1: (11,), 2: (7, 6), 3: (5, 4, 3)}
WAYS = ("imperative", "hybridized", "static", "bound", "bound_for_inference")
MOMENTUM = 0.9
OPTIONS = {"eps": 1e-5, "fix_gamma": False}


class Case:
    """A network of a BatchNorm and its neighbours, with data for it."""

    def __init__(self, place, dimensions, channels):
        rs = np.random.RandomState(channels)
        conv = CONVOLUTIONS[dimensions]
        self.net = nn.HybridSequential(prefix="net_")
        with self.net.name_scope():
            if place != "before":
                # Without bias, whose gradient is zero in training: nothing to measure it by.
                self.net.add(conv(channels, 3, padding=1, in_channels=3, use_bias=False))
            self.norm = mxbn.gluon.BatchNorm(in_channels=channels, momentum=MOMENTUM)
            self.net.add(self.norm)
            if place != "behind":
                self.net.add(conv(8, 3, padding=1, in_channels=channels))
        self.net.initialize(mx.init.Xavier())
        for parameter in (self.norm.gamma, self.norm.running_var):
            parameter.set_data(nd(rs.uniform(0.5, 2, channels)))
        for parameter in (self.norm.beta, self.norm.running_mean):
            parameter.set_data(nd(rs.randn(channels)))
        into = channels if place == "before" else 3
        out = channels if place == "behind" else 8
        self.x = nd(rs.randn(2, into, *SPATIAL[dimensions]))
        self.dy = nd(rs.randn(2, out, *SPATIAL[dimensions]))
        self.x.attach_grad()
        mx.nd.waitall()

    def gradients(self):
        parameters = self.net.collect_params().values()
        found = {p.name: p.grad() for p in parameters if p.grad_req != "null"}
        return {"x": self.x.grad, **found}

    def statistics(self):
        return [p.data().asnumpy() for p in (self.norm.running_mean, self.norm.running_var)]

    def right(self, is_train):
        """Right values: the convolutions one by one, with the reference between them.

        Also the mean and variance of the batch that the layer sees.
        """
        blocks = list(self.net)
        at = blocks.index(self.norm)
        x = self.x
        with autograd.record(train_mode=is_train):
            z = blocks[0](x) if at == 1 else x * 1
        gamma, beta = (p.data().asnumpy() for p in (self.norm.gamma, self.norm.beta))
        kept = reference.forward(
            z.asnumpy(), gamma, beta, *self.statistics(), is_train=is_train, **OPTIONS
        )
        u = nd(kept.output)
        u.attach_grad()
        with autograd.record(train_mode=is_train):
            y = blocks[-1](u) if blocks[-1] is not self.norm else u * 1
        y.backward(self.dy)
        dz, dgamma, dbeta = reference.backward(
            u.grad.asnumpy(), z.asnumpy(), gamma, kept, fix_gamma=False
        )
        z.backward(nd(dz))
        values = {name: value.asnumpy() for name, value in self.gradients().items()}
        values.update({self.norm.gamma.name: dgamma, self.norm.beta.name: dbeta})
        return {"output": y.asnumpy(), **values}, reference.statistics(z.asnumpy())

    def caller(self, way):
        """A function of is_train that runs the network and returns copies of what it gave."""
        if not way.startswith("bound"):
            if way != "imperative":
                static = way == "static"
                self.net.hybridize(static_alloc=static, static_shape=static)

            def call(is_train):
                with autograd.record(train_mode=is_train):
                    y = self.net(self.x)
                y.backward(self.dy)
                return {"output": y, **{k: v.copy() for k, v in self.gradients().items()}}

            return call

        request = "null" if way == "bound_for_inference" else "write"
        executor = self.net(mx.sym.var("x")).simple_bind(CONTEXT, grad_req=request, x=self.x.shape)
        parameters = {name: p.data() for name, p in self.net.collect_params().items()}
        executor.copy_params_from({**parameters, "x": self.x}, parameters, allow_extra_params=True)
        self.statistics = lambda: [value.asnumpy() for value in executor.aux_arrays]

        def call(is_train):
            executor.forward(is_train=is_train)
            values = {"output": executor.outputs[0].copy()}
            if request == "write":
                executor.backward([self.dy])
                values.update({k: v.copy() for k, v in executor.grad_dict.items()})
            return values

        return call


PLACES = [("between", n, c) for n in (1, 2, 3) for c in (8, 16, 32, 64)]
PLACES += [(place, n, 16) for place in ("behind", "before") for n in (1, 2, 3)]


@pytest.mark.parametrize(("place", "dimensions", "channels"), PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_right_every_time(place, dimensions, channels, way):
    case = Case(place, dimensions, channels)
    call = case.caller(way)
    mx.nd.waitall()
    for i in range(ROUNDS):
        is_train = i % 2 == 0
        before = case.statistics()
        want, batch = case.right(is_train)
        found = [call(is_train) for _ in range(CALLS)]
        mx.nd.waitall()
        for values in found:
            for name, value in values.items():
                check(value, want[name], 8, what=name)
        left = MOMENTUM**CALLS if is_train else 1
        for old, new, seen in zip(before, case.statistics(), batch):
            check(new, left * old.astype("float64") + (1 - left) * seen, 8, what="statistic")
