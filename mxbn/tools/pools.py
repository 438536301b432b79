"""What enters BatchNorm layers, summed up exactly."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np

from .layers import Layer

Array = Any


class Drift(NamedTuple):
    """How far the moving statistics of a layer were from those of the data.

    Attributes
    ----------
    name : str
        Of the first layer that has these statistics.
    values : int
        Values per channel, over all uses.
    eps : float
    mean_before, var_before, mean, var : numpy.ndarray
        Shape (channels,), float64; those before are averages over the contexts.
    """

    name: str
    values: int
    eps: float
    mean_before: Array
    var_before: Array
    mean: Array
    var: Array

    @property
    def mean_shift(self) -> Array:
        """Per channel, the change of the mean in standard deviations ``sqrt(var_before + eps)``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.mean - self.mean_before) / np.sqrt(self.var_before + self.eps)

    @property
    def variance_ratio(self) -> Array:
        """Per channel, ``(var + eps) / (var_before + eps)``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.var + self.eps) / (self.var_before + self.eps)


class Pool:
    """What enters the layers that share moving statistics, summed up in float64.

    Attributes
    ----------
    name : str
    former : list of list of numpy.ndarray
        The moving means before, for each context, and the variances.
    """

    def __init__(self, layer: Layer, statistics: list[Callable[[], list[Array]]]) -> None:
        self.name = layer.name
        self._eps = layer.attributes.eps
        self._statistics = statistics
        self.former = [[a.asnumpy() for a in arrays()] for arrays in statistics]
        self.count = 0  # values per channel
        self._mean: Array = 0.0
        self._squares: Array = 0.0  # sum of squared differences from the mean

    def add(self, data: mx.nd.NDArray, axis: int) -> None:
        """Merge data (Chan, Golub and LeVeque): exact for parts of any sizes."""
        values = np.moveaxis(data.asnumpy(), axis, 0)
        values = values.reshape(len(values), -1).astype("float64")
        added = values.shape[1]
        if not added:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            mean = values.mean(axis=1)
            values -= mean[:, None]
            squares = np.square(values, out=values).sum(axis=1)
            total = self.count + added
            apart = mean - self._mean
            self._mean = self._mean + apart * (added / total)
            self._squares = self._squares + squares + apart**2 * (self.count / total * added)
        self.count = total
        finite = np.isfinite(self._squares)
        if not finite.all():
            raise ValueError(
                f"mxbn: what enters layer {self.name} is not finite (channel "
                f"{int(np.argmin(finite))}); nothing was changed"
            )

    def found(self) -> list[list[Array]]:
        """Return the new moving statistics, like `former`."""
        mean_and_var = (self._mean, self._squares / self.count)
        with np.errstate(over="ignore"):
            new = [[v.astype(a.dtype) for a in f] for v, f in zip(mean_and_var, self.former)]
        if not all(np.isfinite(array).all() for each in new for array in each):
            raise ValueError(
                f"mxbn: the statistics of layer {self.name} do not fit into "
                f"{new[0][0].dtype}; nothing was changed"
            )
        return new

    def drift(self) -> Drift:
        """Return the change that `found` makes."""
        mean, var = (np.mean([a.astype("float64") for a in each], axis=0) for each in self.former)
        found = (self._mean, self._squares / self.count)
        return Drift(self.name, self.count, self._eps, mean, var, *found)

    def check_former(self) -> None:
        """Raise RuntimeError if the arrays are no longer such as `former`."""
        kinds = [
            [[(a.shape, np.dtype(a.dtype)) for a in each] for each in arrays]
            for arrays in ([arrays() for arrays in self._statistics], self.former)
        ]
        if kinds[0] != kinds[1]:
            raise RuntimeError(
                f"mxbn: layer {self.name} is gone, or its moving statistics have another shape, "
                "type or number of contexts now"
            )

    def write(self, values: list[list[Array]]) -> None:
        """Set the moving statistics of each context."""
        for arrays, sources in zip(self._statistics, values):
            for target, source in zip(arrays(), sources):
                target[:] = source
        mx.nd.waitall()


class Recorder:
    """Decides what is added to which pool.

    Attributes
    ----------
    pools : list of Pool
        Those that have got something, in the order of first use.
    """

    def __init__(self, earlier: str) -> None:
        self.earlier = earlier
        self.pools: list[Pool] = []
        self._complete: set[int] = set()

    def add(self, pool: Pool, data: mx.nd.NDArray, axis: int) -> None:
        """Take what enters a layer, unless another layer's turn comes first."""
        if id(pool) in self._complete:
            return
        if pool not in self.pools:
            if self.earlier == "moving" and len(self.pools) > len(self._complete):
                return
            self.pools.append(pool)
        pool.add(data, axis)

    def close_pass(self) -> bool:
        """Write what a pass over the data completed if others build on it; return if one did."""
        new = [pool for pool in self.pools if id(pool) not in self._complete]
        self._complete.update(id(pool) for pool in new)
        for pool in new if self.earlier == "moving" else ():
            pool.write(pool.found())
        return bool(new)

    def attributes(self, layer: Layer) -> dict[str, Any]:
        """Return how a layer normalizes meanwhile, outside of training, where nothing steps."""
        texts = layer.attributes._asdict()
        del texts["momentum"]
        in_training = self.earlier == "batch" and not texts["use_global_stats"]
        return {**texts, "use_batch_stats": texts["use_batch_stats"] or in_training}
