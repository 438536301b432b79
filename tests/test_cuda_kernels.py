"""The kernels for GPUs, emulated on the CPU, against mxbn.reference: what test_operator asks of the
CPU's, through the exports of the library and a fake CUDA driver.
"""

import shutil

import numpy as np
import pytest
from cuda import build, passes
from helpers import DTYPES, MODES, check, draw, right, run_script, same_bits
from hypothesis import HealthCheck, given, settings
from test_fused import KINDS, check_fused, draw_fused
from test_operator import (
    CHANNELS,
    OUTPUT_UNITS,
    SPATIAL,
    SUM_UNITS,
    cases,
    check_all,
    flags_of,
)
from test_second_order import check_second, draw_heads, kept_by, right_second

pytestmark = pytest.mark.skipif(
    shutil.which(build.COMPILER[0]) is None, reason=f"needs the C++ compiler {build.COMPILER[0]}"
)

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
MODE = pytest.mark.parametrize("mode", MODES)
ROWS, COLUMNS = (2, 3, 40), (6, 3, 4)
FORM = pytest.mark.parametrize("shape", [ROWS, COLUMNS], ids=["rows", "columns"])


@pytest.fixture(scope="module")
def gpu(driver):
    """Calls a function in the process that has the fake GPU."""
    with passes.start_process(driver) as process:
        yield lambda f, *args, **options: process.submit(f, *args, **options).result()


@pytest.fixture
def run(gpu):
    return lambda *args, **options: gpu(passes.run, *args, **options)


@pytest.fixture
def run_and_check(run):
    """Run a drawing and compare everything; returns what passes.run does."""

    def run_and_check(d, is_train=True, requests=None, fill=0.0, **options):
        attributes = {k: v for k, v in options.items() if k not in ("offset", "in_place", "device")}
        a = run(d, is_train, requests, fill, **options)
        w = right(d, is_train, **attributes)
        check_all(d, a, w, requests and {k: requests[k] for k in ("x", "gamma", "beta")}, fill)
        return a

    return run_and_check


@DTYPE
@MODE
@FORM
@pytest.mark.parametrize("fix_gamma", [False, True])
def test_every_mode(run_and_check, dtype, mode, shape, fix_gamma):
    d = draw(shape, dtype=dtype, seed=10)
    is_train, flags = flags_of(mode)
    options = {"fix_gamma": fix_gamma, "eps": 1e-2, "momentum": 0.75, **flags}
    a = run_and_check(d, is_train, **options)
    w = right(d, is_train, **options)
    check(a.mean, w.mean, SUM_UNITS[dtype], what="mean")
    check(a.inv_std, w.inv_std, SUM_UNITS[dtype], what="1/std")
    batch, step = (
        mode in ("train", "train_batch", "predict_batch"),
        mode in ("train", "train_batch"),
    )
    assert a.saved[-1] == batch
    # Forwards that used the batch, that did not, that stepped; channels that did not step.
    assert a.counters == [batch, not batch, step, 0]


@DTYPE
@FORM
@pytest.mark.parametrize("mode", ["train", "predict"])
def test_a_part_of_a_batch(run, run_and_check, dtype, shape, mode):
    d = draw(shape, dtype=dtype, seed=11)
    is_train, flags = flags_of(mode)
    a = run_and_check(d, is_train, fix_gamma=False, **flags)
    b = run(d, is_train, fix_gamma=False, spread=True, **flags)
    for name in ("y", "mean", "inv_std", "moving_mean", "moving_var", "saved"):
        assert same_bits(getattr(a, name), getattr(b, name)), name
    for name in ("x", "gamma", "beta"):
        assert same_bits(getattr(a, name).grad, getattr(b, name).grad), name
    assert a.counters == b.counters


# Derandomized: the same cases on every run.
@settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(cases())
def test_random_cases(run_and_check, case):
    d = draw(case["shape"], case["axis"], case["dtype"], case["seed"], case["mean"], case["std"])
    is_train, flags = flags_of(case["mode"])
    attributes = {key: case[key] for key in ("fix_gamma", "eps", "momentum")}
    run_and_check(d, is_train, case["requests"], fill=2.0, **attributes, **flags)


