"""Freezing: every switch in every form of a network, against float64, and that it can be undone."""

import copy
import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import HYBRIDIZE, check, draw, nd, right, run_script, same_bits
from mxnet.gluon.contrib.nn import Identity

import mxbn
from mxbn import __main__ as main
from mxbn import gluon
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.freeze import State, freeze, freeze_state, frozen, unfreeze

SHAPE = (6, 5, 4, 3)
FLAGS = {
    "moving": {"use_global_stats": True},
    "batch": {"use_batch_stats": True},
    "is_train": {},
}
FORMS = [*HYBRIDIZE, "imported", "imported_in_parent", "symbol"]


class Net:
    """One BatchNorm between identities, in one of the forms, with the arrays of a drawing."""

    def __init__(self, form, d, tmp_path):
        self.form, self.d = form, d
        self.layer = mxbn.gluon.BatchNorm(momentum=0.75, in_channels=d.shape[d.axis])
        self.block = mx.gluon.nn.HybridSequential()
        self.block.add(Identity(), self.layer, Identity())
        self.block.initialize()
        self.reset()
        if form in HYBRIDIZE:
            if HYBRIDIZE[form] is not None:
                self.block.hybridize(**HYBRIDIZE[form])
        else:
            self.block.hybridize()
            self.block(nd(d.x))
            self.block.export(str(tmp_path / "net"))
            if form == "symbol":
                self.model = Checkpoint.load(str(tmp_path / "net"), 0)
                return
            self.block = import_net(tmp_path / "net")
            if form == "imported_in_parent":
                imported, self.block = self.block, mx.gluon.nn.HybridSequential()
                self.block.add(imported, Identity())
                self.block.hybridize()
        self.model = self.block

    def reset(self):
        for name, parameter in self.parameters().items():
            parameter.set_data(nd(getattr(self.d, name)))

    def parameters(self):
        found = {p.name.rpartition("_")[2]: p for p in self.block.collect_params().values()}
        return {
            "gamma": found["gamma"], "beta": found["beta"],
            "moving_mean": found["mean"], "moving_var": found["var"],
        }  # fmt: skip

    def run(self, is_train):
        """The output, the gradients of data, gamma and beta, and the moving statistics after."""
        x = nd(self.d.x)
        x.attach_grad()
        if self.form == "symbol":
            return self.run_symbol(is_train)
        with mx.autograd.record(train_mode=is_train):
            y = self.block(x)
        y.backward(nd(self.d.dy))
        mx.nd.waitall()
        p = self.parameters()
        return SimpleNamespace(
            output=y, dx=x.grad, dgamma=p["gamma"].grad(), dbeta=p["beta"].grad(),
            moving_mean=p["moving_mean"].list_data()[0], moving_var=p["moving_var"].list_data()[0],
        )  # fmt: skip

    def run_symbol(self, is_train):
        symbol = self.model.symbol
        arrays = {n: nd(getattr(self.d, n.rpartition("_")[2])) for n in symbol.list_arguments()[1:]}
        names = [*symbol.list_arguments()[1:], *symbol.list_auxiliary_states()]
        gamma, beta, mean, var = names
        arrays["data"] = nd(self.d.x)
        aux = {mean: nd(self.d.moving_mean), var: nd(self.d.moving_var)}
        grads = {name: mx.nd.zeros(a.shape) for name, a in arrays.items()}
        executor = symbol.bind(mx.current_context(), arrays, grads, aux_states=aux)
        output = executor.forward(is_train=is_train)[0]
        if is_train:
            executor.backward(nd(self.d.dy))
        mx.nd.waitall()
        return SimpleNamespace(
            output=output, dx=grads["data"], dgamma=grads[gamma], dbeta=grads[beta],
            moving_mean=aux[mean], moving_var=aux[var],
        )  # fmt: skip


def import_net(prefix):
    return mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")


