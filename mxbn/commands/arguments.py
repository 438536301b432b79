"""What commands share: types of arguments, data files, and the package that shows tables."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mxnet as mx

from ..tools.checkpoint import Checkpoint
from ..tools.files import load_npz


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read the name and shape of an input, such as ``data=1,3,224,224``.

    Parameters
    ----------
    text : str

    Returns
    -------
    (str, tuple of int)

    Raises
    ------
    argparse.ArgumentTypeError
        If it is something else.
    """
    name, _, numbers = text.partition("=")
    sizes = [each.strip() for each in numbers.strip("() ").split(",")]
    if not name or not all(each.isdecimal() and int(each) for each in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as data=1,3,224,224")
    return name, tuple(map(int, sizes))


def positive(text: str) -> int:
    """Read a number of samples or the like.

    Parameters
    ----------
    text : str

    Returns
    -------
    int

    Raises
    ------
    argparse.ArgumentTypeError
        If it is something else than a whole number from 1 on.
    """
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")


def batches_of_file(model: Checkpoint, path: str, batch_size: int) -> Any:
    """Return the data of a file in batches.

    Parameters
    ----------
    model : Checkpoint
        Which says what the inputs are called, and of which type they are.
    path : str
        An npz file; arrays that are no inputs are left out.
    batch_size : int
        The data may be less.

    Returns
    -------
    mx.io.NDArrayIter

    Raises
    ------
    ValueError, OSError
        If the file cannot be read, or has no arrays of one length for the inputs.
    """
    arguments = [n for n in model.symbol.list_arguments() if n not in model.arg_params]
    arrays = load_npz(path)
    found = {name: array for name, array in arrays.items() if name in arguments}
    lengths = {name: len(array) if array.ndim else 0 for name, array in found.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            f"{path} holds {', '.join(arrays) or 'nothing'}, expected arrays of one length for "
            f"{', '.join(arguments)}"
        )
    known = {name: array.dtype for name, array in model.arg_params.items()}
    types = dict(zip(model.symbol.list_arguments(), model.symbol.infer_type_partial(**known)[0]))
    inputs = {n: mx.nd.array(a, dtype=types.get(n) or "float32") for n, a in found.items()}
    return mx.io.NDArrayIter(inputs, batch_size=min(batch_size, *lengths.values()))


def has_rich(command: str) -> bool:
    """Whether rich is installed; if not, say so.

    Parameters
    ----------
    command : str
        Which needs it.
    """
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        print(f"mxbn {command}: needs rich: pip install 'mxbn[tools]', or --json", file=sys.stderr)
        return False
    return True