# The sizes of test_operator, at which vectors, tiles and blocks end.
@DTYPE
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("spatial", SPATIAL)
def test_sizes_around_the_ends_of_vectors(run_and_check, dtype, layout, channels, spatial):
    shape, axis = (
        ((2, channels, spatial), 1) if layout == "channels_first" else ((2, spatial, channels), 2)
    )
    d = draw(shape, axis, dtype, seed=channels + spatial)
    run_and_check(d, fix_gamma=False)


@pytest.mark.parametrize("inner", [*range(1, 34), 63, 64, 65])
def test_every_inner_size_around_a_warp(run_and_check, inner):
    d = draw((5, 6, inner), seed=inner)
    a = run_and_check(d, fix_gamma=False)
    assert a.plan["form"] == ("columns" if inner < 32 else "rows")


PLANS = [  # shape, axis, how it is cut, and whether into several pieces
    ((64, 8, 4, 4), 1, "columns", False),
    ((4099, 8, 2), 1, "columns", True),
    ((30000, 3), 1, "columns", True),
    ((16, 96), -1, "columns", False),
    ((9, 13, 17, 12), -1, "columns", True),
    ((2, 2056), 1, "columns", False),
    ((3, 5, 64), 1, "rows", False),
    ((2, 1, 20000), 1, "rows", True),
    ((600, 2, 36), 1, "rows", True),
    ((3, 9, 600), 1, "rows", False),
    ((2, 2, 3, 16, 16), 1, "rows", False),
    ((33000,), 0, "columns", False),
    ((1, 30000), 0, "rows", True),
]


@DTYPE
@pytest.mark.parametrize(("shape", "axis", "form", "several"), PLANS)
@pytest.mark.parametrize("offset", [0, 1])
def test_every_way_to_cut_a_tensor(run_and_check, dtype, shape, axis, form, several, offset):
    d = draw(shape, axis, dtype, seed=13)
    row = np.prod(shape[axis % len(shape) + (form == "rows") :], dtype=int)
    a = run_and_check(d, fix_gamma=False, offset=offset)
    assert a.plan["form"] == form
    assert (a.plan["splits"] > 1) == several
    # Accesses of 16 bytes wherever the addresses allow them.
    assert a.plan["vectors"] == (offset == 0 and row * np.dtype(dtype).itemsize % 16 == 0)


@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e5])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((32, 3, 14, 14), 1), ((32, 14, 14, 3), 3), ((32, 7, 7, 8), 3), ((4, 40, 5), 1)],
)
def test_float32_is_exact_to_rounding_also_far_from_zero(run_and_check, mode, ratio, shape, axis):
    d = draw(shape, axis, seed=14, mean=ratio, std=1.0)
    d.moving_mean = np.float32(d.moving_mean + ratio).astype("float64")
    is_train, flags = flags_of(mode)
    run_and_check(d, is_train, fix_gamma=False, eps=1e-5, **flags)


def test_the_sums_of_a_thread_do_not_lose_what_float32_cannot_hold(gpu):
    # As many values per thread as only the largest tensors have, and always the same square.
    values = np.resize(np.float32([0, 1.1]), 1 << 20).astype("float64")
    found = gpu(passes.variance_by_one_block, values)
    check(found, [values.var()], SUM_UNITS["float32"], what="variance")


@FORM
@pytest.mark.parametrize("outlier", [1e4, -1e6])
def test_the_first_value_of_a_channel_may_be_an_outlier(run, shape, outlier):
    d = draw((64, *shape[1:]), seed=15)
    d.x[0, :, 0] = outlier
    a, w = run(d, True, fix_gamma=False), right(d, True, fix_gamma=False)
    check(a.y, w.output, OUTPUT_UNITS, what="output")
    check(a.moving_mean, w.moving_mean, SUM_UNITS["float32"], np.abs(w.mean).max(), "moving mean")
    check(a.moving_var, w.moving_var, 1.5, what="moving variance")


