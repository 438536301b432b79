"""The nodes and arrays of a model while its BatchNorm layers are folded."""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple

import mxnet as mx
import numpy as np

from . import fold_rest
from .checkpoint import Checkpoint
from .fold_check import shapes_and_types
from .fused import expand
from .graph import VARIABLE, Entry, Graph, Node
from .layers import INPUTS, MXBN, OPERATORS, WITH_RELU, Attributes
from .operators import OURS

Array = Any
_LINEAR = ("Convolution", "Deconvolution", "FullyConnected")
_FUSED = ("BatchNorm", "elemwise_add", "_npi_add", "Activation", "LeakyReLU", "clip")
_LEFT_OUT = ("Dropout", "_copy")  # by executors in inference


class Fate(NamedTuple):
    """What became of a BatchNorm.

    Attributes
    ----------
    name, op : str
        Of the node.
    into : str or None
        The layer that it was folded into.
    reason : str or None
        Why it was not.
    result : str or None
        What now stands in its place: an operator, ``elementwise``, or None for nothing.
    """

    name: str
    op: str
    into: str | None
    reason: str | None
    result: str | None


class Folding:
    """A model on its way to a folded one.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model, which stays as it is.
    inputs : dict of str to numpy.ndarray
        Its inputs, which tell the shapes and types of everything.

    Attributes
    ----------
    graph : Graph
        The nodes, as changed so far.
    units : dict of str to float
        The unit of rounding for each parameter that was worked into another.
    """

    def __init__(self, checkpoint: Checkpoint, inputs: dict[str, Array]) -> None:
        self.graph = Graph.from_symbol(checkpoint.symbol)
        for part, node in list(self.graph.walk()):
            if node.op in OURS:
                expand(part, node)
        self.units: dict[str, float] = {}
        self._arrays = {**checkpoint.arg_params, **checkpoint.aux_params}
        self._changed: dict[str, tuple[Array, Any]] = {}  # float64, and an array of their type
        self._names = {node.name for node in self.graph.nodes()}
        self._layers = [(g, node) for g, node in self.graph.walk() if node.op in OPERATORS]
        outer = [node for graph, node in self._layers if graph is self.graph]
        probe = Graph([node.inputs[0] for node in outer]).to_symbol() if outer else None
        found = shapes_and_types(probe, {**self._arrays, **inputs}) if outer else []
        self._data = dict(zip(map(id, outer), found))

    def fold(self) -> list[Fate]:
        """Fold what can be folded, and make what stays independent of mxbn."""
        reasons = [
            self._fold(node) if graph is self.graph else "it is inside of another operator"
            for graph, node in self._layers
        ]
        touched = [
            node.inputs[0].node
            for (graph, node), reason in zip(self._layers, reasons)
            if graph is self.graph and (reason is None or node.op == MXBN)
        ]
        fates = [
            self._fate(graph, node, reason) for (graph, node), reason in zip(self._layers, reasons)
        ]
        for node in touched:
            self._protect(node)
        return fates

    def result(self) -> Checkpoint:
        """Return the folded model, with the parameters that it uses."""
        symbol = self.graph.to_symbol()
        arrays = {name: array.copy() for name, array in self._arrays.items()}
        for name, (values, like) in self._changed.items():
            arrays[name] = mx.nd.array(values, like.context, like.dtype)
        used = symbol.list_arguments(), symbol.list_auxiliary_states()
        return Checkpoint(symbol, *({n: arrays[n] for n in each if n in arrays} for each in used))

    def data_of(self, node: Node) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and type of a layer's data."""
        return self._data[id(node)]

    def takers(self, node: Node) -> list[tuple[Node | None, int]]:
        """Return who takes what of a node, as `Graph.consumers`."""
        return self.graph.consumers().get(id(node), [])

    def has_values(self, entry: Entry) -> bool:
        """Whether it is a parameter."""
        return entry.node.op == VARIABLE and entry.node.name in self._arrays

    def parameters(self, node: Node) -> list[Array]:
        """Return gamma (1 if it is fixed), beta, mean and ``1 / sqrt(variance + eps)``.

        The last is 0 where mxbn's operator has 0, and not finite where it cannot be computed.
        """
        attributes = Attributes.parse(node.attrs)
        gamma, beta, mean, var = (self._value(entry.node.name) for entry in node.inputs[1:])
        eps = attributes.eps
        if node.op != MXBN and "eps" not in node.attrs:
            eps = float(np.float32(eps))  # the default of MXNet's own operators
        with np.errstate(all="ignore"):
            inv_std = 1 / np.sqrt(var + eps)
        if node.op == MXBN:
            inv_std[var + eps == 0] = 0
        return [np.ones_like(gamma) if attributes.fix_gamma else gamma, beta, mean, inv_std]

    def note_rounding(self, entries: Iterable[Entry], dtype: Any = None) -> None:
        """Note that parameters are worked into others of a type, by default of their own."""
        for name in (entry.node.name for entry in entries if self.has_values(entry)):
            unit = float(np.finfo(dtype or self._arrays[name].dtype).eps)
            self.units[name] = max(unit, self.units.get(name, 0))

    def give(self, node: Node, place: int, values: Array) -> None:
        """Give a node an input of its own with new values, of the type of the one it has."""
        old = node.inputs[place].node
        name = old.name
        if len(self.takers(old)) > 1:
            node.inputs[place] = self.variable(name, values, name)
        else:
            self._changed[name] = values, self._arrays[name]

    def variable(self, name: str, values: Array, like: str) -> Entry:
        """Return a new parameter, of the type of another, with a name like the one given."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        array = self._arrays[like]
        self._changed[name] = values, array
        return Entry(Node(VARIABLE, name, _notes(values.shape, array.dtype)))

    def describe(self, entries: Iterable[Entry]) -> None:
        """Note shape and type on parameters, where an operator does not tell them."""
        for node in (entry.node for entry in entries if self.has_values(entry)):
            array = self._arrays[node.name]
            node.attrs.update(_notes(array.shape, array.dtype))

    def _value(self, name: str) -> Array:
        if name in self._changed:
            return self._changed[name][0]
        return self._arrays[name].asnumpy().astype("float64")

    def _fate(self, graph: Graph, node: Node, reason: str | None) -> Fate:
        name, op = node.name, node.op
        if reason is None:
            relu = "Activation" if op == WITH_RELU else None
            return Fate(name, op, node.inputs[0].node.name, None, relu)
        if op != MXBN:
            return Fate(name, op, None, reason, op)
        self.note_rounding(node.inputs[1:])
        if graph is self.graph:
            return Fate(name, op, None, reason, fold_rest.replace(self, node))
        return Fate(name, op, None, reason, fold_rest.replace_inside(node))

    def _fold(self, node: Node) -> str | None:
        """Fold a layer, or return why it stays."""
        reason = self._why_not(node)
        if reason is not None:
            return reason
        before = node.inputs[0].node
        weight, *bias = before.inputs[1:]
        dtype = self._arrays[weight.node.name].dtype
        gamma, beta, mean, inv_std = self.parameters(node)
        if not (np.isfinite(inv_std) & (inv_std > 0)).all():
            return "it has channels where moving_var + eps is not positive"
        old_weight = self._value(weight.node.name)
        old_bias = self._value(bias[0].node.name) if bias else 0
        scale = _per_weight(before, gamma * inv_std, old_weight.shape)
        new_weight, new_bias = old_weight * scale, (old_bias - mean) * gamma * inv_std + beta
        with np.errstate(over="ignore", invalid="ignore"):
            lost = np.abs(new_weight.astype(dtype) - new_weight)
            most = np.finfo(dtype).eps * np.abs(scale) * np.abs(old_weight).max()
            if not ((lost <= most).all() and np.isfinite(new_bias.astype(dtype)).all()):
                return f"{before.name} would get values out of the range of {np.dtype(dtype).name}"
        self.note_rounding((weight, *bias, *node.inputs[1:]), dtype)
        self.give(before, 1, new_weight)
        if bias:
            self.give(before, 2, new_bias)
        else:
            self._add_bias(before, new_bias)
        self._take_out(node)
        return None

    def _take_out(self, node: Node) -> None:
        rest = node.inputs[0]
        if node.op == WITH_RELU:
            rest = Entry(Node("Activation", node.name, {"act_type": "relu"}, [rest]))
        self.graph.replace(Entry(node), rest)

    def _protect(self, node: Node) -> None:
        """Keep MXNet from fusing a convolution wrongly.

        Executors on the CPU fuse it with the first operator that takes its output, if it is one of
        `_FUSED`. They do so even if others take the output as well, which then get that of the
        fused one; and with a BatchNorm of any axis.
        """
        while node.op in _LEFT_OUT:
            node = node.inputs[0].node
        takers = self.takers(node)
        if node.op != "Convolution" or not takers:
            return
        op = takers[0][0].op if takers[0][0] else None
        if op not in (
            (*_FUSED, *_LEFT_OUT) if len(takers) > 1 else (fold_rest.BUILT_IN, *_LEFT_OUT)
        ):
            return
        heads = self.graph.heads
        reshaped = Node("Reshape", f"{node.name}_apart", {"shape": "(-2,)"}, [Entry(node)])
        self.graph.replace(Entry(node), Entry(reshaped))
        self.graph.heads = heads

    def _add_bias(self, node: Node, values: Array) -> None:
        weight = node.inputs[1].node.name
        stem = weight[: -len("weight")] if weight.endswith("weight") else f"{node.name}_"
        node.inputs.append(self.variable(f"{stem}bias", values, weight))
        node.attrs["no_bias"] = "False"

    def _why_not(self, node: Node) -> str | None:
        """Return why a layer cannot be folded, whatever the values of its parameters."""
        attributes = Attributes.parse(node.attrs)
        before = node.inputs[0].node
        if attributes.use_batch_stats:
            return "it normalizes with the statistics of the batch"
        if any(output > 0 for _, output in self.takers(node)):
            return "its mean or variance is used too"
        for role, entry in zip(INPUTS[1:], node.inputs[1:]):
            if not self.has_values(entry):
                return f"its {role} is computed"
        if before.op == VARIABLE:
            return f"it comes first, after {before.name}"
        if before.op not in _LINEAR:
            return f"it comes after {before.name} ({before.op})"
        shape, _ = self.data_of(node)
        channels = _channel_axis(before, len(shape))
        if attributes.axis % len(shape) != channels:
            return (
                f"it normalizes axis {attributes.axis}, but the channels of {before.name} are on "
                f"axis {channels}"
            )
        takers = [taker for taker, _ in self.takers(before)]
        if len(takers) > 1:
            return f"{before.name} is {'an output' if None in takers else 'used elsewhere'} too"
        for role, entry in zip(("weight", "bias"), before.inputs[1:]):
            if not self.has_values(entry):
                return f"the {role} of {before.name} is computed"
            if len(self.takers(entry.node)) > 1:
                return f"the {role} of {before.name} is used elsewhere too"
        return None


def _notes(shape: tuple[int, ...], dtype: Any) -> dict[str, str]:
    """Return the attributes of a variable that tell its shape and type."""
    found: dict[str, str] = mx.sym.var("x", shape=shape, dtype=dtype).list_attr()
    return found


def _channel_axis(node: Node, rank: int) -> int:
    """Return the axis of the channels in a linear layer's output."""
    if node.op == "FullyConnected":
        return rank - 1
    layout = node.attrs.get("layout", "None")
    return 1 if layout == "None" else layout.index("C")


def _per_weight(node: Node, scale: Array, shape: tuple[int, ...]) -> Array:
    """Return the factors of a weight for factors of the output's channels, to broadcast."""
    if node.op != "Deconvolution":
        return scale.reshape(-1, *[1] * (len(shape) - 1))
    # The weight is (inputs, outputs per group, kernel), in the order of the layout.
    groups = int(node.attrs.get("num_group", 1))
    factors = np.repeat(scale.reshape(groups, -1), shape[0] // groups, axis=0)
    spread = [1] * len(shape)
    spread[0] = shape[0]
    spread[_channel_axis(node, len(shape))] = -1
    return factors.reshape(spread)
