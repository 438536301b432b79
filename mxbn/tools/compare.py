"""The outputs of a model in inference mode, to compare with those of a changed one."""

from __future__ import annotations

import math
from typing import Any, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon.block import _flatten

from .checkpoint import Checkpoint
from .layers import layers_of_block
from .params_file import last_line

_UNITS = 16  # of rounding; what several layers differ by adds up like random steps


def complete(model: Checkpoint, data: dict[str, Any]) -> dict[str, Any]:
    """Return an array for each input of a Symbol.

    Parameters
    ----------
    model : Checkpoint
        Whose arrays are taken.
    data : dict of str to (mx.nd.NDArray or tuple of int)
        Further arrays, or shapes of random ones. What then is missing is random too, of the type
        with the fewest digits among the arrays.

    Returns
    -------
    dict of str to mx.nd.NDArray

    Raises
    ------
    ValueError
        If a shape is not given and cannot be inferred, if the shapes do not fit, or if the Symbol
        has no such argument.
    """
    symbol = model.symbol
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    for name in data:
        if name not in arguments:
            raise ValueError(
                f"mxbn: data is given for {name}, expected one of {', '.join(arguments)}"
            )
    arrays = {**model.arg_params, **model.aux_params}
    arrays.update({name: each for name, each in data.items() if not isinstance(each, tuple)})
    shapes = {name: array.shape for name, array in arrays.items() if name in arguments}
    shapes.update({name: each for name, each in data.items() if isinstance(each, tuple)})
    try:
        argument_shapes, _, state_shapes = symbol.infer_shape_partial(**shapes)
    except mx.base.MXNetError as error:
        raise ValueError(f"mxbn: the shapes do not fit: {last_line(error)}") from error
    random = np.random.RandomState(0)
    context = next((array.context for array in arrays.values()), mx.current_context())
    dtype = _coarsest(array.dtype for array in arrays.values())
    for name, shape in zip(arguments + states, argument_shapes + state_shapes):
        if name in arrays:
            if shape and 0 not in shape and arrays[name].shape != shape:
                # The built-in operator would read beyond its end.
                raise ValueError(f"mxbn: {name} has shape {arrays[name].shape}, expected {shape}")
            continue
        if not shape or 0 in shape:
            raise ValueError(f"mxbn: the shape of {name} is not known")
        if name in data:
            values = random.standard_normal(shape)
        else:  # positive, as a variance must be, and a sum over them stays near 1
            values = random.uniform(0.5, 1.5, shape) / math.prod(shape[1:])
        arrays[name] = mx.nd.array(values, context, dtype)
    return {name: arrays[name] for name in arguments + states}


def outputs_of_symbol(symbol: mx.sym.Symbol, arrays: dict[str, Any]) -> list[Any]:
    """Run a Symbol in inference mode.

    Parameters
    ----------
    symbol : mx.sym.Symbol
    arrays : dict of str to mx.nd.NDArray
        Its arguments and auxiliary states; copies are used, since on a GPU the built-in
        BatchNorm overwrites gamma.

    Returns
    -------
    list of np.ndarray

    Raises
    ------
    ValueError
        If it does not run.
    """
    try:
        # Unlike an executor, it neither fuses operators nor reports on standard error.
        run = mx.nd.CachedOp(symbol)
        with mx.autograd.pause(train_mode=False):
            outputs = run(*[arrays[name].copy() for name in symbol.list_inputs()])
        return [each.asnumpy() for each in (outputs if isinstance(outputs, list) else [outputs])]
    except mx.base.MXNetError as error:
        raise ValueError(f"mxbn: the model does not run: {last_line(error)}") from error


def outputs_of_block(block: mx.gluon.Block, data: dict[str, Any]) -> list[Any]:
    """Run a block in inference mode; parameters and errors as of `outputs_of_symbol`.

    The values of `data`, in their order, are the arguments; a tuple is the shape of a random one.
    """
    parameters = block.collect_params()
    for parameter in parameters.values():
        if parameter._data is None:
            raise ValueError(
                f"mxbn: {parameter.name} is not initialized, expected a block that can run: "
                "initialize it and call it once, or give no data"
            )
    random = np.random.RandomState(0)
    context = next((p.list_ctx()[0] for p in parameters.values()), mx.current_context())
    dtype = _coarsest(p.dtype for p in parameters.values())
    inputs = [
        mx.nd.array(random.standard_normal(each), context, dtype)
        if isinstance(each, tuple)
        else each
        for each in data.values()
    ]
    fixed = {
        each.parameters["gamma"] for each in layers_of_block(block) if each.attributes.fix_gamma
    }
    kept = [(a, a.copy()) for name in fixed for a in parameters[name].list_data()]
    try:
        with mx.autograd.pause(train_mode=False):
            outputs, _ = _flatten(block(*inputs), "output")
        return [each.asnumpy() for each in outputs]
    except mx.base.MXNetError as error:
        raise ValueError(f"mxbn: the model does not run: {last_line(error)}") from error
    finally:
        for array, copy in kept:  # the built-in BatchNorm overwrites them
            copy.copyto(array)
        mx.nd.waitall()


def compare(
    before: Sequence[Any], after: Sequence[Any], names: Sequence[str], tolerance: float
) -> float:
    """Return the largest difference of arrays, relative to the largest value of the array.

    Parameters
    ----------
    before, after : sequence of np.ndarray
    names : sequence of str
        What they are, for the error.
    tolerance : float
        The largest difference allowed.

    Raises
    ------
    ValueError
        If one differs by more, or is not finite in other places.
    """
    worst = 0.0
    for name, old, new in zip(names, before, after):
        finite = np.isfinite(old)
        if old.shape != new.shape or not np.array_equal(finite, np.isfinite(new)):
            raise ValueError(f"mxbn: {name} would no longer be finite in the same places")
        old, new = old[finite].astype("float64"), new[finite].astype("float64")
        largest = np.abs(old - new).max(initial=0.0)
        scale = max(np.abs(old).max(initial=0.0), np.finfo("float64").tiny)
        if largest > tolerance * scale:
            raise ValueError(
                f"mxbn: {name} would differ by {largest / scale:.1e} of its largest value, "
                f"expected at most {tolerance:.1e}: nothing was changed (tolerance sets another "
                "bound)"
            )
        worst = max(worst, float(largest / scale))
    return worst


def rounding(types: Iterable[Any], layers: int) -> float:
    """Return how much outputs may differ, relative to the largest value.

    Parameters
    ----------
    types : iterable of NumPy types
        Of what is computed; the one with the fewest digits counts.
    layers : int
        How many layers are computed otherwise.
    """
    return float(_UNITS * math.sqrt(1 + layers) * np.finfo(_coarsest(types)).eps)


def _coarsest(types: Iterable[Any]) -> Any:
    floating = [np.dtype(each) for each in types if each and np.dtype(each).kind == "f"]
    return max(floating, key=lambda each: np.finfo(each).eps, default=np.dtype("float32"))
