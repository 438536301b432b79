"""Recalibration: exact moving statistics in every form of a network, and nothing else changed."""

import gc
import json
import random
import sys
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import check, nd, run_script, same_bits
from mxnet.gluon.contrib.nn import Identity

import mxbn
from mxbn import __main__ as main
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.freeze import freeze
from mxbn.tools.recalibrate import recalibrate

FORMS = ("imperative", "hybridized", "static_shape", "plain", "imported", "in_parent")
FORMS += ("checkpoint", "module")
EARLIER = ("batch", "moving")
BATCHES = (4, 1, 7)  # sizes


class Plain(mx.gluon.Block):
    """A block that MXNet cannot hybridize."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        assert inputs[0].asnumpy().size
        return self.inner(*inputs)


def in_form(form, net, x, folder):
    """The network in one of the forms."""
    if form == "imperative":
        return net
    if form == "plain":
        net.hybridize()
        return Plain(net)
    net.hybridize(static_alloc=form == "static_shape", static_shape=form == "static_shape")
    net(nd(x, x.dtype))
    if form in ("hybridized", "static_shape"):
        return net
    prefix = str(folder / "net")
    net.export(prefix)
    if form in ("imported", "in_parent"):
        inner = mx.gluon.SymbolBlock.imports(
            f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params"
        )
        if form == "imported":
            return inner
        outer = mx.gluon.nn.HybridSequential()
        outer.add(inner, Identity())
        outer.hybridize()
        return outer
    checkpoint = Checkpoint.load(prefix, 0)
    if form == "checkpoint":
        return checkpoint
    module = mx.mod.Module(checkpoint.symbol, label_names=[])
    module.bind([mx.io.DataDesc("data", (3, *x.shape[1:]), x.dtype)])
    module.set_params(checkpoint.arg_params, checkpoint.aux_params)
    return module


def arrays_of(model):
    """Every array of a model, by the end of its name."""
    if isinstance(model, mx.gluon.Block):
        mx.nd.waitall()
        found = {p.name: p.list_data()[0] for p in model.collect_params().values()}
    else:
        parts = model[1:] if isinstance(model, tuple) else model.get_params()
        found = {name: a for part in parts for name, a in part.items()}
    return {"_".join(name.split("_")[-3:]): a.asnumpy() for name, a in found.items()}


def moving(model):
    return {name: a for name, a in arrays_of(model).items() if "running" in name}


def same_arrays(got, want):
    return got.keys() == want.keys() and all(same_bits(got[n], want[n]) for n in want)


def in_batches(x, sizes=BATCHES):
    return [nd(part, x.dtype) for part in np.split(x, np.cumsum(sizes)[:-1])]


def data_iter(x, size=5):
    return mx.io.NDArrayIter(nd(x, x.dtype), batch_size=size)


def dense_net(dtype="float64", maker=mxbn.gluon.BatchNorm):
    """Three layers, the first used twice, and Dropout, with parameters away from their defaults."""
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    first = maker(in_channels=4, prefix="first_", epsilon=0.01)
    net.add(
        first,
        mx.gluon.nn.Dense(4, in_units=4, prefix="dense0_", activation="tanh"),
        mx.gluon.nn.Dropout(0.5),
        first,
        mx.gluon.nn.Dense(3, in_units=4, prefix="dense1_"),
        maker(in_channels=3, prefix="second_", use_global_stats=True),
        maker(in_channels=3, prefix="third_", scale=False),
        mx.gluon.nn.Dense(2, in_units=3, prefix="dense2_"),
    )
    net.initialize(mx.init.Normal(1))
    net.cast(dtype)
    rs = np.random.RandomState(3)
    for name, parameter in net.collect_params().items():
        if "dense" not in name:
            parameter.set_data(nd(rs.uniform(0.5, 2, parameter.shape), dtype))
    return net


def dense_net_by_hand(net, batches, earlier):
    """The statistics of the first and third layer, in float64 NumPy."""
    p = {
        n[4:] if n.startswith("net_") else n: a.data().asnumpy()
        for n, a in net.collect_params().items()
    }

    def dense(name, x):
        return x @ p[f"{name}_weight"].T + p[f"{name}_bias"]

    def normalize(name, x, batch, eps=1e-5, fixed=False):
        m, v = p[f"{name}_running_mean"], p[f"{name}_running_var"]
        if batch:
            m, v = x.mean(axis=0), x.var(axis=0)
        return (x - m) / np.sqrt(v + eps) * (1 if fixed else p[f"{name}_gamma"]) + p[f"{name}_beta"]

    def inputs(x, batch):
        twice = np.tanh(dense("dense0", normalize("first", x, batch, 0.01)))
        middle = dense("dense1", normalize("first", twice, batch, 0.01))
        return [x, twice], normalize("second", middle, False)

    def pooled(parts):
        everything = np.concatenate(parts)
        return everything.mean(axis=0), everything.var(axis=0)

    seen = [inputs(x, earlier == "batch") for x in batches]
    first = pooled([part for parts, _ in seen for part in parts])
    if earlier == "moving":
        p["first_running_mean"], p["first_running_var"] = first
        seen = [inputs(x, False) for x in batches]
    third = pooled([part for _, part in seen])
    names = [f"{n}_running_{s}" for n in ("first", "third") for s in ("mean", "var")]
    return dict(zip(names, [*first, *third]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_statistics_of_the_data_are_exact(dtype, form, tmp_path):
    """To the last bit but one of what the moving statistics can hold."""
    rs = np.random.RandomState(0)
    x = (rs.randn(12, 3, 5, 4) * [[[1]], [[100]], [[1e-3]]] + [[[1]], [[900]], [[-7]]]).astype(
        dtype
    )
    net = mx.gluon.nn.HybridSequential()
    net.add(Identity(), mxbn.gluon.BatchNorm(axis=2, in_channels=5), Identity())
    net.initialize()
    net.cast(dtype)
    model = in_form(form, net, x, tmp_path)
    done = recalibrate(model, in_batches(x))
    values = x.astype("float64")
    found = moving(model)
    mean, var = (found[f"batchnorm{n}"] for n in _suffixes(found))
    check(mean, values.mean(axis=(0, 1, 3)), 1)
    check(var, values.var(axis=(0, 1, 3)), 1)
    assert (done.samples, done.layers[0].values) == (12, 12 * 3 * 4)
    check(done.layers[0].mean, values.mean(axis=(0, 1, 3)), 8)
    check(done.layers[0].var, values.var(axis=(0, 1, 3)), 8)


def _suffixes(found):
    names = sorted(found)
    return [name.partition("batchnorm")[2] for name in names]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("earlier", EARLIER)
def test_a_deep_network_with_a_layer_used_twice(earlier, form, tmp_path):
    x = np.random.RandomState(1).randn(12, 4)
    net = dense_net()
    model = in_form(form, net, x, tmp_path)
    before = arrays_of(model)
    want = dense_net_by_hand(net, np.split(x, np.cumsum(BATCHES)[:-1]), earlier)
    done = recalibrate(model, in_batches(x), earlier=earlier)
    found = arrays_of(model)
    for name, value in want.items():
        check(found[name], value, 64, what=name)
    assert [layer.values for layer in done.layers] == [24, 12]
    assert {n for n in before if not same_bits(before[n], found[n])} == set(want)
    done.undo()
    assert same_arrays(arrays_of(model), before)


@pytest.mark.parametrize("earlier", EARLIER)
def test_padding_does_not_count(earlier):
    x = np.random.RandomState(1).randn(12, 4)
    net = dense_net()
    batches = [x[:5], x[5:10], x[10:]]
    want = dense_net_by_hand(net, batches, earlier)
    data = data_iter(x)
    data.next()  # not the whole of it is left
    done = recalibrate(net, data, earlier=earlier)
    assert done.samples == 12
    assert data.next().pad == 0  # it was reset
    found = arrays_of(net)
    for name, value in want.items():
        check(found[name], value, 64, what=name)


def every_moving_array(model):
    mx.nd.waitall()
    if isinstance(model, mx.gluon.Block):
        found = [(p.name, a) for p in model.collect_params().values() for a in p.list_data()]
    elif isinstance(model, mx.mod.Module):
        found = [item for e in model._exec_group.execs for item in e.aux_dict.items()]
    else:
        found = model.aux_params.items()
    return [("_".join(name.split("_")[-3:]), a) for name, a in found if "running" in name]


def on_contexts(form, net, contexts, x, folder):
    model = in_form(form, net, x, folder)
    if form == "hybridized":
        net.collect_params().reset_ctx(contexts)
    if form == "module":
        symbol, parameters = model.symbol, model.get_params()
        model = mx.mod.Module(symbol, label_names=[], context=contexts)
        model.bind([mx.io.DataDesc("data", (4, 4), "float64")])
        model.set_params(*parameters)
    return model


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("form", ["hybridized", "module", "checkpoint"])
def test_several_contexts(form, earlier, tmp_path):
    contexts = [mx.cpu(0), mx.cpu(1)]
    x = np.random.RandomState(1).randn(9, 4)
    parts = [x[:2], x[2:4], x[4:5], x[5:7], x[7:9]]  # of batches of 4, 1 and 4
    net = dense_net()
    want = dense_net_by_hand(net, parts, earlier)
    model = on_contexts(form, net, contexts, x, tmp_path)
    for i, (name, array) in enumerate(every_moving_array(model)):
        if "second" not in name and earlier == "batch":
            array[:] = array + i  # as training leaves them, each context its own
    before = [array.asnumpy() for _, array in every_moving_array(model)]
    arguments = {"ctx": contexts} if form == "checkpoint" else {}
    done = recalibrate(model, in_batches(x, [4, 1, 4]), earlier=earlier, **arguments)
    for name, array in every_moving_array(model):
        if name in want:
            check(array, want[name], 64, what=name)
    if form == "module":
        check(arrays_of(model)["third_running_var"], want["third_running_var"], 64)
    done.undo()
    after = every_moving_array(model)
    assert all(same_bits(array, old) for (_, array), old in zip(after, before))


@pytest.mark.parametrize("operator", ["mxbn", "builtin"])
def test_inference_sees_normalized_data_after_each_layer(operator):
    """What earlier='moving' promises, watched by hooks on a ResNet in inference."""
    make = mx.gluon.model_zoo.vision.resnet18_v1
    net = make(thumbnail=True, classes=4)
    if operator == "mxbn":
        with mxbn.replace_builtin():
            net = make(thumbnail=True, classes=4)
    net.initialize(mx.init.Xavier())
    batches = [mx.nd.random.normal(1, 2, (n, 3, 16, 16)) for n in (5, 2)]
    net(batches[0])
    done = recalibrate(net, batches, earlier="moving")
    sums = {}

    def hook(layer, _, output):
        y = output.asnumpy().astype("float64").swapaxes(0, 1).reshape(output.shape[1], -1)
        sums.setdefault(layer.name, []).append(y)

    def watch(block):
        if isinstance(block, mx.gluon.nn.BatchNorm):
            block.register_forward_hook(hook)

    net.apply(watch)
    for batch in batches:
        net(batch)
    assert len(sums) == len(done.layers) == 19
    for layer in done.layers:
        y = np.concatenate(sums[layer.name], axis=1)
        assert abs(y.mean(axis=1)).max() < 1e-5
        np.testing.assert_allclose(y.var(axis=1), layer.var / (layer.var + layer.eps), rtol=1e-4)


@pytest.mark.parametrize("kind", ["BatchNorm", "BatchNormReLU", "SyncBatchNorm"])
@pytest.mark.parametrize("form", ["hybridized", "checkpoint"])
def test_builtin_layers(form, kind, tmp_path):
    """Another layer follows, so that it matters what comes out."""
    maker = getattr(mx.gluon.nn, kind, None) or mx.gluon.contrib.nn.SyncBatchNorm
    options = {"num_devices": 1} if kind == "SyncBatchNorm" else {}
    x = np.random.RandomState(2).randn(12, 3, 4, 5).astype("float32")
    net = mx.gluon.nn.HybridSequential()
    net.add(maker(in_channels=3, **options), mxbn.gluon.BatchNorm(in_channels=3))
    net.initialize()
    model = in_form(form, net, x, tmp_path)
    done = recalibrate(model, in_batches(x, [6, 6]))

    def by_hand(part):
        axes, part = (0, 2, 3), part.astype("float64")
        y = (part - part.mean(axes, keepdims=True)) / np.sqrt(part.var(axes, keepdims=True) + 1e-5)
        return np.maximum(y, 0) if kind == "BatchNormReLU" else y

    y = np.concatenate([by_hand(x[:6]), by_hand(x[6:])])
    found = done.layers[1]
    check(found.mean.astype("float32"), y.mean(axis=(0, 2, 3)), 1, scale=1)
    check(found.var.astype("float32"), y.var(axis=(0, 2, 3)), 2)


def test_nothing_else_changes():
    net = dense_net("float32")
    net.hybridize(static_alloc=True)
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    trainer = mx.gluon.Trainer(net.collect_params(), "adam")
    x = mx.nd.random.normal(shape=(12, 4))
    net.collect_params(".*dense.*").setattr("grad_req", "add")
    with mx.autograd.record():
        net(x).sum().backward()
    trainer.step(12)

    def everything():
        parameters = net.collect_params().values()
        states = trainer._updaters[0].states.items()
        return (
            repr(net),
            [(p.name, p.grad_req, p.lr_mult) for p in parameters],
            {p.name: p.data().asnumpy().tobytes() for p in parameters if "running" not in p.name},
            [p.grad().asnumpy().tobytes() for p in parameters if p.grad_req != "null"],
            [(k, [a.asnumpy().tobytes() for a in v]) for k, v in states],
            [sorted(vars(block)) for block in [net, *net]],
            [(block._active, block._flags, block._cached_graph) for block in [net, *net]],
            [block._cached_op for block in [net, *net]],
            [list(block._forward_hooks.values()) for block in [net, *net]],
            [layer._kwargs for layer in (net[0], net[5], net[6])],
            (mx.autograd.is_recording(), mx.autograd.is_training()),
            str(np.random.get_state()), random.getstate(),
        )  # fmt: skip

    before = everything()
    mx.random.seed(7)
    draws = mx.nd.random.uniform(shape=3).asnumpy()
    mx.random.seed(7)
    with mx.autograd.record():
        recalibrate(net, [x], earlier="moving").undo()
        assert mx.autograd.is_recording()
    assert same_bits(mx.nd.random.uniform(shape=3), draws)
    assert everything() == before
    assert calls


class BrokenError(Exception):
    pass


def breaking(batches, error):
    yield from batches
    raise error


@pytest.mark.parametrize("form", ["static_shape", "in_parent", "module", "checkpoint"])
@pytest.mark.parametrize("error", [BrokenError(), KeyboardInterrupt()])
def test_an_error_of_the_data_changes_nothing(error, form, tmp_path):
    x = np.random.RandomState(1).randn(12, 4)
    model = in_form(form, dense_net(), x, tmp_path)
    before = arrays_of(model)
    with pytest.raises(type(error)):
        recalibrate(model, breaking(in_batches(x), error))
    assert same_arrays(arrays_of(model), before)
    passes = [breaking(in_batches(x), error), in_batches(x)]  # the second pass breaks

    class Data:
        def __iter__(self):
            return iter(passes.pop())

    with pytest.raises(type(error)):
        recalibrate(model, Data(), earlier="moving")
    assert passes == []
    assert same_arrays(arrays_of(model), before)
    if isinstance(model, mx.gluon.Block):
        assert model._active
        assert all("forward" not in vars(block) for block in [model, *model._children.values()])


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("form", ["imperative", "imported", "module"])
def test_data_that_is_not_finite(form, earlier, tmp_path):
    x = np.random.RandomState(1).randn(12, 4).astype("float32")
    net = dense_net("float32")
    model = in_form(form, net, x, tmp_path)
    before = arrays_of(model)
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[7, 2] = value
        with pytest.raises(ValueError, match=r"enters layer first.* is not finite .channel 2"):
            recalibrate(model, in_batches(bad), earlier=earlier)
    assert same_arrays(arrays_of(model), before)
    with pytest.raises(ValueError, match=r"statistics of layer first.* do not fit into float32"):
        recalibrate(model, in_batches(x * np.float32(1e25)), earlier=earlier)
    assert same_arrays(arrays_of(model), before)


def test_which_layers():
    net = dense_net()
    x = in_batches(np.random.RandomState(1).randn(12, 4))
    assert [layer.name for layer in recalibrate(net, x).layers] == ["first", "third"]
    freeze(net, "*third", step=False)
    assert [layer.name for layer in recalibrate(net, x).layers] == ["first"]
    assert [layer.name for layer in recalibrate(net, x, "*").layers] == [
        "first", "second", "third",
    ]  # fmt: skip
    done = recalibrate(net, x, ["second"], earlier="moving")
    assert [layer.name for layer in done.layers] == ["second"]
    freeze(net)
    with pytest.raises(ValueError, match="no layer steps in training: name those"):
        recalibrate(net, x)
    with pytest.raises(ValueError, match="no BatchNorm layer is named stage1, there are: first"):
        recalibrate(net, x, "stage1")


def test_drift():
    net = mxbn.gluon.BatchNorm(in_channels=2, epsilon=0.5)
    net.initialize()
    net.running_mean.set_data(nd([1, 2]))
    net.running_var.set_data(nd([3.5, 0]))
    x = np.float32([[2, 5], [4, 5]])
    (layer,) = recalibrate(net, [x]).layers
    np.testing.assert_array_equal(layer.mean_before, [1, 2])
    np.testing.assert_array_equal(layer.var_before, [3.5, 0])
    np.testing.assert_array_equal(layer.mean, [3, 5])
    np.testing.assert_array_equal(layer.var, [1, 0])
    np.testing.assert_allclose(layer.mean_shift, [2 / 2, 3 / 0.5**0.5], rtol=1e-15)
    np.testing.assert_allclose(layer.variance_ratio, [1.5 / 4, 1], rtol=1e-15)


def test_a_module_whose_statistics_nothing_has_read(tmp_path):
    x = np.random.RandomState(1).randn(12, 4)
    model = in_form("module", dense_net(), x, tmp_path)
    model.get_params()
    model.forward(mx.io.DataBatch([nd(x[:3], "float64")]), is_train=True)
    mx.nd.waitall()
    states = model._exec_group.execs[0].aux_dict
    before = {name: array.asnumpy() for name, array in states.items()}
    (first, _) = recalibrate(model, [nd(x, "float64")]).layers
    assert same_bits(first.mean_before, before["first_running_mean"])
    assert same_bits(model.get_params()[1]["first_running_mean"], first.mean)
    assert same_bits(states["first_running_mean"], first.mean)


@pytest.mark.parametrize("form", ["imperative", "imported", "module", "checkpoint"])
def test_undo_once_and_only_if_the_layer_is_there(form, tmp_path):
    x = np.random.RandomState(1).randn(12, 4)
    model = in_form(form, dense_net(), x, tmp_path)
    before = arrays_of(model)
    first = recalibrate(model, in_batches(x))
    second = recalibrate(model, in_batches(x + 1))
    first.undo()
    assert same_arrays(arrays_of(model), before)
    with pytest.raises(RuntimeError, match="undone already"):
        first.undo()
    second.undo()
    first = recalibrate(model, in_batches(x))
    if form == "checkpoint":
        model.aux_params.clear()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"layer first.* is gone"):
        first.undo()


def test_undo_after_a_cast_changes_nothing():
    net = dense_net()
    done = recalibrate(net, in_batches(np.random.RandomState(1).randn(12, 4)))
    net.cast("float32")
    before = arrays_of(net)
    with pytest.raises(RuntimeError, match="have another shape, type or number"):
        done.undo()
    assert same_arrays(arrays_of(net), before)


@pytest.mark.parametrize("form", ["imperative", "checkpoint"])
def test_kinds_of_data(form, tmp_path):
    x = np.random.RandomState(1).randn(12, 4).astype("float32")
    model = in_form(form, dense_net("float32"), x, tmp_path)
    dataset = mx.gluon.data.ArrayDataset(x, np.arange(12))
    want = None
    for data in (
        mx.gluon.data.DataLoader(dataset, 4),
        mx.io.NDArrayIter(x, np.arange(12), 4),
        [mx.nd.array(part) for part in np.split(x, 3)],
        np.split(x.astype("float64"), 3),
        [(part, "label") for part in np.split(x, 3)],
        [mx.io.DataBatch([mx.nd.array(part)]) for part in np.split(x, 3)],
        [mx.io.DataBatch([mx.nd.array(part)], pad=0) for part in np.split(x, 3)],
        (part for part in np.split(x, 3)),
        [*np.split(x, 3), x[:0]],
    ):
        assert recalibrate(model, data).samples == 12
        want = want or moving(model)
        assert same_arrays(moving(model), want)


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress(has_tqdm, monkeypatch):
    totals = []

    def tqdm(batches, total, **_):
        totals.append(total)
        return batches

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=tqdm) if has_tqdm else None)
    x = np.random.RandomState(1).randn(12, 4)
    for data in (data_iter(x), in_batches(x), iter(in_batches(x))):
        assert recalibrate(dense_net(), data, progress=True).samples == 12
    assert totals == ([3, 3, None] if has_tqdm else [])


def test_several_inputs_and_batch_axes():
    a, b, label = mx.sym.var("a"), mx.sym.var("b"), mx.sym.var("label")
    x = mxbn.sym.BatchNorm(a + b, axis=2, name="bn")
    symbol = mx.sym.SoftmaxOutput(mx.sym.mean(x, axis=0), label)
    zeros, ones = {"bn_gamma": mx.nd.ones(2), "bn_beta": mx.nd.zeros(2)}, mx.nd.ones(2)
    model = Checkpoint(symbol, zeros, {"bn_moving_mean": mx.nd.zeros(2), "bn_moving_var": ones})
    x = np.random.RandomState(0).randn(3, 5, 2).astype("float32")  # the batch is axis 1
    described = [mx.io.DataDesc(name, (3, 4, 2), layout="TNC") for name in ("b", "a")]
    batches = [
        mx.io.DataBatch([nd(x[:, :4]), nd(2 * x[:, :4])], pad=0, provide_data=described),
        mx.io.DataBatch([nd(x[:, 1:]), nd(2 * x[:, 1:])], pad=3, provide_data=described),
    ]
    used = np.concatenate([3 * x[:, :4], 3 * x[:, 1:2]], axis=1).astype("float64")
    (layer,) = recalibrate(model, batches, ctx=[mx.cpu(0), mx.cpu(1)]).layers
    np.testing.assert_allclose(layer.mean, used.mean(axis=(0, 1)), atol=1e-7)
    np.testing.assert_allclose(layer.var, used.var(axis=(0, 1)), rtol=1e-6)
    again = recalibrate(model, [[2 * x, x, 7]], inputs=("a", "b"))
    assert again.samples == 3
    with pytest.raises(ValueError, match="a batch has 1 arrays, expected a, b"):
        recalibrate(model, [x], inputs=("a", "b"))
    with pytest.raises(ValueError, match="the network takes a: neither the data nor the"):
        recalibrate(model, [x], inputs=("b",))
    with pytest.raises(ValueError, match=r"inputs of several sizes: \[2, 3\]"):
        recalibrate(model, [(x, x[:2])], inputs=("a", "b"))


def test_wrong_arguments():
    net = dense_net()
    x = np.random.RandomState(1).randn(12, 4)
    with pytest.raises(ValueError, match="earlier is 'training', expected 'batch' or 'moving'"):
        recalibrate(net, [x], earlier="training")
    with pytest.raises(ValueError, match="data can be read once"):
        recalibrate(net, iter([x]), earlier="moving")
    with pytest.raises(ValueError, match="data of 0 samples came to no layer"):
        recalibrate(net, [])
    with pytest.raises(ValueError, match="ctx was given, expected None: a HybridSequential has"):
        recalibrate(net, [x], ctx=[mx.cpu()])
    with pytest.raises(ValueError, match="layer x has no moving_mean: initialize the model"):
        recalibrate(mxbn.gluon.BatchNorm(prefix="x_"), [x])
    with pytest.raises(ValueError, match="the Module has no arrays"):
        recalibrate(mx.mod.Module(mxbn.sym.BatchNorm(mx.sym.var("data")), label_names=[]), [x])
    with pytest.raises(TypeError, match="a model of type str"):
        recalibrate("net", [x])


def test_layers_in_control_flow():
    def body(data, states):
        return mxbn.sym.BatchNorm(data, name="inner"), states

    outer = mxbn.sym.BatchNorm(mx.sym.var("data"), name="outer")
    symbol, _ = mx.sym.contrib.foreach(body, outer, [])
    states = {n: mx.nd.ones(2) for n in symbol.list_auxiliary_states()}
    names = [n for n in symbol.list_arguments() if n != "data"]
    model = Checkpoint(symbol, {n: mx.nd.ones(2) for n in names}, states)
    x = np.random.RandomState(0).randn(4, 2, 3).astype("float32")
    assert len(recalibrate(model, [x], "outer").layers) == 1
    with pytest.raises(ValueError, match="layer inner is in the body of control flow"):
        recalibrate(model, [x])


def test_numpy_mode(tmp_path):
    done = run_script(
        f"""
        import mxnet as mx, numpy as np, mxbn
        from mxbn.tools.recalibrate import recalibrate
        mx.npx.set_np()
        net = mx.gluon.nn.HybridSequential()
        net.add(mxbn.gluon.BatchNorm(in_channels=3), mxbn.gluon.BatchNorm(in_channels=3))
        net.initialize()
        net.hybridize()
        x = np.random.RandomState(0).randn(6, 3, 2, 2).astype("float32")
        net(mx.np.array(x))
        net.export({str(tmp_path / "net")!r})
        imported = mx.gluon.SymbolBlock.imports(
            {str(tmp_path / "net-symbol.json")!r}, ["data"], {str(tmp_path / "net-0000.params")!r})
        for each in (net, imported):
            for data in ([x[:4], x[4:]], [mx.np.array(x[:4]), mx.np.array(x[4:])]):
                first, second = recalibrate(each, data).layers
                assert np.allclose(first.mean, x.mean(axis=(0, 2, 3)), atol=1e-6)
                assert np.allclose(second.var, 1, atol=1e-4)
        print("well")
        """
    )
    assert done.stdout.strip() == "well", done.stderr


def run_command(*arguments):
    return main.main(["recalibrate", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path):
    x = np.random.RandomState(1).randn(12, 4)
    in_form("checkpoint", dense_net(), x, tmp_path)
    np.savez(tmp_path / "data.npz", data=x, label=np.arange(12), scale=2.0)
    return tmp_path / "net", tmp_path / "out", tmp_path / "data.npz"


def test_command(saved, capsys):
    prefix, out, data = saved
    assert run_command(prefix, out, "--data", data, "--batch-size", 5) == 0
    shown = capsys.readouterr().out
    assert "first_fwd" in shown
    assert "\nrecalibrated over 12 samples" in shown
    before, after = Checkpoint.load(str(prefix), 0), Checkpoint.load(str(out), 0)
    assert before.symbol.tojson() == after.symbol.tojson()
    assert same_arrays(
        *({n: a.asnumpy() for n, a in c.arg_params.items()} for c in (before, after))
    )
    recalibrate(before, data_iter(np.load(data)["data"]))
    assert same_arrays(moving(after), moving(before))
    arguments = [
        prefix,
        out,
        "--data",
        data,
        "--earlier",
        "moving",
        "--layers",
        "*third*",
        "--json",
    ]
    assert run_command(*arguments) == 1  # files are there
    assert "out-symbol.json exists already" in capsys.readouterr().err
    assert run_command(*arguments, "--force") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["samples"] == 12
    (layer,) = printed["layers"]
    assert layer["name"] == "third_fwd"
    assert layer["values"] == 12
    assert 0 < layer["smallest_variance_ratio"] <= layer["largest_variance_ratio"]


@pytest.mark.parametrize("content", ["truncated", "text", "other names", "other lengths"])
def test_command_with_wrong_data(content, saved, capsys):
    prefix, out, data = saved
    messages = {
        "truncated": "data.npz is damaged or no npz file of arrays",
        "text": "data.npz is damaged or no npz file of arrays",
        "other names": "data.npz holds images, expected arrays of one length for data",
        "other lengths": "data.npz holds data, expected arrays of one length for data",
    }
    if content == "truncated":
        data.write_bytes(data.read_bytes()[:-200])
    elif content == "text":
        data.write_text("text")
    else:
        np.savez(data, **{"images": np.ones((2, 4))} if content == "other names" else {"data": 3})
    assert run_command(prefix, out, "--data", data) == 1
    error = capsys.readouterr().err
    assert messages[content] in error
    assert error.count("\n") == 1
    assert not list(out.parent.glob("out*"))