def resnet(mxbn_layers=True, **kwargs):
    make = mx.gluon.model_zoo.vision.resnet18_v1
    if mxbn_layers:
        with mxbn.replace_builtin():
            net = make(thumbnail=True, classes=4, **kwargs)
    else:
        net = make(thumbnail=True, classes=4, **kwargs)
    net.initialize(mx.init.Xavier())
    net(mx.nd.ones((1, 3, 8, 8)))
    return net


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("statistics", FLAGS)
def test_statistics_and_step(statistics, step, form, tmp_path):
    d = draw(SHAPE)
    net = Net(form, d, tmp_path)
    net.run(True)
    if form != "symbol":
        net.reset()
    net.model = freeze(net.model, statistics=statistics, step=step)
    assert freeze_state(net.model)[0][1:3] == (statistics, step)
    for is_train in (True, False):
        if form != "symbol":
            net.reset()
        found = net.run(is_train)
        momentum = 0.75 if step else 1
        want = right(
            d, is_train, eps=1e-5, momentum=momentum, fix_gamma=False, step_global_stats=step,
            **FLAGS[statistics],
        )  # fmt: skip
        check(found.output, want.output, 8)
        if form != "symbol" or is_train:
            for name in ("dx", "dgamma", "dbeta"):
                check(getattr(found, name), getattr(want, name), 16, what=name)
        for name in ("moving_mean", "moving_var"):
            if is_train and step:
                check(getattr(found, name), getattr(want, name), what=name)
            else:
                assert same_bits(getattr(found, name), nd(getattr(d, name)))


@pytest.mark.parametrize("form", ["imperative", "static_shape", "imported"])
def test_a_layer_that_does_not_step_keeps_its_bits_whatever_comes(form, tmp_path):
    d = draw(SHAPE)
    d.x[0, 0, 0, 0], d.x[0, 1, 0, 0], d.x[:, 2] = np.nan, np.inf, 3e38
    d.moving_mean[:] = [-0.0, 1e-41, 3e38, 0.1, -7.3]
    d.moving_var[:] = [0, 1e-44, 3e38, 0.1, 5]
    net = Net(form, d, tmp_path)
    freeze(net.model, statistics="batch", step=False)
    for _ in range(3):
        found = net.run(True)
    for name in ("moving_mean", "moving_var"):
        assert same_bits(getattr(found, name), nd(getattr(d, name)))


@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True}])
def test_affine_off_stops_the_trainer_and_weight_decay(hybridize):
    net = resnet()
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 1e-4, "momentum": 0.9, "wd": 1}
    )

    def train():
        before = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
        with mx.autograd.record():
            loss = net(mx.nd.random.normal(shape=(4, 3, 8, 8))).square().sum()
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()
        return {n for n, p in net.collect_params().items() if not same_bits(before[n], p.data())}

    everything = {n for n, p in net.collect_params().items() if p.grad_req != "null"}
    moving = {n for n in net.collect_params() if "running" in n}
    affine = {n for n in net.collect_params() if n.endswith(("gamma", "beta"))}
    assert train() == everything | moving
    freeze(net, "*stage[12]*", affine=False)
    in_stages = {n for n in affine if "stage1" in n or "stage2" in n}
    assert len(in_stages) == 2 * 9
    assert train() == (everything | moving) - in_stages
    freeze(net)
    assert train() == everything - affine
    unfreeze(net)
    assert train() == everything | moving


def test_unfreeze_gives_back_what_each_parameter_and_layer_had():
    net = mx.gluon.nn.HybridSequential(prefix="")
    net.add(
        mxbn.gluon.BatchNorm(in_channels=3, momentum=0.3, prefix="a_"),
        mxbn.gluon.BatchNorm(in_channels=3, scale=False, use_global_stats=True, prefix="b_"),
        mx.gluon.nn.BatchNorm(in_channels=3, center=False, prefix="c_"),
        mxbn.gluon.BatchNorm(in_channels=3, use_batch_stats=True, prefix="d_"),
    )
    net.initialize()
    a = net[0]
    a.gamma.grad_req, a.gamma.lr_mult, a.gamma.wd_mult = "add", 0.7, 0.2
    a.beta.grad_req = "null"

    def everything():
        return [
            repr(net),
            [copy.deepcopy(layer._kwargs) for layer in net],
            [(p.name, p.grad_req, p.lr_mult, p.wd_mult) for p in net.collect_params().values()],
        ]

    before = everything()
    freeze(net)
    freeze(net, ["a", "d"], statistics="is_train", step=False)
    freeze(net, "a", statistics="batch")
    freeze(net, step=False)
    assert freeze_state(net) == [
        State("a", "batch", step=False, affine=False),
        State("b", "moving", step=False, affine=False),
        State("c", "moving", step=False, affine=False),
        State("d", "is_train", step=False, affine=False),
    ]
    assert (a.gamma.lr_mult, a.gamma.wd_mult) == (0.7, 0.2)
    unfreeze(net, "[abd]")
    assert freeze_state(net, "c") == [State("c", "moving", step=False, affine=False)]
    unfreeze(net)
    assert everything() == before
    assert freeze_state(net) == [
        State("a", "is_train", step=True, affine=True),
        State("b", "moving", step=False, affine=True),
        State("c", "is_train", step=True, affine=True),
        State("d", "batch", step=True, affine=True),
    ]
    unfreeze(net)
    assert everything() == before


