"""mxbn.fuse: which nodes are joined, in which networks, and that these compute the same."""

import mxnet as mx
import numpy as np
import pytest
from helpers import CONTEXT, nd, same_bits
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mxbn
from mxbn.tools import fuse as module
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.convert import convert
from mxbn.tools.fold import fold
from mxbn.tools.graph import Graph

pytestmark = pytest.mark.mxnet_operators

MXBN = "mxbn_BatchNorm"
DATA, OTHER = mx.sym.var("data"), mx.sym.var("other")


def operators(symbol):
    return [node.op for node in Graph.from_symbol(symbol).nodes() if node.op != "null"]


def bn(data=DATA, package=mx, **attributes):
    return package.sym.BatchNorm(data, name="bn", **attributes)


def relu(data):
    return mx.sym.Activation(data, act_type="relu", name="act")


# ----------------------------------------------------------------------------------------- Symbols

FOUND = {
    "relu": lambda package: mx.sym.relu(bn(package=package), name="act"),
    "activation": lambda package: relu(bn(package=package)),
    "add": lambda package: relu(bn(package=package) + OTHER),
    "add, the other way": lambda package: relu(OTHER + bn(package=package)),
    "broadcast_add": lambda package: relu(mx.sym.broadcast_add(OTHER, bn(package=package))),
    "both terms": lambda package: relu(
        bn(package=package) + package.sym.BatchNorm(OTHER, name="bn1")
    ),
    "the data itself": lambda package: relu(bn(package=package) + DATA),
}


@pytest.mark.parametrize("package", [mx, mxbn], ids=["built-in", "mxbn"])
@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)
def test_patterns_are_joined(package, make):
    symbol = make(package)
    shapes = {name: (4, 3, 5) for name in symbol.list_inputs() if name in ("data", "other")}
    fused = mxbn.fuse(symbol, shapes)
    count = symbol.tojson().count("BatchNorm")
    assert operators(fused).count(MXBN) == (1 if package is mx else count)
    assert len(operators(fused)) == count
    assert sorted(fused.list_arguments()) == sorted(symbol.list_arguments())
    assert fused.list_auxiliary_states() == symbol.list_auxiliary_states()
    assert fused.list_outputs() == symbol.list_outputs() == ["act_output"]
    assert same_training(symbol, fused, shapes)


def same_training(before, after, shapes):
    """Compare a step of training of two Symbols."""
    results = []
    for symbol in (before, after):
        executor = symbol.simple_bind(CONTEXT, grad_req="write", **shapes)
        rs = np.random.RandomState(0)
        for name in sorted(executor.arg_dict):
            executor.arg_dict[name][:] = rs.standard_normal(executor.arg_dict[name].shape)
        for name, array in executor.aux_dict.items():
            array[:] = name.endswith("var")
        (output,) = executor.forward(is_train=True)
        executor.backward(nd(rs.standard_normal(output.shape)))
        mx.nd.waitall()
        found = {"output": output, **executor.grad_dict, **executor.aux_dict}
        results.append({name: array.asnumpy() for name, array in found.items()})
    for name, want in results[0].items():
        np.testing.assert_allclose(results[1][name], want, 1e-4, 1e-5, err_msg=name)
    return True


def twice(data):
    return mx.sym.Group([relu(data), data])


LEFT = {
    "another activation": mx.sym.Activation(bn(), act_type="tanh"),
    "nothing": bn(),
    "an output": twice(bn()),
    "a sum that is an output": twice(bn() + OTHER),
    "used twice": (lambda y: relu(y + OTHER) + y)(bn()),
    "twice in the sum": (lambda y: relu(y + y))(bn()),
    "its statistics are used": (lambda y: mx.sym.broadcast_mul(relu(y[0]), mx.sym.sum(y[1])))(
        bn(output_mean_var=True)
    ),
    "a ReLU of its mean": relu(bn(output_mean_var=True)[1]),
    "what broadcasts": relu(mx.sym.broadcast_add(bn(), mx.sym.sum(DATA, axis=0, keepdims=True))),
    "over devices": relu(mx.sym.contrib.SyncBatchNorm(DATA, key="k", name="bn")),
    "out of range": relu(bn(eps=-1.0)),
    "with a ReLU already": relu(mx.sym.contrib.BatchNormWithReLU(DATA, name="bn") + OTHER),
    "fused already": relu(bn(package=mxbn, act_type="relu")),
    "with an addend already": relu(bn(package=mxbn, addend=OTHER)),
}
with mx.AttrScope(ctx_group="a"):
    _ON_ANOTHER_DEVICE = bn()
