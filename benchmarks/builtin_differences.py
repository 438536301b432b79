"""Faults of MXNet 1.9.1's built-in BatchNorm on the CPU, and what mxbn does in the same place.

Run it where ``import mxnet`` (1.9.1) and ``import mxbn`` work:

    python builtin_differences.py          # every row, as a Markdown table
    python builtin_differences.py step     # only the rows whose key contains this word

It takes about half a minute. Right values come from `mxbn.reference`, which is NumPy in float64.
Errors of arrays are relative, ||a - right|| / ||right||, unless the row says otherwise. What may
end the process runs in one of its own. `mxbn.Module` stands for Module in the column of mxbn.
"""

import hashlib
import os
import signal
import subprocess
import sys

os.environ.pop("MXNET_SUBGRAPH_BACKEND", None)  # measure MXNet as it comes
os.environ.pop("MXNET_MKLDNN_ENABLED", None)

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

import mxbn
from mxbn import reference

EPS = 1e-3
OPERATORS = {"built-in": nd.BatchNorm, "mxbn": mxbn.nd.BatchNorm}
LAYERS = {"built-in": gluon.nn.BatchNorm, "mxbn": mxbn.gluon.BatchNorm}
ROWS = []


def row(key, title):
    """Register a function that yields (what, right, measure) where measure(name) gives a cell."""

    def register(function):
        ROWS.append((key, title, function))
        return function

    return register


def main(words):
    print("| Fault | What was done | Right (`mxbn.reference`) | Built-in 1.9.1, CPU | mxbn |")
    print("|---|---|---|---|---|")
    for key, title, function in ROWS:
        if words and not any(word in key for word in words):
            continue
        for what, right, measure in function():
            cells = []
            for name in ("built-in", "mxbn"):
                try:
                    cells.append(measure(name))
                except (mx.base.MXNetError, ValueError) as error:
                    cells.append(raised(error))
            print("| " + " | ".join([title, what, right, *cells]) + " |", flush=True)
            title = ""


# Helpers


def raised(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines if "Check failed" in line or "Error:" in line] or lines[-1:]
    text = found[-1].split("Error: ")[-1].strip().rstrip(":").replace("|", "\\|")
    return f"{type(error).__name__}: {text}"


def relative(array, right):
    return float(np.linalg.norm(np.asarray(array, "float64") - right) / np.linalg.norm(right))


def error(array, right):
    value = relative(array, right)
    return f"{100 * value:.0f} % off" if value > 1e-3 else f"right ({value:.0e})"


def numbers(array):
    return ", ".join(f"{value:.4g}" for value in np.asarray(array).ravel())


class Drawing:
    """Random arrays of one layer, and what the specification makes of them."""

    def __init__(self, shape=(8, 4, 7, 7), seed=0, mean=1.0, std=2.0, axis=1):
        rs = np.random.RandomState(seed)
        channels = shape[axis]
        self.x = (rs.randn(*shape) * std + mean).astype("float32")
        self.dy = rs.randn(*shape).astype("float32")
        self.gamma = rs.uniform(0.5, 2, channels).astype("float32")
        self.beta = rs.randn(channels).astype("float32")
        self.moving_mean = rs.randn(channels).astype("float32")
        self.moving_var = rs.uniform(0.5, 3, channels).astype("float32")

    def arrays(self):
        values = (self.x, self.gamma, self.beta, self.moving_mean, self.moving_var)
        arrays = [nd.array(value) for value in values]
        for array in arrays[:3]:
            array.attach_grad()
        return arrays

    def forward(self, is_train, **attributes):
        attributes = {"fix_gamma": False, "eps": EPS, **attributes}
        return reference.forward(
            self.x, self.gamma, self.beta, self.moving_mean, self.moving_var,
            is_train=is_train, **attributes,
        )  # fmt: skip

    def backward(self, is_train, dy=None):
        dy = self.dy if dy is None else dy
        kept = self.forward(is_train)
        return reference.backward(dy, self.x, self.gamma, kept, fix_gamma=False)

    def layer(self, name, **attributes):
        layer = LAYERS[name](epsilon=EPS, in_channels=len(self.gamma), **attributes)
        layer.initialize()
        layer.gamma.set_data(nd.array(self.gamma))
        layer.beta.set_data(nd.array(self.beta))
        layer.running_mean.set_data(nd.array(self.moving_mean))
        layer.running_var.set_data(nd.array(self.moving_var))
        return layer


