"""Random drawings, their right values by mxbn.reference, and comparisons in units of rounding."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import mxnet as mx
import numpy as np
from device import CONTEXT, ON_GPU, OTHER_CONTEXT  # noqa: F401

import mxbn
from mxbn import reference

DTYPES = ("float16", "float32", "float64")
MODES = {  # is_train, use_global_stats, use_batch_stats
    "train": (True, False, False),
    "predict": (False, False, False),
    "train_global": (True, True, False),
    "predict_global": (False, True, False),
    "train_batch": (True, False, True),
    "predict_batch": (False, False, True),
}
# How MXNet may run a Gluon block: arguments of hybridize(), or None for not at all.
HYBRIDIZE = {
    "imperative": None,
    "hybridized": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def param_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


def rounded(values, dtype):
    """Float64 values that dtype represents exactly."""
    return np.asarray(values).astype(dtype).astype("float64")


def draw(shape, axis=1, dtype="float32", seed=0, mean=1.0, std=2.0):
    """Random x, dy, gamma, beta and moving statistics, as float64 values that dtype can hold."""
    rs = np.random.RandomState(seed)
    channels, param = shape[axis], param_dtype(dtype)
    return SimpleNamespace(
        shape=tuple(shape),
        axis=axis,
        dtype=dtype,
        param=param,
        x=rounded(rs.randn(*shape) * std + mean, dtype),
        dy=rounded(rs.randn(*shape), dtype),
        gamma=rounded(rs.uniform(0.5, 2, channels) * rs.choice([-1, 1], channels), param),
        beta=rounded(rs.randn(channels), param),
        moving_mean=rounded(rs.randn(channels), param),
        moving_var=rounded(rs.uniform(0.5, 3, channels), param),
    )


def nd(values, dtype="float32"):
    return mx.nd.array(values, dtype=dtype)


def arrays(d, grad_req="write"):
    """The NDArrays of a drawing, gradients attached to x, gamma and beta."""
    requests = (
        grad_req if isinstance(grad_req, dict) else dict.fromkeys(("x", "gamma", "beta"), grad_req)
    )
    a = SimpleNamespace(x=nd(d.x, d.dtype), dy=nd(d.dy, d.dtype))
    for key in ("gamma", "beta", "moving_mean", "moving_var"):
        setattr(a, key, nd(getattr(d, key), d.param))
    for key, request in requests.items():
        getattr(a, key).attach_grad(request)
    return a


def call(d, a, **attributes):
    return mxbn.nd.BatchNorm(
        a.x, a.gamma, a.beta, a.moving_mean, a.moving_var, axis=d.axis, **attributes
    )


def right(d, is_train, dy=None, **attributes):
    """Everything the operator should give: a reference.Forward and the three gradients."""
    fixed = attributes.get("fix_gamma", True)
    kept = reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var,
        is_train=is_train, axis=d.axis, **attributes,
    )  # fmt: skip
    dx, dgamma, dbeta = reference.backward(
        d.dy if dy is None else dy, d.x, d.gamma, kept, fix_gamma=fixed, axis=d.axis
    )
    along = [1] * d.x.ndim
    along[d.axis] = -1
    with np.errstate(invalid="ignore"):  # the data of some tests is not finite
        others = tuple(i for i in range(d.x.ndim) if i != d.axis % d.x.ndim)
    with np.errstate(invalid="ignore"):  # drawings may hold values that are not finite
        xh = (d.x - kept.mean.reshape(along)) * kept.inv_std.reshape(along)
        terms = np.abs((d.dy if dy is None else dy) * xh).sum(others)
    return SimpleNamespace(
        output=kept.output, mean=kept.mean, inv_std=kept.inv_std, dx=dx, dgamma=dgamma, dbeta=dbeta,
        moving_mean=kept.moving_mean, moving_var=kept.moving_var,
        dgamma_terms=terms.max() if terms.size else 0.0,
    )  # fmt: skip


def numpy_of(value):
    return value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)


def error(got, want, scale=None):
    """Largest difference, in units of rounding of got's type at the size of the values.

    scale is that size, by default the largest right value of each array: sums and differences of
    values that large cannot be more exact.
    """
    got, want = numpy_of(got), np.asarray(want, "float64")
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return 0.0
    unit = np.finfo(got.dtype).eps * (np.abs(want).max() if scale is None else scale)
    unit = max(unit, float(np.finfo(got.dtype).tiny))
    return float(np.max(np.abs(got.astype("float64") - want)) / unit)


def check(got, want, units=4, scale=None, what="value"):
    found = error(got, want, scale)
    assert found <= units, (
        f"{what} is off by {found:.3g} units of rounding, at most {units} allowed"
    )


def check_dgamma(got, want, units=4):
    """Compare a gradient of gamma; that of float64 data is as exact as the terms of its sum."""
    scale = want.dgamma_terms if numpy_of(got).dtype == np.float64 else None
    check(got, want.dgamma, 1 if scale is not None else units, scale, "gradient of gamma")


def same_bits(got, want):
    got, want = numpy_of(got), numpy_of(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def run_script(code, timeout=100, **environment):
    """Run code in a process of its own, which can import helpers, on the same default context."""
    default = "import device\n" if ON_GPU else ""
    path = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", default + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p), **environment},
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
