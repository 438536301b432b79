"""What commands share: arguments and their types, files, and tables."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Sequence

import mxnet as mx

from ..tools.checkpoint import Checkpoint, names
from ..tools.files import load_npz, refuse_existing


def add_model(parser: argparse.ArgumentParser, written: bool) -> None:
    """Add the arguments that name a model on disk.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    written : bool
        Whether another one is written, which has a name too.
    """
    parser.add_argument("prefix", metavar="PREFIX", help="of the model: PREFIX-symbol.json, ...")
    if written:
        parser.add_argument("out", metavar="OUT_PREFIX", help="of the files to write")
    parser.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="of PREFIX-N.params (default: 0)"
    )


def add_shape(parser: argparse.ArgumentParser, use: str) -> None:
    """Add the option --shape, which may be given again; `use` says what for."""
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="NAME=SHAPE",
        help=f"shape of an input, such as data=1,3,224,224{use}",
    )


def add_batch_size(parser: argparse.ArgumentParser, use: str) -> None:
    """Add the option --batch-size; `use` says what for."""
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help=f"{use} (default: 32)"
    )


def add_layers(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option --layers, which may be given again."""
    parser.add_argument(
        "--layers",
        action="append",
        metavar="NAME",
        help=f"a name or a pattern such as 'stage1_*'; may be given again (default: {default})",
    )


def add_output(parser: argparse.ArgumentParser, force: str = "overwrite files") -> None:
    """Add the options --force, of which `force` says what it does, and --json."""
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_model(options: argparse.Namespace) -> tuple[Checkpoint, tuple[str, str]]:
    """Read the model that `add_model` named.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, out, epoch, force``.

    Returns
    -------
    model : Checkpoint
    files : (str, str)
        Those to write.

    Raises
    ------
    ValueError, OSError
        If a file is not as it should be, or one to write exists and ``force`` is False.
    """
    files = names(options.out, options.epoch)
    if not options.force:
        refuse_existing(*files)
    return Checkpoint.load(options.prefix, options.epoch), files


def table(texts: Sequence[str], numbers: Sequence[str] = (), overflow: Any = "ellipsis") -> Any:
    """Return an empty table of rich.

    Parameters
    ----------
    texts, numbers : sequence of str
        The titles of the columns, which are aligned on the left and on the right.
    overflow : {'ellipsis', 'fold'}
        What becomes of texts that are too long.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for title in texts:
        made.add_column(title, overflow=overflow)
    for title in numbers:
        made.add_column(title, justify="right")
    return made


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