def in_process(function, name, **environment):
    """Run a function of this file in a process of its own; return how it ended, in words."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})\n"
    code += f"import builtin_differences as d; print('said:', d.{function.__name__}({name!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    if done.returncode < 0:
        return f"process killed by {signal.Signals(-done.returncode).name}"
    if said:
        return said[-1][len("said: ") :]
    return f"process ended with code {done.returncode}: {done.stderr.strip().splitlines()[-1][:90]}"


def guarded(function):
    """Run a function; turn an error into the text of a cell."""
    try:
        return function()
    except (mx.base.MXNetError, ValueError) as problem:
        return raised(problem)


# Gradients


@row("inference_gradient", "Gradient of an inference forward, plain `backward()`")
def inference_gradient():
    """Gradient at the input after a forward in inference mode."""
    d = Drawing()
    right = d.backward(is_train=False)
    other = d.backward(is_train=True)

    def measure(name):
        x, *rest = arrays = d.arrays()
        with autograd.record(train_mode=False):
            y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
        y.backward(nd.array(d.dy))
        cell = "dx " + error(x.grad.asnumpy(), right[0])
        if name == "built-in":
            cell += f"; {100 * relative(x.grad.asnumpy(), other[0]):.0f} % off the batch mode's too"
        return cell + "; d gamma " + error(rest[0].grad.asnumpy(), right[1])

    yield "`record(train_mode=False)`, `y.backward(dy)`", "dx = g/sqrt(v+eps) * dy", measure

    def spread(name):
        values = []
        for seed in range(100):
            e = Drawing(seed=seed, shape=(4, 3, 5, 5))
            x, *_ = arrays = e.arrays()
            with autograd.record(train_mode=False):
                y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
            y.backward(nd.array(e.dy))
            values.append(relative(x.grad.asnumpy(), e.backward(is_train=False)[0]))
        if max(values) < 1e-6:
            return f"right (at most {max(values):.0e})"
        low, middle, high = np.percentile(values, [0, 50, 100])
        return f"{100 * low:.0f} to {100 * high:.0f} % off, median {100 * middle:.0f} %"

    yield "The same for 100 drawings of shape (4, 3, 5, 5)", "0 % off", spread

    def golden(name):
        rs = np.random.RandomState(1)
        x, dy = (nd.array(rs.randn(1, 3, 2, 2).astype("float32")) for _ in range(2))
        x.attach_grad()
        one, zero = nd.ones(3), nd.zeros(3)
        with autograd.record(train_mode=False):
            y = OPERATORS[name](x, one, zero, zero.copy(), one.copy(), eps=1e-5)
        y.backward(dy)
        return "dx[0, 0, 0] = " + numbers(x.grad[0, 0, 0].asnumpy())

    what = "`numpy.random.seed(1)`, x, dy = `randn(1, 3, 2, 2)`; gamma, variance 1; beta, mean 0"
    yield f"{what}; eps 1e-5", "dx[0, 0, 0] = -0.3224, -0.3841", golden


@row("training_gradient", "Gradient of a training forward, `backward(train_mode=False)`")
def training_gradient():
    """The mode flag of backward differs from that of forward."""
    d = Drawing()
    right = d.backward(is_train=True)

    def measure(name):
        x, gamma, *_ = arrays = d.arrays()
        with autograd.record():
            y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
        y.backward(nd.array(d.dy), train_mode=False)
        cell = "dx " + error(x.grad.asnumpy(), right[0])
        return cell + "; d gamma " + error(gamma.grad.asnumpy(), right[1])

    yield "`record()`, `y.backward(dy, train_mode=False)`", "gradient of the batch mode", measure


@row("frozen_backbone", "Frozen backbone: `predict_mode()` inside `record()`")
def frozen_backbone():
    """Batch normalization in inference mode under a head that trains."""
    d = Drawing()
    rs = np.random.RandomState(5)
    weight = rs.randn(2, d.x[0].size).astype("float32")
    kept = d.forward(is_train=False)
    dy = np.repeat(weight.astype("float64").sum(0)[None], len(d.x), 0).reshape(d.x.shape)
    right = reference.backward(dy, d.x, d.gamma, kept, fix_gamma=False)[0]

    def with_hybridize(settings):
        def measure(name):
            backbone = d.layer(name)
            if settings is not None:
                backbone.hybridize(**settings)
            head = gluon.nn.Dense(2, use_bias=False, in_units=d.x[0].size)
            head.initialize()
            head.weight.set_data(nd.array(weight))
            x = nd.array(d.x)
            x.attach_grad()
            with autograd.record():
                with autograd.predict_mode():
                    features = backbone(x)
                loss = head(features).sum()
            loss.backward()
            return "dx " + error(x.grad.asnumpy(), right)

        return measure

    for label, settings in (
        ("not hybridized", None),
        ("hybridized", {}),
        ("hybridized, static_alloc", {"static_alloc": True}),
    ):
        what = f"`with record(): with predict_mode(): h = bn(x)`, head outside; {label}"
        yield what, "gradient of the moving mode", with_hybridize(settings)


@row("statistics_changed", "Moving statistics changed between forward and backward")
def statistics_changed():
    """The gradient belongs to the forward that ran."""

    def measure(name):
        x, _, _, _, moving_var = arrays = [
            nd.ones((2, 3, 2, 2)), nd.ones(3), nd.zeros(3), nd.zeros(3), nd.ones(3)
        ]  # fmt: skip
        x.attach_grad()
        with autograd.record(train_mode=False):
            y = OPERATORS[name](*arrays, fix_gamma=False, eps=0.0)
        moving_var[:] = 4
        y.backward(train_mode=False)
        return "dx " + f"{x.grad[0, 0, 0, 0].asscalar():.4f}"

    what = (
        "Inference forward with moving variance 1, set it to 4, `backward(train_mode=False)`, dy 1"
    )
    yield what, "dx 1.0000", measure


# When the moving statistics step


@row("step", "When the moving statistics step")
def steps():
    """Moving statistics step in forward, once, in the order of the calls."""
    d = Drawing()
    second = d.x * 3 + 2
    momentum = 0.9
    old = d.moving_mean.astype("float64")
    mean = [reference.statistics(each)[0] for each in (d.x, second)]

    def steps_taken(now):
        """How many steps lead from the old moving mean to this one."""
        left = 1 - np.mean((now - old) / (mean[0] - old))
        return f"{abs(np.log(left) / np.log(momentum)):.2f} steps"

    def without_backward(name):
        arrays = d.arrays()
        with autograd.record():
            OPERATORS[name](*arrays, fix_gamma=False, eps=EPS).wait_to_read()
        return steps_taken(arrays[3].asnumpy())

    def not_in_loss(name):
        arrays = d.arrays()
        with autograd.record():
            OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
            loss = (arrays[0] * 2).sum()
        loss.backward()
        return steps_taken(arrays[3].asnumpy())

    def on_the_data(name):
        net = gluon.nn.HybridSequential()
        net.add(d.layer(name, center=False, scale=False), gluon.nn.Dense(2))
        net[1].initialize()
        with autograd.record():
            loss = net(nd.array(d.x)).sum()
        loss.backward()
        return steps_taken(net[0].running_mean.data().asnumpy())

    def twice(name):
        arrays = d.arrays()
        with autograd.record():
            y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
        y.backward(retain_graph=True)
        y.backward()
        return steps_taken(arrays[3].asnumpy())

    yield "A recorded training forward, no backward", "1.00 steps", without_backward
    yield "Its output is not part of the loss; `loss.backward()`", "1.00 steps", not_in_loss
    what = "`BatchNorm(center=False, scale=False)` on the data, `Dense`; `loss.backward()`"
    yield what, "1.00 steps", on_the_data
    yield "`backward(retain_graph=True)`, then `backward()`", "1.00 steps", twice

    finite = np.ones(len(old), bool)

    def two_steps(*means):
        now = old
        for each in means:
            now = reference.step(now, each, momentum, finite)
        return now

    def order(calls, means):
        def measure(name):
            layer = d.layer(name)
            x = nd.array(d.x)
            x.attach_grad()
            with autograd.record():
                loss = calls(layer, x).sum()
            loss.backward()
            now = layer.running_mean.data().asnumpy()
            for label, right in (("right", means), ("in reverse order", means[::-1])):
                if np.allclose(now, two_steps(*right), 1e-4, 1e-4):
                    return f"{label}: {numbers(now[:2])}, ..."
            return numbers(now[:2]) + ", ..."

        return measure

    def chained(layer, x):
        return layer(layer(x))

    def first_summand(layer, x):
        y = layer(x)
        return y + layer(x * 3 + 2)

    def last_summand(layer, x):
        y = layer(x)
        return layer(x * 3 + 2) + y

    for what, calls, means in (
        ("`bn(bn(x))`", chained, (mean[0], d.beta)),
        ("`y = bn(x)`, then `y + bn(3 * x + 2)`", first_summand, mean),
        ("`y = bn(x)`, then `bn(3 * x + 2) + y`", last_summand, mean),
    ):
        right = f"{numbers(two_steps(*means)[:2])}, ..."
        yield f"{what}; one `backward()`; moving mean", right, order(calls, list(means))


# Values


@row("negative_var", "Negative or infinite `moving_var`")
def negative_variance():
    """The variance of a channel of equal values is 0, and so is the moving one with momentum 0."""
    eps_values = np.logspace(-8, 0, 201)

    def step_once(name, eps, dtype="float32", momentum=0.0, value=5.0):
        x = nd.full((4, 1, 3, 3), value, dtype=dtype)
        x.attach_grad()
        dtype = "float64" if dtype == "float64" else "float32"
        one = nd.ones(1, dtype=dtype)
        moving_mean, moving_var = nd.zeros(1, dtype=dtype), nd.ones(1, dtype=dtype)
        with autograd.record():
            y = OPERATORS[name](
                x, one, one * 0, moving_mean, moving_var,
                eps=float(eps), momentum=momentum, fix_gamma=False,
            )  # fmt: skip
        y.backward()
        return moving_var.asscalar()

    def negative(name):
        found = [step_once(name, eps) for eps in eps_values]
        count = sum(value < 0 for value in found)
        return f"{count} of {len(found)} negative, lowest {min(found):.1e}"

    def training(name):
        """Steps of a dead unit until its variance is negative, and the output it then gives."""
        x = nd.full((4, 1, 3, 3), 0.0)
        layer = LAYERS[name](in_channels=1, epsilon=1.001e-5, momentum=0.9)
        layer.initialize()
        for _ in range(300):
            with autograd.record():
                y = layer(x)
            y.backward()
        return f"{layer.running_var.data().asscalar():.2g}"

    yield (
        "A channel of equal values, momentum 0, 201 eps from 1e-8 to 1",
        "0 for each eps",
        negative,
    )
    what = "A dead channel (all 0), eps 1.001e-5, 300 training steps, momentum 0.9"
    yield what, "1.9e-14", training
    for dtype in ("float16", "float32", "float64"):
        yield (
            f"A channel of equal values, momentum 0, eps 0, {dtype}",
            "0",
            (lambda name, dtype=dtype: f"{step_once(name, 0.0, dtype):.4g}"),
        )

    def constant_output(name):
        x = nd.full((2, 1, 2, 2), 3.0)
        with autograd.record():
            parameters = [nd.ones(1), nd.full(1, 5.0), nd.zeros(1), nd.ones(1)]
            y = OPERATORS[name](x, *parameters, eps=0.0, fix_gamma=False)
        return f"output {y[0, 0, 0, 0].asscalar():.4g}"

    yield "A channel of equal values, beta 5, eps 0, float32; output", "output 5", constant_output


@row("float32", "float32 far from 0")
def float32():
    """Accuracy at a mean much larger than the standard deviation."""
    for mean in (1e3, 1e4, 1e5):
        d = Drawing(shape=(32, 4, 16, 16), mean=mean, std=1.0)
        y_right, dx_right = d.forward(is_train=True), d.backward(is_train=True)[0]

        def measure(name, d=d, y_right=y_right, dx_right=dx_right):
            arrays = d.arrays()
            with autograd.record():
                y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS)
            y.backward(nd.array(d.dy))
            output = np.abs(y.asnumpy() - y_right.output).max()
            gradient = np.abs(arrays[0].grad.asnumpy() - dx_right).max()
            return f"output {output:.1e}, dx {gradient:.1e}"

        what = f"Training, mean {mean:.0e}, std 1, (32, 4, 16, 16); largest absolute errors"
        yield what, "0", measure


@row("float16", "float16 with a large spread")
def float16():
    """float16 data whose variance is above the largest float16."""
    for std in (200, 300, 3000):
        d = Drawing(shape=(32, 4, 8, 8), mean=0.0, std=std)
        d.x = d.x.astype("float16")
        right = reference.forward(
            d.x, d.gamma, d.beta, d.moving_mean, d.moving_var,
            is_train=True, fix_gamma=False, eps=EPS,
        )  # fmt: skip

        def measure(name, d=d, right=right):
            arrays = d.arrays()
            arrays[0] = nd.array(d.x, dtype="float16")
            with autograd.record():
                y = OPERATORS[name](*arrays, fix_gamma=False, eps=EPS).asnumpy()
            per_channel = y.astype("float64").std(axis=(0, 2, 3))
            if not per_channel.any():
                return "every value is beta"
            return error(y, right.output)

        right_std = numbers(right.output.std(axis=(0, 2, 3)))
        yield f"Training, std {std}", f"output of std gamma ({right_std})", measure


@row("fold", "Conv+BN folded at bind")
def fold():
    """An executor bound without gradients is asked to run in training mode."""
    rs = np.random.RandomState(0)
    x = rs.randn(4, 3, 8, 8).astype("float32")
    weight = rs.randn(5, 3, 3, 3).astype("float32")

    def run(name, is_train):
        operator = {"built-in": mx.sym.BatchNorm, "mxbn": mxbn.sym.BatchNorm}[name]
        convolution = mx.sym.Convolution(
            mx.sym.var("data"), kernel=(3, 3), num_filter=5, no_bias=True, name="conv"
        )
        symbol = operator(convolution, fix_gamma=False, eps=EPS, name="bn")
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=x.shape)
        executor.arg_dict["conv_weight"][:] = weight
        executor.arg_dict["bn_gamma"][:] = 1
        executor.aux_dict["bn_moving_var"][:] = 1
        output = executor.forward(is_train=is_train, data=nd.array(x))[0].asnumpy()
        return output, executor.aux_dict["bn_moving_mean"].asnumpy()

    convolved = nd.Convolution(
        nd.array(x), nd.array(weight), kernel=(3, 3), num_filter=5, no_bias=True
    ).asnumpy()
    one, zero = np.ones(5), np.zeros(5)
    right = reference.forward(
        convolved, one, zero, zero, one, is_train=True, fix_gamma=False, eps=EPS
    )
    inference = reference.forward(
        convolved, one, zero, zero, one, is_train=False, fix_gamma=False, eps=EPS
    )

    def measure(name):
        output, _ = run(name, is_train=True)
        if relative(output, inference.output) < 1e-4:
            return f"the inference output: {error(output, right.output)}"
        return error(output, right.output)

    yield "`simple_bind(grad_req='null')`, `forward(is_train=True)`", "batch statistics", measure

    def module(name):
        operator = {"built-in": mx.sym.BatchNorm, "mxbn": mxbn.sym.BatchNorm}[name]
        convolution = mx.sym.Convolution(
            mx.sym.var("data"), kernel=(3, 3), num_filter=5, no_bias=True, name="conv"
        )
        symbol = operator(convolution, fix_gamma=False, eps=EPS, name="bn")
        net = (mxbn.Module if name == "mxbn" else mx.mod.Module)(symbol, label_names=None)
        net.bind(data_shapes=[("data", x.shape)], for_training=False)
        net.init_params(
            arg_params={
                "conv_weight": nd.array(weight),
                "bn_gamma": nd.array(one),
                "bn_beta": nd.array(zero),
            },
            aux_params={"bn_moving_mean": nd.array(zero), "bn_moving_var": nd.array(one)},
        )
        net.forward(mx.io.DataBatch([nd.array(x)]), is_train=True)
        output = net.get_outputs()[0].asnumpy()
        if relative(output, inference.output) < 1e-4:
            return f"the inference output: {error(output, right.output)}"
        return error(output, right.output)

    what = "`Module.bind(for_training=False)`, `forward(batch, is_train=True)`"
    yield what, "batch statistics", module


def bits(name):
    """Hash one training step of several shapes."""
    digest = hashlib.sha1()
    for shape, axis in (((2, 3, 112, 112), 1), ((1, 2, 500, 500), 1), ((32, 28, 28, 64), 3)):
        d = Drawing(shape, axis=axis)
        arrays = d.arrays()
        with autograd.record():
            y = OPERATORS[name](*arrays, fix_gamma=False, axis=axis)
        y.backward(nd.array(d.dy))
        for array in (y, *(array.grad for array in arrays[:3]), *arrays[3:]):
            digest.update(array.asnumpy().tobytes())
    return digest.hexdigest()


@row("bits", "Bits of the result")
def same_bits():
    """The same bits for every number of threads."""
    threads = (1, 2, 3, 4, 8)

    def measure(name):
        found = {in_process(bits, name, OMP_NUM_THREADS=str(count)) for count in threads}
        return f"{len(found)} result" + "s" * (len(found) > 1)

    yield "A training step with OMP_NUM_THREADS 1, 2, 3, 4 and 8", "1 result", measure


# Shapes


def short_gamma(name):
    """Give gamma one value less than there are channels; 99 lies behind it in memory."""

    def run():
        x = nd.array(np.random.RandomState(0).randn(2, 4, 2, 2))
        gamma = nd.array([1, 1, 1, 99])[:3]
        y = OPERATORS[name](x, gamma, *[nd.zeros(4) for _ in range(2)], nd.ones(4), eps=0.0,
                            fix_gamma=False)  # fmt: skip
        return f"accepted; channel 3 is scaled by {(y[0, 3, 0, 0] / x[0, 3, 0, 0]).asscalar():.0f}"

    return guarded(run)


def short_statistics(name):
    """Give moving_mean one value for a million channels, and take a training step."""

    def run():
        channels = 1 << 20
        x = nd.ones((2, channels, 2, 2))
        x.attach_grad()
        parameters = [nd.ones(channels), nd.zeros(channels), nd.zeros(1), nd.ones(channels)]
        with autograd.record():
            y = OPERATORS[name](x, *parameters, fix_gamma=False)
        y.backward()
        nd.waitall()
        return "accepted"

    return guarded(run)


@row("wrong_shape", "Parameter of a wrong shape")
def wrong_shapes():
    """Parameters shorter than there are channels."""
    yield (
        "gamma (3,), cut from an array with 99 behind it, 4 channels; inference",
        "an error",
        (lambda name: in_process(short_gamma, name)),
    )
    yield (
        "moving_mean (1,), 1048576 channels; training step",
        "an error",
        (lambda name: in_process(short_statistics, name)),
    )


def zero_channels(name):
    """Data without channels."""

    def run():
        with mx.util.np_shape(True):
            empty = nd.zeros((0,))
            OPERATORS[name](nd.zeros((2, 0, 3, 3)), *[empty.copy() for _ in range(4)])
            nd.waitall()
        return "accepted"

    return guarded(run)


@row("zero_channels", "No channels")
def no_channels():
    """Zero channels."""
    yield (
        "data (2, 0, 3, 3), parameters (0,); inference",
        "an error",
        (lambda name: in_process(zero_channels, name)),
    )


@row("empty_batch", "Empty batch")
def empty_batch():
    """An empty batch in training."""

    def measure(name):
        with mx.util.np_shape(True):
            x = nd.zeros((0, 2, 3, 3))
            x.attach_grad()
            gamma, beta = nd.ones(2), nd.zeros(2)
            gamma.attach_grad()
            beta.attach_grad()
            moving_mean, moving_var = nd.zeros(2), nd.ones(2)
            with autograd.record():
                y = OPERATORS[name](x, gamma, beta, moving_mean, moving_var, fix_gamma=False)
            y.backward()
            return (
                f"moving mean {numbers(moving_mean.asnumpy())}; variance "
                f"{numbers(moving_var.asnumpy())}; d gamma {numbers(gamma.grad.asnumpy())}"
            )

    right = "moving mean 0, 0; variance 1, 1; d gamma 0, 0"
    yield "data (0, 2, 3, 3), one training step", right, measure


# Requests


@row("fix_gamma", "`fix_gamma` and the user's gamma")
def fix_gamma():
    """fix_gamma=True is the operator's default."""

    def measure(name):
        d = Drawing()
        arrays = d.arrays()
        arrays[1][:] = 2
        OPERATORS[name](*arrays).wait_to_read()
        return "gamma " + numbers(arrays[1].asnumpy())

    yield "gamma 2, 2, 2, 2; inference, all defaults", "gamma 2, 2, 2, 2", measure


