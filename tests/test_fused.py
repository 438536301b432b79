"""act_type and addend: relu(batch_norm(x) + addend) in one pass, wherever the operator is used."""

import re

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    CONTEXT,
    DTYPES,
    HYBRIDIZE,
    MODES,
    arrays,
    call,
    check,
    draw,
    nd,
    numpy_of,
    right,
    rounded,
    same_bits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_operator import OUTPUT_UNITS, cases, check_all, flags_of

import mxbn
from mxbn import reference

MODE = pytest.mark.parametrize("mode", MODES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HYBRID = pytest.mark.parametrize("hybridize", HYBRIDIZE.values(), ids=HYBRIDIZE)
KINDS = {  # act_type, whether there is an addend
    "relu": ("relu", False),
    "add": (None, True),
    "add_relu": ("relu", True),
}
KIND = pytest.mark.parametrize("kind", KINDS)
GRADIENTS = ("x", "gamma", "beta", "addend")


def draw_fused(shape, axis=1, dtype="float32", seed=0, **options):
    d = draw(shape, axis, dtype, seed, **options)
    d.addend = rounded(np.random.RandomState(seed + 1).randn(*shape), dtype)
    return d


def run(d, kind, is_train, requests=None, fill=None, **attributes):
    """Forward and backward in one recording; fill is what the gradients hold before."""
    act_type, with_addend = KINDS[kind]
    a = arrays(d, "null")
    a.addend = nd(d.addend, d.dtype)
    for key in GRADIENTS if with_addend else GRADIENTS[:3]:
        getattr(a, key).attach_grad((requests or {}).get(key, "write"))
        if fill is not None:
            getattr(a, key).grad[:] = fill
    addend = a.addend if with_addend else None
    with mx.autograd.record(train_mode=is_train):
        a.y = call(d, a, act_type=act_type, addend=addend, **attributes)
    a.y.backward(a.dy)
    mx.nd.waitall()
    return a


def check_fused(d, kind, a, is_train, requests=None, fill=0.0, **attributes):
    """Compare everything with the reference: gradients with those of the output that was given."""
    act_type, with_addend = KINDS[kind]
    addend = d.addend if with_addend else 0 * d.addend
    y = numpy_of(a.y)
    g = reference.let_through(d.dy, y) if act_type else d.dy
    w = right(d, is_train, dy=g, **attributes)
    far = np.abs(d.x).max() if d.dtype == "float64" else 0
    scale = np.abs(w.output).max() + np.abs(d.beta).max() + np.abs(addend).max()
    scale += far * (np.abs(w.inv_std).max() * (1 + np.abs(d.gamma).max()))
    z = w.output + addend
    check(y, np.maximum(z, 0) if act_type else z, OUTPUT_UNITS, scale, "output")
    requests = {**dict.fromkeys(GRADIENTS, "write"), **(requests or {})}
    if with_addend and requests["addend"] != "null":
        found = numpy_of(a.addend.grad) - (fill if requests["addend"] == "add" else 0)
        check(found, g, 1 if requests["addend"] == "add" else 0, 4 + fill, "gradient of addend")
    without_act = type(a)(**{**vars(a), "y": w.output.astype(d.dtype)})
    d_masked = type(d)(**{**vars(d), "dy": g})
    check_all(d_masked, without_act, w, {k: requests[k] for k in GRADIENTS[:3]}, fill)


def unfused(d, kind, is_train, **attributes):
    """What the operator's parts give, one after the other."""
    act_type, with_addend = KINDS[kind]
    a = arrays(d)
    a.addend = nd(d.addend, d.dtype)
    a.addend.attach_grad()
    with mx.autograd.record(train_mode=is_train):
        y = call(d, a, **attributes)
        y = y + a.addend if with_addend else y
        a.y = mx.nd.relu(y) if act_type else y
    a.y.backward(a.dy)
    mx.nd.waitall()
    return a


# ------------------------------------------------------------------------------------ the operator


@DTYPE
@MODE
@KIND
@pytest.mark.parametrize("axis", [1, -1])
def test_every_mode(dtype, mode, kind, axis):
    d = draw_fused((4, 3, 2, 21), axis, dtype, seed=10)
    is_train, flags = flags_of(mode)
    options = {"fix_gamma": axis == 1, "eps": 1e-2, "momentum": 0.75, **flags}
    check_fused(d, kind, run(d, kind, is_train, **options), is_train, **options)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases(), st.sampled_from(sorted(KINDS)), st.sampled_from(["write", "add", "null"]))
