"""BatchNorm layers of PyTorch's state dicts.

The literals were made with torch 2.13.0 on a CPU, which the test does not need:

    torch.manual_seed(0)
    x = (torch.randint(-8, 9, (3, 2, 3, 2, 2)) / 4).float()  # three batches: STEPS
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3, eps=1e-3, momentum=0.25))
    net[0].weight.data = torch.tensor([1.5, -0.5, 2.0]); net[0].bias.data = ...
    for batch in x: net(batch)
    net.eval(); net.state_dict(); net(x[0])  # PLAIN, and its output

and in the same way with momentum=None (and eps=1e-5), affine=False (one batch) and
track_running_stats=False.
"""

import argparse
import json
import pickle
import zipfile

import mxnet as mx
import numpy as np
import pytest
from helpers import check, same_bits

import mxbn
from mxbn.commands import from_pytorch as command
from mxbn.tools import from_pytorch as module
from mxbn.tools.convert import convert
from mxbn.tools.from_pytorch import as_params, from_pytorch
from mxbn.tools.set_layers import set_layers

# fmt: off
STEPS = np.array([
    -0.25, -1.25, 1.0, 2.0, -1.5, -2.0, 2.0, 0.5, -0.5, -0.75, 2.0, 0.5,
    1.25, 0.25, 0.0, -0.25, -1.25, -0.5, 2.0, 0.75, -2.0, 0.5, 1.75, -0.75,
    0.25, -1.5, -0.25, 0.0, 0.75, 1.5, -2.0, -0.75, -1.25, 2.0, 0.75, -1.0,
    2.0, -1.5, 2.0, -1.75, -0.25, -1.0, -0.75, -1.0, 2.0, -0.5, -2.0, 0.0,
    1.25, 0.5, 1.25, 1.25, -1.25, 1.5, 0.25, 1.75, -0.5, 0.25, -1.5, 1.25,
    -1.25, -0.5, -0.75, 0.5, -1.0, -1.5, 0.75, 0.75, -1.75, 1.25, 0.25, -1.25,
]).reshape(3, 2, 3, 2, 2)
M = 8  # values per channel
AFFINE = {"weight": [1.5, -0.5, 2.0], "bias": [0.25, 1.0, -1.0]}
PLAIN = {
    **AFFINE,
    "running_mean": [0.101074219, -0.04296875, -0.0493164062],
    "running_var": [1.23568296, 1.38476574, 1.44487655],
}
PLAIN_OUTPUT = [
    -0.223544747, -1.57238984, 1.46251166, 2.81135678, 1.61886215, 1.83123314, 0.132265568,
    0.769378424, -1.74961138, -2.16543031, 2.40857911, -0.0863351226, 1.79972291, 0.450877815,
    0.113666534, -0.223544747, 1.51267672, 1.19412029, 0.132265568, 0.663192928, -4.24452543,
    -0.0863351226, 1.99276018, -2.16543031,
]
CUMULATIVE = {
    **AFFINE,
    "running_mean": [0.177083328, -0.0937499925, -0.0520833358],
    "running_var": [1.42447913, 1.73623502, 1.81510413],
}
CUMULATIVE_OUTPUT = [
    -0.28675279, -1.54353988, 1.28423107, 2.54101801, 1.53361368, 1.72334313, 0.205508411,
    0.77469641, -1.66492891, -2.03605223, 2.0463028, -0.180436313, 1.59842777, 0.341640741,
    0.027443964, -0.28675279, 1.43874907, 1.15415502, 0.205508411, 0.679831743, -3.89166784,
    -0.180436313, 1.67517948, -2.03605223,
]
NOT_AFFINE = {
    "running_mean": [0.0343750007, 0.0, 0.00937500037],
    "running_var": [1.00524557, 1.14107144, 1.08381701],
}
NOT_AFFINE_OUTPUT = [
    -0.283630639, -1.28101313, 0.963097453, 1.96047986, -1.40421271, -1.8722837, 1.8722837,
    0.468070924, -0.489280224, -0.729417741, 1.91209507, 0.471269906, 1.21244311, 0.215060592,
    -0.0342850238, -0.283630639, -1.17017734, -0.468070924, 1.8722837, 0.702106357, -1.93010545,
    0.471269906, 1.67195761, -0.729417741,
]
NOT_TRACKED = {"weight": [1.0, 1.0, 1.0], "bias": [0.0, 0.0, 0.0]}
NOT_TRACKED_OUTPUT = [
    -0.618721783, -1.66077948, 0.683850408, 1.72590816, -1.03279305, -1.37705743, 1.37705743,
    0.344264358, -0.468172014, -0.665297091, 1.50307858, 0.320328236, 0.944364846, -0.0976929069,
    -0.358207345, -0.618721783, -0.860660911, -0.344264358, 1.37705743, 0.516396523, -1.65092242,
    0.320328236, 1.3059535, -0.665297091,
]
# fmt: on


