"""Freezes BatchNorm layers: the choice of statistics, their steps, and gamma and beta."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx

from .layers import Attributes, Layer, choose
from .opened import memory, open_model
from .operators import OURS

STATISTICS = ("is_train", "batch", "moving")
_FLAGS = ("use_global_stats", "use_batch_stats")


class State(NamedTuple):
    """What a layer does.

    Attributes
    ----------
    name : str
    statistics : str
        'moving' or 'batch', whatever is_train says; or 'is_train': the batch's in training, the
        moving ones in inference.
    step : bool
        Whether the moving statistics step in training.
    affine : bool
        Whether gamma or beta train.
    """

    name: str
    statistics: str
    step: bool
    affine: bool


class _Switches(NamedTuple):
    """What `freeze` was asked for; None leaves a switch as it is."""

    statistics: str | None
    step: bool | None
    affine: bool | None
    momentum: float | None


def freeze(
    model: Any,
    layers: str | Sequence[str] | None = None,
    statistics: str | None = None,
    step: bool | None = None,
    affine: bool | None = None,
    momentum: float | None = None,
) -> Any:
    """Set what BatchNorm layers do in training; gradients pass through them in any case.

    Without `statistics`, `step` and `affine` the layers are frozen wholly: ``statistics='moving'``
    and ``affine=False``.

    Parameters
    ----------
    model : mx.gluon.Block, mx.mod.Module, mx.sym.Symbol, Checkpoint or (Symbol, dict, dict)
        A network, hybridized and imported ones too, and a Module are changed in place.
    layers : str or sequence of str, optional
        Names or patterns (``'stage1_*'``); all layers by default.
    statistics : {'moving', 'batch', 'is_train'}, optional
        The statistics to use: the moving ones, the batch's (mxbn's operator only), or as is_train
        says. They stay as they are by default, and so do the other switches.
    step : bool, optional
        Whether the moving statistics step in training. While they are used themselves, they do so
        only where this says True (mxbn's operator only).
    affine : bool, optional
        Whether gamma and beta train.
    momentum : float, optional
        With ``step=True``: the momentum; by default the one that ``step=False`` took away.

    Returns
    -------
    mx.gluon.Block, mx.mod.Module, mx.sym.Symbol or Checkpoint
        The same block or Module; otherwise a new Symbol or Checkpoint with the same arrays.

    Raises
    ------
    ValueError
        If no layer has a name, a layer's operator cannot do what is asked, or an argument is
        wrong. Nothing is changed then.
    TypeError
        If `model` is none of these.

    Notes
    -----
    A block acts so from its next call on, and a `Trainer` from its next step. A Module must be
    bound anew: ``bind(..., force_rebind=True)``, which takes the parameters of the last
    `get_params` (`freeze` calls it).

    ``step=False`` sets the momentum to 1. mxbn's operator then leaves the moving statistics as they
    are to the last bit. The built-in one does so too unless a batch holds NaN or infinity.

    ``affine=False`` sets `grad_req` to 'null', which keeps weight decay away too; for a Module, the
    names are added to its `fixed_param_names`; in a Symbol, ``__lr_mult__`` and ``__wd_mult__`` of
    the variables are 0, which `Module` heeds and `SymbolBlock` does not. A parameter that several
    layers share is frozen for all.

    Examples
    --------
    >>> mxbn.freeze(net.features)  # a frozen backbone
    >>> mxbn.freeze(net, "*stage1*", step=False)
    """
    if statistics is None and step is None and affine is None:
        statistics, affine = "moving", False
    switches = _Switches(statistics, step, affine, momentum)
    _check(switches)
    opened = open_model(model)
    chosen = choose(opened.layers, layers)
    changes = [_changes(layer, switches) for layer in chosen]
    for layer, change in zip(chosen, changes):
        opened.change(layer, change)
        if affine is not None:
            for parameter in opened.affine(layer).values():
                parameter.turn(affine)
    return opened.close()


def unfreeze(model: Any, layers: str | Sequence[str] | None = None) -> Any:
    """Give BatchNorm layers back what `freeze` has changed.

    Parameters
    ----------
    model, layers
        As of `freeze`. Layers that were not frozen stay as they are.

    Returns
    -------
    mx.gluon.Block, mx.mod.Module, mx.sym.Symbol or Checkpoint
        As `freeze` returns it.

    Notes
    -----
    Blocks, parameters and Modules know it as long as they live; Symbols also in files. What
    `export` writes of a block that is not an imported one is frozen without a memory:
    ``freeze(model, statistics='is_train', step=True, affine=True)`` then sets every switch.
    """
    opened = open_model(model)
    for layer in choose(opened.layers, layers):
        opened.change(layer, memory(layer.source))
        for parameter in opened.affine(layer).values():
            parameter.put_back()
    return opened.close()


def freeze_state(model: Any, layers: str | Sequence[str] | None = None) -> list[State]:
    """Return what BatchNorm layers do.

    Parameters
    ----------
    model, layers
        As of `freeze`.

    Returns
    -------
    list of State
    """
    opened = open_model(model)
    return [
        _state(layer.name, layer.attributes, opened.affine(layer))
        for layer in choose(opened.layers, layers)
    ]


@contextmanager
def frozen(model: Any, layers: str | Sequence[str] | None = None, **switches: Any) -> Iterator[Any]:
    """Freeze BatchNorm layers inside a ``with`` block.

    Afterwards all layers of the model are what they were before, with the gradients they had.

    Parameters
    ----------
    model : mx.gluon.Block or mx.mod.Module
    layers
        As of `freeze`.
    **switches
        ``statistics, step, affine, momentum``, as of `freeze`.

    Yields
    ------
    mx.gluon.Block or mx.mod.Module
        The model.

    Examples
    --------
    >>> with mxbn.frozen(net, statistics="moving"):
    ...     fine_tune(net)
    """
    if not isinstance(model, (mx.gluon.Block, mx.mod.Module)):
        raise TypeError(
            f"mxbn: a model of type {type(model).__name__} was given, expected a Block or a "
            "Module: others are not changed in place, freeze returns a new one"
        )
    put_back = open_model(model).snapshot()
    try:
        yield freeze(model, layers, **switches)
    finally:
        put_back()


def _check(switches: _Switches) -> None:
    if switches.statistics not in (None, *STATISTICS):
        raise ValueError(
            f"mxbn: statistics is {switches.statistics!r}, expected 'moving', 'batch', 'is_train' "
            "or None"
        )
    for name in ("step", "affine"):
        if getattr(switches, name) not in (None, True, False):
            value = getattr(switches, name)
            raise ValueError(f"mxbn: {name} is {value!r}, expected True, False or None")
    if switches.momentum is not None and not (switches.step and 0 <= switches.momentum < 1):
        raise ValueError(
            f"mxbn: momentum is {switches.momentum} and step is {switches.step}, expected a "
            "momentum from 0 to below 1, with step=True"
        )


def _changes(layer: Layer, switches: _Switches) -> dict[str, Any]:
    """Return the attributes that a layer needs."""
    wanted: dict[str, Any] = {}
    if switches.statistics == "batch" and layer.op not in OURS:
        raise ValueError(
            f"mxbn: layer {layer.name} is of the operator {layer.op}, which cannot use the batch's "
            "statistics in inference: convert it to mxbn's"
        )
    if switches.statistics is not None:
        wanted = dict(
            zip(_FLAGS, (switches.statistics == "moving", switches.statistics == "batch"))
        )
    if switches.step is False:
        wanted["momentum"] = 1.0
    elif switches.step:
        wanted["momentum"] = _stepping_momentum(layer, switches.momentum)
    moving = wanted.get("use_global_stats", layer.attributes.use_global_stats)
    if moving and (switches.statistics or switches.step is not None):
        if switches.step and layer.op not in OURS:
            raise ValueError(
                f"mxbn: layer {layer.name} is of the operator {layer.op}, which cannot use the "
                "moving statistics and step them: convert it to mxbn's"
            )
        wanted["step_global_stats"] = bool(switches.step)
    return {key: new for key, new in wanted.items() if new != getattr(layer.attributes, key)}


def _stepping_momentum(layer: Layer, given: float | None) -> float:
    if given is not None:
        return given
    if layer.attributes.momentum != 1:
        return layer.attributes.momentum
    former = memory(layer.source).get("momentum")
    if former is None:
        raise ValueError(
            f"mxbn: layer {layer.name} has momentum 1 and what it had before is not known: give "
            "momentum"
        )
    return float(former)


def _state(name: str, attributes: Attributes, affine: dict[str, Any]) -> State:
    statistics = "batch" if attributes.use_batch_stats else "is_train"
    if attributes.use_global_stats:
        statistics = "moving"
    trained = [p for role, p in affine.items() if role != "gamma" or not attributes.fix_gamma]
    return State(
        name,
        statistics,
        step=attributes.steps,
        affine=any(parameter.is_on for parameter in trained),
    )
