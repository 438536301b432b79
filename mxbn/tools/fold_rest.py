"""Inference of mxbn's BatchNorm by MXNet's own operators, for layers that cannot be folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mxnet as mx
import numpy as np

from ..gluon import OWN_FLAGS
from .graph import VARIABLE, Entry, Graph, Node
from .layers import INPUTS, Attributes

if TYPE_CHECKING:
    from .fold_graph import Folding

BUILT_IN = "BatchNorm"
ELEMENTWISE = "elementwise"
_OWN = (*OWN_FLAGS, "output_mean_var")  # attributes that the replacement has no use for


def replace_inside(node: Node) -> str:
    """Replace a node in the body of a control flow operator.

    Returns
    -------
    str
        By what.
    """
    attributes = Attributes.parse(node.attrs)
    if attributes.use_batch_stats:
        raise ValueError(
            f"{node.name} normalizes with the statistics of the batch inside of control flow, "
            "for which MXNet has nothing"
        )
    if attributes.fix_gamma:
        ones = Node("ones_like", f"{node.name}_ones", inputs=[node.inputs[1]])
        node.inputs[1] = Entry(ones)
    _to_built_in(node, attributes.eps)
    return BUILT_IN


def replace(folding: Folding, node: Node) -> str:
    """Replace a node that cannot be folded.

    Returns
    -------
    str
        By what.
    """
    attributes = Attributes.parse(node.attrs)
    known = all(folding.has_values(entry) for entry in node.inputs[1:])
    if attributes.use_batch_stats or not known:
        _to_elementwise(folding, node, attributes)
        return ELEMENTWISE
    gamma, _, mean, inv_std = folding.parameters(node)
    for output, what, values in ((1, "mean", mean), (2, "inv_std", inv_std)):
        if any(taken == output for _, taken in folding.takers(node)):
            like = node.inputs[1].node.name
            constant = folding.variable(f"{node.name}_{what}", values, like)
            folding.graph.replace(Entry(node, output), constant)
    eps = attributes.eps
    if not inv_std.all():  # MXNet would divide by zero
        gamma, eps = gamma * inv_std, 0.0
        folding.give(node, 4, np.ones_like(inv_std))
    if attributes.fix_gamma or not inv_std.all():
        folding.give(node, 1, gamma)
    _to_built_in(node, eps)
    if folding.data_of(node)[1] == "float16":
        _widen(node)
    return BUILT_IN


def _to_built_in(node: Node, eps: float) -> None:
    """Change operator and attributes; fix_gamma would overwrite the parameter, so it is not set."""
    for name in _OWN:
        node.attrs.pop(name, None)
    node.op = BUILT_IN
    node.attrs.update(eps=repr(eps), fix_gamma="False", use_global_stats="True")


def _widen(node: Node) -> None:
    """Make a float16 node compute in float32; what takes its output still finds it there."""
    data = Node("Cast", f"{node.name}_data", {"dtype": "float32"}, [node.inputs[0]])
    wide = Node(node.op, f"{node.name}_wide", node.attrs, [Entry(data), *node.inputs[1:]])
    node.op, node.attrs, node.inputs = "Cast", {"dtype": "float16"}, [Entry(wide)]


def _to_elementwise(folding: Folding, node: Node, attributes: Attributes) -> None:
    shape, dtype = folding.data_of(node)
    with mx.name.Prefix(f"{node.name}_"):
        made = Graph.from_symbol(_elementwise(shape, dtype, attributes))
    inputs = dict(zip(INPUTS, node.inputs))
    folding.describe(node.inputs[1:])
    for each in made.nodes():
        each.inputs = [
            inputs[entry.node.name] if entry.node.op == VARIABLE else entry for entry in each.inputs
        ]
    for output, entry in enumerate(made.heads):
        folding.graph.replace(Entry(node, output), entry)


def _elementwise(
    shape: tuple[int, ...], dtype: np.dtype[Any], attributes: Attributes
) -> mx.sym.Symbol:
    """Return the output, mean and 1 / sqrt(variance + eps) of a layer as a Symbol."""
    wide = "float64" if dtype == "float64" else "float32"
    axis = attributes.axis % len(shape) + 1  # after an axis in front: a reduction needs one
    spread = [1] * (len(shape) + 1)
    spread[axis] = -1
    others = [each for each in range(len(spread)) if each != axis]
    x, gamma, beta, mean, var = (
        mx.sym.var(role) if role == "data" else mx.sym.reshape(mx.sym.var(role), shape=spread)
        for role in INPUTS
    )
    x = mx.sym.expand_dims(mx.sym.cast(x, dtype=wide), axis=0)
    if attributes.use_batch_stats:
        # The mean in two steps: rounding a large one would cost the digits of small differences.
        mean = mx.sym.mean(x, axis=others, keepdims=True)
        centred = mx.sym.broadcast_sub(x, mean)
        rest = mx.sym.mean(centred, axis=others, keepdims=True)
        mean, centred = mean + rest, mx.sym.broadcast_sub(centred, rest)
        var = mx.sym.mean(mx.sym.square(centred), axis=others, keepdims=True)
    else:
        centred = mx.sym.broadcast_sub(x, mean)
    var = var + attributes.eps
    # 0 where the variance and eps are 0.
    inv_std = mx.sym.rsqrt(mx.sym.maximum(var, float(np.finfo(wide).tiny))) * (var > 0)
    scale = inv_std if attributes.fix_gamma else inv_std * gamma
    y = mx.sym.broadcast_add(mx.sym.broadcast_mul(centred, scale), beta)
    y = mx.sym.cast(mx.sym.reshape(y, shape=(-3, -2)), dtype=dtype.name)
    return mx.sym.Group([y, *(mx.sym.reshape(each, shape=(-1,)) for each in (mean, inv_std))])
