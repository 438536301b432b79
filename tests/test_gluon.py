"""The Gluon layer: modes, flags, parameters, contexts, NumPy mode and reuse."""

import copy
import gc
import re

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    CONTEXT,
    HYBRIDIZE,
    MODES,
    OTHER_CONTEXT,
    arrays,
    check,
    check_dgamma,
    draw,
    nd,
    right,
    same_bits,
)
from mxnet import autograd
from mxnet.gluon import nn

import mxbn
from mxbn import reference

EPS = 1e-5  # the layer's default
PARAMETERS = ("gamma", "beta", "running_mean", "running_var")

hybrid = pytest.mark.parametrize("hybridize", HYBRIDIZE.values(), ids=HYBRIDIZE)
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def run_as(block, hybridize):
    if hybridize is not None:
        block.hybridize(**hybridize)
    return block


def fill(layer, d):
    for key in PARAMETERS:
        values = getattr(d, key.replace("running", "moving"))
        getattr(layer, key).set_data(nd(values, d.param))
    mx.nd.waitall()


def layer_for(d, hybridize=None, kind=mxbn.gluon.BatchNorm, **options):
    """A layer that holds the drawing's parameters and statistics."""
    layer = kind(axis=d.axis, in_channels=len(d.gamma), **options)
    layer.cast(d.dtype)
    layer.initialize()
    fill(layer, d)
    return run_as(layer, hybridize)


def check_statistics(layer, want, units=4):
    mx.nd.waitall()
    check(layer.running_mean.data(), want.moving_mean, units, what="running mean")
    check(layer.running_var.data(), want.moving_var, units, what="running variance")


def check_gradients(x, layer, want, units=4):
    mx.nd.waitall()
    check(x.grad, want.dx, units, what="gradient of data")
    check_dgamma(layer.gamma.grad(), want, units)
    check(layer.beta.grad(), want.dbeta, units, what="gradient of beta")


def continued(d, want):
    """Let the drawing go on from the statistics of a forward."""
    d.moving_mean, d.moving_var = want.moving_mean, want.moving_var


# ------------------------------------------------------------------------------------------- modes


@hybrid
@modes
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mode_table(mode, hybridize, dtype):
    is_train, use_global_stats, use_batch_stats = mode
    d = draw((6, 3, 4), dtype=dtype, seed=1)
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    layer = layer_for(d, hybridize, **flags)
    x, dy = arrays(d).x, nd(d.dy, dtype)
    for _ in range(3):  # the later calls run what the first one cached
        want = right(d, is_train, eps=EPS, fix_gamma=False, **flags)
        with autograd.record(train_mode=is_train):
            y = layer(x)
        assert y.dtype == np.dtype(dtype)
        check(y, want.output, what="output")
        check_statistics(layer, want)
        for backward_mode in (True, False):
            y.backward(dy, retain_graph=backward_mode, train_mode=backward_mode)
            check_gradients(x, layer, want)
        check_statistics(layer, want)  # backward did nothing to them
        continued(d, want)


@hybrid
@modes
def test_mode_table_without_recording(mode, hybridize):
    is_train, use_global_stats, use_batch_stats = mode
    d = draw((6, 3, 4), seed=2)
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    layer = layer_for(d, hybridize, **flags)
    for _ in range(3):
        want = right(d, is_train, eps=EPS, fix_gamma=False, **flags)
        with autograd.train_mode() if is_train else autograd.predict_mode():
            check(layer(nd(d.x)), want.output, what="output")
        check_statistics(layer, want)
        continued(d, want)


@hybrid
@pytest.mark.parametrize(("shape", "axis"), [((7, 4), 1), ((2, 3, 4, 5), -1), ((2, 3, 4, 5, 2), 2)])
def test_options(hybridize, shape, axis):
    d = draw(shape, axis=axis, seed=3)
    layer = layer_for(d, hybridize, epsilon=0.25, momentum=0.5, scale=False, center=False)
    assert layer.gamma.grad_req == layer.beta.grad_req == "null"
    x = arrays(d).x
    with autograd.record():
        y = layer(x)
    y.backward(nd(d.dy))
    want = right(d, True, eps=0.25, momentum=0.5, fix_gamma=True)
    check(y, want.output, what="output")
    check(x.grad, want.dx, what="gradient of data")
    check_statistics(layer, want)
    assert same_bits(layer.gamma.data(), d.gamma.astype("float32"))


