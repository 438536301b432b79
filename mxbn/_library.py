"""Finds MXNet and the compiled library, registers the operator and checks its values."""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

OPERATOR = "mxbn_BatchNorm"
# For a batch that is spread over devices: its three nodes.
SYNC_STATISTICS = "_mxbn_sync_statistics"
SYNC_EXCHANGE = "_mxbn_sync_exchange"
SYNC_OPERATOR = "mxbn_SyncBatchNorm"
OPERATORS = (OPERATOR, SYNC_STATISTICS, SYNC_EXCHANGE, SYNC_OPERATOR)
VERSION = "1.9.1"
LIBRARY = Path(__file__).with_name("libmxbn.so")
SUPPORTED = (
    "mxbn works with the released wheels of MXNet 1.9.1 for Linux x86-64, mxnet==1.9.1 (CPU) and "
    "mxnet-cu112==1.9.1 (CUDA 11.2)"
)
REMEDY = "install one with: pip install 'mxbn[cpu]' (or 'mxbn[cu112]')"

# What libmxbn.so takes from libmxnet.so, by the names of the compiler of the released wheels.
SYMBOLS = (
    "_ZN4dmlc8RegistryIN4nnvm2OpEE3GetEv",
    "_ZN4nnvm2Op10GetAttrMapERKSs",
    "_ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE",
    "_ZN4nnvm2Op3GetERKSs",
    "_ZN4nnvm2OpC1Ev",
    "_ZN5mxnet2op12MakeGradNodeEPKcRKSt10shared_ptrIN4nnvm4NodeEERKSt6vectorINS4_9NodeEntryE"
    "SaISA_EERKSt13unordered_mapISsSsSt4hashISsESt8equal_toISsESaISt4pairIKSsSsEEE",
    "_ZN5mxnet6Engine3GetEv",
    "_ZN5mxnet12MKLDNNStream3GetEv",
    "_ZN5mxnet12MKLDNNStream6SubmitEb",
    "_ZN5mxnet7NDArray16CreateMKLDNNDataERKN4dnnl6memory4descE",
    "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv",
    "_ZN5mxnet7Storage3GetEv",
    "_ZNK5mxnet7NDArray15Reorder2DefaultEv",
    "_ZNK5mxnet7NDArray5Chunk9IsDefaultEv",
    "_ZNK5mxnet7NDArray8SetTBlobEv",
    "_ZNK5mxnet8Resource18get_space_internalEm",
    "_ZN5mxnet2op8MakeNodeEPKcRKSsPKSt6vectorIN4nnvm9NodeEntryESaIS7_EEPKSt13unordered_mapI"
    "SsSsSt4hashISsESt8equal_toISsESaISt4pairIS3_SsEEEPKSt10shared_ptrINS6_4NodeEE",
)

_handles: dict[str, int] = {}


def handle(operator: str = OPERATOR) -> int:
    """Return MXNet's handle of an operator.

    Parameters
    ----------
    operator : str, default 'mxbn_BatchNorm'
        One of `OPERATORS`.

    Returns
    -------
    int
        The address by which MXNet's C API knows it.
    """
    assert _handles, "mxbn._library.load() has not run"
    return _handles[operator]


def instruction_set() -> str:
    """Return which kernels run on this processor.

    Returns
    -------
    str
        ``'avx512'``, ``'avx2'`` or ``'baseline'``. The environment variable
        ``MXBN_INSTRUCTION_SET``, read at the first call, asks for less than the processor has.
    """
    name: bytes = function("mxbn_instruction_set", ctypes.c_char_p)()
    return name.decode()


def use_onednn_layouts(use: bool) -> None:
    """Choose what happens to data that a convolution left in one of oneDNN's layouts.

    Parameters
    ----------
    use : bool
        Take it as it is, which is the default, or bring it into MXNet's plain layout first.
    """
    function("mxbn_use_onednn_layouts")(int(use))


def uses_onednn_layouts() -> bool:
    """Return what `use_onednn_layouts` chose.

    Returns
    -------
    bool
        Whether data in oneDNN's layouts is taken as it is.
    """
    return bool(function("mxbn_uses_onednn_layouts")())


def onednn_layout_passes() -> int:
    """Return how many forwards and backwards took data in oneDNN's layouts as it was.

    Returns
    -------
    int
        Since the library was loaded.
    """
    return int(function("mxbn_onednn_layout_passes", ctypes.c_int64)())


def same_context_and_known_shapes(arrays: Any) -> bool:
    """Whether NDArrays are on one context and of known shapes without a size of 0.

    Parameters
    ----------
    arrays : list of mx.nd.NDArray
        At least one.

    Returns
    -------
    bool
        False calls for a closer look.
    """
    handles = (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])
    return bool(function("mxbn_same_context_and_known_shapes")(handles, len(arrays)))