def test_switches_are_independent():
    layer = mxbn.gluon.BatchNorm(in_channels=2, momentum=0.6)
    freeze(layer, statistics="moving")
    assert freeze_state(layer)[0][1:] == ("moving", False, True)
    freeze(layer, affine=False)
    assert freeze_state(layer)[0][1:] == ("moving", False, False)
    freeze(layer, statistics="is_train")  # stepping was not turned off by itself
    assert freeze_state(layer)[0][1:] == ("is_train", True, False)
    freeze(layer, step=False)
    freeze(layer, affine=True)
    assert freeze_state(layer)[0][1:] == ("is_train", False, True)
    freeze(layer, step=True)
    assert freeze_state(layer)[0][1:] == ("is_train", True, True)
    assert layer._kwargs["momentum"] == 0.6
    freeze(layer, statistics="batch")
    freeze(layer, statistics="moving")
    assert "use_batch_stats" not in repr(layer)
    unfreeze(layer)
    freeze(layer, step=True, momentum=0.5)
    assert layer._kwargs["momentum"] == 0.5
    unfreeze(layer)
    assert layer._kwargs["momentum"] == 0.6


def fail_inside(net):
    with frozen(net, "*stage1*", statistics="batch", affine=True):
        assert freeze_state(net)[0][1:] == ("batch", True, True)
        unfreeze(net)
        raise KeyError


@pytest.mark.parametrize("hybridize", [False, True])
def test_frozen_restores_everything(hybridize):
    net = resnet()
    if hybridize:
        net.hybridize()
    x = mx.nd.random.normal(shape=(4, 3, 8, 8))
    net(x)
    net.collect_params(".*gamma").setattr("grad_req", "add")
    with mx.autograd.record():
        net(x).square().sum().backward()

    def everything():
        parameters = net.collect_params().values()
        return (
            repr(net),
            [(p.name, p.grad_req) for p in parameters],
            [p.grad().asnumpy().tobytes() for p in parameters if p.grad_req != "null"],
        )

    freeze(net, "*stage3*", step=False)
    before, states = everything(), freeze_state(net)
    with frozen(net) as same:
        assert same is net
        assert {state[1:] for state in freeze_state(net)} == {("moving", False, False)}
        with pytest.raises(KeyError):
            fail_inside(net)
        assert {state[1:] for state in freeze_state(net)} == {("moving", False, False)}
        frozen_output = net(x)
        with mx.autograd.record():
            output = net(x)
        check(output, frozen_output.asnumpy(), 64)
    assert everything() == before
    assert freeze_state(net) == states
    with mx.autograd.record():
        output = net(x)
    assert abs(output - frozen_output).max() > 0.1
    unfreeze(net)  # still knows what was before the first freeze
    assert {state[1:] for state in freeze_state(net)} == {("is_train", True, True)}


def test_frozen_imported_network_restores_its_graph(tmp_path):
    net = Net("imported", draw(SHAPE), tmp_path)
    graph = net.block._cached_graph
    with frozen(net.block, statistics="batch"):
        assert freeze_state(net.block)[0].statistics == "batch"
    assert net.block._cached_graph is graph
    with pytest.raises(TypeError, match="freeze returns a new one"), frozen(graph[1]):
        pass


