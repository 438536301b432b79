"""The operator on NDArrays against mxbn.reference: modes, shapes, types, requests and guards."""

import mxnet as mx
import numpy as np
import pytest
from helpers import DTYPES, MODES, arrays, call, check, draw, nd, param_dtype, right, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODE = pytest.mark.parametrize("mode", MODES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)

# Units of rounding. One value passes some five roundings: of the mean's low part, of the scale, of
# the two products and of the sum. A gradient of data sums three such terms.
OUTPUT_UNITS = 3
GRADIENT_UNITS = 4
# Sums over channels and statistics are added up in double; what is stored narrower is rounded once.
# Float64 also shows the roundings of the sums around a pivot, some deviations off the mean.
SUM_UNITS = {"float16": 1.5, "float32": 1.5, "float64": 5}


def flags_of(mode):
    is_train, use_global_stats, use_batch_stats = MODES[mode]
    return is_train, {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}


def run(d, is_train, grad_req="write", fill=None, **attributes):
    """Forward and backward in one recording; fill is what the gradients hold before."""
    a = arrays(d, grad_req)
    if fill is not None:
        for array in (a.x, a.gamma, a.beta):
            array.grad[:] = fill
    with mx.autograd.record(train_mode=is_train):
        a.y = call(d, a, **attributes)
    a.y.backward(a.dy)
    mx.nd.waitall()
    return a


def sum_scale(d, values):
    """How large the numbers are that a sum per channel adds up."""
    others = tuple(i for i in range(d.x.ndim) if i != d.axis % d.x.ndim)
    return max(1e-30, float(np.abs(values).sum(others).max()))


def check_all(d, a, w, requests=None, fill=0.0):
    """Compare everything; requests and fill as the gradients were asked for."""
    requests = requests or dict.fromkeys(("x", "gamma", "beta"), "write")
    along = [-1 if i == d.axis % d.x.ndim else 1 for i in range(d.x.ndim)]
    inv_std = w.inv_std.reshape(along)
    scale = np.abs(inv_std * d.gamma.reshape(along)) + np.abs(inv_std)
    xh = (d.x - w.mean.reshape(along)) * inv_std
    sum_units = SUM_UNITS[d.dtype]
    # Float64 data is computed in float64 like the reference, and both round the mean and x - mean.
    # Narrower data is computed as if exactly, however far from zero.
    from_zero = np.abs(d.x) if d.dtype == "float64" else 0 * d.x
    y_scale = (np.abs(w.output) + np.abs(d.beta).reshape(along) + from_zero * scale).max()
    # dx is a difference of terms as large as these.
    dx_scale = np.abs(w.dx).max() + (np.abs(d.dy) * scale * (1 + from_zero * inv_std)).max()
    dgamma_scale = 1 + sum_scale(d, d.dy * (np.abs(xh) + from_zero * inv_std))
    var_scale = 1 + np.abs(w.moving_var).max() + (from_zero**2).max() * 1e-3
    check(a.y, w.output, OUTPUT_UNITS, y_scale, "output")
    means = (d.moving_mean, w.moving_mean, w.mean, from_zero)
    mean_scale = max(np.abs(v).max() for v in means)
    check(a.moving_mean, w.moving_mean, sum_units, mean_scale, "moving mean")
    check(a.moving_var, w.moving_var, sum_units, var_scale, "moving variance")
    for name, want, units, size in (
        ("x", w.dx, GRADIENT_UNITS, dx_scale),
        ("gamma", w.dgamma, sum_units, dgamma_scale),
        ("beta", w.dbeta, sum_units, 1 + sum_scale(d, d.dy)),
    ):
        if requests[name] == "null":
            continue
        added = fill if requests[name] == "add" else 0.0
        gradient = getattr(a, name).grad
        check(gradient, want + added, units, size + abs(added), f"gradient of {name}")


@DTYPE
@MODE
@pytest.mark.parametrize("fix_gamma", [False, True])
def test_every_mode_uses_steps_and_differentiates_what_the_table_says(dtype, mode, fix_gamma):
    d = draw((4, 3, 2, 5), dtype=dtype, seed=10)
    is_train, flags = flags_of(mode)
    options = {"fix_gamma": fix_gamma, "eps": 1e-2, "momentum": 0.75, **flags}
    a = run(d, is_train, **options)
    check_all(d, a, right(d, is_train, **options))
    assert same_bits(a.gamma, d.gamma.astype(d.param))