@lru_cache(maxsize=None)
def function(name: str, result: Any = ctypes.c_int) -> Any:
    """Return a function that libmxbn.so exports.

    Parameters
    ----------
    name : str
        Its name.
    result : ctypes type, default c_int
        What it returns; None: nothing.

    Returns
    -------
    callable
        To be called with ctypes values.
    """
    function = getattr(ctypes.CDLL(str(LIBRARY)), name)
    function.restype = result
    return function


def load() -> None:
    """Register the operator with MXNet, once per process.

    Raises
    ------
    ImportError
        If MXNet is missing, is another version or another build than the released wheels, if the
        compiled library is missing, or if the operator computes something else than it should.
        The message says what was found and what to do.
    """
    if _handles:
        return
    mx = _import_mxnet()
    _check_build(mx)
    _register()
    _handles.update((name, _find_operator(name)) for name in OPERATORS)
    from . import _selftest, nd, sym

    problem = _selftest.run()
    if problem is not None:
        _handles.clear()
        raise ImportError(
            f"mxbn: the operator computes wrong values in this build of MXNet ({problem}), so it "
            f"is not offered. {SUPPORTED}; {REMEDY}"
        )
    problem = _selftest.run_onednn_layouts()
    if problem is not None:
        use_onednn_layouts(False)
        warnings.warn(
            f"mxbn: data in oneDNN's layouts is converted first, which costs time, since taking it "
            f"as it is gives wrong values in this build of MXNet ({problem})",
            RuntimeWarning,
            stacklevel=2,
        )
    for module in (mx.nd, mx.nd.op):
        setattr(module, OPERATOR, nd.BatchNorm)
        setattr(module, SYNC_OPERATOR, nd.SyncBatchNorm)
    for module in (mx.sym, mx.sym.op):
        setattr(module, OPERATOR, sym.BatchNorm)
        setattr(module, SYNC_OPERATOR, sym.SyncBatchNorm)
    _tell_amp()


def _import_mxnet() -> Any:
    try:
        import mxnet
    except ModuleNotFoundError as error:
        if error.name != "mxnet":
            raise
        raise ImportError(f"mxbn: MXNet is not installed. {SUPPORTED}; {REMEDY}") from error
    except AttributeError as error:  # MXNet 1.9.1 uses names that NumPy 1.24 took away
        import numpy

        raise ImportError(
            f"mxbn: MXNet could not be imported with NumPy {numpy.__version__} ({error}); MXNet "
            f"{VERSION} needs an older one: pip install 'numpy<1.24'"
        ) from error
    return mxnet


def _check_build(mx: Any) -> None:
    version = getattr(mx, "__version__", "unknown")
    if version != VERSION:
        raise ImportError(f"mxbn: found MXNet {version}. {SUPPORTED}; {REMEDY}")
    missing = [name for name in SYMBOLS if not hasattr(mx.base._LIB, name)]
    if missing:
        raise ImportError(
            f"mxbn: this MXNet {version} ({mx.base._LIB._name}) is another build than the released "
            f"wheels: it lacks {missing[0]}"
            + (f" and {len(missing) - 1} more symbols" if missing[1:] else "")
            + f". {SUPPORTED}; {REMEDY}"
        )


def _register() -> None:
    if not LIBRARY.exists():
        raise ImportError(
            f"mxbn: {LIBRARY.name} is missing in {LIBRARY.parent}: the package "
            "was not built. Build it from the project's folder with: pip install '.[cpu]'"
        )
    try:
        # RTLD_NOW: a symbol that is missing shows here, not in the middle of a computation.
        library = ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOW)
        register = library.mxbn_register
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"mxbn: {LIBRARY} cannot be loaded ({error}). Build it on this machine, from the "
            "project's folder, with: pip install --force-reinstall --no-deps ."
        ) from error
    register.restype = ctypes.c_char_p
    problem = register()
    if problem is not None:
        raise ImportError(f"mxbn: MXNet refused the operator: {problem.decode()}")


def _find_operator(name: str) -> int:
    from mxnet.base import _LIB, OpHandle, c_str, check_call

    operator = OpHandle()
    check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(operator)))
    assert operator.value is not None
    return int(operator.value)


def _tell_amp() -> None:
    # AMP's conversion refuses operators that are in none of its lists.
    from mxnet.contrib.amp import lists

    lists.symbol_fp16.FP16_FP32_FUNCS.extend(OPERATORS)
    # Those that Python can call; it would look for the others too.
    lists.symbol_bf16.FP32_FUNCS.extend((OPERATOR, SYNC_OPERATOR))
    lists.symbol_bf16.BF16_FP32_FUNCS.extend((SYNC_STATISTICS, SYNC_EXCHANGE))
