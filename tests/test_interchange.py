"""Saved parameters and symbols, mixed precision, and MXNet's tools around networks.

"built-in" is the operator that MXNet ships: a network keeps its files, whichever of the two it has.
"""

import json
import re

import mxnet as mx
import numpy as np
import pytest
from helpers import check, draw, nd, right, run_script, same_bits
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import nn

import mxbn
from mxbn import reference

LAYERS = {"mxbn": mxbn.gluon.BatchNorm, "built-in": nn.BatchNorm}
OPERATORS = {"mxbn": mxbn.sym.BatchNorm, "built-in": mx.sym.BatchNorm}
MODULES = {"mxbn": mxbn.Module, "built-in": mx.mod.Module}
SHAPE = (4, 3, 9, 9)

kinds = pytest.mark.parametrize("kind", LAYERS)
directions = pytest.mark.parametrize(
    ("saver", "loader"),
    [("mxbn", "built-in"), ("built-in", "mxbn"), ("mxbn", "mxbn")],
    ids=lambda kind: kind,
)


def random_values(shapes):
    """Parameters and statistics of a network in use, by the names of its arrays."""
    rs = np.random.RandomState(0)
    return {
        name: rs.uniform(0.5, 2, shape) if name.endswith("var") else rs.randn(*shape) * 0.5
        for name, shape in sorted(shapes.items())
    }


def random_data(seed=1):
    return nd(np.random.RandomState(seed).randn(*SHAPE))


# ------------------------------------------------------------------------------------------- Gluon


def network(kind):
    norm = LAYERS[kind]
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope(), mx.name.NameManager():
        net.add(
            nn.Conv2D(8, 3),
            norm(),
            nn.HybridLambda("relu"),
            nn.Conv2D(8, 3, layout="NCHW"),
            norm(center=False, scale=False, epsilon=1e-3, momentum=0.5),
            nn.Dense(4),
            norm(axis=-1, use_global_stats=True),
        )
    return net


def network_in_use(kind, hybridize=False):
    net = network(kind)
    net.initialize()
    net.hybridize(hybridize)
    net(random_data())
    parameters = net.collect_params()
    values = random_values({name: p.shape for name, p in parameters.items()})
    for name, parameter in parameters.items():
        fixed = re.search("batchnorm1_gamma", name)  # the built-in operator would write a 1
        parameter.set_data(nd(np.ones(8) if fixed else values[name]))
    return net


def check_same_network(loaded, saved):
    mine, theirs = loaded.collect_params(), saved.collect_params()
    assert list(mine) == list(theirs)
    for name in mine:
        assert same_bits(mine[name].data(), theirs[name].data()), name
    check(loaded(random_data()), saved(random_data()).asnumpy(), 16, what="output")


def test_parameter_names_are_those_of_the_built_in_network():
    names = [list(network(kind).collect_params()) for kind in LAYERS]
    assert names[0] == names[1]
    assert "net_batchnorm1_running_var" in names[0]


@directions
@pytest.mark.parametrize("hybridize", [False, True])
def test_save_parameters(tmp_path, saver, loader, hybridize):
    saved, loaded = network_in_use(saver, hybridize), network(loader)
    saved.save_parameters(str(tmp_path / "net.params"))
    loaded.load_parameters(str(tmp_path / "net.params"))
    loaded.hybridize(hybridize)
    check_same_network(loaded, saved)


@directions
def test_collect_params_save(tmp_path, saver, loader):
    saved, loaded = network_in_use(saver), network(loader)
    saved.collect_params().save(str(tmp_path / "net.params"), strip_prefix="net_")
    loaded.collect_params().load(str(tmp_path / "net.params"), restore_prefix="net_")
    check_same_network(loaded, saved)


