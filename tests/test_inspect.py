"""What inspect says of layers, against what they do."""

import argparse
import json
import os
import re

import mxnet as mx
import numpy as np
import pytest
from helpers import nd
from mxnet.gluon.model_zoo import vision

import mxbn
from mxbn import reference
from mxbn.commands import inspect as command
from mxbn.tools import onednn
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.graph import Graph
from mxbn.tools.inspect import inspect

CHANNELS = 3
SHAPE = (4, CHANNELS, 5, 5)
MAKERS = {
    "mxbn": mxbn.sym.BatchNorm,
    "builtin": mx.sym.BatchNorm,
    "relu": mx.sym.contrib.BatchNormWithReLU,
    "sync": lambda *inputs, **kw: mx.sym.contrib.SyncBatchNorm(*inputs, key=str(kw), **kw),
}
CALLS = {
    "mxbn": mxbn.nd.BatchNorm,
    "builtin": mx.nd.BatchNorm,
    "relu": mx.nd.contrib.BatchNormWithReLU,
    "sync": lambda *inputs, **kw: mx.nd.contrib.SyncBatchNorm(*inputs, key="sync", **kw),
}


@pytest.fixture(autouse=True)
def subgraphs(monkeypatch):
    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND", raising=False)


def values(seed=0):
    rs = np.random.RandomState(seed)
    return {
        "data": rs.randn(*SHAPE) * 2 + 1,
        "bn_gamma": rs.uniform(0.5, 2, CHANNELS),
        "bn_beta": rs.randn(CHANNELS),
        "bn_moving_mean": rs.randn(CHANNELS),
        "bn_moving_var": rs.uniform(0.5, 3, CHANNELS),
    }


def model(symbol, known):
    """The symbol as a model, with all arrays but data."""
    arrays = {name: nd(array) for name, array in known.items()}
    return Checkpoint(
        symbol,
        {n: arrays[n] for n in symbol.list_arguments() if n in arrays and n != "data"},
        {n: arrays[n] for n in symbol.list_auxiliary_states()},
    )


def single(maker="builtin", known=None, **attributes):
    symbol = MAKERS[maker](mx.sym.var("data"), name="bn", **{"fix_gamma": False, **attributes})
    return model(symbol, known or values())


def only(given, *arguments, **keywords):
    (row,) = inspect(given, *arguments, **keywords).rows
    return row


# Behaviour


