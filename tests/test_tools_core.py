"""Models taken apart, put together, saved, loaded, and loaded from damaged files."""

import json
import os
import stat
import struct

import mxnet as mx
import numpy as np
import pytest
from helpers import run_script
from mxnet.gluon.model_zoo import vision

import mxbn
from mxbn.tools.checkpoint import Checkpoint
from mxbn.tools.files import atomic, load_npz, refuse_existing
from mxbn.tools.graph import Entry, Graph, Node
from mxbn.tools.layers import Attributes, as_checkpoint, layers
from mxbn.tools.params_file import load_arrays
from mxbn.tools.symbol_file import load_symbol


def small():
    net = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    net = mx.sym.BatchNorm(net, name="bn")
    return mx.sym.FullyConnected(net, num_hidden=3, name="fc")


def saved(folder, symbol=None, shape=(2, 3, 8, 8)):
    """A checkpoint on disk, and its prefix."""
    symbol = symbol or small()
    arguments, _, auxiliary = symbol.infer_shape(data=shape)
    arrays = [
        {n: mx.nd.random.uniform(1, 2, s) for n, s in zip(names, shapes) if n != "data"}
        for names, shapes in (
            (symbol.list_arguments(), arguments),
            (symbol.list_auxiliary_states(), auxiliary),
        )
    ]
    prefix = os.path.join(folder, "net")
    Checkpoint(symbol, *arrays).save(prefix, 3)
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return saved(str(tmp_path))


def edit(prefix, change):
    """Change the JSON of a checkpoint's Symbol."""
    path = f"{prefix}-symbol.json"
    with open(path) as file:
        described = json.load(file)
    nodes = {node["name"]: node for node in described["nodes"]}
    change(described, nodes)
    with open(path, "w") as file:
        json.dump(described, file)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def edit_params(prefix, change):
    path = f"{prefix}-0003.params"
    arrays = mx.nd.load(path)
    change(arrays)
    mx.nd.save(path, arrays)


def refused(prefix, *texts, error=ValueError):
    with pytest.raises(error) as caught:
        Checkpoint.load(prefix, 3)
    for text in texts:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


# Graphs


def control_flow():
    data, state = mx.sym.var("data"), mx.sym.var("state")

    def body(x, states):
        return mx.sym.BatchNorm(x + states[0], name="inner"), [x + states[0]]

    out, states = mx.sym.contrib.foreach(body, data, [state])
    chosen = mx.sym.contrib.cond(
        mx.sym.sum(data) > 0, lambda: mxbn.sym.BatchNorm(data, name="then"), lambda: data * 2
    )
    looped, _ = mx.sym.contrib.while_loop(
        lambda i, s: i < 5, lambda i, s: (s, [i + 1, s + i]), [mx.sym.var("i"), state], 5
    )
    return mx.sym.Group([out, states[0], chosen, looped])


def shared_nodes():
    data = mx.sym.var("data", shape=(2, 3), lr_mult=2.0)
    gamma = mx.sym.var("gamma")
    first = mx.sym.BatchNorm(data, gamma=gamma, name="a", attr={"ctx_group": "dev1"})
    parts = mx.sym.split(mxbn.sym.BatchNorm(first, gamma=gamma, name="b"), num_outputs=3)
    return mx.sym.Group([parts[2] + parts[0], first, parts[1], first])


@pytest.mark.parametrize(
    "symbol",
    [
        small,
        control_flow,
        shared_nodes,
        lambda: mx.sym.var("läßt")._set_attr(x="1") or mx.sym.var("läßt") * 2,
        lambda: vision.resnet18_v2()(mx.sym.var("data")),
        lambda: vision.densenet121()(mx.sym.var("data")),
        lambda: vision.inception_v3()(mx.sym.var("data")),
    ],
)
def test_graph_round_trip(symbol, tmp_path):
    symbol = symbol()
    again = Graph.from_symbol(symbol).to_symbol()
    assert again.tojson() == symbol.tojson()
    symbol.save(str(tmp_path / "symbol.json"))
    assert load_symbol(str(tmp_path / "symbol.json")).tojson() == symbol.tojson()


