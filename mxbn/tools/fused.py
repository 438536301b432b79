"""A node that does more than BatchNorm taken apart, for those who know the parts only."""

from __future__ import annotations

from .graph import Entry, Graph, Node
from .layers import INPUTS, MXBN, Attributes
from .operators import SYNC

# Their attributes.
_FUSED = ("act_type", "with_addend")
_SHARED = ("key", "num_devices", "timeout")


def expand(graph: Graph, node: Node) -> Node:
    """Make the last part of a node of mxbn's operator, and give the others nodes of their own.

    Parameters
    ----------
    graph : Graph
        Which the node is in.
    node : Node
        One of a batch that is spread over devices becomes one that knows its own part only.

    Returns
    -------
    Node
        The plain BatchNorm.
    """
    if node.op == SYNC:
        node.op, node.inputs = MXBN, node.inputs[: len(INPUTS)]
        node.attrs = {key: value for key, value in node.attrs.items() if key not in _SHARED}
    attributes = Attributes.parse(node.attrs)
    plain = {key: value for key, value in node.attrs.items() if key not in _FUSED}
    if not attributes.is_fused:
        node.attrs = plain
        return node
    norm = Node(node.op, f"{node.name}_bn", plain, node.inputs[: len(INPUTS)])
    parts = [Node("elemwise_add", f"{node.name}_add", inputs=[Entry(norm), node.inputs[-1]])]
    if not attributes.with_addend:
        parts = []
    if attributes.is_relu:
        before = Entry(parts[-1] if parts else norm)
        parts.append(Node("Activation", f"{node.name}_relu", {"act_type": "relu"}, [before]))
    for output in (1, 2):  # the mean and 1 / sqrt(variance + eps)
        graph.replace(Entry(node, output), Entry(norm, output))
    last = parts[-1]
    node.op, node.attrs, node.inputs = last.op, last.attrs, last.inputs
    return norm