@DTYPE
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((8, 3, 70), 1), ((40, 5, 33), -1), ((500, 3), 1)])
def test_moving_statistics_that_are_used_and_step(dtype, is_train, shape, axis):
    d = draw(shape, axis, dtype, seed=13)
    options = {"fix_gamma": False, "use_global_stats": True, "step_global_stats": True}
    a = run(d, is_train, **options)
    want = right(d, is_train, **options)
    check_all(d, a, want)
    assert same_bits(a.moving_var, d.moving_var.astype(d.param)) is not is_train
    assert (want.inv_std == 1 / np.sqrt(d.moving_var + 1e-3)).all()  # of before the step


@MODE
@pytest.mark.parametrize("backward_train", [True, False])
def test_the_flag_of_backward_does_not_matter(mode, backward_train):
    d = draw((6, 3, 4), seed=11)
    is_train, flags = flags_of(mode)
    a = arrays(d)
    with mx.autograd.record(train_mode=is_train):
        a.y = call(d, a, fix_gamma=False, **flags)
    a.y.backward(a.dy, train_mode=backward_train)
    mx.nd.waitall()
    check_all(d, a, right(d, is_train, fix_gamma=False, **flags))


@MODE
def test_backward_is_of_the_forward_that_ran_whatever_happened_to_the_statistics_since(mode):
    d = draw((6, 3, 4), seed=12)
    is_train, flags = flags_of(mode)
    a = arrays(d)
    with mx.autograd.record(train_mode=is_train):
        a.y = call(d, a, fix_gamma=False, **flags)
    mx.nd.waitall()
    kept = a.moving_mean.copy(), a.moving_var.copy()
    a.moving_mean[:], a.moving_var[:] = 100, 1e-4
    for _ in range(3):  # any number of times, without side effects
        a.y.backward(a.dy, retain_graph=True)
    mx.nd.waitall()
    assert (a.moving_mean.asnumpy() == 100).all()
    a.moving_mean, a.moving_var = kept
    check_all(d, a, right(d, is_train, fix_gamma=False, **flags))


@st.composite
def cases(draw_value):
    rank = draw_value(st.integers(1, 5))
    shape = draw_value(st.lists(st.integers(1, 7), min_size=rank, max_size=rank))
    requests = st.sampled_from(["write", "add", "null"])
    return {
        "shape": shape,
        "axis": draw_value(st.integers(-rank, rank - 1)),
        "dtype": draw_value(st.sampled_from(DTYPES)),
        "mode": draw_value(st.sampled_from(sorted(MODES))),
        "requests": {key: draw_value(requests) for key in ("x", "gamma", "beta")},
        "fix_gamma": draw_value(st.booleans()),
        "step_global_stats": draw_value(st.booleans()),
        "eps": draw_value(st.sampled_from([1e-5, 1e-3, 0.1])),
        "momentum": draw_value(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        "mean": draw_value(st.sampled_from([0.0, 1.0, -100.0])),
        "std": draw_value(st.sampled_from([0.25, 2.0, 50.0])),
        "seed": draw_value(st.integers(0, 1000)),
    }


# Derandomized: the same cases on every run.
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases())
def test_random_cases_agree_with_the_reference(case):
    shape, dtype, requests = case["shape"], case["dtype"], case["requests"]
    d = draw(shape, case["axis"], dtype, case["seed"], case["mean"], case["std"])
    is_train, flags = flags_of(case["mode"])
    own = ("fix_gamma", "eps", "momentum", "step_global_stats")
    options = {**{key: case[key] for key in own}, **flags}
    if all(request == "null" for request in requests.values()):
        requests = {**requests, "beta": "write"}  # MXNet refuses a backward that nobody wants
    a = run(d, is_train, requests, fill=2.0, **options)
    check_all(d, a, right(d, is_train, **options), requests, fill=2.0)
    for key, request in requests.items():
        if request == "null":
            assert getattr(a, key).grad is None or (getattr(a, key).grad.asnumpy() == 2).all()


# The sizes at which vectors, pieces, tiles and blocks of the kernels end, on every side of them.
CHANNELS = (1, 3, 31, 33, 65, 96, 257)
SPATIAL = (1, 7, 15, 16, 17, 1023, 1025)


@DTYPE
@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("spatial", SPATIAL)
def test_sizes_around_the_ends_of_vectors(dtype, mode, layout, channels, spatial):
    shape, axis = (
        ((2, channels, spatial), 1) if layout == "channels_first" else ((2, spatial, channels), 2)
    )
    d = draw(shape, axis, dtype, seed=channels + spatial)
    is_train, flags = flags_of(mode)
    a = run(d, is_train, fix_gamma=False, **flags)
    check_all(d, a, right(d, is_train, fix_gamma=False, **flags))


