"""Compares mxbn with float64 on large tensors on a GPU, and times it, torch and a copy there."""

import math
import time
from types import SimpleNamespace

from cases import RESNET_50, Case
from gpu_cases import EPS
from gpu_layer import Layer
from gpu_report import ITEM_BYTES, WORKS, speed_row
from gpu_values import MOMENTUM, PARAMETERS, errors

BATCH = 128
REPEATS = 5
CHUNK = 2**24  # values compared at once, in float64
ROTATED_BYTES = 2**28  # of memory used by turns, several times the largest caches
FEWEST_RUNS, MOST_RUNS = 7, 200
FIRST_CYCLES, MOST_CYCLES = 2**18, 2**28  # for which the GPU waits, while work is queued

RESNET_CASES = (
    *(Case("channels-first", (BATCH, c, h, w), 1) for c, h, w in RESNET_50),
    *(Case("channels-last", (BATCH, h, w, c), -1) for c, h, w in RESNET_50),
)
HUGE_CASES = (  # of more than 2**31 values
    Case("channels-first", (2, 65, 4100, 4100), 1),
    Case("channels-last", (1, 5800, 5800, 65), -1),
)
HUGE_FREE_BYTES = 48 * 2**30  # that these need


def check_huge(torch, findings, progress):
    """Compare tensors whose indices need 64 bits; return why not, or None."""
    if torch.cuda.mem_get_info()[0] < HUGE_FREE_BYTES:
        return f"less than {HUGE_FREE_BYTES // 2**30} GiB are free on the GPU"
    for case in HUGE_CASES:
        progress(f"{case.text} float16")
        compare(torch, Layer(torch, case, "float16"), f"{case.text} float16", findings)
    return None


def rows(torch, quick, findings, progress):
    """Yield, for each work, a row of the report and what torch computed with.

    What mxbn computes is compared before it is timed.
    """
    for case in RESNET_CASES[::5] if quick else RESNET_CASES:
        for dtype, item_bytes in ITEM_BYTES.items():
            what = f"{case.text} {case.group} {dtype}"
            progress(what)
            places = -(-ROTATED_BYTES // (2 * item_bytes * math.prod(case.shape)))
            layer = Layer(torch, case, dtype, places)
            compare(torch, layer, what, findings)
            implementation = layer.torch_save(layer.places[0])
            for work in WORKS:
                times = take_turns(torch, ways(layer, work), 0.1 if quick else 0.3)
                per_place = {peer: [t / places for t in all_] for peer, all_ in times.items()}
                yield speed_row(case, dtype, work, per_place), implementation


def compare(torch, layer, what, findings):
    """Compare a layer with float64 in both modes, and the bits of several runs."""
    place = layer.places[0]
    before = {name: getattr(layer, name).clone() for name in PARAMETERS}
    for train in (False, True):
        kept = None
        for _ in range(REPEATS if train else 1):
            for name in PARAMETERS:
                getattr(layer, name).copy_(before[name])
            found = results(layer, place, train)
            if kept is None:
                kept = found
            for name, value in found.items():
                findings.expect(
                    torch.equal(value, kept[name]), f"{what}: another run gave other bits of {name}"
                )
        mode = "training" if train else "moving statistics"
        for triples in errors_by_channels(layer, before, kept, train):
            findings.take(f"{what}, {mode}", layer.dtype, triples)


def results(layer, place, train):
    """Return copies of what a forward and a backward give."""
    layer.forward(place, train)
    found = {"y": place.out.clone()}
    layer.backward(place)
    found["dx"] = place.out.clone()
    for name in ("mean", "inv_std", "moving_mean", "moving_var", "dgamma", "dbeta"):
        found[name] = getattr(layer, name).clone()
    return found


def errors_by_channels(layer, before, found, train):
    """Yield the errors of some channels after the other, to spare memory."""
    place, (outer, channels, inner) = layer.places[0], layer.view
    step = max(1, CHUNK // (outer * inner))
    for start in range(0, channels, step):

        def some(tensor, start=start):
            per_channel = tensor.numel() == channels
            shape = (1, channels, 1) if per_channel else (outer, channels, inner)
            return tensor.view(shape)[:, start : start + step].double()

        tensors = {"x": place.x, "dy": place.dy, **before}
        inputs = SimpleNamespace(**{name: some(tensor) for name, tensor in tensors.items()})
        got = {name: some(tensor) for name, tensor in found.items()}
        yield errors(got, right(inputs, train), inputs, layer.dtype)


def right(d, train):
    """mxbn.reference's formulas on tensors of float64."""
    dims = {"dim": (0, 2), "keepdim": True}
    n = d.x.shape[0] * d.x.shape[2]
    mean, var = d.moving_mean, d.moving_var
    if train:
        mean = d.x.mean(**dims)
        var = ((d.x - mean) ** 2).mean(**dims)
    inv_std = 1 / (var + EPS).sqrt()
    xh = (d.x - mean) * inv_std
    dbeta, dgamma = d.dy.sum(**dims), (d.dy * xh).sum(**dims)
    dx = d.gamma * inv_std * ((d.dy - dbeta / n - xh * dgamma / n) if train else d.dy)
    # Without a step this is the moving statistic itself, but for roundings of float64.
    stepped = {
        f"moving_{name}": MOMENTUM * getattr(d, f"moving_{name}") + (1 - MOMENTUM) * batch
        for name, batch in (("mean", mean), ("var", var))
    }
    return {
        "y": xh * d.gamma + d.beta, "mean": mean, "inv_std": inv_std, "dx": dx, "dgamma": dgamma,
        "dbeta": dbeta, **stepped,
    }  # fmt: skip


def ways(layer, work):
    """Return, by peer, functions that do the work in all places of the layer."""
    train = work == "training forward"
    calls = {
        "mxbn": lambda place: layer.forward(place, train),
        "PyTorch": lambda place: layer.torch_forward(place, train),
        "copy": lambda place: place.out.copy_(place.x),
    }
    if work == "training backward":
        layer.forward(layer.places[0], True)  # its statistics are as good for the other places
        for place in layer.places:
            layer.torch_save(place)
        calls.update({"mxbn": layer.backward, "PyTorch": layer.torch_backward})
    kept = []  # torch's results, so that each has memory of its own

    def everywhere(call):
        def run():
            kept.clear()
            kept.extend([call(place) for place in layer.places])

        return run

    return {peer: everywhere(call) for peer, call in calls.items()}


def take_turns(torch, calls, seconds):
    """Return the run times of each of `calls`, a dict of functions, in seconds.

    They run for about `seconds` in all, the order turning round at every repetition.
    """
    for call in calls.values():
        call()
        call()
    torch.cuda.synchronize()
    times, cycles = {name: [] for name in calls}, dict.fromkeys(calls, FIRST_CYCLES)
    order, end, runs = list(calls), time.perf_counter() + seconds, 0
    while runs < FEWEST_RUNS or (runs < MOST_RUNS and time.perf_counter() < end):
        for name in order:
            elapsed, cycles[name] = run_time(torch, calls[name], cycles[name])
            times[name].append(elapsed)
        order.reverse()
        runs += 1
    return times


def run_time(torch, call, cycles):
    """Return the seconds that the GPU takes for a call, and the cycles that it waited before.

    It counts if the GPU came to it only when all of it was queued: else it would have waited for
    the host in between.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while cycles <= MOST_CYCLES:
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
        ahead = not start.query()
        end.synchronize()
        if ahead:
            return start.elapsed_time(end) / 1e3, cycles
        cycles *= 2
    raise RuntimeError("work is not queued ahead of the GPU: is CUDA_LAUNCH_BLOCKING set?")
