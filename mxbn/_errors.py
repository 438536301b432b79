"""Errors of the operator as Python users get them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import mxnet as mx

PREFIX = "mxbn: BatchNorm: "


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Turn what the operator refuses into a ValueError with its message alone."""
    try:
        yield
    except mx.base.MXNetError as error:
        _, found, message = str(error).partition(PREFIX)
        if not found:
            raise
        raise ValueError(PREFIX + message.strip()) from None
