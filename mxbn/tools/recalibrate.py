"""Recomputes moving statistics over data, exactly."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import mxnet as mx

from .batches import batches_of, show_progress
from .layers import Layer, choose
from .pools import Drift, Pool, Recorder
from .watch import network

EARLIER = ("batch", "moving")
Array = Any


class Recalibration:
    """What `recalibrate` has done.

    Attributes
    ----------
    layers : list of Drift
        In the order of computation.
    samples : int
    """

    def __init__(self, pools: list[Pool], samples: int) -> None:
        self.layers: list[Drift] = [pool.drift() for pool in pools]
        self.samples = samples
        self._pools = pools

    def undo(self) -> None:
        """Put the former moving statistics back, to the last bit.

        Raises
        ------
        RuntimeError
            If that was done already, or the arrays of a layer are gone or have another shape, type
            or number now. Nothing is changed then.
        """
        if not self._pools:
            raise RuntimeError("mxbn: this recalibration was undone already")
        mx.nd.waitall()
        for pool in self._pools:
            pool.check_former()
        for pool in self._pools:
            pool.write(pool.former)
        self._pools = []


def recalibrate(
    model: Any,
    data: Any,
    layers: str | Sequence[str] | None = None,
    earlier: str = "batch",
    inputs: Sequence[str] = ("data",),
    ctx: Sequence[mx.Context] | None = None,
    progress: bool = False,
) -> Recalibration:
    """Set moving statistics to the mean and biased variance of what enters the layers.

    They are those of all values together: unequal batches count by their size, the padding of a
    `DataIter` does not count, a layer that is used several times has those of all its uses. Sums
    are in float64. Nothing else changes: gradients, optimizers, modes, flags, hooks, parameters.

    Parameters
    ----------
    model : mx.gluon.Block, mx.mod.Module, Checkpoint or (Symbol, dict, dict)
        Its moving statistics are changed in place, those on all contexts. Any block that is
        initialized, hybridized or imported too; a bound Module.
    data : mx.io.DataIter, mx.gluon.data.DataLoader or iterable of batches
        A batch is an array, a sequence of the inputs and maybe labels, or an `mx.io.DataBatch`.
        NumPy arrays become float32. A `DataIter` is reset before and after.
    layers : str or sequence of str, optional
        Names or patterns (``'stage1_*'``). By default all layers that training steps: those with a
        momentum below 1, and without `use_global_stats` unless with `step_global_stats`.
    earlier : {'batch', 'moving'}, default 'batch'
        How the layers before a layer normalize meanwhile; see the notes.
    inputs : sequence of str, default ('data',)
        The inputs' names, if `data` does not tell them; a batch begins with as many arrays. A block
        takes them by position.
    ctx : sequence of mx.Context, optional
        For a Checkpoint: where to compute, by default the current context. Blocks and Modules
        compute on their own contexts; a batch is split over them.
    progress : bool, default False
        Show a progress bar if standard error is a terminal and tqdm is installed.

    Returns
    -------
    Recalibration
        The drift of each layer that data came to, and `Recalibration.undo`.

    Raises
    ------
    ValueError
        If what enters a layer is not finite, there is no data, an input is missing, or an argument
        is wrong.
    TypeError
        If `model` is none of these.

    Notes
    -----
    Whatever is raised, also by `data`, the statistics are then as they were.

    What enters a layer depends on how the layers before it normalize:

    - ``'batch'``: as in training, with the statistics of each batch, or of its part on a context;
      layers with `use_global_stats` with the moving ones. One pass over the data. PyTorch's
      ``update_bn`` and "precise BatchNorm" mean this.
    - ``'moving'``: as in inference, with the moving statistics, those that are new already. So the
      data as inference sees it has mean 0 and variance 1 after each layer (before gamma and beta,
      for eps 0), however it is cut into batches. One pass for each layer; what comes out of earlier
      uses of the same layer is still that of its former statistics.

    Everything else runs as in inference: Dropout drops nothing, no random numbers are used up.

    Examples
    --------
    >>> done = mxbn.recalibrate(net, loader)
    >>> max(abs(layer.mean_shift).max() for layer in done.layers)
    >>> done.undo()
    """
    if earlier not in EARLIER:
        raise ValueError(f"mxbn: earlier is {earlier!r}, expected 'batch' or 'moving'")
    read_once = isinstance(data, Iterator) and not isinstance(data, mx.io.DataIter)
    if earlier == "moving" and read_once:
        raise ValueError("mxbn: data can be read once, expected several times: earlier='moving'")
    mx.nd.waitall()
    net = network(model, ctx)
    chosen = choose(net.layers, layers)
    if layers is None:
        chosen = [each for each in chosen if each.attributes.steps]
        if not chosen:
            raise ValueError("mxbn: no layer steps in training: name those to recalibrate")
    pools = _pools(net, chosen)
    recorder = Recorder(earlier)
    try:
        with mx.autograd.pause(train_mode=False), net.watched(pools, recorder) as run:
            unfinished = True
            while unfinished:
                samples = 0
                batches = batches_of(data, inputs, len(net.contexts))
                for size, names, parts in show_progress(batches, data) if progress else batches:
                    samples += size
                    for part, context in zip(parts, net.contexts):
                        run(names, [array.as_in_context(context) for array in part], context)
                found_more = recorder.close_pass()
                missing = len(recorder.pools) < len({id(pool) for pool in pools.values()})
                unfinished = earlier == "moving" and found_more and missing
        if not recorder.pools:
            raise ValueError(
                f"mxbn: data of {samples} samples came to no layer that is to be recalibrated"
            )
        done = Recalibration(recorder.pools, samples)
        new = [pool.found() for pool in recorder.pools]
        for pool, values in zip(recorder.pools, new):
            pool.write(values)
    except BaseException:
        for pool in recorder.pools:
            pool.write(pool.former)
        raise
    return done


def _pools(net: Any, chosen: list[Layer]) -> dict[int, Pool]:
    """Return what the layers' inputs are summed up in, by ``id(layer.source)``."""
    found: dict[tuple[str, ...], Pool] = {}
    for layer in chosen:
        names = _statistics(layer)
        if names not in found:
            found[names] = Pool(layer, [net.statistic(name) for name in names])
    return {id(layer.source): found[_statistics(layer)] for layer in chosen}


def _statistics(layer: Layer) -> tuple[str, ...]:
    for role in ("moving_mean", "moving_var"):
        if role not in layer.arrays:
            raise ValueError(
                f"mxbn: layer {layer.name} has no {role}: initialize the model and run it once"
            )
    return layer.parameters["moving_mean"], layer.parameters["moving_var"]