@pytest.mark.parametrize("saver", LAYERS)
@pytest.mark.parametrize("loader", LAYERS)
def test_export(tmp_path, saver, loader):
    """The symbol of one network runs with the exported parameters of the other."""
    nets = {kind: network_in_use(kind, hybridize=True) for kind in (saver, loader)}
    for kind, net in nets.items():
        net(random_data())
        net.export(str(tmp_path / kind), epoch=3)
    block = mx.gluon.SymbolBlock.imports(
        str(tmp_path / f"{loader}-symbol.json"), ["data"], str(tmp_path / f"{saver}-0003.params")
    )
    check(block(random_data()), nets[saver](random_data()).asnumpy(), 16, what="output")
    net = network(loader)
    net.collect_params().load(str(tmp_path / f"{saver}-0003.params"))
    check_same_network(net, nets[saver])


def imported(tmp_path, d, **options):
    layer = mxbn.gluon.BatchNorm(**options)
    layer.initialize()
    layer.hybridize()
    layer(nd(d))
    layer.export(str(tmp_path / "layer"))
    return mx.gluon.SymbolBlock.imports(
        str(tmp_path / "layer-symbol.json"), ["data"], str(tmp_path / "layer-0000.params")
    )


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"use_global_stats": True}, {"use_batch_stats": True}], ids=str
)
def test_imported_layer_trains_and_predicts(tmp_path, is_train, flags):
    rs = np.random.RandomState(2)
    xs, dys = rs.randn(2, 6, 5, 3).astype("float32"), rs.randn(2, 6, 5, 3).astype("float32")
    block = imported(tmp_path, xs[0], axis=-1, epsilon=0.25, momentum=0.5, **flags)
    gamma, beta, mean, var = np.ones(3), np.zeros(3), np.zeros(3), np.ones(3)
    arrays = [nd(x) for x in xs]
    for array in arrays:
        array.attach_grad()
    with autograd.record(train_mode=is_train):
        outputs = [block(array) for array in arrays]
    # One backward for both calls: MXNet ends the graph of an imported block in the first one.
    autograd.backward(outputs, [nd(dy) for dy in dys])
    mx.nd.waitall()
    for x, dy, array, output in zip(xs, dys, arrays, outputs):
        kept = reference.forward(
            x, gamma, beta, mean, var,
            is_train=is_train, eps=0.25, momentum=0.5, fix_gamma=False, axis=-1, **flags,
        )  # fmt: skip
        dx, _, _ = reference.backward(dy, x, gamma, kept, fix_gamma=False, axis=-1)
        mean, var = kept.moving_mean, kept.moving_var
        check(output, kept.output, what="output")
        check(array.grad, dx, what="gradient of data")
    statistics = {key[-4:]: p.data() for key, p in block.collect_params().items()}
    check(statistics["mean"], mean, what="running mean")
    check(statistics["_var"], var, what="running variance")


# ----------------------------------------------------------------------------- symbols and modules


def symbol(kind, **attributes):
    norm = OPERATORS[kind]
    with mx.name.NameManager():
        s = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), name="conv")
        s = norm(s, fix_gamma=False, eps=1e-3, name="bn", **attributes)
        s = mx.sym.relu(s, name="relu")
        s = norm(s, name="bn_fixed", **attributes)
        s = mx.sym.FullyConnected(s, num_hidden=4, name="fc")
        return mx.sym.LinearRegressionOutput(s, name="out")


def values_for(s, is_aux):
    args, _, aux = s.infer_shape(data=SHAPE)
    shapes = dict(zip(s.list_auxiliary_states(), aux))
    if not is_aux:
        shapes = dict(zip(s.list_arguments(), args))
        del shapes["data"], shapes["out_label"]
    values = random_values(shapes)
    if not is_aux:
        values["bn_fixed_gamma"][:] = 1  # the built-in operator would write it
    return {name: nd(value) for name, value in values.items()}


def bound(module, is_train, args=None, aux=None):
    labels = [("out_label", (4, 4))] if is_train else None
    module.bind([("data", SHAPE)], labels, for_training=is_train)
    if not module.params_initialized or args is not None:
        module.init_params(arg_params=args, aux_params=aux, force_init=True)
    return module


