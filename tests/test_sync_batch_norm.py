"""BatchNorm of a batch that is spread over devices: what one BatchNorm gives on all of it."""

import time
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from device import KIND, ON_GPU
from helpers import (
    DTYPES,
    HYBRIDIZE,
    MODES,
    arrays,
    call,
    check,
    check_dgamma,
    draw,
    right,
    run_script,
    same_bits,
)
from mxnet import autograd

import mxbn
from mxbn import _library

hybrid = pytest.mark.parametrize("hybridize", HYBRIDIZE.values(), ids=HYBRIDIZE)
PARAMETERS = ("gamma", "beta", "moving_mean", "moving_var")
OPTIONS = {"fix_gamma": False, "eps": 1e-3, "momentum": 0.75}
# Where the devices are CPU contexts; see tests/device.py.
CPU_HINT = "" if ON_GPU else ", and MXNET_CPU_TEMP_COPY=1000 for CPU contexts (see the README)"
keys = iter(f"test_{i}" for i in range(10**6))


def contexts(count):
    return [mx.Context(KIND, i) for i in range(count)]


def load(values, context, dtype):
    return mx.nd.array(values, ctx=context, dtype=dtype)


def spread(d, counts, requests="write"):
    """The arrays of each device, which has so many of the samples."""
    ends = np.cumsum(counts)
    parts = []
    for context, end, count in zip(contexts(len(counts)), ends, counts):
        rows = slice(end - count, end)
        part = SimpleNamespace(
            x=load(d.x[rows], context, d.dtype), dy=load(d.dy[rows], context, d.dtype)
        )
        for name in PARAMETERS:
            setattr(part, name, load(getattr(d, name), context, d.param))
        for name in ("x", "gamma", "beta"):
            getattr(part, name).attach_grad(requests)
        parts.append(part)
    return parts


def sync(d, part, key, num_devices, **options):
    inputs = [getattr(part, name) for name in ("x", *PARAMETERS)]
    options.setdefault("timeout", 5)
    return mxbn.nd.SyncBatchNorm(
        *inputs, axis=d.axis, key=key, num_devices=num_devices, **{**OPTIONS, **options}
    )


def forward(d, parts, is_train=True, key=None, **options):
    key = key or next(keys)
    with autograd.record(train_mode=is_train):
        for part in parts:
            part.y = sync(d, part, key, len(parts), **options)


def together(arrays):
    return np.concatenate([array.asnumpy() for array in arrays])


def total(arrays):
    return np.sum([array.asnumpy() for array in arrays], axis=0)


def check_all(d, parts, want, units=4):
    """Compare with one BatchNorm on the whole batch."""
    mx.nd.waitall()
    # Float64 also shows the roundings of the sums, of values this far from zero.
    scale = 1 + np.abs(d.x).max() if d.dtype == "float64" else None
    check(together(p.y for p in parts), want.output, units, scale, "output")
    check(together(p.x.grad for p in parts), want.dx, units, scale, "gradient of data")
    # One rounding for each device, and one for each addition.
    check_dgamma(total(p.gamma.grad for p in parts), want, units + len(parts))
    size = 1 + np.abs(d.dy).sum() / len(d.gamma)
    check(total(p.beta.grad for p in parts), want.dbeta, units, size, "gradient of beta")
    for part in parts:
        check(part.moving_mean, want.moving_mean, units, scale, "moving mean")
        check(part.moving_var, want.moving_var, units, scale, "moving variance")
        assert same_bits(part.moving_mean, parts[0].moving_mean)
        assert same_bits(part.moving_var, parts[0].moving_var)


# ------------------------------------------------------------------------------------ the operator


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_that_of_one_batch(mode, dtype):
    is_train, use_global_stats, use_batch_stats = MODES[mode]
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    d = draw((8, 3, 4, 5), dtype=dtype, seed=1)
    parts = spread(d, (5, 3))
    forward(d, parts, is_train, **flags)
    autograd.backward([p.y for p in parts], [p.dy for p in parts], train_mode=not is_train)
    check_all(d, parts, right(d, is_train, **OPTIONS, **flags))


