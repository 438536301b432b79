"""Conversion between the built-in operator and mxbn's."""

import argparse
import json

import mxnet as mx
import numpy as np
import pytest
from helpers import check, draw, nd, right, same_bits

import mxbn
from mxbn.commands import convert as command
from mxbn.tools import convert as module
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.convert import convert
from mxbn.tools.graph import Graph
from mxbn.tools.layers import MXBN, layers

nn = mx.gluon.nn
BUILTIN = type(nn.BatchNorm())
SHAPE = (2, 3, 32, 32)


def operators(symbol):
    return [node.op for _, node in Graph.from_symbol(symbol).walk() if "BatchNorm" in node.op]


def without_eps(symbol):
    """Return a Symbol's JSON, without the default eps, which a conversion writes down."""
    graph = Graph.from_symbol(symbol)
    for node in graph.nodes():
        if node.attrs.get("eps") == "0.0010000000474974513":
            del node.attrs["eps"]
    return graph.to_symbol().tojson()


def randomize(net, seed=0):
    """Statistics, gamma and beta as training may leave them."""
    rs = np.random.RandomState(seed)
    for name, p in net.collect_params().items():
        if p._data is None:
            continue
        if name.endswith(("gamma", "var")):
            p.set_data(nd(rs.uniform(0.5, 2, p.shape), p.dtype))
        elif name.endswith(("beta", "mean")):
            p.set_data(nd(rs.randn(*p.shape), p.dtype))
    return net


def resnet(hybridize=None):
    net = mx.gluon.model_zoo.vision.resnet18_v1(classes=10)
    net.initialize(mx.init.Xavier(rnd_type="gaussian"))
    if hybridize is not None:
        net.hybridize(**hybridize)
    net(mx.nd.zeros(SHAPE))
    return randomize(net)


def small(layer, dtype="float32", ctx=None):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), layer, nn.Activation("relu"), nn.Conv2D(2, 1))
    net.initialize(ctx=ctx)
    net.cast(dtype)
    for each in ctx or [mx.current_context()]:
        net(mx.nd.ones((2, 3, 6, 6), ctx=each, dtype=dtype))
    return randomize(net)


def x_for(dtype="float32", seed=1, ctx=None):
    return mx.nd.array(np.random.RandomState(seed).randn(2, 3, 6, 6), ctx=ctx, dtype=dtype)


def snapshot(net):
    mx.nd.waitall()
    return {
        (name, str(array.ctx)): array.asnumpy()
        for name, p in net.collect_params().items()
        for array in p.list_data()
    }


def unchanged(net, before):
    now = snapshot(net)
    return now.keys() == before.keys() and all(same_bits(now[key], before[key]) for key in now)


def module_checkpoint():
    """A trained network of the built-in layers, as Module saves it."""
    net = mx.sym.Convolution(mx.sym.var("data"), num_filter=4, kernel=(3, 3), name="conv")
    net = mx.sym.relu(mx.sym.BatchNorm(net, fix_gamma=False, eps=2e-4, name="bn"))
    shared = {key: mx.sym.var(f"again_{key}") for key in ("gamma", "beta")}
    for name in ("first", "second"):
        net = mx.sym.BatchNorm(net, **shared, cudnn_off=True, name=name)
    net = mx.sym.FullyConnected(net, num_hidden=3, name="fc")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    net = mx.mod.Module(net)
    net.bind([("data", (4, 2, 6, 6))], [("softmax_label", (4,))])
    net.init_params(mx.init.Xavier())
    net.init_optimizer()
    for _ in range(3):
        batch = mx.io.DataBatch([mx.nd.random.normal(shape=(4, 2, 6, 6))], [mx.nd.arange(4) % 3])
        net.forward_backward(batch)
        net.update()
    mx.nd.waitall()
    return net


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    prefix = str(tmp_path_factory.mktemp("saved") / "net")
    module_checkpoint().save_checkpoint(prefix, 3)
    return prefix


