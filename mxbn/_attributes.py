"""Inputs and attributes of the operator as Python users give them."""

from __future__ import annotations

from typing import Any

from ._errors import PREFIX

INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var", "addend")
# The order in which MXNet's built-in operator takes attributes that are not named.
_ORDER = (
    "eps",
    "momentum",
    "fix_gamma",
    "use_global_stats",
    "output_mean_var",
    "axis",
    "cudnn_off",
)


def name_positional(positional: tuple[Any, ...], attributes: dict[str, Any]) -> None:
    """Add attributes that were given by position to those given by name."""
    if len(positional) > len(_ORDER):
        raise ValueError(
            f"{PREFIX}{len(positional)} attributes were given by position, expected at most "
            f"{len(_ORDER)}: {', '.join(_ORDER)}"
        )
    for name, value in zip(_ORDER, positional):
        if name in attributes:
            raise ValueError(f"{PREFIX}{name} was given twice, by position and by name")
        attributes[name] = value


def settle_fused(addend: Any, attributes: dict[str, Any]) -> None:
    """Make the attributes say whether there is an addend; no act_type is as none given."""
    if addend is not None and not is_true(attributes.setdefault("with_addend", True)):
        raise ValueError(f"{PREFIX}with_addend is False, expected True: an addend is given")
    if attributes.get("act_type", "") is None:
        del attributes["act_type"]


def is_true(flag: Any) -> bool:
    """Whether the operator reads a flag, which may be text, as True."""
    return str(flag) in ("True", "true", "1")