@pytest.mark.parametrize(
    "counts",
    [
        (1, 7),
        (8, 0),
        pytest.param((0, 3, 5), marks=pytest.mark.cpu),  # there may be two GPUs
        pytest.param((2, 2, 2, 2), marks=pytest.mark.cpu),
    ],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_parts_may_be_of_any_size(counts):
    d = draw((8, 3, 5), seed=2)
    with mx.util.np_shape():  # elsewhere a dimension of 0 means an unknown one
        parts = spread(d, counts)
        forward(d, parts)
        autograd.backward([p.y for p in parts], [p.dy for p in parts])
        check_all(d, parts, right(d, True, **OPTIONS))


def test_a_batch_that_is_empty_everywhere_changes_nothing():
    d = draw((0, 3, 5), seed=3)
    with mx.util.np_shape():
        parts = spread(d, (0, 0))
        forward(d, parts)
        autograd.backward([p.y for p in parts], [p.dy for p in parts])
        mx.nd.waitall()
    for part in parts:
        assert same_bits(part.moving_mean, d.moving_mean.astype("float32"))
        assert same_bits(part.moving_var, d.moving_var.astype("float32"))
        assert (part.gamma.grad.asnumpy() == 0).all()


@pytest.mark.parametrize(
    ("shape", "axis"), [((8, 5), 1), ((8, 3, 3, 33), -1), ((6, 17, 1025), 1), ((5, 4, 2, 3), 2)]
)
def test_any_axis(shape, axis):
    d = draw(shape, axis, seed=4)
    parts = spread(d, (shape[0] - 2, 2))
    forward(d, parts)
    autograd.backward([p.y for p in parts], [p.dy for p in parts])
    check_all(d, parts, right(d, True, **OPTIONS))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_from_zero(dtype):
    """MXNet's own layer takes the variance for the difference of two means: NaN here."""
    d = draw((8, 3, 40), dtype=dtype, seed=5, mean=1000, std=0.01)
    d.x[:3] += 0.05  # the devices' means differ
    d.x = d.x.astype(dtype).astype("float64")
    options = {"eps": 1e-9}
    parts = spread(d, (3, 5))
    forward(d, parts, **options)
    autograd.backward([p.y for p in parts], [p.dy for p in parts])
    want = right(d, True, **{**OPTIONS, **options})
    if dtype == "float64":  # beside the values' size, which is 1e5 deviations
        check(together(p.y for p in parts), want.output, 4, 1e5, "output")
    else:
        check_all(d, parts, want)


def test_requests_and_any_number_of_backwards():
    d = draw((6, 3, 4), seed=6)
    parts = spread(d, (4, 2), "add")
    for part in parts:
        part.gamma.attach_grad("null")
        part.x.grad[:] = 2
    forward(d, parts)
    want = right(d, True, **OPTIONS)
    for _ in range(3):
        autograd.backward([p.y for p in parts], [p.dy for p in parts], retain_graph=True)
    mx.nd.waitall()
    check(together(p.x.grad for p in parts), 2 + 3 * want.dx, 8, what="gradient of data")
    check(total(p.beta.grad for p in parts), 3 * want.dbeta, 16, what="gradient of beta")
    assert not any(part.gamma.grad.asnumpy().any() for part in parts)
    check(parts[1].moving_mean, want.moving_mean, what="moving mean")


def test_no_gradient_of_data_is_asked_for():
    d = draw((6, 3, 4), seed=7)
    parts = spread(d, (4, 2))
    for part in parts:
        part.x = part.x.detach()
    forward(d, parts)
    autograd.backward([p.y for p in parts], [p.dy for p in parts])
    want = right(d, True, **OPTIONS)
    check_dgamma(total(p.gamma.grad for p in parts), want, 6)
    check(total(p.beta.grad for p in parts), want.dbeta, 6, what="gradient of beta")


def test_fixed_gamma_and_the_outputs_that_show_the_statistics():
    d = draw((6, 3, 4), seed=8)
    parts = spread(d, (4, 2))
    options = {"fix_gamma": True, "output_mean_var": True}
    forward(d, parts, **options)
    want = right(d, True, **{**OPTIONS, "fix_gamma": True})
    for part in parts:
        check(part.y[1], want.mean, what="mean")
        check(part.y[2], want.inv_std, what="1/std")
    check(together(p.y[0] for p in parts), want.output, what="output")
    autograd.backward([p.y[0] for p in parts], [p.dy for p in parts])
    check(together(p.x.grad for p in parts), want.dx, what="gradient of data")
    assert (total(p.gamma.grad for p in parts) == 0).all()


def test_one_device_alone_is_a_batch_norm_bit_by_bit():
    d = draw((6, 17, 40), seed=9)
    [part], a = spread(d, (6,)), arrays(d)
    forward(d, [part])
    with autograd.record():
        y = call(d, a, **OPTIONS)
    part.y.backward(part.dy)
    y.backward(a.dy)
    assert same_bits(part.y, y)
    for name in ("x", "gamma", "beta"):
        assert same_bits(getattr(part, name).grad, getattr(a, name).grad), name
    for name in PARAMETERS:
        assert same_bits(getattr(part, name), getattr(a, name)), name


@pytest.mark.cpu  # there may be two GPUs
def test_the_same_bits_whoever_comes_first():
    d = draw((9, 3, 40), seed=10)
    results = []
    for i in range(12):
        parts = spread(d, (4, 3, 2))
        key = next(keys)
        with autograd.record():
            for j in range(3):
                part = parts[(i + j) % 3]
                part.y = sync(d, part, key, 3)
        autograd.backward([p.y for p in parts], [p.dy for p in parts])
        outcome = [together(p.y for p in parts), together(p.x.grad for p in parts)]
        results.append([*outcome, parts[0].moving_var.asnumpy()])
    for result in results:
        assert all(map(same_bits, result, results[0]))


def test_a_channel_that_is_not_finite_anywhere_steps_nowhere():
    d = draw((6, 3, 4), seed=11)
    d.x[5, 1, 0] = np.inf
    parts = spread(d, (4, 2))
    forward(d, parts)
    want = right(d, True, **OPTIONS)
    for part in parts:
        check(part.moving_mean, want.moving_mean, what="moving mean")
        check(part.moving_var, want.moving_var, what="moving variance")
        assert part.moving_var.asnumpy()[1] == np.float32(d.moving_var[1])


def test_moving_statistics_need_nobody_else():
    d = draw((6, 3, 4), seed=12)
    part = spread(d, (3, 3))[0]
    with autograd.record(train_mode=False):
        y = sync(d, part, next(keys), 2, timeout=0)
    y.backward(part.dy)
    d.x, d.dy = d.x[:3], d.dy[:3]
    check(y, right(d, False, **OPTIONS).output, what="output")
    check(part.x.grad, right(d, False, **OPTIONS).dx, what="gradient of data")


@pytest.mark.mxnet_operators
def test_calls_of_one_layer_meet_in_the_order_of_the_program():
    """Although the data of the first call on the second device is ready last."""
    first, second = draw((6, 3, 4), seed=13), draw((6, 3, 4), seed=14)
    late = np.ones((600, 600), "float32")
    for _ in range(5):
        key, parts = next(keys), [spread(d, (4, 2)) for d in (first, second)]
        for device in range(2):
            one, two = parts[0][device], parts[1][device]
            context = one.x.context
            slow = mx.nd.array(late, ctx=context)
            for _ in range(3 * device):
                slow = mx.nd.dot(slow, slow) * 0
            one.x = one.x + slow[0, 0] * 0
            one.y = sync(first, one, key, 2, use_batch_stats=True)
            two.y = sync(second, two, key, 2, use_batch_stats=True)
        for d, both in ((first, parts[0]), (second, parts[1])):
            want = right(d, False, use_batch_stats=True, **OPTIONS)
            check(together(p.y for p in both), want.output, what="output")


@pytest.mark.cpu  # the temporary space of a GPU, of which there is one, follows the program
def test_layers_overlap_whatever_the_order_on_each_device():
    """Two layers side by side: one device calls them in the opposite order of the other."""
    d = draw((6, 3, 4), seed=15)
    want = right(d, True, **OPTIONS)
    for _ in range(5):
        a, b, outputs = next(keys), next(keys), []
        parts = spread(d, (4, 2)), spread(d, (4, 2))
        with autograd.record():
            for device, order in enumerate(((0, 1), (1, 0))):
                for layer in order:
                    part = parts[layer][device]
                    part.y = sync(d, part, (a, b)[layer], 2)
                outputs += [parts[layer][device].y for layer in reversed(order)]
        autograd.backward(outputs, [parts[i][j].dy for i, j in ((1, 0), (0, 0), (0, 1), (1, 1))])
        for each in parts:
            check_all(d, each, want)


# ---------------------------------------------------------------------------------- what goes wrong


def test_a_device_that_never_comes_is_an_error_and_the_next_round_is_clean():
    d = draw((6, 3, 4), seed=16)
    key = next(keys)
    part = spread(d, (4, 2))[0]
    began = time.monotonic()
    with pytest.raises(mx.base.MXNetError) as raised:
        sync(d, part, key, 2, use_batch_stats=True, timeout=0.2).wait_to_read()
    assert 0.2 <= time.monotonic() - began < 10
    assert str(raised.value).endswith(
        f"mxbn: SyncBatchNorm: layer '{key}', forward: within 0.2 s only {part.x.context} came, "
        "not 1 more: expected num_devices=2 devices, each of which runs the layer as often as the "
        "others" + CPU_HINT
    )
    for name in PARAMETERS:
        assert same_bits(getattr(part, name), getattr(d, name).astype("float32")), name
    parts = spread(d, (4, 2))
    forward(d, parts, key=key, timeout=0.2)
    autograd.backward([p.y for p in parts], [p.dy for p in parts])
    check_all(d, parts, right(d, True, **OPTIONS))
    with pytest.raises(mx.base.MXNetError, match=f"not {KIND}\\(1\\)"):  # it is known by now
        sync(d, part, key, 2, use_batch_stats=True, timeout=0.2).wait_to_read()
    with autograd.record():
        ys = [sync(d, part, key, 2, timeout=0.2) for part in parts]
    ys[0].backward(parts[0].dy)  # and the other never
    with pytest.raises(mx.base.MXNetError, match=f"'{key}', backward: within 0.2 s only"):
        parts[0].x.grad.wait_to_read()


def test_a_device_that_fails_ends_the_wait_of_the_others():
    d = draw((6, 3, 4), seed=17)
    first, second = spread(d, (4, 2))
    key, second.gamma = next(keys), first.gamma
    y = sync(d, first, key, 2, use_batch_stats=True, timeout=60)
    time.sleep(0.2)  # it waits by now
    with pytest.raises(ValueError, match=f"gamma is on {KIND}"):
        sync(d, second, key, 2, use_batch_stats=True, timeout=60)
    with pytest.raises(mx.base.MXNetError, match=r"another device failed: .*gamma is on"):
        y.wait_to_read()


@pytest.mark.cpu  # on a GPU, the second call waits for the temporary space of the first
def test_a_key_in_use_with_another_number_of_devices():
    d, key = draw((6, 3, 4), seed=18), next(keys)
    part = spread(d, (3, 3))[0]
    first = sync(d, part, key, 2, use_batch_stats=True, timeout=0.6)
    time.sleep(0.2)  # it waits by now
    second = sync(d, part, key, 3, use_batch_stats=True, timeout=0.6)
    with pytest.raises(mx.base.MXNetError, match=r"\(0\) came twice before the others came once"):
        second.wait_to_read()
    with pytest.raises(mx.base.MXNetError, match=r"within 0.6 s only .*\(0\) came"):
        first.wait_to_read()


def test_devices_with_different_channels():
    parts = [spread(draw((4, channels, 5)), (2, 2))[i] for i, channels in enumerate((3, 4))]
    key = next(keys)
    ys = [sync(draw((1, 1)), part, key, 2, use_batch_stats=True) for part in parts]
    for y in ys:
        with pytest.raises(
            mx.base.MXNetError, match=r"\(1\) has 4 channels, expected 3 as .*\(0\)"
        ):
            y.wait_to_read()


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"num_devices": 0}, "num_devices is '0', expected a number of devices from 1 to 1000"),
        ({"num_devices": 1.5}, "num_devices is '1.5', expected a number of devices"),
        ({"timeout": -1}, "timeout is '-1', expected a number of seconds from 0 to 1e9"),
        ({"key": ""}, "key is missing, expected a name of the layer"),
        ({"use_batch_stats": True, "use_global_stats": True}, "are both True"),
        ({"beta": 1}, "unknown attribute 'beta', expected axis, .* key, momentum, num_devices"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_attributes_are_refused(attributes, text):
    d = draw((6, 3, 4))
    [part] = spread(d, (6,))
    inputs = [getattr(part, name) for name in ("x", *PARAMETERS)]
    if "beta" in attributes:
        attributes = {"Beta": 1}
        text = text.replace("beta", "Beta")
    with pytest.raises(ValueError, match=f"^mxbn: BatchNorm: .*{text}"):
        mxbn.nd.SyncBatchNorm(*inputs, **{"key": "a", **attributes})


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, "layer 'a' waits for other devices, which MXNet's"),
        ({"MXNET_BACKWARD_DO_MIRROR": "1"}, "cannot run again in backward, expected"),
    ],
    ids=["naive", "mirror"],
)
@pytest.mark.mxnet_operators
def test_ways_to_run_that_cannot_work_are_refused_at_once(environment, text):
    code = """
    from helpers import *
    symbol = mxbn.sym.SyncBatchNorm(mx.sym.var("data") * 2, num_devices=2, key="a")
    symbol = mx.sym.Activation(symbol, act_type="relu")
    try:
        executor = symbol.simple_bind(CONTEXT, data=(4, 3))
        executor.forward(is_train=True)[0].wait_to_read()
    except (mx.base.MXNetError, RuntimeError) as error:  # of running, of binding
        print(error)
    """
    result = run_script(code, **environment)
    assert text in result.stdout, result.stdout + result.stderr


