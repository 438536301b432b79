"""mxbn.replace_builtin: which names it changes, for how long, and what networks made in it give."""

import threading

import mxnet as mx
import numpy as np
import pytest
from helpers import arrays, check, draw, nd, right, same_bits
from mxnet import autograd

import mxbn

PLACES = [
    (mx.nd, "BatchNorm", mxbn.nd.BatchNorm),
    (mx.nd.op, "BatchNorm", mxbn.nd.BatchNorm),
    (mx.ndarray, "BatchNorm", mxbn.nd.BatchNorm),
    (mx.sym, "BatchNorm", mxbn.sym.BatchNorm),
    (mx.sym.op, "BatchNorm", mxbn.sym.BatchNorm),
    (mx.symbol, "BatchNorm", mxbn.sym.BatchNorm),
    (mx.gluon.nn, "BatchNorm", mxbn.gluon.BatchNorm),
    (mx.gluon.nn, "BatchNormReLU", mxbn.gluon.BatchNormReLU),
    (mx.gluon.contrib.nn, "SyncBatchNorm", mxbn.gluon.SyncBatchNorm),
    (mx.npx, "batch_norm", mxbn.nd.BatchNorm),
    (mx.nd.npx, "batch_norm", mxbn.nd.BatchNorm),  # F.npx of a hybrid block
    (mx.sym.npx, "batch_norm", mxbn.sym.BatchNorm),
]
OURS = [ours for _, _, ours in PLACES]
THEIRS = [getattr(module, name) for module, name, _ in PLACES]  # before any replacement
BUILT_IN_LAYER = mx.gluon.nn.BatchNorm


def state():
    """Say whose functions MXNet's names are."""
    found = [getattr(module, name) for module, name, _ in PLACES]
    return "mxbn" if found == OURS else "built-in" if found == THEIRS else found


@pytest.fixture(autouse=True)
def names_are_restored():
    assert state() == "built-in"
    yield
    assert state() == "built-in"


# ------------------------------------------------------------------------------------------- names


def test_names_inside_and_after():
    with mxbn.replace_builtin():
        assert state() == "mxbn"
    assert state() == "built-in"


def test_nested():
    with mxbn.replace_builtin():
        with mxbn.replace_builtin():
            assert state() == "mxbn"
        assert state() == "mxbn"
    assert state() == "built-in"


def test_after_an_exception():
    with pytest.raises(KeyError), mxbn.replace_builtin():
        raise KeyError
    assert state() == "built-in"
    with mxbn.replace_builtin():
        with pytest.raises(KeyError), mxbn.replace_builtin():
            raise KeyError
        assert state() == "mxbn"


def test_decorator():
    replaced = mxbn.replace_builtin()(state)
    assert [replaced(), state(), replaced()] == ["mxbn", "built-in", "mxbn"]


def test_each_block_can_be_entered_once_only():
    block = mxbn.replace_builtin()
    with block:
        pass
    with pytest.raises((AttributeError, RuntimeError)), block:
        pass


def test_other_threads_see_the_change():
    seen = []
    with mxbn.replace_builtin():
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == ["mxbn"]


# ----------------------------------------------------------------------- what the names then do


@pytest.mark.parametrize("is_train", [True, False])
def test_nd(is_train):
    d = draw((6, 3, 4), seed=1)
    a = arrays(d)
    with autograd.record(train_mode=is_train), mxbn.replace_builtin():
        y = mx.nd.BatchNorm(a.x, a.gamma, a.beta, a.moving_mean, a.moving_var, fix_gamma=False)
    y.backward(a.dy)
    want = right(d, is_train, fix_gamma=False)
    check(y, want.output, what="output")
    check(a.x.grad, want.dx, what="gradient of data")
    mx.nd.waitall()
    check(a.moving_mean, want.moving_mean, what="moving mean")


def test_sym():
    with mxbn.replace_builtin():
        s = mx.sym.BatchNorm(mx.sym.var("x"), fix_gamma=False, name="bn")
    assert '"mxbn_BatchNorm"' in s.tojson()
    s = mx.sym.BatchNorm(mx.sym.var("x"), fix_gamma=False, name="bn")
    assert "mxbn_BatchNorm" not in s.tojson()