def module_of(kind, s=None, is_train=False):
    s = symbol(kind) if s is None else s
    module = MODULES[kind](s, label_names=["out_label"])
    return bound(module, is_train, values_for(s, False), values_for(s, True))


def predicted(module):
    module.forward(mx.io.DataBatch([random_data()], [mx.nd.zeros((4, 4))]), is_train=False)
    return module.get_outputs()[0].asnumpy()


def trained(module, steps):
    for i in range(steps):
        batch = mx.io.DataBatch([random_data(i)], [mx.nd.ones((4, 4))])
        module.forward_backward(batch)
        module.update()
    mx.nd.waitall()


def check_same_parameters(one, other):
    for mine, theirs in zip(one.get_params(), other.get_params()):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert same_bits(mine[key], theirs[key]), key


def test_json_differs_from_the_built_in_networks_by_the_operators_name_only():
    graphs = {kind: json.loads(symbol(kind).tojson()) for kind in OPERATORS}
    for node in graphs["mxbn"]["nodes"]:
        if node["op"] == "mxbn_BatchNorm":
            node["op"] = "BatchNorm"
        if node["name"] == "bn_fixed_gamma":
            # Where the built-in operator writes a 1, weight decay must leave gamma alone.
            assert node.pop("attrs") == {"__wd_mult__": "0.0"}
    for graph in graphs.values():
        del graph["node_row_ptr"]  # counts outputs, the hidden ones too
    assert graphs["mxbn"] == graphs["built-in"]


@kinds
@pytest.mark.parametrize("way", ["json", "file"])
def test_symbol_round_trip(tmp_path, kind, way):
    s = symbol(kind, momentum=0.5, axis=-3)
    if way == "json":
        loaded = mx.sym.load_json(s.tojson())
    else:
        s.save(str(tmp_path / "net.json"))
        loaded = mx.sym.load(str(tmp_path / "net.json"))
    assert loaded.tojson() == s.tojson()
    assert loaded.attr_dict() == s.attr_dict()
    for names in ("list_arguments", "list_auxiliary_states", "list_outputs"):
        assert getattr(loaded, names)() == getattr(s, names)()
    assert same_bits(predicted(module_of(kind, loaded)), predicted(module_of(kind, s)))


def test_symbol_converts_by_the_operators_name():
    """What ONNX export and quantisation need, which know operators by their names."""
    theirs = mx.sym.load_json(symbol("mxbn").tojson().replace("mxbn_BatchNorm", "BatchNorm"))
    ours = mx.sym.load_json(symbol("built-in").tojson().replace('"BatchNorm"', '"mxbn_BatchNorm"'))
    for s, kind in ((theirs, "built-in"), (ours, "mxbn")):
        assert same_bits(predicted(module_of(kind, s)), predicted(module_of(kind)))


@directions
@pytest.mark.parametrize("way", ["load_checkpoint", "load_params"])
def test_module_checkpoint(tmp_path, saver, loader, way):
    saved = module_of(saver, is_train=True)
    saved.init_optimizer(optimizer_params={"learning_rate": 0.01})
    trained(saved, 2)
    saved.save_checkpoint(str(tmp_path / "net"), 7)
    loaded = MODULES[loader](symbol(loader), label_names=["out_label"])
    if way == "load_checkpoint":
        s, args, aux = mx.model.load_checkpoint(str(tmp_path / "net"), 7)
        assert s.list_arguments() == loaded.symbol.list_arguments()
        assert s.list_auxiliary_states() == loaded.symbol.list_auxiliary_states()
        bound(loaded, False, args, aux)
    else:
        bound(loaded, False)
        loaded.load_params(str(tmp_path / "net-0007.params"))
    check_same_parameters(loaded, saved)
    check(predicted(loaded), predicted(saved), 16, what="output")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # in MXNet
