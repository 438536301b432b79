"""The demonstration's steps, from the data to the verdict."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

import mxnet as mx
import numpy as np
import sklearn

import mxbn

from . import data, modes
from .data import Digits
from .modes import Row
from .networks import OnEpoch, Trained, train_gluon, train_module

LEAST_ACCURACY = 0.97
LARGEST_DIFFERENCE = 4 * float(np.finfo("float32").eps)
LAYER_BATCH = 64  # test digits that go through the layer for the table of modes


@dataclass
class Loaded:
    """How a network that was saved and loaded predicts the test digits."""

    accuracy: float
    same_predictions: bool
    largest_probability_difference: float


@dataclass
class Network:
    """How a trained network predicts the test digits, and what became of it once loaded."""

    seconds: float
    accuracy: float
    loaded: dict[str, Loaded]


@dataclass
class Layer:
    """The layer whose data the modes are shown on."""

    name: str
    data_shape: tuple[int, ...]


@dataclass
class Results:
    """Everything the demonstration found."""

    versions: dict[str, str]
    epochs: int
    seed: int
    training_digits: int
    test_digits: int
    networks: dict[str, Network]
    layer: Layer
    modes: list[Row]
    both_flags: str | None
    seconds: float
    problems: list[str] = field(default_factory=list)


def experiment(epochs: int, seed: int, out: Path | None, on_epoch: OnEpoch) -> Results:
    """Train, save, load and predict with both APIs, then go through the modes.

    Parameters
    ----------
    epochs, seed : int
        Of each training.
    out : pathlib.Path or None
        Folder that keeps the saved networks.
    on_epoch : callable
        Called after every epoch.

    Returns
    -------
    Results
        With `problems` empty if all is as it should be.
    """
    start = time.perf_counter()
    digits = data.load()
    with _seeded(seed), _folder(out) as folder:
        module = train_module(digits, epochs, folder, on_epoch)
        gluon, net = train_gluon(digits, epochs, folder, on_epoch)
    inputs = modes.inputs_of_layer(
        net, digits.test_images[:LAYER_BATCH], digits.test_labels[:LAYER_BATCH]
    )
    results = Results(
        versions={
            "mxbn": mxbn.__version__,
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
            "python": platform.python_version(),
        },
        epochs=epochs,
        seed=seed,
        training_digits=len(digits.train_labels),
        test_digits=len(digits.test_labels),
        networks={"Module": _network(module, digits), "Gluon": _network(gluon, digits)},
        layer=Layer(inputs.layer, inputs.data.shape),
        modes=modes.table(inputs),
        both_flags=modes.refusal(inputs),
        seconds=time.perf_counter() - start,
    )
    results.problems.extend(_problems(results))
    return results


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed MXNet's and NumPy's random numbers; NumPy's state is restored, MXNet's cannot be."""
    state = np.random.get_state()
    mx.random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Make a temporary folder, whose files move to out, if given, when all are complete."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mxbn-demo-", dir=out) as temporary:
        yield Path(temporary)
        if out is not None:
            for file in Path(temporary).iterdir():
                os.replace(file, out / file.name)


def _network(trained: Trained, digits: Digits) -> Network:
    expected = trained.probabilities
    return Network(
        trained.seconds,
        digits.accuracy(expected),
        {
            how: Loaded(
                digits.accuracy(found),
                bool((found.argmax(axis=1) == expected.argmax(axis=1)).all()),
                float(np.abs(found - expected).max()),
            )
            for how, found in trained.loaded.items()
        },
    )


def _problems(results: Results) -> Iterator[str]:
    for name, network in results.networks.items():
        if not network.accuracy >= LEAST_ACCURACY:
            yield (
                f"{name}: test accuracy {network.accuracy:.4f}, expected at least {LEAST_ACCURACY}"
            )
        for how, loaded in network.loaded.items():
            if not loaded.same_predictions:
                yield f"{name}: loaded by {how}, the network predicts otherwise than when trained"
    for row in results.modes:
        for key, difference in row.mxbn.difference.items():
            if not difference <= LARGEST_DIFFERENCE:
                yield (
                    f"mxbn: {key} is off by {difference:.1e}, expected at most "
                    f"{LARGEST_DIFFERENCE:.1e}, in {row.mode}"
                )
        if "backward" in row.mxbn.stepped_in:
            yield f"mxbn: the moving statistics stepped in backward, in {row.mode}"
    if results.both_flags is None:
        yield "mxbn: use_global_stats and use_batch_stats together raised no ValueError"