# -------------------------------------------------------------------- Gluon, Module, files, layouts


def layer_for(d, count, **options):
    layer = mxbn.gluon.SyncBatchNorm(epsilon=1e-3, momentum=0.75, axis=d.axis, **options)
    layer.initialize(ctx=contexts(count))
    layer.gamma.shape = layer.beta.shape = (len(d.gamma),)
    layer.running_mean.shape = layer.running_var.shape = (len(d.gamma),)
    for parameter in layer.collect_params().values():
        parameter._finish_deferred_init()
    for name in PARAMETERS:
        parameter = getattr(layer, name.replace("moving", "running"))
        parameter.set_data(mx.nd.array(getattr(d, name)))
    return layer


@hybrid
def test_layer(hybridize):
    d = draw((8, 3, 4), seed=20)
    layer = layer_for(d, 2)
    if hybridize is not None:
        layer.hybridize(**hybridize)
    parts = [
        SimpleNamespace(x=x, dy=dy)
        for x, dy in zip(
            *(mx.gluon.utils.split_and_load(v.astype("float32"), contexts(2)) for v in (d.x, d.dy))
        )
    ]
    for part in parts:
        part.x.attach_grad()
    for use_global_stats in (False, False, True, False):  # acts from the next call on
        layer.use_global_stats = use_global_stats
        with autograd.record():
            for part in parts:
                part.y = layer(part.x)
        autograd.backward([p.y for p in parts], [p.dy for p in parts])
        for part in parts:
            context = part.x.context
            part.gamma, part.beta = layer.gamma.data(context), layer.beta.data(context)
            part.moving_mean = layer.running_mean.data(context)
            part.moving_var = layer.running_var.data(context)
        want = right(d, True, use_global_stats=use_global_stats, **OPTIONS)
        check_all(d, parts, want)
        d.moving_mean, d.moving_var = want.moving_mean, want.moving_var
        check(layer(parts[0].x), right(d, False, **OPTIONS).output[:4], what="inference")