# ---------------------------------------------------------------- parameters, names, construction


@hybrid
def test_deferred_initialisation(hybridize):
    d = draw((5, 2, 3, 7), axis=2, seed=4)
    layer = run_as(mxbn.gluon.BatchNorm(axis=2), hybridize)
    layer.initialize()
    assert "in_channels=None" in repr(layer)
    with pytest.raises(mx.gluon.parameter.DeferredInitializationError):
        layer.gamma.data()
    with autograd.record():
        y = layer(nd(d.x))
    assert {getattr(layer, key).shape for key in PARAMETERS} == {(3,)}
    d.gamma, d.beta = np.ones(3), np.zeros(3)
    d.moving_mean, d.moving_var = np.zeros(3), np.ones(3)
    want = right(d, True, eps=EPS)
    check(y, want.output, what="output")
    check_statistics(layer, want)
    assert "in_channels=3" in repr(layer)


@hybrid
def test_wrong_channel_count_is_refused_and_the_layer_goes_on(hybridize):
    d = draw((4, 3, 2), seed=5)
    layer = layer_for(d, hybridize)
    with pytest.raises((ValueError, mx.base.MXNetError), match=r"mxbn: BatchNorm: gamma has shape"):
        layer(mx.nd.ones((4, 5, 2))).asnumpy()
    check(layer(nd(d.x)), right(d, False, eps=EPS, fix_gamma=False).output)


def test_initialisers():
    options = {
        f"{key}_initializer": mx.init.Constant(value)
        for key, value in zip(("gamma", "beta", "running_mean", "running_variance"), (2, 3, 4, 5))
    }
    layer = mxbn.gluon.BatchNorm(in_channels=2, **options)
    layer.initialize(mx.init.Normal())
    values = [getattr(layer, key).data().asnumpy().tolist() for key in PARAMETERS]
    assert values == [[2, 2], [3, 3], [4, 4], [5, 5]]


@hybrid
def test_cast(hybridize):
    d = draw((6, 3, 4), dtype="float16", seed=6)
    layer = layer_for(d, hybridize)
    for dtype, param in [("float64", "float64"), ("float16", "float32"), ("float32", "float32")]:
        layer.cast(dtype)
        assert {np.dtype(getattr(layer, key).dtype).name for key in PARAMETERS} == {param}
        assert {getattr(layer, key).data().dtype for key in PARAMETERS} == {np.dtype(param).type}
        want = right(d, True, eps=EPS, fix_gamma=False)
        x = nd(d.x, dtype)
        x.attach_grad()
        with autograd.record():
            y = layer(x)
        y.backward(nd(d.dy, dtype))
        assert y.dtype == np.dtype(dtype)
        check(y, want.output, what="output")
        check_gradients(x, layer, want)
        check_statistics(layer, want)
        fill(layer, d)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_channels": 4},
        {"axis": -1, "momentum": 0.5, "epsilon": 0.25, "scale": False, "use_global_stats": True},
    ],
    ids=str,
)
def test_repr_is_that_of_the_built_in_layer(options):
    assert repr(mxbn.gluon.BatchNorm(**options)) == repr(nn.BatchNorm(**options))


@pytest.mark.parametrize("flag", ["use_batch_stats", "step_global_stats"])
def test_repr_shows_our_own_flags_only_where_they_are_set(flag):
    layer = mxbn.gluon.BatchNorm(**{flag: True})
    assert f"{flag}=True" in repr(layer)
    setattr(layer, flag, False)
    assert repr(layer) == repr(nn.BatchNorm())


