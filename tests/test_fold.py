"""mxbn.tools.fold and ``python -m mxbn fold``, against float64 NumPy and the unfolded networks."""

import argparse
import itertools
import json
import os
import re
import textwrap

import mxnet as mx
import numpy as np
import pytest
from helpers import DTYPES, check, draw, nd, right, rounded, run_script, same_bits

import mxbn
from mxbn import reference
from mxbn.commands import fold as command
from mxbn.tools import fold_graph
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.fold import fold
from mxbn.tools.graph import Graph

pytestmark = pytest.mark.cpu  # the outputs are compared on the CPU, whatever the context

EPS = 1e-3
KINDS = {"mxbn": mxbn.sym.BatchNorm, "built-in": mx.sym.BatchNorm}
LAYOUTS = {
    "NCW": (2, 4, 7),
    "NCHW": (2, 4, 6, 5),
    "NCDHW": (2, 4, 3, 4, 3),
    "NHWC": (2, 6, 5, 4),
    "NDHWC": (2, 3, 4, 3, 4),
}


def parameters(symbol, dtype="float32", seed=0, **shapes):
    """Random values for everything but the inputs, which `shapes` names."""
    rs = np.random.RandomState(seed)
    found, _, states = symbol.infer_shape(**shapes)
    types = dict(zip(symbol.list_arguments(), symbol.infer_type_partial(data=dtype)[0]))
    wide = "float64" if dtype == "float64" else "float32"

    def draw(name, shape):
        if name.endswith("var") or name.endswith("gamma"):
            return rs.uniform(0.5, 2, shape)
        return rs.randn(*shape) * (2 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 1)

    arguments = {
        name: nd(draw(name, shape), types[name] or wide)
        for name, shape in zip(symbol.list_arguments(), found)
        if name not in shapes and not name.endswith("label")
    }
    auxiliary = {
        name: nd(draw(name, shape), wide)
        for name, shape in zip(symbol.list_auxiliary_states(), states)
    }
    return Checkpoint(symbol, arguments, auxiliary)