LEFT["on another device"] = relu(_ON_ANOTHER_DEVICE)


@pytest.mark.parametrize("symbol", LEFT.values(), ids=LEFT)
def test_what_is_no_pattern_is_left(symbol):
    shapes = dict.fromkeys({"data", "other"} & {*symbol.list_inputs()}, (4, 3, 5))
    for data in (shapes, None):
        assert mxbn.fuse(symbol, data).tojson() == symbol.tojson()


def test_an_addition_that_may_broadcast_is_joined_where_shapes_are_known():
    symbol = relu(mx.sym.broadcast_add(bn(), OTHER))
    assert mxbn.fuse(symbol).tojson() == symbol.tojson()
    assert operators(mxbn.fuse(symbol, {"data": (4, 3), "other": (4, 3)})) == [MXBN]
    broadcast = mxbn.fuse(symbol, {"data": (4, 3), "other": (1, 3)})
    assert operators(broadcast) == operators(symbol)


def test_attributes_are_kept():
    symbol = relu(bn(eps=0.25, momentum=0.5, axis=-1, fix_gamma=False, use_global_stats=True))
    attributes = mxbn.fuse(symbol).attr_dict()["act"]
    assert attributes["act_type"] == "relu"
    for key, value in symbol.attr_dict()["bn"].items():
        assert attributes[key] == value
    ours = relu(bn(package=mxbn, use_batch_stats=True))
    assert mxbn.fuse(ours).attr_dict()["act"]["use_batch_stats"] == "True"
    assert float(mxbn.fuse(relu(bn())).attr_dict()["act"]["eps"]) == np.float32(1e-3)


def test_symbols_of_numpy_mode():
    parameters = [mx.sym.var(n).as_np_ndarray() for n in ("gamma", "beta", "mean", "var")]
    y = mx.sym.npx.batch_norm(DATA.as_np_ndarray(), *parameters, name="bn")
    symbol = mx.sym.npx.relu(y + OTHER.as_np_ndarray())
    fused = mxbn.fuse(symbol, {"data": (2, 3, 4), "other": (2, 3, 4)})
    assert type(fused) is type(symbol)
    assert operators(fused) == [MXBN]


def test_a_difference_is_an_error(monkeypatch):
    plain = module.understood
    monkeypatch.setattr(module, "understood", lambda *a: {**plain(*a), "eps": "0.5"})
    with pytest.raises(ValueError, match=r"output act_output would differ by .* nothing was chan"):
        mxbn.fuse(relu(bn()), (4, 3))
    net = block()
    net(mx.nd.ones((2, 5)))
    with pytest.raises(ValueError, match="output 0 would differ by"):
        mxbn.fuse(net, (4, 5))
    mxbn.fuse(relu(bn()), (4, 3), tolerance=1)


def test_data_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="data is given for more, expected one of data, bn_gamma"):
        mxbn.fuse(relu(bn()), {"more": (4, 3)})
    with pytest.raises(TypeError, match="a model of type int was given"):
        mxbn.fuse(1)


# ------------------------------------------------------------------------------------------ models


def values(symbol, **shapes):
    rs = np.random.RandomState(1)
    found, _, states = symbol.infer_shape(**shapes)
    arrays = [nd(rs.uniform(0.5, 1.5, shape)) for shape in (*found, *states)]
    named = dict(zip(symbol.list_arguments() + symbol.list_auxiliary_states(), arrays))
    states = {n: named.pop(n) for n in symbol.list_auxiliary_states()}
    return {n: a for n, a in named.items() if n not in shapes}, states