def test_names():
    with mx.name.NameManager():
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mxbn.gluon.BatchNorm(), mxbn.gluon.BatchNorm(prefix="own_"))
    assert [layer.name for layer in net] == ["net_batchnorm0", "net_own"]
    assert list(net[0].collect_params()) == [f"net_batchnorm0_{key}" for key in PARAMETERS]
    assert list(net[1].collect_params()) == [f"net_own_{key}" for key in PARAMETERS]
    assert re.fullmatch(r"batchnorm\d+_", mxbn.gluon.BatchNorm().prefix)
    symbol = net(mx.sym.var("data"))
    assert symbol.list_outputs() == ["net_own_fwd_output"]
    assert symbol.list_auxiliary_states() == [
        "net_batchnorm0_running_mean",
        "net_batchnorm0_running_var",
        "net_own_running_mean",
        "net_own_running_var",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -1e-5}, "eps is '-1e-05', expected a finite number >= 0"),
        ({"epsilon": float("nan")}, "eps is 'nan'"),
        ({"epsilon": float("inf")}, "eps is 'inf'"),
        ({"epsilon": None}, "eps is 'None'"),
        ({"momentum": 1.5}, "momentum is '1.5', expected a number from 0 to 1"),
        ({"momentum": -0.1}, "momentum is '-0.1'"),
        ({"momentum": float("nan")}, "momentum is 'nan'"),
        ({"axis": 1.5}, "axis is '1.5'"),
        ({"axis": "C"}, "axis is 'C'"),
        ({"use_global_stats": "maybe"}, "use_global_stats is 'maybe', expected True or False"),
        ({"use_batch_stats": "maybe"}, "use_batch_stats is 'maybe', expected True or False"),
        ({"use_global_stats": True, "use_batch_stats": True}, "are both True, expected at most"),
    ],
    ids=str,
)
def test_wrong_constructor_values_are_refused(options, message):
    with pytest.raises(ValueError, match=r"^mxbn: BatchNorm: ") as refusal:
        mxbn.gluon.BatchNorm(**options)
    assert message in str(refusal.value)


@pytest.mark.parametrize("flag", ["use_global_stats", "use_batch_stats"])
@pytest.mark.parametrize(("value", "means"), [("False", False), ("True", True), (0, False)])
def test_flag_as_the_operator_reads_it(flag, value, means):
    """The operator takes a flag as text too; what the layer says must be what it does."""
    d = draw((6, 3, 4), seed=28)
    layer = layer_for(d, **{flag: value})
    for is_train in (True, False):
        want = right(d, is_train, eps=EPS, fix_gamma=False, **{flag: means})
        with autograd.record(train_mode=is_train):
            check(layer(nd(d.x)), want.output, what="output")
        mx.nd.waitall()
        continued(d, want)
    assert getattr(layer, flag) is means


# ------------------------------------------------------------------------------------------- flags

# Settings of (use_global_stats, use_batch_stats), one after the other.
FLAGS = [(False, False), (True, False), (False, False), (False, True), (True, False), (False, True)]


def set_flags(layer, use_global_stats, use_batch_stats):
    if use_global_stats:
        layer.use_batch_stats = use_batch_stats
        layer.use_global_stats = use_global_stats
    else:
        layer.use_global_stats = use_global_stats
        layer.use_batch_stats = use_batch_stats