def fold_files(arguments):
    """Run the command."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["fold", *arguments])
    return options.run(options)


def values(model):
    return {n: a.asnumpy() for n, a in {**model.arg_params, **model.aux_params}.items()}


def outputs(model, data):
    """What MXNet's executor gives in inference; oneDNN's fusion acts in it."""
    executor = model.symbol.simple_bind(mx.cpu(), "null", {"data": data.dtype}, data=data.shape)
    executor.copy_params_from(model.arg_params, model.aux_params)
    return [each.asnumpy() for each in executor.forward(is_train=False, data=nd(data, data.dtype))]


def check_same(folded, model, shape, seed=3):
    """Compare outputs on other data than `fold` took, with its bound, which must be small."""
    x = np.random.RandomState(seed).randn(*shape).astype("float32")
    for found, new, old in zip(folded.differences, outputs(folded.model, x), outputs(model, x)):
        assert np.abs(new - old).max() <= 2 * found.bound < 1e-4 * np.abs(old).max()


def operators(symbol):
    return [node.op for _, node in Graph.from_symbol(symbol).walk() if node.op != "null"]


def linear(op, x, weight, bias, layout, groups):
    """A layer in float64 NumPy, with stride 1 and without padding."""
    if op == "FullyConnected":
        return x @ weight.T + bias
    last = layout.endswith("C")
    if last:
        x, weight = np.moveaxis(x, -1, 1), np.moveaxis(weight, -1, 1)
    parts = [
        (convolve if op == "Convolution" else spread)(each, w)
        for each, w in zip(np.split(x, groups, axis=1), np.split(weight, groups))
    ]
    y = np.concatenate(parts, axis=1) + np.reshape(bias, (-1,) + (1,) * (x.ndim - 2))
    return np.moveaxis(y, 1, -1) if last else y


def convolve(x, weight):
    size = np.array(x.shape[2:]) - weight.shape[2:] + 1
    y = np.zeros((len(x), len(weight), *size))
    for place in np.ndindex(*weight.shape[2:]):
        part = x[(..., *(slice(p, p + n) for p, n in zip(place, size)))]
        y += np.einsum("oi,ni...->no...", weight[(..., *place)], part)
    return y


def spread(x, weight):
    size = x.shape[2:]
    y = np.zeros((len(x), weight.shape[1], *(np.array(size) + weight.shape[2:] - 1)))
    for place in np.ndindex(*weight.shape[2:]):
        where = (..., *(slice(p, p + n) for p, n in zip(place, size)))
        y[where] += np.einsum("io,ni...->no...", weight[(..., *place)], x)
    return y


def check_kind(op, shape, axis, *, dtype="float32", kind="mxbn", fix_gamma=False, **attributes):
    """Fold one layer, and compare what its new parameters give with NumPy."""
    symbol = getattr(mx.sym, op)(mx.sym.var("data"), name="linear", **attributes)
    symbol = KINDS[kind](symbol, eps=EPS, axis=axis, fix_gamma=fix_gamma, name="bn")
    model = parameters(symbol, dtype, data=shape)
    folded = fold(model, shapes={"data": shape})
    assert [each.into for each in folded.layers] == ["linear"]
    assert operators(folded.model.symbol) == [op]
    assert set(folded.model.arg_params) == {"linear_weight", "linear_bias"}
    assert folded.model.aux_params == {}
    assert {a.dtype for a in folded.model.arg_params.values()} == {np.dtype(dtype).type}
    old, new = values(model), values(folded.model)
    x = np.random.RandomState(1).randn(*shape)
    if attributes.get("flatten"):
        x = x.reshape(len(x), -1)
    how = attributes.get("layout"), attributes.get("num_group", 1)
    before = linear(op, x, old["linear_weight"], old.get("linear_bias", np.zeros(6)), *how)
    right = reference.forward(
        before, *(old[f"bn_{name}"] for name in ("gamma", "beta", "moving_mean", "moving_var")),
        is_train=False, axis=axis, fix_gamma=fix_gamma,
        eps=EPS,
    ).output  # fmt: skip
    found = linear(op, x, new["linear_weight"], new["linear_bias"], *how)
    check(found.astype(dtype), right)


@pytest.mark.parametrize("op", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_of_every_layout(op, layout, groups):
    shape = LAYOUTS[layout]
    for number, (no_bias, fix_gamma) in enumerate(itertools.product((False, True), repeat=2)):
        check_kind(
            op, shape, layout.index("C") - number % 2 * len(shape), layout=layout,
            kernel=(2, 3, 1)[: len(shape) - 2], num_filter=6, num_group=groups, no_bias=no_bias,
            kind=("mxbn", "built-in")[(number + groups) % 2], fix_gamma=fix_gamma,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_types(kind, dtype):
    convolution = {"kernel": (2, 2), "num_filter": 6, "layout": "NCHW"}
    check_kind("Convolution", (2, 4, 6, 5), 1, dtype=dtype, kind=kind, **convolution)
    check_kind("Deconvolution", (2, 4, 6, 5), 1, dtype=dtype, kind=kind, **convolution)
    check_kind("FullyConnected", (3, 4), 1, dtype=dtype, kind=kind, num_hidden=6)


@pytest.mark.parametrize(("flatten", "axis"), [(True, 1), (True, -1), (False, 2), (False, -1)])
@pytest.mark.parametrize("no_bias", [False, True])
def test_fully_connected(flatten, axis, no_bias):
    shape = (3, 4, 5)
    check_kind("FullyConnected", shape, axis, num_hidden=6, flatten=flatten, no_bias=no_bias)


def test_layouts_may_go_unsaid():
    for op, shape in itertools.product(("Convolution", "Deconvolution"), [(2, 4, 7), (2, 4, 5, 5)]):
        symbol = getattr(mx.sym, op)(
            mx.sym.var("data"), kernel=(2,) * (len(shape) - 2), num_filter=3
        )
        model = parameters(mxbn.sym.BatchNorm(symbol), data=shape)
        assert fold(model, shapes={"data": shape}).layers[0].into is not None


@pytest.mark.parametrize("kind", KINDS)
def test_default_eps(kind):
    y = KINDS[kind](mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), name="bn")
    model = parameters(y, "float64", data=(4, 3))
    model.aux_params["bn_moving_var"][:] = 1e-4
    (found,) = fold(model, shapes={"data": (4, 3)}).differences
    assert found.relative < 1e-14


def test_names_that_are_taken():
    y = bn(conv(no_bias=True), fix_gamma=False) + mx.sym.var("conv_bias", shape=(2, 4, 5, 5))
    model = parameters(y, data=(2, 4, 5, 5))
    folded = fold(model, shapes={"data": (2, 4, 5, 5)})
    assert set(folded.model.arg_params) == {"conv_weight", "conv_bias_", "conv_bias"}
    check_same(folded, model, (2, 4, 5, 5))


def test_outputs_of_the_whole_are_those_of_the_unfolded():
    x = np.random.RandomState(2).randn(4, 3, 12, 12).astype("float32")
    for kind, seed in itertools.product(KINDS, range(3)):
        y = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=8, pad=(1, 1))
        y = mx.sym.relu(KINDS[kind](y, fix_gamma=False))
        y = mx.sym.Deconvolution(y, kernel=(4, 4), num_filter=6, stride=(2, 2), pad=(1, 1))
        y = mx.sym.Pooling(mx.sym.relu(KINDS[kind](y)), kernel=(2, 2), stride=(2, 2))
        y = KINDS[kind](mx.sym.FullyConnected(y, num_hidden=5), name="last")
        model = parameters(mx.sym.SoftmaxOutput(y, name="softmax"), seed=seed, data=x.shape)
        folded = fold(model, {"data": x})
        found, logits = folded.differences
        (old,), (new,) = outputs(model, x), outputs(folded.model, x)
        assert len([each for each in folded.layers if each.into]) == 3
        assert (found.output, logits.output) == ("softmax_output", "last_output")
        assert found.bound < 1e-3 * np.abs(old).max()
        assert np.abs(old - new).max() <= found.bound
        assert found.absolute == pytest.approx(found.relative * np.abs(old).max())


def test_a_saturated_softmax_hides_nothing(monkeypatch):
    y = bn(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), fix_gamma=False) * 1000
    model = parameters(mx.sym.softmax(y), data=(1, 4))
    right = fold(model, shapes={"data": (1, 4)}).differences[0]
    assert right.absolute == 0
    per_weight = fold_graph._per_weight
    monkeypatch.setattr(fold_graph, "_per_weight", lambda *given: per_weight(*given) * 1.001)
    with pytest.raises(ValueError, match=r"_mulscalar\d+_output differs by"):
        fold(model, shapes={"data": (1, 4)})


def test_batch_norms_behind_each_other():
    y = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    y = mxbn.sym.BatchNorm(mx.sym.BatchNorm(y, fix_gamma=False, name="a"), name="b")
    model = parameters(y, data=(5, 3))
    folded = fold(model, shapes={"data": (5, 3)})
    assert [each.into for each in folded.layers] == ["fc", "fc"]
    assert operators(folded.model.symbol) == ["FullyConnected"]


def test_batch_norm_with_relu():
    y = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    model = parameters(mx.sym.contrib.BatchNormWithReLU(y, name="bn"), data=(2, 3, 6, 6))
    folded = fold(model, shapes={"data": (2, 3, 6, 6)})
    assert operators(folded.model.symbol) == ["Convolution", "Activation"]
    assert folded.layers[0][2:] == ("conv", None, "Activation")


def test_shared_parameters_of_batch_norm_are_no_obstacle():
    shared = [mx.sym.var(n) for n in ("gamma", "beta", "moving_mean", "moving_var")]
    y = mx.sym.var("data")
    for number in range(2):
        y = mx.sym.FullyConnected(y, num_hidden=3, name=f"fc{number}")
        y = mxbn.sym.BatchNorm(y, *shared, fix_gamma=False, name=f"bn{number}")
    y = mxbn.sym.BatchNorm(mx.sym.tanh(y), *shared, name="last")
    model = parameters(y, data=(4, 3))
    folded = fold(model, shapes={"data": (4, 3)})
    assert [each.into for each in folded.layers] == ["fc0", "fc1", None]
    check_same(folded, model, (4, 3))


def test_parameters_shared_by_layers_that_stay():
    gamma, var, x = mx.sym.var("gamma"), mx.sym.var("moving_var"), mx.sym.var("data")
    y = mx.sym.tanh(bn(x, gamma, None, None, var, eps=0))
    y = bn(y, gamma, None, None, var, fix_gamma=False, name="other") * 100
    model = parameters(y, data=(4, 3))
    model.aux_params["moving_var"][1] = 0
    folded = fold(model, shapes={"data": (4, 3)})
    check_same(folded, model, (4, 3))
    for name in ("gamma", "moving_var"):
        assert same_bits(values(folded.model)[name], values(model)[name])


def conv(data=None, **attributes):
    data = mx.sym.var("data") if data is None else data
    return mx.sym.Convolution(
        data, kernel=(3, 3), num_filter=4, pad=(1, 1), **{"name": "conv", **attributes}
    )


def bn(data, *inputs, **attributes):
    return mxbn.sym.BatchNorm(data, *inputs, **{"name": "bn", **attributes})


def stays():
    """Models whose BatchNorm has to stay, and why."""
    c, x = conv(), mx.sym.var("data")
    yield "it comes first, after data", bn(x)
    yield "it comes after relu", bn(mx.sym.relu(c, name="relu"))
    yield "it comes after joined (Concat)", bn(mx.sym.concat(c, c, name="joined"))
    yield "it comes after pool (Pooling)", bn(mx.sym.Pooling(c, kernel=(2, 2), name="pool"))
    yield (
        "it comes after cast (Cast)",
        bn(mx.sym.cast(mx.sym.cast(c, "float64"), "float32", name="cast")),
    )
    yield "it comes after relu", conv(mx.sym.relu(bn(mx.sym.relu(x, name="relu"))))
    yield "conv is used elsewhere too", bn(c) + c
    yield "conv is an output too", mx.sym.Group([bn(c), c])
    yield "the weight of conv is computed", bn(conv(weight=mx.sym.var("w", shape=(4, 4, 3, 3)) * 2))
    yield "the bias of conv is computed", bn(conv(bias=mx.sym.var("b", shape=(4,)) * 2))
    yield "it normalizes axis 2, but the channels of conv are on axis 1", bn(c, axis=2)
    yield "it normalizes axis -1, but the channels of conv are on axis 1", bn(c, axis=-1)
    yield "it normalizes with the statistics of the batch", bn(c, use_batch_stats=True)
    yield "its mean or variance is used too", mx.sym.Group(list(bn(c, output_mean_var=True)))
    yield "it comes after drop (Dropout)", bn(mx.sym.Dropout(c, name="drop"), axis=2)
    yield (
        "its gamma is computed",
        bn(c, mx.sym.square(mx.sym.var("g", shape=(4,))), fix_gamma=False),
    )
    yield "its beta is computed", bn(c, beta=mx.sym.square(mx.sym.var("g", shape=(4,))))


@pytest.mark.parametrize(
    ("reason", "symbol"), [pytest.param(*each, id=each[0]) for each in stays()]
)
def test_what_stays_gives_the_same_without_mxbn(reason, symbol):
    shape = (2, 4, 4, 4)
    model = parameters(symbol, data=shape)
    folded = fold(model, shapes={"data": shape})
    (fate,) = folded.layers
    assert fate.into is None
    assert fate.reason.startswith(reason)
    assert "mxbn_BatchNorm" not in operators(folded.model.symbol)
    check_same(folded, model, shape)


@pytest.mark.parametrize("role", ["weight", "bias"])
def test_layer_whose_parameters_are_used_elsewhere(role):
    own = {role: mx.sym.var("shared")}
    symbol = mx.sym.concat(bn(conv(name="a", **own)), conv(name="b", **own))
    model = parameters(symbol, data=(2, 4, 4, 4))
    folded = fold(model, shapes={"data": (2, 4, 4, 4)})
    assert folded.layers[0].reason == f"the {role} of a is used elsewhere too"
    # MXNet's executors cannot take such a network: what `fold` compared has to do.
    assert folded.differences[0].absolute <= folded.differences[0].bound < 1e-4
    assert same_bits(folded.model.arg_params["shared"], values(model)["shared"])


def test_layers_of_mxnet_stay_as_they_are():
    for symbol in (
        mx.sym.BatchNorm(mx.sym.relu(mx.sym.var("data")), name="bn"),
        mx.sym.contrib.SyncBatchNorm(mx.sym.relu(mx.sym.var("data")), key="k", name="bn"),
        mx.sym.BatchNorm_v1(mx.sym.relu(mx.sym.var("data")), name="bn"),
    ):
        model = parameters(symbol, data=(2, 4, 3, 3))
        folded = fold(model, shapes={"data": (2, 4, 3, 3)})
        assert folded.layers[0].result == operators(symbol)[-1]
        assert folded.model.symbol.tojson() == symbol.tojson()
        assert all(same_bits(a, values(model)[n]) for n, a in values(folded.model).items())
        assert folded.differences[0].absolute == 0


def outputs_used_twice():
    """Networks that MXNet's executors would compute wrongly if BatchNorm were just left out."""

    def relu(data):
        return mx.sym.Activation(data, act_type="relu")

    data = relu(mx.sym.var("data"))
    y = bn(conv(data), fix_gamma=False)
    other = bn(conv(data, name="other"), name="other_bn", fix_gamma=False)
    yield "ReLU and sum", relu(y) + y
    yield "sum and ReLU", y + relu(y)
    yield "ReLU and output", mx.sym.Group([relu(y), y])
    yield "clip and sum", mx.sym.clip(y, 0, 6) + y
    yield "leaky ReLU and sum", mx.sym.LeakyReLU(y, act_type="gelu") + y
    yield "sum and output", mx.sym.Group([y + other, y])
    yield "residual", relu(bn(conv(relu(y), name="next"), name="next_bn") + y)
    yield "BatchNorm and sum", bn(y, name="second") + y
    yield "Dropout, BatchNorm", bn(mx.sym.Dropout(y), axis=2, name="second")
    yield "Dropout, ReLU and sum", relu(mx.sym.Dropout(y)) + y


