"""The demonstration ``python -m mxbn demo``: real digits, trained networks, every mode."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

EXTRAS = {"sklearn": "scikit-learn", "rich": "rich"}


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "demo",
        help="train two networks on real digits and show what every mode of BatchNorm does",
        description="Train a small convolutional network with mxbn's BatchNorm on scikit-learn's "
        "handwritten digits, through Module and through Gluon; save it, load it and predict. Then "
        "call BatchNorm in every mode on the data that reaches a layer of the trained network, and "
        "compare it, and MXNet's built-in BatchNorm, with float64.",
        epilog="Exit status: 1 if an accuracy is too low, if a loaded network predicts "
        "otherwise than the trained one, or if mxbn's BatchNorm is not exact; otherwise 0.",
    )
    parser.add_argument(
        "--epochs",
        type=_integer(1, 1000),
        metavar="N",
        default=10,
        help="how often each training goes through the digits (default: 10)",
    )
    parser.add_argument(
        "--seed",
        type=_integer(0, 2**31 - 1),
        metavar="N",
        default=0,
        help="seed of the initial values and of the shuffling (default: 0)",
    )
    parser.add_argument(
        "--out", type=_folder, metavar="DIR", help="folder that keeps the saved networks"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on standard output; progress goes to standard error",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration.

    Parameters
    ----------
    options : argparse.Namespace
        ``epochs, seed, out, json``, as `add_parser` describes them.

    Returns
    -------
    int
        The exit status.
    """
    # MXNet otherwise reports every bound executor on standard error.
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    try:
        from . import report
        from .experiment import experiment
    except ModuleNotFoundError as error:
        missing = EXTRAS.get(str(error.name).split(".")[0])
        if missing is None:
            raise
        print(f"mxbn demo: needs {missing}: pip install 'mxbn[demo]'", file=sys.stderr)
        return 1
    console = report.console(stderr=options.json)
    with report.progress(console, options.epochs) as on_epoch:
        results = experiment(options.epochs, options.seed, options.out, on_epoch)
    if options.json:
        print(report.as_json(results))
    else:
        report.show(console, results)
    report.show_verdict(console, results)
    return 1 if results.problems else 0


def _integer(low: int, high: int) -> Any:
    def integer(text: str) -> int:
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {low} to {high}")

    return integer


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path
