"""Writing files: all of a file or nothing, and never over another one unasked."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager
from typing import Any, Iterator

import numpy as np


def refuse_existing(*paths: str) -> None:
    """Raise FileExistsError if one of the files is there."""
    for path in paths:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists already; force overwrites it (--force)")


@contextmanager
def atomic(path: str) -> Iterator[str]:
    """Yield the name of a file to write, which takes the place of `path` if nothing goes wrong.

    A file that is there keeps its permissions, and a link goes on leading to it.

    Parameters
    ----------
    path : str
        In a folder that exists.

    Raises
    ------
    OSError
        If the folder cannot be written to, or something else than a file is there.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise FileExistsError(f"{path} is there and is no file")
    folder, name = os.path.split(target)
    # In the same folder, so that renaming it is one step; the ending may tell a writer the format.
    temporary = os.path.join(folder, f".{secrets.token_hex(4)}.{name}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error
    try:
        yield temporary
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_npz(path: str) -> dict[str, Any]:
    """Read the arrays of an npz file.

    Parameters
    ----------
    path : str

    Returns
    -------
    dict of str to numpy.ndarray

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is no npz file of plain arrays, or damaged. The message names the file.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds, OSError too
            raise ValueError(f"{path} is damaged or no npz file of arrays: {error}") from error
