"""A model whose BatchNorm layers can be changed, with a memory of what they were before."""

from __future__ import annotations

import json
from typing import Any, Callable

import mxnet as mx

from ..gluon import OWN_FLAGS, clear_graphs
from .checkpoint import Checkpoint
from .graph import VARIABLE, Graph, Node
from .layers import Attributes, Layer, as_checkpoint, layers_of_graph, parts_of_block
from .operators import SYNC

# Where a node (as JSON), and where a Gluon layer, a parameter and a Module keep what was before.
_NODE_MEMORY, _MEMORY = "__unfrozen__", "_unfrozen"
_MULTIPLIERS = ("__lr_mult__", "__wd_mult__")


def open_model(model: Any) -> Opened:
    """Return a model's layers, to be changed; see `mxbn.freeze` for the models."""
    if isinstance(model, mx.gluon.Block):
        return _OpenedBlock(model)
    if isinstance(model, mx.mod.Module):
        return _OpenedModule(model)
    return _OpenedSymbol(model)


def memory(source: Any) -> dict[str, Any]:
    """Return the attributes that a layer's node or block had; None for one that was not given."""
    if isinstance(source, Node):
        found: dict[str, Any] = json.loads(source.attrs.get(_NODE_MEMORY, "{}"))
        return found
    return getattr(source, _MEMORY, {})


class Opened:
    """A model whose layers can be changed, in a way that takes effect when it is closed.

    Attributes
    ----------
    layers : list of Layer
    """

    layers: list[Layer]

    def change(self, layer: Layer, wanted: dict[str, Any]) -> None:
        """Give a layer other attributes, None for none, and note what it had."""
        source = layer.source
        is_node = isinstance(source, Node)
        before = source.attrs if is_node else source._kwargs
        after = {**before, **{k: str(v) if is_node else v for k, v in wanted.items()}}
        for key, value in wanted.items():
            if value is None or (key in OWN_FLAGS and not value):
                del after[key]
        former = {**{key: before.get(key) for key in wanted}, **memory(source)}
        former = {k: v for k, v in former.items() if _parsed(k, v) != _parsed(k, after.get(k))}
        if is_node:
            after.pop(_NODE_MEMORY, None)
            source.attrs = {**after, _NODE_MEMORY: json.dumps(former)} if former else after
            for node in _nodes_before(source):
                rest = {key: text for key, text in node.attrs.items() if key not in wanted}
                node.attrs = {**rest, **{key: after[key] for key in wanted if key in after}}
        else:
            source._kwargs = after
            setattr(source, _MEMORY, former)

    def affine(self, layer: Layer) -> dict[str, Any]:
        """Return the switches of those of a layer's gamma and beta that are parameters."""
        names = {r: n for r, n in layer.parameters.items() if r in ("gamma", "beta")}
        return {role: self._switch(layer, name) for role, name in names.items()}

    def _switch(self, layer: Layer, name: str) -> Any:
        raise NotImplementedError

    def close(self) -> Any:
        """Make the changes take effect, and return the model."""
        raise NotImplementedError

    def snapshot(self) -> Callable[[], None]:
        """Return a function that makes the model what it is now, if it was changed in place."""
        raise NotImplementedError


class _OpenedBlock(Opened):
    def __init__(self, block: mx.gluon.Block) -> None:
        self._block = block
        self._parts = list(parts_of_block(block))
        self.layers = [layer for _, _, found in self._parts for layer in found]
        self._part_of = {id(layer): block for block, _, found in self._parts for layer in found}
        self._changed: list[mx.gluon.Block] = []
        self._parameters = {p.name: p for p in block.collect_params().values()}

    def change(self, layer: Layer, wanted: dict[str, Any]) -> None:
        if wanted:
            super().change(layer, wanted)
            self._changed.append(self._part_of[id(layer)])

    def _switch(self, layer: Layer, name: str) -> _Parameter:
        return _Parameter(self._parameters[name])

    def close(self) -> mx.gluon.Block:
        for block, graph, _ in self._parts:
            if graph is not None and block in self._changed:
                block._cached_graph = (block._cached_graph[0], graph.to_symbol())
        clear_graphs(self._changed)
        return self._block

    def snapshot(self) -> Callable[[], None]:
        blocks = [block for block, _, _ in self._parts]
        kept = [_keep(block, "_kwargs", "_cached_graph", _MEMORY) for block in blocks]
        switches = [switch for layer in self.layers for switch in self.affine(layer).values()]
        kept += [switch.keep() for switch in switches]

        def put_back() -> None:
            for each in kept:
                each()
            clear_graphs(blocks)

        return put_back