# Symbols and checkpoints


def test_a_checkpoint_is_converted_and_back(saved):
    before = Checkpoint.load(saved, 3)
    there = convert(before, data={"data": (4, 2, 6, 6)})
    assert there.converted == ["bn", "first", "second"]
    assert operators(there.model.symbol) == [MXBN] * 3
    assert there.difference < 1e-5
    back = convert(there.model, "builtin", data={"data": (4, 2, 6, 6)})
    assert operators(back.model.symbol) == ["BatchNorm"] * 3
    assert without_eps(back.model.symbol) == without_eps(before.symbol)
    assert operators(before.symbol) == ["BatchNorm"] * 3
    for done in (there, back):
        for kind in ("arg_params", "aux_params"):
            was, now = getattr(before, kind), getattr(done.model, kind)
            assert was.keys() == now.keys()
            assert all(now[name] is was[name] for name in was)


def test_a_module_and_a_tuple_give_a_checkpoint(saved):
    trained = module_checkpoint()
    for model in (trained, tuple(Checkpoint.load(saved, 3))):
        done = convert(model, data=(4, 2, 6, 6))
        assert isinstance(done.model, Checkpoint)
        assert operators(done.model.symbol) == [MXBN] * 3


@pytest.mark.parametrize("to", ["mxbn", "builtin"])
@pytest.mark.parametrize(("dtype", "axis"), [("float16", 1), ("float32", -1), ("float64", 0)])
def test_a_converted_symbol_computes_what_the_reference_does(to, dtype, axis):
    d = draw((4, 3, 5, 4), axis=axis, dtype=dtype)
    attributes = {"fix_gamma": True, "eps": 1e-2}
    make = mx.sym.BatchNorm if to == "mxbn" else mxbn.sym.BatchNorm
    symbol = make(mx.sym.var("x"), name="bn", axis=axis, **attributes)
    names = ("gamma", "beta", "moving_mean", "moving_var")
    arrays = {f"bn_{key}": nd(getattr(d, key), d.param) for key in names}
    aux = {key: arrays.pop(key) for key in symbol.list_auxiliary_states()}
    kept = arrays["bn_gamma"].asnumpy()
    done = convert((symbol, arrays, aux), to, data={"x": nd(d.x, dtype)})
    assert done.converted == ["bn"]
    assert same_bits(arrays["bn_gamma"], kept)
    assert "the stored gamma is not 1" in done.changes[0].remarks[0]
    assert ("will overwrite" in done.changes[0].remarks[0]) == (to == "builtin")
    args = {**{k: v.copy() for k, v in arrays.items()}, "x": nd(d.x, dtype)}
    executor = done.model.symbol.bind(mx.current_context(), args, grad_req="null", aux_states=aux)
    want = right(d, False, **attributes).output
    check(executor.forward(is_train=False)[0], want, 4, what="output")


@pytest.mark.parametrize("to", ["mxbn", "builtin"])
def test_the_default_eps_is_kept_to_the_last_digit(to):
    """1e-3 is not the same number in both operators; random data has the model's type."""
    symbol = (mx if to == "mxbn" else mxbn).sym.BatchNorm(DATA, name="bn")
    names = symbol.list_arguments()[1:], symbol.list_auxiliary_states()
    model = (symbol, *({n: mx.nd.ones(3, dtype="float64") for n in each} for each in names))
    assert convert(model, to, data=(2, 3, 4)).difference < 1e-15


