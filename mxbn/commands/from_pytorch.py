"""The command ``python -m mxbn from-pytorch``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..tools.files import atomic, refuse_existing
from ..tools.params_file import save_arrays
from .arguments import add_output, has_rich, table


def add_parser(subparsers: Any) -> None:
    """Add this command to those of ``python -m mxbn``.

    Parameters
    ----------
    subparsers : argparse action
        What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "from-pytorch",
        help="make MXNet's parameters of the BatchNorm layers of a PyTorch state dict",
        description="Write gamma, beta and the moving statistics of all BatchNorm layers of a "
        "state dict to a .params file, and say with which attributes the layers are to be made. "
        "In PyTorch, np.savez(FILE, **{n: t.cpu().numpy() for n, t in net.state_dict().items()}) "
        "writes the state dict.",
    )
    parser.add_argument("file", metavar="FILE.npz", help="the state dict")
    parser.add_argument("out", metavar="OUT.params", help="the file to write")
    parser.add_argument(
        "--names",
        metavar="FILE.json",
        help='layers to take and what they are called in MXNet: {"layer1.0.bn1": "stage1_bn0"} '
        "(default: all with running statistics, with underscores for dots)",
    )
    parser.add_argument(
        "--gluon",
        action="store_true",
        help="name the statistics running_mean and running_var, as Gluon does: for "
        "net.collect_params().load(FILE, allow_missing=True)",
    )
    parser.add_argument(
        "--values-per-channel",
        type=int,
        metavar="M",
        help="values per channel in a step of the training, samples times positions, to make "
        "biased variances of PyTorch's unbiased ones (default: take them as they are)",
    )
    parser.add_argument(
        "--eps",
        type=float,
        default=1e-5,
        metavar="X",
        help="of the layers in PyTorch (default: 1e-5)",
    )
    parser.add_argument(
        "--momentum",
        type=_momentum,
        default=0.1,
        metavar="X",
        help="of the layers in PyTorch, a number or none (default: 0.1)",
    )
    add_output(parser, "overwrite the file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the BatchNorm layers of a state dict.

    Parameters
    ----------
    options : argparse.Namespace
        ``file, out, names, gluon, values_per_channel, eps, momentum, force, json``, as `add_parser`
        describes them.

    Returns
    -------
    int
        0; 1 if a package is missing.

    Raises
    ------
    ValueError, OSError
        If a file or an option is not as it should be.
    """
    from ..tools.from_pytorch import as_params, from_pytorch

    if not options.json and not has_rich("from-pytorch"):
        return 1
    if not options.force:
        refuse_existing(options.out)
    layers = from_pytorch(
        options.file,
        _names(options.names) if options.names else None,
        values_per_channel=options.values_per_channel,
        eps=options.eps,
        momentum=options.momentum,
    )
    if not layers:
        raise ValueError(
            f"{options.file} has no layer with running statistics (--names takes others)"
        )
    arguments, states = as_params(layers, "running" if options.gluon else "moving")
    with atomic(options.out) as path:
        save_arrays(path, arguments, states)
    if options.json:
        report = {
            "layers": {
                source: {"name": each.name, "remarks": each.remarks, **each.attributes}
                for source, each in layers.items()
            },
            "file": options.out,
        }
        print(json.dumps(report, indent=1))
    else:
        _show(layers, options.out)
    return 0


def _show(layers: Any, path: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    attributes = tuple(next(iter(layers.values())).attributes)
    shown = table(("PyTorch", "MXNet", "channels", *attributes))
    for source, each in layers.items():
        values = (each.arrays["gamma"].size, *each.attributes.values())
        shown.add_row(
            source, each.name, *(str(v) if isinstance(v, bool) else f"{v:g}" for v in values)
        )
    console.print(shown)
    console.print()
    for remark in dict.fromkeys(r for each in layers.values() for r in each.remarks):
        having = [source for source, each in layers.items() if remark in each.remarks]
        console.print(f"{'all' if len(having) == len(layers) else ', '.join(having)}: {remark}")
    console.print(f"written: {path}")


def _names(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f'{path} holds other things than names, expected {{"bn1": "batchnorm0"}}')
    return found


def _momentum(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)