@pytest.mark.parametrize(
    "symbol", [pytest.param(symbol, id=what) for what, symbol in outputs_used_twice()]
)
def test_executors_fuse_nothing_wrongly(symbol):
    model = parameters(symbol, data=(2, 4, 6, 6))
    folded = fold(model, shapes={"data": (2, 4, 6, 6)})
    assert folded.layers[0].into == "conv"
    check_same(folded, model, (2, 4, 6, 6))
    if symbol.list_outputs()[-1] == "bn_output":
        assert folded.model.symbol.list_outputs()[-1] == "conv_output"


def test_convolution_fused_by_onednn():
    symbol = mx.sym.BatchNorm(mx.sym.Activation(conv(), act_type="relu"), name="bn")
    model = parameters(symbol, data=(2, 3, 4, 4))
    fused = Checkpoint(symbol.get_backend_symbol("MKLDNN"), *model[1:])
    (fate,) = fold(fused, shapes={"data": (2, 3, 4, 4)}).layers
    assert re.fullmatch(r"it comes after \S+ \(_sg_mkldnn_conv\)", fate.reason)


def test_control_flow():
    inputs = [mx.sym.var(n) for n in ("gamma", "beta", "moving_mean", "moving_var")]

    def body(x, state):
        return mxbn.sym.BatchNorm(conv(x), *inputs, name="bn"), state

    result, _ = mx.sym.contrib.foreach(body, mx.sym.var("data"), mx.sym.var("state"))
    result = mx.sym.broadcast_add(result, mx.sym.reshape(inputs[0], shape=(1, 1, 4, 1, 1)))
    rs = np.random.RandomState(0)
    shapes = {
        "conv_weight": (4, 2, 3, 3),
        "conv_bias": (4,),
    }
    arrays = {n: nd(rs.uniform(0.5, 2, shapes.get(n, (4,)))) for n in result.list_arguments()[2:]}
    folded = fold((result, arrays, {}), shapes={"data": (3, 2, 2, 5, 5), "state": (1,)})
    (fate,) = folded.layers
    assert "mxbn_BatchNorm" not in operators(folded.model.symbol)
    assert fate == ("bn", "mxbn_BatchNorm", None, "it is inside of another operator", "BatchNorm")

    def refused(x, state):
        return mxbn.sym.BatchNorm(x, *inputs, use_batch_stats=True, name="bn"), state

    result, _ = mx.sym.contrib.foreach(refused, mx.sym.var("data"), mx.sym.var("state"))
    arrays = {n: nd(np.ones(4)) for n in result.list_arguments()[2:]}
    with pytest.raises(ValueError, match="bn normalizes with the statistics of the batch inside"):
        fold((result, arrays, {}), shapes={"data": (3, 2, 4, 5, 5), "state": (1,)})