def test_attributes_of_the_node_survive():
    with mx.AttrScope(ctx_group="dev1", __lr_mult__="3"):
        symbol = mx.sym.BatchNorm(mx.sym.var("data"), momentum=0.5, name="bn", cudnn_off=True)
    symbol = mx.sym.BatchNorm(symbol, min_calib_range=-1.0, max_calib_range=2.0, name="last")
    done = convert(symbol)
    first, last = (n for n in Graph.from_symbol(done.model).nodes() if n.op == MXBN)
    assert first.attrs == {
        "momentum": "0.5", "cudnn_off": "True", "__ctx_group__": "dev1", "__lr_mult__": "3",
        "eps": "0.0010000000474974513",
    }  # fmt: skip
    assert list(last.attrs) == ["eps"]
    assert [c.remarks for c in done.changes] == [
        ("cudnn_off has no effect",), ("the range found by calibration is dropped",)
    ]  # fmt: skip


def test_outputs_of_mean_and_variance_stay():
    symbol = mx.sym.BatchNorm(mx.sym.var("data"), output_mean_var=True, name="bn")
    symbol = mx.sym.Group([symbol[2], symbol[0] * 2])
    done = convert(symbol, data=(2, 3, 4))
    assert done.model.list_outputs() == symbol.list_outputs()
    assert done.difference < 1e-6


def test_control_flow_is_converted_inside():
    def body(x, state):
        return mx.sym.BatchNorm(x, name="bn", fix_gamma=False), state

    data, start = mx.sym.var("data"), mx.sym.var("start")
    symbol, _ = mx.sym.contrib.foreach(body, data, [start])
    done = convert(symbol, data={"data": (2, 3, 4), "start": (1,)})
    assert operators(done.model) == [MXBN]
    assert done.difference < 1e-6
    assert operators(convert(done.model, "builtin").model) == ["BatchNorm"]


def test_what_oneDNN_has_fused_is_left():
    symbol = mx.sym.Convolution(mx.sym.var("data"), num_filter=4, kernel=(3, 3), name="conv")
    symbol = mx.sym.BatchNorm(symbol, name="bn")
    fused = symbol.get_backend_symbol("MKLDNN")
    assert any(node.subgraphs for node in Graph.from_symbol(fused).nodes())
    done = convert(fused)
    assert done.converted == []
    assert done.left[0].remarks[0].startswith("is a part of sg_mkldnn_conv_bn_0, a _sg_mkldnn")
    assert operators(done.model) == operators(fused)


DATA = mx.sym.var("data")


@pytest.mark.parametrize(
    ("symbol", "to", "reason"),
    [
        (mxbn.sym.BatchNorm(DATA, use_batch_stats=True), "builtin", "nothing like use_batch_stats"),
        (
            mxbn.sym.BatchNorm(DATA, use_global_stats=True, step_global_stats=True),
            "builtin",
            "nothing like step_global_stats",
        ),
        (mx.sym.BatchNorm(DATA, eps=-1.0), "mxbn", "eps is '-1.0', expected a finite number"),
        (mx.sym.BatchNorm(DATA, momentum=2.0), "mxbn", "momentum is '2.0', expected a number"),
        (mx.sym.BatchNorm_v1(DATA, output_mean_var=True), "mxbn", "third output is the variance"),
        (mx.sym.contrib.SyncBatchNorm(DATA, key="k"), "mxbn", "over several devices"),
        (mx.sym.contrib.BatchNormWithReLU(DATA), "builtin", "computes a ReLU too"),
    ],
)
def test_layers_that_have_no_counterpart_are_left(symbol, to, reason):
    done = convert(symbol, to, data=(2, 3, 4, 4))
    assert reason in done.left[0].remarks[0]
    assert (done.converted, done.difference) == ([], None)
    assert done.unchecked == "nothing was converted"
    assert done.model.tojson() == symbol.tojson()


def test_the_old_built_in_operator_is_converted():
    done = convert(mx.sym.BatchNorm_v1(DATA, name="bn", eps=1e-2), data=(2, 3, 4, 4))
    assert operators(done.model) == [MXBN]
    assert done.difference < 1e-6


