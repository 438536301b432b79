"""What SyncBatchNorm costs beside BatchNorm, alone or in the processes that mpirun starts.

    python benchmarks/sync_batch_norm.py
    mpirun -n 2 python benchmarks/sync_batch_norm.py

prints the median time of forward and backward of one layer, and the bytes that a process sends.
"""

import os
import statistics
import time

import mxnet as mx

import mxbn

SHAPES = ((2, 64, 4, 4), (8, 256, 28, 28))
WARM_UP, RUNS = 20, 201


def main():
    """Measure each shape, and print a table in the first process."""
    comm = mxbn.distributed.init() if "OMPI_COMM_WORLD_SIZE" in os.environ else None
    processes = 1 if comm is None else comm.size
    if comm is None or comm.rank == 0:
        print(f"processes: {processes}, CPUs: {os.cpu_count()}")
        print("| data of a process | BatchNorm | SyncBatchNorm | sent per direction |")
        print("|---|---|---|---|")
    for shape in SHAPES:
        alone, together = times_of(shape, comm)
        if comm is None or comm.rank == 0:
            sent = 0 if comm is None else 8 * (2 * shape[1] + 2)
            data = "x".join(map(str, shape))
            print(f"| {data} | {alone:.2f} ms | {together:.2f} ms | {sent} bytes |", flush=True)


def times_of(shape, comm):
    """Median times of forward and backward of both layers, alternating, in milliseconds."""
    layers = [
        kind(in_channels=shape[1]) for kind in (mxbn.gluon.BatchNorm, mxbn.gluon.SyncBatchNorm)
    ]
    for layer in layers:
        layer.initialize()
    x, dy = mx.nd.random.normal(shape=shape), mx.nd.random.normal(shape=shape)
    x.attach_grad()
    times = [[], []]
    for _ in range(WARM_UP + RUNS):
        for layer, found in zip(layers, times):
            if comm is not None:
                comm.Barrier()
            start = time.perf_counter()
            with mx.autograd.record():
                y = layer(x)
            y.backward(dy)
            mx.nd.waitall()
            found.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(found[WARM_UP:]) for found in times]


if __name__ == "__main__":
    main()
