"""Checks, when the package is imported, that the operator computes right in this build of MXNet.

The bridge to libmxnet.so rests on its memory layouts. A build in which they differ would show here:
the operator runs once in every way in which MXNet calls it, every attribute away from its
default, and must give the values below (float64, from `mxbn.reference`, which
tests/test_library.py compares them with).
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np

from . import _library, nd, sym

ATTRIBUTES = {"eps": 0.25, "momentum": 0.75, "fix_gamma": False, "axis": 2, "output_mean_var": True}
DATA = [1.5, -2.0, 0.25, 0.5, 3.0, -1.25, -0.75, 1.0, 2.0, 2.25, -0.5, 0.75]
HEAD_GRADIENT = [0.5, -1.0, 2.0, 1.0, 0.25, -0.5, -1.5, 0.75, 1.0, -0.25, 1.25, -2.0]
SHAPE = (2, 2, 3)
PARAMETERS = {"gamma": [0.5, -2.0, 1.5], "beta": [0.25, 1.0, -0.5]}
STATISTICS = {"moving_mean": [0.5, -0.25, 1.0], "moving_var": [2.0, 0.5, 1.5]}

BATCH = {
    "output": [
        0.5038365412834047,
        3.4788466776030806,
        -0.7219686306501455,
        0.09769807522995713,
        -1.7397779068244574,
        -2.4977176758513093,
        -0.40997500733685244,
        0.3476719269465578,
        1.3497385887512126,
        0.8084403908234905,
        1.9132593022748192,
        -0.1300522822497575,
    ],
    "mean": [0.875, 0.375, 0.4375],
    "var": [0.8122769321068953, 0.5218624584427538, 0.789221797867184],
    "data_gradient": [
        0.14340456146732558,
        0.9637800296347027,
        2.268292575986888,
        0.48255111559443137,
        0.5140900388489257,
        -0.3024390101315852,
        -0.3626983981637103,
        -0.34975888172227115,
        0.6308013639887348,
        -0.2632572788980467,
        -1.1281111867613571,
        -2.596654929844038,
    ],
    "gamma_gradient": [1.6499375183421312, 1.2557315406278764, 1.1098431532507276],
    "beta_gradient": [-0.25, 1.25, 0.5],
    "moving_mean": [0.59375, -0.09375, 0.859375],
    "moving_var": [1.81640625, 1.23046875, 1.4638671875],
}
MOVING = {
    "output": [
        0.5833333333333333,
        5.041451884327381,
        -1.3504200642707611,
        0.25,
        -6.505553499465136,
        -3.0512601928122836,
        -0.16666666666666663,
        -1.886751345948129,
        0.6338934190276815,
        0.8333333333333333,
        1.5773502691896257,
        -0.7834733547569204,
    ],
    "mean": [0.5, -0.25, 1.0],
    "var": [0.6666666666666666, 1.1547005383792517, 0.7559289460184544],
    "data_gradient": [
        0.16666666666666666,
        2.3094010767585034,
        2.267786838055363,
        0.3333333333333333,
        -0.5773502691896258,
        -0.5669467095138407,
        -0.5,
        -1.7320508075688776,
        1.1338934190276815,
        -0.08333333333333333,
        -2.886751345948129,
        -2.267786838055363,
    ],
    "gamma_gradient": [1.2916666666666665, 3.6806079660838646, 0.8504200642707613],
    "beta_gradient": [-0.25, 1.25, 0.5],
    "moving_mean": [0.5, -0.25, 1.0],
    "moving_var": [2.0, 0.5, 1.5],
}


def run() -> str | None:
    """Run the checks.

    Returns
    -------
    str or None
        The first value that is wrong, in words.
    """
    # Whichever mode and context the importing code is in.
    with mx.cpu(), mx.util.np_array(False), mx.util.np_shape(False), mx.autograd.pause():
        try:
            return (
                _compare("training", _run("float32", True, nd.BatchNorm), BATCH)
                or _compare("inference", _run("float32", False, nd.BatchNorm), MOVING)
                or _compare("act_type and addend", _run_fused(), _fused())
                or _compare("over devices", _run("float32", True, _over_devices), BATCH)
                or _compare(
                    "Symbol, training, use_global_stats",
                    _run("float64", True, _graph, use_global_stats=True),
                    MOVING,
                )
                or _compare(
                    "training, use_global_stats, step_global_stats",
                    _run(
                        "float32",
                        True,
                        nd.BatchNorm,
                        use_global_stats=True,
                        step_global_stats=True,
                    ),
                    {**MOVING, **{key: BATCH[key] for key in STATISTICS}},
                )
                or _compare(
                    "Symbol, inference, use_batch_stats",
                    _run("float64", False, _graph, use_batch_stats=True),
                    {**BATCH, **STATISTICS},
                )
            )
        except (mx.base.MXNetError, ValueError) as error:
            return str(error)


def run_onednn_layouts() -> str | None:
    """Check that data between convolutions, in oneDNN's layouts, gives what plain data gives.

    Returns
    -------
    str or None
        The first value that is wrong, in words.
    """
    with mx.cpu(), mx.util.np_array(False), mx.util.np_shape(False), mx.autograd.pause():
        try:
            found = _between_convolutions()
            _library.use_onednn_layouts(False)
            expected = _between_convolutions()
        except (mx.base.MXNetError, ValueError) as error:
            return str(error)
        finally:
            _library.use_onednn_layouts(True)
    for key, value in expected.items():
        if not np.allclose(found[key], value, 1e-5, 1e-5 * np.abs(value).max()):
            return f"{key} is off by {np.abs(found[key] - value).max():.3g}"
    return None


def _between_convolutions() -> dict[str, Any]:
    """Train a step and predict with BatchNorm between convolutions of 16 channels, or blocks."""
    channels = 16

    def wave(*shape: int) -> Any:
        return mx.nd.array(np.sin(np.arange(np.prod(shape))).reshape(shape))

    data, weight, head = wave(2, 8, 5, 5), wave(channels, 8, 3, 3), wave(2, channels, 3, 3)
    again = wave(channels, channels, 1, 1)
    arrays = [wave(channels), wave(channels), mx.nd.zeros(channels), mx.nd.ones(channels)]
    data.attach_grad()
    arrays[0].attach_grad()
    results = {}
    for is_train in (True, False):
        with mx.autograd.record(train_mode=is_train):
            hidden = mx.nd.Convolution(
                data, weight, num_filter=channels, kernel=(3, 3), no_bias=True
            )
            normal = nd.BatchNorm(hidden, *arrays, fix_gamma=False)
            hidden = nd.BatchNorm(hidden, *arrays, fix_gamma=False, addend=normal, act_type="relu")
            output = mx.nd.Convolution(
                hidden, again, num_filter=channels, kernel=(1, 1), no_bias=True
            )
        output.backward(head)
        mx.nd.waitall()
        mode = "training" if is_train else "inference"
        results[f"{mode}: output"] = output.asnumpy()
        results[f"{mode}: gradient of data"] = data.grad.asnumpy()
        results[f"{mode}: gradient of gamma"] = arrays[0].grad.asnumpy()
        results[f"{mode}: moving_var"] = arrays[3].asnumpy()
    return results


def _graph(*arrays: Any, **attributes: Any) -> Any:
    """Compute by way of a Symbol, as executors and hybridized blocks do."""
    symbol = sym.BatchNorm(mx.sym.var("data"), name="bn", **attributes)
    return mx.nd.CachedOp(symbol)(*arrays)


def _over_devices(*arrays: Any, **attributes: Any) -> Any:
    """Compute as one of several devices does, although there is no other."""
    symbol = sym.SyncBatchNorm(mx.sym.var("data"), name="mxbn_selftest", **attributes)
    return mx.nd.CachedOp(symbol)(*arrays)


def _run(dtype: str, is_train: bool, operator: Callable[..., Any], **flags: bool) -> dict[str, Any]:
    data, head = (mx.nd.array(v, dtype=dtype).reshape(SHAPE) for v in (DATA, HEAD_GRADIENT))
    arrays = {k: mx.nd.array(v, dtype=dtype) for k, v in {**PARAMETERS, **STATISTICS}.items()}
    for array in (data, arrays["gamma"], arrays["beta"]):
        array.attach_grad()
    with mx.autograd.record(train_mode=is_train):
        output, mean, var = operator(data, *arrays.values(), **ATTRIBUTES, **flags)
    output.backward(head)
    mx.nd.waitall()
    return {
        "output": output,
        "mean": mean,
        "var": var,
        "data_gradient": data.grad,
        "gamma_gradient": arrays["gamma"].grad,
        "beta_gradient": arrays["beta"].grad,
        "moving_mean": arrays["moving_mean"],
        "moving_var": arrays["moving_var"],
    }


def _run_fused() -> dict[str, Any]:
    """Run a Symbol with a ReLU and an addend, for which the head gradient does, in inference."""
    symbol = sym.BatchNorm(
        mx.sym.var("data"), name="bn", addend=mx.sym.var("addend"), act_type="relu", **ATTRIBUTES
    )
    arrays = [
        mx.nd.array(each).reshape(SHAPE) if len(each) > SHAPE[2] else mx.nd.array(each)
        for each in (DATA, *PARAMETERS.values(), *STATISTICS.values(), HEAD_GRADIENT)
    ]
    data, *_, addend = arrays
    data.attach_grad()
    addend.attach_grad()
    with mx.autograd.record(train_mode=False):
        output, *_ = mx.nd.CachedOp(symbol)(*arrays)
    output.backward(addend)
    mx.nd.waitall()
    return {"output": output, "data_gradient": data.grad, "addend_gradient": addend.grad}


def _fused() -> dict[str, Any]:
    """Return what it should give: that of MOVING where the sum is positive, and 0 elsewhere."""
    sums = np.add(MOVING["output"], HEAD_GRADIENT)
    gradients = {"data_gradient": MOVING["data_gradient"], "addend_gradient": HEAD_GRADIENT}
    through = {key: np.where(sums > 0, value, 0) for key, value in gradients.items()}
    return {"output": np.maximum(sums, 0), **through}


def _compare(what: str, got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    for key, value in expected.items():
        array = got[key].asnumpy()
        rounding = 8 * float(np.finfo(array.dtype).eps)
        if array.size != len(value) or not np.allclose(array.ravel(), value, rounding, rounding):
            return f"{what}: {key} is {array.ravel().tolist()}, expected {value}"
    return None
