"""BatchNorm for Apache MXNet 1.9.1 that does exactly what its flags say.

Importing the package loads the operator ``mxbn_BatchNorm`` into MXNet. It is then there as
``mxbn.nd.BatchNorm``, ``mxbn.sym.BatchNorm`` and ``mxbn.gluon.BatchNorm``, and to code written for
MXNet as ``mx.nd.mxbn_BatchNorm``, ``mx.sym.mxbn_BatchNorm`` and in symbol files.
"""

from . import _library

_library.load()

from . import gluon, nd, reference, sym  # noqa: E402 (they need the operator)
from ._builtin import replace_builtin  # noqa: E402
from .module import Module  # noqa: E402

__version__ = "0.1.0"
__all__ = ["Module", "gluon", "nd", "reference", "replace_builtin", "sym"]
