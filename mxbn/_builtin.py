"""Puts mxbn in the place of MXNet's built-in BatchNorm."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import mxnet as mx

from . import gluon, nd, sym


@contextmanager
def replace_builtin() -> Iterator[None]:
    """Make MXNet's names for BatchNorm mean mxbn's, inside a ``with`` block or decorated function.

    ``mx.nd.BatchNorm``, ``mx.sym.BatchNorm``, ``mx.gluon.nn.BatchNorm``,
    ``mx.gluon.nn.BatchNormReLU``, ``mx.gluon.contrib.nn.SyncBatchNorm`` and, in NumPy mode,
    ``mx.npx.batch_norm``: a network from the model zoo, or by existing code, is made with mxbn's
    layers inside the block and stays so afterwards. The names are MXNet's own, so other threads see
    the change too.

    Not replaced are names that were imported before (``from mxnet.gluon.nn import BatchNorm``) and
    symbols loaded from files.

    Examples
    --------
    >>> with mxbn.replace_builtin():
    ...     net = mx.gluon.model_zoo.vision.resnet18_v1()
    """
    places: list[tuple[Any, str, Any]]
    places = [(module, "BatchNorm", nd.BatchNorm) for module in (mx.nd, mx.nd.op)]
    places += [(module, "BatchNorm", sym.BatchNorm) for module in (mx.sym, mx.sym.op)]
    places += [(module, "batch_norm", nd.BatchNorm) for module in (mx.npx, mx.nd.npx)]
    places += [(mx.sym.npx, "batch_norm", sym.BatchNorm)]
    places += [(mx.gluon.nn, name, getattr(gluon, name)) for name in ("BatchNorm", "BatchNormReLU")]
    places += [(mx.gluon.contrib.nn, "SyncBatchNorm", gluon.SyncBatchNorm)]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, ours in places:
            setattr(module, name, ours)
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)