def test_the_built_in_operator_with_a_relu_is_converted():
    symbol = mx.sym.contrib.BatchNormWithReLU(DATA, name="bn", fix_gamma=False)
    done = convert(symbol, data=(2, 3, 4, 4))
    assert operators(done.model) == [MXBN]
    assert done.model.attr_dict()["bn"]["act_type"] == "relu"
    assert done.difference < 1e-6


def test_the_built_in_layer_with_a_relu_is_converted():
    net = nn.HybridSequential()
    net.add(nn.BatchNormReLU(in_channels=3))
    net.initialize()
    done = convert(net, data=(2, 3, 4, 4))
    assert type(net[0]) is mxbn.gluon.BatchNormReLU
    assert done.difference < 1e-6
    back = convert(net, "builtin")
    assert back.left[0].remarks == ("is a BatchNormReLU, made from BatchNorm",)


def test_layers_of_the_kind_wanted_are_not_counted_as_left():
    done = convert(mxbn.sym.BatchNorm(mx.sym.BatchNorm(DATA, name="a"), name="b"))
    assert done.converted == ["a"]
    assert done.left == []
    assert done.changes[1].remarks == (module.ALREADY,)


def test_symbols_of_numpy_mode_stay_so():
    parameters = [mx.sym.var(n).as_np_ndarray() for n in ("gamma", "beta", "mean", "var")]
    symbol = mx.sym.npx.batch_norm(DATA.as_np_ndarray(), *parameters, name="bn")
    done = convert(symbol, data=(2, 3, 4))
    assert type(done.model) is type(symbol)
    assert done.difference < 1e-6


# The check


def test_what_cannot_be_checked_is_said(saved):
    done = convert(Checkpoint.load(saved, 3))
    assert done.difference is None
    assert done.unchecked == "the shape of data is not known"
    known = mx.sym.BatchNorm(mx.sym.var("data", shape=(2, 3, 4)), name="bn")
    assert convert(known).difference < 1e-6
    layer = nn.BatchNorm(in_channels=3)
    layer.initialize()
    assert convert(layer).unchecked == "no data was given"


def plant(monkeypatch, fault):
    plain = module.understood
    monkeypatch.setattr(module, "understood", lambda *args: {**plain(*args), **fault})


def test_a_difference_is_an_error_that_names_the_layer(saved, monkeypatch):
    checkpoint = Checkpoint.load(saved, 3)
    before = {k: a.asnumpy() for k, a in {**checkpoint[1], **checkpoint[2]}.items()}
    plant(monkeypatch, {"eps": "0.001"})
    message = r"mxbn: layer bn would differ by .* of its largest value, expected at most .*e-06"
    with pytest.raises(ValueError, match=message):
        convert(checkpoint, data=(4, 2, 6, 6))
    assert convert(checkpoint, data=(4, 2, 6, 6), tolerance=0.5).difference > 1e-5
    after = {**checkpoint[1], **checkpoint[2]}
    assert all(same_bits(after[name], before[name]) for name in before)


def test_a_difference_that_the_outputs_hide_is_found(monkeypatch):
    plant(monkeypatch, {"eps": "0.1"})
    with pytest.raises(ValueError, match="layer bn would differ by"):
        convert(mx.sym.BatchNorm(DATA, name="bn") * 0, data=(2, 3, 4))


def test_values_that_are_no_longer_finite_are_an_error(monkeypatch):
    symbol = mx.sym.BatchNorm(DATA, name="bn", fix_gamma=False)
    arrays = {"bn_gamma": mx.nd.ones(3), "bn_beta": mx.nd.ones(3)}
    states = {"bn_moving_mean": mx.nd.zeros(3), "bn_moving_var": nd([0, 1, -2e-4])}
    plant(monkeypatch, {"eps": "0.0"})
    with pytest.raises(ValueError, match="layer bn would no longer be finite in the same places"):
        convert((symbol, arrays, states), data=(2, 3, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input": (1, 2, 6, 6)}, "data is given for input, expected one of data, conv_weight"),
        ({"data": (1, 3, 6, 6)}, "the shapes do not fit"),
        ({"softmax_label": (4,)}, "the shape of data is not known"),
        ({"softmax_label": (5,), "data": (4, 2, 6, 6)}, "the shapes do not fit"),
        (mx.nd.ones((4, 2, 6, 6), dtype="float64"), "the shapes do not fit|does not run"),
    ],
)
def test_wrong_data_is_refused(saved, data, message):
    with pytest.raises(ValueError, match=message):
        convert(Checkpoint.load(saved, 3), data=data)