def test_random_cases_agree_with_the_reference(case, kind, of_addend):
    d = draw_fused(
        case["shape"], case["axis"], case["dtype"], case["seed"], mean=case["mean"], std=case["std"]
    )
    is_train, flags = flags_of(case["mode"])
    options = {key: case[key] for key in ("fix_gamma", "eps", "momentum")}
    options.update(flags)
    requests = {**case["requests"], "addend": of_addend}
    wanted = GRADIENTS if KINDS[kind][1] else GRADIENTS[:3]
    if all(requests[key] == "null" for key in wanted):
        requests["beta"] = "write"  # MXNet refuses a backward that nobody wants
    a = run(d, kind, is_train, requests, fill=2.0, **options)
    check_fused(d, kind, a, is_train, requests, 2.0, **options)


# Float16 rounds once, where its parts round each in turn.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["train", "predict"])
@KIND
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *(((2, c, s), 1) for c in (1, 3, 33, 65) for s in (1, 7, 17, 1025)),
        *(((2, s, c), 2) for c in (1, 3, 33, 65) for s in (1, 7, 17, 1025)),
        ((3, 2, 100001), 1),  # pieces within a row
        ((7001, 5), -1),  # a shorter last row
        ((301, 1030), 1),  # more columns than a tile holds
        ((40, 130, 9), 1),  # short rows of several values
        ((20000,), 0),
        ((130, 513, 3), 0),
    ],
)
@pytest.mark.mxnet_operators
def test_every_form_gives_exactly_what_its_parts_give(dtype, mode, kind, shape, axis):
    d = draw_fused(shape, axis, dtype, seed=11)
    is_train, flags = flags_of(mode)
    a = run(d, kind, is_train, fix_gamma=False, **flags)
    check_same(a, unfused(d, kind, is_train, fix_gamma=False, **flags), kind)


def check_same(a, w, kind):
    for name in ("y", "moving_mean", "moving_var"):
        np.testing.assert_array_equal(getattr(a, name).asnumpy(), getattr(w, name).asnumpy(), name)
    for name in GRADIENTS if KINDS[kind][1] else GRADIENTS[:3]:
        got, want = getattr(a, name).grad.asnumpy(), getattr(w, name).grad.asnumpy()
        np.testing.assert_array_equal(got, want, f"gradient of {name}")


@pytest.mark.parametrize(("shape", "axis"), [((3, 3, 1000001), 1), ((35000, 257), -1)])
@pytest.mark.mxnet_operators
def test_tensors_that_are_written_past_the_caches(shape, axis):
    d = draw((2, shape[axis]), seed=12)
    d.shape, d.axis = shape, axis
    random = np.random.RandomState(0).standard_normal(100003).astype("float32")
    d.x, d.dy, d.addend = (np.resize(random[i:], shape) for i in (0, 1, 2))
    a = run(d, "add_relu", True, fix_gamma=False)
    check_same(a, unfused(d, "add_relu", True, fix_gamma=False), "add_relu")


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "is_train"),  # float16 data is normalized more exactly than an addend of it can be
    [("float16", False), ("float32", False), ("float32", True), ("float64", True)],
)
def test_no_gradient_at_exact_zeros(dtype, axis, is_train):
    d = draw_fused((4, 2, 40, 2), axis, dtype, seed=13)
    d.moving_mean[:], d.moving_var[:], d.beta[:] = 0, 1, 0
    d.x = rounded(np.round(d.x), dtype)
    normalized = right(d, is_train, eps=0).output.astype(dtype)
    d.addend = -normalized.astype("float64")
    plain = run(d, "add", is_train, eps=0).y.asnumpy()
    d.addend = rounded(d.addend - plain, dtype)  # now most of the sums are 0, of either sign
    a = run(d, "add_relu", is_train, eps=0)
    zeros = run(d, "add", is_train, eps=0).y.asnumpy() == 0
    assert zeros.mean() > 0.3
    assert (a.y.asnumpy()[zeros] == 0).all()
    assert not np.signbit(a.y.asnumpy()[zeros]).any()
    assert (a.addend.grad.asnumpy()[zeros] == 0).all()
    if not is_train:
        assert (a.x.grad.asnumpy()[zeros] == 0).all()
    check_fused(d, "add_relu", a, is_train, eps=0)