def off(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


MODES = [(maker, flags) for maker in MAKERS for flags in ({}, {"use_global_stats": True})] + [
    ("mxbn", {"use_batch_stats": True}),
    ("mxbn", {"use_global_stats": True, "step_global_stats": True}),
]


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("for_training", [True, False])
@pytest.mark.parametrize(("maker", "flags"), MODES)
def test_layers_do_what_is_said(maker, flags, for_training, is_train):
    known, given = values(), single(maker, **flags)
    does = only(given, for_training, is_train).behaviour
    arrays = {**given.arg_params, "data": nd(known["data"])}
    gradients = {name: mx.nd.zeros_like(array) for name, array in arrays.items()}
    states = {name: array.copy() for name, array in given.aux_params.items()}
    executor = given.symbol.bind(mx.cpu(), arrays, gradients if for_training else None,
                                 "write" if for_training else "null", states)  # fmt: skip

    def means():
        mx.nd.waitall()
        return executor.aux_dict["bn_moving_mean"].asnumpy()

    output = executor.forward(is_train=is_train)[0].asnumpy()
    moved_in_forward = (means() != nd(known["bn_moving_mean"]).asnumpy()).any()
    wants = {}
    for statistics, training in (("batch", True), ("moving", False)):
        wants[statistics] = reference.forward(*known.values(), is_train=training, fix_gamma=False)
        want = wants[statistics].output
        want = np.maximum(want, 0) if maker == "relu" else want
        assert (off(output, want) < 1e-5) == (does.statistics == statistics)
    assert moved_in_forward == (does.steps == "in forward")
    if for_training:
        dy = np.random.RandomState(1).randn(*SHAPE)
        executor.backward([nd(dy)])
        before = nd(known["bn_moving_mean"]).asnumpy()
        assert (means() != before).any() == (does.steps != "no")
        dy = dy * (output > 0) if maker == "relu" else dy
        want = reference.backward(dy, known["data"], known["bn_gamma"], wants[does.statistics],
                                  fix_gamma=False)[0]  # fmt: skip
        is_wrong = does.gradient.startswith(("wrong", "that of neither"))
        if is_wrong and maker == "relu":
            return  # the ReLU's mask is memory that nothing has written: it may be right by chance
        assert (off(gradients["data"].asnumpy(), want) < 1e-5) == (not is_wrong)
    else:
        assert does.gradient == "none: there is no backward"


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_backward_in_inference_mode_is_what_is_said(maker, is_train):
    known = values()
    arrays = [nd(array) for array in known.values()]
    arrays[0].attach_grad()
    with mx.autograd.record(train_mode=is_train):
        output = CALLS[maker](*arrays, fix_gamma=False)
    dy = np.random.RandomState(1).randn(*SHAPE)
    output.backward(nd(dy), train_mode=False)
    kept = reference.forward(*known.values(), is_train=is_train, fix_gamma=False)
    dy = dy * (output.asnumpy() > 0) if maker == "relu" else dy
    want = reference.backward(dy, known["data"], known["bn_gamma"], kept, fix_gamma=False)[0]
    is_right = off(arrays[0].grad.asnumpy(), want) < 1e-5
    says = only(single(maker), True, is_train).behaviour.gradient
    if maker == "mxbn":
        assert is_right
        assert says.endswith("whatever mode backward is called in")
    else:
        assert is_right == (not is_train and maker != "relu")
        assert is_right == says.endswith("sqrt(moving_var + eps) after backward(train_mode=False)")


def test_momentum_1_steps_nothing():
    assert only(single("mxbn", momentum=1)).behaviour.steps == "no"
    assert only(single("mxbn", momentum=0.9)).behaviour.steps == "in forward"


def test_is_train_is_for_training_by_default():
    report = inspect(single(), False)
    assert (report.for_training, report.is_train) == (False, False)
    assert inspect(single()).is_train
    assert not inspect(single(), is_train=False).is_train


# oneDNN's fold


def conv(data, name="c", **attributes):
    return mx.sym.Convolution(
        data, name=name, **{"kernel": (3, 3), "num_filter": 4, "pad": (1, 1), **attributes}
    )


def batch_norm(data, **attributes):
    return mx.sym.BatchNorm(data, name="bn", **attributes)


DATA = mx.sym.var("data")
FOLDS = {  # symbol, whether it is folded, and with faults
    "plain": (batch_norm(conv(DATA)), True, False),
    "no bias, groups": (batch_norm(conv(DATA, no_bias=True, num_group=2)), True, False),
    "ReLU after": (mx.sym.relu(batch_norm(conv(DATA))), True, False),
    "identity between": (batch_norm(mx.sym.identity(conv(DATA))), True, False),
    "Dropout between": (batch_norm(mx.sym.Dropout(conv(DATA), p=0.0)), True, False),
    "3d": (
        batch_norm(conv(mx.sym.expand_dims(DATA, 2), kernel=(1, 3, 3), pad=(0, 1, 1))),
        True,
        False,
    ),
    "last axis": (batch_norm(conv(DATA), axis=-1), True, True),
    "negative axis": (batch_norm(conv(DATA), axis=-3), True, False),
    "convolution is an output": (
        (lambda c: mx.sym.Group([batch_norm(c), c]))(conv(DATA)), True, True,
    ),
    "convolution is used": ((lambda c: batch_norm(c) + mx.sym.sin(c))(conv(DATA)), False, False),
    "1d": (
        batch_norm(conv(mx.sym.reshape(DATA, (0, 0, -1)), kernel=(3,), pad=(1,))), False, False,
    ),
    "two identities": (batch_norm(mx.sym.identity(mx.sym.identity(conv(DATA)))), False, False),
    "Dropout always": (batch_norm(mx.sym.Dropout(conv(DATA), p=0.0, mode="always")), False, False),
    "ReLU between": (batch_norm(mx.sym.relu(conv(DATA))), False, False),
    "after dense": (batch_norm(mx.sym.FullyConnected(DATA, num_hidden=4, name="c")), False, False),
    "after data": (conv(batch_norm(DATA)), False, False),
    "mxbn": (mxbn.sym.BatchNorm(conv(DATA), name="bn"), False, False),
    "sync": (MAKERS["sync"](conv(DATA), name="bn"), False, False),
    "with ReLU": (MAKERS["relu"](conv(DATA), name="bn"), False, False),
    "v1": (mx.sym.BatchNorm_v1(conv(DATA), name="bn"), False, False),
}  # fmt: skip


def outputs(symbol, is_train, dtype="float32"):
    """What an executor bound without gradients gives."""
    rs = np.random.RandomState(0)
    executor = symbol.simple_bind(mx.cpu(), "null", data=(2, 4, 4, 4), type_dict={"data": dtype})
    for arrays in (executor.arg_dict, executor.aux_dict):
        for array in arrays.values():
            array[:] = nd(rs.uniform(0.5, 1.5, array.shape), array.dtype)
    return [output.asnumpy() for output in executor.forward(is_train=is_train)]


@pytest.mark.parametrize("case", FOLDS)
def test_folds_are_those_of_an_executor(case, monkeypatch):
    symbol, is_folded, is_faulty = FOLDS[case]
    folded = [outputs(symbol, is_train) for is_train in (True, False)]
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    right = [outputs(symbol, is_train) for is_train in (True, False)]
    assert (off(folded[0][0], right[0][0]) > 1e-3) == is_folded
    assert any(off(a, b) > 1e-3 for a, b in zip(folded[1], right[1])) == is_faulty
    assert not only((symbol, {}, {}), False, True).problems  # NONE prevents it
    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND")
    row = only((symbol, {}, {}), False, True)
    assert row.folded_into == ("c" if is_folded else "")
    assert (
        "folded into the convolution at bind, it ignores is_train=True" in row.problems
    ) == is_folded
    assert row.behaviour.statistics == ("moving" if is_folded else "batch")
    assert (len(row.problems) == 2) == is_faulty
    assert bool(only((symbol, {}, {}), False).problems) == is_faulty
    training = only((symbol, {}, {}))
    assert training.folded_into == row.folded_into
    assert training.behaviour.statistics == "batch"
    assert not training.problems


def test_float64_is_not_folded():
    symbol = FOLDS["plain"][0]
    trained, inferred = (outputs(symbol, is_train, "float64") for is_train in (True, False))
    assert off(trained[0], inferred[0]) > 1e-3
    states = {n: mx.nd.ones(4, dtype="float64") for n in symbol.list_auxiliary_states()}
    assert only((symbol, {}, states), False).folded_into == ""


def test_outputs_mean_and_var_of_a_folded_layer(monkeypatch):
    mean, other = batch_norm(conv(DATA), output_mean_var=True)[1], batch_norm(conv(DATA))
    assert onednn.folds(Graph.from_symbol(mean)).popitem()[1].faults
    assert not onednn.folds(Graph.from_symbol(other)).popitem()[1].faults
    (folded,) = outputs(mean, False)
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    (right,) = outputs(mean, False)
    assert folded.shape != right.shape or off(folded, right) > 1e-3


@pytest.mark.parametrize(
    ("name", "value", "is_active"),
    [
        ("MXNET_SUBGRAPH_BACKEND", "MKLDNN", True),
        ("MXNET_SUBGRAPH_BACKEND", "", True),
        ("MXNET_SUBGRAPH_BACKEND", "NONE", False),
        ("MXNET_MKLDNN_ENABLED", "0", False),
        ("MXNET_DISABLE_MKLDNN_CONV_OPT", "1", False),
        ("MXNET_DISABLE_MKLDNN_FUSE_CONV_BN", "1", False),
    ],
)
def test_environment(monkeypatch, name, value, is_active):
    monkeypatch.setenv(name, value)
    assert onednn.is_active() == is_active


def test_gluon_folds_nothing():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(4, 3, in_channels=4), mx.gluon.nn.BatchNorm(in_channels=4))
    net.initialize()
    assert only(net, False, True).folded_into == ""
    assert only(net, False, True).behaviour.statistics == "batch"
    symbol = net(DATA)
    assert only((symbol, {}, {}), False, True).folded_into == symbol.get_internals().list_outputs()[
        3
    ].replace("_output", "")