@row("grad_req_add", "`grad_req='add'` with `fix_gamma`")
def add():
    """Gradients that were accumulated before stay."""
    for dtype in ("float32", "float64"):

        def measure(name, dtype=dtype):
            arrays = [array.astype(dtype) for array in Drawing().arrays()]
            arrays[1].attach_grad(grad_req="add")
            arrays[1].grad[:] = 7
            with autograd.record():
                y = OPERATORS[name](*arrays, fix_gamma=True)
            y.backward()
            return "accumulated " + numbers(arrays[1].grad.asnumpy())

        yield f"d gamma holds 7, 7, 7, 7; one training step, {dtype}", "7, 7, 7, 7", measure


@row("conv3d", "Conv3D + BatchNorm, backward")
def conv3d():
    """Backward through a three-dimensional convolution and batch normalization."""

    def with_channels(channels):
        def measure(name):
            rs = np.random.RandomState(0)
            net = gluon.nn.Sequential()
            layer = LAYERS[name](in_channels=channels, epsilon=EPS)
            convolution = gluon.nn.Conv3D(channels, 3, in_channels=2, use_bias=False)
            net.add(convolution, layer)
            net.initialize()
            convolution.weight.set_data(nd.array(rs.randn(channels, 2, 3, 3, 3)))
            x = nd.array(rs.randn(2, 2, 6, 6, 6))
            x.attach_grad()
            dy = rs.randn(2, channels, 4, 4, 4)
            with autograd.record():
                y = net(x)
            y.backward(nd.array(dy))
            got = layer.gamma.grad().asnumpy()
            convolved = convolution(x).asnumpy()
            one, zero = np.ones(channels), np.zeros(channels)
            kept = reference.forward(
                convolved, one, zero, zero, one, is_train=True, fix_gamma=False, eps=EPS
            )
            right = reference.backward(dy, convolved, one, kept, fix_gamma=False)[1]
            return "d gamma " + error(got, right)

        return measure

    for channels in (4, 16):
        what = f"`Conv3D({channels}, 3)`, `BatchNorm()`; training step"
        yield what, "no error", with_channels(channels)