def state_of(**layers):
    """Return a state dict, with a convolution and the counters that PyTorch has."""
    state = {"conv.weight": np.zeros((3, 1, 1, 1), "float32")}
    for name, entries in layers.items():
        name = name.replace("_", ".")
        state.update({f"{name}.{k}": np.array(v, "float32") for k, v in entries.items()})
        if "running_mean" in entries:
            state[f"{name}.num_batches_tracked"] = np.array(3)
    return state


def output(layer):
    arrays = [layer.arrays[r] for r in ("gamma", "beta", "moving_mean", "moving_var")]
    return mxbn.nd.BatchNorm(mx.nd.array(STEPS[0]), *arrays, **layer.attributes)


def like_torch(got, want):
    check(got, np.reshape(want, got.shape), 4)


def test_a_layer_computes_what_it_did_in_pytorch():
    layers = from_pytorch(state_of(layer1_bn=PLAIN), eps=1e-3, momentum=0.25)
    assert list(layers) == ["layer1.bn"]
    layer = layers["layer1.bn"]
    assert layer.name == "layer1_bn"
    assert layer.attributes == {
        "eps": 1e-3, "momentum": 0.75, "fix_gamma": False, "use_batch_stats": False
    }  # fmt: skip
    assert layer.remarks == (module.AS_IT_IS,)
    like_torch(output(layer), PLAIN_OUTPUT)


def test_the_variance_becomes_the_one_that_mxnet_keeps():
    layer = from_pytorch(state_of(bn=PLAIN), values_per_channel=M)["bn"]
    assert layer.remarks == ()
    check(layer.arrays["moving_var"], np.array(PLAIN["running_var"]) * 7 / 8, 1)
    like_torch(layer.arrays["moving_mean"], PLAIN["running_mean"])
    # After a plain average nothing is left of the value that running_var started with.
    average = from_pytorch(state_of(bn=CUMULATIVE), values_per_channel={"bn": M}, momentum=None)
    check(average["bn"].arrays["moving_var"], STEPS.var(axis=(1, 3, 4)).mean(axis=0), 2)


def test_training_goes_on_as_in_pytorch():
    """Training all three steps with mxbn leads to the same statistics, but for its start."""
    layer = from_pytorch(state_of(bn=PLAIN), momentum=0.25, values_per_channel=M)["bn"]
    arrays = {r: mx.nd.array(v) for r, v in zip(("gamma", "beta"), AFFINE.values())}
    arrays.update(moving_mean=mx.nd.zeros(3), moving_var=mx.nd.ones(3) * (M - 1) / M)
    with mx.autograd.train_mode():
        for batch in STEPS:
            mxbn.nd.BatchNorm(mx.nd.array(batch), **arrays, **layer.attributes).wait_to_read()
    mx.nd.waitall()
    for role in ("moving_mean", "moving_var"):
        check(layer.arrays[role], arrays[role].asnumpy(), 4, what=role)


