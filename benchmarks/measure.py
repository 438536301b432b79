"""Measures everything with one number of threads and writes it as JSON.

batch_norm.py starts it, with OMP_NUM_THREADS set: a process cannot change its number of threads
later.

    python measure.py '{"threads": 2, ...}' results.json
"""

import contextlib
import json
import platform
import sys
from collections import namedtuple

import mxnet as mx
import numpy as np
from cases import (
    CASES,
    COPY_TENSORS,
    FUSED_CASES,
    FUSED_TENSORS,
    QUICK_CASES,
    QUICK_FUSED_CASES,
    TENSORS,
    chosen,
    wanted,
)
from fused import FusedPeers, FusedTorchPeer
from networks import resnet_18, small_calls
from peer_torch import TorchPeer, load
from peers import Arrays, MXNetPeers, NumPyCopy
from timing import alternate, fastest, summary

import mxbn

TOLERANCE = 1e-3  # of the largest value; mistakes of a way are larger, roundings smaller
# How results are compared: by the largest value; but behind a ReLU, a sum that is 0 to rounding may
# be positive for one peer alone.
Kind = namedtuple("Kind", "name cases quick_cases tensors peers torch_peer size")
KINDS = (
    Kind("operators", CASES, QUICK_CASES, TENSORS, MXNetPeers, TorchPeer, np.max),
    Kind(
        "fused", FUSED_CASES, QUICK_FUSED_CASES, FUSED_TENSORS, FusedPeers, FusedTorchPeer, np.mean
    ),
)


def measure(options):
    threads, only, seconds = (options[key] for key in ("threads", "only", "seconds"))
    torch, why_not = load(options["torch_path"], threads)
    found = {
        "environment": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "mxnet": mx.__version__,
            "mxbn": mxbn.__version__,
            "torch": torch and str(torch.__version__),
            "torch_left_out": why_not,
        },
        **{kind.name: [] for kind in KINDS},
        "calls": [],
        "networks": [],
    }
    for kind in KINDS:
        cases = kind.quick_cases if options["quick"] else kind.cases
        for case, works in chosen(cases, kind.tensors, only).items():
            progress(threads, f"{kind.name}: {case.group} {case.text}")
            found[kind.name] += measure_case(kind, case, works, torch, threads, seconds)
    if wanted("small calls", only):
        progress(threads, "small calls")
        found["calls"] = small_calls(10 * seconds)  # for thousands of runs
    if wanted("ResNet-18", only):
        progress(threads, "ResNet-18")
        found["networks"] = resnet_18(options["quick"], (10 if options["quick"] else 60) * seconds)
    for row in (row for rows in found.values() if isinstance(rows, list) for row in rows):
        row["threads"] = threads
    return found


def measure_case(kind, case, works, torch, threads, seconds):
    arrays = Arrays(case)
    peers = [kind.peers(arrays)]
    if torch:
        peers.append(kind.torch_peer(torch, arrays))
    with contextlib.closing(NumPyCopy(arrays, threads)) as numpy_copy:
        copies = {("copy", "MXNet"): peers[0].copy_way(), ("copy", "NumPy"): numpy_copy.copy_way()}
        rows = []
        for work in works:
            ways = {way: pair for peer in peers for way, pair in peer.ways(work).items()}
            check_agreement(kind, case, work, ways)
            calls = {way: call for way, (call, _) in {**ways, **copies}.items()}
            rows.append(operator_row(case, work, kind.tensors[work], alternate(calls, seconds)))
    return rows


def check_agreement(kind, case, work, ways):
    """Refuse to time ways that do not compute the same."""
    right = None
    for way, (call, result) in ways.items():
        call()
        found = result()
        if right is None:
            right = found
        error = kind.size(np.abs(found - right)) / kind.size(np.abs(right))
        if not error < TOLERANCE:
            raise SystemExit(
                f"{case.text} axis {case.axis}, {work}: {' '.join(way)} differs by {error:.1e}"
            )


def operator_row(case, work, tensors, times):
    peers = {}
    for peer in dict.fromkeys(peer for peer, _ in times):
        way = fastest({key: value for key, value in times.items() if key[0] == peer})
        moved = COPY_TENSORS if peer == "copy" else tensors
        peers[peer] = {**summary(times[way]), "way": way[1]}
        peers[peer]["gb_per_s"] = moved * case.tensor_bytes / peers[peer]["ms"] / 1e6
    return {
        **case._asdict(),
        "work": work,
        "bytes": tensors * case.tensor_bytes,
        "peers": peers,
        "ratios": {
            peer: peers["mxbn"]["ms"] / peers[peer]["ms"] for peer in peers if peer != "mxbn"
        },
    }


def progress(threads, what):
    print(f"{threads} thread{'s' * (threads > 1)}: {what}", file=sys.stderr, flush=True)


def main(options, path):
    with contextlib.suppress(KeyboardInterrupt):  # of which the command tells
        found = measure(json.loads(options))
        with open(path, "w") as file:
            json.dump(found, file)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