def test_a_checkpoint_and_back():
    """Converted to the built-in operator, or folded, a fused node is taken apart again."""
    y = mx.sym.Convolution(DATA, num_filter=3, kernel=(1, 1), name="conv")
    symbol = relu(bn(y, package=mxbn, fix_gamma=False) + DATA)
    checkpoint = Checkpoint(symbol, *values(symbol, data=(2, 3, 4, 4)))
    fused = mxbn.fuse(checkpoint, (2, 3, 4, 4))
    assert operators(fused.symbol) == ["Convolution", MXBN]
    back = convert(fused, "builtin", data=(2, 3, 4, 4))
    parts = ["Convolution", "BatchNorm", "elemwise_add", "Activation"]
    assert operators(back.model.symbol) == parts
    assert back.converted == ["act"]
    assert "nodes of its own again" in back.changes[0].remarks[0]
    assert back.difference < 1e-5
    assert back.model.symbol.list_outputs() == ["act_output"]
    assert operators(mxbn.fuse(back.model).symbol) == operators(fused.symbol)
    folded = fold(fused, shapes={"data": (2, 3, 4, 4)})
    assert operators(folded.model.symbol) == ["Convolution", "elemwise_add", "Activation"]
    assert folded.layers[0].into == "conv"
    assert mxbn.inspect(fused).rows[0].attributes.is_relu


@pytest.mark.parametrize("kind", [{"act_type": "relu"}, {"addend": OTHER}])
def test_converted_back_with_its_statistics_in_use(kind):
    y = bn(package=mxbn, output_mean_var=True, **kind)
    names = {"data", "other"} & {*y.list_arguments()}
    back = convert(y, "builtin", data=dict.fromkeys(names, (4, 3)))
    assert back.difference < 1e-5
    assert len(back.model.list_outputs()) == 3


def test_recalibrate_and_gaps_see_fused_layers():
    rs = np.random.RandomState(2)
    images = rs.standard_normal((40, 3, 4, 4)).astype("float32") * 3 + 1
    symbol = relu(bn(DATA, package=mxbn, fix_gamma=False) + DATA)
    symbol = mxbn.sym.BatchNorm(symbol, name="next")
    plain = Checkpoint(symbol, *values(symbol, data=(2, 3, 4, 4)))
    found = []
    for model in (plain, mxbn.fuse(Checkpoint(symbol, *(dict(p) for p in plain[1:])))):
        copy = Checkpoint(model.symbol, *({n: a.copy() for n, a in p.items()} for p in model[1:]))
        mxbn.recalibrate(copy, mx.io.NDArrayIter({"data": images}, batch_size=8))
        found.append(copy.aux_params)
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name].asnumpy(), array.asnumpy(), 1e-5)


def test_recalibrate_runs_fused_layers_and_what_is_imported_before_others():
    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.first = mxbn.gluon.BatchNormReLU(in_channels=3)
                self.second = mxbn.gluon.BatchNormAddReLU(in_channels=3)

        def hybrid_forward(self, F, x):
            return self.second(self.first(x), x)

    inner = Net()
    inner.initialize()
    imported = mxbn.fuse(inner)
    x = nd(np.random.RandomState(5).standard_normal((6, 3, 4)))
    with mx.autograd.train_mode():
        want = inner(x).asnumpy().mean((0, 2))
    for each in (inner, imported):
        net = nn.HybridSequential()
        net.add(each, mxbn.gluon.BatchNorm(in_channels=3))
        net[1].initialize()
        mxbn.recalibrate(net, [x])
        np.testing.assert_allclose(net[1].running_mean.data().asnumpy(), want, 1e-5)


class Residual(mx.gluon.HybridBlock):
    """Two inputs, nested outputs, layers of either kind."""

    def __init__(self, layer=nn.BatchNorm):
        super().__init__(prefix="residual_")
        with self.name_scope():
            self.dense, self.first, self.second = nn.Dense(3), layer(), layer()

    def hybrid_forward(self, F, x, y):
        hidden = F.relu(self.first(self.dense(x)))
        return hidden, [F.relu(self.second(hidden) + y), y * 2]