def test_graph_keeps_numpy_mode_and_multi_outputs():
    symbol = mx.sym.np.add(mx.sym.var("a").as_np_ndarray(), 1)
    assert isinstance(Graph.from_symbol(symbol).to_symbol(), mx.sym.np._Symbol)
    internals = small().get_internals()
    assert Graph.from_symbol(internals).to_symbol().list_outputs() == internals.list_outputs()


def test_graph_replace_and_consumers():
    graph = Graph.from_symbol(shared_nodes())
    by_name = {node.name: node for node in graph.nodes()}
    assert len(graph.consumers()[id(by_name["a"])]) == 3  # b, and two outputs
    assert (None, 0) in graph.consumers()[id(by_name["a"])]
    negated = Node("negative", "n", inputs=[Entry(by_name["data"])])
    graph.replace(Entry(by_name["a"]), Entry(negated))
    x = mx.nd.array([[1, 2, 3], [4, 5, 6]])
    outputs = graph.to_symbol().bind(
        mx.cpu(),
        {"data": x, "gamma": mx.nd.ones(3), "b_beta": mx.nd.zeros(3)},
        aux_states={"b_moving_mean": mx.nd.zeros(3), "b_moving_var": mx.nd.ones(3)},
    )
    assert (outputs.forward()[1].asnumpy() == -x.asnumpy()).all()


def test_graph_of_many_nodes_in_a_row():
    symbol = mx.sym.var("x")
    for _ in range(5000):
        symbol = symbol + 1
    assert Graph.from_symbol(symbol).to_symbol().tojson() == symbol.tojson()


# Layers


def test_layers_of_every_kind_of_model(tmp_path):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(in_channels=3), mxbn.gluon.BatchNorm(axis=-1, in_channels=4))
    net.add(net[0])
    net.initialize()
    of_block = layers(net)
    assert [layer.op for layer in of_block] == ["BatchNorm", "mxbn_BatchNorm"]
    assert of_block[1].attributes == Attributes(1e-5, 0.9, False, False, False, -1)
    symbol, *arrays = as_checkpoint(net)
    of_symbol = layers((symbol, *arrays))
    assert [layer.op for layer in of_symbol] == ["BatchNorm", "mxbn_BatchNorm", "BatchNorm"]
    assert of_symbol[0].parameters == of_symbol[2].parameters == of_block[0].parameters
    assert all(set(layer.arrays) == set(layer.parameters) for layer in of_symbol + of_block)
    Checkpoint(symbol, *arrays).save(str(tmp_path / "net"), 0)
    files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
    imported = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    assert [layer.name for layer in layers(imported)] == [layer.name for layer in of_symbol]
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", (2, 3, 4, 4))], for_training=False)
    module.set_params(*arrays)
    assert [layer.parameters for layer in layers(module)] == [
        layer.parameters for layer in of_symbol
    ]


def test_layers_in_bodies_are_found():
    found = layers((control_flow(), {}, {}))
    assert {layer.name: layer.in_body for layer in found} == {"inner": True, "then": True}
    assert not layers((small(), {}, {}))[0].in_body


def test_no_model():
    with pytest.raises(TypeError, match="a model of type int was given"):
        as_checkpoint(3)


# Files


def test_checkpoint_round_trip(prefix):
    symbol, arg_params, aux_params = Checkpoint.load(prefix, 3)
    assert symbol.tojson() == small().tojson()
    assert set(arg_params) == {*small().list_arguments()} - {"data"}
    assert set(aux_params) == {"bn_moving_mean", "bn_moving_var"}
    by_mxnet = mx.model.load_checkpoint(prefix, 3)
    for ours, theirs in zip((arg_params, aux_params), by_mxnet[1:]):
        assert all((ours[n].asnumpy() == theirs[n].asnumpy()).all() for n in theirs)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int32", "int64"])
