"""Which BatchNorm layers can be converted from one operator to the other, and what that changes."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

from .._attributes import is_true
from ..gluon import OWN_FLAGS, BatchNorm
from .layers import MXBN, WITH_RELU, Attributes, Layer
from .operators import CONTRIB_SYNC, SYNC

# What a conversion changes for every layer, and no comparison of outputs in inference mode shows.
DIFFERENCES = {
    "mxbn": (
        "moving statistics step in forward, once per training forward; the built-in operator steps "
        "them in every backward (on a GPU in forward, with the unbiased variance)",
        "the gradient is that of the forward that ran, in inference mode too",
        "fix_gamma leaves the stored gamma as it is; the built-in operator overwrites it with 1",
    ),
    "builtin": (
        "moving statistics step in every backward, and never without one (on a GPU in forward, "
        "with the unbiased variance)",
        "a gradient recorded in inference mode is wrong unless backward is told train_mode=False",
        "fix_gamma overwrites the stored gamma with 1, in inference too",
    ),
}
ALREADY = "is of this kind already"

OPERATORS = {"mxbn": MXBN, "builtin": "BatchNorm"}
_BUILTIN = ("BatchNorm", "CuDNNBatchNorm", "BatchNorm_v1")
_MXBN_EPS, _BUILTIN_EPS = "0.001", "0.0010000000474974513"  # 1e-3 as double and as float
_CALIBRATION = ("min_calib_range", "max_calib_range")


class Change(NamedTuple):
    """What became of a layer.

    Attributes
    ----------
    name, op : str
        Of the layer, and its operator before.
    to : str or None
        Its operator now; None if it was left as it was.
    remarks : tuple of str
        Why it was left, or what is different now.
    """

    name: str
    op: str
    to: str | None
    remarks: tuple[str, ...]


def change_of(layer: Layer, attributes: dict[str, Any], to: str, obstacle: str = "") -> Change:
    """Return what is to become of a layer.

    Parameters
    ----------
    layer : Layer
    attributes : dict
        All it was made with.
    to : {'mxbn', 'builtin'}
    obstacle : str, optional
        Why it cannot be converted, wherever its attributes allow it.
    """
    reason = _why_left(layer.op, attributes, to, obstacle)
    if reason:
        return Change(layer.name, layer.op, None, (reason,))
    remarks = tuple(_remarks(layer, attributes, to))
    return Change(layer.name, layer.op, OPERATORS[to], remarks)


def _why_left(op: str, attributes: dict[str, Any], to: str, obstacle: str) -> str:
    if op == SYNC and to == "mxbn":
        return ALREADY
    if op in (CONTRIB_SYNC, SYNC):
        return "takes its statistics over several devices"
    if op == WITH_RELU and to == "builtin":
        return "computes a ReLU too"
    if (op == MXBN) == (to == "mxbn"):
        return ALREADY
    if obstacle:
        return obstacle
    if to == "builtin":
        found = Attributes.parse(attributes)
        if found.use_batch_stats:
            return "the built-in operator has nothing like use_batch_stats"
        if found.use_global_stats and found.step_global_stats:
            return "the built-in operator has nothing like step_global_stats"
        return ""
    if op == "BatchNorm_v1" and is_true(attributes.get("output_mean_var")):
        return "its third output is the variance, that of the other operators 1/sqrt(var + eps)"
    try:
        BatchNorm._check_attributes(understood(op, attributes))
    except ValueError as error:
        return str(error)
    return ""


def understood(op: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's attributes without those that only one operator knows.

    eps is always there: the operators' defaults are not quite the same. A ReLU is an attribute of
    mxbn's.
    """
    dropped = (*_CALIBRATION, *OWN_FLAGS)
    kept = {name: value for name, value in attributes.items() if name not in dropped}
    relu = {"act_type": "relu"} if op == WITH_RELU else {}
    return {"eps": _MXBN_EPS if op == MXBN else _BUILTIN_EPS, **kept, **relu}


def _remarks(layer: Layer, attributes: dict[str, Any], to: str) -> Iterator[str]:
    gamma = layer.arrays.get("gamma")
    if layer.attributes.fix_gamma and gamma is not None and (gamma.asnumpy() != 1).any():
        yield "the stored gamma is not 1 and, under fix_gamma, unused" + (
            "" if to == "mxbn" else ": the built-in operator will overwrite it with 1"
        )
    if to == "builtin" and layer.attributes.is_fused:
        yield "what was fused into it, an addend or a ReLU, has nodes of its own again"
    if to == "builtin" and layer.attributes.eps == 0:
        yield "eps is 0: a channel of equal values gives NaN or infinity"
    if to == "mxbn" and is_true(attributes.get("cudnn_off")):
        yield "cudnn_off has no effect"
    if any(name in attributes for name in _CALIBRATION):
        yield "the range found by calibration is dropped"
