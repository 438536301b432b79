"""What a user of MXNet sees: the cost of a small call, and of steps of a whole network."""

import mxnet as mx
from peers import OPERATORS, synchronous
from timing import alternate, summary

import mxbn
from mxbn.tools.fold import fold

SMALL = (1, 2, 4, 4)
MOST_CALLS = 10000
RATE = 1e-3


def small_calls(seconds):
    """Time imperative calls on a tensor so small that only the overhead counts."""
    rows = []
    for train in (False, True):
        times = alternate(
            {peer: _small_call(package, train) for peer, package in OPERATORS.items()},
            seconds,
            most_runs=MOST_CALLS,
        )
        work = "training forward, recorded" if train else "inference forward"
        rows.append(_row("x".join(map(str, SMALL)), work, times))
    return rows


def _small_call(package, train):
    x = mx.nd.random.normal(shape=SMALL)
    parameters = [fill(SMALL[1:2]) for fill in (mx.nd.ones, mx.nd.zeros, mx.nd.zeros, mx.nd.ones)]
    for each in (x, *parameters[:2]):
        each.attach_grad()

    def infer():
        package.nd.BatchNorm(x, *parameters, fix_gamma=False).wait_to_read()

    def record():
        with mx.autograd.record():
            y = package.nd.BatchNorm(x, *parameters, fix_gamma=False)
        y.wait_to_read()

    return record if train else infer


def resnet_18(quick, seconds):
    """Time a step of training and an inference with the layers of either, and folded ones."""
    batch, side = (2, 32) if quick else (8, 224)
    data = mx.nd.random.normal(shape=(batch, 3, side, side))
    label = mx.nd.arange(batch)
    built_in = _network(data)
    with mxbn.replace_builtin():
        ours = _network(data)
    networks = {"mxbn": ours, "built-in": built_in}
    fused = {**networks, "mxbn": _hybridized(mxbn.fuse(ours), data)}
    text = f"ResNet-18, {batch}x3x{side}x{side}"
    rows = []
    for work, make in (("inference", _inference), ("training step", _training_step)):
        for how, peers in (("", networks), (", fused", fused)):
            ways = {peer: make(network, data, label) for peer, network in peers.items()}
            rows.append(_row(text, work + how, alternate(ways, seconds)))
    # Now that its statistics are not the first ones.
    folded = _hybridized(fold(ours, shapes={"data": data.shape}).model, data)
    ways = {
        peer: _inference(network, data, label)
        for peer, network in {**networks, "mxbn": folded}.items()
    }
    rows.append(_row(text, "inference, folded", alternate(ways, seconds)))
    return rows


def _network(data):
    mx.random.seed(0)  # both start with the same parameters
    network = mx.gluon.model_zoo.vision.resnet18_v1()
    network.initialize(mx.init.Xavier())
    return _hybridized(network, data)


def _hybridized(network, data):
    network.hybridize(static_alloc=True, static_shape=True)
    network(data).wait_to_read()
    return network


def _inference(network, data, _):
    return synchronous(lambda: network(data))


def _training_step(network, data, label):
    trainer = mx.gluon.Trainer(network.collect_params(), "sgd", {"learning_rate": RATE})
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def step():
        with mx.autograd.record():
            loss = loss_of(network(data), label)
        loss.backward()
        trainer.step(len(data))

    return synchronous(step)


def _row(what, work, times):
    peers = {peer: summary(each) for peer, each in times.items()}
    ratio = peers["mxbn"]["ms"] / peers["built-in"]["ms"]
    return {"what": what, "work": work, "peers": peers, "ratios": {"built-in": ratio}}