@pytest.mark.parametrize("load", [mxbn.Module.load, mx.mod.Module.load], ids=["mxbn", "built-in"])
def test_module_load_goes_on_training(tmp_path, load):
    module = module_of("mxbn", is_train=True)
    options = {"optimizer_params": {"learning_rate": 0.01, "momentum": 0.9, "wd": 0.1}}
    module.init_optimizer(**options)
    trained(module, 2)
    module.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    loaded = load(str(tmp_path / "net"), 1, True, label_names=["out_label"])
    bound(loaded, True)
    loaded.init_optimizer(**options)
    check_same_parameters(loaded, module)
    for each in (module, loaded):
        trained(each, 2)
    check_same_parameters(loaded, module)
    assert same_bits(predicted(loaded), predicted(module))


# --------------------------------------------------------------------------------- mixed precision

# A network that float16 runs on CPU, where MXNet has no float16 matrix product.
ON_CPU = {
    "target_dtype": "float16",
    "target_dtype_ops": ["relu"],
    "fp32_ops": [*amp.list_fp32_ops("float16"), "Convolution", "FullyConnected"],
}


def amp_names(s):
    return [name for name in s.get_internals().list_outputs() if "amp_cast" in name]


@kinds
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_amp_converts_symbols(kind, target):
    s = symbol(kind)
    converted = amp.convert_symbol(s, target)
    assert converted.list_arguments() == s.list_arguments()
    assert converted.list_auxiliary_states() == s.list_auxiliary_states()
    assert any(target in name for name in amp_names(converted))
    inputs = [name for name in s.list_arguments() if not name.startswith("bn")]
    types, outputs, aux_types = converted.infer_type(**dict.fromkeys(inputs, "float32"))
    types = {
        **dict(zip(converted.list_arguments(), types)),
        **dict(zip(converted.list_auxiliary_states(), aux_types)),
    }
    assert {types[name] for name in types if name.startswith("bn")} == {np.float32}
    assert outputs == [np.float32]


def test_amp_runs_the_operator_in_float16_as_it_does_the_built_in_one():
    ours, theirs = (amp_names(amp.convert_symbol(symbol(kind), "float16")) for kind in OPERATORS)
    assert ours == theirs


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("cast_optional_params", [True, False])
def test_amp_converted_model(is_train, cast_optional_params):
    s = symbol("mxbn")
    args, aux = values_for(s, False), values_for(s, True)
    converted, new_args, new_aux = amp.convert_model(
        s, dict(args), dict(aux), cast_optional_params=cast_optional_params, **ON_CPU
    )
    inner = converted.get_internals()["bn_fixed_output"]
    assert inner.infer_type(data="float32")[1] == [np.float16]
    outputs = []
    for each, each_args, each_aux in ((s, args, aux), (converted, new_args, new_aux)):
        types = {key: value.dtype for key, value in {**each_args, **each_aux}.items()}
        types.update(data="float32", out_label="float32")
        executor = each.simple_bind(mx.cpu(), data=SHAPE, type_dict=types)
        executor.copy_params_from(each_args, each_aux)
        outputs.append(executor.forward(is_train=is_train, data=random_data())[0].asnumpy())
        mx.nd.waitall()
    # The data of bn_fixed and of fc are rounded to float16, and fc adds up 8 * 7 * 7 of them.
    unit = np.finfo("float16").eps * np.abs(outputs[0]).max()
    assert 0.01 * unit < np.abs(outputs[1] - outputs[0]).max() < 4 * unit