@DTYPE
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 1, 300000), 1),  # one long row: pieces within a row
        ((3, 2, 100001), 1),  # few channels with much data
        ((70000, 3), 1),  # a narrow period, repeated, with a shorter last row
        ((70001, 5), -1),
        ((301, 1030), 1),  # more columns than a tile holds
        ((40, 130, 9), 1),  # short rows of several values
        ((200000,), 0),  # one value per channel
        ((1, 70000), 0),  # one channel in front
        ((130, 513, 3), 0),
    ],
)
def test_large_tensors_of_every_form(dtype, shape, axis):
    d = draw(shape, axis, dtype, seed=13)
    a = run(d, True, fix_gamma=False)
    check_all(d, a, right(d, True, fix_gamma=False))


@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e5])
@pytest.mark.parametrize(
    ("shape", "axis"), [((32, 3, 14, 14), 1), ((32, 14, 14, 3), 3), ((4, 40, 5), 1), ((256, 33), 1)]
)
def test_float32_is_exact_to_rounding_also_far_from_zero(mode, ratio, shape, axis):
    d = draw(shape, axis, seed=14, mean=ratio, std=1.0)
    d.moving_mean = np.float32(d.moving_mean + ratio).astype("float64")
    is_train, flags = flags_of(mode)
    a = run(d, is_train, fix_gamma=False, eps=1e-5, **flags)
    w = right(d, is_train, fix_gamma=False, eps=1e-5, **flags)
    check_all(d, a, w)


@pytest.mark.parametrize("outlier", [1e4, -1e6])
def test_the_first_value_of_a_channel_may_be_an_outlier(outlier):
    d = draw((64, 2, 30), seed=15)
    d.x[0, :, 0] = outlier
    a = run(d, True, fix_gamma=False)
    check_all(d, a, right(d, True, fix_gamma=False))


@DTYPE
def test_values_as_large_as_the_type_holds(dtype):
    largest = {"float16": 65504.0, "float32": 1e38, "float64": 1e150}[dtype]
    d = draw((8, 2), dtype=dtype, seed=16)
    d.x = np.sign(d.x) * largest
    a = run(d, True, fix_gamma=False)
    w = right(d, True, fix_gamma=False)
    check(a.y, w.output, OUTPUT_UNITS, what="output")
    assert np.isfinite(a.x.grad.asnumpy()).all()


@DTYPE
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1), (5,)])
def test_one_value_per_channel_gives_beta(dtype, shape):
    axis = 0 if len(shape) == 1 else 1
    d = draw(shape, axis, dtype, seed=17)
    a = run(d, True, fix_gamma=False)
    assert (a.x.grad.asnumpy() == 0).all()
    assert (a.gamma.grad.asnumpy() == 0).all()
    check_all(d, a, right(d, True, fix_gamma=False))


@DTYPE
def test_zero_eps_on_a_channel_without_spread_gives_beta_and_zero_gradients(dtype):
    d = draw((4, 2, 3), dtype=dtype, seed=18)
    d.x[:, 0] = 3.5
    a = run(d, True, fix_gamma=False, eps=0)
    assert (a.y.asnumpy()[:, 0] == d.beta[0].astype(dtype)).all()
    assert (a.x.grad.asnumpy()[:, 0] == 0).all()
    assert a.gamma.grad.asnumpy()[0] == 0
    check_all(d, a, right(d, True, fix_gamma=False, eps=0))


@MODE
def test_an_empty_batch_changes_nothing(mode):
    is_train, flags = flags_of(mode)
    d = draw((0, 3, 2), seed=19)
    with mx.util.np_shape():  # elsewhere a dimension of 0 means an unknown one
        a = run(d, is_train, fill=5.0, fix_gamma=False, **flags)
        assert a.y.shape == (0, 3, 2)
        assert a.x.grad.shape == (0, 3, 2)
        assert (a.gamma.grad.asnumpy() == 0).all()
        assert (a.beta.grad.asnumpy() == 0).all()
        assert same_bits(a.moving_mean, d.moving_mean.astype("float32"))
        assert same_bits(a.moving_var, d.moving_var.astype("float32"))


@DTYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [1, -1])
def test_a_channel_that_is_not_finite_keeps_its_statistics_and_only_that(dtype, bad, axis):
    d = draw((6, 3, 4), axis, dtype, seed=20)
    at = [5, slice(None), slice(None)]
    at[axis] = 1
    d.x[tuple(at)] = bad
    a = run(d, True, fix_gamma=False)
    w = right(d, True, fix_gamma=False)
    for got, before, want in (
        (a.moving_mean, d.moving_mean, w.moving_mean),
        (a.moving_var, d.moving_var, w.moving_var),
    ):
        got = got.asnumpy()
        assert same_bits(got[1:2], before[1:2].astype(d.param))
        check(got[::2], want[::2], SUM_UNITS[dtype])
    clean = [slice(None)] * 3
    clean[axis] = [0, 2]
    check(a.y.asnumpy()[tuple(clean)], w.output[tuple(clean)], OUTPUT_UNITS)
    dirty = [slice(None)] * 3
    dirty[axis] = 1
    assert not np.isfinite(a.y.asnumpy()[tuple(dirty)]).any()


