"""What guarded training counts, and what it warns of."""

import re
import warnings

import mxnet as mx
import numpy as np
import pytest
from helpers import CONTEXT, HYBRIDIZE
from mxnet import autograd

import mxbn
from mxbn.callback import StatisticsHandler, StatisticsWarning, WatchStatistics
from mxbn.tools.guard import Counts, Guard

CHANNELS = 3


def layer(ctx=None, **flags):
    made = mxbn.gluon.BatchNorm(in_channels=CHANNELS, **flags)
    made.initialize(ctx=ctx)
    return made


def batch(mean=0.0, std=1.0, size=8, seed=0):
    return mx.nd.array(np.random.RandomState(seed).randn(size, CHANNELS) * std + mean)


def train(net, data):
    with autograd.record():
        out = net(data)
    out.backward()
    return out


@pytest.mark.parametrize("way", HYBRIDIZE)
def test_counts_forwards_by_mode_and_steps(way):
    net = layer()
    if HYBRIDIZE[way] is not None:
        net.hybridize(**HYBRIDIZE[way])
    with Guard(net) as guard:
        for _ in range(3):
            train(net, batch())
        for _ in range(2):
            net(batch())
        with autograd.record(train_mode=False):
            net(batch()).backward()
        assert guard.read() == {net.name: Counts(3, 3, 3, 0)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"use_global_stats": True}, Counts(0, 2, 0, 0)),
        ({"use_batch_stats": True}, Counts(2, 0, 1, 0)),
    ],
)
def test_flags_choose_what_is_counted(flags, expected):
    net = layer(**flags)
    with Guard(net) as guard:
        train(net, batch())
        net(batch())
        assert guard.read() == {net.name: expected}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_counts_channels_that_are_skipped(dtype, bad):
    net = layer()
    net.cast(dtype)
    values = batch().asnumpy()
    values[2, 1] = bad
    with Guard(net) as guard:
        train(net, mx.nd.array(values, dtype=dtype))
        train(net, batch().astype(dtype))
        train(net, mx.nd.array(values * bad, dtype=dtype))
        assert guard.read() == {net.name: Counts(3, 0, 3, 1 + CHANNELS)}


def test_reset_and_stop():
    net = layer()
    guard = Guard(net)
    train(net, batch())
    guard.reset()
    assert guard.read() == {net.name: Counts()}
    train(net, batch())
    guard.stop()
    train(net, batch())
    assert guard.read() == {net.name: Counts(1, 0, 1, 0)}


def test_two_guards_of_one_layer_are_not_needed():
    """The last one counts; the arrays of the first stay as they are."""
    net = layer()
    first, second = Guard(net), Guard(net)
    train(net, batch())
    assert second.read() == {net.name: Counts(1, 0, 1, 0)}
    assert first.read() == {net.name: Counts()}


def test_a_guard_that_is_gone_counts_no_longer():
    net = layer()
    Guard(net)  # gone at once
    train(net, batch())
    mx.nd.waitall()
    with Guard(net) as guard:
        train(net, batch())
        assert guard.read() == {net.name: Counts(1, 0, 1, 0)}


def test_layers_on_several_devices_are_added_up():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = layer(devices)
    with Guard(net) as guard:
        for ctx in devices:
            train(net, batch().as_in_context(ctx))
        assert guard.read() == {net.name: Counts(2, 0, 2, 0)}


def test_arrays_that_take_the_place_of_others_are_followed():
    net = layer()
    with Guard(net) as guard:
        train(net, batch())
        net.cast("float64")
        guard.read()
        train(net, batch().astype("float64"))
        assert guard.read() == {net.name: Counts(2, 0, 2, 0)}


def test_nothing_else_is_changed_by_counting():
    results = []
    for counting in (False, True):
        net = layer()
        guard = Guard(net) if counting else None
        out = train(net, batch())
        mx.nd.waitall()
        results.append([out.asnumpy(), net.running_var.data().asnumpy()])
        if guard is not None:
            guard.stop()
    for plain, counted in zip(*results):
        assert plain.tobytes() == counted.tobytes()


def module(steps=1, **flags):
    net = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", **flags)
    made = mxbn.Module(mx.sym.LinearRegressionOutput(net, name="out"), label_names=["out_label"])
    made.bind([("data", (8, CHANNELS))], [("out_label", (8, CHANNELS))])
    made.init_params()
    return made


def test_counts_a_module():
    made = module()
    data = mx.io.DataBatch([batch()], [batch()])
    with Guard(made) as guard:
        made.forward(data, is_train=True)
        made.backward()
        made.forward(data, is_train=False)
        assert guard.read() == {"bn": Counts(1, 1, 1, 0)}


