"""Times functions that take turns, so that a change of the machine's speed meets all of them."""

import gc
import statistics
import time

FEWEST_RUNS = 5


def alternate(ways, seconds, most_runs=1000):
    """Return the run times of each of `ways`, a dict of functions, in seconds.

    They run for about `seconds` each, and at least FEWEST_RUNS times after two runs to warm up.
    The order turns round at every repetition.
    """
    for call in ways.values():
        call()
        call()
    times = {name: [] for name in ways}
    order = list(ways)
    collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whoever runs then
    try:
        end = time.perf_counter() + seconds * len(ways)
        runs = 0
        while runs < FEWEST_RUNS or (runs < most_runs and time.perf_counter() < end):
            for name in order:
                call = ways[name]
                # Not timed: it fills the caches with this peer's arrays, and until it ends the
                # threads of the peer before, which wait for work by spinning, have gone to sleep.
                call()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
            order.reverse()
            runs += 1
    finally:
        if collecting:
            gc.enable()
    return times


def summary(times):
    """Return the median, the quartiles around it and the number of runs; times in ms."""
    low, median, high = (1e3 * value for value in statistics.quantiles(times, n=4))
    return {"ms": median, "low_ms": low, "high_ms": high, "runs": len(times)}


def fastest(times):
    """Return the name with the smallest median."""
    return min(times, key=lambda name: statistics.median(times[name]))
