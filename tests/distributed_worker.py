"""A process that test_distributed.py starts: each check compares with the whole batch."""

import sys
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import check, check_dgamma, draw, right
from mxnet import autograd
from sklearn.datasets import load_digits

import mxbn
from mxbn import distributed

OPTIONS = {"fix_gamma": False, "eps": 1e-3, "momentum": 0.9}
COMM = distributed.init()
RANK, SIZE = COMM.rank, COMM.size
NAMES = ("gamma", "beta", "moving_mean", "moving_var")


def share_of(values, counts):
    """This process's rows."""
    end = sum(counts[: RANK + 1])
    return values[end - counts[RANK] : end]


def layer_for(d, devices=1, **options):
    layer = mxbn.gluon.SyncBatchNorm(epsilon=1e-3, in_channels=len(d.gamma), **options)
    layer.initialize(ctx=[mx.cpu(i) for i in range(devices)])
    layer.cast(d.dtype)
    for name in NAMES:
        parameter = getattr(layer, name.replace("moving", "running"))
        parameter.set_data(mx.nd.array(getattr(d, name), dtype=d.param))
    return layer


def run(d, layer, counts, devices=1):
    """Forward and backward of this process's part, of which each device has some rows."""
    split = [np.array_split(share_of(v, counts), devices) for v in (d.x, d.dy)]
    parts = [
        SimpleNamespace(
            x=mx.nd.array(x, mx.cpu(i), d.dtype), dy=mx.nd.array(dy, mx.cpu(i), d.dtype)
        )
        for i, (x, dy) in enumerate(zip(*split))
    ]
    with autograd.record():
        for part in parts:
            part.x.attach_grad()
            part.y = layer(part.x)
    autograd.backward([p.y for p in parts], [p.dy for p in parts])
    return parts


def check_all(d, layer, parts, counts):
    mx.nd.waitall()
    want = right(d, True, **OPTIONS)
    for found, expected, what in (
        ([p.y for p in parts], want.output, "output"),
        ([p.x.grad for p in parts], want.dx, "gradient of data"),
    ):
        found = np.concatenate([array.asnumpy() for array in found])
        scale = np.abs(expected).max() + np.abs(d.x).max() * (d.dtype == "float64")
        check(found, share_of(expected, counts), scale=scale, what=what)
    own = sum(layer.gamma.grad(part.x.context).asnumpy() for part in parts)
    check_dgamma(COMM.allreduce(own), want, 8)
    for context in [part.x.context for part in parts]:
        moving = layer.running_mean.data(context), layer.running_var.data(context)
        check(moving[0], want.moving_mean, 8, what="moving mean")
        check(moving[1], want.moving_var, 8, what="moving variance")
        bits = COMM.allgather([array.asnumpy().tobytes() for array in moving])
        assert all(each == bits[0] for each in bits), "the processes' statistics differ"


COUNTS = {2: [(5, 3), (0, 8)], 4: [(3, 0, 4, 1), (2, 2, 2, 2)]}[SIZE]


def check_parts_of_any_size():
    for counts in COUNTS:
        for dtype in ("float16", "float32", "float64"):
            d = draw((8, 3, 5), dtype=dtype, seed=1)
            layer = layer_for(d)
            with mx.util.np_shape():
                check_all(d, layer, run(d, layer, counts), counts)


def check_far_from_zero():
    d = draw((8, 3, 40), seed=2, mean=1000, std=0.01)
    d.x[:3] = (d.x[:3] + 0.05).astype("float32")
    layer = layer_for(d)
    with mx.util.np_shape():
        check_all(d, layer, run(d, layer, COUNTS[0]), COUNTS[0])


def check_several_devices_in_each_process():
    d = draw((4 * SIZE, 3, 5), seed=3)
    for hybridize in (False, True):
        layer, counts = layer_for(d, devices=2), [4] * SIZE
        if hybridize:
            layer.hybridize(static_alloc=True, static_shape=True)
        check_all(d, layer, run(d, layer, counts, devices=2), counts)


def check_layers_overlap():
    """Whichever of two layers a process calls first."""
    d = draw((8, 3, 5), seed=4)
    layers = [layer_for(d), layer_for(d)]
    x = mx.nd.array(share_of(d.x, [8 // SIZE] * SIZE))
    for i in range(10):
        order = (0, 1) if (RANK + i) % 2 else (1, 0)
        with autograd.train_mode():
            outputs = {layer: layers[layer](x) for layer in order}
        for y in outputs.values():
            expected = share_of(right(d, True, **OPTIONS).output, [8 // SIZE] * SIZE)
            check(y, expected, 8, what="output")


def check_a_process_that_does_not_come():
    d = draw((8, 3, 5), seed=5)
    layer = layer_for(d, timeout=0.3)
    x = mx.nd.array(share_of(d.x, [8 // SIZE] * SIZE))
    if RANK > 0:
        COMM.Barrier()  # until the first process has given up
    with autograd.train_mode():
        y = layer(x)
    if RANK > 0:
        y.wait_to_read()
    else:
        text = "forward: within 0.3 s no answer came from the other processes"
        with pytest.raises(mx.base.MXNetError, match=text):
            y.wait_to_read()
        COMM.Barrier()
    with autograd.train_mode():
        y = layer(x)
    expected = share_of(right(d, True, **OPTIONS).output, [8 // SIZE] * SIZE)
    check(y, expected, what="output of the next round")


def train(norm, rows, reduce):
    """Losses of a few steps on the digits, on these rows of each batch."""
    digits = load_digits()
    images = digits.images[:, None].astype("float32") / 16
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(8, 3, in_channels=1), norm(), mx.gluon.nn.Activation("relu"))
    net.add(mx.gluon.nn.Dense(10, in_units=8 * 6 * 6))
    net.initialize()
    values = np.random.RandomState(0)
    for parameter in net.collect_params().values():
        if parameter.name.endswith("weight"):
            parameter.set_data(mx.nd.array(values.randn(*parameter.shape) * 0.1))
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
    loss_of, losses = mx.gluon.loss.SoftmaxCrossEntropyLoss(), []
    for step in range(8):
        batch = slice(64 * step, 64 * step + 64)
        x, label = (mx.nd.array(v[batch][rows]) for v in (images, digits.target))
        with autograd.record():
            loss = loss_of(net(x), label)
        loss.backward()
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad()[:] = reduce(parameter.grad().asnumpy())
        trainer.step(64)
        losses.append(reduce(float(loss.sum().asscalar())) / 64)
    return losses


def check_training():
    counts = np.cumsum([0, *{2: (40, 24), 4: (10, 30, 5, 19)}[SIZE]])
    rows = slice(counts[RANK], counts[RANK + 1])
    losses = train(mxbn.gluon.SyncBatchNorm, rows, COMM.allreduce)
    expected = train(mxbn.gluon.BatchNorm, slice(None), lambda value: value)
    np.testing.assert_allclose(losses, expected, 2e-5)
    assert losses[-1] < losses[0] / 2


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        COMM.Barrier()
        if RANK == 0:
            print("passed", name, flush=True)