def block():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(3), nn.BatchNorm(), nn.Activation("relu"))
    net.initialize()
    return net


@pytest.mark.parametrize("layer", [nn.BatchNorm, mxbn.gluon.BatchNorm], ids=["built-in", "mxbn"])
def test_a_block_of_several_inputs_and_outputs(layer):
    net = Residual(layer)
    net.initialize()
    x, y = (nd(np.random.RandomState(i).standard_normal((4, 3))) for i in (0, 1))
    net(x, y)
    fused = mxbn.fuse(net, {"x": x, "y": y})
    assert operators(fused._cached_graph[1]).count(MXBN) == 2
    for name, parameter in fused.collect_params().items():
        assert parameter is net.collect_params()[name]
    (hidden, (out, double)), (want, (right, twofold)) = fused(x, y), net(x, y)
    for got, expected in ((hidden, want), (out, right), (double, twofold)):
        np.testing.assert_allclose(got.asnumpy(), expected.asnumpy(), 1e-5, 1e-6)


def test_deferred_initialization():
    net = block()
    fused = mxbn.fuse(net)
    fused(mx.nd.ones((2, 5)))
    assert net[0].weight.shape == (3, 5)
    assert same_bits(fused(mx.nd.ones((2, 5))), mxbn.fuse(net)(mx.nd.ones((2, 5))))


def test_a_trainer_of_the_block_trains_the_fused_one():
    net = block()
    fused = mxbn.fuse(net)
    fused.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x = nd(np.random.RandomState(3).standard_normal((8, 5)))
    x.attach_grad()
    fused(x)
    before = net[0].weight.data().copy()
    with mx.autograd.record():
        first, second = fused(x).sum(), (fused(x * 2) ** 2).sum()  # two recordings at once
    first.backward()
    second.backward()
    trainer.step(8)
    assert (net[0].weight.data() != before).sum().asscalar() > 0
    assert net[1].running_mean.data().asnumpy().any()
    np.testing.assert_allclose(fused(x).asnumpy(), net(x).asnumpy(), 1e-5, 1e-6)


@pytest.mark.parametrize(("name", "joined"), [("resnet18_v1", 17), ("resnet18_v2", 18)])
def test_networks_of_the_model_zoo(name, joined):
    mx.random.seed(1)
    net = vision.get_model(name, classes=7)
    net.initialize(mx.init.Xavier())
    rs = np.random.RandomState(4)
    x, label = nd(rs.standard_normal((4, 3, 32, 32))), nd(rs.randint(0, 7, 4))
    with mx.autograd.train_mode():
        net(x)  # other statistics than the first ones
    fused = mxbn.fuse(net, x)
    found = operators(fused._cached_graph[1])
    assert found.count(MXBN) == joined
    assert "Activation" not in found
    assert "relu" not in found
    mxbn.convert(net)  # whose statistics step in forward, as those of what is fused
    fused = mxbn.fuse(net, x)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    results = []
    mx.nd.waitall()
    kept = {n: p.data().copy() for n, p in net.collect_params().items()}
    for each in (net, fused):
        for key, parameter in net.collect_params().items():
            parameter.set_data(kept[key])
        each.hybridize()
        with mx.autograd.record():
            loss = loss_of(each(x), label)
        loss.backward()
        mx.nd.waitall()
        parameters = net.collect_params().items()
        found = {n: p.grad().copy() for n, p in parameters if p.grad_req != "null"}
        found.update({n: p.data().copy() for n, p in parameters if p.grad_req == "null"})
        results.append({"loss": loss.copy(), **found})
    for key, want in results[0].items():
        want, got = want.asnumpy(), results[1][key].asnumpy()
        np.testing.assert_allclose(got, want, 1e-3, 1e-4 * np.abs(want).max(), err_msg=key)
