"""Parameter files: arrays by name, as ``mx.nd.save`` writes them."""

from __future__ import annotations

import os
import struct
from math import prod
from typing import Any, BinaryIO

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import _DTYPE_MX_TO_NP

_LIST = 0x112  # begins a file
_ARRAY_V1, _ARRAY_V2, _ARRAY_V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA  # begin an array
_ITEM_SIZES = {
    code: np.dtype(kind).itemsize for code, kind in _DTYPE_MX_TO_NP.items() if kind is not None
}
_INDICES = {-1: 0, 0: 0, 1: 1, 2: 2}  # index arrays of dense, row_sparse and csr arrays


def load_arrays(path: str) -> dict[str, Any]:
    """Read a parameter file.

    Parameters
    ----------
    path : str

    Returns
    -------
    dict of str to mx.nd.NDArray

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is damaged, or its arrays have no names. The message names the file.
    """
    try:
        with open(path, "rb") as file:
            _Reader(file).check()
        arrays = mx.nd.load(path)
    except (ValueError, mx.base.MXNetError) as error:  # a name that is not UTF-8 is a ValueError
        reason = last_line(error)
        raise ValueError(f"{path} is damaged or not a parameter file: {reason}") from error
    if isinstance(arrays, list):
        if arrays:
            raise ValueError(f"{path} holds arrays without names")
        return {}
    return dict(arrays)


def save_arrays(path: str, arg_params: dict[str, Any], aux_params: dict[str, Any]) -> None:
    """Write parameters and auxiliary states, by names that tell them apart.

    Parameters
    ----------
    path : str
    arg_params, aux_params : dict of str to mx.nd.NDArray
    """
    arrays = {f"arg:{name}": array for name, array in arg_params.items()}
    arrays.update({f"aux:{name}": array for name, array in aux_params.items()})
    mx.nd.save(path, arrays)


def last_line(error: Exception) -> str:
    """Return what MXNet says at the end of a message, after a stack trace if there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].replace("MXNetError: ", "").strip()


class _Reader:
    """Goes through a file as MXNet would, which allocates whatever sizes a damaged file states."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size

    def check(self) -> None:
        """Raise ValueError if the file is cut off or is something else."""
        magic, _, count = self._numbers("<QQQ")
        if magic != _LIST:
            raise ValueError("it does not begin as one")
        self._expect(count)
        for _ in range(count):
            self._array()
        (names,) = self._numbers("<Q")
        if names not in (0, count):
            raise ValueError(f"it holds {names} names for {count} arrays")
        for _ in range(names):
            self._skip(*self._numbers("<Q"))

    def _array(self) -> None:
        (magic,) = self._numbers("<I")
        indices = 0
        if magic in (_ARRAY_V2, _ARRAY_V3):
            (storage,) = self._numbers("<i")
            if storage not in _INDICES:
                raise ValueError(f"an array is stored in the unknown way {storage}")
            indices = _INDICES[storage]
        # Before there were versions, an array began with its number of dimensions.
        is_oldest = magic not in (_ARRAY_V1, _ARRAY_V2, _ARRAY_V3)
        stored = self._shape() if indices else None
        shape = self._sizes(magic, "I") if is_oldest else self._shape()
        if shape is None or (not shape and magic != _ARRAY_V3):
            return  # no array
        self._numbers("<ii")  # the context
        sizes = [self._item_size() * prod(shape if stored is None else stored)]
        for _ in range(indices):
            sizes.append(self._item_size() * prod(self._shape() or ()))
        for size in sizes:
            self._skip(size)

    def _shape(self) -> tuple[int, ...] | None:
        (count,) = self._numbers("<i")
        return None if count == -1 else self._sizes(count, "q")

    def _sizes(self, count: int, kind: str) -> tuple[int, ...]:
        if count < 0:
            raise ValueError(f"an array has {count} dimensions")
        shape = self._numbers(f"<{count}{kind}")
        if any(size < 0 for size in shape):
            raise ValueError(f"an array has the shape {shape}")
        return shape

    def _item_size(self) -> int:
        (code,) = self._numbers("<i")
        if code not in _ITEM_SIZES:
            raise ValueError(f"an array is of the unknown type {code}")
        return _ITEM_SIZES[code]

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        self._expect(size)
        self._left -= size
        return struct.unpack(layout, self._file.read(size))

    def _skip(self, size: int) -> None:
        self._expect(size)
        self._left -= size
        self._file.seek(size, os.SEEK_CUR)

    def _expect(self, size: int) -> None:
        if size > self._left:
            raise ValueError("it ends too early")
