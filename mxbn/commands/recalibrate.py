"""The command ``python -m mxbn recalibrate``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .arguments import (
    add_batch_size,
    add_layers,
    add_model,
    add_output,
    batches_of_file,
    has_rich,
    load_model,
    table,
)


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "recalibrate",
        help="recompute moving statistics exactly, over a data set",
        description="Set the moving mean and variance of each BatchNorm of a saved model to those "
        "of all data that comes to it, and show how far they were off. Everything else stays.",
    )
    add_model(parser, written=True)
    parser.add_argument(
        "--data", required=True, metavar="FILE.npz", help="the inputs by name, such as data"
    )
    add_batch_size(parser, "samples per batch, in the order of the file")
    add_layers(parser, "the layers that training steps")
    parser.add_argument(
        "--earlier",
        choices=("batch", "moving"),
        default="batch",
        help="the layers before a layer use the statistics of the batch, as in training, or the "
        "new moving ones, as in inference: one pass over the data per layer (default: batch)",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Recalibrate a model on disk.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, out, data, batch_size, epoch, layers, earlier, force, json``, as `add_parser`
        describes them.

    Returns
    -------
    int
        0; 1 if a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file, the model or the data is not as it should be.
    """
    from ..tools.recalibrate import recalibrate

    if not options.json and not has_rich("recalibrate"):
        return 1
    model, files = load_model(options)
    batches = batches_of_file(model, options.data, options.batch_size)
    done = recalibrate(model, batches, options.layers, options.earlier, progress=not options.json)
    model.save(options.out, options.epoch, options.force)
    if options.json:
        layers = [_row(each) for each in done.layers]
        print(json.dumps({"samples": done.samples, "layers": layers, "files": files}, indent=1))
    else:
        _show(done, files)
    return 0


def _row(drift: Any) -> dict[str, Any]:
    ratio = drift.variance_ratio
    return {
        "name": drift.name,
        "values": drift.values,
        "largest_mean_shift": float(abs(drift.mean_shift).max()),
        "smallest_variance_ratio": float(ratio.min()),
        "largest_variance_ratio": float(ratio.max()),
    }


def _show(done: Any, files: Any) -> None:
    from rich.console import Console

    layers = table(
        ("BatchNorm",),
        ("values per\nchannel", "largest shift\nof a mean", "variance ratio\nof new to old"),
    )
    for name, values, shift, low, high in (_row(each).values() for each in done.layers):
        layers.add_row(name, str(values), f"{shift:.3g} std", f"{low:.3g} to {high:.3g}")
    console = Console(highlight=False)
    console.print(layers)
    console.print(f"\nrecalibrated over {done.samples} samples")
    console.print(f"written: {', '.join(files)}")