def chain(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def plain_chain(*blocks):
    net = nn.Sequential()
    net.add(*blocks)
    return net


NESTINGS = {
    "layer": lambda layer: layer,
    "parent": lambda layer: chain(layer, nn.HybridLambda("negative")),
    "grandparent": lambda layer: chain(chain(layer, nn.HybridLambda("negative"))),
    "plain_grandparent": lambda layer: plain_chain(chain(layer), nn.Lambda("negative")),
}


@hybrid
@pytest.mark.parametrize("nesting", NESTINGS)
def test_flags_act_from_the_next_call(hybridize, nesting):
    d = draw((6, 3, 4), seed=7)
    layer = layer_for(d)
    net = NESTINGS[nesting](layer)
    run_as(net, hybridize)
    sign = 1 if nesting == "layer" else -1
    x, dy = arrays(d).x, nd(sign * d.dy)
    for use_global_stats, use_batch_stats in FLAGS:
        set_flags(layer, use_global_stats, use_batch_stats)
        assert layer.use_global_stats is use_global_stats
        assert layer.use_batch_stats is use_batch_stats
        for is_train in (True, False):
            want = right(
                d, is_train, eps=EPS, fix_gamma=False,
                use_global_stats=use_global_stats, use_batch_stats=use_batch_stats,
            )  # fmt: skip
            with autograd.record(train_mode=is_train):
                y = net(x)
            y.backward(dy)
            check(y, sign * want.output, what="output")
            check_gradients(x, layer, want)
            check_statistics(layer, want)
            continued(d, want)


@hybrid
def test_step_global_stats_acts_from_the_next_call(hybridize):
    d = draw((6, 3, 4), seed=9)
    layer = layer_for(d, use_global_stats=True)
    net = run_as(chain(layer), hybridize)
    for step in (False, True, False):
        layer.step_global_stats = step
        assert layer.step_global_stats is step
        flags = {"use_global_stats": True, "step_global_stats": step}
        want = right(d, True, eps=EPS, fix_gamma=False, **flags)
        with autograd.record():
            check(net(nd(d.x)), want.output, what="output")
        check_statistics(layer, want)
        continued(d, want)


@hybrid
def test_flags_act_in_every_network_that_shares_the_layer(hybridize):
    d = draw((6, 3, 4), seed=8)
    layer = layer_for(d)
    nets = [run_as(chain(chain(layer)), hybridize) for _ in range(2)]
    x = nd(d.x)
    for use_global_stats in (False, True, False):
        layer.use_global_stats = use_global_stats
        for net in nets:
            want = right(d, True, eps=EPS, fix_gamma=False, use_global_stats=use_global_stats)
            with autograd.train_mode():
                check(net(x), want.output, what="output")
            check_statistics(layer, want)
            continued(d, want)


def test_flags_act_where_the_garbage_collector_is_frozen():
    d = draw((6, 3, 4), seed=9)
    layer = layer_for(d)
    net = run_as(chain(layer), {})
    x = nd(d.x)
    net(x)
    gc.freeze()  # as servers do before they fork
    try:
        layer.use_batch_stats = True
        got = net(x)
    finally:
        gc.unfreeze()
    check(got, right(d, False, eps=EPS, fix_gamma=False, use_batch_stats=True).output)


@hybrid
@pytest.mark.parametrize("flag", ["use_global_stats", "use_batch_stats"])
@pytest.mark.parametrize("is_train", [True, False])
def test_flag_set_between_forward_and_backward_does_not_change_the_gradient(
    hybridize, flag, is_train
):
    d = draw((6, 3, 4), seed=10)
    layer = layer_for(d)
    net = run_as(chain(layer), hybridize)
    x = arrays(d).x
    with autograd.record(train_mode=is_train):
        y = net(x)
    setattr(layer, flag, True)
    y.backward(nd(d.dy))
    want = right(d, is_train, eps=EPS, fix_gamma=False)
    check_gradients(x, layer, want)
    check_statistics(layer, want)


@hybrid
@pytest.mark.parametrize(
    ("first", "second"),
    [("use_global_stats", "use_batch_stats"), ("use_batch_stats", "use_global_stats")],
)
def test_both_flags_are_refused_and_nothing_changes(hybridize, first, second):
    d = draw((6, 3, 4), seed=11)
    layer = layer_for(d, hybridize, **{first: True})
    x, text = nd(d.x), repr(layer)
    before = layer(x)
    with pytest.raises(ValueError, match=f"^mxbn: BatchNorm: .*{layer.name} would both be True"):
        setattr(layer, second, True)
    assert getattr(layer, first) is True
    assert getattr(layer, second) is False
    assert repr(layer) == text
    assert same_bits(layer(x), before)
    check(before, right(d, False, eps=EPS, fix_gamma=False, **{first: True}).output)


# ---------------------------------------------------------------------------- gradients, reuse


@hybrid
@pytest.mark.parametrize("gamma_req", ["write", "add", "null"])
@pytest.mark.parametrize("beta_req", ["write", "add", "null"])
@pytest.mark.parametrize("data_req", ["add", "null"])
def test_requests_of_parameters(hybridize, gamma_req, beta_req, data_req):
    d = draw((6, 3, 4), seed=12)
    layer = layer_for(d, hybridize, use_batch_stats=True)
    layer.gamma.grad_req, layer.beta.grad_req = gamma_req, beta_req
    x = nd(d.x)
    x.attach_grad(data_req)
    got = {"dx": x.grad}
    for key, parameter in (("dgamma", layer.gamma), ("dbeta", layer.beta)):
        if parameter.grad_req != "null":
            got[key] = parameter.grad()
    for gradient in got.values():
        gradient[:] = 0.5
    for _ in range(2):
        with autograd.record(train_mode=False):
            y = layer(x)
        if (gamma_req, beta_req, data_req) != ("null", "null", "null"):
            y.backward(nd(d.dy))
    mx.nd.waitall()
    want = right(d, False, eps=EPS, fix_gamma=False, use_batch_stats=True)
    check(y, want.output, what="output")
    requests = {"dx": data_req, "dgamma": gamma_req, "dbeta": beta_req}
    for key, gradient in got.items():
        one = getattr(want, key)
        total = {"write": one, "add": 0.5 + 2 * one, "null": 0.5 + 0 * one}[requests[key]]
        check(gradient, total, what=key)


@hybrid
def test_request_that_changes_between_calls(hybridize):
    d = draw((6, 3, 4), seed=13)
    layer = layer_for(d, hybridize)
    x = arrays(d).x
    for request in ("write", "null", "add", "write"):
        layer.gamma.grad_req = request
        want = right(d, True, eps=EPS, fix_gamma=False)
        with autograd.record():
            y = layer(x)
        y.backward(nd(d.dy))
        check(x.grad, want.dx, what="gradient of data")
        check(layer.beta.grad(), want.dbeta, what="gradient of beta")
        if request != "null":
            check(layer.gamma.grad(), want.dgamma, what="gradient of gamma")
        check_statistics(layer, want)
        continued(d, want)


class Twice(mx.gluon.HybridBlock):
    """One layer applied to x, and to three times what that gives plus x."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):
        return self.norm(self.norm(x) * 3 + x)


@hybrid
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.mxnet_operators
def test_layer_used_twice_in_a_network(hybridize, is_train):
    d = draw((6, 3, 4), seed=14)
    layer = layer_for(d, momentum=0.75)
    net = run_as(Twice(layer), hybridize)
    x = arrays(d).x
    options = {"eps": EPS, "fix_gamma": False}
    mean, var = d.moving_mean, d.moving_var
    for _ in range(3):
        with autograd.record(train_mode=is_train):
            y = net(x)
        y.backward(nd(d.dy))
        rest = {**options, "momentum": 0.75, "is_train": is_train}
        first = reference.forward(d.x, d.gamma, d.beta, mean, var, **rest)
        z = first.output * 3 + d.x
        mean, var = first.moving_mean, first.moving_var
        second = reference.forward(z, d.gamma, d.beta, mean, var, **rest)
        mean, var = second.moving_mean, second.moving_var
        dz, dgamma2, dbeta2 = reference.backward(d.dy, z, d.gamma, second, fix_gamma=False)
        dx, dgamma1, dbeta1 = reference.backward(3 * dz, d.x, d.gamma, first, fix_gamma=False)
        mx.nd.waitall()
        # z carries the rounding of the first output and of the sum.
        check(y, second.output, 8, what="output")
        check(x.grad, dx + dz, 8, what="gradient of data")
        check(layer.gamma.grad(), dgamma1 + dgamma2, 8, what="gradient of gamma")
        check(layer.beta.grad(), dbeta1 + dbeta2, 8, what="gradient of beta")
        check(layer.running_mean.data(), mean, what="running mean")
        check(layer.running_var.data(), var, what="running variance")


class Both(mx.gluon.HybridBlock):
    """The sum of two equal calls of one layer."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):
        return self.norm(x) + self.norm(x)


@hybrid
@pytest.mark.mxnet_operators
def test_equal_calls_are_not_merged(hybridize):
    d = draw((6, 3, 4), seed=27)
    layer = layer_for(d)
    net = run_as(Both(layer), hybridize)
    x = arrays(d).x
    with autograd.record():
        y = net(x)
    y.backward(nd(d.dy))
    want = right(d, True, eps=EPS, fix_gamma=False)
    check(y, 2 * want.output, what="output")
    check(x.grad, 2 * want.dx, what="gradient of data")
    check(layer.gamma.grad(), 2 * want.dgamma, what="gradient of gamma")
    continued(d, want)
    check_statistics(layer, right(d, True))  # a second step


@hybrid
def test_two_recorded_calls_are_differentiated_one_after_the_other(hybridize):
    first, second = draw((6, 3, 4), seed=15), draw((6, 3, 4), seed=16)
    layer = layer_for(first)
    net = run_as(chain(layer), hybridize)
    x1, x2 = arrays(first).x, arrays(second).x
    with autograd.record():
        y1 = net(x1)
        y2 = net(x2)
    y1.backward(nd(first.dy))
    want = right(first, True, eps=EPS, fix_gamma=False)
    check_gradients(x1, layer, want)
    y2.backward(nd(second.dy))
    second.gamma, second.beta = first.gamma, first.beta
    continued(second, want)
    want = right(second, True, eps=EPS, fix_gamma=False)
    check_gradients(x2, layer, want)
    check_statistics(layer, want)


@hybrid
@pytest.mark.parametrize("called", [False, True], ids=["new", "called"])
def test_deep_copy_is_a_layer_of_its_own(hybridize, called):
    d = draw((6, 3, 4), seed=17)
    layer = layer_for(d, hybridize)
    x = arrays(d).x
    if called:
        layer(x)
        layer.hybridize(False)  # MXNet cannot copy a cached graph
    twin = run_as(copy.deepcopy(layer), hybridize)
    run_as(layer, hybridize)
    for parameter in (twin.gamma, twin.beta):  # MXNet's copies of arrays lack a gradient
        parameter.grad_req = "null"
        parameter.grad_req = "write"
    twin.use_global_stats = True
    assert not layer.use_global_stats
    for each, use_global_stats in ((layer, False), (twin, True), (layer, False)):
        want = right(d, True, eps=EPS, fix_gamma=False, use_global_stats=use_global_stats)
        with autograd.record():
            y = each(x)
        y.backward(nd(d.dy))
        check(y, want.output, what="output")
        check_gradients(x, each, want)
        check_statistics(each, want)
        fill(each, d)
    with autograd.record():  # the copy's statistics are outside the graph too
        ys = [twin(x), twin(x)]
    for y in ys:
        y.backward()


@hybrid
@pytest.mark.parametrize("kind", [mxbn.gluon.BatchNorm, nn.BatchNorm], ids=["mxbn", "built-in"])
def test_layers_that_share_parameters(hybridize, kind):
    first, second = draw((6, 3, 4), seed=18), draw((6, 3, 4), seed=19)
    owner = layer_for(first, kind=kind)
    layer = run_as(mxbn.gluon.BatchNorm(params=owner.params), hybridize)
    other = run_as(mxbn.gluon.BatchNorm(params=owner.params, in_channels=3), hybridize)
    assert layer.gamma is other.gamma is owner.gamma
    x1, x2 = arrays(first).x, arrays(second).x
    with autograd.record():
        y1 = layer(x1)
        y2 = other(x2)
    want = right(first, True, eps=EPS, fix_gamma=False)
    check(y1, want.output, what="output")
    y1.backward(nd(first.dy))
    check_gradients(x1, layer, want)
    y2.backward(nd(second.dy))
    second.gamma, second.beta = first.gamma, first.beta
    continued(second, want)
    want = right(second, True, eps=EPS, fix_gamma=False)
    check(y2, want.output, what="output")
    check_gradients(x2, other, want)
    check_statistics(owner, want)


def test_running_statistics_can_be_written_in_place():
    d = draw((6, 3, 4), seed=20)
    layer = layer_for(d)
    layer.running_mean.data()[:] = d.moving_mean = np.array([1.0, 2, 3])
    layer.running_var.data()[:] = d.moving_var = np.array([4.0, 5, 6])
    check(layer(nd(d.x)), right(d, False, eps=EPS, fix_gamma=False).output)


# -------------------------------------------------------------------------- contexts, NumPy mode


@hybrid
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.mxnet_operators
def test_several_contexts_with_trainer(hybridize, deferred):
    contexts = [CONTEXT, OTHER_CONTEXT]
    layer = run_as(mxbn.gluon.BatchNorm(in_channels=0 if deferred else 3), hybridize)
    layer.initialize(ctx=contexts)
    trainer = mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.25})
    gamma, beta = np.ones(3), np.zeros(3)
    statistics = [(np.zeros(3), np.ones(3))] * 2
    for i in range(3):
        d = draw((8, 3, 5), seed=21 + i, mean=i)
        xs, dys = (mx.gluon.utils.split_and_load(nd(v), contexts) for v in (d.x, d.dy))
        for x in xs:
            x.attach_grad()
        with autograd.record():
            ys = [layer(x) for x in xs]
        autograd.backward(ys, dys)
        mx.nd.waitall()
        gradients = []
        for j, context in enumerate(contexts):
            half = draw((4, 3, 5))
            half.x, half.dy = (np.split(v, 2)[j] for v in (d.x, d.dy))
            half.gamma, half.beta = gamma, beta
            half.moving_mean, half.moving_var = statistics[j]
            want = right(half, True, eps=EPS, fix_gamma=False)
            assert ys[j].context == context
            check(ys[j], want.output, what="output")
            check(xs[j].grad, want.dx, what="gradient of data")
            check(layer.running_mean.data(context), want.moving_mean, what="running mean")
            check(layer.running_var.data(context), want.moving_var, what="running variance")
            statistics[j] = want.moving_mean, want.moving_var
            gradients.append((want.dgamma, want.dbeta))
        trainer.step(8)
        if i == 0:
            # Trainer hands the parameters of the first context, statistics included, to all
            # others when it starts, which is in its first step.
            statistics[1] = statistics[0]
        gamma, beta = (
            old - 0.25 / 8 * (one + other) for old, one, other in zip((gamma, beta), *gradients)
        )
        for context in contexts:
            check(layer.gamma.data(context), gamma, what="gamma")
            check(layer.beta.data(context), beta, what="beta")


