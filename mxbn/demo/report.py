"""The demonstration on the screen, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from typing import Iterator

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .experiment import LARGEST_DIFFERENCE, LEAST_ACCURACY, Results
from .modes import SAME, Mode, Observation
from .networks import OnEpoch

NETWORKS = 2
GRADIENTS = ("data_gradient", "gamma_gradient", "beta_gradient")
STATISTICS = ("moving_mean", "moving_var")


def console(*, stderr: bool) -> Console:
    """Make the console to show things on.

    Parameters
    ----------
    stderr : bool
        Whether it is standard error instead of standard output.

    Returns
    -------
    rich.console.Console
        As wide as the terminal, or as ``COLUMNS``.
    """
    return Console(stderr=stderr, highlight=False)


@contextmanager
def progress(console: Console, epochs: int) -> Iterator[OnEpoch]:
    """Show how the training goes: a line per epoch, and a bar if the console is a terminal.

    Parameters
    ----------
    console : rich.console.Console
        Where to show it.
    epochs : int
        Of each of the two trainings.

    Yields
    ------
    callable
        To be called after every epoch.
    """
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    console.print("Training a small convolutional network on handwritten digits, with mxbn:")
    with bar:
        task = bar.add_task("", total=NETWORKS * epochs)

        def on_epoch(network: str, epoch: int, loss: float, accuracy: float) -> None:
            console.print(
                f"{network:6}  epoch {epoch + 1:{len(str(epochs))}}/{epochs}  "
                f"training loss {loss:.4f}  accuracy {accuracy:.4f}"
            )
            bar.advance(task)

        yield on_epoch


def as_json(results: Results) -> str:
    """Write the results as one JSON object.

    Parameters
    ----------
    results : Results
        What the demonstration found.

    Returns
    -------
    str
        With the names of `Results` and what it holds.
    """
    return json.dumps(dataclasses.asdict(results), indent=2, allow_nan=False)


def show(console: Console, results: Results) -> None:
    """Print the results as tables.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    results : Results
        What the demonstration found.
    """
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    for part in (
        f"{versions}\nseed {results.seed}, {results.seconds:.1f} seconds",
        _networks(results),
        "Now BatchNorm alone, on what reaches the last such layer of the trained Gluon network "
        f"from test digits ({results.layer.name}, data {results.layer.data_shape}): a forward in "
        "record(train_mode=is_train), then backward(train_mode=backward), whose default is True.",
        _modes(results),
        f"Both flags: {results.both_flags}",
        _differences(results),
        _faults(results),
    ):
        console.print()
        console.print(part)


def show_verdict(console: Console, results: Results) -> None:
    """Print what is wrong, or that nothing is.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    results : Results
        What the demonstration found.
    """
    console.print()
    for problem in results.problems:
        console.print(f"[bold red]Wrong:[/] {problem}")
    if not results.problems:
        console.print(
            f"[bold green]Right:[/] both test accuracies are at least {LEAST_ACCURACY}, the loaded "
            "networks predict as the trained ones, and mxbn is within "
            f"{LARGEST_DIFFERENCE:.0e} of float64 in every mode."
        )


def _networks(results: Results) -> Table:
    table = _table(
        f"Handwritten digits: {results.training_digits} for training, "
        f"{results.test_digits} for the test"
    )
    table.add_column("network")
    table.add_column("test\naccuracy", justify="right")
    table.add_column("training\nseconds", justify="right")
    table.add_column("same\npredictions")
    table.add_column("largest difference\nof a probability", justify="right")
    for name, network in results.networks.items():
        table.add_row(f"{name}, trained", f"{network.accuracy:.4f}", f"{network.seconds:.1f}")
        for how, loaded in network.loaded.items():
            table.add_row(
                f"  {how}",
                f"{loaded.accuracy:.4f}",
                "",
                "yes" if loaded.same_predictions else "[red]no[/]",
                f"{loaded.largest_probability_difference:.0e}",
            )
    return table


def _modes(results: Results) -> Table:
    table = _table(
        "Which statistics",
        "output, gradient (of the data): the statistics with which float64 gives the same. "
        "steps: the pass in which moving_mean or moving_var changed, even by one bit.",
    )
    _add_mode_columns(table)
    for operator in ("mxbn", "built-in"):
        table.add_column(f"{operator}\n\noutput")
        table.add_column("\n\ngradient")
        table.add_column("\n\nsteps")
    for row in results.modes:
        table.add_row(*_mode_cells(row.mode), *_facts(row.mxbn), *_facts(row.built_in))
    table.add_row("True", "True", "any", "any", "ValueError" if results.both_flags else "accepted")
    return table


def _facts(seen: Observation | None) -> list[str]:
    if seen is None:
        return ["-"] * 3
    return [
        seen.output_of,
        f"[red]{seen.gradient_of}[/]" if seen.gradient_of != seen.output_of else seen.gradient_of,
        ", ".join(seen.stepped_in) or "never",
    ]


def _differences(results: Results) -> Table:
    table = _table(
        "How far from float64",
        "Largest |difference| / largest |right value|, of the output and of the gradients of data, "
        "gamma and beta. Rounding a number to float32 costs up to 6e-08.",
    )
    _add_mode_columns(table)
    for operator in ("mxbn", "built-in"):
        table.add_column(f"{operator}\n\noutput", justify="right")
        for name in ("data", "gamma", "beta"):
            table.add_column(f"\n\n{name}", justify="right")
    for row in results.modes:
        table.add_row(
            *_mode_cells(row.mode), *_difference_cells(row.mxbn), *_difference_cells(row.built_in)
        )
    return table


def _difference_cells(seen: Observation | None) -> list[str]:
    if seen is None:
        return ["-"] * 4
    cells = []
    for key in ("output", *GRADIENTS):
        value = seen.difference[key]
        text = f"{value:.3f}" if 0.001 <= value < 10 else f"{value:.0e}"
        cells.append(f"[red]{text}[/]" if value > SAME else text)
    return cells


def _faults(results: Results) -> str:
    calls = [row.built_in.difference for row in results.modes if row.built_in is not None]
    gradients, statistics = (
        [max(call[key] for key in keys) for call in calls] for keys in (GRADIENTS, STATISTICS)
    )
    return (
        f"The built-in operator: wrong gradients in {sum(each > SAME for each in gradients)} of "
        f"{len(calls)} calls, off by up to {max(gradients):.2g}; wrong moving statistics "
        f"afterwards in {sum(each > SAME for each in statistics)}, off by up to "
        f"{max(statistics):.2g}."
    )


def _table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=title,
        title_style="bold",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,  # so that every table fits in 80 columns
    )


def _add_mode_columns(table: Table) -> None:
    for name in ("use_\nglobal\n_stats", "use_\nbatch\n_stats", "is_\ntrain", "back-\nward"):
        table.add_column(name)


def _mode_cells(mode: Mode) -> list[str]:
    return [
        str(flag)
        for flag in (
            mode.use_global_stats,
            mode.use_batch_stats,
            mode.is_train,
            mode.backward_is_train,
        )
    ]
