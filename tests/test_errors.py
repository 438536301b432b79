"""Bad input: a clear error, nothing changed, and a process that goes on."""

import json
import re

import mxnet as mx
import numpy as np
import pytest
from helpers import CONTEXT, HYBRIDIZE, OTHER_CONTEXT, numpy_of, run_script, same_bits

import mxbn

MXNetError = mx.base.MXNetError
SHAPE = (8, 4, 7, 7)
PARAMETERS = ("gamma", "beta", "moving_mean", "moving_var")
INPUTS = ("data", *PARAMETERS)
FLAGS = (
    "fix_gamma", "use_global_stats", "use_batch_stats", "step_global_stats", "output_mean_var",
    "cudnn_off",
)  # fmt: skip


def ones(shape, dtype="float32", **more):
    return mx.nd.ones(shape, dtype=dtype, **more)


def empty(*shape):
    """Make an array with a 0 in its shape, which MXNet takes for unknown outside NumPy mode."""
    return mx.nd.array(np.zeros(shape))


def inputs(**changed):
    rs = np.random.RandomState(0)
    given = {"data": mx.nd.array(rs.randn(*SHAPE))}
    given.update({name: mx.nd.array(rs.uniform(1, 2, SHAPE[1])) for name in PARAMETERS})
    for name in ("data", "gamma", "beta"):
        given[name].attach_grad()
    return {**given, **changed}


def refuses(kind, message, call, *arguments, **keywords):
    """Check that the call raises kind with the text 'mxbn: BatchNorm: message'.

    A message that ends in ... is the beginning of one.
    """
    expected = "mxbn: BatchNorm: " + message

    def call_and_wait():
        call(*arguments, **keywords)
        mx.nd.waitall()

    with pytest.raises(kind) as caught:
        call_and_wait()
    got = str(caught.value).strip()
    if kind is not ValueError:  # MXNet puts words before the message
        got = got[max(0, got.find("mxbn: ")) :]
    if expected.endswith("..."):
        got, expected = got[: len(expected) - 3], expected[:-3]
    assert got == expected


def check_nd(message, attributes=None, **changed):
    """Check that mxbn.nd.BatchNorm refuses it in both modes, writes nothing, and works again."""
    given, attributes = inputs(**changed), attributes or {}
    arrays = [a for a in given.values() if isinstance(a, mx.nd.NDArray) and 0 not in a.shape]
    arrays = [a for a in arrays if a.shape != ()]
    arrays += [a.grad for a in arrays if a.stype == "default" and a.grad is not None]
    before = [numpy_of(a).copy() for a in arrays]
    for train in (True, False):
        with mx.autograd.record(train_mode=train):
            refuses(ValueError, message, mxbn.nd.BatchNorm, **given, **attributes)
    assert all(same_bits(a, b) for a, b in zip(arrays, before))
    works()


def works():
    """Check that a right call still gives the right values."""
    given = inputs()
    with mx.autograd.record():
        output = mxbn.nd.BatchNorm(**given)
    output.backward()
    right = mxbn.reference.forward(*(numpy_of(a) for a in inputs().values()), is_train=True)
    np.testing.assert_allclose(numpy_of(output), right.output, atol=1e-5)
    np.testing.assert_allclose(numpy_of(given["moving_var"]), right.moving_var, rtol=1e-6)