MEANS = {"float16": 300, "float32": 1e5, "float64": 10}  # those that the reference stands
REST = {
    "moving": {},
    "moving, and they step": {"use_global_stats": True, "step_global_stats": True},
    "fix_gamma": {"fix_gamma": True},
    "no eps, a variance of 0": {"eps": 0},
    "no eps, fix_gamma": {"eps": 0, "fix_gamma": True},
    "batch": {"use_batch_stats": True},
    "batch, fix_gamma, no eps": {"use_batch_stats": True, "eps": 0, "fix_gamma": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", REST)
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 5, 3, 4), 1), ((6, 5), -1), ((5,), 0), ((2, 3, 5), 2)]
)
def test_what_stays_is_as_exact_as_mxbn(mode, dtype, shape, axis):
    attributes = {"fix_gamma": False, **REST[mode]}
    std = 300 if dtype == "float16" else 3  # the variance is out of float16's range
    d = draw(shape, axis, dtype, mean=MEANS[dtype], std=std)
    d.moving_var *= std**2
    d.moving_mean = rounded(d.moving_mean + d.x.mean(), d.param)
    if "eps" in attributes:
        d.moving_var[1] = 0
    inputs = [mx.sym.var(n) for n in ("data", "gamma", "beta", "moving_mean", "moving_var")]
    symbol = mxbn.sym.BatchNorm(*inputs, output_mean_var=True, axis=axis, **attributes)
    held, states = (
        {name: nd(getattr(d, name), d.param) for name in names}
        for names in (("gamma", "beta"), ("moving_mean", "moving_var"))
    )
    x = d.x.astype(dtype)
    folded = fold((mx.sym.Group(list(symbol)), held, states), {"data": x})
    want = right(d, False, **attributes)
    output, mean, inv_std = outputs(folded.model, x)
    scale = np.abs(want.output).max()
    check(output, want.output, scale=scale)
    check(mean, want.mean)
    check(inv_std, want.inv_std)
    assert output.dtype == dtype
    assert mean.dtype == inv_std.dtype == d.param
    assert same_bits(states["moving_var"], d.moving_var.astype(d.param))


