"""BatchNorm in NumPy, in float64: the specification of the operator, and the oracle of its tests.

Nothing here is fast. The formulas of `backward` are the derivatives of `forward`, those of
`second_backward` the derivatives of `backward`; the tests check them by central differences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any


class Forward(NamedTuple):
    """What a forward gives: its output, what it keeps for backward, and the moving statistics.

    Attributes
    ----------
    output : numpy.ndarray
        Shape of the data.
    mean, inv_std : numpy.ndarray
        The mean and ``1 / sqrt(variance + eps)`` that were used, (channels,).
    used_batch : bool
        Whether they are the batch's.
    moving_mean, moving_var : numpy.ndarray
        The moving statistics after this forward, (channels,).
    """

    output: Array
    mean: Array
    inv_std: Array
    used_batch: bool
    moving_mean: Array
    moving_var: Array


def statistics(data: Array, axis: int = 1) -> tuple[Array, Array]:
    """Mean and biased variance of every channel.

    Parameters
    ----------
    data : array_like
        Of any shape with at least one dimension.
    axis : int, default 1
        The axis of the channels; negative counts from the end.

    Returns
    -------
    (numpy.ndarray, numpy.ndarray)
        float64, (channels,) each.
    """
    channels = _by_channel(data, axis)
    n = channels.shape[1]
    mean = _sum(channels) / n
    return mean, _sum((channels - mean[:, None]) ** 2) / n


def step(old: Array, batch: Array, momentum: float, finite: Array) -> Array:
    """Step a moving statistic: ``momentum * old + (1 - momentum) * batch`` where finite.

    Parameters
    ----------
    old, batch : array_like
        The moving and the batch's statistic, (channels,).
    momentum : float
        Weight of the old value.
    finite : array_like of bool
        Channels that step; the others keep the old value.

    Returns
    -------
    numpy.ndarray
        float64, (channels,).
    """
    old = np.asarray(old, np.float64)
    return np.where(finite, momentum * old + (1 - momentum) * batch, old)


def forward(
    data: Array,
    gamma: Array,
    beta: Array,
    moving_mean: Array,
    moving_var: Array,
    *,
    is_train: bool,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    use_batch_stats: bool = False,
    step_global_stats: bool = False,
    axis: int = 1,
    addend: Array = None,
    act_type: str | None = None,
) -> Forward:
    """Normalize data: ``(data - m) / sqrt(v + eps) * gamma + beta``, per channel.

    Then add, and set to 0 what is negative, if that is asked for.

    Parameters
    ----------
    data : array_like
        Of any shape with at least one dimension.
    gamma, beta, moving_mean, moving_var : array_like
        (channels,).
    is_train : bool
        Training or inference.
    eps, momentum, fix_gamma, use_global_stats, use_batch_stats, step_global_stats, axis,
    addend, act_type
        As of `mxbn.nd.BatchNorm`.

    Returns
    -------
    Forward
        All in float64.

    Raises
    ------
    ValueError
        If both use_global_stats and use_batch_stats are set.
    """
    if use_global_stats and use_batch_stats:
        raise ValueError("use_global_stats and use_batch_stats exclude each other")
    data = np.asarray(data, np.float64)
    moving_mean = np.asarray(moving_mean, np.float64)
    moving_var = np.asarray(moving_var, np.float64)
    used_batch = use_batch_stats or (is_train and not use_global_stats)
    mean, var, new_mean, new_var = moving_mean, moving_var, moving_mean, moving_var
    with np.errstate(invalid="ignore", over="ignore"):
        if data.size > 0:
            batch_mean, batch_var = statistics(data, axis)
            if used_batch:
                mean, var = batch_mean, batch_var
            if is_train and (step_global_stats or not use_global_stats):
                finite = np.isfinite(batch_mean) & np.isfinite(batch_var)
                new_mean = step(moving_mean, batch_mean, momentum, finite)
                new_var = step(moving_var, batch_var, momentum, finite)
        inv_std = _inverse_std(var, eps)
        scale = inv_std if fix_gamma else inv_std * np.asarray(gamma, np.float64)
        output = (data - _shaped(mean, data, axis)) * _shaped(scale, data, axis)
        output = output + _shaped(np.asarray(beta, np.float64), data, axis)
        if addend is not None:
            output = output + np.asarray(addend, np.float64)
        if act_type == "relu":
            output = np.where(output <= 0, 0.0, output)
    return Forward(output, mean, inv_std, bool(used_batch), new_mean, new_var)


def backward(
    head_gradient: Array,
    data: Array,
    gamma: Array,
    kept: Forward,
    *,
    fix_gamma: bool = True,
    axis: int = 1,
    act_type: str | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of a forward, from what it kept.

    With ``xh = (data - m) * inv_std`` and n values per channel, ``dbeta = sum dy``,
    ``dgamma = sum dy * xh`` and, if the batch was used,
    ``dx = gamma * inv_std * (dy - dbeta / n - xh * dgamma / n)``; otherwise
    ``dx = gamma * inv_std * dy``. Where a ReLU follows, ``let_through(dy, output)`` takes the place
    of dy, and is the gradient of the addend.

    Parameters
    ----------
    head_gradient, data : array_like
        The gradient of the output, and the data of the forward, of the same shape.
    gamma : array_like
        (channels,).
    kept : Forward
        What the forward returned.
    fix_gamma, axis, act_type
        As in the forward.

    Returns
    -------
    (numpy.ndarray, numpy.ndarray, numpy.ndarray)
        Gradients of data, gamma (zero with fix_gamma) and beta, in float64.
    """
    dy = np.asarray(head_gradient, np.float64)
    if act_type == "relu":
        dy = let_through(dy, kept.output)
    data = np.asarray(data, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        xh = (data - _shaped(kept.mean, data, axis)) * _shaped(kept.inv_std, data, axis)
        dbeta = _sum(_by_channel(dy, axis))
        dgamma = _sum(_by_channel(dy * xh, axis))
        scale = kept.inv_std if fix_gamma else kept.inv_std * np.asarray(gamma, np.float64)
        dx = dy
        if kept.used_batch and data.size > 0:
            n = data.size // data.shape[axis]
            dx = dy - _shaped(dbeta / n, data, axis) - xh * _shaped(dgamma / n, data, axis)
        dx = _shaped(scale, data, axis) * dx
    return dx, np.zeros_like(dgamma) if fix_gamma else dgamma, dbeta


def let_through(head_gradient: Array, output: Array) -> Array:
    """Return what a ReLU lets through of a gradient.

    Parameters
    ----------
    head_gradient, output : array_like
        The gradient of the output, and the output.

    Returns
    -------
    numpy.ndarray
        float64: 0 where the output is, and NaN where it is NaN, as with MXNet's ReLU.
    """
    output = np.asarray(output, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(output > 0, np.asarray(head_gradient, np.float64), 0 * output)


def second_backward(
    head_gradients: tuple[Array, Array, Array],
    head_gradient: Array,
    data: Array,
    gamma: Array,
    kept: Forward,
    *,
    fix_gamma: bool = True,
    axis: int = 1,
) -> tuple[Array, Array, Array]:
    """Gradients of a backward: second derivatives.

    The loss ``L`` may depend on all that `backward` returns: its gradients with respect to dx,
    dgamma and dbeta are ``u``, ``p`` and ``q``, per channel

        dL = sum u * d(dx) + p * d(dgamma) + q * d(dbeta).

    With ``s = inv_std``, ``n`` values per channel and the sums ``A = sum dy``, ``B = sum dy * xh``,
    ``U = sum u``, ``V = sum u * xh``, ``W = sum u * dy``, all of L that depends on dy, gamma, xh
    and s is

        L = gamma * s * (W - A * U / n - B * V / n) + p * B + q * A.

    From it follow ``dL / d gamma = s * K``, with ``K = W - A * U / n - B * V / n``, and
    ``dL / d dy = gamma * s * (u - U / n) + a * xh + q``, with ``a = p - gamma * s * V / n``. B and
    V depend on xh: ``dL / d xh = h = a * dy + b * u``, with ``b = -gamma * s * B / n``. And xh
    depends on data like the output of a `forward` with gamma 1, s as ``ds / dx = -s**2 * xh / n``:

        dL / dx = s * (h - sum h / n - xh * sum(h * xh) / n) - gamma * K * s**2 * xh / n,

    ``sum h = a * A + b * U`` and ``sum(h * xh) = a * B + b * V``. With moving statistics, s and the
    mean are constants and dx is ``gamma * s * dy``: the terms with ``1 / n`` are gone.

    Parameters
    ----------
    head_gradients : tuple of three array_like
        u, of the shape of the data, p and q, (channels,).
    head_gradient, data : array_like
        As given to `backward`.
    gamma : array_like
        (channels,).
    kept : Forward
        What the forward returned.
    fix_gamma, axis
        As in the forward.

    Returns
    -------
    (numpy.ndarray, numpy.ndarray, numpy.ndarray)
        Gradients of the head gradient, of data and of gamma (zero with fix_gamma), in float64.
    """
    u, p, q = (np.asarray(each, np.float64) for each in head_gradients)
    dy = np.asarray(head_gradient, np.float64)
    data = np.asarray(data, np.float64)
    s = kept.inv_std
    if fix_gamma:  # gamma's gradient is always 0
        gamma, p = np.ones_like(s), np.zeros_like(s)

    def along(channels: Array) -> Array:
        return _shaped(channels, data, axis)

    def total(values: Array) -> Array:
        return _sum(_by_channel(values, axis))

    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.asarray(gamma, np.float64) * s
        xh = (data - along(kept.mean)) * along(s)
        if kept.used_batch and data.size > 0:
            n = data.size // data.shape[axis]
            u_rest, dy_rest = u - along(total(u) / n), dy - along(total(dy) / n)
            uxh, dyxh = total(u * xh) / n, total(dy * xh) / n
            k = total(u_rest * dy_rest) - n * uxh * dyxh
            a, b = p - scale * uxh, -scale * dyxh
            slope = a * dyxh + b * uxh + scale * k / n
            for_dy = along(scale) * u_rest + along(a) * xh + along(q)
            for_x = along(s) * (along(a) * dy_rest + along(b) * u_rest - along(slope) * xh)
        else:
            k = total(u * dy)
            for_dy = along(scale) * u + along(p) * xh + along(q)
            for_x = along(s * p) * dy
    return for_dy, for_x, np.zeros_like(s) if fix_gamma else s * k


def _inverse_std(var: Array, eps: float) -> Array:
    """1 / sqrt(var + eps), and 0 where that is 1 / 0, so that a constant channel gives beta."""
    shifted = np.asarray(var, np.float64) + eps
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(shifted == 0, 0.0, 1 / np.sqrt(shifted))


def _sum(channels: Array) -> Array:
    """Sum every row, in extended precision: the specification must not depend on n."""
    return channels.sum(axis=1, dtype=np.longdouble).astype(np.float64)


def _by_channel(data: Array, axis: int) -> Array:
    """Return the data as a matrix with a row per channel."""
    data = np.moveaxis(np.asarray(data, np.float64), axis, 0)
    return data.reshape(data.shape[0], int(np.prod(data.shape[1:])))


def _shaped(channels: Array, data: Array, axis: int) -> Array:
    """Return one value per channel in a shape that broadcasts against data."""
    shape = [1] * data.ndim
    shape[axis] = data.shape[axis]
    return channels.reshape(shape)