# Health


def changed(maker="mxbn", attributes=(), **arrays):
    known = {**values(), "bn_gamma": np.ones(CHANNELS)}
    known.update({f"bn_{name}": np.asarray(array, "float64") for name, array in arrays.items()})
    return only(single(maker, known, **dict(attributes)))


@pytest.mark.parametrize(
    ("maker", "attributes", "arrays", "text"),
    [
        ("mxbn", {}, {"moving_mean": [0] * 3, "moving_var": [1] * 3}, "never updated"),
        ("mxbn", {}, {"moving_mean": [0, np.nan, 1]}, "not finite in 1 of 3 channels (1)"),
        ("mxbn", {}, {"moving_var": [np.inf] * 3}, "moving_var is not finite in all channels"),
        ("mxbn", {}, {"gamma": [1, np.nan, np.nan]}, "gamma is not finite in 2 of 3"),
        ("mxbn", {}, {"beta": [1, -np.inf, 1]}, "beta is not finite"),
        ("mxbn", {}, {"moving_var": [1, -7e-8, 1]}, "negative in 1 of 3 channels (1), -7e-08"),
        ("mxbn", {}, {"moving_var": [1, -1, 1]}, "-1: the output is not finite"),
        ("mxbn", {"fix_gamma": True}, {"gamma": [0.5, 1, 2]}, "stored as 0.5 to 2, but"),
        ("builtin", {"fix_gamma": True}, {"gamma": [2] * 3},
         "as 2, but fix_gamma computes with 1, and MXNet overwrites it"),
        ("builtin", {"eps": 0}, {}, "eps 0"),
        ("builtin", {"eps": -1e-3}, {}, "eps -0.001 is negative"),
        ("builtin", {"momentum": 1.5}, {}, "momentum 1.5 is not from 0 to 1"),
    ],
)  # fmt: skip
def test_problems(maker, attributes, arrays, text):
    row = changed(maker, attributes, **arrays)
    assert len(row.problems) == 1
    assert text in row.problems[0]
    assert not row.remarks


