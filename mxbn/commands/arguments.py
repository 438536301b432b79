"""What commands share: an argument's type, and the check for the package that shows tables."""

from __future__ import annotations

import argparse
import sys


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
