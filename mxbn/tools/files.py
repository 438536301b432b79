"""Writing files: all of a file or nothing, and never over another one unasked."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from typing import Iterator


def refuse_existing(*paths: str) -> None:
    """Raise FileExistsError if one of the files is there."""
    for path in paths:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists already; force overwrites it (--force)")


@contextmanager
def atomic(path: str) -> Iterator[str]:
    """Yield the name of a file to write, which takes the place of `path` if nothing goes wrong.

    Parameters
    ----------
    path : str
        In a folder that exists.
    """
    folder, name = os.path.split(path)
    # In the same folder, so that renaming it is one step; the ending may tell a writer the format.
    handle, temporary = tempfile.mkstemp(dir=folder or ".", prefix=".", suffix=name)
    try:
        os.close(handle)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