@pytest.mark.parametrize("is_train", [True, False])
def test_npx(is_train):
    d = draw((6, 3, 4), seed=2)
    with mx.util.np_shape(True), mx.util.np_array(True):
        keys = ("x", "gamma", "beta", "moving_mean", "moving_var")
        x, *rest = (mx.np.array(getattr(d, key), dtype="float32") for key in keys)
        x.attach_grad()
        with autograd.record(train_mode=is_train), mxbn.replace_builtin():
            y = mx.npx.batch_norm(x, *rest, fix_gamma=False, eps=0.25)
        y.backward(mx.np.array(d.dy, dtype="float32"))
        assert isinstance(y, mx.np.ndarray)
        want = right(d, is_train, fix_gamma=False, eps=0.25)
        check(y, want.output, what="output")
        check(x.grad, want.dx, what="gradient of data")


class Block(mx.gluon.HybridBlock):
    """Existing code that calls the operator by MXNet's name."""

    def __init__(self):
        super().__init__()
        for key, init in (("gamma", "ones"), ("beta", "zeros"), ("mean", "zeros"), ("var", "ones")):
            trained = key in ("gamma", "beta")
            parameter = self.params.get(key, shape=(3,), init=init, differentiable=trained)
            setattr(self, key, parameter)

    def hybrid_forward(self, F, x, gamma, beta, mean, var):
        return F.BatchNorm(x, gamma, beta, mean, var, fix_gamma=False)


@pytest.mark.parametrize("hybridize", [True, False])
def test_block_that_calls_the_operator(hybridize):
    d = draw((6, 3, 4), seed=3)
    d.gamma, d.beta, d.moving_mean, d.moving_var = np.ones(3), np.zeros(3), np.zeros(3), np.ones(3)
    block = Block()
    block.initialize()
    block.hybridize(hybridize)
    x = arrays(d).x
    with mxbn.replace_builtin(), autograd.record(train_mode=False):
        y = block(x)
    y.backward(nd(d.dy))
    want = right(d, False, fix_gamma=False)
    check(y, want.output, what="output")
    check(x.grad, want.dx, what="gradient of data")
    check(block.gamma.grad(), want.dgamma, what="gradient of gamma")


def test_layers_keep_their_kind():
    before = mx.gluon.nn.BatchNorm()
    with mxbn.replace_builtin():
        inside = mx.gluon.nn.BatchNorm()
        assert type(before) is BUILT_IN_LAYER
    assert type(inside) is mxbn.gluon.BatchNorm
    assert type(mx.gluon.nn.BatchNorm()) is BUILT_IN_LAYER
    assert isinstance(inside, mx.gluon.nn.BatchNorm)


# --------------------------------------------------------------------------------- the model zoo


def blocks_of(block):
    yield block
    for child in block._children.values():
        yield from blocks_of(child)


ZOO = ("resnet50_v2", "vgg11_bn", "densenet121", "inceptionv3", "mobilenet1.0", "mobilenetv2_1.0")


@pytest.mark.parametrize("name", ZOO)
def test_every_layer_of_a_network_is_ours(name):
    with mxbn.replace_builtin():
        net = mx.gluon.model_zoo.vision.get_model(name)
    found = {type(block) for block in blocks_of(net) if isinstance(block, BUILT_IN_LAYER)}
    assert found == {mxbn.gluon.BatchNorm}


def resnet(kind, thumbnail=False):
    def make():
        return mx.gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=thumbnail, prefix="net_")

    net = mxbn.replace_builtin()(make)() if kind == "mxbn" else make()
    count = sum(type(block) is mxbn.gluon.BatchNorm for block in blocks_of(net))
    assert count == (0 if kind == "built-in" else 19 if thumbnail else 20)
    return net


def save_random(net, path):
    """Give the network parameters and statistics of one in use, and save them."""
    rs = np.random.RandomState(0)
    mx.random.seed(0)
    net.initialize(mx.init.MSRAPrelu())
    net(mx.nd.zeros((1, 3, 64, 64)))
    for name, parameter in sorted(net.collect_params().items()):
        shape = parameter.shape
        if name.endswith("gamma"):
            parameter.set_data(nd(rs.uniform(0.5, 1.5, shape)))
        elif name.endswith("var"):
            parameter.set_data(nd(rs.uniform(0.5, 2, shape)))
        elif name.endswith(("beta", "mean")):
            parameter.set_data(nd(rs.randn(*shape) * 0.3))
    net.save_parameters(path)


