"""The command ``python -m mxbn convert``."""

from __future__ import annotations

import argparse
import json
from typing import Any, Sequence

from .arguments import add_model, add_output, add_shape, has_rich, load_model, table


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "convert",
        help="convert the BatchNorm layers of a model to mxbn's, or back to the built-in ones",
        description="Write a checkpoint whose BatchNorm layers are mxbn's instead of the built-in "
        "ones, or the other way round. The parameters stay as they are. Both models are run on "
        "random data, in inference mode, and nothing is written if their outputs differ by more "
        "than rounding.",
        epilog="Exit status: 1 if nothing was written or a layer had to be left as it was, "
        "otherwise 0.",
    )
    add_model(parser, written=True)
    parser.add_argument(
        "--to",
        choices=("mxbn", "builtin"),
        default="mxbn",
        help="which operator the layers shall have (default: mxbn)",
    )
    add_shape(parser, "; without it the models may not be run, which is then said")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="how much an output may differ, relative to its largest value (default: some units of "
        "rounding)",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert a model on disk.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, out, epoch, to, shape, tolerance, force, json``, as `add_parser` describes them.

    Returns
    -------
    int
        0; 1 if a layer had to be left, or a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file or the model is not as it should be, or the outputs differ.
    """
    from ..tools.conversions import DIFFERENCES
    from ..tools.convert import convert

    if not options.json and not has_rich("convert"):
        return 1
    model, files = load_model(options)
    done = convert(model, options.to, data=dict(options.shape), tolerance=options.tolerance)
    done.model.save(options.out, options.epoch, options.force)
    if options.json:
        report = {
            "layers": [each._asdict() for each in done.changes],
            "difference": done.difference,
            "unchecked": done.unchecked,
            "in_training": DIFFERENCES[options.to],
            "files": files,
        }
        print(json.dumps(report, indent=1))
    else:
        _show(done, DIFFERENCES[options.to], files)
    return 1 if done.left else 0


def _show(done: Any, differences: Sequence[str], files: Sequence[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    layers = table(("BatchNorm", "was", "is", "remarks"))
    for each in done.changes:
        layers.add_row(each.name, each.op, each.to or each.op, "\n".join(each.remarks))
    console.print(layers)
    console.print(f"\n{len(done.converted)} of {len(done.changes)} layers converted")
    if done.unchecked is None:
        console.print(
            "outputs in inference mode, on random data: differ by at most "
            f"{done.difference:.1e} of the largest value"
        )
    else:
        console.print(f"outputs NOT compared: {done.unchecked}")
    if done.converted:
        console.print("from now on:")
        for each in differences:
            console.print(f"- {each}")
    console.print(f"written: {', '.join(files)}")