@DTYPE
@pytest.mark.parametrize("shape", [(2, 3, 50), (50, 3)])
@pytest.mark.mxnet_operators
def test_a_nan_stays_in_the_gradient_too(dtype, shape):
    d = draw_fused(shape, dtype=dtype, seed=14)
    at = (1, 2, *(0,) * (len(shape) - 2))
    d.addend[at] = np.nan
    a = run(d, "add_relu", False, fix_gamma=False)
    assert np.isnan(a.y.asnumpy()[at])
    assert np.isnan(a.y.asnumpy()).sum() == 1
    assert np.isnan(a.addend.grad.asnumpy()).sum() == 1
    parts = unfused(d, "add_relu", False, fix_gamma=False)
    np.testing.assert_array_equal(np.isnan(a.y.asnumpy()), np.isnan(parts.y.asnumpy()))
    np.testing.assert_array_equal(a.addend.grad.asnumpy(), parts.addend.grad.asnumpy())


@DTYPE
@KIND
def test_out_may_be_the_data_or_the_addend(dtype, kind):
    act_type, with_addend = KINDS[kind]
    d = draw_fused((6, 3, 20), dtype=dtype, seed=15)
    want = run(d, kind, True, fix_gamma=False).y
    for name in ("x", "addend"):
        a = arrays(d, "null")
        a.addend = nd(d.addend, dtype)
        addend, out = a.addend if with_addend else None, getattr(a, name)
        with mx.autograd.train_mode():
            call(d, a, fix_gamma=False, addend=addend, act_type=act_type, out=out)
        assert same_bits(out, want)


@KIND
@MODE
def test_an_empty_batch_changes_nothing(kind, mode):
    is_train, flags = flags_of(mode)
    d = draw_fused((0, 3, 2), seed=16)
    with mx.util.np_shape():
        a = run(d, kind, is_train, fill=5.0, fix_gamma=False, **flags)
    assert a.y.shape == a.x.grad.shape == (0, 3, 2)
    assert not a.gamma.grad.asnumpy().any()
    assert same_bits(a.moving_var, d.moving_var.astype("float32"))


@pytest.mark.mxnet_operators
def test_one_array_may_be_the_data_and_the_addend():
    d = draw_fused((6, 3, 20), seed=17)
    d.addend = d.x
    want = run(d, "add_relu", True, fix_gamma=False)
    a = arrays(d)
    with mx.autograd.record():
        y = call(d, a, fix_gamma=False, act_type="relu", addend=a.x)
    y.backward(a.dy)
    np.testing.assert_array_equal(y.asnumpy(), want.y.asnumpy())
    np.testing.assert_array_equal(a.x.grad.asnumpy(), (want.x.grad + want.addend.grad).asnumpy())


@KIND
def test_output_mean_var_and_backward_again(kind):
    act_type, with_addend = KINDS[kind]
    d = draw_fused((6, 3, 4), seed=18)
    a = arrays(d)
    a.addend = nd(d.addend)
    a.addend.attach_grad()
    with mx.autograd.record():
        a.y, mean, inv_std = call(
            d, a, fix_gamma=False, output_mean_var=True, act_type=act_type,
            addend=a.addend if with_addend else None,
        )  # fmt: skip
    w = right(d, True, fix_gamma=False)
    check(mean, w.mean)
    check(inv_std, w.inv_std)
    for train_mode in (True, False):
        a.y.backward(a.dy, retain_graph=True, train_mode=train_mode)
        mx.nd.waitall()
        check_fused(d, kind, a, True, fix_gamma=False)


