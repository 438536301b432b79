"""The command ``python -m mxbn inspect``."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..tools.checkpoint import Checkpoint
from ..tools.files import refuse_existing
from .arguments import add_batch_size, add_model, add_output, batches_of_file, has_rich, table


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "inspect",
        help="show what each BatchNorm of a saved model does, and whether it is sound",
        description="Show each BatchNorm of a saved model: what it was made with, which statistics "
        "it uses in a mode, whether they step, and why; what its gradient is; and what is wrong "
        "with its parameters.",
        epilog="Exit status: 1 if a layer has a problem (remarks do not count), otherwise 0.",
    )
    add_model(parser, written=False)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--for-training",
        action="store_true",
        default=True,
        help="as after bind(for_training=True), with gradients (default)",
    )
    mode.add_argument(
        "--inference",
        dest="for_training",
        action="store_false",
        help="as after bind(for_training=False), without gradients",
    )
    parser.add_argument(
        "--is-train",
        choices=("yes", "no"),
        help="what forward(is_train) is told (default: yes for training, no for inference)",
    )
    parser.add_argument(
        "--data",
        metavar="FILE.npz",
        help="inputs by name, such as data: compare what enters each layer in inference with its "
        "moving statistics",
    )
    add_batch_size(parser, "samples of --data that are computed at once")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw that comparison (needs --data and matplotlib)"
    )
    add_output(parser, "overwrite FILE.png")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Inspect a model on disk.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, epoch, for_training, is_train, data, batch_size, plot, force, json``, as
        `add_parser` describes them.

    Returns
    -------
    int
        0; 1 if a layer has a problem, or a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file, the model or the data is not as it should be.
    """
    from ..tools.inspect import inspect

    if not options.json and not has_rich("inspect"):
        return 1
    if options.plot:
        _check_plot(options)
    model = Checkpoint.load(options.prefix, options.epoch)
    data = options.data and batches_of_file(model, options.data, options.batch_size)
    is_train = None if options.is_train is None else options.is_train == "yes"
    found = inspect(model, options.for_training, is_train, data, progress=not options.json)
    if options.plot:
        from ..tools.gaps import plot

        plot([row.gap for row in found.rows if row.gap is not None], options.plot)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        _show(found)
    return 0 if found.healthy else 1


def _check_plot(options: argparse.Namespace) -> None:
    """Refuse before the work what could only fail after it."""
    if not options.data:
        raise ValueError("mxbn: --plot shows how --data compares: give both")
    if not options.force:
        refuse_existing(options.plot)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise ValueError("mxbn: --plot needs matplotlib: pip install 'mxbn[tools]'") from error
    ending = os.path.splitext(options.plot)[1][1:].lower()
    if ending not in FigureCanvasAgg.get_supported_filetypes():
        raise ValueError(f"mxbn: --plot {options.plot} does not end in .png, .pdf or .svg")


def _show(found: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not found.rows:
        console.print("The model has no BatchNorm.")
        return
    layers, same = _layer_table(found)
    console.print(layers)
    if same:
        console.print(f"\nall: {', '.join(same)}")
    console.print(f"\nWith for_training={found.for_training}, is_train={found.is_train}:")
    does = [row.behaviour for row in found.rows]
    for each in dict.fromkeys(does):
        console.print(f"  {each.why}{_names(found, each, does)}")
        console.print(f"    gradient: {each.gradient}")
    if any(row.gap for row in found.rows):
        console.print("\nThe data's statistics in inference against the moving ones:")
        console.print(_gap_table(found))
    fold = ["oneDNN folds it into the convolution before it"]
    folds = [fold if row.folded_into and found.for_training else [] for row in found.rows]
    for title, findings in (
        ("If bound without gradients, and MXNET_SUBGRAPH_BACKEND is not NONE", folds),
        ("Problems", [row.problems for row in found.rows]),
        ("Remarks", [row.remarks for row in found.rows]),
    ):
        texts = dict.fromkeys(text for each in findings for text in each)
        if texts:
            console.print(f"\n{title}:")
        for text in texts:
            console.print(f"  {text}{_names(found, text, findings)}")
    unsound = sum(bool(row.problems) for row in found.rows)
    console.print(f"\n{len(found.rows)} layers, {unsound or 'none'} with problems")


def _names(found: Any, text: Any, of_rows: list[Any]) -> str:
    """Return which rows have a text, in brackets."""
    names = [row.name for row, own in zip(found.rows, of_rows) if own == text or text in own]
    if len(names) == len(found.rows):
        return " (all layers)" if len(names) > 1 else ""
    listed = ", ".join(names[:3])
    return f" ({len(names)} layers: {listed}, ...)" if len(names) > 3 else f" ({listed})"


def _layer_table(found: Any) -> tuple[Any, list[str]]:
    """Return a table of the layers, and what is left out of it, being the same for all."""
    flags = ("fix_gamma", "use_global_stats", "use_batch_stats")
    columns = {
        "operator": [row.operator for row in found.rows],
        "channels": [str(row.channels or "?") for row in found.rows],
        "axis": [str(row.attributes.axis) for row in found.rows],
        "eps": [f"{row.attributes.eps:g}" for row in found.rows],
        "momentum": [f"{row.attributes.momentum:g}" for row in found.rows],
        **{flag: [str(getattr(row.attributes, flag)) for row in found.rows] for flag in flags},
        "statistics": [row.behaviour.statistics for row in found.rows],
        "step": [row.behaviour.steps for row in found.rows],
        "state": [
            "problem" if row.problems else "remark" if row.remarks else "well" for row in found.rows
        ],
    }
    same = {k: v[0] for k, v in columns.items() if len(set(v)) == 1 and len(v) > 1}
    left = {k: v for k, v in columns.items() if k not in same}
    layers = table(("BatchNorm",), tuple(left), "fold")
    for row, *values in zip(found.rows, *left.values()):
        layers.add_row(row.name, *values)
    return layers, [f"{key} {value}" for key, value in same.items()]


def _gap_table(found: Any) -> Any:
    from ..tools.inspect import gap_as_dict

    gaps = table(
        ("BatchNorm",),
        ("values per\nchannel", "mean off by\nup to (std)", "variance ratio\nbatch/moving"),
        "fold",
    )
    for row in found.rows:
        if row.gap is not None:
            values, *numbers = gap_as_dict(row.gap).values()
            shift, low, high = ("?" if each is None else f"{each:.3g}" for each in numbers)
            gaps.add_row(row.name, str(values), shift, f"{low} to {high}")
    return gaps