def test_wrong_arguments_are_refused(saved):
    with pytest.raises(ValueError, match="to is 'cudnn', expected 'mxbn' or 'builtin'"):
        convert(Checkpoint.load(saved, 3), "cudnn")
    with pytest.raises(TypeError, match="a model of type str was given"):
        convert(saved)
    broken = Checkpoint.load(saved, 3)
    del broken.aux_params["bn_moving_var"]
    with pytest.raises(ValueError, match="auxiliary states are missing"):
        convert(broken)


def test_statistics_of_a_wrong_shape_are_refused():
    computed = {key: mx.sym.var(key) * 1 for key in ("gamma", "beta")}
    symbol = mx.sym.BatchNorm(DATA, **computed, name="bn")
    arrays = {key: mx.nd.ones(4) for key in computed}
    states = {f"bn_moving_{key}": mx.nd.ones(3) for key in ("mean", "var")}
    with pytest.raises(ValueError, match=r"bn_moving_mean has shape \(3,\), expected \(4,\)"):
        convert((symbol, arrays, states), data=(2, 4, 3))


# Gluon


@pytest.mark.parametrize(
    "hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=str
)
def test_a_network_is_converted_in_place(hybridize):
    net = resnet(hybridize)
    x = mx.nd.random.normal(shape=SHAPE)
    output, before = net(x), snapshot(net)
    parameters = dict(net.collect_params().items())
    done = convert(net, data=x)
    assert done.model is net
    assert len(done.converted) == 20
    assert {layer.op for layer in layers(net)} == {MXBN}
    assert all(net.collect_params()[name] is p for name, p in parameters.items())
    assert unchanged(net, before)
    check(net(x), output.asnumpy(), 200, what="output")
    back = convert(net, "builtin", data=SHAPE)
    assert len(back.converted) == 20
    assert {type(layer.source) for layer in layers(net)} == {BUILTIN}
    assert {type(p) for p in net.collect_params().values()} == {mx.gluon.Parameter}
    assert unchanged(net, before)
    assert same_bits(net(x), output)


def test_trainers_and_gradients_go_on():
    """One step after the conversion is that of a network which had mxbn's layers all along."""
    results = []
    for layer, converted in ((nn.BatchNorm, True), (mxbn.gluon.BatchNorm, False)):
        mx.random.seed(0)
        net = small(layer())
        net.hybridize(static_alloc=True)
        parameters = list(net.collect_params().values())
        parameters[2].lr_mult = 3
        parameters[3].grad_req = "add"
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
        x = x_for()
        net(x)
        parameters[3].grad()[:] = 7
        if converted:
            assert convert(net, data=x).converted == [net[1].name]
        for _ in range(2):
            with mx.autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            trainer.step(2)
        mx.nd.waitall()
        assert parameters == list(net.collect_params().values())
        results.append([p.data().asnumpy() for p in parameters] + [parameters[3].grad().asnumpy()])
    assert all(same_bits(a, b) for a, b in zip(*results))


class Network(mx.gluon.Block):
    """Has a layer as an attribute and two in a container, one of them shared."""

    def __init__(self, shared):
        super().__init__()
        with self.name_scope():
            self.layer = nn.BatchNorm(in_channels=3)
            self.stack = nn.HybridSequential()
            self.stack.add(shared, nn.BatchNorm(in_channels=3))

    def forward(self, x):
        return self.stack(self.layer(x))


