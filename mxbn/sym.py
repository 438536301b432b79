"""The operator on Symbols."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.symbol.register import _symbol_creator

from . import _library
from ._attributes import is_true, name_positional, settle_fused
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
    given = {
        "data": data,
        "gamma": gamma,
        "beta": beta,
        "moving_mean": moving_mean,
        "moving_var": moving_var,
        "addend": addend,
    }
    inputs = {key: value for key, value in given.items() if value is not None}
    for key, value in inputs.items():
        if not isinstance(value, mx.sym.Symbol):
            raise ValueError(
                f"{PREFIX}{key} is a {type(value).__name__}, expected an mx.sym.Symbol"
            )
        if len(value.list_outputs()) != 1:
            raise ValueError(
                f"{PREFIX}{key} has {len(value.list_outputs())} outputs, expected a Symbol with one"
            )
    name = _current(mx.name.NameManager).get(name, "batchnorm")
    name_positional(positional, attributes)
    settle_fused(addend, attributes)
    notes = _current(mx.AttrScope).get(attr)
    if gamma is None and is_true(attributes.get("fix_gamma", True)):
        # With the node's notes, as MXNet makes the other variables.
        inputs["gamma"] = mx.sym.var(f"{name}_gamma", attr={**notes, "__wd_mult__": "0.0"})
    attributes.update(notes)
    try:
        return _symbol_creator(
            _library.handle(),
            None,
            inputs,
            list(attributes),
            list(attributes.values()),
            name,
            isinstance(data, mx.sym.np._Symbol),
            False,
        )
    except mx.base.MXNetError as error:
        raise as_value_error(error) from None
