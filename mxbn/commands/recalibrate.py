"""The command ``python -m mxbn recalibrate``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..tools.checkpoint import Checkpoint, names
from ..tools.files import refuse_existing
from .arguments import batches_of_file, has_rich, positive


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
    parser.add_argument("prefix", metavar="PREFIX", help="of the model: PREFIX-symbol.json, ...")
    parser.add_argument("out", metavar="OUT_PREFIX", help="of the files to write")
    parser.add_argument(
        "--data", required=True, metavar="FILE.npz", help="the inputs by name, such as data"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="samples per batch, in the order of the file (default: 32)",
    )
    parser.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="of PREFIX-N.params (default: 0)"
    )
    parser.add_argument(
        "--layers",
        action="append",
        metavar="NAME",
        help="a name or a pattern such as 'stage1_*'; may be given again (default: the layers that "
        "training steps)",
    )
    parser.add_argument(
        "--earlier",
        choices=("batch", "moving"),
        default="batch",
        help="the layers before a layer use the statistics of the batch, as in training, or the "
        "new moving ones, as in inference: one pass over the data per layer (default: batch)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files")
    parser.add_argument("--json", action="store_true", help="print JSON")
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
    files = names(options.out, options.epoch)
    if not options.force:
        refuse_existing(*files)
    model = Checkpoint.load(options.prefix, options.epoch)
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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("BatchNorm")
    for title in (
        "values per\nchannel",
        "largest shift\nof a mean",
        "variance ratio\nof new to old",
    ):
        table.add_column(title, justify="right")
    for name, values, shift, low, high in (_row(each).values() for each in done.layers):
        table.add_row(name, str(values), f"{shift:.3g} std", f"{low:.3g} to {high:.3g}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nrecalibrated over {done.samples} samples")
    console.print(f"written: {', '.join(files)}")
