"""Data sets in all their forms, batch by batch."""

from __future__ import annotations

import sys
from typing import Any, Iterator, Sequence

import mxnet as mx

Array = Any


def batches_of(
    data: Any, inputs: Sequence[str], count: int
) -> Iterator[tuple[int, list[str], list[list[Array]]]]:
    """Cut the batches of a data set into parts, one per device.

    Parameters
    ----------
    data : mx.io.DataIter, or iterable of batches
        A batch is a DataBatch, an array, or a list of arrays whose first ones are the inputs.
    inputs : sequence of str
        The names of the inputs, where the data does not name them.
    count : int
        How many parts a batch is cut into, where it has as many samples.

    Yields
    ------
    (int, list of str, list of list of mx.nd.NDArray)
        The size of the batch, without padding; the names of the inputs; and per part the inputs.

    Raises
    ------
    ValueError
        If a batch has fewer arrays than there are inputs, or arrays of several sizes.
    """
    if isinstance(data, mx.io.DataIter):
        data.reset()
    for batch in data:
        names, axes, arrays, pad = _inputs_of(batch, data, inputs)
        sizes = {array.shape[axis] for array, axis in zip(arrays, axes)}
        if len(sizes) != 1:
            raise ValueError(f"mxbn: a batch has inputs of several sizes: {sorted(sizes)}")
        size = sizes.pop() - pad
        cuts = min(size, count)
        edges = [size * i // cuts for i in range(cuts + 1)] if cuts else [0]
        yield (
            size,
            names,
            [
                [a[(slice(None),) * axis + (slice(low, high),)] for a, axis in zip(arrays, axes)]
                for low, high in zip(edges, edges[1:])
            ],
        )
    if isinstance(data, mx.io.DataIter):
        data.reset()


def _inputs_of(
    batch: Any, data: Any, inputs: Sequence[str]
) -> tuple[list[str], list[int], list[Array], int]:
    """Return a batch's inputs: their names, batch axes and arrays, and the size of the padding."""
    names, pad = list(inputs), 0
    axes = [0] * len(names)
    if isinstance(batch, mx.io.DataBatch):
        described = batch.provide_data or getattr(data, "provide_data", None)
        if described:
            names = [each[0] for each in described]
            layouts = [getattr(each, "layout", None) for each in described]
            axes = [mx.io.DataDesc.get_batch_axis(layout) for layout in layouts]
        arrays, pad = list(batch.data), batch.pad or 0
    else:
        arrays = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if len(arrays) < len(names):
        raise ValueError(f"mxbn: a batch has {len(arrays)} arrays, expected {', '.join(names)}")
    array_of = mx.np.array if mx.util.is_np_array() else mx.nd.array
    arrays = [a if isinstance(a, mx.nd.NDArray) else array_of(a) for a in arrays[: len(names)]]
    return names, axes, arrays, pad


def show_progress(batches: Any, data: Any) -> Any:
    """Show a bar on the standard error, if that is a terminal and tqdm is installed.

    Parameters
    ----------
    batches : iterable
        What is gone through.
    data : mx.io.DataIter, or iterable of batches
        Where it comes from, which may tell how many there are.

    Returns
    -------
    iterable
        The batches.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return batches
    total = len(data) if hasattr(data, "__len__") else None
    if isinstance(data, mx.io.NDArrayIter):
        total = -(-data.num_data // data.batch_size)
    return tqdm(batches, total=total, unit="batch", file=sys.stderr, disable=None, leave=False)
