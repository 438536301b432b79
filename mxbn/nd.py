"""The operator on NDArrays."""

from __future__ import annotations

import os
import threading
from typing import Any

import mxnet as mx
from mxnet.ndarray.register import _imperative_invoke

from . import _library, _sync
from ._attributes import INPUTS, is_true, name_positional, settle_fused
from ._errors import PREFIX, as_value_error

# MXNet's engine enters an operation into the queues of its arrays one by one. Two threads that do
# so for operations that write the same two arrays, as moving_mean and moving_var of one layer, can
# leave each waiting for the other.
_one_at_a_time = threading.Lock()
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


def _alike(arrays: Any) -> bool:
    """Whether all are dense arrays of one kind."""
    kind = type(arrays[0])
    return kind in (mx.nd.NDArray, mx.np.ndarray) and all(type(array) is kind for array in arrays)


def _check_inputs(arrays: Any) -> None:
    """Refuse what MXNet would not, or would only when the operator has started."""
    data = arrays[0]
    for name, array in zip(INPUTS, arrays):
        if not isinstance(array, mx.nd.NDArray):
            raise ValueError(
                f"{PREFIX}{name} is a {type(array).__name__}, expected an mx.nd.NDArray or "
                "mx.np.ndarray"
            )
        if isinstance(array, mx.np.ndarray) != isinstance(data, mx.np.ndarray):
            raise ValueError(
                f"{PREFIX}{name} is an {type(array).__name__}, expected an {type(data).__name__} "
                "like data: the two kinds do not mix"
            )
        if array.ctx != data.ctx:
            raise ValueError(
                f"{PREFIX}{name} is on {array.ctx}, expected {data.ctx}, where data is"
            )
        shape = array.shape
        if (not shape or 0 in shape) and not mx.util.is_np_shape():
            raise ValueError(
                f"{PREFIX}{name} has shape {shape}, expected "
                + (
                    "a known one"
                    if name in ("data", "addend")
                    else f"one value per channel of data {data.shape}"
                )
                + ": a size of 0 means an unknown one, unless mx.util.np_shape() is in force"
            )


def _check_out(out: Any, data: Any, gamma: Any, output_mean_var: bool) -> None:
    """Refuse arrays that the outputs do not fit into."""
    names = ("output", "mean", "var") if output_mean_var else ("output",)
    arrays = list(out) if isinstance(out, (list, tuple)) else [out]
    if len(arrays) != len(names):
        raise ValueError(
            f"{PREFIX}out has {len(arrays)} arrays, expected {len(names)}: {', '.join(names)}"
        )
    for name, array, like in zip(names, arrays, (data, gamma, gamma)):
        what = f"{PREFIX}out for {name}"
        if not isinstance(array, type(data)):
            raise ValueError(
                f"{what} is an {type(array).__name__}, expected an {type(data).__name__}"
            )
        for property_of in ("shape", "dtype", "ctx", "stype"):
            found, expected = getattr(array, property_of), getattr(like, property_of)
            if found != expected:
                raise ValueError(f"{what} has {property_of} {found}, expected {expected}")


def BatchNorm(
    data: Any,
    gamma: Any,
    beta: Any,
    moving_mean: Any,
    moving_var: Any,
    *positional: Any,
    addend: Any = None,
    name: Any = None,
    out: Any = None,
    **attributes: Any,
) -> Any:
    r"""Batch normalization of NDArrays.

    For every channel, ``(data - m) / sqrt(v + eps) * gamma + beta`` [1]_, where ``m`` and ``v`` are
    the mean and biased variance of the batch, or the moving ones. In the same pass over memory an
    addend may be added, such as the other branch of a residual block, and then a ReLU be applied.

    ================ =============== ========== =============== =========================
    use_global_stats use_batch_stats is_train   statistics used moving statistics
    ================ =============== ========== =============== =========================
    False            False           True       batch           step once, in this forward
    False            False           False      moving          unchanged
    True             False           any        moving          unchanged
    False            True            True       batch           step once, in this forward
    False            True            False      batch           unchanged
    ================ =============== ========== =============== =========================

    With ``step_global_stats``, the third row too steps once where ``is_train`` is True.
    ``is_train`` is ``mx.autograd.is_training()``. The step is
    ``moving = momentum * moving + (1 - momentum) * batch``. A channel whose batch mean or variance
    is not finite keeps its moving statistics. The gradient is that of the forward that ran,
    whatever mode the backward is called in and whatever happened to the moving statistics since.

    Parameters
    ----------
    data : mx.nd.NDArray or mx.np.ndarray
        Of any shape with at least one dimension and one channel; float16, float32 or float64.
    gamma, beta : as data
        Scale and shift, shape (channels,); float64 for float64 data, otherwise float32.
    moving_mean, moving_var : as data
        Moving mean and biased variance, shape and type as gamma; stepped in place.
    *positional
        Attributes without names, in the order of the built-in operator: eps, momentum, fix_gamma,
        use_global_stats, output_mean_var, axis, cudnn_off.
    addend : as data, optional
        Added to the normalized data; shape and type as data.
    name : str, optional
        Ignored, as MXNet's operators on NDArrays do.
    out : as data, or a list of them, optional
        Receives the output (or outputs).
    eps : float, default 1e-3
        Added to the variance; finite, at least 0. With 0, a channel without spread gives beta.
    momentum : float, default 0.9
        Weight of the old moving statistics in a step, from 0 to 1.
    fix_gamma : bool, default True
        Compute with gamma 1 and give gamma a zero gradient; gamma itself is never written.
    use_global_stats : bool, default False
        Use the moving statistics, also in training.
    use_batch_stats : bool, default False
        Use the statistics of the batch, also in inference.
    step_global_stats : bool, default False
        Step the moving statistics in training also where use_global_stats uses them; the forward
        uses what they were before.
    output_mean_var : bool, default False
        Also return the mean and ``1 / sqrt(variance + eps)`` that were used, shape (channels,) and
        of gamma's type; no gradient flows through them.
    axis : int, default 1
        The axis of the channels; negative counts from the end.
    act_type : {None, 'relu'}, default None
        Applied last. The gradient is 0 where the output is: backward looks at the output, as that
        of MXNet's ReLU does, so nothing more is kept, and the output must not be changed before. A
        NaN stays one, in the gradient too.
    with_addend : bool, optional
        Whether there is an addend, as the operator notes it; follows from `addend`.
    cudnn_off : bool, default False
        Accepted and ignored.

    Returns
    -------
    as data, or a list of three with output_mean_var
        The output has the shape and type of data.

    Raises
    ------
    ValueError
        If an argument is of a wrong kind, type, shape, storage or context, or an attribute is
        unknown or out of its range.

    References
    ----------
    .. [1] S. Ioffe and C. Szegedy, Batch Normalization: Accelerating Deep Network Training by
       Reducing Internal Covariate Shift, 2015, https://arxiv.org/abs/1502.03167
    """
    if positional:
        name_positional(positional, attributes)
    arrays = [data, gamma, beta, moving_mean, moving_var]
    if addend is not None:
        arrays.append(addend)
    settle_fused(addend, attributes)
    arrays = _prepare(arrays, attributes, out)
    if addend is None and is_true(attributes.get("with_addend", False)):
        raise ValueError(f"{PREFIX}with_addend is True, but addend is missing")
    return _invoke(_library.OPERATOR, arrays, attributes, out)