@pytest.mark.parametrize(
    ("maker", "attributes", "arrays", "text"),
    [
        ("mxbn", {"eps": 0}, {}, "eps 0: a channel of equal values gives beta"),
        ("mxbn", {"eps": 0.1}, {}, "eps 0.1 is unusual"),
        ("mxbn", {"eps": 1e-9}, {}, "eps 1e-09 is unusual"),
        ("mxbn", {"momentum": 0.1}, {}, "PyTorch's 0.1 is 0.9 here"),
        ("mxbn", {"momentum": 1}, {}, "momentum 1: training leaves"),
        ("mxbn", {"momentum": 0}, {}, "momentum 0 weighs"),
        ("mxbn", {}, {"gamma": [0, 1, 0]}, "gamma is 0 in 2 of 3 channels (0, 2)"),
        ("mxbn", {}, {"moving_var": [1, 1e-12, 1]}, "variance is below eps in 1 of 3"),
        ("builtin", {}, {"moving_mean": [1e5, 0, 1]}, "mean is over 1000 standard deviations"),
        (
            "mxbn",
            {"use_batch_stats": True},
            {"moving_mean": [0] * 3, "moving_var": [1] * 3},
            "never updated",
        ),
    ],
)
def test_remarks(maker, attributes, arrays, text):
    row = changed(maker, attributes, **arrays)
    assert len(row.remarks) == 1
    assert text in row.remarks[0]
    assert not row.problems


