"""Whether the parameters and attributes of a BatchNorm layer are sound."""

from __future__ import annotations

from typing import Any

import numpy as np

from .layers import Layer
from .operators import OURS

_FAR = 1e3  # standard deviations from 0: MXNet's operator has lost 3 digits


def health(layer: Layer) -> tuple[list[str], list[str]]:
    """Examine a layer.

    Parameters
    ----------
    layer : Layer

    Returns
    -------
    problems, remarks : list of str
        What is wrong, and what is unusual.
    """
    values = {role: array.asnumpy().astype("float64") for role, array in layer.arrays.items()}
    problems, remarks = _of_attributes(layer)
    missing = [name for role, name in layer.parameters.items() if role not in values]
    if missing:
        remarks.append(f"no values: {', '.join(missing)}")
    bad = [role for role, array in values.items() if not np.isfinite(array).all()]
    for role in bad:
        problems.append(f"{role} is not finite in {_channels(~np.isfinite(values[role]))}")
    sound = {role: array for role, array in values.items() if role not in bad}
    for more in (_of_gamma(layer, sound), _of_statistics(layer, sound)):
        problems += more[0]
        remarks += more[1]
    return problems, remarks


def never_updated(mean: Any, var: Any) -> bool:
    """Whether moving statistics, as NumPy arrays, are what a layer begins with."""
    return bool(var.size) and not mean.any() and bool((var == 1).all())


def _of_attributes(layer: Layer) -> tuple[list[str], list[str]]:
    problems, remarks = [], []
    eps, momentum = layer.attributes.eps, layer.attributes.momentum
    if eps < 0:
        problems.append(f"eps {eps:g} is negative")
    elif eps == 0:
        text = "eps 0: a channel of equal values"
        if layer.op in OURS:
            remarks.append(f"{text} gives beta")
        else:
            problems.append(f"{text} gives NaN or an infinite variance")
    elif not 1e-8 <= eps <= 1e-2:
        remarks.append(f"eps {eps:g} is unusual")
    if not 0 <= momentum <= 1:
        problems.append(f"momentum {momentum:g} is not from 0 to 1")
    elif momentum == 1:
        remarks.append("momentum 1: training leaves the moving statistics as they are")
    elif momentum < 0.5:
        remarks.append(
            f"momentum {momentum:g} weighs the old statistics: PyTorch's {momentum:g} is "
            f"{1 - momentum:g} here"
        )
    return problems, remarks


def _of_gamma(layer: Layer, values: dict[str, Any]) -> tuple[list[str], list[str]]:
    gamma = values.get("gamma")
    if gamma is None or not gamma.size:
        return [], []
    if layer.attributes.fix_gamma:
        if (gamma == 1).all():
            return [], []
        then = "" if layer.op in OURS else ", and MXNet overwrites it"
        low, high = f"{gamma.min():.4g}", f"{gamma.max():.4g}"
        stored = low if low == high else f"{low} to {high}"
        return [f"gamma is stored as {stored}, but fix_gamma computes with 1{then}"], []
    dead = gamma == 0
    return [], [f"gamma is 0 in {_channels(dead)}: the output is beta"] if dead.any() else []


def _of_statistics(layer: Layer, values: dict[str, Any]) -> tuple[list[str], list[str]]:
    problems: list[str] = []
    remarks: list[str] = []
    mean, var = values.get("moving_mean"), values.get("moving_var")
    eps = layer.attributes.eps
    if mean is not None and var is not None and never_updated(mean, var):
        # Statistics that are never used may be what they are.
        found = remarks if layer.attributes.use_batch_stats else problems
        found.append("never updated: mean 0, variance 1")
    if var is not None and (var < 0).any():
        then = ": the output is not finite" if (var + eps <= 0).any() else ""
        problems.append(f"variance is negative in {_channels(var < 0)}, {var.min():.3g}{then}")
    if var is not None and ((var >= 0) & (var < eps)).any():
        tiny = (var >= 0) & (var < eps)
        remarks.append(f"variance is below eps in {_channels(tiny)}: dead inputs?")
    if layer.op not in OURS and mean is not None and var is not None and mean.shape == var.shape:
        far = np.abs(mean) > _FAR * np.sqrt(np.maximum(var, 0) + max(eps, 0))
        if far.any():
            remarks.append(
                f"mean is over {_FAR:g} standard deviations from 0 in {_channels(far)}: MXNet's "
                "operator loses digits"
            )
    return problems, remarks


def _channels(which: Any) -> str:
    count = int(which.sum())
    if count == which.size:
        return "all channels"
    places = ", ".join(map(str, np.flatnonzero(which)[:3]))
    return f"{count} of {which.size} channels ({places}{', ...' if count > 3 else ''})"


def shared(layers: list[Layer]) -> dict[int, list[str]]:
    """Return remarks on parameters that several nodes use, by ``id(layer.source)``."""
    users: dict[str, list[Layer]] = {}
    for layer in layers:
        for name in layer.parameters.values():
            users.setdefault(name, []).append(layer)
    remarks: dict[int, list[str]] = {}
    for layer in layers:
        by_users: dict[str, list[str]] = {}
        for role, name in layer.parameters.items():
            others = [each.name for each in users[name] if each.source is not layer.source]
            if others:
                by_users.setdefault(", ".join(others), []).append(role)
        remarks[id(layer.source)] = [
            f"shares {', '.join(roles)} with {others}" for others, roles in by_users.items()
        ]
    return remarks