def test_every_way_to_a_layer_stays_right():
    shared = nn.BatchNorm(in_channels=3)
    net, other = Network(shared), nn.HybridSequential()
    other.add(shared)
    net.initialize()
    other.hybridize()
    calls = []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    x = mx.nd.random.normal(shape=(2, 3, 4))
    places = [net.layer, net.stack[0], net.stack[1], other[0]]
    names = [each.name for each in places]
    with mx.autograd.train_mode():
        other(x)  # traced with the built-in operator
    done = convert(net, data=x)
    assert done.converted == [net.layer.name, shared.name, net.stack[1].name]
    assert [net.layer, net.stack[0], net.stack[1], other[0]] == places
    assert [type(each) for each in places] == [mxbn.gluon.BatchNorm] * 4
    assert [each.name for each in places] == names
    assert repr(shared).startswith("BatchNorm(axis=1, eps=1e-05, momentum=0.9, fix_gamma=False")
    calls.clear()
    net(x)
    assert calls == ["hook"]
    with mx.autograd.train_mode():
        other(x)  # traced anew: mxbn's operator steps in forward
    mx.nd.waitall()
    assert (shared.running_mean.data().asnumpy() != 0).all()
    shared.use_batch_stats = True  # as mxbn's layer can
    assert [c.name for c in convert(net, "builtin").left] == [shared.name]


def test_a_layer_by_itself_is_converted():
    layer = nn.BatchNorm(in_channels=3)
    layer.initialize()
    assert convert(layer, data=(2, 3, 4)).model is layer
    assert type(layer) is mxbn.gluon.BatchNorm


def test_files_interchange_after_a_conversion(tmp_path):
    net, builtin = small(nn.BatchNorm()), small(nn.BatchNorm())
    x = x_for()
    output = net(x)
    convert(net, data=x)
    net.save_parameters(str(tmp_path / "net.params"))
    builtin.load_parameters(str(tmp_path / "net.params"))
    check(builtin(x), output.asnumpy(), 8)
    net.hybridize()
    net(x)
    net.export(str(tmp_path / "net"))
    exported = Checkpoint.load(str(tmp_path / "net"), 0)
    assert operators(exported.symbol) == [MXBN]
    loaded = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    check(loaded(x), output.asnumpy(), 8)


@pytest.mark.parametrize("hybridize", [False, True])
def test_an_imported_network_inside_another_is_converted(tmp_path, hybridize):
    net = small(nn.BatchNorm(scale=False))
    net.hybridize()
    x = x_for()
    net(x)
    net.export(str(tmp_path / "net"))
    imported = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    outer = nn.HybridSequential()
    outer.add(imported, nn.BatchNorm(in_channels=2))
    outer[1].initialize()
    if hybridize:
        outer.hybridize()
    imported.collect_params()[f"{net[1].name}_gamma"].set_data(nd([1, 2, 3, 4]))
    outer(x)
    imported.collect_params()[f"{net[1].name}_gamma"].set_data(nd([1, 2, 3, 4]))
    before = snapshot(outer)
    done = convert(outer, data=x)
    assert done.converted == [f"{net[1].name}_fwd", outer[1].name]
    assert unchanged(outer, before)
    outer(x)
    assert unchanged(outer, before)  # the built-in operator would overwrite gamma
    with mx.autograd.record():
        outer(x)
    mx.nd.waitall()
    assert not unchanged(outer, before)  # its statistics step in forward: mxbn's operator ran
    assert len(convert(outer, "builtin", data=x).converted) == 2


