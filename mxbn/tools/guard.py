"""Counts what becomes of BatchNorm layers in training."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Iterator, NamedTuple

import mxnet as mx
from mxnet.base import _LIB, check_call

from .._library import function
from .graph import Graph
from .layers import Layer, layers_of_block, layers_of_graph
from .operators import OURS

STATISTICS = ("moving_mean", "moving_var")


class Counts(NamedTuple):
    """What a layer has done.

    Attributes
    ----------
    batch_forwards, moving_forwards : int
        Forwards that used the statistics of the batch, and the moving ones.
    steps : int
        Forwards that stepped the moving statistics.
    skipped : int
        Steps of single channels that were not taken, since the batch's mean or variance was not
        finite.
    """

    batch_forwards: int = 0
    moving_forwards: int = 0
    steps: int = 0
    skipped: int = 0


class Guard:
    """Counts forwards and steps of a model's mxbn layers, from when it is made until `stop`.

    Parameters
    ----------
    model : mx.gluon.Block or mx.mod.Module
        An initialized block whose shapes are known, or a bound module. What a layer does on several
        devices is added up.

    Raises
    ------
    ValueError
        If the model has no mxbn layer whose arrays exist.

    Notes
    -----
    The operator itself counts, whichever way it is run, in an array beside each moving mean and on
    its device, which MXNet's engine has written before `read` reads it. Arrays that take the place
    of others later (``cast``, ``reset_ctx``, ``force_rebind``) are counted from the next `read` on.

    Examples
    --------
    >>> with mxbn.Guard(net) as guard:
    ...     train(net)
    ...     print(guard.read()["batchnorm0"].skipped)
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._counters: dict[int, _Counter] = {}
        self._end = weakref.finalize(self, _end, self._counters)
        self._end.atexit = False
        self._follow()
        if not self._counters:
            raise ValueError(
                "mxbn: Guard: the model has no mxbn BatchNorm whose arrays exist; expected an "
                "initialized Gluon block of known shapes, or a bound Module"
            )

    def read(self) -> dict[str, Counts]:
        """Wait for pending work, and return what was counted since the last `reset`.

        Returns
        -------
        dict of str to Counts
            By the name of the layer.
        """
        mx.nd.waitall()
        found: dict[str, Any] = {}
        for counter in self._counters.values():
            found[counter.layer] = found.get(counter.layer, 0) + counter.values.asnumpy()
        if self._end.alive:
            self._follow()
        return {layer: Counts(*values.tolist()) for layer, values in found.items()}

    def reset(self) -> None:
        """Wait for pending work, and count from 0 again."""
        mx.nd.waitall()
        for counter in self._counters.values():
            counter.values[:] = 0
        mx.nd.waitall()

    def stop(self) -> None:
        """Count no longer. What was counted can still be read."""
        self._end()

    def __enter__(self) -> Guard:
        """Return the guard itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def _follow(self) -> None:
        """Count what is not counted yet."""
        mx.nd.waitall()
        for layer, devices in watched_layers(self._model):
            for arrays in devices:
                self._count(layer.name, arrays["moving_mean"])

    def _count(self, layer: str, moving_mean: Any) -> None:
        address = _address(moving_mean)
        if address in self._counters:
            return
        values = mx.nd.zeros(len(Counts._fields), ctx=moving_mean.context, dtype="int64")
        values.wait_to_read()
        # Kept with its moving mean, whose address no other array gets in the meantime.
        self._counters[address] = _Counter(layer, moving_mean, values)
        function("mxbn_count", None)(ctypes.c_void_p(address), ctypes.c_void_p(_address(values)))


class _Counter(NamedTuple):
    layer: str
    moving_mean: Any
    values: Any  # int64, in the order of Counts


def _end(counters: dict[int, _Counter]) -> None:
    mx.nd.waitall()  # nothing is under way that counts
    for address in counters:
        function("mxbn_count", None)(ctypes.c_void_p(address), None)


def watched_layers(model: Any) -> Iterator[tuple[Layer, list[dict[str, Any]]]]:
    """Yield a model's mxbn layers whose arrays exist.

    Parameters
    ----------
    model : mx.gluon.Block or mx.mod.Module
        As for `Guard`.

    Yields
    ------
    (Layer, list of dict of str to mx.nd.NDArray)
        And its moving_mean and moving_var on every device, the arrays themselves.
    """
    if isinstance(model, mx.gluon.Block):
        parameters = {p.name: p for p in model.collect_params().values()}
        for layer in layers_of_block(model):
            if layer.op in OURS and "moving_mean" in layer.arrays:
                of = {role: parameters[layer.parameters[role]].list_data() for role in STATISTICS}
                yield layer, [dict(zip(of, arrays)) for arrays in zip(*of.values())]
    elif isinstance(model, mx.mod.Module):
        for layer in layers_of_graph(Graph.from_symbol(model.symbol), {}, {}):
            if layer.op in OURS and model.binded:
                states = [executor.aux_dict for executor in model._exec_group.execs]
                yield layer, [{r: s[layer.parameters[r]] for r in STATISTICS} for s in states]
    else:
        raise TypeError(
            f"mxbn: a model of type {type(model).__name__} was given, expected a Gluon block or a "
            "Module"
        )


def _address(array: Any) -> int:
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    assert address.value is not None
    return address.value