class Net(mx.gluon.HybridBlock):
    """A layer twice, and two layers side by side, between convolutions."""

    def __init__(self, norm, **options):
        super().__init__()
        with self.name_scope():
            self.convolution = mx.gluon.nn.Conv2D(16, 3, in_channels=8)
            self.twice, self.left, self.right = (norm(**options) for _ in range(3))
            self.output = mx.gluon.nn.Dense(4, in_units=16 * 4 * 4)

    def hybrid_forward(self, F, x):
        x = self.twice(F.relu(self.twice(self.convolution(x))))
        return self.output(self.left(x) + F.relu(self.right(x)))


def train(norm, context_list, hybridize, steps=4, **options):
    net = Net(norm, **options)
    net.initialize(ctx=context_list)
    rs = np.random.RandomState(0)
    for parameter in net.collect_params().values():
        if parameter.name.endswith("weight"):
            parameter.set_data(mx.nd.array(rs.randn(*parameter.shape) * 0.1))
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    loss_of, losses = mx.gluon.loss.SoftmaxCrossEntropyLoss(), []
    for _ in range(steps):
        x, label = mx.nd.array(rs.randn(12, 8, 6, 6)), mx.nd.array(rs.randint(0, 4, 12))
        parts = zip(*(mx.gluon.utils.split_and_load(v, context_list) for v in (x, label)))
        with autograd.record():
            each = [loss_of(net(data), labels) for data, labels in parts]
        autograd.backward(each)
        mx.nd.waitall()  # the first step copies the statistics from device to device
        trainer.step(12)
        losses.append(sum(float(loss.sum().asscalar()) for loss in each) / 12)
    # After the prefix, whose number is that of the instance.
    values = {
        name[len(net.prefix) :].replace("sync", ""): parameter.data(context_list[-1]).asnumpy()
        for name, parameter in net.collect_params().items()
    }
    return losses, values