def test_only_the_mean_is_used():
    model = parameters(bn(conv(), output_mean_var=True)[1], data=(2, 3, 4, 4))
    folded = fold(model, shapes={"data": (2, 3, 4, 4)})
    assert operators(folded.model.symbol) == []
    assert same_bits(folded.model.arg_params["bn_mean"], values(model)["bn_moving_mean"])


def test_float16_keeps_its_range():
    scale = [1e6, 1e-9]
    for big in scale:
        y = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
        model = parameters(bn(y, fix_gamma=False), "float16", data=(2, 4))
        model.arg_params["bn_gamma"][:] *= big
        folded = fold(model, shapes={"data": (2, 4)})
        assert folded.layers[0].reason == "fc would get values out of the range of float16"


@pytest.mark.parametrize("var", [0.0, -1e-5, np.nan, np.inf])
def test_variances_that_cannot_be_divided_by(var):
    model = parameters(mx.sym.BatchNorm(conv(), eps=0, name="bn"), data=(2, 3, 4, 4))
    model.aux_params["bn_moving_var"][1] = var
    folded = fold(model, shapes={"data": (2, 3, 4, 4)}, force=True)
    assert folded.layers[0].reason == "it has channels where moving_var + eps is not positive"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("var", [1, np.nan, 1, 1], "bn has moving statistics that are not finite"),
        ("mean", [np.inf, 0, 0, 0], "bn has moving statistics that are not finite"),
        ("var", [1, 1, -1e-9, 1], "bn has a negative moving variance"),
        (None, None, r"bn has moving statistics that were never updated \(mean 0, variance 1\)"),
    ],
)
def test_unhealthy_statistics_are_refused(name, values, message):
    model = parameters(bn(conv()), data=(2, 3, 4, 4))
    if name is None:
        model.aux_params["bn_moving_mean"][:] = 0
        model.aux_params["bn_moving_var"][:] = 1
    else:
        model.aux_params[f"bn_moving_{name}"][:] = nd(values)
    with pytest.raises(ValueError, match=message + r"; force folds it all the same \(--force\)"):
        fold(model, shapes={"data": (2, 3, 4, 4)})
    assert len(fold(model, shapes={"data": (2, 3, 4, 4)}, force=True).layers) == 1


