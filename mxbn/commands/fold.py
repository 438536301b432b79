"""The command ``python -m mxbn fold``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..tools.files import load_npz
from .arguments import add_model, add_output, add_shape, has_rich, load_model, table


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "fold",
        help="fold BatchNorm layers into the layers before them, for inference without mxbn",
        description="Work every BatchNorm into the weights of the Convolution, Deconvolution or "
        "FullyConnected before it, compare the outputs with those before, and save the result, "
        "which needs no mxbn. Layers that cannot be folded are listed with the reason.",
        epilog="Nothing is written if the outputs differ by more than rounding explains.",
    )
    add_model(parser, written=True)
    add_shape(parser, ", for random values to compare on")
    parser.add_argument(
        "--data", metavar="FILE.npz", help="values of the inputs to compare on, by name"
    )
    add_output(parser, "overwrite files, and fold moving statistics that look wrong")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fold a model on disk.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, out, epoch, shape, data, force, json``, as `add_parser` describes them.

    Returns
    -------
    int
        0; 1 if a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file or the model is not as it should be.
    """
    from ..tools.fold import fold

    if not options.json and not has_rich("fold"):
        return 1
    model, files = load_model(options)
    data = load_npz(options.data) if options.data else {}
    folded = fold(model, data, dict(options.shape), options.force)
    folded.model.save(options.out, options.epoch, options.force)
    if options.json:
        report = {
            "layers": [each._asdict() for each in folded.layers],
            "outputs": [each._asdict() for each in folded.differences],
            "files": files,
        }
        print(json.dumps(report, indent=1))
    else:
        _show(folded, files)
    return 0


def _show(folded: Any, files: Any) -> None:
    from rich.console import Console

    layers = table(("BatchNorm", "folded into", "why it stays", "as"))
    for each in folded.layers:
        layers.add_row(each.name, each.into or "", each.reason or "", each.result or "")
    console = Console(highlight=False)
    console.print(layers)
    count = sum(each.into is not None for each in folded.layers)
    console.print(f"\n{count} of {len(folded.layers)} layers folded")
    for each in folded.differences:
        console.print(
            f"{each.output}: differs by at most {each.absolute:.1e}, {each.relative:.1e} of its "
            f"largest value; rounding explains {each.bound:.1e}"
        )
    console.print(f"written: {', '.join(files)}")