@hybrid
@pytest.mark.mxnet_operators
def test_training_on_two_devices_is_training_on_one(hybridize):
    losses, values = train(mxbn.gluon.BatchNorm, contexts(1), hybridize)
    found, others = train(mxbn.gluon.SyncBatchNorm, contexts(2), hybridize, timeout=5)
    np.testing.assert_allclose(found, losses, 1e-5)
    assert values.keys() == others.keys()
    for name, value in values.items():
        np.testing.assert_allclose(others[name], value, 1e-3, 1e-5, err_msg=name)


@pytest.mark.mxnet_operators
def test_data_between_convolutions_stays_in_its_layout():
    before = mxbn._library.onednn_layout_passes()
    train(mxbn.gluon.SyncBatchNorm, contexts(2), {}, steps=1)
    assert mxbn._library.onednn_layout_passes() >= before + 4  # statistics and forward, twice


@pytest.mark.mxnet_operators
def test_module_with_several_contexts():
    results = []
    for count in (1, 2):
        net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=6, name="fc1")
        if count == 1:
            net = mxbn.sym.BatchNorm(net, fix_gamma=False, name="bn")
        else:
            net = mxbn.sym.SyncBatchNorm(net, fix_gamma=False, name="bn", num_devices=count)
        net = mx.sym.FullyConnected(mx.sym.relu(net), num_hidden=3, name="fc2")
        module = mxbn.Module(mx.sym.SoftmaxOutput(net, name="softmax"), context=contexts(count))
        rs = np.random.RandomState(1)
        data = mx.io.NDArrayIter(rs.randn(24, 5), rs.randint(0, 3, 24), 12)
        module.bind(data.provide_data, data.provide_label)
        module.init_params(mx.init.Constant(0.1))
        shapes = {name: value.shape for name, value in module.get_params()[0].items()}
        module.set_params(
            {n: mx.nd.array(rs.randn(*shape)) for n, shape in sorted(shapes.items())},
            module.get_params()[1],
        )
        module.init_optimizer(optimizer_params={"learning_rate": 0.1})
        for batch in data:
            module.forward_backward(batch)
            module.update()
        parameters, statistics = module.get_params()
        results.append({k: v.asnumpy() for k, v in {**parameters, **statistics}.items()})
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, 1e-4, 1e-6, err_msg=name)