@pytest.mark.parametrize("operator", ["mxbn", "builtin"])
@pytest.mark.parametrize("head", ["imperative", "hybridized"])
def test_mindspores_question(head, operator):
    """A frozen layer passes the gradient on, is not updated, and what follows it trains."""
    rs = np.random.RandomState(1)
    x, dy = (mx.nd.array(rs.randn(1, 3, 2, 2).astype("float32")) for _ in range(2))
    golden = np.float32(
        [[[[-0.3224156, -0.3840524], [1.1337637, -1.0998858]],
          [[-0.1724273, -0.877854], [0.0422135, 0.5828123]],
          [[-1.1006137, 1.1447179], [0.9015862, 0.5024918]]]]
    )  # fmt: skip
    maker = mxbn.gluon.BatchNorm if operator == "mxbn" else mx.gluon.nn.BatchNorm
    backbone, head_layer = maker(in_channels=3), mx.gluon.nn.Dense(2, in_units=12)
    net = mx.gluon.nn.HybridSequential()
    net.add(backbone, head_layer)
    net.initialize()
    if head == "hybridized":
        net.hybridize()
    freeze(backbone)
    before = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    x.attach_grad()
    with mx.autograd.record():
        (backbone(x) * dy).sum().backward()
    np.testing.assert_allclose(x.grad.asnumpy(), golden, rtol=0, atol=1e-6)

    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"wd": 0.1})
    losses = []
    for _ in range(20):
        with mx.autograd.record():
            loss = (net(x) - mx.nd.array([[1, 2]])).square().sum()
        loss.backward()
        trainer.step(1)
        losses.append(loss.asscalar())
    assert losses[-1] < losses[0]
    assert abs(x.grad.asnumpy()).min() > 0
    changed = {n for n, p in net.collect_params().items() if not same_bits(before[n], p.data())}
    assert changed == {p.name for p in head_layer.collect_params().values()}


def module_of(symbol, **kwargs):
    module = mxbn.Module(symbol, label_names=[], **kwargs)
    module.bind([("data", (8, 3, 4, 4))])
    module.init_params(mx.init.Uniform(1))
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1, "wd": 0.5})
    return module


def train_module(module, steps=2):
    before = {n: a.asnumpy() for part in module.get_params() for n, a in part.items()}
    for _ in range(steps):
        batch = mx.io.DataBatch([mx.nd.random.normal(2, 3, (8, 3, 4, 4))])
        module.forward_backward(batch)
        module.update()
    after = {n: a for part in module.get_params() for n, a in part.items()}
    return {n for n, a in after.items() if not same_bits(before[n], a)}


@pytest.mark.parametrize("contexts", [[mx.cpu()], [mx.cpu(0), mx.cpu(1)]])
def test_module(contexts):
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=4, kernel=(1, 1), name="conv")
    x = mxbn.sym.BatchNorm(x, fix_gamma=False, name="a")
    x = mxbn.sym.BatchNorm(mx.sym.tanh(x), fix_gamma=False, name="b")
    symbol = mx.sym.MakeLoss(x.square())
    module = module_of(symbol, context=contexts, fixed_param_names=["conv_bias", "b_beta"])
    everything = {"conv_weight", "a_gamma", "a_beta", "b_gamma"}
    moving = {f"{layer}_moving_{what}" for layer in "ab" for what in ("mean", "var")}
    assert train_module(module) == everything | moving
    batch = mx.io.DataBatch([mx.nd.random.normal(2, 3, (8, 3, 4, 4))])
    module.forward_backward(batch)
    module.update()
    mx.nd.waitall()
    trained = {n: a.asnumpy() for n, a in module._exec_group.execs[0].arg_dict.items()}

    assert freeze(module) is module
    assert [state[1:] for state in freeze_state(module)] == [("moving", False, False)] * 2
    module.bind([("data", (8, 3, 4, 4))], force_rebind=True)
    bound = module.get_params()[0]
    assert all(same_bits(trained[n], a) for n, a in bound.items())
    assert train_module(module) == {"conv_weight"}
    unfreeze(module, "a")
    module.bind([("data", (8, 3, 4, 4))], force_rebind=True)
    assert train_module(module) == {"conv_weight", "a_gamma", "a_beta"} | {
        name for name in moving if name[0] == "a"
    }
    unfreeze(module)
    assert module._fixed_param_names == ["conv_bias", "b_beta"]
    with frozen(module, affine=False):
        assert set(module._fixed_param_names) > {"conv_bias", "a_gamma"}
    assert module._fixed_param_names == ["conv_bias", "b_beta"]
    module.bind([("data", (8, 3, 4, 4))], force_rebind=True)
    assert train_module(module) == everything | moving


def test_a_frozen_module_that_is_not_bound_yet():
    symbol = mx.sym.MakeLoss(mxbn.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, name="a"))
    module = freeze(mxbn.Module(symbol, label_names=[]), step=False)
    module.bind([("data", (8, 3, 4, 4))])
    module.init_params()
    module.init_optimizer()
    assert train_module(module) == {"a_beta"}  # the sum of the output does not depend on gamma