# ---------------------------------------------------------------------------------------- NDArrays


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), (1, 4, 1, 1)], ids=str)
def test_nd_shape(name, shape):
    check_nd(
        f"{name} has shape {shape}, expected (4,): data {SHAPE} has 4 channels on axis 1",
        **{name: ones(shape)},
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_nd_shape_of_parameter_0(name):
    check_nd(f"{name} has shape (0,), expected ...", **{name: empty(0)})
    with mx.util.np_shape(True):
        check_nd(f"{name} has shape (0,), expected ...", **{name: empty(0)})


@pytest.mark.parametrize("name", PARAMETERS)
def test_nd_shape_of_parameter_without_dimensions(name):
    single = mx.np.array(1.0).as_nd_ndarray()
    assert single.shape == ()
    with mx.util.np_shape(True):
        check_nd(f"{name} has shape (), expected ...", **{name: single})
    check_nd(f"{name} has shape (), expected ...", **{name: single})


@pytest.mark.parametrize("shape", [(8, 0), (0,), (8, 0, 7, 7)], ids=str)
@pytest.mark.parametrize("numpy_shape", [True, False], ids=["np_shape", "no_np_shape"])
def test_nd_no_channels(shape, numpy_shape):
    axis = min(1, len(shape) - 1)
    with mx.util.np_shape(numpy_shape):
        check_nd(f"data has shape {shape}, expected ...", {"axis": axis}, data=empty(*shape))


def test_nd_no_channels_in_all_arrays():
    with mx.util.np_shape(True):
        check_nd(
            "data has shape (8, 0), expected ...",
            **{name: empty(*((8, 0) if name == "data" else (0,))) for name in INPUTS},
        )


@pytest.mark.parametrize("numpy_shape", [True, False], ids=["np_shape", "no_np_shape"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_nd_data_without_dimensions(axis, numpy_shape):
    with mx.util.np_shape(numpy_shape):
        check_nd(
            "data has shape (), expected ...",
            {"axis": axis},
            data=mx.np.array(1.0).as_nd_ndarray(),
        )


def test_nd_empty_batch_outside_numpy_shape():
    """MXNet takes the 0 for an unknown size, and knows empty arrays in np_shape only."""
    check_nd("data has shape (0, 4), expected ...", data=empty(0, 4))
    with mx.util.np_shape(True):
        assert mxbn.nd.BatchNorm(**inputs(data=empty(0, 4))).shape == (0, 4)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8"])
def test_nd_dtype_of_parameter(name, dtype):
    check_nd(
        f"{name} has dtype {dtype}, expected float32: data has dtype float32",
        **{name: ones(4, dtype)},
    )


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_nd_dtype_of_data(dtype):
    name = "gamma"
    if dtype == "float64":
        check_nd(
            f"{name} has dtype float32, expected float64: data has dtype float64",
            data=ones(SHAPE, dtype),
        )
    else:
        check_nd(
            f"{name} has dtype float16, expected float32: data has dtype float16",
            data=ones(SHAPE, dtype),
            gamma=ones(4, dtype),
        )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_nd_dtype_of_data_without_fractions(dtype):
    check_nd(
        f"data has dtype {dtype}, expected float16, float32 or float64", data=ones(SHAPE, dtype)
    )


@pytest.mark.parametrize("axis", [4, -5, 1000, -1000])
def test_nd_axis_out_of_range(axis):
    check_nd(f"axis is {axis}, expected -4 to 3: data {SHAPE} has 4 dimensions", {"axis": axis})


ATTRIBUTES = [
    *(
        ("axis", value, "the number of a dimension of data")
        for value in (1.0, 1.5, None, True, "x", "", (1,), 2**31, 2**64 + 1, -(2**40), 10**30)
    ),
    *(
        ("eps", value, "a finite number >= 0")
        for value in (-1e-9, -1, float("nan"), float("inf"), float("-inf"), None, True, "x", "")
    ),
    *(
        ("momentum", value, "a number from 0 to 1")
        for value in (-1e-9, 1.0001, float("nan"), float("inf"), None, True, "x", "")
    ),
    *(
        (flag, value, "True or False")
        for flag in FLAGS
        for value in ("maybe", 2, -1, 1.0, None, "")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "expected"), ATTRIBUTES, ids=[f"{n}={v!r}" for n, v, _ in ATTRIBUTES]
)
def test_attribute(name, value, expected):
    message = f"{name} is '{value}', expected {expected}"
    check_nd(message, {name: value})
    refuses(ValueError, message, mxbn.sym.BatchNorm, mx.sym.var("data"), **{name: value})


def test_unknown_attribute():
    message = "unknown attribute 'epsilon', expected act_type, axis, cudnn_off, eps, ..."
    check_nd(message, {"epsilon": 1e-5})
    refuses(ValueError, message, mxbn.sym.BatchNorm, mx.sym.var("data"), epsilon=1e-5)


def test_both_statistics():
    message = "use_global_stats and use_batch_stats are both True, expected at most one..."
    both = {"use_global_stats": True, "use_batch_stats": True}
    check_nd(message, both)
    refuses(ValueError, message, mxbn.sym.BatchNorm, mx.sym.var("data"), **both)
    refuses(ValueError, message, mxbn.gluon.BatchNorm, **both)


@pytest.mark.parametrize("stype", ["csr", "row_sparse"])
@pytest.mark.mxnet_operators
def test_nd_sparse_data(stype):
    check_nd(
        f"data has storage type {stype}, expected default: sparse arrays are not supported",
        data=ones((8, 4)).tostype(stype),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_nd_sparse_parameter(name):
    sparse = mx.nd.sparse.zeros("row_sparse", (4,))
    check_nd(f"{name} has storage type row_sparse, expected default...", **{name: sparse})


@pytest.mark.parametrize("name", PARAMETERS)
def test_nd_mixed_contexts(name):
    check_nd(
        f"{name} is on {OTHER_CONTEXT}, expected {CONTEXT}, where data is",
        **{name: ones(4, ctx=OTHER_CONTEXT)},
    )


def test_nd_mixed_contexts_of_data():
    message = f"gamma is on {CONTEXT}, expected {OTHER_CONTEXT}, where data is"
    check_nd(message, data=ones(SHAPE, ctx=OTHER_CONTEXT))


def test_nd_other_context():
    given = {name: array.as_in_context(OTHER_CONTEXT) for name, array in inputs().items()}
    assert mxbn.nd.BatchNorm(**given).context == OTHER_CONTEXT


@pytest.mark.parametrize("name", PARAMETERS)
def test_nd_mixed_kinds(name):
    check_nd(
        f"{name} is an ndarray, expected an NDArray like data: the two kinds do not mix",
        **{name: mx.np.ones(4)},
    )


def test_nd_mixed_kinds_of_data():
    check_nd("gamma is an NDArray, expected an ndarray like data...", data=mx.np.ones(SHAPE))


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "value",
    [np.ones(4), [1.0] * 4, None, 1.0, "x", mx.sym.var("x")],
    ids=lambda v: type(v).__name__,
)
def test_nd_no_array(name, value):
    check_nd(f"{name} is a {type(value).__name__}, expected an mx.nd.NDArray...", **{name: value})


@pytest.mark.parametrize(
    ("out", "attributes", "came"),
    [
        (lambda: ones((2, 2)), {}, "(2, 2)"),
        (lambda: ones((8, 4, 7)), {}, "(8, 4, 7)"),
        (lambda: ones(SHAPE, "float16"), {}, "float16"),
        (lambda: [ones(SHAPE), ones(5), ones(4)], {"output_mean_var": True}, "(5,)"),
        (lambda: [ones(SHAPE), ones(4)], {"output_mean_var": True}, "2"),
        (lambda: [ones(SHAPE), ones(4), ones(4)], {}, "3"),
        (lambda: np.ones(SHAPE), {}, "ndarray"),
        (lambda: [1], {}, "int"),
    ],
    ids=["shape", "rank", "dtype", "shape_of_mean", "too_few", "too_many", "numpy", "number"],
)
def test_nd_out(out, attributes, came):
    given, out = inputs(), out()
    before = {name: numpy_of(array).copy() for name, array in given.items()}
    with mx.autograd.train_mode(), pytest.raises(
        ValueError, match=r"^mxbn: BatchNorm: out"
    ) as error:
        mxbn.nd.BatchNorm(**given, **attributes, out=out)
    assert came in str(error.value)
    assert "expected" in str(error.value)
    assert all(same_bits(given[name], before[name]) for name in given)
    works()


@pytest.mark.parametrize("bulk", [0, 15], ids=["no_bulk", "bulk"])
@pytest.mark.mxnet_operators
def test_error_inside_record_leaves_the_tape(bulk):
    """A refused call between two right ones does not harm their gradients."""
    given = inputs()
    with mx.engine.bulk(bulk), mx.autograd.record():
        first = given["data"] * 2
        with pytest.raises(ValueError, match="gamma has shape"):
            mxbn.nd.BatchNorm(**{**given, "data": first, "gamma": ones(3)})
        loss = mxbn.nd.BatchNorm(**{**given, "data": first}, fix_gamma=False).sum()
    loss.backward()
    assert same_bits(given["beta"].grad, np.full(4, 8 * 7 * 7, "float32"))


HEADS = {
    "shape": ("ones(1)", "(1,)", "(8, 64, 50, 50)"),
    "float16": ("ones((8, 64, 50, 50), dtype='float16')", "float16", "float32"),
    "float64": ("ones((8, 64, 50, 50), dtype='float64')", "float64", "float32"),
}


@pytest.mark.parametrize(
    ("way", "head"), [*(("nd", head) for head in HEADS), ("graph", "shape"), ("graph", "float16")]
)
def test_head_gradient(way, head):
    """Outside executors, MXNet hands it to the operator unchecked."""
    code, came, expected = HEADS[head]
    result = run_script(
        f"""
        import mxnet as mx, mxbn
        ones = mx.nd.ones
        x, others = ones((8, 64, 50, 50)), [ones(64) for _ in range(4)]
        x.attach_grad()
        symbol = mxbn.sym.BatchNorm(mx.sym.var("x"), name="bn")
        for attempt in range(2):
            try:
                call = mxbn.nd.BatchNorm if "{way}" == "nd" else mx.nd.CachedOp(symbol)
                with mx.autograd.record():
                    output = call(x, *others)
                output.backward({code})
                mx.nd.waitall()
            except mx.base.MXNetError as error:
                print(error)
        print("alive")
        """
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "alive" in result.stdout
    assert result.stdout.count("mxbn: BatchNorm: the head gradient ") == 2, result.stdout
    assert came in result.stdout
    assert f"expected {expected}" in result.stdout


# ----------------------------------------------------------------------------------------- Symbols


def check_bound(symbol, message, shape=SHAPE, dtype="float32"):
    """Check that shape or type inference and binding refuse it."""

    def infer():
        symbol.infer_type(data=dtype)
        symbol.infer_shape(data=shape)

    with pytest.raises(MXNetError) as error:
        infer()
    assert f"Error in operator bn: mxbn: BatchNorm: {message}" in str(error.value)
    for requests in ("null", "write"):
        with pytest.raises(RuntimeError) as error:  # MXNet's simple_bind makes it one
            symbol.simple_bind(CONTEXT, grad_req=requests, data=shape, type_dict={"data": dtype})
        assert f"mxbn: BatchNorm: {message}" in str(error.value)
    works()


def symbol_with(**changed):
    given = {"data": mx.sym.var("data")}
    attributes = {key: value for key, value in changed.items() if key not in INPUTS}
    for name in INPUTS:
        if name in changed:
            given[name] = mx.sym.var(name, **changed[name])
    return mxbn.sym.BatchNorm(**given, name="bn", **attributes)


@pytest.mark.parametrize("name", PARAMETERS)
def test_symbol_shape(name):
    check_bound(
        symbol_with(**{name: {"shape": (3,)}}),
        f"{name} has shape (3,), expected (4,): data {SHAPE} has 4 channels on axis 1",
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_symbol_dtype(name):
    check_bound(
        symbol_with(**{name: {"dtype": "float16"}}),
        f"{name} has dtype float16, expected float32: data has dtype float32",
    )


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_symbol_dtype_of_data(dtype):
    message = f"data has dtype {dtype}, expected float16, float32 or float64"
    check_bound(symbol_with(), message, dtype=dtype)


@pytest.mark.parametrize("axis", [4, -5])
def test_symbol_axis(axis):
    message = f"axis is {axis}, expected -4 to 3: data {SHAPE} has 4 dimensions"
    check_bound(symbol_with(axis=axis), message)


def test_symbol_without_channels_or_dimensions():
    with mx.util.np_shape(True):
        message = "data has shape (8, 0), expected at least one channel"
        check_bound(symbol_with(), message, shape=(8, 0))
        check_bound(symbol_with(), "data has shape (), expected at least one dimension", shape=())


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("stype", ["csr", "row_sparse"])
def test_symbol_sparse(name, stype):
    symbol = symbol_with(**{name: {"stype": stype}})
    with pytest.raises(RuntimeError) as error:
        symbol.simple_bind(CONTEXT, data=(8, 4))
    assert f"mxbn: BatchNorm: {name} has storage type {stype}, expected default" in str(error.value)
    works()


def test_symbol_of_unknown_shape():
    """MXNet says which arguments lack a shape."""
    symbol = symbol_with()
    for known in ({}, {"data": (0, 0)}, {"data": (0, 4, 0, 0)}):
        with pytest.warns(UserWarning, match="Cannot decide shape"):
            assert symbol.infer_shape(**known) == (None, None, None)
    arguments, outputs, _ = symbol.infer_shape_partial(data=(0, 4, 0, 0))
    assert arguments[1:] == [(4,), (4,)]
    assert outputs == [(0, 4, 0, 0)]
    with pytest.raises(RuntimeError, match=r"cannot decide shapes for (.|\n)*data: None"):
        symbol.simple_bind(CONTEXT)
    works()


def bind(**changed):
    given = {**inputs(), **changed}
    arguments = {name: given[name] for name in INPUTS[:3]}
    states = {name: given[name] for name in INPUTS[3:]}
    names = {name: {} for name in INPUTS}
    return symbol_with(**names).bind(CONTEXT, arguments, aux_states=states), given


@pytest.mark.parametrize("name", PARAMETERS)
def test_bind_shape(name):
    message = f"{name} has shape (3,), expected (4,): data {SHAPE} has 4 channels on axis 1"
    refuses(MXNetError, message, bind, **{name: ones(3)})
    works()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "predict"])
def test_bind_shape_0(name, train):
    """MXNet takes (0,) for unknown, so the error comes when the operator runs."""
    executor, given = bind(**{name: empty(0)})
    before = {each: numpy_of(given[each]).copy() for each in INPUTS if each != name}
    message = f"{name} has shape (0,), expected (4,): data {SHAPE} has 4 channels on axis 1"
    refuses(MXNetError, message, lambda: executor.forward(is_train=train)[0].asnumpy())
    assert all(same_bits(given[each], value) for each, value in before.items())
    works()


@pytest.mark.parametrize("name", PARAMETERS)
def test_bind_dtype(name):
    message = f"{name} has dtype float64, expected float32: data has dtype float32"
    refuses(MXNetError, message, bind, **{name: ones(4, "float64")})
    works()


@pytest.mark.mxnet_operators
def test_bind_sparse():
    message = "data has storage type csr, expected default: sparse arrays are not supported"
    refuses(MXNetError, message, bind, data=ones((8, 4)).tostype("csr"))
    works()


def test_bind_other_context():
    """Refused by MXNet itself."""
    with pytest.raises(MXNetError, match=rf"Input array is in {OTHER_CONTEXT.device_type}\(1\)"):
        bind(gamma=ones(4, ctx=OTHER_CONTEXT))
    works()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "value", [np.ones(4), mx.nd.ones(4), [1.0] * 4, 1.0, "x"], ids=lambda v: type(v).__name__
)
def test_symbol_no_symbol(name, value):
    message = f"{name} is a {type(value).__name__}, expected an mx.sym.Symbol"
    given = {"data": mx.sym.var("data"), name: value}
    refuses(ValueError, message, mxbn.sym.BatchNorm, **given)


@pytest.mark.parametrize("name", INPUTS)
def test_symbol_of_several_outputs(name):
    group = mx.sym.Group([mx.sym.var("a"), mx.sym.var("b")])
    given = {"data": mx.sym.var("data"), name: group}
    with pytest.raises(ValueError, match=f"^mxbn: BatchNorm: {name} .*2.*expected"):
        mxbn.sym.BatchNorm(**given)


# ------------------------------------------------------------------------------------ symbol files


def test_json_without_the_package(tmp_path):
    path = str(tmp_path / "net.json")
    symbol_with().save(path)
    result = run_script(f"import mxnet as mx\nmx.sym.load({path!r})")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert re.search(
        "MXNetError.*Failed loading Op bn of type mxbn_BatchNorm.*Operator mxbn_BatchNorm is not "
        "registered",
        last,
    )
    assert run_script(f"import mxnet as mx, mxbn\nmx.sym.load({path!r})").returncode == 0


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"epsilon": "1"}, "unknown attribute 'epsilon', expected act_type, ..."),
        ({"eps": "-1"}, "eps is '-1', expected a finite number >= 0"),
        ({"axis": "one"}, "axis is 'one', expected the number of a dimension of data"),
        (
            {"use_global_stats": "True", "use_batch_stats": "1"},
            "use_global_stats and use_batch_stats are both True, ...",
        ),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_json_with_wrong_attributes(attributes, message):
    graph = json.loads(symbol_with().tojson())
    graph["nodes"][-1]["attrs"] = attributes
    refuses(MXNetError, message, mx.sym.load_json, json.dumps(graph))
    works()


