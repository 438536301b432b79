"""Compares what the library computes on a GPU, on raw pointers, with mxbn.reference.

A tensor is seen as outer x channels x inner, as by the library, and the values of channels have the
shape (1, channels, 1). So NumPy arrays and torch tensors take the same formulas.
"""

from types import SimpleNamespace

import numpy as np
from gpu_cases import EDITS
from gpu_memory import Buffer

from mxbn import _gpu, reference

MOMENTUM = 0.9
PARAMETERS = ("gamma", "beta", "moving_mean", "moving_var")
RESULTS = ("y", "mean", "inv_std", "moving_mean", "moving_var", "dx", "dgamma", "dbeta")

# Allowed units of rounding, as in the tests of the operator. An output passes some five roundings;
# a gradient of data has three such terms; sums are added up in double and rounded once, but float64
# shows their roundings too.
OUTPUT_UNITS = 3
GRADIENT_UNITS = 4
SUM_UNITS = {"float16": 1.5, "float32": 1.5, "float64": 5}


def param_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


def draw(check):
    """Return random inputs, of the types that the library takes."""
    random = np.random.RandomState(0)
    view, channels, param = check.view, (1, check.view.channels, 1), param_dtype(check.dtype)
    d = SimpleNamespace(
        x=(random.standard_normal(view) * check.std + check.mean).astype(check.dtype),
        dy=random.standard_normal(view).astype(check.dtype),
        gamma=(random.uniform(0.5, 2, channels) * random.choice([-1, 1], channels)).astype(param),
        beta=random.standard_normal(channels).astype(param),
        moving_mean=random.standard_normal(channels).astype(param),
        moving_var=random.uniform(0.5, 3, channels).astype(param),
    )
    if check.edit:
        EDITS[check.edit](d)
    return d


def run(memory, check, d):
    """Return all arrays after a forward and a backward, by name, and what went wrong, in words."""
    variant, param, view = check.variant, param_dtype(check.dtype), check.view

    def result(shape, dtype, shift=0):
        return Buffer(memory, np.full(shape, variant.added, dtype), shift)

    buffers = {name: Buffer(memory, getattr(d, name)) for name in PARAMETERS}
    for name in ("x", "dy"):
        buffers[name] = Buffer(memory, getattr(d, name), variant.shift)
    for name in ("y", "dx"):
        buffers[name] = result(view, check.dtype, variant.shift)
    for name in ("mean", "inv_std", "dgamma", "dbeta"):
        buffers[name] = result((1, view.channels, 1), param)
    buffers["saved"] = result(2 * view.channels + 1, "float64")
    at = {name: buffer.address for name, buffer in buffers.items()}
    at.update(dict.fromkeys(variant.unwanted))
    if variant.fix_gamma:
        at["gamma"] = None

    kept = []  # until the kernels, which run later, have ended

    def allocate(doubles):
        kept.append(memory.workspace(doubles))
        return memory.address(kept[-1])

    add = dict.fromkeys(("out_add", "first_add", "second_add"), int(variant.add))
    common = {**view._asdict(), **add, **{name: at[name] for name in ("x", "gamma", "saved")}}
    queue = {"device": memory.device, "stream": memory.stream}
    forward = _gpu.Arguments(
        out=at["y"], beta=at["beta"], first=at["mean"], second=at["inv_std"],
        moving_mean=at["moving_mean"], moving_var=at["moving_var"], eps=check.eps,
        momentum=MOMENTUM, use_batch=variant.use_batch, step=variant.step, **common,
    )  # fmt: skip
    _gpu.forward(forward, check.dtype, allocate, **queue)
    backward = _gpu.Arguments(
        dy=at["dy"], out=at["dx"], first=at["dgamma"], second=at["dbeta"], **common
    )
    _gpu.backward(backward, check.dtype, allocate, **queue)

    found, problems = {}, []
    for name, buffer in buffers.items():
        found[name], guarded = buffer.read()
        if not guarded:
            problems.append(f"memory beside {name} was written")
    for name in ("x", "dy", "gamma", "beta"):
        if found[name].tobytes() != getattr(d, name).tobytes():
            problems.append(f"{name} was written")
    return found, problems


def right(check, d):
    """Return the right values of all results, in float64."""
    parameters = [getattr(d, name).ravel() for name in PARAMETERS]
    fixed = {"fix_gamma": check.variant.fix_gamma}
    kept = reference.forward(
        d.x, *parameters, is_train=check.variant.step, use_batch_stats=check.variant.use_batch,
        eps=check.eps, momentum=MOMENTUM, **fixed,
    )  # fmt: skip
    dx, dgamma, dbeta = reference.backward(d.dy, d.x, parameters[0], kept, **fixed)
    channels = {"dgamma": dgamma, "dbeta": dbeta}
    channels.update((name, getattr(kept, name)) for name in RESULTS[1:5])
    channels = {name: value.reshape(1, -1, 1) for name, value in channels.items()}
    return {"y": kept.output, "dx": dx, **channels}


