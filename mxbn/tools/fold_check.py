"""How far the outputs of a folded model are from those before, and how far rounding explains."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .checkpoint import Checkpoint
from .compare import outputs_of_symbol
from .graph import Entry, Graph, Node
from .params_file import last_line

Array = Any
# What comes before these is compared too: they may give 0 and 1 whatever a network computes.
_SQUASHING = (
    "SoftmaxOutput",
    "SoftmaxActivation",
    "softmax",
    "log_softmax",
    "LogisticRegressionOutput",
    "sigmoid",
    "tanh",
)
_FLOATS = ("float32", "float16", "float64")
# The model before is also run with its inputs, and the parameters that folding works into others,
# off by one unit of rounding, up or down at random. Folding rounds about as often, so the outputs
# should differ by no more; but a single number may be near in all trials by chance. If the
# differences are normal, one in 5000 exceeds MARGIN times the largest of TRIALS.
TRIALS = 3
MARGIN = 16


class Difference(NamedTuple):
    """How far an output is from that of the model before.

    Attributes
    ----------
    output : str
        Its name before; also of what an output like a softmax is computed from.
    absolute, relative : float
        The largest difference, and the same divided by the output's largest value.
    bound : float
        The largest absolute difference that rounding explains.
    """

    output: str
    absolute: float
    relative: float
    bound: float


def sample(
    checkpoint: Checkpoint, data: dict[str, Array], shapes: dict[str, Sequence[int]]
) -> dict[str, Array]:
    """Return values for the inputs of a model: those given, 0 for labels, else random ones.

    Parameters
    ----------
    checkpoint : Checkpoint
    data, shapes : dict
        Values by name, and shapes of other inputs.

    Returns
    -------
    dict of str to numpy.ndarray

    Raises
    ------
    ValueError
        If a shape is missing, something does not fit, or there is no such input.
    """
    arrays = {**checkpoint.arg_params, **checkpoint.aux_params}
    arguments = checkpoint.symbol.list_arguments()
    names = [name for name in arguments if name not in arrays]
    for name in (*data, *shapes):
        if name not in names:
            raise ValueError(f"the model has no input {name}, expected one of {', '.join(names)}")
    for name in names:
        if not (name in data or name in shapes or name.endswith("label")):
            raise ValueError(
                f"{name} has no value; if it is an input, give its shape "
                f"(--shape {name}=1,3,224,224, say)"
            )
    values = {name: _numpy(value) for name, value in data.items()}
    known = {name: tuple(shape) for name, shape in shapes.items()}
    known.update({name: each.shape for name, each in values.items()})
    checkpoint.check(**known)
    known.update({name: array.shape for name, array in arrays.items()})
    found, _, _ = checkpoint.symbol.infer_shape_partial(**_of(arguments, known))
    types = _input_types(checkpoint.symbol, arrays, names, values)
    random = np.random.RandomState(0)
    for name, shape in zip(arguments, found):
        if name in names and name not in values:
            if not shape or 0 in shape:
                raise ValueError(f"the shape of {name} does not follow from those of the inputs")
            values[name] = (random.standard_normal if name in shapes else np.zeros)(shape)
    return {name: values[name].astype(types[name]) for name in names}


def shapes_and_types(
    symbol: mx.sym.Symbol, arrays: dict[str, Array]
) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and type of each output, for parameters and inputs that are all given."""
    arrays = _of(symbol.list_arguments(), arrays)
    _, shapes, _ = symbol.infer_shape_partial(**{name: a.shape for name, a in arrays.items()})
    _, types, _ = symbol.infer_type_partial(**{name: a.dtype for name, a in arrays.items()})
    return [(tuple(shape), np.dtype(each)) for shape, each in zip(shapes, types)]


def differences(
    before: Checkpoint, after: Checkpoint, inputs: dict[str, Array], units: dict[str, float]
) -> list[Difference]:
    """Compare the outputs of two models in inference mode, on the CPU.

    Parameters
    ----------
    before, after : Checkpoint
    inputs : dict of str to numpy.ndarray
        As `sample` returns them.
    units : dict of str to float
        The relative unit of rounding of each parameter that was worked into another.

    Returns
    -------
    list of Difference
        One for each output, then those of what comes before a softmax or the like.
    """
    old, new = (_for_cpu(model.symbol) for model in (before, after))
    arrays = {**_values(before), **inputs}
    right = _outputs(old, arrays)
    found = [_largest(a, b) for a, b in zip(right, _outputs(new, {**_values(after), **inputs}))]
    units = {**units, **{n: _unit(x.dtype) for n, x in inputs.items() if (x != np.rint(x)).any()}}
    random = np.random.RandomState(0)
    explained = [0.0] * len(right)
    for _ in range(TRIALS):
        trial = _outputs(old, _off_by_units(arrays, units, random))
        explained = [max(most, _largest(a, b)) for most, a, b in zip(explained, right, trial)]
    result = []
    for name, output, absolute, most in zip(old.list_outputs(), right, found, explained):
        size = float(np.abs(output[np.isfinite(output)]).max(initial=0))
        bound = MARGIN * (most + _unit(output.dtype) * size)
        result.append(Difference(name, absolute, absolute / size if size else absolute, bound))
    return result


