"""BatchNorm, addition and ReLU of an existing network joined to one operator."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import mxnet as mx
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.parameter import Parameter

from ..gluon import _MovingStatistic
from .checkpoint import Checkpoint
from .compare import compare, complete, outputs_of_block, outputs_of_symbol, rounding
from .conversions import change_of, understood
from .graph import Entry, Graph, Node
from .layers import MXBN, WITH_RELU, Layer, as_checkpoint, layers_of_graph, trace

_ADD = "elemwise_add"  # of equal shapes; others may broadcast, or mix types
_ADDS = (_ADD, "broadcast_add", "_npi_add")
_RELUS = ("relu", "_npx_relu")  # and Activation
_GROUP = "__ctx_group__"


class _Pattern(NamedTuple):
    """A BatchNorm, and the addend of its output, if any, before a ReLU."""

    relu: Node
    norm: Node
    addend: Entry | None


def fuse(model: Any, data: Any = None, *, tolerance: float | None = None) -> Any:
    """Join each BatchNorm to the ReLU behind it, past the addition of another branch.

    ``relu(batch_norm(x))`` and ``relu(batch_norm(x) + y)`` become one operator of mxbn, which reads
    and writes each tensor once. The BatchNorm may be the built-in one.

    Parameters
    ----------
    model : mx.sym.Symbol, Checkpoint, (Symbol, dict, dict), mx.mod.Module or mx.gluon.HybridBlock
        It stays as it is.
    data : dict of str to (mx.nd.NDArray or tuple of int), optional
        Inputs to compare the outputs on, by name, which are also those that a block's inputs get;
        default ``data``. A tuple is the shape of random values. A single input named ``data`` needs
        no dict. Where an addition might broadcast, the shapes tell that it does not.
    tolerance : float, optional
        Largest difference of an output, relative to its largest value; by default some units of
        rounding, as for `mxbn.convert`.

    Returns
    -------
    mx.sym.Symbol, Checkpoint or mx.gluon.SymbolBlock
        A Symbol for a Symbol, a SymbolBlock for a block, otherwise a Checkpoint. Arguments and
        auxiliary states keep their names, and outputs theirs. A SymbolBlock holds the same
        `Parameter` objects as the block: both learn from either's training, trainers and saved
        parameters stay valid. It is not hybridized yet.

    Raises
    ------
    ValueError
        If an output differs, or the model does not run on the data given.
    TypeError
        If `model` is none of these.

    Notes
    -----
    A BatchNorm is joined if nothing else takes its output or the sum, and neither is an output of
    the model. The new node has the name of the ReLU, whose output it gives. Others stay as they
    are, as do bodies of control flow; `mxbn.convert` makes a built-in BatchNorm that stays mxbn's.
    Outputs are compared in inference mode, if data is given or the shapes are known.

    Examples
    --------
    >>> net = mx.gluon.model_zoo.vision.resnet18_v1()
    >>> net.initialize()
    >>> fused = mxbn.fuse(net)
    """
    data = {} if data is None else data if isinstance(data, dict) else {"data": data}
    if isinstance(model, mx.gluon.HybridBlock):
        return _fuse_block(model, data, tolerance)
    if isinstance(model, mx.sym.Symbol):
        return _fuse_symbol(Checkpoint(model, {}, {}), data, tolerance)
    checkpoint = as_checkpoint(model)
    return checkpoint._replace(symbol=_fuse_symbol(checkpoint, data, tolerance))


def _fuse_symbol(model: Checkpoint, data: dict[str, Any], tolerance: float | None) -> mx.sym.Symbol:
    symbol = model.symbol
    try:
        arrays = complete(model, data)
    except ValueError:
        if data:
            raise
        return _fuse(symbol, {}, {})[0]
    types = {n: a.dtype for n, a in arrays.items() if n in symbol.list_arguments()}
    fused, count = _fuse(symbol, {n: a.shape for n, a in arrays.items()}, types)
    if count:
        if tolerance is None:
            tolerance = rounding(symbol.get_internals().infer_type(**types)[1], count)
        before, after = (outputs_of_symbol(each, arrays) for each in (symbol, fused))
        compare(before, after, [f"output {n}" for n in symbol.list_outputs()], tolerance)
    return fused


def _fuse_block(block: Any, data: dict[str, Any], tolerance: float | None) -> mx.gluon.SymbolBlock:
    inputs, traced = trace(block, tuple(data) or ("data",))
    outputs, form = _flatten(traced, "output")
    symbol = mx.sym.Group(outputs, type(outputs[0])) if len(outputs) > 1 else outputs[0]
    parameters = block.collect_params()
    shapes = {n: p.shape for n, p in parameters.items() if p._data is not None}
    shapes.update({n: each if isinstance(each, tuple) else each.shape for n, each in data.items()})
    types = {n: p.dtype for n, p in parameters.items()}
    types.update({n: each.dtype for n, each in data.items() if not isinstance(each, tuple)})
    fused, count = _fuse(symbol, shapes, types)
    for name in fused.list_auxiliary_states() if count else ():
        if type(parameters[name]) is Parameter:
            parameters[name].__class__ = _MovingStatistic  # as a layer of mxbn has it
    result = mx.gluon.SymbolBlock(_regroup(list(fused), form), inputs, parameters)
    if count and data:
        before, after = outputs_of_block(block, data), outputs_of_block(result, data)
        if tolerance is None:
            tolerance = rounding([*types.values(), *(each.dtype for each in before)], count)
        compare(before, after, [f"output {i}" for i in range(len(before))], tolerance)
    return result


def _fuse(
    symbol: mx.sym.Symbol, shapes: dict[str, Any], types: dict[str, Any]
) -> tuple[mx.sym.Symbol, int]:
    """Return the fused Symbol, and how many patterns it had, given what is known of variables."""
    graph = Graph.from_symbol(symbol)
    found = list(_patterns(graph, shapes, types))
    for relu, norm, addend in found:
        attrs = norm.attrs if norm.op == MXBN else understood(norm.op, norm.attrs)
        relu.op, relu.attrs, relu.inputs = MXBN, {**attrs, "act_type": "relu"}, norm.inputs
        if addend is not None:
            relu.attrs["with_addend"] = "True"
            relu.inputs = [*norm.inputs, addend]
    return (graph.to_symbol() if found else symbol), len(found)


def _patterns(graph: Graph, shapes: dict[str, Any], types: dict[str, Any]) -> Iterator[_Pattern]:
    takers = graph.consumers()
    norms = {id(each.source) for each in layers_of_graph(graph, {}, {}) if _can_be_joined(each)}

    def is_only_for(entry: Entry, node: Node) -> bool:
        """Whether nothing but a node, on the same device, takes an output, or others beside it."""
        same_device = entry.node.attrs.get(_GROUP) == node.attrs.get(_GROUP)
        return len(takers[id(entry.node)]) == 1 and entry.output == 0 and same_device

    for relu in filter(_is_relu, graph.nodes()):
        before = relu.inputs[0]
        if not is_only_for(before, relu):
            continue
        if id(before.node) in norms:
            yield _Pattern(relu, before.node, None)
        elif before.node.op in _ADDS:
            terms = before.node.inputs
            for norm, addend in (terms, terms[::-1]):
                if id(norm.node) in norms and is_only_for(norm, before.node):
                    if before.node.op == _ADD or _are_alike(graph, terms, shapes, types):
                        yield _Pattern(relu, norm.node, addend)
                    break


def _is_relu(node: Node) -> bool:
    is_activation = node.op == "Activation" and node.attrs["act_type"] == "relu"
    return is_activation or node.op in _RELUS


def _can_be_joined(layer: Layer) -> bool:
    change = change_of(layer, layer.source.attrs, "mxbn")
    is_right = MXBN in (change.to, layer.op)
    is_fused = layer.attributes.is_fused or layer.op == WITH_RELU
    return is_right and not layer.in_body and not is_fused


def _are_alike(
    graph: Graph, terms: list[Entry], shapes: dict[str, Any], types: dict[str, Any]
) -> bool:
    """Whether the terms of a sum are known to have one shape and type."""
    symbol = Graph(terms, graph.is_numpy).to_symbol()
    names = symbol.list_arguments()
    _, shape, _ = symbol.infer_shape_partial(**{n: s for n, s in shapes.items() if n in names})
    _, dtype, _ = symbol.infer_type_partial(**{n: t for n, t in types.items() if n in names})
    is_known = bool(shape[0]) and 0 not in shape[0] and dtype[0] is not None
    return is_known and shape[0] == shape[1] and dtype[0] == dtype[1]
