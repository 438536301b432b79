"""Networks run so that one sees what enters their BatchNorm layers, and nothing in them changes."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon.block import _flatten, _regroup

from .. import nd
from ..gluon import descendants
from .graph import Entry, Graph, Node
from .layers import INPUTS, MXBN, WITH_RELU, Layer, as_checkpoint, layers_of_graph, parts_of_block
from .operators import SYNC
from .pools import Pool, Recorder

Array = Any
Run = Callable[[Sequence[str], Sequence[Array], mx.Context], object]  # names, inputs, their context


def network(model: Any, contexts: Sequence[mx.Context] | None) -> _Network:
    """Return a model to be run; see `mxbn.recalibrate` for the models and contexts."""
    if isinstance(model, (mx.gluon.Block, mx.mod.Module)) and contexts is not None:
        raise ValueError(
            f"mxbn: ctx was given, expected None: a {type(model).__name__} has contexts of its own"
        )
    if isinstance(model, mx.gluon.Block):
        return _Block(model)
    if isinstance(model, mx.mod.Module):
        return _Module(model)
    return _Checkpoint(model, contexts or [mx.context.current_context()])


class _Network:
    """A model that can be run on its contexts.

    Attributes
    ----------
    layers : list of Layer
    contexts : sequence of mx.Context
    """

    layers: list[Layer]
    contexts: Sequence[mx.Context]

    def statistic(self, name: str) -> Callable[[], list[Array]]:
        """Return what returns a moving statistic's arrays, none when the model is gone."""
        raise NotImplementedError

    def watched(self, pools: dict[int, Pool], recorder: Recorder) -> Any:
        """Return a context manager for what runs the model and tells the recorder what it sees."""
        raise NotImplementedError


class _Block(_Network):
    def __init__(self, block: mx.gluon.Block) -> None:
        self._block = block
        self._parts = list(parts_of_block(block))
        self._parameters = {p.name: p for p in block.collect_params().values()}
        self.layers = [layer for _, _, found in self._parts for layer in found]
        known = [layer.parameters["moving_mean"] for layer in self.layers if layer.arrays]
        self.contexts = self._parameters[known[0]].list_ctx() if known else []

    def statistic(self, name: str) -> Callable[[], list[Array]]:
        found = weakref.ref(self._parameters[name])

        def arrays() -> list[Array]:
            parameter: Any = found()
            known = parameter is not None and parameter._data is not None
            return parameter.list_data() if known else []

        return arrays

    @contextmanager
    def watched(self, pools: dict[int, Pool], recorder: Recorder) -> Iterator[Run]:
        with ExitStack() as stack:
            for each in descendants(self._block):
                if isinstance(each, mx.gluon.HybridBlock):
                    # A compiled graph does not call the layers in it.
                    stack.enter_context(_set(each, "_active", False))
            for block, graph, found in self._parts:
                if graph is None:
                    forward = _forward_of_layer(found[0], pools, recorder)
                else:
                    run = _WatchedGraph(graph, found, pools, recorder, graph.heads)
                    forward = _forward_of_imported(block, run)
                stack.enter_context(_set(block, "forward", forward))
            yield lambda names, inputs, context: self._block(*inputs)


class _Checkpoint(_Network):
    def __init__(self, model: Any, contexts: Sequence[mx.Context]) -> None:
        self._model = as_checkpoint(model)
        self._graph = Graph.from_symbol(self._model.symbol)
        self.layers = layers_of_graph(self._graph, *self._model[1:])
        self.contexts = contexts

    def statistic(self, name: str) -> Callable[[], list[Array]]:
        parts = self._model[1:]
        return lambda: [part[name] for part in parts if name in part]

    @contextmanager
    def watched(self, pools: dict[int, Pool], recorder: Recorder) -> Iterator[Run]:
        _, arg_params, aux_params = self._model
        run = _WatchedGraph(self._graph, self.layers, pools, recorder, [])
        weights = {context: _on(context, arg_params) for context in self.contexts}
        yield lambda names, inputs, context: run(
            {**weights[context], **_on(context, aux_params), **dict(zip(names, inputs))}
        )