@pytest.mark.parametrize("act_type", [None, "", "None"])
def test_no_act_type(act_type):
    d = draw((6, 3), seed=19)
    a = arrays(d)
    with mx.autograd.train_mode():
        check(call(d, a, act_type=act_type), right(d, True).output, OUTPUT_UNITS)


def test_numpy_mode():
    d = draw_fused((6, 3, 4), seed=20)
    inputs = [mx.np.array(getattr(d, n), dtype="float32") for n in (*GRADIENTS[:3],)]
    inputs += [mx.np.array(v, dtype="float32") for v in (d.moving_mean, d.moving_var)]
    addend = mx.np.array(d.addend, dtype="float32")
    y = mxbn.nd.BatchNorm(*inputs, fix_gamma=False, addend=addend, act_type="relu")
    assert isinstance(y, mx.np.ndarray)
    check(y, np.maximum(right(d, False, fix_gamma=False).output + d.addend, 0), OUTPUT_UNITS)


# ------------------------------------------------------------------------------------- errors


REFUSED = {
    "shape": ({"addend": mx.nd.ones((4, 2))}, "addend has shape (4, 2), expected (4, 3) like data"),
    "rank": ({"addend": mx.nd.ones(3)}, "addend has shape (3,), expected (4, 3) like data"),
    "dtype": (
        {"addend": mx.nd.ones((4, 3), dtype="float64")},
        "addend has dtype float64, expected float32 like data",
    ),
    "kind": ({"addend": np.ones((4, 3))}, "addend is a ndarray, expected an mx.nd.NDArray or"),
    "numpy": (
        {"addend": mx.np.ones((4, 3))}, "addend is an ndarray, expected an NDArray like data",
    ),
    "unknown": ({"addend": mx.nd.array(np.ones((0, 3)))}, "addend has shape (0, 3), expected a"),
    "sparse": (
        {"addend": mx.nd.sparse.zeros("csr", (4, 3))},
        "addend has storage type csr, expected default",
    ),
    "missing": ({"with_addend": True}, "with_addend is True, but addend is missing"),
    "denied": (
        {"addend": mx.nd.ones((4, 3)), "with_addend": False},
        "with_addend is False, expected True: an addend is given",
    ),
    "with_addend": ({"with_addend": "maybe"}, "with_addend is 'maybe', expected True or False"),
    "act_type": ({"act_type": "tanh"}, "act_type is 'tanh', expected relu or None"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(given, message):
    d = draw((4, 3))
    a = arrays(d)
    with pytest.raises(ValueError, match=f"mxbn: BatchNorm: {re.escape(message)}"):
        call(d, a, **given)
    call(d, a).wait_to_read()


def test_symbols_that_do_not_fit_are_refused():
    data, addend = mx.sym.var("data"), mx.sym.var("addend")
    symbol = mxbn.sym.BatchNorm(data, name="bn", addend=addend)
    with pytest.raises(
        mx.base.MXNetError, match=r"addend has shape \(4, 3, 1\), expected \(4, 3\)"
    ):
        symbol.infer_shape(data=(4, 3), addend=(4, 3, 1))
    with pytest.raises(mx.base.MXNetError, match="addend has dtype float16, expected float32"):
        symbol.infer_type(data="float32", addend="float16")
    with pytest.raises(ValueError, match="addend has 2 outputs, expected a Symbol with one"):
        mxbn.sym.BatchNorm(data, addend=mx.sym.Group([data, addend]))
    text = symbol.tojson()
    for wrong in ('"with_addend": "False"', '"act_type": "relu"'):
        damaged = mx.sym.load_json(text.replace('"with_addend": "True"', wrong))
        with pytest.raises(mx.base.MXNetError, match="got 6 inputs, expected 5"):
            damaged.infer_shape(data=(4, 3))


@pytest.mark.mxnet_operators
def test_a_head_gradient_that_does_not_fit_is_refused():
    d = draw_fused((4, 3))
    a = arrays(d)
    with mx.autograd.record():
        y = call(d, a, act_type="relu", addend=a.dy)
    with pytest.raises(mx.base.MXNetError, match="the head gradient has storage type row_sparse"):
        y.backward(a.dy.tostype("row_sparse"))


# ------------------------------------------------------------------------ Symbol, Executor, Module


@KIND
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_symbol_and_executor(kind, dtype):
    act_type, with_addend = KINDS[kind]
    symbol = mxbn.sym.BatchNorm(
        mx.sym.var("data"), name="bn", act_type=act_type, with_addend=with_addend, fix_gamma=False
    )
    names = ["data", "bn_gamma", "bn_beta", *(["bn_addend"] if with_addend else [])]
    assert symbol.list_arguments() == names
    assert symbol.list_auxiliary_states() == ["bn_moving_mean", "bn_moving_var"]
    symbol = mx.sym.load_json(symbol.tojson())
    d = draw_fused((4, 3, 18), dtype=dtype, seed=21)
    a = arrays(d)
    a.addend = nd(d.addend, dtype)
    a.addend.attach_grad()
    keys = [name.replace("bn_", "").replace("data", "x") for name in names]
    executor = symbol.bind(
        CONTEXT,
        [getattr(a, key) for key in keys],
        [getattr(a, key).grad for key in keys],
        "write",
        [a.moving_mean, a.moving_var],
    )
    (a.y,) = executor.forward(is_train=True)
    executor.backward(a.dy)
    mx.nd.waitall()
    check_fused(d, kind, a, True, fix_gamma=False)


def test_shapes_and_types_are_inferred_from_the_addend():
    symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", addend=mx.sym.var("other"))
    shapes, outputs, _ = symbol.infer_shape(other=(4, 3, 2))
    assert (shapes[0], shapes[1], outputs[0]) == ((4, 3, 2), (3,), (4, 3, 2))
    assert symbol.infer_shape(data=(4, 3, 2))[0][3] == (4, 3, 2)
    assert symbol.infer_shape(data=(4, 0, 2), other=(0, 3, 2))[1] == [(4, 3, 2)]
    types, outputs, _ = symbol.infer_type(other="float64")
    assert (types[0], types[1], outputs[0]) == (np.float64,) * 3


def test_a_plain_symbol_is_what_it_was():
    text = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", act_type=None).tojson()
    assert "act_type" not in text
    assert "addend" not in text


@pytest.mark.mxnet_operators
def test_module():
    rs = np.random.RandomState(0)
    x, label = rs.randn(200, 10), rs.randint(0, 3, 200)
    x[np.arange(200), label] += 3
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc0")
    other = mx.sym.FullyConnected(net, num_hidden=16, name="fc1")
    net = mxbn.sym.BatchNorm(other, name="bn", addend=net, act_type="relu", fix_gamma=False)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    data = mx.io.NDArrayIter(x, label, batch_size=20)
    module = mxbn.Module(net, context=CONTEXT)
    module.fit(data, num_epoch=5, optimizer="adam", optimizer_params={"learning_rate": 0.01})
    assert dict(module.score(data, "acc"))["accuracy"] > 0.9
    assert module.get_params()[1]["bn_moving_var"].asnumpy().std() > 0


# ------------------------------------------------------------------------------------------- Gluon

LAYERS = {"relu": mxbn.gluon.BatchNormReLU, "add_relu": mxbn.gluon.BatchNormAddReLU}
LAYER = pytest.mark.parametrize("kind", LAYERS)


def layer_of(d, kind, **options):
    layer = LAYERS[kind](axis=d.axis, epsilon=1e-3, in_channels=len(d.gamma), **options)
    layer.cast(d.dtype)
    layer.initialize()
    for key in ("gamma", "beta", "running_mean", "running_var"):
        getattr(layer, key).set_data(nd(getattr(d, key.replace("running", "moving")), d.param))
    return layer


@HYBRID
@LAYER
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_layers(hybridize, kind, dtype):
    d = draw_fused((4, 9, 3), -1, dtype, seed=22)
    layer = layer_of(d, kind)
    if hybridize is not None:
        layer.hybridize(**hybridize)
    for is_train in (True, False, True):
        d.moving_mean, d.moving_var = (
            p.data().asnumpy().astype("float64") for p in (layer.running_mean, layer.running_var)
        )
        a = arrays(d)
        a.addend = nd(d.addend, dtype)
        a.addend.attach_grad()
        with mx.autograd.record(train_mode=is_train):
            a.y = layer(a.x, a.addend) if kind == "add_relu" else layer(a.x)
        a.y.backward(a.dy)
        mx.nd.waitall()
        a.gamma, a.beta = layer.gamma.data(), layer.beta.data()
        a.moving_mean, a.moving_var = layer.running_mean.data(), layer.running_var.data()
        check_fused(d, kind, a, is_train, fix_gamma=False)


@LAYER
@pytest.mark.mxnet_operators
def test_layers_learn_their_shape_and_are_exported_and_imported(kind, tmp_path):
    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.layer = LAYERS[kind]()

        def hybrid_forward(self, F, x):
            return self.layer(x, x) if kind == "add_relu" else self.layer(x)

    net = Net()
    net.initialize()
    net.hybridize()
    x = nd(np.random.RandomState(0).randn(4, 3, 5))
    with mx.autograd.record():
        net(x)
    assert net.layer.gamma.shape == (3,)
    want = net(x)
    net.export(str(tmp_path / "net"))
    imported = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    assert same_bits(imported(x), want)


@pytest.mark.mxnet_operators
def test_the_layer_takes_the_place_of_the_built_in_one():
    builtin = mx.gluon.nn.BatchNormReLU(in_channels=3, prefix="bn_")
    with mxbn.replace_builtin():
        ours = mx.gluon.nn.BatchNormReLU(in_channels=3, prefix="bn_")
    assert type(ours) is mxbn.gluon.BatchNormReLU
    assert repr(ours) == repr(builtin)
    assert list(ours.collect_params()) == list(builtin.collect_params())
    for layer in (builtin, ours):
        layer.initialize()
        layer.beta.set_data(mx.nd.array([-1, 0, 1]))
    x = nd(np.random.RandomState(0).randn(4, 3, 5, 5))
    want = builtin(x).asnumpy()
    check(ours(x), want.astype("float64"), 4)
    assert mxbn.gluon.BatchNormReLU().prefix.startswith("batchnormrelu")


@LAYER
def test_flags_of_a_hybridized_layer_act_at_once(kind):
    d = draw_fused((6, 3, 4), seed=23)
    layer = layer_of(d, kind)
    layer.hybridize()
    inputs = [nd(d.x), nd(d.addend)][: 1 + (kind == "add_relu")]
    layer(*inputs)
    layer.use_batch_stats = True
    z = right(d, False, fix_gamma=False, use_batch_stats=True).output
    check(layer(*inputs), np.maximum(z + (d.addend if kind == "add_relu" else 0), 0), 4)


@pytest.mark.mxnet_operators
def test_two_recordings_of_one_layer():
    d = draw_fused((6, 3, 4), seed=24)
    layer = layer_of(d, "add_relu")
    layer.hybridize()
    a = arrays(d)
    with mx.autograd.record():
        first, second = layer(a.x, a.x).sum(), layer(a.x, a.x).sum()
    first.backward()
    second.backward()


def test_an_addend_of_another_size_is_refused_when_the_operator_runs():
    layer = mxbn.gluon.BatchNormAddReLU(in_channels=3)
    layer.initialize(ctx=CONTEXT)
    layer.hybridize()
    with mx.util.np_shape():
        addend = mx.nd.zeros((0, 3), ctx=CONTEXT)
    with pytest.raises(mx.base.MXNetError, match=r"addend has shape \(0, 3\), expected \(2, 3\)"):
        layer(mx.nd.ones((2, 3), ctx=CONTEXT), addend).asnumpy()