@pytest.mark.mxnet_operators
def test_exported_and_imported(tmp_path):
    d = draw((8, 3, 4), seed=21)
    net = mx.gluon.nn.HybridSequential()
    net.add(layer_for(d, 2, timeout=30))
    net.hybridize()
    x = mx.nd.array(d.x)
    net(x)
    net.export(str(tmp_path / "net"))
    files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
    imported = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1], ctx=contexts(2))
    check(imported(x), right(d, False, **OPTIONS).output, what="inference")
    parts = mx.gluon.utils.split_and_load(x, contexts(2))
    with autograd.train_mode():
        outputs = [imported(part) for part in parts]
    check(together(outputs), right(d, True, **OPTIONS).output, what="training")


def test_numpy_mode():
    d = draw((8, 3, 4), seed=22)
    with mx.util.np_shape(True), mx.util.np_array(True):
        layer = mxbn.gluon.SyncBatchNorm(epsilon=1e-3)
        layer.initialize(ctx=contexts(2))
        split = zip(np.split(d.x, [6]), contexts(2))
        parts = [mx.np.array(values, "float32", ctx=context) for values, context in split]
        with autograd.record():
            outputs = [layer(part) for part in parts]
        assert all(isinstance(output, mx.np.ndarray) for output in outputs)
        d.gamma[:], d.beta[:] = 1, 0
        check(together(outputs), right(d, True, **OPTIONS).output, what="output")