class _Module(_Checkpoint):
    def __init__(self, module: mx.mod.Module) -> None:
        if not (module.binded and module.params_initialized):
            raise ValueError("mxbn: the Module has no arrays: it must be bound and initialized")
        module._params_dirty = True  # or get_params may leave out what the last forward did
        super().__init__(module, module._context)
        self._module = module

    def statistic(self, name: str) -> Callable[[], list[Array]]:
        found = weakref.ref(self._module)

        def arrays() -> list[Array]:
            module: Any = found()
            if module is None or not module.binded:
                return []
            parts = [module._aux_params, *(each.aux_dict for each in module._exec_group.execs)]
            return [part[name] for part in parts if name in part]

        return arrays


class _WatchedGraph:
    """A graph that also gives what enters its layers, which it changes for that purpose."""

    def __init__(
        self,
        graph: Graph,
        layers: list[Layer],
        pools: dict[int, Pool],
        recorder: Recorder,
        heads: list[Entry],
    ) -> None:
        self._recorder = recorder
        self._layers = [
            (pools[id(layer.source)], layer.attributes.axis)
            for layer in layers
            if id(layer.source) in pools
        ]
        top = {id(node) for node in graph.nodes()}
        for layer in layers:
            if id(layer.source) in pools and id(layer.source) not in top:
                raise ValueError(
                    f"mxbn: layer {layer.name} is in the body of control flow, where nothing can "
                    "be watched"
                )
        for inner, node in list(graph.walk()):
            for layer in layers:
                if layer.source is node:
                    _replace(inner, node, recorder.attributes(layer))
        inputs = [layer.source.inputs[0] for layer in layers if id(layer.source) in pools]
        symbol = Graph([*heads, *inputs], graph.is_numpy).to_symbol()
        self._inputs = symbol.list_inputs()
        self._run = mx.nd.CachedOp(symbol)

    def __call__(self, arrays: dict[str, Array]) -> list[Array]:
        """Run the graph on its inputs and parameters, and return the outputs."""
        missing = [name for name in self._inputs if name not in arrays]
        if missing:
            raise ValueError(
                f"mxbn: the network takes {', '.join(missing)}: neither the data nor the "
                "parameters have it"
            )
        found = self._run(*(arrays[name] for name in self._inputs))
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        count = len(outputs) - len(self._layers)
        for (pool, axis), data in zip(self._layers, outputs[count:]):
            self._recorder.add(pool, data, axis)
        return outputs[:count]


def _replace(graph: Graph, node: Node, attributes: dict[str, Any]) -> None:
    """Make a layer's node one of mxbn's operator with these attributes."""
    if node.op == WITH_RELU:
        relu = Node("relu", f"{node.name}_relu", inputs=[Entry(node)])
        graph.replace(Entry(node), Entry(relu))
    if node.op == SYNC:
        node.inputs = node.inputs[: len(INPUTS)]
    kept = {key: node.attrs[key] for key in ("output_mean_var",) if key in node.attrs}
    node.op = MXBN
    node.attrs = {**kept, **{name: str(value) for name, value in attributes.items()}}


def _forward_of_layer(layer: Layer, pools: dict[int, Pool], recorder: Recorder) -> Any:
    block, attributes = layer.source, recorder.attributes(layer)
    parameters = (block.gamma, block.beta, block.running_mean, block.running_var)

    def forward(data: Array, *addend: Array) -> Array:
        if id(block) in pools:
            recorder.add(pools[id(block)], data, layer.attributes.axis)
        inputs = (data, *(p.data(data.ctx) for p in parameters))
        output = nd.BatchNorm(*inputs, addend=addend[0] if addend else None, **attributes)
        # In NumPy mode MXNet's layer leaves the ReLU out.
        is_relu = layer.op == WITH_RELU and not isinstance(data, mx.np.ndarray)
        return output.relu() if is_relu else output

    return forward


def _forward_of_imported(block: mx.gluon.SymbolBlock, run: _WatchedGraph) -> Any:
    names = [symbol.name for symbol in block._cached_graph[0]]
    parameters = block.collect_params().values()

    def forward(*inputs: Any) -> Any:
        given = [each for each in _flatten(inputs, "input")[0] if each is not None]
        arrays = {p.name: p.data(given[0].ctx) for p in parameters}
        return _regroup(run({**arrays, **dict(zip(names, given))}), block._out_format)

    return forward


def _on(context: mx.Context, arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: array.as_in_context(context) for name, array in arrays.items()}


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute, hidden from its class, inside a ``with`` block."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)