@DTYPE
@FORM
def test_values_as_large_as_the_type_holds(run, dtype, shape):
    largest = {"float16": 65504.0, "float32": 1e38, "float64": 1e150}[dtype]
    d = draw(shape, dtype=dtype, seed=16)
    d.x = np.sign(d.x) * largest
    a = run(d, True, fix_gamma=False)
    check(a.y, right(d, True, fix_gamma=False).output, OUTPUT_UNITS, what="output")
    assert np.isfinite(a.x.grad).all()


@DTYPE
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1), (5,)])
def test_one_value_per_channel_gives_beta(run_and_check, dtype, shape):
    axis = 0 if len(shape) == 1 else 1
    d = draw(shape, axis, dtype, seed=17)
    a = run_and_check(d, fix_gamma=False)
    assert (a.x.grad == 0).all()
    assert (a.gamma.grad == 0).all()


@DTYPE
@FORM
def test_zero_eps_on_a_channel_without_spread(run_and_check, dtype, shape):
    d = draw(shape, dtype=dtype, seed=18)
    d.x[:, 0] = 3.5
    a = run_and_check(d, fix_gamma=False, eps=0)
    assert (a.y[:, 0] == d.beta[0].astype(dtype)).all()
    assert (a.x.grad[:, 0] == 0).all()
    assert a.gamma.grad[0] == 0


@DTYPE
@MODE
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (0, 3, 40)])
def test_an_empty_batch_changes_nothing(run, dtype, mode, shape):
    is_train, flags = flags_of(mode)
    d = draw(shape, dtype=dtype, seed=19)
    requests = {"gamma": "add"}
    a = run(d, is_train, requests, fill=5.0, fix_gamma=False, **flags)
    assert (a.gamma.grad == 5).all()
    assert (a.beta.grad == 0).all()
    assert same_bits(a.moving_mean, d.moving_mean.astype(d.param))
    assert same_bits(a.moving_var, d.moving_var.astype(d.param))


def test_no_channels_are_no_work(run):
    a = run(draw((4, 0, 2)), True, fix_gamma=False)
    assert a.y.size == 0


@DTYPE
@FORM
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_channel_that_is_not_finite_keeps_its_statistics_and_only_that(run, dtype, shape, bad):
    d = draw(shape, dtype=dtype, seed=20)
    d.x[1, 1, 2] = bad
    a = run(d, True, fix_gamma=False)
    w = right(d, True, fix_gamma=False)
    for got, before, want in (
        (a.moving_mean, d.moving_mean, w.moving_mean),
        (a.moving_var, d.moving_var, w.moving_var),
    ):
        assert same_bits(got[1:2], before[1:2].astype(d.param))
        check(got[::2], want[::2], SUM_UNITS[dtype])
    check(a.y[:, ::2], w.output[:, ::2], OUTPUT_UNITS)
    assert not np.isfinite(a.y[:, 1]).any()
    assert a.counters == [1, 0, 1, 1]


def test_statistics_of_float32_data_that_only_overflow_when_stored_are_kept(run):
    d = draw((4, 2), seed=21)
    d.x[:, 0] = [3e38, -3e38, 3e38, -3e38]  # a variance of 9e76
    a = run(d, True, fix_gamma=False)
    assert a.moving_var[0] == np.float32(d.moving_var[0])


@pytest.mark.parametrize("eps", 10.0 ** np.arange(-12, 0, 3))
def test_the_moving_variance_never_turns_negative(run, eps):
    d = draw((64, 8), seed=22)
    d.x[:, :4] = 1e-3 * d.x[:, :4] + 7
    d.x[:, 4:6] = 7.123
    d.x = d.x.astype("float32").astype("float64")
    d.moving_var[:] = 0
    a = run(d, True, eps=eps, momentum=0)
    assert (a.moving_var >= 0).all()
    check(a.moving_var, d.x.var(0), SUM_UNITS["float32"])