def test_symbol_affine_is_heeded_by_module_and_undone():
    x = mxbn.sym.BatchNorm(mx.sym.var("data"), name="fixed")
    x = mxbn.sym.BatchNorm(
        x, mx.sym.var("g", lr_mult=0.5, init=mx.init.One()), fix_gamma=False, name="a"
    )
    symbol = mx.sym.MakeLoss(mx.sym.BatchNorm(x, fix_gamma=False, name="b").square())
    assert [state.affine for state in freeze_state(symbol)] == [True, True, True]
    off = freeze(symbol, ["fixed", "a"], affine=False)
    assert [state.affine for state in freeze_state(off)] == [False, False, True]
    for name in ("g", "a_beta", "fixed_gamma", "fixed_beta"):
        notes = off.attr_dict()[name]
        assert (notes["__lr_mult__"], notes["__wd_mult__"]) == ("0.0", "0.0")
    module = module_of(mx.sym.load_json(off.tojson()))
    changed = train_module(module)
    assert not changed & {"fixed_gamma", "fixed_beta", "g", "a_beta"}
    assert {"b_beta", "a_moving_mean"} <= changed
    again = unfreeze(mx.sym.load_json(off.tojson()))
    assert again.attr_dict() == symbol.attr_dict()
    assert freeze(off, affine=True).attr_dict() == symbol.attr_dict()
    assert symbol.attr_dict()["g"]["__lr_mult__"] == "0.5"  # the first one is as it was


def test_gamma_does_not_count_where_it_is_fixed():
    beta = mx.sym.var("beta", lr_mult=0)
    for fix_gamma in (True, False):
        symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), beta=beta, fix_gamma=fix_gamma)
        assert freeze_state(symbol)[0].affine != fix_gamma


def test_builtin_layers_of_every_kind():
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.BatchNorm(in_channels=3),
        mx.gluon.nn.BatchNormReLU(in_channels=3),
        mx.gluon.contrib.nn.SyncBatchNorm(in_channels=3, num_devices=1),
    )
    net.initialize()
    net.hybridize()
    x = mx.nd.random.normal(3, 2, (4, 3, 2, 2))
    inference = net(x)
    freeze(net)
    with mx.autograd.record():
        output = net(x)
    assert same_bits(output, inference)
    with pytest.raises(ValueError, match="convert it to mxbn's"):
        freeze(net, statistics="batch")
    unfreeze(net)
    freeze(net, step=False)
    with mx.autograd.record():
        net(x).sum().backward()
    mx.nd.waitall()
    for layer in net:
        assert (layer.running_mean.data().asnumpy() == 0).all()
        assert (layer.running_var.data().asnumpy() == 1).all()


def test_one_scan_for_many_layers(monkeypatch):
    net = resnet()
    scans = []
    blocks = gluon._hybrid_blocks
    monkeypatch.setattr(gluon, "_hybrid_blocks", lambda: scans.append(1) or blocks())
    freeze(net)
    assert len(scans) == 1
    freeze(net)
    assert len(scans) == 1  # nothing was to be changed
    unfreeze(net)
    assert len(scans) == 2


def test_layers_shared_by_several_nets_and_parents():
    layer = mxbn.gluon.BatchNorm(in_channels=3)
    nets = [mx.gluon.nn.HybridSequential(), mx.gluon.nn.HybridSequential()]
    for net in nets:
        net.add(layer, layer)
    outer = mx.gluon.nn.HybridSequential()
    outer.add(*nets)
    outer.initialize()
    outer.hybridize()
    x = mx.nd.random.normal(3, 2, (4, 3, 2, 2))
    inference = outer(x)
    assert len(freeze_state(outer)) == 1
    freeze(nets[0])
    with mx.autograd.record():
        output = outer(x)
    assert same_bits(output, inference)


def test_uninitialized_network():
    net = mx.gluon.nn.HybridSequential()
    net.add(mxbn.gluon.BatchNorm())
    freeze(net)
    net.initialize()
    x = mx.nd.random.normal(3, 2, (4, 3, 2, 2))
    with mx.autograd.record():
        output = net(x)
    check(output, x.asnumpy() / np.sqrt(1 + 1e-5))
    unfreeze(net)
    assert freeze_state(net)[0][1:] == ("is_train", True, True)
    assert net[0].gamma.grad().shape == (3,)


