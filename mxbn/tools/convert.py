"""The built-in BatchNorm converted to mxbn's and back, with the outputs compared."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon.nn.basic_layers import BatchNorm as BuiltinLayer
from mxnet.gluon.nn.basic_layers import BatchNormReLU as BuiltinLayerWithReLU
from mxnet.gluon.parameter import Parameter

from ..gluon import OWN_FLAGS, BatchNorm, BatchNormReLU, _MovingStatistic, clear_graphs
from .checkpoint import Checkpoint
from .compare import compare, complete, outputs_of_block, outputs_of_symbol, rounding
from .conversions import ALREADY, OPERATORS, Change, change_of, understood
from .fused import expand
from .graph import Entry, Graph, Node
from .layers import Layer, as_checkpoint, layers_of_graph, parts_of_block

NOTHING = "nothing was converted"

_CLASSES = {
    "mxbn": {BuiltinLayer: BatchNorm, BuiltinLayerWithReLU: BatchNormReLU},
    "builtin": {BatchNorm: BuiltinLayer},
}
_CONTROL_FLOW = ("_foreach", "_while_loop", "_cond")


class _Edit(NamedTuple):
    """A value for an attribute of an object."""

    of: Any
    attribute: str
    value: Any


class Conversion(NamedTuple):
    """A converted model and how it was converted.

    Attributes
    ----------
    model : mx.sym.Symbol, Checkpoint or mx.gluon.Block
    to : str
        'mxbn' or 'builtin'; `DIFFERENCES` tells what that changes for every layer.
    changes : list of Change
        One for each BatchNorm of the model.
    difference : float or None
        Largest difference of an output, relative to the largest value of that output; None if the
        outputs were not compared.
    unchecked : str or None
        Why the outputs were not compared.
    """

    model: Any
    to: str
    changes: list[Change]
    difference: float | None
    unchecked: str | None

    @property
    def converted(self) -> list[str]:
        """The names of the layers that were converted."""
        return [change.name for change in self.changes if change.to]

    @property
    def left(self) -> list[Change]:
        """The layers that could not be converted."""
        return [c for c in self.changes if not c.to and c.remarks != (ALREADY,)]


def convert(
    model: Any, to: str = "mxbn", *, data: Any = None, tolerance: float | None = None
) -> Conversion:
    """Convert BatchNorm layers from the built-in operator to mxbn's, or back.

    Parameters
    ----------
    model : mx.sym.Symbol, Checkpoint, (Symbol, dict, dict), mx.mod.Module or mx.gluon.Block
        A block is converted in place; the others are left as they are.
    to : {'mxbn', 'builtin'}, default 'mxbn'
        The operator to convert to.
    data : dict of str to (mx.nd.NDArray or tuple of int), optional
        Inputs to compare the outputs on, by name; a block takes them in this order. A tuple is the
        shape of random values. A single input of a block, or the input ``data`` of another model,
        needs no dict.
    tolerance : float, optional
        Largest difference of an output, relative to its largest value. By default a few units of
        rounding for each layer, of the coarsest type in the model.

    Returns
    -------
    Conversion
        Its `model` is a new Symbol for a Symbol, the same block for a block, otherwise a new
        `Checkpoint` with the model's own arrays.

    Raises
    ------
    ValueError
        If the outputs differ, the model does not run on the data given, or an argument is wrong. A
        block is then as it was.
    TypeError
        If `model` is none of these.

    Notes
    -----
    Outputs are compared in inference mode: in training the built-in operator is itself off by more
    than rounding where the mean is large. With a Symbol, those of the converted layers are compared
    too. A block is compared only if data is given and its parameters are initialized; its hooks are
    called then.

    A Gluon layer stays the same object, with its name, parameters, hooks and places in other
    blocks; trainers stay valid. Networks that hold it are traced anew at their next call.

    Layers are left as they are, with the reason, if they compute something else (SyncBatchNorm,
    classes made from BatchNorm, use_batch_stats for the built-in operator). What is fused into a
    node of mxbn's gets nodes of its own in a Symbol for the built-in operator; a Gluon layer that
    adds or has a ReLU is left.

    Examples
    --------
    >>> net = mx.gluon.model_zoo.vision.resnet18_v1()
    >>> net.initialize()
    >>> len(mxbn.convert(net).converted)
    20
    """
    if to not in OPERATORS:
        raise ValueError(f"mxbn: to is {to!r}, expected 'mxbn' or 'builtin'")
    if data is not None and not isinstance(data, dict):
        data = {"data": data}
    if isinstance(model, mx.gluon.Block):
        return _convert_block(model, to, data, tolerance)
    if isinstance(model, mx.sym.Symbol):
        return _convert_symbol(Checkpoint(model, {}, {}), to, data, tolerance)
    checkpoint = as_checkpoint(model)
    checkpoint.check()
    done = _convert_symbol(checkpoint, to, data, tolerance)
    return done._replace(model=checkpoint._replace(symbol=done.model))


def _convert_symbol(model: Checkpoint, to: str, data: Any, tolerance: float | None) -> Conversion:
    graph = Graph.from_symbol(model.symbol)
    plan = _plan(graph, layers_of_graph(graph, model.arg_params, model.aux_params), to)
    changes = [change for _, change in plan]
    outer = {id(node) for node in graph.nodes()}  # in a body, a node's output cannot be had
    watched = [(node, c.name) for node, c in plan if c.to and id(node) in outer]
    wide = Graph([*(Entry(node) for node, _ in watched), *graph.heads])
    names = [f"layer {name}" for _, name in watched]
    names += [f"output {name}" for name in model.symbol.list_outputs()]
    symbol = wide.to_symbol()
    _convert_nodes(wide, plan)
    graph.heads = wide.heads[len(watched) :]
    result = Conversion(graph.to_symbol(), to, changes, None, None)
    if not result.converted:
        return result._replace(unchecked=NOTHING)
    try:
        arrays = complete(model, data or {})
        before = outputs_of_symbol(symbol, arrays)
    except ValueError as error:
        if data:
            raise
        return result._replace(unchecked=str(error).replace("mxbn: ", "", 1))
    if tolerance is None:
        types = {n: a.dtype for n, a in arrays.items() if n in symbol.list_arguments()}
        _, inner, _ = symbol.get_internals().infer_type(**types)
        tolerance = rounding(inner, len(result.converted))
    after = outputs_of_symbol(wide.to_symbol(), arrays)
    return result._replace(difference=compare(before, after, names, tolerance))


def _convert_block(
    block: mx.gluon.Block, to: str, data: Any, tolerance: float | None
) -> Conversion:
    changes, edits = _plan_block(block, to)
    result = Conversion(block, to, changes, None, None)
    if not data or not edits:
        _apply(edits)
        return result._replace(unchecked="no data was given" if edits else NOTHING)
    before = outputs_of_block(block, data)
    if tolerance is None:
        parameters = [p.dtype for p in block.collect_params().values()]
        tolerance = rounding([*parameters, *(a.dtype for a in before)], len(result.converted))
    names = [f"output {i}" for i in range(len(before))]
    undo = _apply(edits)
    try:
        difference = compare(before, outputs_of_block(block, data), names, tolerance)
    except BaseException:
        _apply(undo)
        raise
    return result._replace(difference=difference)


def _plan(graph: Graph, layers: Sequence[Layer], to: str) -> list[tuple[Node, Change]]:
    """Return what is to become of the layers of a graph."""
    fused = dict(_fused(graph))
    return [
        (layer.source, change_of(layer, layer.source.attrs, to, fused.get(id(layer.source), "")))
        for layer in layers
    ]


def _fused(graph: Graph, within: str = "") -> Iterator[tuple[int, str]]:
    """Yield the nodes, by id, that are parts of an operator which knows only what it fused."""
    for node in graph.nodes():
        if within:
            yield id(node), within
        inner = "" if node.op in _CONTROL_FLOW else f"is a part of {node.name}, a {node.op}"
        for subgraph in node.subgraphs:
            yield from _fused(subgraph, within or inner)


def _convert_nodes(graph: Graph, plan: Sequence[tuple[Node, Change]]) -> None:
    part_of = {id(node): part for part, node in graph.walk()}
    for node, change in plan:
        if change.to:
            norm = expand(part_of[id(node)], node)
            norm.attrs = understood(norm.op, norm.attrs)
            norm.op = change.to


def _plan_block(block: mx.gluon.Block, to: str) -> tuple[list[Change], list[_Edit]]:
    """Return what is to become of the layers of a block, and the edits that do it."""
    changes: list[Change] = []
    edits: list[_Edit] = []
    statistics: list[Parameter] = []
    kept: list[Parameter] = []  # those of layers of mxbn that stay
    for part, graph, layers in parts_of_block(block):
        if graph is not None:
            plan = _plan(graph, layers, to)
            changes += [change for _, change in plan]
            if any(change.to for _, change in plan):
                _convert_nodes(graph, plan)
                inputs, _ = part._cached_graph
                edits.append(_Edit(part, "_cached_graph", (inputs, graph.to_symbol())))
            continue
        new_class = _CLASSES[to].get(type(part))
        obstacle = "" if new_class else f"is a {type(part).__name__}, made from BatchNorm"
        change = change_of(layers[0], part._kwargs, to, obstacle)
        changes.append(change)
        if change.to:
            # The layer itself changes its class: whatever refers to it stays right.
            edits.append(_Edit(part, "__class__", new_class))
            if to == "builtin":
                known = {k: v for k, v in part._kwargs.items() if k not in OWN_FLAGS}
                edits.append(_Edit(part, "_kwargs", known))
        (statistics if change.to else kept).extend([part.running_mean, part.running_var])
    old, new = (Parameter, _MovingStatistic) if to == "mxbn" else (_MovingStatistic, Parameter)
    shared = {id(each) for each in kept} if to == "builtin" else set()
    edits += [
        _Edit(each, "__class__", new)
        for each in statistics
        if type(each) is old and id(each) not in shared
    ]
    return changes, edits


def _apply(edits: Sequence[_Edit]) -> list[_Edit]:
    """Set attributes of objects; return the edits that undo it."""
    undo = [_Edit(each, name, getattr(each, name)) for each, name, _ in edits]
    for each, name, value in edits:
        setattr(each, name, value)
    clear_graphs(each for each, _, _ in edits if isinstance(each, mx.gluon.Block))
    return undo