@DTYPE
@FORM
@MODE
@pytest.mark.parametrize("request_", ["write", "add", "null"])
def test_every_result_honours_its_own_request(run, dtype, shape, mode, request_):
    """One result is asked for in another way than the rest, each in its turn."""
    d = draw(shape, dtype=dtype, seed=23)
    is_train, flags = flags_of(mode)
    others = "add" if request_ == "write" else "write"
    w = right(d, is_train, fix_gamma=False, **flags)
    want = {"y": w.output, "mean": w.mean, "inv_std": w.inv_std}
    gradients = {"x": w.dx, "gamma": w.dgamma, "beta": w.dbeta}
    for name in passes.RESULTS:
        requests = {**dict.fromkeys(passes.RESULTS, others), name: request_}
        a = run(d, is_train, requests, fill=2.0, fix_gamma=False, **flags)
        for key, value in {**want, **gradients}.items():
            got = getattr(a, key).grad if key in gradients else getattr(a, key)
            if requests[key] == "null":
                assert got is None
                continue
            added = 2.0 if requests[key] == "add" else 0.0
            # Gradients are differences of terms that may be larger than they are.
            check(got, value + added, 6, 4 + np.abs(value).max(), key)


@pytest.fixture
def run_fused(run):
    """Run a drawing with what is fused, and compare everything."""

    def run_fused(d, kind, is_train=True, requests=None, fill=0.0, **options):
        act_type, with_addend = KINDS[kind]
        a = run(d, is_train, requests, fill, act_type=act_type, with_addend=with_addend, **options)
        attributes = {k: v for k, v in options.items() if k not in ("offset", "in_place", "seed")}
        if act_type is None:  # the head gradient itself
            a.addend.grad = d.dy.astype(d.dtype)
            requests = {**(requests or {}), "addend": "write"}
        check_fused(d, kind, a, is_train, requests, fill, **attributes)
        return a

    return run_fused


@DTYPE
@MODE
@FORM
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_fused(run_fused, dtype, mode, shape, kind, offset):
    d = draw_fused(shape, dtype=dtype, seed=27)
    is_train, flags = flags_of(mode)
    options = {"fix_gamma": False, "eps": 1e-2, "momentum": 0.75, "offset": offset, **flags}
    run_fused(d, kind, is_train, in_place=offset == 1, **options)


@DTYPE
@FORM
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("of_data", ["write", "add", "null"])
@pytest.mark.parametrize("of_addend", ["write", "add", "null"])
def test_requests_of_what_is_fused(run_fused, dtype, shape, is_train, of_data, of_addend):
    d = draw_fused(shape, dtype=dtype, seed=28)
    requests = {"x": of_data, "gamma": of_addend, "beta": of_data, "addend": of_addend}
    run_fused(d, "add_relu", is_train, requests, 2.0, fix_gamma=False)


@pytest.mark.parametrize("shape", [(30000, 3), (2, 1, 20000), (9, 13, 17, 12), (600, 2, 36)])
def test_large_tensors_and_the_same_bits_of_what_is_fused(run_fused, shape):
    d = draw_fused(shape, dtype="float32", seed=29)
    first = run_fused(d, "add_relu", fix_gamma=False)
    again = run_fused(d, "add_relu", fix_gamma=False, seed=5)
    assert same_bits(first.x.grad, again.x.grad)
    assert same_bits(first.gamma.grad, again.gamma.grad)


@FORM
def test_a_nan_and_infinite_sums_of_what_is_fused(run, shape):
    d = draw_fused(shape, seed=30)
    d.addend[1, 1, 2] = np.nan
    options = {"act_type": "relu", "with_addend": True, "fix_gamma": False}
    a = run(d, False, **options)
    assert np.isnan(a.y).sum() == np.isnan(a.addend.grad).sum() == np.isnan(a.x.grad).sum() == 1
    d.addend[...] = np.where(d.dy > 0, 100.0, -100.0)  # the sums are over what is let through
    d.dy = np.sign(d.dy) * 3e38
    a = run(d, True, **{**options, "fix_gamma": True})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(a.beta.grad, np.full(3, np.inf, "float32"))
    np.testing.assert_array_equal(a.addend.grad, np.maximum(d.dy, 0).astype("float32"))


@DTYPE
@FORM
def test_the_output_may_be_written_over_the_data(run_and_check, dtype, shape):
    run_and_check(draw(shape, dtype=dtype, seed=24), fix_gamma=False, in_place=True)