def trained(kind, shape, classes=10):
    """ResNet-18 after a few steps, so that its statistics and parameters are its own."""
    mx.random.seed(0)
    np.random.seed(0)
    make = mx.gluon.model_zoo.vision.resnet18_v1
    if kind == "mxbn":
        with mxbn.replace_builtin():
            net = make(classes=classes, prefix="net_")
    else:
        net = make(classes=classes, prefix="net_")
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(3):
        data = mx.nd.random.normal(shape=shape)
        for context in (mx.cpu(0), mx.cpu(1)):  # the same data, for statistics that are the same
            x = data.as_in_context(context)
            with mx.autograd.record():
                loss = loss_of(net(x), mx.nd.arange(len(x), ctx=context))
            loss.backward()
        trainer.step(2 * len(x))
    mx.nd.waitall()
    return net


@pytest.fixture(scope="module", params=KINDS)
def resnet(request):
    return trained(request.param, (4, 3, 32, 32))


def snapshot(net):
    mx.nd.waitall()
    return {n: [a.asnumpy() for a in p.list_data()] for n, p in net.collect_params().items()}


def test_resnet_as_a_block(resnet):
    shape = (2, 3, 32, 32)
    kept = snapshot(resnet)
    folded = fold(resnet, shapes={"data": shape})
    assert isinstance(folded.model, mx.gluon.SymbolBlock)
    assert len(folded.layers) == 20
    assert all(each.into for each in folded.layers)
    held = folded.model.collect_params()
    assert {n.rsplit("_")[-1] for n in held} == {"weight", "bias"}
    assert {tuple(p.list_ctx()) for p in held.values()} == {(mx.cpu(0), mx.cpu(1))}
    assert {p.grad_req for p in held.values()} == {"null"}
    for context in (mx.cpu(0), mx.cpu(1)):
        x = mx.nd.random.normal(shape=shape, ctx=context)
        (found,) = folded.differences
        for _ in range(2):
            difference = np.abs(folded.model(x).asnumpy() - resnet(x).asnumpy()).max()
            assert difference <= found.bound < 1e-3 * np.abs(resnet(x).asnumpy()).max()
            folded.model.hybridize(static_alloc=True, static_shape=True)
    after = snapshot(resnet)
    assert all(same_bits(a, b) for n in kept for a, b in zip(kept[n], after[n]))