def test_number_of_devices():
    layer = mxbn.gluon.SyncBatchNorm(in_channels=3)
    assert "SyncBatchNorm" in repr(layer)
    assert layer.prefix.startswith("syncbatchnorm")
    layer.initialize(ctx=contexts(2))
    first, second = (mx.nd.ones((2, 3), ctx=context) * i for i, context in enumerate(contexts(2)))
    with autograd.train_mode():
        y = layer(first)
        layer(second).wait_to_read()
    assert (y.asnumpy() < -0.9).all()
    with pytest.raises(ValueError, match="num_devices is '0'"):
        mxbn.gluon.SyncBatchNorm(num_devices=0)
    with pytest.raises(ValueError, match="timeout is '-1'"):
        mxbn.gluon.SyncBatchNorm(timeout=-1)


# ------------------------------------------------------------------------------------ other places


def test_moving_statistics_that_are_used_step_with_those_of_all_devices():
    flags = {"use_global_stats": True, "step_global_stats": True}
    d = draw((8, 3, 4), seed=23)
    parts = spread(d, (5, 3))
    forward(d, parts, **flags)
    autograd.backward([part.y for part in parts], [part.dy for part in parts])
    check_all(d, parts, right(d, True, **OPTIONS, **flags))


def model_of(d):
    """A layer behind an operator, as a checkpoint; the tools know one device."""
    data = mx.sym.var("data") * 1
    symbol = mxbn.sym.SyncBatchNorm(data, key=next(keys), name="bn", **OPTIONS)
    names = [f"bn_{name}" for name in PARAMETERS]
    values = {name: mx.nd.array(getattr(d, name[3:])) for name in names}
    return mxbn.Checkpoint(
        symbol, {n: values[n] for n in names[:2]}, {n: values[n] for n in names[2:]}
    )