@pytest.mark.parametrize("imported", [False, True])
def test_a_difference_rolls_a_block_back(tmp_path, monkeypatch, imported):
    net = small(nn.BatchNorm(scale=False))
    net.hybridize()
    x = x_for()
    net(x)
    net.export(str(tmp_path / "net"))
    if imported:
        files = (str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
        net = mx.gluon.SymbolBlock.imports(*files)
    gamma = next(p for name, p in net.collect_params().items() if name.endswith("gamma"))
    gamma.set_data(nd([1, 2, 3, 4]))
    before, classes = snapshot(net), [type(p) for p in net.collect_params().values()]

    class Wrong(mxbn.gluon.BatchNorm):
        def hybrid_forward(self, F, x, *parameters, **named):
            return super().hybrid_forward(F, x * 1.001, *parameters, **named)

    monkeypatch.setitem(module._CLASSES["mxbn"], nn.BatchNorm, Wrong)
    plant(monkeypatch, {"eps": "0.1"})
    with pytest.raises(ValueError, match=r"output 0 would differ by .* nothing was changed"):
        convert(net, data=x)
    assert [layer.op for layer in layers(net)] == ["BatchNorm"]
    assert [type(p) for p in net.collect_params().values()] == classes
    assert unchanged(net, before)
    with mx.autograd.record():
        net(x)
    mx.nd.waitall()
    now = snapshot(net)
    assert all(same_bits(now[key], before[key]) for key in now if "running" in key[0])  # no step


def test_layers_of_other_classes_are_left():
    class Own(nn.BatchNorm):
        pass

    net = nn.HybridSequential()
    sync = mx.gluon.contrib.nn.SyncBatchNorm(num_devices=1)
    net.add(Own(), sync, nn.BatchNorm(epsilon=-1.0), nn.BatchNorm())
    done = convert(net)
    assert done.converted == [net[3].name]
    assert [each.remarks[0].split(",")[0] for each in done.left] == [
        "is a Own", "takes its statistics over several devices",
        "mxbn: BatchNorm: eps is '-1.0'",
    ]  # fmt: skip
    assert type(net[0]) is Own


def test_statistics_shared_with_a_layer_of_mxbn_that_stays():
    stays = mxbn.gluon.BatchNorm(use_batch_stats=True, in_channels=3)
    goes = mxbn.gluon.BatchNorm(in_channels=3, params=stays.params)
    net = nn.HybridSequential()
    net.add(stays, goes)
    net.initialize()
    assert convert(net, "builtin").converted == [goes.name]
    x = mx.nd.random.normal(shape=(2, 3, 4))
    x.attach_grad()
    stays.hybridize()
    with mx.autograd.record():
        first, second = stays(x).sum(), stays(x).sum()
    first.backward()
    second.backward()  # their graphs are apart, which takes mxbn's parameters


def test_all_contexts_keep_their_arrays():
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = small(nn.BatchNorm(scale=False), ctx=ctx)
    before = snapshot(net)
    arrays = [a for p in net.collect_params().values() for a in p.list_data()]
    assert convert(net, data=x_for(ctx=ctx[1])).difference < 1e-5
    assert unchanged(net, before)
    now = [a for p in net.collect_params().values() for a in p.list_data()]
    assert all(a is b for a, b in zip(arrays, now))


def test_networks_that_are_not_initialized():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm())
    with pytest.raises(ValueError, match="_gamma is not initialized, expected a block that can"):
        convert(net, data=(2, 3, 4))
    assert type(net[0]) is BUILTIN
    net.initialize()
    assert convert(net).converted == [net[0].name]
    net(mx.nd.ones((2, 3, 4)))
    assert net[0].gamma.shape == (3,)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types(dtype):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), nn.Activation("relu"), nn.BatchNorm(in_channels=3))
    net.initialize()
    net.cast(dtype)
    x = x_for(dtype)
    assert convert(randomize(net), data=x).difference <= 4 * np.finfo(dtype).eps
    assert net(x).dtype == np.dtype(dtype)


def test_blocks_in_numpy_mode():
    with mx.util.np_shape(True), mx.util.np_array(True):
        layer = nn.BatchNorm(in_channels=3)
        layer.initialize()
        layer.hybridize()
        done = convert(layer, data=mx.np.random.normal(size=(2, 3, 4)))
        assert done.difference < 1e-6
        assert isinstance(layer(mx.np.ones((2, 3, 4))), mx.np.ndarray)


