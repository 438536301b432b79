"""The GPU half of the library on raw pointers to device memory, for checks without MXNet's.

`mx.gpu()` arrays need none of this: MXNet calls the operator itself.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable

from ._library import function

DTYPES = ("float16", "float32", "float64")  # in the order of mxbn::gpu::DataType


class Arguments(ctypes.Structure):
    """What a pass is given: mxbn::gpu::Arguments, field by field."""

    _fields_ = (
        ("outer", ctypes.c_longlong),
        ("channels", ctypes.c_longlong),
        ("inner", ctypes.c_longlong),
        ("vectors", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("lanes", ctypes.c_int),
        ("piece", ctypes.c_longlong),
        ("splits", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("dy", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("moving_mean", ctypes.c_void_p),
        ("moving_var", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("momentum", ctypes.c_double),
        ("use_batch", ctypes.c_int),
        ("step", ctypes.c_int),
        ("saved", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("terms", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("out_add", ctypes.c_int),
        ("first_add", ctypes.c_int),
        ("second_add", ctypes.c_int),
        ("fused", ctypes.c_void_p),
        ("relu", ctypes.c_int),
        ("daddend", ctypes.c_void_p),
        ("daddend_add", ctypes.c_int),
        ("counters", ctypes.c_void_p),
        ("second_order", ctypes.c_int),
        ("ddx", ctypes.c_void_p),
        ("ddgamma", ctypes.c_void_p),
        ("ddbeta", ctypes.c_void_p),
        ("for_dy", ctypes.c_void_p),
        ("for_dy_add", ctypes.c_int),
        ("part", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
    )


class Gpu(ctypes.Structure):
    """A GPU as the library sees it."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("image", ctypes.c_char * 32),
    )


def count() -> tuple[int, int]:
    """Return how many GPUs the driver sees, and the CUDA version it supports (11020: 11.2)."""
    number, version = ctypes.c_int(), ctypes.c_int()
    _check("mxbn_gpu_count", ctypes.byref(number), ctypes.byref(version))
    return number.value, version.value


def describe(number: int) -> Gpu:
    """Return a GPU's name, compute capability, and the image of our kernels that it runs."""
    gpu = Gpu()
    _check("mxbn_gpu_describe", number, ctypes.byref(gpu))
    return gpu


def forward(arguments: Arguments, dtype: str, allocate: Callable[[int], int], **queue: Any) -> None:
    """Start a forward pass.

    Parameters
    ----------
    arguments : Arguments
        All but what a plan decides (vectors to splits) and the workspace (parts, terms).
    dtype : str
        Of the data: ``'float16'``, ``'float32'`` or ``'float64'``.
    allocate : callable
        Takes a number of float64 values, returns the address of as many on the device.
    device : int, default 0
        The GPU.
    stream : int or None, default None
        The CUDA stream; None is the default stream.

    Raises
    ------
    RuntimeError
        With what the driver says.
    """
    _run("mxbn_gpu_forward", arguments, dtype, allocate, **queue)


def backward(
    arguments: Arguments, dtype: str, allocate: Callable[[int], int], **queue: Any
) -> None:
    """Start a backward pass; parameters as for `forward`."""
    _run("mxbn_gpu_backward", arguments, dtype, allocate, **queue)


def second(arguments: Arguments, dtype: str, allocate: Callable[[int], int], **queue: Any) -> None:
    """Start the second derivatives, of arguments with second_order; parameters as for `forward`."""
    _run("mxbn_gpu_second", arguments, dtype, allocate, **queue)


def _run(
    name: str,
    arguments: Arguments,
    dtype: str,
    allocate: Callable[[int], int],
    device: int = 0,
    stream: int | None = None,
) -> None:
    kind, parts, terms = DTYPES.index(dtype), ctypes.c_int64(), ctypes.c_int64()
    function("mxbn_gpu_plan", None)(
        ctypes.byref(arguments), kind, ctypes.byref(parts), ctypes.byref(terms)
    )
    arguments.parts = allocate(parts.value + terms.value)
    arguments.terms = arguments.parts + 8 * parts.value
    _check(name, ctypes.byref(arguments), kind, device, ctypes.c_void_p(stream))


def _check(name: str, *arguments: Any) -> None:
    problem = function(name, ctypes.c_char_p)(*arguments)
    if problem is not None:
        raise RuntimeError(problem.decode())