def test_a_cumulative_average_is_taken_and_explained():
    layer = from_pytorch(state_of(bn=CUMULATIVE), momentum={"bn": None})["bn"]
    assert layer.attributes["momentum"] == 0.9
    assert module.CUMULATIVE in layer.remarks
    like_torch(output(layer), CUMULATIVE_OUTPUT)


def test_layers_without_weights():
    layer = from_pytorch(state_of(bn=NOT_AFFINE))["bn"]
    assert layer.attributes["fix_gamma"] is True
    assert module.NO_AFFINE in layer.remarks
    assert same_bits(layer.arrays["gamma"], np.ones(3, "float32"))
    assert same_bits(layer.arrays["beta"], np.zeros(3, "float32"))
    like_torch(output(layer), NOT_AFFINE_OUTPUT)


def test_layers_without_running_statistics():
    state = state_of(bn=NOT_TRACKED)
    assert from_pytorch(state) == {}
    layer = from_pytorch(state, {"bn": "batchnorm0"}, values_per_channel=M)["bn"]
    assert layer.attributes["use_batch_stats"] is True
    assert layer.remarks == (module.NO_STATISTICS,)
    assert same_bits(layer.arrays["moving_mean"], np.zeros(3, "float32"))
    assert same_bits(layer.arrays["moving_var"], np.ones(3, "float32"))
    like_torch(output(layer), NOT_TRACKED_OUTPUT)


def test_a_state_dict_of_one_layer():
    state = {k: np.array(v, "float32") for k, v in PLAIN.items()}
    assert from_pytorch(state)[""].name == "batchnorm"
    like_torch(output(from_pytorch(state, {"": "bn"}, eps=1e-3)[""]), PLAIN_OUTPUT)


def test_options_of_single_layers_and_types():
    state = state_of(a=PLAIN, b=PLAIN)
    state.update({k: v.astype("float64") for k, v in state.items() if k.startswith("b.")})
    half = {k: v.astype("float16") for k, v in state_of(c=PLAIN).items() if k.startswith("c.r")}
    state.update(half)
    m = {"b": 2, "c": 3}
    layers = from_pytorch(state, eps={"a": 0.5}, momentum={"b": 1}, values_per_channel=m)
    assert [layers[n].attributes["eps"] for n in "ab"] == [0.5, 1e-5]
    assert [layers[n].attributes["momentum"] for n in "ab"] == [0.9, 0]
    for name in "ac":
        assert {each.dtype for each in layers[name].arrays.values()} == {np.float32}
    assert {each.dtype for each in layers["b"].arrays.values()} == {np.float64}
    assert layers["a"].arrays["moving_var"].asnumpy()[0] == np.float32(PLAIN["running_var"][0])
    assert layers["b"].arrays["moving_var"].asnumpy()[0] == state["b.running_var"][0] / 2
    check(layers["c"].arrays["moving_var"], half["c.running_var"].astype("float64") * 2 / 3, 1)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"bn.bias": None}, {}, "has weight, running_mean, running_var of layer bn, expected"),
        ({"bn.running_var": None}, {}, "has weight, bias, running_mean of layer bn, expected"),
        ({"bn.bias": np.ones(4)}, {}, r"arrays of layer bn have the shapes \[\(3,\), \(4,\)\]"),
        ({"bn.bias": np.ones((3, 1))}, {}, r"bn.bias is float64 of shape \(3, 1\), expected a"),
        ({"bn.bias": np.ones(3, int)}, {}, "bn.bias is int64 of shape"),
        ({}, {"names": {"bn9": "x"}}, "has nothing of layer bn9"),
        ({}, {"names": {"bn": "x", "conv": "x"}}, "names gives one name to several layers"),
        ({}, {"values_per_channel": 1}, "values_per_channel of layer bn is 1, expected at least 2"),
        ({}, {"momentum": 1.5}, "momentum of layer bn is 1.5, expected None or from 0 to 1"),
        ({}, {"eps": -1}, "eps is '-1', expected a finite number >= 0"),
    ],
)
def test_wrong_input_is_refused(change, options, message):
    state = {**state_of(bn=PLAIN), **change}
    with pytest.raises(ValueError, match=message):
        from_pytorch({k: v for k, v in state.items() if v is not None}, **options)