# The command


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["convert", *map(str, arguments)])
    return options.run(options)


def test_the_command_converts_files(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    assert run(saved, out, "--epoch", 3, "--shape", "data=4,2,6,6") == 0
    text = capsys.readouterr().out
    assert "3 of 3 layers converted" in text
    assert "differ by at most" in text
    assert operators(Checkpoint.load(str(out), 3).symbol) == [MXBN] * 3
    with pytest.raises(FileExistsError, match=r"out-symbol\.json exists already"):
        run(saved, out, "--epoch", 3)
    assert run(out, out, "--epoch", 3, "--to", "builtin", "--force") == 0
    assert "outputs NOT compared: the shape of data is not known" in capsys.readouterr().out
    back, before = Checkpoint.load(str(out), 3), Checkpoint.load(saved, 3)
    assert without_eps(back.symbol) == without_eps(before.symbol)
    assert all(same_bits(back.arg_params[k], a) for k, a in before.arg_params.items())


def test_the_command_prints_json_and_reports_layers_left(tmp_path, capsys):
    symbol = mx.sym.contrib.SyncBatchNorm(mx.sym.BatchNorm(DATA, name="a"), name="b", key="b")
    arrays = {f"a_{n}": mx.nd.ones(3) for n in ("gamma", "beta", "moving_mean", "moving_var")}
    arrays.update({name.replace("a_", "b_"): each for name, each in arrays.items()})
    aux = {name: arrays.pop(name) for name in symbol.list_auxiliary_states()}
    Checkpoint(symbol, arrays, aux).save(str(tmp_path / "net"), 0)
    assert run(tmp_path / "net", tmp_path / "out", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["layers"][0] == {"name": "a", "op": "BatchNorm", "to": MXBN, "remarks": []}
    assert report["layers"][1]["to"] is None
    assert report["files"][0] == str(tmp_path / "out-symbol.json")


def test_the_command_writes_nothing_if_something_is_wrong(saved, tmp_path, monkeypatch):
    def refuses(error, *arguments):
        with pytest.raises(error):
            run(saved, tmp_path / "out", *arguments)
        assert list(tmp_path.iterdir()) == []

    refuses(OSError, "--epoch", 4)
    refuses(ValueError, "--epoch", 3, "--shape", "data=4,1,6,6")
    refuses(SystemExit, "--shape", "data")
    plant(monkeypatch, {"eps": "0.1"})
    refuses(ValueError, "--epoch", 3, "--shape", "data=4,2,6,6")


def test_a_damaged_file_is_named(saved, tmp_path):
    for ending in ("-symbol.json", "-0003.params"):
        with open(saved + ending, "rb") as file:
            (tmp_path / f"net{ending}").write_bytes(file.read())
    params = tmp_path / "net-0003.params"
    params.write_bytes(params.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"net-0003\.params is damaged"):
        run(tmp_path / "net", tmp_path / "out", "--epoch", 3)


def test_flags_without_effect_are_dropped():
    net = mx.gluon.nn.HybridSequential()
    net.add(mxbn.gluon.BatchNorm(in_channels=3, step_global_stats=True))
    net.initialize()
    x = mx.nd.random.normal(shape=(4, 3))
    before = net(x).asnumpy()
    assert convert(net, "builtin").converted == [net[0].name]
    np.testing.assert_allclose(net(x).asnumpy(), before, 1e-5, 1e-6)
    symbol = mxbn.sym.BatchNorm(DATA, name="bn", act_type="None", with_addend=False)
    done = convert(symbol, "builtin")
    assert done.converted == ["bn"]
    (node,) = [n for n in json.loads(done.model.tojson())["nodes"] if n["op"] == "BatchNorm"]
    assert "with_addend" not in node["attrs"]
