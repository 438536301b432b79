"""The command line: ``mxbn COMMAND``, or ``python -m mxbn COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

import mxbn
from mxbn import demo
from mxbn.commands import convert, fold, freeze, from_pytorch, inspect, recalibrate

# Modules with add_parser(subparsers), which sets the default `run`.
COMMANDS = (inspect, convert, fold, recalibrate, freeze, from_pytorch, demo)
INTERRUPTED = 128 + 2  # as a shell reports SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line by default.

    Returns
    -------
    int
        The exit status: 0, or 1 if the command found a fault or could not run. argparse itself
        exits with 2 if the arguments are wrong.
    """
    parser = argparse.ArgumentParser(
        prog="mxbn",
        description="BatchNorm for Apache MXNet 1.9.1 that does exactly what its flags say.",
        epilog="Exit status: 0 if all is well, 1 if something is wrong, 2 for wrong arguments.",
    )
    parser.add_argument("--version", action="version", version=f"mxbn {mxbn.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nmxbn: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone. Python flushes once more when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        print(f"mxbn: {str(error).replace('mxbn: ', '', 1)}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
