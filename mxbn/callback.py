"""Watches the moving statistics in training: for `Module.fit`, and for Gluon's estimator."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from mxnet.gluon.contrib.estimator import BatchEnd, TrainBegin, TrainEnd

from .tools.guard import Counts, Guard, watched_layers
from .tools.layers import Attributes


class StatisticsWarning(UserWarning):
    """Steps of the moving statistics were skipped, or they are far from those of the batch."""


class WatchStatistics:
    """A ``batch_end_callback`` that warns when moving statistics go wrong.

    Parameters
    ----------
    every : int, default 50
        Look at the layers after every so many batches. A look waits for the batch.
    bound : float, default 1.0
        Warn when the gap of a layer exceeds this. The gap is, over the layer's channels, the root
        mean square distance of the batch's mean from the moving mean, in moving standard
        deviations, or of the logarithm of the standard deviations' ratio, whichever is larger: in
        inference the layer's output is off by about as much.
    warm_up : int, default 100
        Steps of a layer before its gap counts: the moving statistics must have come near first.

    Warns
    -----
    StatisticsWarning
        If steps were skipped since the last look, because a batch's mean or variance was not
        finite, or if a gap exceeds the bound. The message names the layer.

    Notes
    -----
    Counting begins after the first batch. The statistics of the batch are found from the step that
    it made, new = momentum * old + (1 - momentum) * batch: nothing is computed twice.

    Examples
    --------
    >>> module.fit(train, num_epoch=5, batch_end_callback=mxbn.callback.WatchStatistics())
    """

    def __init__(self, every: int = 50, bound: float = 1.0, warm_up: int = 100) -> None:
        if every < 1 or not bound > 0 or warm_up < 0:
            raise ValueError(
                f"mxbn: WatchStatistics: every={every}, bound={bound}, warm_up={warm_up} were "
                "given, expected at least 1, more than 0 and at least 0"
            )
        self._every = every
        self._bound = bound
        self._warm_up = warm_up
        self._batches = 0
        self._guard: Guard | None = None
        self._before: dict[str, _State] = {}  # after the last batch, if the next is looked at
        self._skipped: dict[str, int] = {}

    def __call__(self, parameters: Any) -> None:
        """Look after a batch, as `Module.fit` calls it."""
        self.after_batch(parameters.locals["self"])

    def after_batch(self, model: Any) -> None:
        """Look at a model after a batch of training.

        Parameters
        ----------
        model : mx.gluon.Block or mx.mod.Module
            The same at every call.
        """
        if self._guard is None:
            self._guard = Guard(model)
        self._batches += 1
        looks, looks_next = (n % self._every == 0 for n in (self._batches, self._batches + 1))
        if not (looks or looks_next):
            return
        now = _states(model, self._guard.read())
        if looks:
            for layer, state in now.items():
                self._check(layer, state)
        self._before = now if looks_next else {}

    def close(self) -> None:
        """Stop counting, which costs a little."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None

    def _check(self, layer: str, now: _State) -> None:
        skipped = now.skipped - self._skipped.get(layer, 0)
        self._skipped[layer] = now.skipped
        if skipped > 0:
            self._warn(
                f"{skipped} steps of channels of {layer} were skipped by batch {self._batches}: "
                "their mean or variance was not finite"
            )
        before = self._before.get(layer)
        if before is None or before.steps < self._warm_up:
            return
        gap = _gap(before, now)
        if gap > self._bound:
            self._warn(
                f"the moving statistics of {layer} are {gap:.3g} standard deviations from those of "
                f"batch {self._batches} (bound {self._bound:g}): inference differs from training "
                "by as much"
            )

    @staticmethod
    def _warn(message: str) -> None:
        warnings.warn(f"mxbn: {message}", StatisticsWarning, stacklevel=4)


class StatisticsHandler(TrainBegin, BatchEnd, TrainEnd):  # type: ignore[misc]
    """An event handler for ``Estimator.fit`` that warns as `WatchStatistics` does.

    Parameters
    ----------
    **options
        Those of `WatchStatistics`.

    Examples
    --------
    >>> estimator.fit(train, epochs=5, event_handlers=[mxbn.callback.StatisticsHandler()])
    """

    def __init__(self, **options: Any) -> None:
        self._watch = WatchStatistics(**options)

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the shapes may not be known yet."""

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Look at the estimator's network."""
        self._watch.after_batch(estimator.net)

    def train_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._watch.close()


class _State(NamedTuple):
    """Of a layer, at one time."""

    mean: Any  # float64, on the first device
    var: Any
    attributes: Attributes
    steps: int  # of one device
    skipped: int


def _states(model: Any, counts: dict[str, Counts]) -> dict[str, _State]:
    return {
        layer.name: _State(
            _values(devices[0]["moving_mean"]),
            _values(devices[0]["moving_var"]),
            layer.attributes,
            counts[layer.name].steps // len(devices),
            counts[layer.name].skipped,
        )
        for layer, devices in watched_layers(model)
    }


def _values(array: Any) -> Any:
    return array.asnumpy().astype("float64")


def _gap(before: _State, now: _State) -> float:
    """Return how far the statistics used in between are from the moving ones before."""
    kept = before.attributes.momentum ** (now.steps - before.steps)
    if kept == 1:  # no step, or none that shows
        return 0.0
    mean = (now.mean - kept * before.mean) / (1 - kept)
    var = (now.var - kept * before.var) / (1 - kept)
    tiny = float(np.finfo("float64").tiny)
    batch_std, moving_std = (
        np.sqrt(np.maximum(v, tiny) + before.attributes.eps) for v in (var, before.var)
    )
    shift, ratio = (mean - before.mean) / moving_std, np.log(batch_std / moving_std)
    return math.sqrt(max(np.mean(shift**2), np.mean(ratio**2)))