# Files


def save(path, state):
    np.savez(path, **state)
    return str(path)


def test_a_file_is_read(tmp_path):
    path = save(tmp_path / "net.npz", state_of(layer1_0_bn=PLAIN))
    layers = from_pytorch(path, {"layer1.0.bn": "bn"})
    like_torch(output(from_pytorch(path, eps=1e-3)["layer1.0.bn"]), PLAIN_OUTPUT)
    arguments, states = as_params(layers)
    assert list(arguments) == ["bn_gamma", "bn_beta"]
    assert list(states) == ["bn_moving_mean", "bn_moving_var"]
    assert list(as_params(layers, "running")[1]) == ["bn_running_mean", "bn_running_var"]


def test_wrong_files_are_refused_by_name(tmp_path):
    good = save(tmp_path / "good.npz", state_of(bn=PLAIN))
    with open(good, "rb") as file:
        content = file.read()
    (tmp_path / "short.npz").write_bytes(content[:-30])
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 255
    (tmp_path / "flipped.npz").write_bytes(flipped)
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "pickled.npz").write_bytes(pickle.dumps({"bn.weight": [1.0]}))
    np.savez(tmp_path / "object.npz", **{"bn.weight": np.array([None, {}])})
    np.save(tmp_path / "one.npy", np.ones(3))
    with zipfile.ZipFile(tmp_path / "saved.pt", "w") as file:  # as torch.save writes it
        file.writestr("saved/data.pkl", b"...")
    for path in tmp_path.iterdir():
        if path.name != "good.npz":
            with pytest.raises(ValueError, match=f"{path.name} is not an .npz file of arrays"):
                from_pytorch(path)
    with pytest.raises(OSError, match=r"missing\.npz"):
        from_pytorch(tmp_path / "missing.npz")


# Gluon


def network(layer=mxbn.gluon.BatchNorm, **options):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.HybridSequential(), mx.gluon.nn.Activation("relu"))
    net[0].add(layer(**options))
    net.initialize()
    return net


@pytest.mark.parametrize("called", [False, True], ids=["deferred", "known"])
@pytest.mark.parametrize("place", ["0.0", "name"])
def test_layers_of_a_network_are_set(called, place):
    net = network()
    net.hybridize()
    x = mx.nd.array(STEPS[0])
    if called:
        net(x)
    layer = net[0][0]
    names = {"bn": layer.name if place == "name" else place}
    layers = from_pytorch(state_of(bn=PLAIN), names, eps=1e-3, momentum=0.25)
    set_layers(net, layers)
    want = np.maximum(np.reshape(PLAIN_OUTPUT, x.shape), 0)
    check(net(x), want, 4, scale=4)
    assert "momentum=0.75" in repr(layer)
    assert layer.gamma.grad_req == "write"


def test_all_contexts_are_set():
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = network(in_channels=3)
    net.collect_params().reset_ctx(ctx)
    set_layers(net, from_pytorch(state_of(bn=PLAIN), {"bn": "0.0"}))
    for array in net[0][0].running_var.list_data():
        like_torch(array, PLAIN["running_var"])


def test_layers_without_weights_do_not_train_theirs():
    net = network(in_channels=3)
    set_layers(net, from_pytorch(state_of(bn=NOT_AFFINE), {"bn": "0.0"}))
    layer = net[0][0]
    assert (layer.gamma.grad_req, layer.beta.grad_req) == ("null", "null")
    check(net(mx.nd.array(STEPS[0])), np.maximum(np.reshape(NOT_AFFINE_OUTPUT, (2, 3, 2, 2)), 0), 4)