@pytest.fixture
def small(tmp_path):
    """A network of mxbn's layers that was exported, and its output for an input."""
    net = mx.gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(mx.gluon.nn.Conv2D(8, 3, use_bias=False), mxbn.gluon.BatchNorm())
        net.add(mx.gluon.nn.Activation("relu"), mx.gluon.nn.GlobalAvgPool2D())
        net.add(mx.gluon.nn.Dense(5), mxbn.gluon.BatchNorm(), mxbn.gluon.BatchNorm(scale=False))
    net.initialize()
    net.hybridize()
    x = mx.nd.random.normal(shape=(4, 3, 8, 8))
    with mx.autograd.record():
        net(x)
    right = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    return tmp_path, x, right


def test_every_way_to_give_a_model(small):
    folder, x, right = small
    files = str(folder / "net-symbol.json"), ["data"], str(folder / "net-0000.params")
    checkpoint = Checkpoint.load(str(folder / "net"), 0)
    module = mxbn.Module(checkpoint.symbol, label_names=None)
    module.bind([("data", x.shape)], for_training=False)
    module.set_params(checkpoint.arg_params, checkpoint.aux_params)
    imported = mx.gluon.SymbolBlock.imports(*files)
    found = [fold(each, {"data": x}).model for each in (checkpoint, tuple(checkpoint), imported)]
    found.append(fold(module).model)
    assert [type(each) for each in found] == [
        Checkpoint, Checkpoint, mx.gluon.SymbolBlock, Checkpoint,
    ]  # fmt: skip
    for each in found:
        block = isinstance(each, mx.gluon.SymbolBlock)
        output = each(x).asnumpy() if block else outputs(each, x.asnumpy())[0]
        check(output, right, units=20)
        held = each.collect_params() if block else {**each.arg_params, **each.aux_params}
        assert sorted(a.shape for a in held.values()) == [(5,), (5, 8), (8,), (8, 3, 3, 3)]


def test_the_result_needs_no_mxbn(small):
    folder, x, right = small
    fold(Checkpoint.load(str(folder / "net"), 0), {"data": x}).model.save(str(folder / "out"), 0)
    np.save(folder / "input.npy", x.asnumpy())
    script = """
        import os, sys, mxnet as mx, numpy as np
        os.chdir(FOLDER)
        net = mx.gluon.SymbolBlock.imports("out-symbol.json", ["data"], "out-0000.params")
        np.save("output.npy", net(mx.nd.array(np.load("input.npy"))).asnumpy())
        assert "mxbn" not in sys.modules
    """
    process = run_script(f"FOLDER = {str(folder)!r}\n" + textwrap.dedent(script))
    assert process.returncode == 0, process.stderr
    check(np.load(folder / "output.npy"), right, units=20)


def test_healthy_statistics_are_not_refused():
    model = parameters(bn(conv()), data=(2, 3, 4, 4))
    model.aux_params["bn_moving_var"][:] = 1
    fold(model, shapes={"data": (2, 3, 4, 4)})
    model = parameters(bn(conv(), use_batch_stats=True), data=(2, 3, 4, 4))
    model.aux_params["bn_moving_mean"][:] = 0
    model.aux_params["bn_moving_var"][:] = 1
    fold(model, shapes={"data": (2, 3, 4, 4)})


@pytest.mark.parametrize("fault", ["gamma", "beta", "mean", "inv_std"])
def test_a_wrong_fold_is_found_and_not_written(fault, model_on_disk, monkeypatch, capsys):
    place = ("gamma", "beta", "mean", "inv_std").index(fault)
    right = fold_graph.Folding.parameters

    def wrong(*arguments):
        found = right(*arguments)
        found[place] = found[place] * 1.001
        return found

    monkeypatch.setattr(fold_graph.Folding, "parameters", wrong)
    folder = model_on_disk
    with pytest.raises(ValueError, match=r"differs by \S+ after folding, and rounding explains"):
        fold_files([f"{folder}/net", f"{folder}/out", "--shape", "data=2,3,8,8"])
    assert sorted(os.listdir(folder)) == ["net-0000.params", "net-symbol.json"]


@pytest.fixture
def model_on_disk(tmp_path):
    y = mx.sym.relu(bn(conv(), name="bn0", fix_gamma=False))
    y = mx.sym.relu(bn(mx.sym.Pooling(y, kernel=(2, 2), name="pool"), name="bn1"))
    model = parameters(mx.sym.FullyConnected(y, num_hidden=3, name="fc"), data=(2, 3, 8, 8))
    model.save(str(tmp_path / "net"), 0)
    return tmp_path