def test_all_types_and_kinds_of_arrays_load(prefix, dtype):
    extra = mx.nd.array([[0, 1, 0], [0, 0, 0]], dtype=dtype)
    edit_params(prefix, lambda arrays: arrays.update({"arg:extra": extra}))
    assert Checkpoint.load(prefix, 3).arg_params["extra"].dtype == np.dtype(dtype)
    for kind in ("row_sparse", "csr"):
        stored = extra.astype("float32").tostype(kind)
        stored.wait_to_read()  # or MXNet may save a shape that is not known yet
        edit_params(prefix, lambda arrays, stored=stored: arrays.update({"arg:sparse": stored}))
        found = Checkpoint.load(prefix, 3).arg_params["sparse"]
        assert (found.asnumpy() == extra.asnumpy()).all()


def test_arrays_of_numpy_mode_and_of_old_versions_load(tmp_path):
    path = str(tmp_path / "numpy.params")
    with mx.util.np_shape(True), mx.util.np_array(True):
        mx.npx.save(path, {"x": mx.np.array(3.0), "y": mx.np.ones((0, 2)), "z": mx.np.ones(2)})
        assert {n: a.shape for n, a in load_arrays(path).items()} == {
            "x": (),
            "y": (0, 2),
            "z": (2,),
        }
    data = struct.pack("<2f", 1, 2)
    places = struct.pack("<iii", 1, 0, 0)  # context and type
    arrays = struct.pack("<IIq", 0xF993FAC8, 1, 2) + places + data
    arrays += struct.pack("<II", 1, 2) + places + data
    names = b"".join(struct.pack("<Q", 5) + name for name in (b"arg:a", b"arg:b"))
    old = struct.pack("<QQQ", 0x112, 0, 2) + arrays + struct.pack("<Q", 2) + names
    (tmp_path / "old-0003.params").write_bytes(old)
    mx.sym.var("a").save(str(tmp_path / "old-symbol.json"))
    loaded = Checkpoint.load(str(tmp_path / "old"), 3).arg_params
    assert all(loaded[name].asnumpy().tolist() == [1, 2] for name in "ab")


def test_truncated_params_at_every_place(prefix):
    path = f"{prefix}-0003.params"
    data = read(path)
    for size in sorted({*range(0, 200), *range(200, len(data), 101), len(data) - 1}):
        with open(path, "wb") as file:
            file.write(data[:size])
        refused(prefix, path, "damaged or not a parameter file: it ends too early")


def test_damaged_params_do_not_end_the_process(tmp_path):
    # Each of these made MXNet allocate what there is not, or read for minutes.
    result = run_script(
        f"""
        import mxnet as mx, random
        from mxbn.tools.params_file import load_arrays
        path = {str(tmp_path / "x.params")!r}
        half = mx.nd.ones((4,), dtype="float16")
        mx.nd.save(path, {{"arg:a": mx.nd.ones((2, 3)), "aux:b": half}})
        data = open(path, "rb").read()
        draw = random.Random(0)
        for place in range(len(data)):
            for value in (1, 255, draw.randrange(256)):
                damaged = bytearray(data)
                damaged[place] = value
                open(path, "wb").write(damaged)
                try:
                    [array.asnumpy() for array in load_arrays(path).values()]
                except ValueError as error:
                    assert path in str(error)
        print("alive")
        """
    )
    assert result.stdout == "alive\n", result.stderr


def test_params_of_other_kinds(prefix, tmp_path):
    path = f"{prefix}-0003.params"
    for content in (b"", b"{}", b"PK\3\4" * 100, bytes(1000)):
        with open(path, "wb") as file:
            file.write(content)
        refused(prefix, path, "damaged or not a parameter file")
    mx.nd.save(path, [mx.nd.ones(3)])
    refused(prefix, path, "holds arrays without names")
    net = mx.gluon.nn.BatchNorm(in_channels=3)
    net.initialize()
    net.save_parameters(path)
    refused(prefix, path, "'gamma', expected names like arg:conv0_weight", "save_parameters")
    mx.nd.save(path, {"arg:": mx.nd.ones(3)})
    refused(prefix, path, "'arg:'")


