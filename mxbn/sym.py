"""The operator on Symbols."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.symbol.register import _symbol_creator

from . import _library, _sync
from ._attributes import INPUTS, is_true, name_positional, settle_fused
from ._errors import PREFIX, as_value_error


def _current(scope: Any) -> Any:
    """Return the value of one of MXNet's scopes that is in force in this thread."""
    if not hasattr(scope._current, "value"):
        scope._current.value = scope()
    return scope._current.value


def BatchNorm(
    data: Any = None,
    gamma: Any = None,
    beta: Any = None,
    moving_mean: Any = None,
    moving_var: Any = None,
    *positional: Any,
    addend: Any = None,
    name: str | None = None,
    attr: Any = None,
    **attributes: Any,
) -> Any:
    """Batch normalization as a Symbol; see `mxbn.nd.BatchNorm` for what it computes.

    Parameters
    ----------
    data, gamma, beta, moving_mean, moving_var : mx.sym.Symbol, optional
        One that is left out becomes a variable ``NAME_data``, ``NAME_gamma``, ``NAME_beta``,
        ``NAME_moving_mean`` or ``NAME_moving_var``; the moving ones are auxiliary states, and
        `mx.mod.Module` starts them with 0 and 1. A gamma made so under fix_gamma is exempt from
        weight decay, which would move a value that nothing uses.
    *positional
        Attributes without names, as of `mxbn.nd.BatchNorm`.
    addend : mx.sym.Symbol, optional
        Added to the normalized data; ``with_addend=True`` makes a variable ``NAME_addend`` of it.
    name : str, optional
        Default ``batchnorm0``, ``batchnorm1``, ...
    attr : dict of str to str, optional
        Further attributes of the node, such as ``{'ctx_group': 'dev1'}``.
    **attributes
        ``eps, momentum, fix_gamma, use_global_stats, use_batch_stats, step_global_stats,
        output_mean_var, axis, act_type, with_addend, cudnn_off``: names, defaults and ranges as in
        `mxbn.nd.BatchNorm`.

    Returns
    -------
    mx.sym.Symbol
        With one output, or three with output_mean_var; a NumPy-mode symbol if data is one.

    Raises
    ------
    ValueError
        If an argument is no Symbol, or an attribute is unknown or out of its range. Wrong shapes
        and types show when the symbol is bound, as MXNetError.
    """
    inputs = _inputs(data, gamma, beta, moving_mean, moving_var, addend)
    named: str = _current(mx.name.NameManager).get(name, "batchnorm")
    name_positional(positional, attributes)
    settle_fused(addend, attributes)
    notes = _current(mx.AttrScope).get(attr)
    _make_gamma(inputs, attributes, named, notes)
    attributes.update(notes)
    return _compose(_library.OPERATOR, inputs, attributes, named)


def SyncBatchNorm(
    data: Any = None,
    gamma: Any = None,
    beta: Any = None,
    moving_mean: Any = None,
    moving_var: Any = None,
    *,
    key: str | None = None,
    num_devices: int = 1,
    timeout: float = 300.0,
    name: str | None = None,
    attr: Any = None,
    **attributes: Any,
) -> Any:
    """Batch normalization over devices as a Symbol; see `mxbn.nd.SyncBatchNorm`.

    Parameters
    ----------
    data, gamma, beta, moving_mean, moving_var : mx.sym.Symbol, optional
        As of `mxbn.sym.BatchNorm`.
    key : str, optional
        By which the devices find each other; default is the name of the node.
    num_devices : int, default 1
        How many contexts the symbol is bound on, as `mx.mod.Module` does for several.
    timeout : float, default 300
        After how many seconds without one of the devices the others get an error.
    name, attr, **attributes
        As of `mxbn.sym.BatchNorm`, but for act_type and with_addend.

    Returns
    -------
    mx.sym.Symbol
        As `mxbn.sym.BatchNorm` returns.

    Raises
    ------
    ValueError
        As `mxbn.sym.BatchNorm` raises.
    """
    inputs = _inputs(data, gamma, beta, moving_mean, moving_var)
    named: str = _current(mx.name.NameManager).get(name, "syncbatchnorm")
    notes = _current(mx.AttrScope).get(attr)
    _make_gamma(inputs, attributes, named, notes)
    if data is None:
        inputs["data"] = mx.sym.var(f"{named}_data", attr=notes)
    key = key or named
    attributes.update(notes, key=key, num_devices=num_devices, timeout=timeout)
    batch = inputs["data"]
    for operator, what in (
        (_library.SYNC_STATISTICS, "statistics"),
        (_library.SYNC_EXCHANGE, "exchange"),
    ):
        batch = _compose(operator, {"data": batch}, attributes, f"{named}_{what}")
    inputs["batch"] = batch
    symbol = _compose(_library.SYNC_OPERATOR, inputs, attributes, named)
    _sync.join(key)
    return symbol


def _inputs(*symbols: Any) -> dict[str, Any]:
    """Return the inputs that are given, by name."""
    inputs = {key: value for key, value in zip(INPUTS, symbols) if value is not None}
    for key, value in inputs.items():
        if not isinstance(value, mx.sym.Symbol):
            raise ValueError(
                f"{PREFIX}{key} is a {type(value).__name__}, expected an mx.sym.Symbol"
            )
        if len(value.list_outputs()) != 1:
            raise ValueError(
                f"{PREFIX}{key} has {len(value.list_outputs())} outputs, expected a Symbol with one"
            )
    return inputs


def _make_gamma(inputs: dict[str, Any], attributes: dict[str, Any], name: str, notes: Any) -> None:
    """Make a gamma that nothing uses, with the notes of the node, as MXNet makes variables."""
    if "gamma" not in inputs and is_true(attributes.get("fix_gamma", True)):
        inputs["gamma"] = mx.sym.var(f"{name}_gamma", attr={**notes, "__wd_mult__": "0.0"})


def _compose(operator: str, inputs: dict[str, Any], attributes: dict[str, Any], name: str) -> Any:
    """Make a node."""
    try:
        return _symbol_creator(
            _library.handle(operator),
            None,
            inputs,
            list(attributes),
            list(attributes.values()),
            name,
            any(isinstance(symbol, mx.sym.np._Symbol) for symbol in inputs.values()),
            False,
        )
    except mx.base.MXNetError as error:
        raise as_value_error(error) from None