@pytest.mark.parametrize("maker", ["mxbn", "builtin"])
def test_nothing_wrong(maker):
    row = changed(maker)
    assert row.problems == row.remarks == []
    assert (row.channels, row.name) == (CHANNELS, "bn")
    fixed = changed(maker, {"fix_gamma": True, "eps": 1e-5, "momentum": 0.99})
    assert fixed.problems == fixed.remarks == []
    assert changed("mxbn", {}, moving_mean=[1e5, 0, 1]).remarks == []
    assert changed(maker, {}, moving_mean=[0] * 3, moving_var=[1, 1, 2]).problems == []
    assert changed(maker, {}, moving_mean=[0, 0, 1], moving_var=[1] * 3).problems == []
    assert changed(maker, {}, moving_var=[1, -7e-8, 1]).problems[0].endswith("-7e-08")


def test_shared_parameters():
    gamma, mean = mx.sym.var("gamma"), mx.sym.var("mean")
    net = mx.sym.BatchNorm(DATA, gamma=gamma, moving_mean=mean, name="a")
    net = mx.sym.BatchNorm(net, gamma=gamma, moving_mean=mean, name="b")
    net = mx.sym.BatchNorm(net, gamma=gamma, name="c")
    texts = [[r for r in row.remarks if "shares" in r] for row in inspect((net, {}, {})).rows]
    assert texts == [
        ["shares gamma with b, c", "shares moving_mean with b"],
        ["shares gamma with a, c", "shares moving_mean with a"],
        ["shares gamma with a, b"],
    ]


def test_uninitialized_and_symbol_only():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(), mxbn.gluon.BatchNorm(use_batch_stats=True))
    report = inspect(net)
    assert [row.channels for row in report.rows] == [None, None]
    assert all("no values" in row.remarks[0] for row in report.rows)
    assert report.healthy
    with pytest.raises(TypeError, match="a model of type str"):
        inspect("net")


def test_resnet_of_the_model_zoo():
    net = vision.get_resnet(1, 18, thumbnail=True, classes=10)
    net.initialize()
    data = mx.nd.random.normal(shape=(4, 3, 32, 32))
    net(data)
    assert all(row.problems == ["never updated: mean 0, variance 1"] for row in inspect(net).rows)
    with mx.autograd.record():
        net(data).sum().backward()
    report = inspect(net)
    assert report.healthy
    assert len(report.rows) == 19
    assert {row.channels for row in report.rows} == {64, 128, 256, 512}
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["steps"] == "in backward"


def test_a_module_is_seen_as_it_is_now():
    symbol = mxbn.sym.BatchNorm(DATA, name="bn")
    module = mx.mod.Module(symbol, label_names=None)
    with pytest.raises(ValueError, match="no parameters"):
        inspect(module)
    module.bind([("data", SHAPE)])
    module.init_params()
    assert not inspect(module).healthy
    module.forward(mx.io.DataBatch([nd(values()["data"])]), is_train=True)
    assert inspect(module).healthy


# The gap to data


def two_layers(maker):
    """A model of two layers, its arrays in float64, and what enters the second."""
    rs = np.random.RandomState(5)
    names = ("gamma", "beta", "moving_mean", "moving_var")
    net, known = DATA, {}
    for name in ("a", "b"):
        net = MAKERS[maker](net, name=name, fix_gamma=False)
        net = mx.sym.relu(net)
        known.update({f"{name}_{role}": rs.uniform(0.5, 2, CHANNELS) for role in names})
    return model(net, known), known