def test_missing_files_folders_and_unreadable_files(prefix, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"net-0004.params does not exist; there are.* 3"):
        Checkpoint.load(prefix, 4)
    with pytest.raises(FileNotFoundError, match="nothing-symbol"):
        Checkpoint.load(str(tmp_path / "no" / "nothing"), 0)
    os.rename(f"{prefix}-0003.params", f"{prefix}-0005.params")
    os.mkdir(f"{prefix}-0003.params")
    refused(prefix, "Is a directory", f"{prefix}-0003.params", error=OSError)
    os.rmdir(f"{prefix}-0003.params")
    os.symlink("nowhere", f"{prefix}-0003.params")
    refused(prefix, f"{prefix}-0003.params", error=FileNotFoundError)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"{}", b'{"nodes": 3}', b"\xff\xfe", b"[" * 100000, b"null"]
)
def test_symbol_file_that_is_none(prefix, content):
    with open(f"{prefix}-symbol.json", "wb") as file:
        file.write(content)
    refused(prefix, f"{prefix}-symbol.json does not hold an MXNet Symbol")


def set_inputs(name, inputs):
    def change(described, nodes):
        nodes[name]["inputs"] = inputs(nodes[name]["inputs"])

    return change


def set_attribute(name, **attributes):
    return lambda described, nodes: nodes[name].setdefault("attrs", {}).update(attributes)


DAMAGED_SYMBOLS = {
    "unknown operator": (
        lambda described, nodes: nodes["bn"].update(op="BatchNorm9"),
        "node bn is of the operator BatchNorm9, which is unknown",
    ),
    "an input after the node": (
        set_inputs("conv", lambda inputs: [[9, 0, 0], *inputs[1:]]),
        "node conv takes a value that is not there",
    ),
    "itself": (set_inputs("conv", lambda _: [[3, 0, 0]] * 3), "node conv takes a value"),
    "negative": (set_inputs("conv", lambda _: [[-1, 0, 0]] * 3), "node conv takes a value"),
    "half": (set_inputs("conv", lambda _: [[0.5, 0, 0]] * 3), "Symbol"),
    "no number": (set_inputs("conv", lambda _: [["a", 0, 0]] * 3), "nodes are not in order"),
    "output of a node that is not there": (
        set_inputs("bn", lambda inputs: [[inputs[0][0], 1, 0], *inputs[1:]]),
        "output 1 of node conv is used, which has 1",
    ),
    "hidden output": (
        set_inputs("fc", lambda inputs: [[inputs[0][0], 1, 0], *inputs[1:]]),
        "output 1 of node bn is used, which has 1",
    ),
    "far output": (
        set_inputs("bn", lambda inputs: [[inputs[0][0], 2**31 - 1, 0], *inputs[1:]]),
        "output 2147483647 of node conv",
    ),
    "head": (lambda described, _: described.update(heads=[[99, 0, 0]]), "an output is not there"),
    "head's output": (lambda described, _: described["heads"][0].__setitem__(1, 5), "output 5"),
    "no heads": (lambda described, _: described.update(heads=[]), "no outputs"),
    "few inputs": (
        set_inputs("bn", lambda inputs: inputs[:3]),
        "node bn of the operator BatchNorm has 3 inputs, expected 5",
    ),
    "no inputs": (set_inputs("bn", lambda _: []), "has 0 inputs, expected 5"),
    "many inputs": (set_inputs("conv", lambda inputs: inputs * 2), "has 6 inputs, expected 3"),
    "inputs of a variable": (
        set_inputs("conv_weight", lambda _: [[0, 0, 0]]),
        "node conv_weight of the operator null has 1 inputs, expected 0",
    ),
    "attribute": (set_attribute("bn", eps="a"), "expect double but value='a'"),
    "unknown attribute": (set_attribute("bn", epsilon="1"), "epsilon"),
    "subgraph operator": (
        lambda described, nodes: nodes["fc"].update(op="_sg_mkldnn_fully_connected"),
        "has no subgraph",
    ),
    "division by zero": (
        set_attribute("conv", num_group="0"),
        "node conv has num_group 0, expected 1 or more",
    ),
    "gradient": (lambda described, nodes: nodes["fc"].update(op="_backward_BatchNorm"), "Symbol"),
}


