"""How far a BatchNorm's moving statistics are from those of what enters it in inference."""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx

from .batches import batches_of, show_progress
from .files import atomic
from .layers import INPUTS, Layer
from .params_file import last_line
from .pools import Drift, Pool, Recorder
from .watch import network

_STATISTICS = INPUTS[3:]
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito: told apart by all


def gaps(
    model: Any, data: Any, inputs: Sequence[str], ctx: Any, progress: bool
) -> dict[int, Drift | None]:
    """Run a model in inference and compare statistics.

    Parameters
    ----------
    model, data, inputs, ctx, progress
        As of `mxbn.inspect`.

    Returns
    -------
    dict of int to Drift or None
        By the place of each layer among `layers`, with "before" for the moving statistics; None
        where the data is not finite. Layers that no data came to, those without moving statistics
        of their own, and those in the bodies of control flow are left out.

    Raises
    ------
    ValueError
        If the model does not run on the data, or none comes to a layer.
    """
    net = network(model, ctx)
    watched = {
        place: layer
        for place, layer in enumerate(net.layers)
        if not layer.in_body and all(role in layer.arrays for role in _STATISTICS)
    }
    pools = {id(layer.source): _pool(net, layer) for layer in watched.values()}
    observer = _Observer()
    if isinstance(data, dict):
        length = min((len(array) for array in data.values()), default=0)
        if not length:
            raise ValueError("mxbn: data holds no samples")
        data = mx.io.NDArrayIter(data, batch_size=min(32, length))
    try:
        with mx.autograd.pause(train_mode=False), net.watched(pools, observer) as run:
            batches = batches_of(data, inputs, len(net.contexts))
            for _, names, parts in show_progress(batches, data) if progress else batches:
                for part, context in zip(parts, net.contexts):
                    run(names, [array.as_in_context(context) for array in part], context)
    except mx.base.MXNetError as error:
        raise ValueError(f"mxbn: the model does not run on the data: {last_line(error)}") from error
    if watched and not observer.pools:
        raise ValueError("mxbn: the data came to no BatchNorm layer")
    pool_at = {place: pools[id(layer.source)] for place, layer in watched.items()}
    return {
        place: None if id(pool) in observer.not_finite else pool.drift()
        for place, pool in pool_at.items()
        if pool in observer.pools
    }


class _Observer(Recorder):
    """Sums up what enters the layers while they do what they do in inference."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.not_finite: set[int] = set()

    def add(self, pool: Pool, data: mx.nd.NDArray, axis: int) -> None:
        try:
            if id(pool) not in self.not_finite:
                super().add(pool, data, axis)
        except ValueError:
            self.not_finite.add(id(pool))

    def attributes(self, layer: Layer) -> dict[str, Any]:
        return layer.attributes._asdict()


def _pool(net: Any, layer: Layer) -> Pool:
    return Pool(layer, [net.statistic(layer.parameters[role]) for role in _STATISTICS])


def plot(drifts: list[Drift], path: str) -> None:
    """Draw the gaps of all layers.

    Parameters
    ----------
    drifts : list of Drift
    path : str
        The file, which is overwritten; its ending tells the format.

    Raises
    ------
    ValueError
        If matplotlib does not know the format.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.25 * len(drifts) + 3), 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    places = np.arange(len(drifts))
    shifts = [np.abs(drift.mean_shift) for drift in drifts]
    ratios = [drift.variance_ratio for drift in drifts]
    for axes, values in ((upper, shifts), (lower, ratios)):
        low, middle, high = (
            [float(quantile(each)) for each in values] for quantile in (np.min, np.median, np.max)
        )
        axes.vlines(places, low, high, color=BLUE, linewidth=2, label="smallest to largest channel")
        axes.plot(places, middle, "D", color=ORANGE, markersize=5, label="median channel")
        axes.grid(axis="y", alpha=0.3)
    upper.set_ylabel("distance of the means\n(moving standard deviations)")
    upper.set_ylim(bottom=0)
    lower.set_ylabel("variance: batch / moving")
    lower.set_yscale("log")
    lower.axhline(1, color="black", linewidth=0.8)
    lower.set_xticks(places, [drift.name for drift in drifts], rotation=90, fontsize=7)
    upper.legend(loc="best")
    upper.set_title("Statistics of the data against the moving ones, per BatchNorm")
    with atomic(path) as written:
        figure.savefig(written, dpi=120)