def test_numpy_mode(tmp_path):
    code = f"""
        import mxnet as mx, numpy as np, mxbn
        from mxbn.tools.freeze import freeze
        mx.npx.set_np()
        net = mx.gluon.nn.HybridSequential()
        net.add(mxbn.gluon.BatchNorm(in_channels=3))
        net.initialize()
        net.hybridize()
        x = mx.np.random.normal(3, 2, (4, 3, 2, 2))
        y = net(x)
        net.export({str(tmp_path / "net")!r})
        imported = mx.gluon.SymbolBlock.imports(
            {str(tmp_path / "net")!r} + "-symbol.json", ["data"],
            {str(tmp_path / "net")!r} + "-0000.params")
        for each in (net, imported):
            freeze(each)
            with mx.autograd.record():
                z = each(x)
            assert isinstance(z, mx.np.ndarray), type(z)
            assert (z.asnumpy() == y.asnumpy()).all()
        print("well")
    """
    done = run_script(code)
    assert done.stdout.strip() == "well", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistics": "global"}, "statistics is 'global', expected 'moving', 'batch'"),
        ({"step": "off"}, "step is 'off', expected True, False or None"),
        ({"affine": 3}, "affine is 3, expected True, False or None"),
        (
            {"statistics": "moving", "step": True},
            "layer b is of the operator BatchNorm, which cannot",
        ),
        ({"step": True}, "which cannot use the moving statistics and step them: convert it"),
        ({"layers": "a", "step": True}, "layer a has momentum 1 and what it had before is not"),
        ({"layers": ["b", "*x*"]}, r"no BatchNorm layer is named \*x\*, there are: c, b, a"),
        ({"step": False, "momentum": 0.5}, "momentum is 0.5 and step is False"),
        ({"step": True, "momentum": 1}, "expected a momentum from 0 to below 1"),
        ({"momentum": 0.5}, "expected a momentum from 0 to below 1, with step=True"),
    ],
)
def test_errors_change_nothing(arguments, message):
    net = mx.gluon.nn.HybridSequential(prefix="")
    net.add(
        mxbn.gluon.BatchNorm(prefix="c_"),
        mx.gluon.nn.BatchNorm(prefix="b_", use_global_stats=True),
        mxbn.gluon.BatchNorm(prefix="a_", momentum=1),
    )
    before = repr(net), freeze_state(net)
    with pytest.raises(ValueError, match=message):
        freeze(net, **{"affine": False, **arguments})
    assert (repr(net), freeze_state(net)) == before


def test_wrong_models():
    with pytest.raises(ValueError, match="the model has no BatchNorm layer"):
        freeze(mx.gluon.nn.Dense(3))
    with pytest.raises(TypeError, match="a model of type str was given"):
        freeze("net")
    with pytest.raises(TypeError, match="a model of type str was given, expected a Block"):
        frozen("net").__enter__()


def run_command(*arguments):
    return main.main(["freeze", *map(str, arguments)])


def test_command(tmp_path, capsys):
    net = resnet(prefix="r_")
    net.hybridize()
    net(mx.nd.ones((1, 3, 8, 8)))
    prefix, off, back = (tmp_path / name for name in ("net", "off", "back"))
    net.export(str(prefix), 3)
    layers = ["--layers", "*stage1*", "--layers", "*stage2*"]
    assert run_command(prefix, off, "--epoch", 3, *layers, "--step", "off", "--affine", "off") == 0
    shown = capsys.readouterr().out
    assert "r_stage1_batchnorm0_fwd   is_train     on -> off   on -> off" in shown
    assert "r_stage4_batchnorm0_fwd   is_train     on          on" in shown
    frozen_model, model = Checkpoint.load(str(off), 3), Checkpoint.load(str(prefix), 3)
    assert sum(not state.step for state in freeze_state(frozen_model)) == 9
    assert all(same_bits(a, model.arg_params[n]) for n, a in frozen_model.arg_params.items())
    assert run_command(prefix, off, "--epoch", 3) == 1
    assert "off-symbol.json exists already" in capsys.readouterr().err
    assert run_command(off, back, "--epoch", 3, "--undo", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["layers"][0] == {
        "name": "r_stage1_batchnorm0_fwd", "statistics": "is_train", "step": True, "affine": True,
    }  # fmt: skip
    assert Checkpoint.load(str(back), 3).symbol.tojson() == model.symbol.tojson()
    assert run_command(off, back, "--epoch", 3, "--undo", "--step", "on", "--force") == 1
    assert capsys.readouterr().err == "mxbn: --undo takes no switch\n"
