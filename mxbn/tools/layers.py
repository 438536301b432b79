"""The BatchNorm layers of a model, whichever way the model is given."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx

from .._attributes import is_true
from ..gluon import BatchNorm, SyncBatchNorm, descendants
from .checkpoint import Checkpoint
from .graph import VARIABLE, Graph, Node
from .operators import CONTRIB_SYNC, SYNC
from .operators import INPUTS as INPUTS
from .operators import MXBN as MXBN
from .operators import OPERATORS as OPERATORS
from .operators import WITH_RELU as WITH_RELU


class Attributes(NamedTuple):
    """What a layer was made with; the defaults are those of the operators."""

    eps: float = 1e-3
    momentum: float = 0.9
    fix_gamma: bool = True
    use_global_stats: bool = False
    use_batch_stats: bool = False
    axis: int = 1
    step_global_stats: bool = False
    act_type: str = "None"
    with_addend: bool = False

    @property
    def steps(self) -> bool:
        """Whether training steps the moving statistics."""
        return (not self.use_global_stats or self.step_global_stats) and self.momentum != 1

    @property
    def is_relu(self) -> bool:
        """Whether a ReLU is fused into the layer."""
        return self.act_type == "relu"

    @property
    def is_fused(self) -> bool:
        """Whether anything is."""
        return self.is_relu or self.with_addend

    @staticmethod
    def parse(texts: dict[str, Any]) -> Attributes:
        """Read a node's attributes, or a Gluon layer's."""
        kinds = {name: type(value) for name, value in Attributes()._asdict().items()}
        found: dict[str, Any] = {
            name: is_true(texts[name]) if kind is bool else kind(texts[name])
            for name, kind in kinds.items()
            if name in texts
        }
        return Attributes(**found)


class Layer(NamedTuple):
    """A BatchNorm in a model.

    Attributes
    ----------
    name : str
        Of the node, or of the Gluon layer.
    op : str
        One of `OPERATORS`.
    attributes : Attributes
    parameters : dict of str to str
        The names of gamma, beta, moving_mean and moving_var; one that is computed has none.
    arrays : dict of str to mx.nd.NDArray
        Their values, where the model has them.
    source : Node or mx.gluon.Block
        Where it was found.
    in_body : bool
        Whether that is the body of a control flow operator.
    """

    name: str
    op: str
    attributes: Attributes
    parameters: dict[str, str]
    arrays: dict[str, Any]
    source: Any
    in_body: bool = False


def as_checkpoint(model: Any, inputs: Sequence[str] = ("data",)) -> Checkpoint:
    """Return the Symbol, parameters and auxiliary states of a model.

    Parameters
    ----------
    model : Checkpoint, (Symbol, dict, dict), mx.mod.Module or mx.gluon.HybridBlock
        A block must have been initialized, and its parameters' shapes be known.
    inputs : sequence of str, default ('data',)
        Names for the inputs of a block.

    Returns
    -------
    Checkpoint
        With the model's own arrays; those of a block are from its first context.

    Raises
    ------
    TypeError
        If it is none of these, or a block that cannot become a Symbol.
    ValueError
        If it has no parameters yet.
    """
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, tuple) and len(model) == 3 and isinstance(model[0], mx.sym.Symbol):
        return Checkpoint(*model)
    if isinstance(model, mx.mod.Module):
        return _checkpoint_of_module(model)
    if isinstance(model, mx.gluon.HybridBlock):
        _, symbol = trace(model, inputs)
        if isinstance(symbol, (list, tuple)):
            symbol = mx.sym.Group(list(symbol))
        mx.nd.waitall()
        parameters = {p.name: p for p in model.collect_params().values()}
        wanted = {
            kind: {n: _initialized(parameters[n]) for n in found if n in parameters}
            for kind, found in (
                ("arg", symbol.list_arguments()),
                ("aux", symbol.list_auxiliary_states()),
            )
        }
        return Checkpoint(symbol, wanted["arg"], wanted["aux"])
    raise TypeError(
        f"mxbn: a model of type {type(model).__name__} was given, expected a Checkpoint, a tuple "
        "(Symbol, arg_params, aux_params), a Module or a HybridBlock"
    )


def trace(block: mx.gluon.HybridBlock, inputs: Sequence[str]) -> tuple[list[Any], Any]:
    """Return variables with these names, and what a block makes of them."""
    variables = [mx.sym.var(name) for name in inputs]
    if mx.util.is_np_array():
        variables = [each.as_np_ndarray() for each in variables]
    return variables, block(*variables)


def layers_of_graph(
    graph: Graph, arg_params: dict[str, Any], aux_params: dict[str, Any]
) -> list[Layer]:
    """Return the BatchNorm layers of a graph, in the order of computation."""
    arrays = {**arg_params, **aux_params}
    return [
        _layer_of_node(node, arrays)._replace(in_body=part is not graph)
        for part, node in graph.walk()
        if node.op in OPERATORS
    ]


def layers_of_block(block: mx.gluon.Block) -> list[Layer]:
    """Return the BatchNorm layers of a Gluon block, also those inside of imported ones."""
    mx.nd.waitall()
    return [layer for _, _, found in parts_of_block(block) for layer in found]


def parts_of_block(
    block: mx.gluon.Block,
) -> Iterator[tuple[mx.gluon.Block, Graph | None, list[Layer]]]:
    """Yield what holds the BatchNorm layers of a Gluon block.

    Yields
    ------
    (mx.gluon.Block, Graph or None, list of Layer)
        A layer, no graph, and the layer alone; or an imported block, its graph, and the layers in
        that graph.
    """
    for each in {id(each): each for each in descendants(block)}.values():
        if isinstance(each, (mx.gluon.nn.BatchNorm, mx.gluon.nn.BatchNormReLU)):
            yield each, None, [_layer_of_block(each)]
        elif isinstance(each, mx.gluon.SymbolBlock):
            graph = Graph.from_symbol(each._cached_graph[1])
            arrays = {p.name: _value(p) for p in each.collect_params().values()}
            known = {name: value for name, value in arrays.items() if value is not None}
            yield each, graph, layers_of_graph(graph, known, {})


def choose(found: Sequence[Layer], names: str | Sequence[str] | None) -> list[Layer]:
    """Return the layers with one of the names, which may be patterns like ``stage1_*``.

    Parameters
    ----------
    found : sequence of Layer
    names : str or sequence of str, optional
        All layers by default.

    Raises
    ------
    ValueError
        If there is no layer, or none of a name.
    """
    names = "*" if names is None else names
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not any(fnmatchcase(layer.name, pattern) for layer in found):
            there = ", ".join(dict.fromkeys(layer.name for layer in found))
            raise ValueError(
                f"mxbn: no BatchNorm layer is named {pattern}, there are: {there}"
                if found
                else "mxbn: the model has no BatchNorm layer"
            )
    return [each for each in found if any(fnmatchcase(each.name, p) for p in patterns)]


def layers(model: Any, inputs: Sequence[str] = ("data",)) -> list[Layer]:
    """Return the BatchNorm layers of a model; parameters as of `as_checkpoint`, or any block."""
    if isinstance(model, mx.gluon.Block):
        return layers_of_block(model)
    symbol, arg_params, aux_params = as_checkpoint(model, inputs)
    return layers_of_graph(Graph.from_symbol(symbol), arg_params, aux_params)


def _layer_of_node(node: Node, arrays: dict[str, Any]) -> Layer:
    variables = {
        role: entry.node.name
        for role, entry in zip(INPUTS[1:], node.inputs[1:])
        if entry.node.op == VARIABLE
    }
    known = {role: arrays[name] for role, name in variables.items() if name in arrays}
    return Layer(node.name, node.op, Attributes.parse(node.attrs), variables, known, node)


def parameters_of(block: Any) -> dict[str, Any]:
    """Return the parameters of a Gluon layer by the names of the operator's inputs."""
    return {
        "gamma": block.gamma,
        "beta": block.beta,
        "moving_mean": block.running_mean,
        "moving_var": block.running_var,
    }