@pytest.mark.parametrize("case", DAMAGED_SYMBOLS)
def test_damaged_symbol(prefix, case):
    change, text = DAMAGED_SYMBOLS[case]
    edit(prefix, change)
    refused(prefix, f"{prefix}-symbol.json", text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("remain_locs", "[9]"), ("in_data_locs", "[-1]"), ("num_args", "3"), ("num_outputs", "1")],
)
def test_damaged_control_flow(tmp_path, key, value):
    path = tmp_path / "net-symbol.json"
    described = json.loads(control_flow().tojson())
    loop = next(node for node in described["nodes"] if node["op"] == "_foreach")
    loop["attrs"][key] = value
    path.write_text(json.dumps(described))
    refused(str(tmp_path / "net"), str(path))


def test_damaged_symbols_end_no_process(tmp_path):
    # MXNet itself ends the process for a BatchNorm without inputs, or for outputs that are not.
    path = str(tmp_path / "x.json")
    result = run_script(
        f"""
        import json, random
        from test_tools_core import small, control_flow
        from mxbn.tools.symbol_file import load_symbol
        path, draw = {path!r}, random.Random(1)
        for text in (small().tojson(), control_flow().tojson()):
            for _ in range(80):
                described = json.loads(text)
                node = draw.choice(described["nodes"])
                draw.choice([
                    lambda: node["inputs"] and node["inputs"].pop(),
                    lambda: node["inputs"].append([draw.randrange(9), draw.randrange(2), 0]),
                    lambda: node["inputs"] and node["inputs"][0].__setitem__(draw.randrange(2), draw.randrange(9)),
                    lambda: node.update(op=draw.choice(described["nodes"])["op"]),
                    lambda: node.update(attrs=draw.choice(described["nodes"]).get("attrs", {{}})),
                ])()
                open(path, "w").write(json.dumps(described))
                try:
                    symbol = load_symbol(path)
                except ValueError as error:
                    assert path in str(error)
                else:
                    symbol.list_auxiliary_states()
                    try:
                        symbol.infer_shape_partial(data=(2, 3, 8, 8))
                    except Exception as error:
                        assert "infer_shape" in str(error) or "rror" in type(error).__name__
        print("alive")
        """  # noqa: E501
    )
    assert result.stdout == "alive\n", result.stderr[-2000:]


def test_symbols_of_old_versions_load(prefix):
    def change(described, nodes):
        described["attrs"] = {"mxnet_version": ["int", 800]}
        nodes["bn"]["inputs"] = nodes["bn"]["inputs"][:3]

    edit(prefix, change)
    assert Checkpoint.load(prefix, 3).symbol.list_auxiliary_states() == [
        "bn_moving_mean",
        "bn_moving_var",
    ]


def test_files_that_do_not_belong_together(prefix):
    both = (f"{prefix}-0003.params does not belong to {prefix}-symbol.json",)
    original = read(f"{prefix}-0003.params")

    def changed(change, *texts):
        with open(f"{prefix}-0003.params", "wb") as file:
            file.write(original)
        edit_params(prefix, change)
        refused(prefix, *both, *texts)

    changed(lambda a: a.pop("aux:bn_moving_var"), "1 auxiliary states", "bn_moving_var")
    changed(lambda a: a.pop("arg:bn_beta"), "1 parameters are missing", "bn_beta")
    changed(lambda a: a.pop("arg:conv_weight"), "conv_weight")
    changed(lambda a: a.update({"arg:bn_gamma": mx.nd.ones(3)}), "bn_gamma (3,), bn_beta (4,)")
    changed(lambda a: a.update({"aux:bn_moving_var": mx.nd.ones(5)}), "bn_moving_var (5,)")
    changed(lambda a: a.update({"aux:bn_moving_var": mx.nd.ones((4, 1))}), "expected one shape")
    changed(lambda a: a.update({"arg:data": mx.nd.ones((2, 3))}), "the shapes do not fit")