def right_gaps(known, data):
    """Means and variances of what enters both layers."""
    first = reference.forward(data, *(nd(known[f"a_{r}"]).asnumpy().astype("float64") for r in
                              ("gamma", "beta", "moving_mean", "moving_var")),
                              is_train=False, fix_gamma=False).output  # fmt: skip
    for name, entering in (("a", data), ("b", np.maximum(first, 0))):
        mean, var = (
            nd(known[f"{name}_moving_{s}"]).asnumpy().astype("float64") for s in ("mean", "var")
        )
        axes = (0, 2, 3)
        yield (
            (entering.mean(axes) - mean) / np.sqrt(var + 1e-3),
            (entering.var(axes) + 1e-3) / (var + 1e-3),
        )


def check_gaps(rows, known, data):
    for row, (shift, ratio) in zip(rows, right_gaps(known, data)):
        assert row.gap.values == data.size // CHANNELS
        np.testing.assert_allclose(row.gap.mean_shift, shift, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row.gap.variance_ratio, ratio, rtol=1e-5)


@pytest.mark.parametrize("maker", ["mxbn", "builtin"])
def test_gaps_are_exact(maker):
    given, known = two_layers(maker)
    data = nd(np.random.RandomState(6).randn(7, CHANNELS, 4, 4) * 3 + 1)
    whole = data.asnumpy().astype("float64")
    before = {n: a.asnumpy() for n, a in {**given.aux_params, **given.arg_params}.items()}
    iterator = mx.io.NDArrayIter(data, batch_size=3)  # the last batch is padded
    for source in ({"data": data}, iterator, iterator, [data[:2], data[2:]]):
        for contexts in (None, [mx.cpu(0), mx.cpu(1)]):
            check_gaps(inspect(given, data=source, ctx=contexts).rows, known, whole)
    now = {n: a.asnumpy() for n, a in {**given.aux_params, **given.arg_params}.items()}
    assert all((now[name] == before[name]).all() for name in now)


@pytest.mark.parametrize("kind", ["module", "imported", "gluon"])
def test_gaps_of_other_models(kind, tmp_path):
    given, known = two_layers("builtin")
    data = nd(np.random.RandomState(6).randn(6, CHANNELS, 4, 4))
    if kind == "module":
        net = mx.mod.Module(given.symbol, label_names=None)
        net.bind([("data", (2, CHANNELS, 4, 4))], for_training=False)
        net.set_params(given.arg_params, given.aux_params)
    elif kind == "imported":
        given.save(str(tmp_path / "net"), 0)
        files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
        net = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
        net.hybridize()
    else:
        net = mx.gluon.nn.HybridSequential()
        for name in ("a", "b"):
            layer = mx.gluon.nn.BatchNorm(epsilon=1e-3, in_channels=CHANNELS)
            layer.initialize()
            for parameter, role in (
                (layer.gamma, "gamma"),
                (layer.beta, "beta"),
                (layer.running_mean, "moving_mean"),
                (layer.running_var, "moving_var"),
            ):
                parameter.set_data(nd(known[f"{name}_{role}"]))
            net.add(layer, mx.gluon.nn.Activation("relu"))
        net.hybridize(static_alloc=True)
        net(data)
    rows = inspect(net, data=mx.io.NDArrayIter(data, batch_size=2)).rows
    check_gaps(rows, known, data.asnumpy().astype("float64"))


def test_data_that_is_not_right():
    given, _ = two_layers("builtin")
    nan = mx.nd.ones(SHAPE)
    nan[0, 1] = np.nan
    rows = inspect(given, data={"data": nan}).rows
    assert ["what enters it is not finite" in row.problems for row in rows] == [True, True]
    assert [row.gap for row in rows] == [None, None]
    for wrong in ({"data": mx.nd.ones((2, 4, 3, 3))}, {"x": mx.nd.ones(SHAPE)}, [], {}):
        with pytest.raises(ValueError, match=r"mxbn: "):
            inspect(given, data=wrong)