def test_statistics_of_float32_data_that_only_overflow_when_stored_are_kept():
    d = draw((4, 2), seed=21)
    d.x[:, 0] = [3e38, -3e38, 3e38, -3e38]  # a variance of 9e76
    a = run(d, True, fix_gamma=False)
    assert a.moving_var.asnumpy()[0] == np.float32(d.moving_var[0])
    check(a.y, right(d, True, fix_gamma=False).output, OUTPUT_UNITS)


@pytest.mark.parametrize("eps", 10.0 ** np.arange(-12, 0))
def test_the_moving_variance_never_turns_negative(eps):
    d = draw((64, 8), seed=22)
    d.x[:, :4] = 1e-3 * d.x[:, :4] + 7
    d.x[:, 4:6] = 7.123
    d.x = d.x.astype("float32").astype("float64")
    d.moving_var[:] = 0
    a = run(d, True, eps=eps, momentum=0)
    assert (a.moving_var.asnumpy() >= 0).all()
    check(a.moving_var, d.x.var(0), SUM_UNITS["float32"])


@DTYPE
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.mxnet_operators
def test_output_mean_var_are_the_statistics_used_and_no_gradient_flows_through_them(
    dtype, is_train
):
    d = draw((6, 3, 4), dtype=dtype, seed=23)
    a = arrays(d)
    with mx.autograd.record(train_mode=is_train):
        a.y, mean, inv_std = call(d, a, fix_gamma=False, output_mean_var=True)
        loss = (a.y * a.dy).sum() + mean.sum().astype(dtype) + inv_std.sum().astype(dtype)
    loss.backward()
    mx.nd.waitall()
    w = right(d, is_train, fix_gamma=False)
    check(mean, w.mean, SUM_UNITS[dtype])
    check(inv_std, w.inv_std, SUM_UNITS[dtype])
    check_all(d, a, w)


@DTYPE
def test_out_receives_the_output_and_may_be_the_data(dtype):
    d = draw((6, 3, 20), dtype=dtype, seed=24)
    w = right(d, True, fix_gamma=False)
    for data_itself in (False, True):
        a = arrays(d, "null")
        out = a.x if data_itself else mx.nd.zeros(d.shape, dtype=dtype)
        with mx.autograd.train_mode():
            returned = call(d, a, fix_gamma=False, out=out)
        assert returned is out
        check(out, w.output, OUTPUT_UNITS)


@pytest.mark.slow
def test_the_same_bits_every_time():
    for shape, axis in (((4, 65, 33), 1), ((999, 7), 1), ((3, 2, 70000), 1)):
        d = draw(shape, axis, seed=25)
        first = run(d, True, fix_gamma=False)
        for _ in range(100):
            again = run(d, True, fix_gamma=False)
            for get in (
                lambda a: a.y,
                lambda a: a.x.grad,
                lambda a: a.gamma.grad,
                lambda a: a.beta.grad,
                lambda a: a.moving_mean,
                lambda a: a.moving_var,
            ):
                assert same_bits(get(again), get(first))


def test_defaults_are_those_of_the_builtin_operator():
    d = draw((6, 3), seed=26)
    a = run(d, True)
    w = right(d, True, eps=1e-3, momentum=0.9, fix_gamma=True)
    check_all(d, a, w)
    assert (a.gamma.grad.asnumpy() == 0).all()


@DTYPE
def test_attributes_may_be_numpy_values_or_strings(dtype):
    d = draw((6, 3), dtype=dtype, seed=27)
    w = right(d, True, eps=0.25, momentum=0.5, fix_gamma=False)
    for options in (
        {"eps": np.float64(0.25), "momentum": np.float32(0.5), "fix_gamma": np.bool_(False)},
        {"eps": "0.25", "momentum": "0.5", "fix_gamma": "false", "cudnn_off": True},
    ):
        check_all(d, run(d, True, **options), w)


def test_parameters_are_float32_for_float16_data():
    for dtype in DTYPES:
        d = draw((4, 2), dtype=dtype)
        a = arrays(d)
        with mx.autograd.train_mode():
            y, mean, inv_std = call(d, a, output_mean_var=True)
        assert y.dtype == np.dtype(dtype)
        assert mean.dtype == inv_std.dtype == np.dtype(param_dtype(dtype))
        assert nd([1.0], d.param).dtype == a.moving_mean.dtype