def test_check_with_the_shapes_of_inputs(prefix):
    checkpoint = Checkpoint.load(prefix, 3)
    checkpoint.check(data=(5, 3, 8, 8))
    with pytest.raises(ValueError, match=r"fc_weight has shape|the shapes do not fit"):
        checkpoint.check(data=(5, 3, 9, 9))
    four = {name: mx.nd.ones(3) for name in ("bn_gamma", "bn_beta")}
    three = {name: mx.nd.ones(3) for name in checkpoint.aux_params}
    wrong = Checkpoint(checkpoint.symbol, {**checkpoint.arg_params, **four}, three)
    with pytest.raises(ValueError, match=r"bn_gamma has shape \(3,\), expected \(4,\)"):
        wrong.check(data=(5, 3, 8, 8))


def test_labels_and_states_need_no_arrays(tmp_path):
    prefix = str(tmp_path / "net")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=2, name="f"))
    weights = {"f_weight": mx.nd.ones((2, 3)), "f_bias": mx.nd.ones(2)}
    Checkpoint(symbol, weights, {}).save(prefix, 0)
    assert set(Checkpoint.load(prefix, 0).arg_params) == set(weights)
    mx.sym.var("x").save(f"{prefix}-symbol.json")
    mx.nd.save(f"{prefix}-0000.params", {})
    assert Checkpoint.load(prefix, 0).arg_params == {}


# Writing


def test_nothing_is_overwritten_unasked(prefix):
    checkpoint = Checkpoint.load(prefix, 3)
    before = read(f"{prefix}-0003.params")
    with pytest.raises(FileExistsError, match="--force"):
        checkpoint.save(prefix, 3)
    with pytest.raises(FileExistsError, match="net-symbol"):
        checkpoint.save(prefix, 4)
    assert read(f"{prefix}-0003.params") == before
    checkpoint.save(prefix, 4, force=True)
    assert read(f"{prefix}-0004.params") == before
    with pytest.raises(FileExistsError):
        refuse_existing("/nonexistent", prefix + "-symbol.json")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, MemoryError])
def test_a_writer_that_fails_leaves_the_old_file_and_no_litter(tmp_path, kind):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail():
        with atomic(str(path)) as written, open(written, "w") as file:
            file.write("half")
            raise kind

    with pytest.raises(kind):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_save_that_fails_leaves_both_files(prefix, tmp_path):
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    broken = Checkpoint(Checkpoint.load(prefix, 3).symbol, {"x": 3}, {})
    with pytest.raises(TypeError):
        broken.save(prefix, 3, force=True)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_permissions_and_links_stay(tmp_path):
    path, link = tmp_path / "file.txt", tmp_path / "link"
    mask = os.umask(0o027)
    try:
        with atomic(str(path)) as written:
            assert written.endswith("file.txt")
            assert os.path.dirname(written) == str(tmp_path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to("file.txt")
    with atomic(str(link)) as written, open(written, "w") as file:
        file.write("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no/file.txt'$"), atomic(
        f"{tmp_path}/no/file.txt"
    ):
        pass
    with pytest.raises(FileExistsError, match="is no file"), atomic(str(tmp_path)):
        pass
    with pytest.raises(FileExistsError, match="/dev/null is there"), atomic("/dev/null"):
        pass
    monkeypatch.chdir(tmp_path)
    with atomic("bare") as written, open(written, "w") as file:
        file.write("x")
    assert os.listdir(tmp_path) == ["bare"]


def test_npz(tmp_path):
    path = str(tmp_path / "x.npz")
    np.savez(path, data=np.arange(3))
    assert load_npz(path)["data"].tolist() == [0, 1, 2]
    whole = read(path)
    for size in range(0, len(whole), 37):
        (tmp_path / "x.npz").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged or no npz"):
            load_npz(path)
    np.savez(path, data=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="damaged or no npz"):
        load_npz(path)
    with pytest.raises(FileNotFoundError):
        load_npz(path + "x")
