"""Tells of a model's BatchNorms what they are, what they do in a mode, and if they are sound."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from . import onednn
from .behaviour import Behaviour, behaviour
from .gaps import gaps
from .graph import Graph
from .health import health, shared
from .layers import Attributes, Layer, as_checkpoint, layers_of_block, layers_of_graph
from .pools import Drift


class Row(NamedTuple):
    """A BatchNorm layer.

    Attributes
    ----------
    name, operator : str
        The operator is MXNet's name of it; ``mxbn_BatchNorm`` is ours.
    channels : int or None
        None while that is not known.
    attributes : Attributes
        ``eps, momentum, fix_gamma, use_global_stats, use_batch_stats, axis, ...``.
    behaviour : Behaviour
        ``statistics, steps, why, gradient``.
    folded_into : str
        The convolution that oneDNN has compute the layer when the model is bound without gradients,
        if any; `MXNET_SUBGRAPH_BACKEND` set to NONE prevents that.
    problems, remarks : list of str
        What is wrong, and what is unusual.
    gap : Drift or None
        The data's statistics against the moving ones ("before"), in standard deviations
        (`Drift.mean_shift`) and as `Drift.variance_ratio`.
    """

    name: str
    operator: str
    channels: int | None
    attributes: Attributes
    behaviour: Behaviour
    folded_into: str
    problems: list[str]
    remarks: list[str]
    gap: Drift | None


class Inspection(NamedTuple):
    """What `inspect` found.

    Attributes
    ----------
    for_training, is_train : bool
        The mode.
    rows : list of Row
        In the order of computation, or of a block's children.
    """

    for_training: bool
    is_train: bool
    rows: list[Row]

    @property
    def healthy(self) -> bool:
        """Whether no layer has a problem; remarks do not count."""
        return not any(row.problems for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold; numbers that are not finite are None."""
        return {
            "for_training": self.for_training,
            "is_train": self.is_train,
            "healthy": self.healthy,
            "layers": [_as_dict(row) for row in self.rows],
        }


def inspect(
    model: Any,
    for_training: bool = True,
    is_train: bool | None = None,
    data: Any = None,
    inputs: Sequence[str] = ("data",),
    ctx: Sequence[mx.Context] | None = None,
    progress: bool = False,
) -> Inspection:
    """Examine the BatchNorm layers of a model. Nothing is changed.

    Parameters
    ----------
    model : Checkpoint, (Symbol, dict, dict), mx.mod.Module or mx.gluon.Block
        Blocks may be hybridized or imported, or hold no values yet.
    for_training : bool, default True
        Whether gradients are asked for, as by ``bind(for_training)`` or `autograd.record`.
    is_train : bool, optional
        What a forward is told, as by ``forward(is_train)`` or ``record(train_mode)``; like
        `for_training` by default.
    data : mx.io.DataIter, dict of str to mx.nd.NDArray, DataLoader or iterable, optional
        Inputs of the model, to compare what enters each layer in inference with its moving
        statistics, over all the data and in float64. See `mxbn.recalibrate` for what a batch may
        be; a dict holds all samples.
    inputs : sequence of str, default ('data',)
        The inputs' names, if `data` does not tell them. A block takes them by position.
    ctx : sequence of mx.Context, optional
        For a Checkpoint: where to compute, by default the current context.
    progress : bool, default False
        Show a progress bar (tqdm) if standard error is a terminal.

    Returns
    -------
    Inspection

    Raises
    ------
    ValueError
        If the model does not run on the data.
    TypeError
        If `model` is none of these.

    Examples
    --------
    >>> report = mxbn.inspect(net, for_training=False)
    >>> report.healthy
    >>> [(row.name, row.problems) for row in report.rows if row.problems]
    """
    is_train = for_training if is_train is None else is_train
    mx.nd.waitall()
    if isinstance(model, mx.gluon.Block):
        found, folds = layers_of_block(model), {}  # Gluon never has oneDNN fold
    else:
        symbol, arg_params, aux_params = as_checkpoint(model, inputs)
        graph = Graph.from_symbol(symbol)
        found = layers_of_graph(graph, arg_params, aux_params)
        folds = onednn.folds(graph) if onednn.is_active() else {}
    gap_of = {} if data is None else gaps(model, data, inputs, ctx, progress)
    common = shared(found)
    rows = []
    for place, layer in enumerate(found):
        fold = None if _is_double(layer) else folds.get(id(layer.source))
        row = _row(layer, for_training, is_train, fold)
        row.remarks.extend(common[id(layer.source)])
        if place in gap_of:
            row = row._replace(gap=gap_of[place])
            if row.gap is None:
                row.problems.append("what enters it is not finite")
        rows.append(row)
    return Inspection(for_training, is_train, rows)


def _row(layer: Layer, for_training: bool, is_train: bool, fold: onednn.Fold | None) -> Row:
    is_folded = fold is not None and not for_training
    does = behaviour(layer, for_training, is_train, is_folded)
    problems, remarks = health(layer)
    if fold is not None:
        faults = [f"folded into the convolution at bind, {fault}" for fault in fold.faults]
        if for_training:
            remarks += [f"bound without gradients and {fault}" for fault in faults]
        else:
            problems += faults
        if is_folded and is_train and not layer.attributes.use_global_stats:
            problems.append("folded into the convolution at bind, it ignores is_train=True")
    return Row(
        layer.name,
        layer.op,
        next((array.size for array in layer.arrays.values()), None),
        layer.attributes,
        does,
        "" if fold is None else fold.convolution,
        problems,
        remarks,
        None,
    )


def _is_double(layer: Layer) -> bool:
    return any(np.dtype(array.dtype) == np.float64 for array in layer.arrays.values())


def _as_dict(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "operator": row.operator,
        "channels": row.channels,
        **row.attributes._asdict(),
        **row.behaviour._asdict(),
        "folded_into": row.folded_into,
        "problems": row.problems,
        "remarks": row.remarks,
    }
    if row.gap is not None:
        found["gap"] = gap_as_dict(row.gap)
    return found


def gap_as_dict(gap: Drift) -> dict[str, Any]:
    """Return a summary of a gap over the channels; None for what is not finite."""
    numbers = {
        "largest_mean_shift": abs(gap.mean_shift).max(),
        "smallest_variance_ratio": gap.variance_ratio.min(),
        "largest_variance_ratio": gap.variance_ratio.max(),
    }
    finite = {k: float(v) if math.isfinite(v) else None for k, v in numbers.items()}
    return {"values_per_channel": gap.values, **finite}