def run_model(model, x, is_train):
    arrays = {"data": mx.nd.array(x), **model.arg_params}
    executor = model.symbol.bind(mx.cpu(), arrays, aux_states=model.aux_params)
    output = executor.forward(is_train=is_train)[0].asnumpy()
    mx.nd.waitall()
    return output


@pytest.mark.mxnet_operators
def test_tools():
    d = draw((8, 3, 4), seed=24)
    model = model_of(d)
    want = right(d, False, **OPTIONS)
    (row,) = mxbn.inspect(model, for_training=True, is_train=True).rows
    assert row[:2] == ("bn", "mxbn_SyncBatchNorm")
    assert row.behaviour[:2] == ("batch", "in forward")
    (left,) = mxbn.convert(model, "builtin").left
    assert left.remarks == ("takes its statistics over several devices",)
    folded = mxbn.fold(model, {"data": d.x.astype("float32")}).model
    assert "mxbn" not in folded.symbol.tojson()
    check(run_model(folded, d.x, False), want.output, 8)
    mxbn.recalibrate(model, [d.x.astype("float32")])
    check(model.aux_params["bn_moving_mean"], d.x.mean((0, 2)))


@pytest.mark.mxnet_operators
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("statistics", ["batch", "moving"])
def test_freeze(statistics, is_train):
    d = draw((8, 3, 4), seed=25)
    model = model_of(d)
    frozen = mxbn.freeze(model, statistics=statistics)
    flags = {"use_batch_stats": statistics == "batch", "use_global_stats": statistics == "moving"}
    want = right(d, is_train, **OPTIONS, **flags)
    check(run_model(frozen, d.x, is_train), want.output)
    check(frozen.aux_params["bn_moving_var"], want.moving_var)
    assert mxbn.unfreeze(frozen).symbol.tojson() == model.symbol.tojson()


def test_a_network_of_layers():
    net = mx.gluon.nn.HybridSequential()
    net.add(mxbn.gluon.SyncBatchNorm(in_channels=3), mxbn.gluon.BatchNorm(in_channels=3))
    net.initialize()
    done = mxbn.convert(net, "builtin")
    assert [each.to for each in done.changes] == [None, "BatchNorm"]
    assert type(net[0]) is mxbn.gluon.SyncBatchNorm


@pytest.mark.mxnet_operators
@pytest.mark.skipif(ON_GPU, reason="is about oneDNN's layouts")
def test_between_convolutions():
    x = mx.nd.random.normal(shape=(4, 8, 6, 6))
    results = []
    for kind in (mxbn.gluon.BatchNorm, mxbn.gluon.SyncBatchNorm):
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            norm = kind(prefix="norm_")
            net.add(mx.gluon.nn.Conv2D(16, 3), norm, mx.gluon.nn.Conv2D(16, 1))
        net.initialize(mx.init.One())
        net.hybridize()
        x.attach_grad()
        before = _library.onednn_layout_passes()
        with autograd.record():
            y = net(x)
        y.backward(mx.nd.arange(y.size).reshape(y.shape))
        mx.nd.waitall()
        taken = _library.onednn_layout_passes() - before
        parameters = net.collect_params().values()
        arrays = [y, x.grad, *(p.grad() for p in parameters if p.grad_req != "null")]
        results.append([taken, *(array.copy() for array in arrays)])
    (plain, *wanted), (shared, *found) = results
    assert (plain, shared) == (2, 4)  # forward and backward; statistics and reduction too
    for got, want in zip(found, wanted):
        check(got, want.asnumpy(), 16)
