"""BatchNorm for Apache MXNet 1.9.1 that does exactly what its flags say.

Importing the package loads the operator ``mxbn_BatchNorm`` into MXNet. It is then there as
``mxbn.nd.BatchNorm``, ``mxbn.sym.BatchNorm`` and ``mxbn.gluon.BatchNorm``, and to code written for
MXNet as ``mx.nd.mxbn_BatchNorm``, ``mx.sym.mxbn_BatchNorm`` and in symbol files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _library

_library.load()

# ruff: noqa: E402 (what follows needs the operator)
from . import gluon, nd, reference, runtime, sym
from ._builtin import replace_builtin
from .module import Module

# The tools are imported when they are first used: training and inference need none of them.
_TOOLS = {
    "Checkpoint": "checkpoint",
    "Guard": "guard",
    "convert": "convert",
    "fold": "fold",
    "freeze": "freeze",
    "freeze_state": "freeze",
    "from_pytorch": "from_pytorch",
    "frozen": "freeze",
    "fuse": "fuse",
    "inspect": "inspect",
    "recalibrate": "recalibrate",
    "set_layers": "set_layers",
    "unfreeze": "freeze",
}


def __getattr__(name: str) -> Any:
    if name in ("callback", "distributed"):
        return import_module(f".{name}", __name__)
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".tools.{_TOOLS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from . import callback, distributed
    from .tools.checkpoint import Checkpoint
    from .tools.convert import convert
    from .tools.fold import fold
    from .tools.freeze import freeze, freeze_state, frozen, unfreeze
    from .tools.from_pytorch import from_pytorch
    from .tools.fuse import fuse
    from .tools.guard import Guard
    from .tools.inspect import inspect
    from .tools.recalibrate import recalibrate
    from .tools.set_layers import set_layers

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Guard",
    "Module",
    "callback",
    "convert",
    "distributed",
    "fold",
    "freeze",
    "freeze_state",
    "from_pytorch",
    "frozen",
    "fuse",
    "gluon",
    "inspect",
    "nd",
    "recalibrate",
    "reference",
    "replace_builtin",
    "runtime",
    "set_layers",
    "sym",
    "unfreeze",
]