@row("get_params", "`Module.get_params()` after a step")
def get_params():
    """Moving statistics as Module gives them, right after a training step."""
    x = np.random.RandomState(0).randn(64, 64, 32, 32).astype("float32") + 5
    right = 0.1 * reference.statistics(x)[0]
    times = 20

    def with_settings(update, wait):
        def measure(name):
            operator = {"built-in": mx.sym.BatchNorm, "mxbn": mxbn.sym.BatchNorm}[name]
            symbol = operator(mx.sym.var("data"), fix_gamma=False, name="bn")
            net = (mxbn.Module if name == "mxbn" else mx.mod.Module)(symbol, label_names=None)
            net.bind(data_shapes=[("data", x.shape)], for_training=True)
            net.init_params()
            net.init_optimizer(optimizer_params={"learning_rate": 0.0})
            batch = mx.io.DataBatch([nd.array(x)])
            head = [nd.ones(x.shape)]
            stale = 0
            for _ in range(times):
                net.set_params(
                    arg_params={"bn_gamma": nd.ones(64), "bn_beta": nd.zeros(64)},
                    aux_params={"bn_moving_mean": nd.zeros(64), "bn_moving_var": nd.ones(64)},
                )
                nd.waitall()
                net.get_params()
                net.forward(batch, is_train=True)
                net.backward(head)
                if update:
                    net.update()
                if wait:
                    nd.waitall()
                got = net.get_params()[1]["bn_moving_mean"].asnumpy()
                stale += not np.allclose(got, right, 1e-3)
            return f"stale {stale} of {times} times"

        return measure

    what = "`forward`, `backward`, "
    for label, update, wait in (
        ("`get_params`", False, False),
        ("`nd.waitall`, `get_params`", False, True),
        ("`update`, `get_params`", True, False),
        ("`update`, `nd.waitall`, `get_params`", True, True),
    ):
        yield what + label, "stale 0 of 20 times", with_settings(update, wait)


if __name__ == "__main__":
    main(sys.argv[1:])
