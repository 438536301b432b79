"""BatchNorm folded into the layer before it, for inference without mxbn."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .checkpoint import Checkpoint
from .fold_check import Difference, differences, sample
from .fold_graph import Fate, Folding
from .graph import Graph
from .health import never_updated
from .layers import Layer, as_checkpoint, layers_of_graph

Array = Any


class Folded(NamedTuple):
    """A folded model and how it came about.

    Attributes
    ----------
    model : Checkpoint or mx.gluon.SymbolBlock
        With arrays of its own.
    layers : list of Fate
        What became of each BatchNorm, in the order of computation.
    differences : list of Difference
        How far each output is from that of the model before.
    """

    model: Any
    layers: list[Fate]
    differences: list[Difference]


def fold(
    model: Any,
    data: dict[str, Array] | None = None,
    shapes: dict[str, Sequence[int]] | None = None,
    force: bool = False,
) -> Folded:
    """Fold each BatchNorm into the Convolution, Deconvolution or FullyConnected before it.

    With ``s = gamma / sqrt(moving_var + eps)`` per channel, the weight becomes ``weight * s`` and
    the bias ``(bias - moving_mean) * s + beta``, computed in float64 and rounded once to the type
    of the weight.

    Parameters
    ----------
    model : Checkpoint, (Symbol, dict, dict), mx.mod.Module or mx.gluon.HybridBlock
        It stays as it is.
    data : dict of str to array_like, optional
        Values of the model's inputs to compare the outputs on; random ones by default.
    shapes : dict of str to tuple of int, optional
        Shapes of inputs that `data` leaves out, where the model does not tell them. The names in
        `data` and `shapes`, in this order, are also those that a block's inputs get; default
        ``data``.
    force : bool, default False
        Fold although moving statistics look wrong.

    Returns
    -------
    Folded
        Its model is a SymbolBlock on the same contexts, without gradients, if a block was given,
        otherwise a Checkpoint. Parameters that nothing uses any more are left out.

    Raises
    ------
    ValueError
        If moving statistics are not finite, negative variances or never updated (and `force` is
        False), if shapes are missing or do not fit, if the model does not run on the CPU, if a
        layer cannot do without mxbn, or if an output differs by more than rounding explains.
    TypeError
        If it is no model.

    Notes
    -----
    A BatchNorm that cannot be folded stays; `Fate.reason` says why. One of mxbn's becomes MXNet's
    own BatchNorm with ``use_global_stats``, which uses the moving statistics in training too; a
    fixed gamma is stored as 1. Where the variance and eps are 0, MXNet would divide by zero: gamma
    then holds s, and the variances are 1. Data in float16 is cast to float32, since MXNet would
    round the variance to float16. One with ``use_batch_stats``, or with computed parameters,
    becomes elementwise operators.

    The outputs are compared on the CPU, in float32 or float64: there MXNet has no convolution of
    float16. For float16 models, the difference is thus that of the rounded weights. An output
    that was a BatchNorm's is named after the layer that it was folded into.
    """
    data, shapes = dict(data or {}), dict(shapes or {})
    inputs = tuple({**data, **shapes}) or ("data",)
    mx.nd.waitall()  # executors do not tell MXNet's engine that they write moving statistics
    checkpoint = as_checkpoint(model, inputs)
    if not force:
        _refuse_unhealthy(checkpoint)
    if isinstance(model, mx.mod.Module) and model.binded:
        bound = [*model.data_shapes, *(model.label_shapes or [])]
        shapes = {**{each.name: each.shape for each in bound}, **shapes}
    values = sample(checkpoint, data, shapes)
    folding = Folding(checkpoint, values)
    fates = folding.fold()
    result = folding.result()
    found = differences(checkpoint, result, values, folding.units)
    for each in found:
        if not each.absolute <= each.bound:
            raise ValueError(
                f"{each.output} differs by {each.absolute:.2g} after folding, and rounding "
                f"explains at most {each.bound:.2g}"
            )
    if isinstance(model, mx.gluon.HybridBlock):
        return Folded(_as_block(result, values, inputs, model), fates, found)
    return Folded(result, fates, found)


def _refuse_unhealthy(checkpoint: Checkpoint) -> None:
    graph = Graph.from_symbol(checkpoint.symbol)
    ailments = {
        layer.name: _ailment(layer)
        for layer in layers_of_graph(graph, checkpoint.arg_params, checkpoint.aux_params)
    }
    found = [f"{name} has {ailment}" for name, ailment in ailments.items() if ailment]
    if found:
        more = f", and {len(found) - 1} other layers are ill too" if len(found) > 1 else ""
        raise ValueError(f"{found[0]}{more}; force folds it all the same (--force)")


def _ailment(layer: Layer) -> str | None:
    """Return what is wrong with the moving statistics that a layer uses."""
    if layer.attributes.use_batch_stats or not {"moving_mean", "moving_var"} <= set(layer.arrays):
        return None
    mean, var = (layer.arrays[role].asnumpy() for role in ("moving_mean", "moving_var"))
    if not (np.isfinite(mean).all() and np.isfinite(var).all()):
        return "moving statistics that are not finite"
    if (var < 0).any():
        return "a negative moving variance"
    if never_updated(mean, var):
        return "moving statistics that were never updated (mean 0, variance 1)"
    return None


def _as_block(
    checkpoint: Checkpoint, values: dict[str, Array], inputs: Sequence[str], model: Any
) -> Any:
    variables = [mx.sym.var(name, dtype=values[name].dtype) for name in inputs]
    block = mx.gluon.SymbolBlock(checkpoint.symbol, variables)
    arrays = {**checkpoint.arg_params, **checkpoint.aux_params}
    contexts = next(iter(model.collect_params().values())).list_ctx()
    for name, parameter in block.collect_params().items():
        parameter.grad_req = "null"
        parameter.shape = arrays[name].shape
        parameter._load_init(arrays[name], contexts, cast_dtype=True, dtype_source="saved")
    return block