def test_command(model_on_disk, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    net, out = f"{model_on_disk}/net", f"{model_on_disk}/out"
    np.savez(f"{model_on_disk}/data.npz", data=np.ones((1, 3, 8, 8)))
    assert fold_files([net, out, "--data", f"{model_on_disk}/data.npz"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"bn0 +conv\s*\n", text)
    assert re.search(r"bn1 +it comes after pool \(Pooling\) +BatchNorm", text)
    assert "1 of 2 layers folded" in text
    assert re.search(r"fc_output: differs by at most \S+, \S+ of its largest value", text)
    written = Checkpoint.load(out, 0)
    assert "mxbn_BatchNorm" not in operators(written.symbol)
    before = values(written)
    with pytest.raises(FileExistsError, match=f"{out}-symbol.json exists already"):
        fold_files([net, out, "--shape", "data=2,3,8,8"])
    assert fold_files([net, out, "--shape", "data=2,3,8,8", "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["into"] for each in report["layers"]] == ["conv", None]
    assert report["outputs"][0]["absolute"] <= report["outputs"][0]["bound"]
    assert report["files"] == [f"{out}-symbol.json", f"{out}-0000.params"]
    assert all(same_bits(a, before[n]) for n, a in values(Checkpoint.load(out, 0)).items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"data has no value; if it is an input, give its shape \(--shape data="),
        (["--shape", "data=2,5,8,8"], "the shapes do not fit: "),
        (["--shape", "x=2,3"], "the model has no input x, expected one of data"),
        (["--data", "text.npz"], "text.npz is damaged or no npz file"),
        (["--data", "cut.npz"], "cut.npz is damaged or no npz file"),
        (["--data", "array.npy"], "array.npy is damaged or no npz file"),
    ],
)
def test_wrong_options_are_named(options, message, model_on_disk, monkeypatch):
    monkeypatch.chdir(model_on_disk)
    (model_on_disk / "text.npz").write_text("no arrays")
    np.savez("whole.npz", data=np.ones((2, 3, 8, 8)))
    (model_on_disk / "cut.npz").write_bytes((model_on_disk / "whole.npz").read_bytes()[:-500])
    np.save("array.npy", np.ones(3))
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match=message):
        fold_files(["net", "out", *options])
    assert sorted(os.listdir()) == before


def test_force_is_needed(model_on_disk):
    net, out, shape = f"{model_on_disk}/net", f"{model_on_disk}/out", ["--shape", "data=2,3,8,8"]
    model = Checkpoint.load(net, 0)
    model.aux_params["bn0_moving_var"][0] = -1e-4
    model.save(net, 0, force=True)
    with pytest.raises(ValueError, match="bn0 has a negative moving variance"):
        fold_files([net, out, *shape])
    assert fold_files([net, out, *shape, "--force"]) == 0
    (model_on_disk / "net-0000.params").unlink()
    with pytest.raises(FileExistsError, match=f"{out}-symbol.json exists already"):
        fold_files([net, out, *shape])  # is told at once


def test_wrong_arguments_end_with_2(capsys):
    for shape in ("data", "data=", "=1,2", "data=1,a", "data=-1,3"):
        with pytest.raises(SystemExit, match="2"):
            fold_files(["net", "out", "--shape", shape])
        assert f"'{shape}' is no shape such as data=1,3,224,224" in capsys.readouterr().err


def test_the_result_has_arrays_of_its_own():
    model = parameters(
        mx.sym.FullyConnected(bn(conv()), num_hidden=3, name="fc"), data=(2, 4, 3, 3)
    )
    before = values(model)
    folded = fold(model, shapes={"data": (2, 4, 3, 3)})
    for array in folded.model.arg_params.values():
        array[:] = 0
    assert all(same_bits(array, before[name]) for name, array in values(model).items())


def test_other_things_are_no_models():
    with pytest.raises(TypeError, match="a model of type str was given"):
        fold("net")


def test_numpy_mode():
    code = """
        import mxnet as mx, numpy as np, mxbn

        mx.npx.set_np()
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Conv2D(4, 3, in_channels=3), mxbn.gluon.BatchNorm(in_channels=4))
        net.initialize()
        x = mx.np.array(np.random.RandomState(0).randn(8, 3, 6, 6), dtype="float32")
        with mx.autograd.record():
            net(x).backward()
        mx.nd.waitall()
        assert mxbn.inspect(net).healthy
        folded = mxbn.fold(net, shapes={"data": (2, 3, 6, 6)}).model
        assert np.abs(folded(x).asnumpy() - net(x).asnumpy()).max() < 1e-5
        print("well")
    """
    assert run_script(code).stdout == "well\n"