def test_layers_in_bodies_have_no_gap():
    def body(x, states):
        return mx.sym.BatchNorm(x, name="inner"), states

    out, _ = mx.sym.contrib.foreach(body, mx.sym.BatchNorm(DATA, name="outer"), [mx.sym.var("s")])
    arrays = {n: mx.nd.ones(CHANNELS) for n in out.list_arguments() if n != "data"}
    states = {n: mx.nd.ones(CHANNELS) for n in out.list_auxiliary_states()}
    data = {"data": mx.nd.ones((2, CHANNELS, 5)), "s": mx.nd.ones((2, 1))}
    rows = inspect((out, arrays, states), data=data).rows
    assert {row.name: row.gap is None for row in rows} == {"outer": False, "inner": True}


# The command


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["inspect", *map(str, arguments)])
    return options.run(options)


@pytest.fixture
def saved(tmp_path):
    given, _ = two_layers("builtin")
    given.save(str(tmp_path / "net"), 7)
    np.savez(tmp_path / "data.npz", data=np.random.RandomState(0).randn(9, CHANNELS, 4, 4))
    return tmp_path / "net"


def test_command_shows_everything(saved, capsys):
    data, plot = saved.parent / "data.npz", saved.parent / "gaps.png"
    assert run(saved, "--epoch", 7, "--data", data, "--batch-size", 4, "--plot", plot) == 0
    shown = capsys.readouterr().out
    for text in ("With for_training=True, is_train=True", "once per backward", "gradient: through",
                 "operator BatchNorm", "144", "2 layers, none with problems"):  # fmt: skip
        assert text in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError, match="gaps"):
        run(saved, "--epoch", 7, "--data", data, "--plot", plot)
    assert run(saved, "--epoch", 7, "--data", data, "--plot", plot, "--force", "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["gap"]["values_per_channel"] for layer in layers] == [144, 144]


def test_command_exits_with_1_for_problems(saved, capsys):
    given = Checkpoint.load(str(saved), 7)
    given.aux_params["b_moving_var"][1] = -1
    given.save(str(saved), 8, force=True)
    assert run(saved, "--epoch", 8, "--inference", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"]
    assert [len(layer["problems"]) for layer in found["layers"]] == [0, 1]
    assert found["layers"][0]["statistics"] == "moving"
    assert run(saved, "--epoch", 8, "--inference", "--is-train", "yes") == 1
    shown = capsys.readouterr().out
    assert "variance is negative in 1 of 3 channels (1), -1: the output is not finite (b)" in shown
    assert "With for_training=False, is_train=True" in shown
    assert run(saved, "--epoch", 8, "--data", saved.parent / "data.npz", "--json") == 1
    assert json.loads(capsys.readouterr().out)["layers"][1]["gap"]["largest_mean_shift"] is None


def test_command_without_layers(tmp_path, capsys):
    Checkpoint(mx.sym.relu(DATA), {}, {}).save(str(tmp_path / "net"), 0)
    assert run(tmp_path / "net") == 0
    assert "no BatchNorm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--plot", "x.png"], "give both"),
        (["--plot", "x.xyz", "--data", "data.npz"], "does not end in"),
        (["--data", "nothing.npz"], "nothing.npz"),
        (["--data", "net-symbol.json"], "damaged or no npz"),
        (["--data", "wrong.npz"], "expected arrays of one length for data"),
    ],
)
def test_command_refuses(saved, monkeypatch, arguments, text):
    monkeypatch.chdir(saved.parent)
    np.savez("wrong.npz", other=np.zeros(3))
    before = sorted(os.listdir())
    with pytest.raises((ValueError, OSError), match=re.escape(text)):
        run(saved, "--epoch", 7, *arguments)
    assert sorted(os.listdir()) == before
