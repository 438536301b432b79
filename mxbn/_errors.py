"""Errors of the operator as Python users get them."""

from __future__ import annotations

import mxnet as mx

PREFIX = "mxbn: BatchNorm: "


def as_value_error(error: mx.base.MXNetError) -> Exception:
    """Return what the operator refused as a ValueError with its message alone.

    Parameters
    ----------
    error : mx.base.MXNetError
        As MXNet raised it.

    Returns
    -------
    Exception
        The error itself, if it is not the operator's.
    """
    _, found, message = str(error).partition(PREFIX)
    return ValueError(PREFIX + message.strip()) if found else error