@pytest.mark.parametrize("device", [1, passes.DEVICES - 1])
def test_on_another_gpu(run_and_check, device):
    run_and_check(draw(ROWS, seed=25), fix_gamma=False, device=device)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 5, 33), 1), ((999, 7), 1), ((64, 24), 1), ((1, 2, 20000), 1)]
)
def test_the_same_bits_every_time_in_whatever_order_threads_run(run, shape, axis):
    d = draw(shape, axis, seed=26)
    first = run(d, True, fix_gamma=False)
    for seed in [0] * 5 + list(range(1, 20)):
        again = run(d, True, fix_gamma=False, seed=seed)
        for name in ("y", "mean", "inv_std", "saved", "moving_mean", "moving_var"):
            assert same_bits(getattr(again, name), getattr(first, name)), name
        for name in ("x", "gamma", "beta"):
            assert same_bits(getattr(again, name).grad, getattr(first, name).grad), name


@pytest.fixture
def run_second_and_check(gpu):
    """The second derivatives of a drawing, compared; returns into how many pieces they were cut."""

    def run_second_and_check(d, is_train=True, requests=None, fill=0.0, **options):
        heads, fixed = draw_heads(d), {"fix_gamma": options.get("fix_gamma", False)}
        flags = {k: options.pop(k) for k in [k for k in options if k.startswith("use_")]}
        kept = kept_by(d, is_train, **fixed, **flags)
        got, splits = gpu(passes.run_second, d, heads, kept, requests, fill, **options)
        want, sizes = right_second(d, heads, is_train, **fixed, **flags)
        for name, request in (requests or {}).items():
            if request == "null":
                assert got.pop(name) is None
            elif request == "add":
                want[name], sizes[name] = want[name] + fill, sizes[name] + fill
        check_second(got, want, sizes)
        return splits

    return run_second_and_check


@DTYPE
@MODE
@FORM
@pytest.mark.parametrize("fix_gamma", [False, True])
def test_second_derivatives_in_every_mode(run_second_and_check, dtype, mode, shape, fix_gamma):
    is_train, flags = flags_of(mode)
    run_second_and_check(
        draw(shape, dtype=dtype, seed=30), is_train, fix_gamma=fix_gamma, device=1, **flags
    )


@pytest.mark.parametrize("request_", ["write", "add", "null"])
@pytest.mark.parametrize("mode", ["train", "predict"])
def test_every_second_derivative_honours_its_own_request(run_second_and_check, mode, request_):
    d, others = draw(ROWS, seed=31), "add" if request_ == "write" else "write"
    for name in passes.SECOND:
        requests = {**dict.fromkeys(passes.SECOND, others), name: request_}
        run_second_and_check(d, mode == "train", requests, fill=2.0)


@DTYPE
@pytest.mark.parametrize(
    ("shape", "axis", "several"),
    [
        ((3, 5, 64), 1, False),
        ((64, 8, 4, 4), 1, True),
        ((9, 13, 17, 12), -1, True),
        ((2, 1, 20000), 1, True),
        ((9001, 3), -1, True),
        ((70, 5, 4), 1, True),
        ((33, 1), 1, False),
        ((7,), 0, False),
        ((0, 3, 2), 1, None),
    ],
)
def test_second_derivatives_of_every_form(run_second_and_check, dtype, shape, axis, several):
    splits = run_second_and_check(draw(shape, axis, dtype, seed=32), offset=1)
    assert several is None or (splits > 1) == several


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_second_derivatives_in_float32_far_from_zero(run_second_and_check, mode):
    d = draw((32, 3, 14, 14), seed=33, mean=1e5, std=1.0)
    d.moving_mean = np.float32(d.moving_mean + 1e5).astype("float64")
    run_second_and_check(d, mode == "train")


def test_second_derivatives_of_moving_statistics_do_not_take_in_what_they_do_not_depend_on(gpu):
    d = draw(ROWS, seed=34)
    heads, kept = draw_heads(d), kept_by(d, False, fix_gamma=False)
    heads[0][1, 1, 2] = d.x[1, 1, 3] = np.inf
    got, _ = gpu(passes.run_second, d, heads, kept)
    assert np.isfinite(got["x"]).all()
    assert np.isfinite(got["dy"]).sum() == d.x.size - 2


