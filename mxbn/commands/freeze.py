"""The command ``python -m mxbn freeze``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .arguments import add_layers, add_model, add_output, has_rich, load_model, table

_ON_OFF = {"on": True, "off": False}


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "freeze",
        help="set which statistics BatchNorm layers use, whether these step, and what trains",
        description="Set, for BatchNorm layers of a saved model, the statistics they use, whether "
        "the moving ones step in training, and whether gamma and beta train. Without a switch, "
        "layers use the moving statistics, which then stay, and gamma and beta do not train.",
        epilog="gamma and beta that do not train get __lr_mult__ 0 and __wd_mult__ 0, which "
        "Module heeds and a Gluon SymbolBlock does not.",
    )
    add_model(parser, written=True)
    add_layers(parser, "all")
    parser.add_argument(
        "--statistics",
        choices=("moving", "batch", "is_train"),
        help="use the moving ones, the batch's, or the batch's in training only",
    )
    parser.add_argument("--step", choices=_ON_OFF, help="whether the moving statistics step")
    parser.add_argument("--affine", choices=_ON_OFF, help="whether gamma and beta train")
    parser.add_argument(
        "--momentum", type=float, metavar="M", help="with --step on: instead of the former one"
    )
    parser.add_argument(
        "--undo", action="store_true", help="instead: set what this command found, back again"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Freeze the layers of a model on disk.

    Parameters
    ----------
    options : argparse.Namespace
        ``prefix, out, epoch, layers, statistics, step, affine, momentum, undo, force, json``, as
        `add_parser` describes them.

    Returns
    -------
    int
        0; 1 if a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file or the model is not as it should be, or the switches do not go together.
    """
    from ..tools.freeze import freeze, freeze_state, unfreeze

    if not options.json and not has_rich("freeze"):
        return 1
    switches = (options.statistics, _ON_OFF.get(options.step), _ON_OFF.get(options.affine))
    if options.undo and (*switches, options.momentum) != (None,) * 4:
        raise ValueError("--undo takes no switch")
    before, files = load_model(options)
    if options.undo:
        after = unfreeze(before, options.layers)
    else:
        after = freeze(before, options.layers, *switches, options.momentum)
    after.save(options.out, options.epoch, options.force)
    states = freeze_state(before), freeze_state(after)
    if options.json:
        layers = [each._asdict() for each in states[1]]
        print(json.dumps({"layers": layers, "files": files}, indent=1))
    else:
        _show(*states, files)
    return 0


def _show(before: Any, after: Any, files: Any) -> None:
    from rich.console import Console

    layers = table(("BatchNorm", "statistics", "step", "gamma and beta"))
    words = {True: "on", False: "off"}
    for old, new in zip(before, after):
        pairs = [(words.get(was, was), words.get(now, now)) for was, now in zip(old[1:], new[1:])]
        layers.add_row(new.name, *(now if was == now else f"{was} -> {now}" for was, now in pairs))
    console = Console(highlight=False)
    console.print(layers)
    console.print(f"\nwritten: {', '.join(files)}")
