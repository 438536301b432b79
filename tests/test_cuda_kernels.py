"""The kernels for GPUs, emulated on the CPU, against mxbn.reference: what test_operator asks of the
CPU's, through the exports of the library and a fake CUDA driver.
"""

import os
import shutil

import numpy as np
import pytest
from cuda import build, passes
from helpers import DTYPES, MODES, check, draw, right, run_script, same_bits
from hypothesis import HealthCheck, given, settings
from test_operator import OUTPUT_UNITS, SUM_UNITS, cases, check_all, flags_of

pytestmark = pytest.mark.skipif(
    shutil.which(build.COMPILER[0]) is None, reason=f"needs the C++ compiler {build.COMPILER[0]}"
)

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
MODE = pytest.mark.parametrize("mode", MODES)
ROWS, COLUMNS = (2, 3, 40), (6, 3, 4)
FORM = pytest.mark.parametrize("shape", [ROWS, COLUMNS], ids=["rows", "columns"])


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build.build_driver(tmp_path_factory.mktemp("cuda"))


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
    check(a.saved[:-1], np.concatenate([w.mean, w.inv_std]), 2**27, what="saved")
    assert a.saved[-1] == (is_train and "global" not in mode or "batch" in mode)


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