def test_second_derivatives_have_the_same_bits_in_whatever_order_threads_run(gpu):
    d = draw((2, 3, 9000), seed=35)
    heads, kept = draw_heads(d), kept_by(d, True, fix_gamma=False)
    first, _ = gpu(passes.run_second, d, heads, kept)
    for seed in range(1, 4):
        again, _ = gpu(passes.run_second, d, heads, kept, seed=seed)
        assert all(same_bits(again[name], first[name]) for name in passes.SECOND)


IMAGES = {
    "3.5": "no kernels for fake GPU, whose compute capability is 3.5",
    "5.0": "sm_50",
    "5.2": "sm_50",
    "6.1": "sm_60",
    "7.0": "sm_70",
    "7.2": "sm_70",
    "7.5": "sm_75",
    "8.0": "sm_80",
    "8.6": "sm_86",
    "8.7": "sm_86",
    "8.9": "sm_89",
    "9.0": "sm_90",
    "10.0": "compute_90",
    "12.1": "compute_90",
}


def test_every_gpu_gets_the_image_that_fits_it(driver):
    with passes.start_process(driver, ",".join(IMAGES)) as process:
        found = [process.submit(passes.describe, i).result() for i in range(len(IMAGES))]
    assert dict(zip(IMAGES, found)) == IMAGES


# Runs a forward on a GPU while a function of the driver fails, and prints what it hears.
ATTEMPT = """
import ctypes, os, sys
import numpy as np
from mxbn import _gpu

memory = np.zeros(100)
address = memory.ctypes.data
arguments = _gpu.Arguments(
    outer=2, channels=1, inner=3, x=address, out=address, beta=address, moving_mean=address,
    moving_var=address, saved=address, use_batch=1,
)

def attempt(failing, device=0):
    os.environ["FAKE_CUDA_FAIL"] = failing
    try:
        _gpu.forward(arguments, "float32", lambda n: address + 400, device=device)
        print("fine")
    except RuntimeError as error:
        print(error)
"""


def attempts(folder, code):
    ran = run_script(ATTEMPT + code, LD_LIBRARY_PATH=str(folder))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_what_fails_is_named_and_the_next_call_may_work(driver):
    functions = (
        "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel",
        "cuCtxPushCurrent_v2",
    )  # fmt: skip
    code = f"for name in {functions}: attempt(name)\nattempt('', 1)\nattempt('')"
    named = dict.fromkeys(functions)
    named.update({name: name for name in functions})
    named["cuModuleLoadData"] = "cuModuleLoadData of sm_80"
    named["cuCtxPushCurrent_v2"] = "cuCtxPushCurrent"
    named["cuModuleGetFunction"] = named["cuLaunchKernel"] = "mxbn_statistics_columns_float32"
    assert attempts(driver.parent, code) == [
        *(f"{named[name]}: CUDA error 999 (unknown error)" for name in functions),
        "cuDeviceGet: CUDA error 101 (invalid device ordinal)",
        "fine",
    ]


def test_a_missing_driver_is_an_error(tmp_path):
    (tmp_path / "libcuda.so.1").touch()  # found before a real one
    (said,) = attempts(tmp_path, "attempt('')")
    assert said.startswith("no CUDA driver: ")
    assert "libcuda.so.1" in said


def test_an_old_driver_is_an_error(tmp_path):
    (tmp_path / "empty.cc").touch()
    build.run([*build.COMPILER, "-shared", tmp_path / "empty.cc", "-o", tmp_path / "libcuda.so.1"])
    assert attempts(tmp_path, "attempt('')") == ["the CUDA driver is too old: it lacks cuInit"]


def test_no_gpu_is_an_error(driver):
    code = "os.environ['FAKE_CUDA_DEVICES'] = '0'\nattempt('')"
    assert attempts(driver.parent, code) == [
        "cuInit: CUDA error 100 (no CUDA-capable device is detected)"
    ]
