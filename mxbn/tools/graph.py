"""A Symbol as nodes that can be changed, by way of MXNet's symbol JSON."""

from __future__ import annotations

import json
from typing import Any, Iterator, NamedTuple

import mxnet as mx

_MXNET_VERSION = 10901  # whose JSON this is: nothing to upgrade
VARIABLE = "null"  # the operator of a variable


class Node:
    """A variable or an operator's call.

    Attributes
    ----------
    op, name : str
        The operator, `VARIABLE` for a variable, and the name.
    attrs : dict of str to str
        The operator's attributes and the node's own (``__lr_mult__``).
    inputs : list of Entry
        Which outputs of which nodes it takes.
    subgraphs : list of Graph
        The bodies of control flow operators.
    """

    def __init__(
        self,
        op: str,
        name: str,
        attrs: dict[str, str] | None = None,
        inputs: list[Entry] | None = None,
        subgraphs: list[Graph] | None = None,
    ) -> None:
        self.op = op
        self.name = name
        self.attrs = dict(attrs or {})
        self.inputs = list(inputs or [])
        self.subgraphs = list(subgraphs or [])


class Entry(NamedTuple):
    """One output of a node; the version counts changes in place, as MXNet does."""

    node: Node
    output: int = 0
    version: int = 0


class Graph:
    """The nodes of a Symbol.

    Attributes
    ----------
    heads : list of Entry
        The outputs.
    is_numpy : bool
        Whether its Symbol is one of NumPy mode, which JSON does not tell.
    """

    def __init__(self, heads: list[Entry], is_numpy: bool = False) -> None:
        self.heads = heads
        self.is_numpy = is_numpy

    @staticmethod
    def from_symbol(symbol: mx.sym.Symbol) -> Graph:
        """Take a Symbol apart."""
        # With amp_cast, which MXNet leaves out of files: the Symbol may be in use.
        graph = Graph._from_json(json.loads(symbol.tojson(remove_amp_cast=False)))
        graph.is_numpy = isinstance(symbol, mx.sym.np._Symbol)
        return graph

    def to_symbol(self) -> mx.sym.Symbol:
        """Put the nodes together again."""
        described = self._to_json()
        described["attrs"] = {"mxnet_version": ["int", _MXNET_VERSION]}
        symbol = mx.sym.load_json(json.dumps(described, ensure_ascii=False))
        return symbol.as_np_ndarray() if self.is_numpy else symbol

    def nodes(self) -> list[Node]:
        """Return the nodes, each after its inputs, without those of subgraphs."""
        done: dict[int, Node] = {}
        waiting = [entry.node for entry in reversed(self.heads)]
        while waiting:
            node = waiting[-1]
            missing = [e.node for e in node.inputs if id(e.node) not in done]
            if missing and id(node) not in done:
                waiting.extend(reversed(missing))
            else:
                waiting.pop()
                done.setdefault(id(node), node)
        return list(done.values())

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """Yield every node with its graph, also those of subgraphs."""
        for node in self.nodes():
            yield self, node
            for graph in node.subgraphs:
                yield from graph.walk()

    def consumers(self) -> dict[int, list[tuple[Node | None, int]]]:
        """Return who takes what of each node, by ``id(node)``.

        Returns
        -------
        dict of int to list of (Node or None, int)
            The consumer, None for the outputs of the graph, and which output it takes.
        """
        found: dict[int, list[tuple[Node | None, int]]] = {}
        for node in self.nodes():
            for entry in node.inputs:
                found.setdefault(id(entry.node), []).append((node, entry.output))
        for entry in self.heads:
            found.setdefault(id(entry.node), []).append((None, entry.output))
        return found

    def replace(self, old: Entry, new: Entry) -> None:
        """Make all that take one output take another."""

        def choose(entry: Entry) -> Entry:
            return new if entry[:2] == old[:2] else entry

        for node in self.nodes():
            node.inputs = [choose(entry) for entry in node.inputs]
        self.heads = [choose(entry) for entry in self.heads]

    @staticmethod
    def _from_json(described: dict[str, Any]) -> Graph:
        nodes: list[Node] = []
        for each in described["nodes"]:
            inputs = [Entry(nodes[i], *rest) for i, *rest in each["inputs"]]
            subgraphs = [Graph._from_json(graph) for graph in each.get("subgraphs", [])]
            nodes.append(Node(each["op"], each["name"], each.get("attrs"), inputs, subgraphs))
        return Graph([Entry(nodes[i], *rest) for i, *rest in described["heads"]])

    def _to_json(self) -> dict[str, Any]:
        nodes = self.nodes()
        place = {id(node): i for i, node in enumerate(nodes)}

        def entries(of: list[Entry]) -> list[list[int]]:
            return [[place[id(entry.node)], entry.output, entry.version] for entry in of]

        described = []
        for node in nodes:
            one: dict[str, Any] = {
                "op": node.op,
                "name": node.name,
                "inputs": entries(node.inputs),
            }
            if node.attrs:
                one["attrs"] = node.attrs
            if node.subgraphs:
                one["subgraphs"] = [graph._to_json() for graph in node.subgraphs]
            described.append(one)
        return {
            "nodes": described,
            "arg_nodes": [i for i, node in enumerate(nodes) if node.op == VARIABLE],
            "heads": entries(self.heads),
        }