@pytest.mark.parametrize("infer", ["infer_shape(data=(8, 4))", "infer_type(data='float32')"])
@pytest.mark.parametrize(
    "count", [1, 3, 4]
)  # with none, MXNet itself dies, as for its own operators
def test_json_with_missing_inputs(count, infer):
    """A damaged file must not make the operator read or write inputs that are not there."""
    graph = json.loads(symbol_with().tojson())
    graph["nodes"][-1]["inputs"] = graph["nodes"][-1]["inputs"][:count]
    graph["nodes"] = [*graph["nodes"][:count], graph["nodes"][-1]]
    graph["arg_nodes"] = list(range(count))
    graph["heads"] = [[count, 0, 0]]
    graph["node_row_ptr"] = [*range(count + 1), count + 4]
    result = run_script(
        f"""
        import mxnet as mx, mxbn
        try:
            mx.sym.load_json({json.dumps(graph)!r}).{infer}
        except mx.base.MXNetError as error:
            print(error)
        print("alive")
        """
    )
    assert result.returncode == 0, result.stderr
    assert "alive" in result.stdout
    assert re.search(r"mxbn: BatchNorm: .*expected", result.stdout)
    assert len(result.stdout) < 1000  # no shapes made of whatever lay in memory


# ------------------------------------------------------------------------------------------- Gluon