@pytest.mark.parametrize("is_train", [True, False])
def test_amp_converted_block(is_train):
    net = network_in_use("mxbn", hybridize=True)
    x = random_data()
    net(x)
    block = amp.convert_hybrid_block(net, ctx=mx.cpu(), **ON_CPU)
    assert amp_names(block._cached_graph[1])
    with autograd.train_mode() if is_train else autograd.predict_mode():
        want, got = net(x).asnumpy(), block(x).asnumpy()
    unit = np.finfo("float16").eps * np.abs(want).max()
    assert 0.01 * unit < np.abs(got - want).max() < 8 * unit


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_amp_converts_blocks(target):
    net = network_in_use("mxbn", hybridize=True)
    net(random_data())
    block = amp.convert_hybrid_block(net, target, ctx=mx.cpu())
    assert set(block.collect_params()) == set(net.collect_params())
    assert any(target in name for name in amp_names(block._cached_graph[1]))


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_amp_init(target):
    """In a process of its own, since it changes MXNet's functions for good."""
    done = run_script(f"""
        import mxnet as mx
        from helpers import HYBRIDIZE, arrays, check, draw, nd, right
        import mxbn
        from mxnet.contrib import amp
        amp.init("{target}")
        for hybridize in HYBRIDIZE.values():
            d = draw((4, 3, 5))
            layer = mxbn.gluon.BatchNorm(in_channels=3)
            layer.initialize()
            for key in ("gamma", "beta", "running_mean", "running_var"):
                getattr(layer, key).set_data(nd(getattr(d, key.replace("running", "moving"))))
            if hybridize is not None:
                layer.hybridize(**hybridize)
            x = arrays(d).x
            for is_train in (False, True):
                with mx.autograd.record(train_mode=is_train):
                    y = layer(x)
                y.backward(nd(d.dy))
                want = right(d, is_train, eps=1e-5, fix_gamma=False)
                check(y, want.output)
                check(x.grad, want.dx)
                check(layer.gamma.grad(), want.dgamma)
            mx.nd.waitall()
            check(layer.running_mean.data(), want.moving_mean)
            check(layer.running_var.data(), want.moving_var)
        print("done")
        """)
    assert done.stdout == "done\n", done.stderr[-2000:]


# --------------------------------------------------------------------------- looking into networks


def test_print_summary(capsys):
    mx.viz.print_summary(symbol("mxbn"), shape={"data": SHAPE})
    rows = capsys.readouterr().out.splitlines()
    found = [row.split()[:2] for row in rows if row.startswith("bn")]
    assert found == [["bn(mxbn_BatchNorm)", "8x7x7"], ["bn_fixed(mxbn_BatchNorm)", "8x7x7"]]


def test_plot_network():
    graph = mx.viz.plot_network(symbol("mxbn"), shape={"data": SHAPE}, hide_weights=True)
    assert re.search(r"bn_fixed -> fc|fc -> bn_fixed", graph.source)
    assert "bn_moving_mean" not in graph.source


def test_block_summary(capsys):
    texts = []
    for kind in LAYERS:
        network_in_use(kind).summary(random_data())
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "BatchNorm" in texts[0]


@pytest.mark.parametrize("for_training", [True, False])
@pytest.mark.parametrize("is_train", [True, False])
def test_monitor_sees_the_outputs_of_a_module(for_training, is_train):
    d = draw((6, 3, 4))
    s = mxbn.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, name="bn")
    module = mxbn.Module(s, label_names=None)
    module.bind([("data", d.shape)], for_training=for_training)
    module.init_params(
        arg_params={"bn_gamma": nd(d.gamma), "bn_beta": nd(d.beta)},
        aux_params={"bn_moving_mean": nd(d.moving_mean), "bn_moving_var": nd(d.moving_var)},
    )
    monitor = mx.mon.Monitor(1, stat_func=lambda array: array.max())
    module.install_monitor(monitor)
    monitor.tic()
    module.forward(mx.io.DataBatch([nd(d.x)]), is_train=is_train)
    mx.nd.waitall()
    seen = {name: np.float32(text) for _, name, text in monitor.toc()}
    want = right(d, is_train, fix_gamma=False)
    check(seen["bn_output"], want.output.max(), scale=np.abs(want.output).max())
    check(seen["bn_moving_mean"], want.moving_mean.max())
    check(seen["bn_moving_var"], want.moving_var.max())
    # Outputs that nothing uses; the built-in operator fills them too.
    check(seen["bn_mean"], want.mean.max(), what="bn_mean")
    check(seen["bn_var"], want.inv_std.max(), what="bn_var")
    check(seen["bn_saved"], max(want.mean.max(), want.inv_std.max(), is_train), what="bn_saved")
