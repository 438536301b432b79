"""What a BatchNorm layer does in a mode, and why."""

from __future__ import annotations

from typing import NamedTuple

from .layers import Layer
from .operators import CONTRIB_SYNC, OURS, WITH_RELU

BATCH, MOVING = "batch", "moving"
IN_FORWARD, IN_BACKWARD, NEVER = "in forward", "in backward", "no"


class Behaviour(NamedTuple):
    """What a layer does.

    Attributes
    ----------
    statistics : {'batch', 'moving'}
        Those it normalizes with.
    steps : {'in forward', 'in backward', 'no'}
        When the moving statistics step.
    why : str
        The reason of both, in one sentence.
    gradient : str
        Which gradient comes back, in one sentence.
    """

    statistics: str
    steps: str
    why: str
    gradient: str


def behaviour(layer: Layer, for_training: bool, is_train: bool, is_folded: bool) -> Behaviour:
    """Return what a layer does.

    Parameters
    ----------
    layer : Layer
    for_training : bool
        Whether gradients are asked for (``bind(for_training)``, `autograd.record`).
    is_train : bool
        What a forward is told (``forward(is_train)``, ``record(train_mode)``).
    is_folded : bool
        Whether the convolution before it takes the layer in, as `onednn.folds` tells.
    """
    if is_folded:
        return Behaviour(
            MOVING,
            NEVER,
            "bound without gradients, oneDNN folds it into the convolution before it, and is_train "
            "no longer counts",
            "none: there is no backward",
        )
    statistics, steps, why = (_of_mxbn if layer.op in OURS else _of_builtin)(
        layer, for_training, is_train
    )
    if steps != NEVER and layer.attributes.momentum == 1:
        steps, why = NEVER, f"{why}; but a step with momentum 1 changes nothing"
    gradient = "none: there is no backward"
    if for_training:
        gradient = _gradient(layer, statistics, is_train)
    return Behaviour(statistics, steps, why, gradient)


def _of_mxbn(layer: Layer, for_training: bool, is_train: bool) -> tuple[str, str, str]:
    attributes = layer.attributes
    if attributes.use_global_stats and attributes.step_global_stats and is_train:
        why = "use_global_stats takes the moving statistics, and step_global_stats steps them"
        return MOVING, IN_FORWARD, why
    if attributes.use_global_stats:
        return MOVING, NEVER, "use_global_stats takes the moving statistics, also in training"
    if attributes.use_batch_stats and not is_train:
        return BATCH, NEVER, "use_batch_stats takes those of the batch, also in inference"
    if is_train:
        return BATCH, IN_FORWARD, "is_train=True takes the batch, and each forward is one step"
    return MOVING, NEVER, "is_train=False takes the moving statistics and leaves them as they are"


def _of_builtin(layer: Layer, for_training: bool, is_train: bool) -> tuple[str, str, str]:
    if layer.attributes.use_global_stats or not is_train:
        found = _of_mxbn(layer, for_training, is_train)
        if layer.op == CONTRIB_SYNC and for_training and not layer.attributes.use_global_stats:
            why = "is_train=False takes the moving statistics, but a plain backward() spoils them"
            return MOVING, IN_BACKWARD, why
        return found
    if for_training:
        return (
            BATCH,
            IN_BACKWARD,
            "is_train=True takes the batch, and MXNet steps once per backward, not in forward "
            "(with cuDNN in forward)",
        )
    return (
        BATCH,
        NEVER,
        "is_train=True takes the batch, but there is no backward, in which MXNet steps (with cuDNN "
        "it steps in forward)",
    )


def _gradient(layer: Layer, statistics: str, is_train: bool) -> str:
    if layer.op in OURS:
        if statistics == BATCH:
            return "through the batch's statistics, whatever mode backward is called in"
        return "dy * gamma / sqrt(moving_var + eps), whatever mode backward is called in"
    if layer.op == WITH_RELU and not is_train:
        return "wrong after a forward in inference: the ReLU's part is missing"
    if layer.attributes.use_global_stats:
        return "dy * gamma / sqrt(moving_var + eps)"
    if statistics == BATCH:
        return (
            "through the batch's statistics after a plain backward(); "
            "wrong after backward(train_mode=False)"
        )
    return (
        "that of neither mode, wrong, after a plain backward(); "
        "dy * gamma / sqrt(moving_var + eps) after backward(train_mode=False)"
    )