def errors(found, want, d, dtype, added=0.0):
    """Return triples: a result, its largest error in units of rounding, how many are allowed.

    All values are float64, of NumPy or of torch. A unit is of the size of the numbers that a result
    is made of, since no sum of them can be more exact. Float64 is computed in float64, as the right
    values are, and has the roundings of x; narrower data has not, however far from zero it is.
    """

    def largest(values):
        return float(abs(values).max())

    far = largest(d.x) if dtype == "float64" else 0.0
    inv_std = want["inv_std"]
    scale = inv_std * (1 + abs(d.gamma))
    xh = abs(d.x - want["mean"]) * inv_std + far * inv_std
    mean_size = max(largest(d.moving_mean), largest(want["mean"]), far)
    sizes = {
        "y": largest(want["y"]) + largest(d.beta) + far * largest(scale),
        "mean": mean_size,
        "inv_std": largest(inv_std),
        "moving_mean": mean_size,
        "moving_var": 1 + largest(want["moving_var"]) + 1e-3 * far**2,
        "dx": largest(want["dx"]) + largest(d.dy * scale * (1 + far * inv_std)),
        "dgamma": 1 + largest((abs(d.dy) * xh).sum((0, 2))),
        "dbeta": 1 + largest(abs(d.dy).sum((0, 2))),
    }
    allowed = {**dict.fromkeys(sizes, SUM_UNITS[dtype]), "y": OUTPUT_UNITS, "dx": GRADIENT_UNITS}
    triples = []
    for name, value in found.items():
        before = 0.0 if name.startswith("moving") else added
        rounding = np.finfo(dtype if name in ("y", "dx") else param_dtype(dtype)).eps
        error = largest(value - (want[name] + before))
        triples.append((name, error / float(rounding * (sizes[name] + before)), allowed[name]))
    return triples


class Findings:
    """How much was compared, the largest errors, and what went wrong, in words."""

    def __init__(self):
        self.comparisons = 0
        self.worst = {}  # by dtype and result: units of rounding, and allowed ones
        self.failures = []

    def expect(self, good, what):
        self.comparisons += 1
        if not good:
            self.failures.append(what)

    def take(self, what, dtype, triples):
        for result, units, allowed in triples:
            good = units <= allowed  # false for NaN
            self.expect(
                good,
                f"{what}: {result} is off by {units:.3g} units of rounding, at most {allowed} "
                "allowed",
            )
            if good:
                worst = self.worst.setdefault(dtype, {})
                worst[result] = max(worst.get(result, (0, allowed)), (units, allowed))

    def summary(self):
        return dict(vars(self))


def check_values(memory, check, findings):
    d = draw(check)
    found, problems = run(memory, check, d)
    findings.expect(not problems, f"{check.text}: {', '.join(problems)}")
    want = right(check, d)
    # A channel whose statistics are not finite keeps its moving ones; nothing else of it is right.
    finite = np.isfinite(want["mean"]).ravel()
    for name in ("moving_mean", "moving_var"):
        same = (found[name][:, ~finite] == getattr(d, name)[:, ~finite]).all()
        findings.expect(same, f"{check.text}: {name} was stepped where the batch is not finite")

    def chosen(values, names):
        return {name: values[name][:, finite].astype("float64") for name in names}

    wanted = [name for name in RESULTS if name not in check.variant.unwanted]
    if d.x.size == 0:
        wanted = [name for name in wanted if name not in ("y", "dx")]
        d.x = d.dy = np.zeros((1, *d.x.shape[1:]), d.x.dtype)  # for the sizes
        want["y"] = want["dx"] = d.x
    inputs = SimpleNamespace(**chosen(vars(d), ("x", "dy", *PARAMETERS)))
    triples = errors(
        chosen(found, wanted), chosen(want, RESULTS), inputs, check.dtype,
        check.variant.added if check.variant.add else 0.0,
    )  # fmt: skip
    findings.take(check.text, check.dtype, triples)


def check_bits(memory, check, times, findings):
    d = draw(check)
    first, _ = run(memory, check, d)
    for _ in range(times - 1):
        found, _ = run(memory, check, d)
        for name, value in found.items():
            if value.tobytes() != first[name].tobytes():
                findings.expect(False, f"{check.text}: another run gave other bits of {name}")
                return
    findings.expect(True, check.text)
