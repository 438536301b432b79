"""What BatchNorm does in each of its modes, observed on a layer of a trained network."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np

import mxbn

from .networks import ATTRIBUTES

# Results nearer than this are taken for the same. Rounding to float32 stays far below, and the
# statistics of the batch give results that are farther than this from those of the moving ones.
SAME = 1e-4

Array = Any


class Inputs(NamedTuple):
    """What reaches a BatchNorm layer, what it holds, and the gradient of its output."""

    layer: str
    data: mx.nd.NDArray
    gamma: mx.nd.NDArray
    beta: mx.nd.NDArray
    moving_mean: mx.nd.NDArray
    moving_var: mx.nd.NDArray
    head_gradient: mx.nd.NDArray


@dataclass
class Mode:
    """How BatchNorm is called; `backward_is_train` is the flag `train_mode` of ``backward``."""

    use_global_stats: bool
    use_batch_stats: bool
    is_train: bool
    backward_is_train: bool


MODES = (
    Mode(False, False, True, True),
    Mode(False, False, True, False),
    Mode(False, False, False, True),
    Mode(False, False, False, False),
    Mode(True, False, True, True),
    Mode(True, False, False, True),
    Mode(False, True, True, True),
    Mode(False, True, False, True),
)


@dataclass
class Observation:
    """What one operator did.

    Attributes
    ----------
    output_of, gradient_of : str
        The statistics whose float64 output and data gradient are the ones that came out:
        ``'batch'``, ``'moving'`` or ``'neither'``.
    stepped_in : list of str
        Where the moving statistics changed: ``'forward'``, ``'backward'``.
    difference : dict of str to float
        For the output, the gradients and the moving statistics afterwards: the largest difference
        from the right value, divided by the largest right value.
    """

    output_of: str
    gradient_of: str
    stepped_in: list[str]
    difference: dict[str, float]


@dataclass
class Row:
    """A mode, and what mxbn and the built-in operator (which lacks use_batch_stats) did in it."""

    mode: Mode
    mxbn: Observation
    built_in: Observation | None


def inputs_of_layer(net: mx.gluon.nn.HybridSequential, images: Array, labels: Array) -> Inputs:
    """Get what reaches the last BatchNorm layer of a network.

    Parameters
    ----------
    net : mx.gluon.nn.HybridSequential
        The trained network.
    images, labels : numpy.ndarray
        A batch of test digits.

    Returns
    -------
    Inputs
        In inference, with the gradient of the scores of the right labels, as for a map of the
        pixels that the network looks at.
    """
    *_, position = (i for i, each in enumerate(net) if isinstance(each, mxbn.gluon.BatchNorm))
    layer = net[position]
    data = net[:position](mx.nd.array(images))
    output = layer(data)
    output.attach_grad()
    # Nothing after the last BatchNorm depends on the mode, but MaxPool of MXNet 1.9.1 only has a
    # right gradient if recorded in training.
    with mx.autograd.record():
        scores = mx.nd.pick(net[position + 1 :](output), mx.nd.array(labels))
    scores.backward()
    return Inputs(
        layer.name,
        data,
        gamma=layer.gamma.data(),
        beta=layer.beta.data(),
        moving_mean=layer.running_mean.data(),
        moving_var=layer.running_var.data(),
        head_gradient=output.grad,
    )


def table(inputs: Inputs) -> list[Row]:
    """Call mxbn's and the built-in BatchNorm in every mode.

    Parameters
    ----------
    inputs : Inputs
        What to call them with.

    Returns
    -------
    list of Row
        One for each of `MODES`.
    """
    return [
        Row(
            mode,
            _observe(_mxbn, inputs, mode),
            None if mode.use_batch_stats else _observe(_built_in, inputs, mode),
        )
        for mode in MODES
    ]


def refusal(inputs: Inputs) -> str | None:
    """Call mxbn's BatchNorm with both flags set.

    Parameters
    ----------
    inputs : Inputs
        What to call it with.

    Returns
    -------
    str or None
        The ValueError it raised, in training and in inference; None if it did not.
    """
    _, *arrays, _ = inputs
    message = None
    for is_train in (True, False):
        try:
            with mx.autograd.record(train_mode=is_train):
                _mxbn(*arrays, mode=Mode(True, True, is_train, True))
        except ValueError as error:
            message = f"ValueError: {error}"
        else:
            return None
    return message


def _mxbn(*arrays: mx.nd.NDArray, mode: Mode) -> mx.nd.NDArray:
    return mxbn.nd.BatchNorm(
        *arrays,
        use_global_stats=mode.use_global_stats,
        use_batch_stats=mode.use_batch_stats,
        **ATTRIBUTES,
    )


def _built_in(*arrays: mx.nd.NDArray, mode: Mode) -> mx.nd.NDArray:
    return mx.nd.BatchNorm(*arrays, use_global_stats=mode.use_global_stats, **ATTRIBUTES)


def _observe(operator: Callable[..., mx.nd.NDArray], inputs: Inputs, mode: Mode) -> Observation:
    _, *arrays, head_gradient = inputs
    data, gamma, beta, *statistics = (each.copy() for each in arrays)
    for each in (data, gamma, beta):
        each.attach_grad()
    before = _read(statistics)
    with mx.autograd.record(train_mode=mode.is_train):
        output = operator(data, gamma, beta, *statistics, mode=mode)
    after_forward = _read(statistics)
    output.backward(head_gradient, train_mode=mode.backward_is_train)
    after = _read(statistics)

    got = {
        "output": output.asnumpy(),
        "data_gradient": data.grad.asnumpy(),
        "gamma_gradient": gamma.grad.asnumpy(),
        "beta_gradient": beta.grad.asnumpy(),
        **after,
    }
    right = _right(inputs, mode)
    batch = _right(inputs, Mode(False, True, False, True))
    moving = _right(inputs, Mode(True, False, False, True))
    return Observation(
        _which("output", got, batch=batch, moving=moving),
        _which("data_gradient", got, batch=batch, moving=moving),
        [
            name
            for name, old, new in (
                ("forward", before, after_forward),
                ("backward", after_forward, after),
            )
            if any((old[key] != new[key]).any() for key in old)
        ],
        {key: _difference(got[key], right[key]) for key in right},
    )


def _read(statistics: list[mx.nd.NDArray]) -> dict[str, Array]:
    mx.nd.waitall()  # MXNet does not tell its engine that an operator writes them
    return {key: each.asnumpy() for key, each in zip(("moving_mean", "moving_var"), statistics)}


def _right(inputs: Inputs, mode: Mode) -> dict[str, Array]:
    """Compute in float64 what a mode should give."""
    data, gamma, *others, head_gradient = (each.asnumpy() for each in inputs[1:])
    kept = mxbn.reference.forward(
        data,
        gamma,
        *others,
        is_train=mode.is_train,
        use_global_stats=mode.use_global_stats,
        use_batch_stats=mode.use_batch_stats,
        **ATTRIBUTES,
    )
    gradients = mxbn.reference.backward(
        head_gradient, data, gamma, kept, fix_gamma=ATTRIBUTES["fix_gamma"]
    )
    return {
        "output": kept.output,
        **dict(zip(("data_gradient", "gamma_gradient", "beta_gradient"), gradients)),
        "moving_mean": kept.moving_mean,
        "moving_var": kept.moving_var,
    }


def _which(key: str, got: dict[str, Array], **candidates: dict[str, Array]) -> str:
    """Name the candidate that has the value that came out."""
    names = [
        name for name, values in candidates.items() if _difference(got[key], values[key]) < SAME
    ]
    return " and ".join(names) or "neither"


def _difference(got: Array, right: Array) -> float:
    found = float(np.abs(got - right).max() / np.abs(right).max())
    return found if np.isfinite(found) else sys.float_info.max  # which JSON can hold
