"""What Python knows of the exchange between the devices and processes that share a layer."""

from __future__ import annotations

from typing import Callable

from . import _library

on_layer: Callable[[str], None] | None = None
"""Called with the key of a layer whenever the layer is used; set by `mxbn.distributed.init`."""


def join(key: str) -> None:
    """Share a layer with the other processes, if there are any.

    Parameters
    ----------
    key : str
        Of the layer.
    """
    if on_layer is not None:
        on_layer(key)


def abandon(key: str, reason: str) -> None:
    """End what the devices of a layer wait for, since one of them will not come.

    Parameters
    ----------
    key : str
        Of the layer.
    reason : str
        What the others are told.
    """
    _library.function("mxbn_sync_abandon", None)(str(key).encode(), reason.encode())