def _for_cpu(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a Symbol that computes the same, and also gives what comes before a softmax.

    On the CPU, MXNet has no convolution of float16, which becomes float32, and none with the
    channels last.
    """
    graph = Graph.from_symbol(symbol)
    last = [head.node for head in graph.heads]
    graph.heads += [node.inputs[0] for node in last if node.op in _SQUASHING]
    for _, node in list(graph.walk()):
        if node.attrs.get("dtype") == "float16":
            node.attrs["dtype"] = "float32"
        if node.attrs.get("layout") in ("NHWC", "NDHWC") and node.op.endswith("onvolution"):
            _put_channels_in_front(node)
    for node in graph.nodes():
        node.attrs.pop("__dtype__", None)
    return graph.to_symbol()


def _outputs(symbol: mx.sym.Symbol, arrays: dict[str, Array]) -> list[Array]:
    return outputs_of_symbol(
        symbol, {name: mx.nd.array(a, mx.cpu(), _wide(a.dtype)) for name, a in arrays.items()}
    )


def _put_channels_in_front(node: Node) -> None:
    rank = len(node.attrs["layout"])
    attributes = {name: each for name, each in node.attrs.items() if name != "layout"}
    forward = {"axes": str((0, rank - 1, *range(1, rank - 1)))}
    data, weight = (
        Entry(Node("transpose", f"{node.name}_plain{place}", forward, [entry]))
        for place, entry in enumerate(node.inputs[:2])
    )
    plain = Node(node.op, f"{node.name}_plain", attributes, [data, weight, *node.inputs[2:]])
    # The node itself turns the output back, so that what takes its output still finds it there.
    node.op, node.attrs = "transpose", {"axes": str((0, *range(2, rank), 1))}
    node.inputs = [Entry(plain)]


def _off_by_units(
    arrays: dict[str, Array], units: dict[str, float], random: Any
) -> dict[str, Array]:
    changed = dict(arrays)
    for name, unit in units.items():
        old = arrays[name]
        factors = 1 + unit * random.choice([-1, 1], old.shape)
        changed[name] = (old.astype("float64") * factors).astype(_wide(old.dtype))
    return changed


def _largest(right: Array, found: Array) -> float:
    """Return the largest difference; infinite if one of two values is not finite."""
    right, found = right.astype("float64"), found.astype("float64")
    same = (right == found) | (np.isnan(right) & np.isnan(found))
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.where(same, 0, right - found))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def _input_types(
    symbol: mx.sym.Symbol, arrays: dict[str, Any], names: list[str], values: dict[str, Array]
) -> dict[str, Any]:
    """Find out types for the inputs that the model accepts: it cannot be asked."""
    given = _of(symbol.list_arguments(), {name: array.dtype for name, array in arrays.items()})
    own = {name: each.dtype for name, each in values.items()}
    whole = {name: dtype for name, dtype in own.items() if dtype.kind in "iu"}
    for kept in (own, whole, {}):
        for guess in _FLOATS:
            types = {**dict.fromkeys(names, guess), **kept}
            try:
                symbol.infer_type_partial(**given, **types)
                return types
            except mx.base.MXNetError as error:
                problem = last_line(error)
    raise ValueError(f"the types do not fit: {problem}")


def _values(model: Checkpoint) -> dict[str, Array]:
    return {name: a.asnumpy() for name, a in {**model.arg_params, **model.aux_params}.items()}


def _numpy(value: Any) -> Array:
    return value.asnumpy() if isinstance(value, mx.nd.NDArray) else np.asarray(value)


def _of(names: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in values.items() if name in names}


def _unit(dtype: Any) -> float:
    """Return the unit of rounding of a type as it is computed with."""
    return float(np.finfo(_wide(dtype) if np.dtype(dtype).kind == "f" else "float32").eps)


def _wide(dtype: Any) -> Any:
    return "float32" if dtype == "float16" else dtype