def run_network(net, dtype, hybridize, is_train, size, seed):
    """Output, gradients and statistics of one forward and backward, by name."""
    net.cast(dtype)
    net.hybridize(hybridize)
    rs = np.random.RandomState(seed)
    x, dy = (nd(rs.randn(*shape)).astype(dtype) for shape in ((4, 3, size, size), (4, 10)))
    x.attach_grad()
    with autograd.record(train_mode=is_train):
        y = net(x)
    y.backward(dy, train_mode=is_train)
    mx.nd.waitall()
    values = {"output": y, "gradient of data": x.grad}
    for name, p in net.collect_params().items():
        values[name] = p.data() if p.grad_req == "null" else p.grad()
    return {name: value.asnumpy() for name, value in values.items()}


def relative_error(got, want):
    """In units of float32's rounding."""
    difference = np.linalg.norm(got.astype("float64") - want) / np.linalg.norm(want)
    return float(difference / np.finfo("float32").eps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Parameters files of the network, with and without its first pooling."""
    folder = tmp_path_factory.mktemp("resnet")
    for thumbnail in (False, True):
        save_random(resnet("built-in", thumbnail), str(folder / f"{thumbnail}.params"))
    return folder


@pytest.mark.parametrize("hybridize", [True, False])
@pytest.mark.parametrize("is_train", [True, False])
def test_resnet(saved, is_train, hybridize):
    """Both float32 networks differ from the float64 one by rounding, and about equally.

    18 layers amplify the rounding of each of them: in training, values are off by 40 units with
    either operator. What one operator adds to that shows in comparison with the other only.

    Where rounding moves a value across the kink of a relu or to another maximum of a pooling, even
    gradients without error differ much, so one of several draws without that is enough.
    """
    # Inference without the max pooling, whose gradient MXNet gets wrong there.
    thumbnail = not is_train
    size, limit = (12, 30) if thumbnail else (48, 100)

    def wrong(seed):
        def run(kind, dtype):
            net = resnet(kind, thumbnail)
            net.load_parameters(str(saved / f"{thumbnail}.params"))
            return run_network(net, dtype, hybridize, is_train, size, seed)

        want = run("mxbn", "float64")
        ours, theirs = run("mxbn", "float32"), run("built-in", "float32")
        assert ours.keys() == theirs.keys() == want.keys()
        errors = {
            name: (relative_error(ours[name], want[name]), relative_error(theirs[name], want[name]))
            for name in want
        }
        return {
            name: (our, their)
            for name, (our, their) in errors.items()
            if not our <= min(2 * their + 2, limit) or not their <= limit
        }

    found = []
    while len(found) < 3 and not (found and found[-1] == {}):
        found.append(wrong(seed=len(found)))
    assert found[-1] == {}, found


@pytest.mark.parametrize(
    ("saver", "loader"), [("mxbn", "built-in"), ("built-in", "mxbn"), ("mxbn", "mxbn")]
)
def test_resnet_parameters_files(tmp_path, saved, saver, loader):
    """Trained by one, then run by the other."""
    first, second = resnet(saver), resnet(loader)
    assert list(first.collect_params()) == list(second.collect_params())
    first.load_parameters(str(saved / "False.params"))
    trainer = mx.gluon.Trainer(first.collect_params(), "sgd", {"learning_rate": 0.001})
    x = nd(np.random.RandomState(2).randn(4, 3, 64, 64))
    with autograd.record():
        loss = first(x).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()
    first.save_parameters(str(tmp_path / "net.params"))
    second.load_parameters(str(tmp_path / "net.params"))
    for name, parameter in first.collect_params().items():
        assert same_bits(second.collect_params()[name].data(), parameter.data()), name
    difference = relative_error(second(x).asnumpy(), first(x).asnumpy().astype("float64"))
    assert difference <= 20