class Net(mx.gluon.HybridBlock):
    def __init__(self, **arguments):
        super().__init__()
        with self.name_scope():
            self.bn = mxbn.gluon.BatchNorm(**arguments)

    def hybrid_forward(self, F, x):
        return self.bn(x)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: ones((2, 4, 3)), "has shape (3,), expected (4,): data (2, 4, 3) has 4 channels"),
        (lambda: ones((2, 3), "int32"), "data has dtype int32, expected float16, float32 or"),
        (lambda: ones((2, 3), "float64"), "has dtype float32, expected float64: data has"),
        pytest.param(
            lambda: ones((2, 3)).tostype("csr"),
            "data has storage type csr, expected default",
            marks=pytest.mark.mxnet_operators,
        ),
        (lambda: ones(3), "axis is 1, expected -1 to 0: data (3,) has 1 dimensions"),
    ],
    ids=["shape", "integers", "dtype", "sparse", "axis"],
)
def test_gluon(hybridize, data, message):
    net = Net(in_channels=3)
    net.initialize()
    if HYBRIDIZE[hybridize] is not None:
        net.hybridize(**HYBRIDIZE[hybridize])
    kind = ValueError if hybridize == "imperative" else MXNetError
    before = {key: numpy_of(p.data()).copy() for key, p in net.collect_params().items()}
    with pytest.raises(kind) as error, mx.autograd.record():
        net(data())
    assert "mxbn: BatchNorm: " in str(error.value)
    assert message in str(error.value)
    for train in (True, False):
        # Whatever the operator, MXNet's hybridized blocks give the same error in words of
        # their own ("Graph attr dependency shape is required by ...") from the second time on.
        with pytest.raises(kind), mx.autograd.record(train_mode=train):
            net(data())
    assert all(same_bits(p.data(), before[key]) for key, p in net.collect_params().items())
    with mx.autograd.record():
        assert net(ones((2, 3))).shape == (2, 3)
    assert np.all(numpy_of(net.bn.running_mean.data()) != 0)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_gluon_deferred(hybridize):
    """Gluon's own error holds the operator's."""
    net = Net(axis=3)
    net.initialize()
    if HYBRIDIZE[hybridize] is not None:
        net.hybridize(**HYBRIDIZE[hybridize])
    with pytest.raises(ValueError, match="mxbn: BatchNorm: axis is 3, expected -2 to 1: data"):
        net(ones((8, 4)))
    assert net(ones((2, 3, 4, 5))).shape == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "x"}, "axis is 'x', expected the number of a dimension of data"),
        ({"momentum": -1}, "momentum is '-1', expected a number from 0 to 1"),
        ({"epsilon": float("nan")}, "eps is 'nan', expected a finite number >= 0"),
        ({"use_global_stats": "maybe"}, "use_global_stats is 'maybe', expected True or False"),
        ({"use_batch_stats": "maybe"}, "use_batch_stats is 'maybe', expected True or False"),
        ({"use_batch_stats": None}, "use_batch_stats is 'None', expected True or False"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_gluon_attribute(arguments, message):
    refuses(ValueError, message, mxbn.gluon.BatchNorm, **arguments)


@pytest.mark.parametrize("first", ["use_global_stats", "use_batch_stats"])
def test_gluon_both_statistics_later(first):
    second = {"use_global_stats": "use_batch_stats"}.get(first, "use_global_stats")
    layer = mxbn.gluon.BatchNorm(in_channels=3, **{first: True})
    message = "use_global_stats and use_batch_stats of layer ..."
    refuses(ValueError, message, setattr, layer, second, True)
    assert getattr(layer, first)
    assert not getattr(layer, second)
    layer.initialize()
    assert layer(ones((2, 3))).shape == (2, 3)


@pytest.mark.parametrize("flag", ["use_global_stats", "use_batch_stats"])
@pytest.mark.parametrize("value", ["maybe", 2, None], ids=repr)
def test_gluon_flag_set_to_no_boolean(flag, value):
    layer = mxbn.gluon.BatchNorm()
    with pytest.raises(ValueError, match=f"^mxbn: BatchNorm: {flag}.*expected True or False"):
        setattr(layer, flag, value)
    assert not getattr(layer, flag)


# ---------------------------------------------------------------------------- the operator's handle


@pytest.mark.parametrize("operator", ["mxbn_BatchNorm", "_backward_mxbn_BatchNorm"])
def test_raw_call_with_a_wrong_number_of_inputs(operator):
    """Below the wrappers, through MXNet's C API."""
    result = run_script(
        f"""
        import ctypes
        import mxnet as mx, mxbn
        from mxnet.ndarray.register import _imperative_invoke
        handle = mx.base.OpHandle()
        mx.base.check_call(
            mx.base._LIB.NNGetOpHandle(mx.base.c_str({operator!r}), ctypes.byref(handle))
        )
        arrays = [mx.nd.ones((8, 4))] + [mx.nd.ones(4)] * 5
        for count in (0, 1, 3, {4 if operator == "mxbn_BatchNorm" else 5}, 6):
            for record in (False, True):
                try:
                    with mx.autograd._RecordingStateScope(record, record):
                        _imperative_invoke(handle.value, arrays[:count], [], [], None, False, False)
                    mx.nd.waitall()
                except mx.base.MXNetError as error:
                    print("refused", str(error).splitlines()[-1][:200])
        print("alive")
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("refused") == 10, result.stdout
    assert result.stdout.strip().endswith("alive")