def SyncBatchNorm(
    data: Any,
    gamma: Any,
    beta: Any,
    moving_mean: Any,
    moving_var: Any,
    *,
    key: str,
    num_devices: int = 1,
    timeout: float = 300.0,
    name: Any = None,
    out: Any = None,
    **attributes: Any,
) -> Any:
    """Batch normalization of a batch that is spread over the devices of this process.

    It is called once for each part of the batch, with the parameters on that part's device. Where
    `BatchNorm` uses the statistics of the batch, these are those of all parts together, however
    many values each has, and so is the gradient of data. The gradients of gamma and beta are each
    device's own: their sum, which trainers take, is that of the whole batch. Where `BatchNorm`
    uses the moving statistics, the devices do not wait for each other. After
    `mxbn.distributed.init()` the parts may also be in several processes.

    Parameters
    ----------
    data, gamma, beta, moving_mean, moving_var : mx.nd.NDArray or mx.np.ndarray
        As of `BatchNorm`.
    key : str
        By which the devices find each other: a name of the layer. The n-th call on one device
        belongs to the n-th call on each of the others.
    num_devices : int, default 1
        How many contexts have a part of the batch; an empty one counts.
    timeout : float, default 300
        After how many seconds without one of the devices the others get an error.
    name : object, optional
        Ignored.
    out : as data, or a list of three, optional
        As of `BatchNorm`.
    **attributes
        Those of `BatchNorm`, but for act_type and with_addend.

    Returns
    -------
    as data, or a list of three with output_mean_var
        The output has the shape and type of data.

    Raises
    ------
    ValueError
        As `BatchNorm` raises. The other devices that wait for this one then get an error too.
    """
    attributes.update(key=key, num_devices=num_devices, timeout=timeout)
    _sync.join(key)
    try:
        arrays = _prepare([data, gamma, beta, moving_mean, moving_var], attributes, out)
        part = _invoke(_library.SYNC_STATISTICS, [data], attributes)
        batch = _invoke(_library.SYNC_EXCHANGE, [part], attributes)
        return _invoke(_library.SYNC_OPERATOR, [*arrays, batch], attributes, out)
    except ValueError as error:
        _sync.abandon(key, f"another device failed: {error}")
        raise


def _prepare(arrays: list[Any], attributes: dict[str, Any], out: Any) -> list[Any]:
    """Refuse what the operator does not take, and return the arrays that it shall have."""
    if not (_alike(arrays) and _library.same_context_and_known_shapes(arrays)):
        _check_inputs(arrays)
    if out is not None:
        show = is_true(attributes.get("output_mean_var", False))
        _check_out(out, arrays[0], arrays[1], show)
    if mx.autograd.is_recording():
        # A graph that held the statistics themselves would end when another one with them does.
        arrays[3:5] = [array.detach() for array in arrays[3:5]]
    return arrays


def _invoke(operator: str, arrays: list[Any], attributes: dict[str, Any], out: Any = None) -> Any:
    try:
        with _one_at_a_time:
            return _imperative_invoke(
                _library.handle(operator),
                arrays,
                list(attributes),
                list(attributes.values()),
                out,
                isinstance(arrays[0], mx.np.ndarray),
                False,
            )
    except mx.base.MXNetError as error:
        raise as_value_error(error) from None