def _layer_of_block(block: Any) -> Layer:
    parameters = parameters_of(block)
    arrays = {role: _value(p) for role, p in parameters.items()}
    return Layer(
        block.name,
        _operator_of(block),
        Attributes.parse({**block._kwargs, **getattr(block, "_fused", {})}),
        {role: p.name for role, p in parameters.items()},
        {role: value for role, value in arrays.items() if value is not None},
        block,
    )


def _operator_of(block: Any) -> str:
    if isinstance(block, SyncBatchNorm):
        return SYNC
    if isinstance(block, BatchNorm):
        return MXBN
    if isinstance(block, mx.gluon.nn.BatchNormReLU):
        return WITH_RELU
    if isinstance(block, mx.gluon.contrib.nn.SyncBatchNorm):
        return CONTRIB_SYNC
    return "BatchNorm"


def _checkpoint_of_module(module: mx.mod.Module) -> Checkpoint:
    if not module.params_initialized:
        raise ValueError("mxbn: the Module has no parameters: initialize it or load them")
    mx.nd.waitall()
    if not module.binded:
        return Checkpoint(module.symbol, module._arg_params, module._aux_params)
    module._params_dirty = True  # get_params may otherwise leave out what the last forward did
    return Checkpoint(module.symbol, *module.get_params())


def _initialized(parameter: Any) -> Any:
    value = _value(parameter)
    if value is None:
        raise ValueError(
            f"mxbn: parameter {parameter.name} has no values yet: initialize the network, and run "
            "it once if it does not know its shapes"
        )
    return value


def _value(parameter: Any) -> Any:
    return None if parameter._data is None else parameter.list_data()[0]