@pytest.fixture(params=["scopes", "set_np"])
def numpy_mode(request):
    if request.param == "scopes":
        with mx.util.np_shape(True), mx.util.np_array(True):
            yield
    else:
        mx.npx.set_np()
        try:
            yield
        finally:
            mx.npx.reset_np()


@hybrid
@modes
@pytest.mark.parametrize("nested", [False, True], ids=["layer", "network"])
def test_numpy_mode(numpy_mode, hybridize, mode, nested):
    is_train, use_global_stats, use_batch_stats = mode
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    d = draw((6, 3, 4), seed=24)
    layer = mxbn.gluon.BatchNorm(**flags)
    net = run_as(chain(layer) if nested else layer, hybridize)
    net.initialize()
    x, dy = (mx.np.array(v, dtype="float32") for v in (d.x, d.dy))
    net(x)  # initialises the parameters
    for key in PARAMETERS:
        values = getattr(d, key.replace("running", "moving"))
        getattr(layer, key).set_data(mx.np.array(values, dtype="float32"))
    mx.nd.waitall()
    x.attach_grad()
    with autograd.record(train_mode=is_train):
        y = net(x)
    y.backward(dy)
    assert isinstance(y, mx.np.ndarray)
    want = right(d, is_train, eps=EPS, fix_gamma=False, **flags)
    check(y, want.output, what="output")
    check_gradients(x, layer, want)
    check_statistics(layer, want)


@hybrid
def test_numpy_mode_flags_and_empty_batch(numpy_mode, hybridize):
    d = draw((6, 3, 4), seed=25)
    layer = mxbn.gluon.BatchNorm(use_global_stats=True)
    net = run_as(chain(layer), hybridize)
    net.initialize()
    x = mx.np.array(d.x, dtype="float32")
    d.gamma, d.beta = np.ones(3), np.zeros(3)
    d.moving_mean, d.moving_var = np.zeros(3), np.ones(3)
    for use_global_stats in (True, False):
        layer.use_global_stats = use_global_stats
        want = right(d, True, eps=EPS, fix_gamma=False, use_global_stats=use_global_stats)
        with autograd.train_mode():
            check(net(x), want.output, what="output")
            assert net(mx.np.zeros((0, 3, 4))).shape == (0, 3, 4)
        check_statistics(layer, want)