def test_layers_without_statistics_need_mxbn():
    layers = from_pytorch(state_of(bn=NOT_TRACKED), {"bn": "0.0"})
    net = network(mx.gluon.nn.BatchNorm, in_channels=3)
    with pytest.raises(ValueError, match=r"layer 0\.0 is the built-in one, expected mxbn's"):
        set_layers(net, layers)
    convert(net)
    set_layers(net, layers)
    want = np.maximum(np.reshape(NOT_TRACKED_OUTPUT, (2, 3, 2, 2)), 0)
    check(net(mx.nd.array(STEPS[0])), want, 4)


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("1.0", {"in_channels": 3}, r"no BatchNorm layer 1\.0, it has: 0\.0"),
        ("0.0", {"in_channels": 4}, r"_gamma has shape \(4,\), expected \(3,\) as in PyTorch"),
        ("0.0", {"in_channels": 3, "use_global_stats": True}, "use_global_stats"),
    ],
)
def test_a_refused_network_stays_as_it_was(place, options, message):
    net = mx.gluon.nn.HybridSequential()
    net.add(*network(**options), mxbn.gluon.BatchNorm(in_channels=3))
    net.initialize()
    state = state_of(ok=PLAIN, bn=NOT_TRACKED)
    with pytest.raises(ValueError, match=message):
        set_layers(net, from_pytorch(state, {"ok": "2", "bn": place}))
    assert same_bits(net[2].running_var.data(), np.ones(3, "float32"))


def test_a_network_must_be_initialized():
    layers = from_pytorch(state_of(bn=PLAIN))
    with pytest.raises(ValueError, match="bn_gamma is not initialized"):
        set_layers(mxbn.gluon.BatchNorm(prefix="bn_"), layers)


# The command


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["from-pytorch", *map(str, arguments)])
    return options.run(options)


def test_the_command_writes_parameters(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = save(tmp_path / "net.npz", state_of(layer1_bn=PLAIN, bn=CUMULATIVE))
    out = tmp_path / "out.params"
    assert run(path, out, "--values-per-channel", M, "--momentum", "none") == 0
    text = capsys.readouterr().out
    assert "layer1_bn" in text
    assert "all: momentum=None" in text
    arrays = mx.nd.load(str(out))
    assert sorted(arrays)[-2:] == ["aux:layer1_bn_moving_mean", "aux:layer1_bn_moving_var"]
    check(arrays["aux:bn_moving_var"], np.array(CUMULATIVE["running_var"]) * 7 / 8, 1)
    with pytest.raises(FileExistsError, match=r"out\.params exists already"):
        run(path, out)


def test_the_parameters_load_into_a_gluon_network(tmp_path, capsys):
    path = save(tmp_path / "net.npz", state_of(bn=PLAIN))
    net = network(in_channels=3, epsilon=1e-3)
    (tmp_path / "names.json").write_text(json.dumps({"bn": net[0][0].name}))
    out = tmp_path / "out.params"
    options = ("--names", tmp_path / "names.json", "--gluon", "--eps", "1e-3", "--json")
    assert run(path, out, *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers"]["bn"]["name"] == net[0][0].name
    assert report["layers"]["bn"]["eps"] == 1e-3
    net.collect_params().load(str(out))
    want = np.maximum(np.reshape(PLAIN_OUTPUT, (2, 3, 2, 2)), 0)
    check(net(mx.nd.array(STEPS[0])), want, 4, scale=4)


def test_the_command_refuses_what_is_wrong(tmp_path):
    path, out = save(tmp_path / "net.npz", state_of(bn=NOT_TRACKED)), tmp_path / "out.params"
    with pytest.raises(ValueError, match=r"net\.npz has no layer with running statistics"):
        run(path, out)
    for content, message in (("{", "is not JSON"), ("[1]", "holds other things than names")):
        (tmp_path / "names.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            run(path, out, "--names", tmp_path / "names.json")
    with pytest.raises(SystemExit):
        run(path, out, "--momentum", "high")
    assert not out.exists()
