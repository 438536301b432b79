"""What oneDNN's subgraph does to BatchNorm when MXNet binds a Symbol.

Measured on MXNet 1.9.1 on a CPU: an executor that is bound without any gradient joins a built-in
BatchNorm to the Convolution before it. Gluon, hybridized or not, does not.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from .graph import Graph, Node
from .layers import Attributes

_Consumers = Dict[int, List[Tuple[Optional[Node], int]]]


class Fold(NamedTuple):
    """A convolution that takes a BatchNorm in.

    Attributes
    ----------
    convolution : str
        Its name.
    faults : tuple of str
        What becomes wrong, also in inference.
    """

    convolution: str
    faults: tuple[str, ...]


def is_active() -> bool:
    """Whether MXNet joins them in this process, by the environment it was given."""
    environment = os.environ
    return (
        mx.runtime.Features().is_enabled("MKLDNN")
        and environment.get("MXNET_SUBGRAPH_BACKEND", "") in ("", "MKLDNN")
        and environment.get("MXNET_MKLDNN_ENABLED", "1") != "0"
        and environment.get("MXNET_DISABLE_MKLDNN_CONV_OPT", "0") == "0"
        and environment.get("MXNET_DISABLE_MKLDNN_FUSE_CONV_BN", "0") == "0"
    )


def folds(graph: Graph) -> dict[int, Fold]:
    """Return the BatchNorm nodes that are folded when float32 data comes, by ``id(node)``."""
    consumers = graph.consumers()
    found = {}
    for node in graph.nodes():
        convolution = _convolution_before(node, consumers) if node.op == "BatchNorm" else None
        if convolution is not None:
            faults = tuple(_faults(node, convolution, consumers))
            found[id(node)] = Fold(convolution.name, faults)
    return found


def _convolution_before(node: Node, consumers: _Consumers) -> Node | None:
    """Return the convolution that takes a node in, past one node that MXNet leaves out."""
    before = node.inputs[0].node
    if _is_left_out(before) and len(consumers[id(before)]) == 1:
        before = before.inputs[0].node
    users = [user for user, _ in consumers[id(before)] if user is not None]
    takes = before.op == "Convolution" and _dimensions(before) in (2, 3) and len(users) == 1
    return before if takes else None


def _is_left_out(node: Node) -> bool:
    is_dropout = node.op == "Dropout" and node.attrs.get("mode", "training") == "training"
    return is_dropout or node.op in ("_copy", "identity")


def _dimensions(convolution: Node) -> int:
    return len(convolution.attrs["kernel"].strip("()[], ").split(","))


def _faults(node: Node, convolution: Node, consumers: _Consumers) -> list[str]:
    axis = Attributes.parse(node.attrs).axis
    faults = []
    if axis not in (1, 1 - (_dimensions(convolution) + 2)):
        faults.append(f"it is computed along axis 1 instead of {axis}")
    if any(user is None for user, _ in consumers[id(convolution)]):
        faults.append(f"the output {convolution.name} of the model becomes the normalized one")
    if any(output > 0 for _, output in consumers.get(id(node), [])):
        faults.append("the outputs mean and var become copies of the output")
    return faults