class _OpenedSymbol(Opened):
    def __init__(self, model: Any) -> None:
        self._is_symbol = isinstance(model, mx.sym.Symbol)
        self._model = Checkpoint(model, {}, {}) if self._is_symbol else as_checkpoint(model)
        self._graph = Graph.from_symbol(self._model.symbol)
        self.layers = layers_of_graph(self._graph, {}, {})

    def _switch(self, layer: Layer, name: str) -> Any:
        found = [node for _, node in self._graph.walk() if node.op == VARIABLE]
        return _Variables([node for node in found if node.name == name])

    def close(self) -> Any:
        symbol = self._graph.to_symbol()
        return symbol if self._is_symbol else self._model._replace(symbol=symbol)


class _OpenedModule(_OpenedSymbol):
    def __init__(self, module: mx.mod.Module) -> None:
        super().__init__(module.symbol)
        self._module = module

    def _switch(self, layer: Layer, name: str) -> _ModuleParameter:
        return _ModuleParameter(self._module, name)

    def close(self) -> mx.mod.Module:
        if self._module.binded and self._module.params_initialized:
            mx.nd.waitall()
            self._module._params_dirty = True  # the next bind takes what get_params has read
            self._module.get_params()
        self._module._symbol = super().close()
        return self._module

    def snapshot(self) -> Callable[[], None]:
        return _keep(self._module, "_symbol", "_fixed_param_names", _MEMORY)


class _Parameter:
    """The switch of a Gluon parameter."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def is_on(self) -> bool:
        return bool(self._parameter.grad_req != "null")

    def turn(self, on: bool) -> None:
        if on == self.is_on:
            return
        former = vars(self._parameter).pop(_MEMORY, "write")
        if not on:
            setattr(self._parameter, _MEMORY, self._parameter.grad_req)
        self._parameter.grad_req = former if on else "null"

    def put_back(self) -> None:
        if hasattr(self._parameter, _MEMORY):
            self.turn(True)

    def keep(self) -> Callable[[], None]:
        parameter, request = self._parameter, self._parameter.grad_req
        gradients = parameter._grad or []
        keep_memory = _keep(parameter, _MEMORY)

        def put_back() -> None:
            keep_memory()
            parameter.grad_req = request
            with mx.autograd.pause():
                for new, old in zip(parameter._grad or [], gradients):
                    if new is not old:
                        new[:] = old

        return put_back


class _ModuleParameter:
    """The switch of a Module's parameter."""

    def __init__(self, module: mx.mod.Module, name: str) -> None:
        self._module, self._name = module, name

    @property
    def is_on(self) -> bool:
        return self._name not in self._module._fixed_param_names

    def turn(self, on: bool) -> None:
        if on == self.is_on:
            return
        lists = (self._module._fixed_param_names, getattr(self._module, _MEMORY, []))
        added = [] if on else [self._name]
        fixed, ours = ([n for n in names if n != self._name] + added for names in lists)
        self._module._fixed_param_names = fixed
        setattr(self._module, _MEMORY, ours)

    def put_back(self) -> None:
        if self._name in getattr(self._module, _MEMORY, []):
            self.turn(True)


class _Variables:
    """The switch of a Symbol's variable, which the bodies of control flow repeat."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    @property
    def is_on(self) -> bool:
        return any(float(node.attrs.get(_MULTIPLIERS[0], 1)) != 0 for node in self._nodes)

    def turn(self, on: bool) -> None:
        if on == self.is_on:
            return
        for node in self._nodes:
            kept = {key: node.attrs[key] for key in _MULTIPLIERS if key in node.attrs}
            former = json.loads(node.attrs.pop(_NODE_MEMORY, "{}"))
            for key in kept:
                del node.attrs[key]
            if on:
                node.attrs.update(former)
            else:
                node.attrs.update(dict.fromkeys(_MULTIPLIERS, "0.0"))
                node.attrs[_NODE_MEMORY] = json.dumps(kept)

    def put_back(self) -> None:
        if any(_NODE_MEMORY in node.attrs for node in self._nodes):
            self.turn(True)


def _nodes_before(node: Node) -> list[Node]:
    """Return those that find the statistics of a batch that is spread over devices."""
    if node.op != SYNC:
        return []
    exchange = node.inputs[-1].node
    return [exchange, *(entry.node for entry in exchange.inputs)]


def _keep(owner: Any, *names: str) -> Callable[[], None]:
    """Return a function that gives an object the attributes, or lack of them, that it has now."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}

    def put_back() -> None:
        for name in names:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    return put_back


def _parsed(name: str, value: Any) -> Any:
    return getattr(Attributes.parse({} if value is None else {name: value}), name)