@pytest.mark.parametrize("model", [mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(3), layer])
def test_a_model_without_layers_that_can_be_counted_is_refused(model):
    model = mxbn.gluon.BatchNorm() if callable(model) and model is layer else model
    with pytest.raises(ValueError, match="Guard: the model has no mxbn BatchNorm whose arrays"):
        Guard(model)


def test_another_thing_is_refused():
    with pytest.raises(TypeError, match="a model of type dict was given"):
        Guard({})


def watch_batches(batches, **options):
    """What is warned of in training a layer on batches."""
    net, watch = layer(momentum=0.5), WatchStatistics(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in batches:
            train(net, data)
            watch.after_batch(net)
    watch.close()
    return [str(w.message) for w in caught if w.category is StatisticsWarning], net.name


def gap_in(message):
    return float(re.search(r"are (\S+) standard deviations", message).group(1))


def test_warns_of_skipped_steps_once():
    bad = mx.nd.array([[np.inf, 0, 1], [1, 2, 3]])
    found, name = watch_batches([batch(), bad, batch(), batch()], every=1, bound=1e9)
    assert found == [
        f"mxbn: 1 steps of channels of {name} were skipped by batch 2: their mean or variance was "
        "not finite"
    ]


def test_warns_of_statistics_far_from_the_batch():
    """The gap is that of the batch that is looked at, from the moving statistics before it."""
    batches = [batch(seed=i, size=4000) for i in range(20)] + [batch(mean=3.0, size=4000)]
    found, name = watch_batches(batches, every=1, bound=2.0, warm_up=10)
    assert len(found) == 1
    assert f"of {name} are " in found[0]
    assert "batch 21 (bound 2)" in found[0]
    assert gap_in(found[0]) == pytest.approx(3, abs=0.1)


def test_warns_of_a_spread_far_from_the_batch():
    batches = [batch(seed=i, size=4000) for i in range(20)] + [batch(std=20.0, size=4000)]
    found, _ = watch_batches(batches, every=1, bound=2.0, warm_up=10)
    assert len(found) == 1
    assert gap_in(found[0]) == pytest.approx(np.log(20), abs=0.1)


def test_does_not_warn_in_the_warm_up_or_of_what_is_well():
    far = [batch(mean=100.0, seed=i, size=4000) for i in range(3)]
    near = [batch(mean=100.0, seed=i, size=4000) for i in range(30)]
    assert watch_batches(far + near, every=1, bound=0.5, warm_up=12)[0] == []


def test_looks_only_now_and_then():
    batches = [batch(seed=i, size=4000) for i in range(12)]
    batches[10] = batch(mean=50.0, size=4000)  # the 11th
    assert watch_batches(batches, every=6, warm_up=2, bound=45.0)[0] == []
    assert len(watch_batches(batches, every=11, warm_up=2, bound=45.0)[0]) == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"bound": 0}, {"warm_up": -1}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="WatchStatistics: every="):
        WatchStatistics(**options)


def test_watches_module_fit():
    values = batch(size=32).asnumpy()
    values[9] = np.nan
    data = mx.io.NDArrayIter(values, np.zeros_like(values), batch_size=8, label_name="out_label")
    net = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn")
    made = mxbn.Module(mx.sym.LinearRegressionOutput(net, name="out"), label_names=["out_label"])
    watch = WatchStatistics(every=2)
    with pytest.warns(StatisticsWarning, match="3 steps of channels of bn were skipped by batch 2"):
        made.fit(data, num_epoch=1, eval_metric="mse", batch_end_callback=watch)
    watch.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest.warns hands on MXNet's own
@pytest.mark.mxnet_operators
def test_watches_an_estimator():
    from mxnet.gluon.contrib.estimator import Estimator

    net = mx.gluon.nn.HybridSequential()
    net.add(mxbn.gluon.BatchNorm(), mx.gluon.nn.Dense(2))
    net.initialize()
    values = batch(size=32).asnumpy()
    values[9] = np.nan
    data = mx.gluon.data.DataLoader(
        mx.gluon.data.ArrayDataset(values, np.zeros(32, "float32")), batch_size=8
    )
    estimator = Estimator(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), context=CONTEXT)
    handler = StatisticsHandler(every=2)
    with pytest.warns(StatisticsWarning, match="3 steps of channels of batchnorm"):
        estimator.fit(data, epochs=1, event_handlers=[handler])
