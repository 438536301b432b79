"""BatchNorm for Apache MXNet 1.9.1 that does exactly what its flags say.

Importing the package loads the operator ``mxbn_BatchNorm`` into MXNet. It is then there as
``mxbn.nd.BatchNorm``, ``mxbn.sym.BatchNorm`` and ``mxbn.gluon.BatchNorm``, and to code written for
MXNet as ``mx.nd.mxbn_BatchNorm``, ``mx.sym.mxbn_BatchNorm`` and in symbol files.
"""

from . import _library

_library.load()

# ruff: noqa: E402 (what follows needs the operator)
from . import callback, gluon, nd, reference, runtime, sym
from ._builtin import replace_builtin
from .module import Module
from .tools.checkpoint import Checkpoint
from .tools.convert import convert
from .tools.fold import fold
from .tools.freeze import freeze, freeze_state, frozen, unfreeze
from .tools.from_pytorch import from_pytorch
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
    "fold",
    "freeze",
    "freeze_state",
    "from_pytorch",
    "frozen",
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
