"""Symbol files, which MXNet's C++ code would trust."""

from __future__ import annotations

import ast
import json
from ctypes import byref
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, OpHandle, c_str, check_call

from .graph import VARIABLE, Entry, Graph, Node
from .params_file import last_line

_ALONE = "alone"
_DIVISORS = ("num_group", "num_groups")  # MXNet divides by them without a look


def load_symbol(path: str) -> mx.sym.Symbol:
    """Read a Symbol.

    Parameters
    ----------
    path : str

    Returns
    -------
    mx.sym.Symbol

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it does not hold a Symbol, or one with operators that are unknown, that have other
        inputs than they need, or that take values that are not there. The message names the file.
    """
    with open(path, encoding="utf-8") as file:
        try:
            described = json.load(file)
            _check_places(described)
            # Written anew: the checks and MXNet shall not read the same text in two ways.
            symbol = mx.sym.load_json(json.dumps(described, ensure_ascii=False))
            # Only now, since MXNet adds inputs to the nodes of versions that left them out.
            _check_uses(Graph.from_symbol(symbol))
            return symbol
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold an MXNet Symbol: its nodes are not in order"
            ) from error
        except (ValueError, mx.base.MXNetError) as error:
            raise ValueError(f"{path} does not hold an MXNet Symbol: {last_line(error)}") from error


def roles(node: Node) -> list[str]:
    """Return what an operator's inputs are called (``data``, ``weight``); none of control flow."""
    if node.op == VARIABLE or _is_control_flow(node):
        return []
    return [name[len(_ALONE) + 1 :] for name in _alone(node).list_inputs()]


def _check_places(described: Any) -> None:
    """Refuse what MXNet would read beyond its arrays for when it loads the text."""
    nodes = described["nodes"]
    for place, node in enumerate(nodes):
        _check_name(node["op"], node["name"], bool(node.get("subgraphs")))
        for source, output, *_ in node["inputs"]:
            if not 0 <= source < place or output < 0:
                raise ValueError(f"node {node['name']} takes a value that is not there")
        for graph in node.get("subgraphs", []):
            _check_places(graph)
    if not described["heads"]:
        raise ValueError("it has no outputs")
    for source, *_ in described["heads"]:
        if not 0 <= source < len(nodes):
            raise ValueError("an output is not there")


def _check_name(operator: str, name: str, has_subgraphs: bool) -> None:
    if operator == VARIABLE:
        return
    try:
        check_call(_LIB.NNGetOpHandle(c_str(operator), byref(OpHandle())))
    except mx.base.MXNetError as error:
        raise ValueError(f"node {name} is of the operator {operator}, which is unknown") from error
    if operator.startswith("_sg_") and not has_subgraphs:
        raise ValueError(f"node {name} of the operator {operator} has no subgraph")


def _check_uses(graph: Graph) -> None:
    """Refuse nodes with other inputs than they need, and uses of outputs that are not there."""
    nodes = graph.nodes()
    outputs = {id(node): _count_outputs(node) for node in nodes}
    for entry in [*graph.heads, *(entry for node in nodes for entry in node.inputs)]:
        if not 0 <= entry.output < outputs[id(entry.node)]:
            raise ValueError(
                f"output {entry.output} of node {entry.node.name} is used, which has "
                f"{outputs[id(entry.node)]}"
            )
    for node in nodes:
        for key in _DIVISORS:
            if int(node.attrs.get(key, 1)) < 1:
                raise ValueError(
                    f"node {node.name} has {key} {node.attrs[key]}, expected 1 or more"
                )
        for each in node.subgraphs:
            _check_uses(each)


def _count_outputs(node: Node) -> int:
    """Return how many outputs a node has, if it has the inputs that it needs."""
    if node.op == VARIABLE:
        needed, outputs = 0, 1
    elif _is_control_flow(node):
        needed, outputs = _counts_of_control_flow(node)
    else:
        alone = _alone(node)
        # Some operators may be given inputs that MXNet does not make by itself.
        made = len(alone.list_inputs())
        needed = made or len(node.inputs)
        outputs = len(alone.get_internals().list_outputs()) - made
    if len(node.inputs) != needed:
        raise ValueError(
            f"node {node.name} of the operator {node.op} has {len(node.inputs)} inputs, "
            f"expected {needed}"
        )
    return outputs


def _alone(node: Node) -> mx.sym.Symbol:
    """Return a node's operator, to which MXNet gives variables for all inputs."""
    alone = Graph([Entry(Node(node.op, _ALONE, node.attrs, [], node.subgraphs))]).to_symbol()
    alone._compose(name=_ALONE)
    return alone


def _is_control_flow(node: Node) -> bool:
    return bool(node.subgraphs) and "num_args" in node.attrs


def _counts_of_control_flow(node: Node) -> tuple[int, int]:
    needed = int(node.attrs["num_args"]) - len(node.subgraphs)
    for key, text in node.attrs.items():
        if key.endswith("_locs"):
            places = ast.literal_eval(text)
            if not all(0 <= place < needed for place in places):
                raise ValueError(f"node {node.name} has {key} {text}, but {needed} inputs")
    return needed, int(node.attrs["num_outputs"])
