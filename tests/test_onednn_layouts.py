"""Data that a convolution left in oneDNN's layouts: taken as it is, and as right as plain data."""

from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from helpers import check, draw, nd, right, run_script, same_bits

import mxbn
from mxbn import _library

pytestmark = pytest.mark.skipif(
    not mx.runtime.Features().is_enabled("MKLDNN"), reason="this MXNet was built without oneDNN"
)


@contextmanager
def passes(*expected):
    """Expect one of these numbers of forwards and backwards on oneDNN's layouts inside."""
    mx.nd.waitall()
    before = _library.onednn_layout_passes()
    yield
    mx.nd.waitall()
    assert _library.onednn_layout_passes() - before in expected


def convolved(channels, rank=4, batch=3, is_train=True):
    """The output of a convolution, laid out as oneDNN likes, and its drawing.

    Blocked by 8 or 16 channels in training, often channels-last in inference.
    """
    rs = np.random.RandomState(channels)
    x = nd(rs.randn(batch, 8, *[6] * (rank - 2)))
    weight = nd(rs.randn(channels, 8, *[3] * (rank - 2)))
    kernel = (3,) * (rank - 2)
    with mx.autograd.train_mode() if is_train else mx.autograd.predict_mode():
        hidden = mx.nd.Convolution(x, weight, num_filter=channels, kernel=kernel, no_bias=True)
    d = draw(hidden.shape, seed=rank)
    d.x = hidden.copy().asnumpy().astype("float64")
    return hidden, d


def passed_on(data):
    """A convolution by the identity: the gradient that comes back is laid out as oneDNN likes."""
    channels, ones = data.shape[1], (1,) * (data.ndim - 2)
    weight = nd(np.eye(channels).reshape(channels, channels, *ones))
    return mx.nd.Convolution(data, weight, num_filter=channels, kernel=ones, no_bias=True)


def parameters(d):
    a = {k: nd(getattr(d, k)) for k in ("gamma", "beta", "moving_mean", "moving_var")}
    for key in ("gamma", "beta"):
        a[key].attach_grad()
    return a


def run(hidden, d, is_train, grad_req="write", **attributes):
    a = parameters(d)
    hidden.attach_grad(grad_req)
    with mx.autograd.record(train_mode=is_train):
        y = mxbn.nd.BatchNorm(hidden, *a.values(), **attributes)
        out = passed_on(y)
    out.backward(nd(d.dy))
    mx.nd.waitall()
    return {"output": out, "dx": hidden.grad, "dgamma": a["gamma"].grad, "dbeta": a["beta"].grad,
            "moving_mean": a["moving_mean"], "moving_var": a["moving_var"]}  # fmt: skip


def check_all(found, d, is_train, added=0.0, **attributes):
    want = right(d, is_train, **attributes)
    sums = np.abs(d.dy).sum(tuple(i for i in range(d.dy.ndim) if i != 1)).max()
    check(found["output"], want.output, 6, what="output")
    check(found["dx"], want.dx + added, 6, np.abs(want.dx).max() + added, what="dx")
    for key in ("dgamma", "dbeta"):
        check(found[key], getattr(want, key), 4, 4 * sums, what=key)
    for key in ("moving_mean", "moving_var"):
        check(found[key], getattr(want, key), 2, what=key)


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.parametrize("layout", ["training", "inference"])
def test_between_convolutions(rank, channels, is_train, fix_gamma, layout):
    hidden, d = convolved(channels, rank, is_train=layout == "training")
    # Data from inference may be channels-last, where the gradient that comes back is blocked.
    with passes(2) if layout == "training" else passes(1, 2):
        found = run(hidden, d, is_train, fix_gamma=fix_gamma)
    check_all(found, d, is_train, fix_gamma=fix_gamma)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("channels", [8, 16, 48])
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("addend", [None, "convolved", "plain"])
def test_a_relu_and_an_addend_between_convolutions(rank, channels, is_train, addend):
    hidden, d = convolved(channels, rank)
    other = nd(d.dy)
    if addend == "convolved":
        with mx.autograd.train_mode():
            other = passed_on(other)
    other_values = other.copy()
    results = []
    for x, plus in ((hidden, other), (nd(d.x), other_values)):
        a = parameters(d)
        x.attach_grad()
        plus.attach_grad()
        with passes(2) if x is hidden and addend != "plain" else passes(0, 1):
            with mx.autograd.record(train_mode=is_train):
                y = mxbn.nd.BatchNorm(
                    x, *a.values(), fix_gamma=False, act_type="relu",
                    addend=None if addend is None else plus,
                )  # fmt: skip
                out = passed_on(y)
            out.backward(nd(d.dy))
            mx.nd.waitall()
        results.append([out, x.grad, a["gamma"].grad, a["beta"].grad, plus.grad, a["moving_var"]])
    assert (results[0][0].asnumpy() == 0).mean() > 0.2
    for got, want in zip(*results):
        want = want.asnumpy().astype("float64")
        check(got, want, 8, np.abs(want).max() + (np.abs(d.dy).sum() if want.ndim == 1 else 1))


@pytest.mark.parametrize("channels", [1, 3, 12, 20])
def test_channels_that_blocks_do_not_divide(channels):
    """oneDNN pads the last block, or stays with the plain layout: either is converted."""
    hidden, d = convolved(channels)
    check_all(run(hidden, d, True, fix_gamma=False), d, True, fix_gamma=False)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_another_axis_is_converted(axis):
    hidden, d = convolved(16)
    d = draw(hidden.shape, axis, seed=5)
    d.x = hidden.copy().asnumpy().astype("float64")
    a = parameters(d)
    with passes(0), mx.autograd.train_mode():
        y = mxbn.nd.BatchNorm(hidden, *a.values(), fix_gamma=False, axis=axis)
    check(y, right(d, True, fix_gamma=False).output, 6)


def test_the_axis_may_count_from_the_end():
    hidden, d = convolved(16)
    a = parameters(d)
    with passes(1), mx.autograd.train_mode():
        y = mxbn.nd.BatchNorm(hidden, *a.values(), fix_gamma=False, axis=-3)
    check(y, right(d, True, fix_gamma=False).output, 6)


def test_a_part_of_an_array_is_converted():
    hidden, d = convolved(16)
    d.x, d.dy = d.x[1:], d.dy[1:]
    a = parameters(d)
    with passes(0), mx.autograd.train_mode():
        y = mxbn.nd.BatchNorm(hidden[1:], *a.values(), fix_gamma=False)
    check(y, right(d, True, fix_gamma=False).output, 6)


def test_a_plain_head_gradient_is_no_obstacle():
    hidden, d = convolved(16)
    a = parameters(d)
    hidden.attach_grad()
    with passes(1):  # the forward
        with mx.autograd.record():
            y = mxbn.nd.BatchNorm(hidden, *a.values(), fix_gamma=False)
        y.backward(nd(d.dy))
    check(hidden.grad, right(d, True, fix_gamma=False).dx, 6)


@pytest.mark.parametrize("is_train", [True, False])
def test_gradients_are_added_whatever_layout_they_are_in(is_train):
    hidden, d = convolved(32)
    hidden.attach_grad("add")
    hidden.grad[:] = 2
    a = parameters(d)
    for _ in range(3):  # the first one finds a plain array, the others what it left
        with mx.autograd.record(train_mode=is_train):
            y = mxbn.nd.BatchNorm(
                hidden, a["gamma"], a["beta"], nd(d.moving_mean), nd(d.moving_var), fix_gamma=False
            )
            out = passed_on(y)
        out.backward(nd(d.dy))
    mx.nd.waitall()
    want = right(d, is_train, fix_gamma=False)
    check(hidden.grad, 2 + 3 * want.dx, 10, 2 + 3 * np.abs(want.dx).max())


def test_nobody_wants_the_gradient_of_data():
    hidden, d = convolved(16)
    a = parameters(d)
    with passes(2), mx.autograd.record():
        out = passed_on(mxbn.nd.BatchNorm(hidden, *a.values(), fix_gamma=False))
        out.backward(nd(d.dy))
    want = right(d, True, fix_gamma=False)
    sums = np.abs(d.dy).sum((0, 2, 3)).max()
    check(a["gamma"].grad, want.dgamma, 4, 4 * sums)
    check(a["beta"].grad, want.dbeta, 4, 4 * sums)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_channel_that_is_not_finite_keeps_its_statistics(bad):
    d = draw((2, 16, 4, 4), seed=6)
    d.x[1, 3, 2, 2] = bad
    a = parameters(d)
    with mx.autograd.train_mode():
        hidden = passed_on(nd(d.x))  # spreads a NaN over all channels of one position
        if np.isfinite(hidden.copy().asnumpy()[0]).all():
            y = mxbn.nd.BatchNorm(hidden, *a.values(), fix_gamma=False)
            mx.nd.waitall()
    spoilt = ~np.isfinite(hidden.copy().asnumpy()).all((0, 2, 3))
    assert spoilt[3]
    assert same_bits(a["moving_mean"].asnumpy()[spoilt], d.moving_mean.astype("f")[spoilt])
    assert not np.isfinite(y.asnumpy()[:, 3]).any()


def test_calls_take_no_memory():
    """Where no operator of oneDNN runs in between, to clean up after all."""
    hidden, d = convolved(16)
    a = parameters(d)

    def pages_after(calls):
        with mx.autograd.train_mode():
            for _ in range(calls):
                mxbn.nd.BatchNorm(hidden, *a.values())
        mx.nd.waitall()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = pages_after(300)
    assert pages_after(4000) - before < 250  # a megabyte; 250 bytes a call


def test_the_same_bits_for_every_number_of_threads():
    code = """
        import hashlib, mxnet as mx, numpy as np
        from test_onednn_layouts import convolved, run
        digest = hashlib.sha256()
        for channels, batch in ((16, 40), (64, 3), (8, 100)):
            hidden, d = convolved(channels, batch=batch)
            for value in run(hidden, d, True, fix_gamma=False).values():
                digest.update(value.asnumpy().tobytes())
        print(digest.hexdigest())
        """
    seen = {run_script(code, OMP_NUM_THREADS=str(threads)).stdout for threads in (1, 2, 4)}
    assert len(seen) == 1
    assert len(seen.pop()) == 65


def test_switched_off_all_is_converted():
    hidden, d = convolved(16)
    _library.use_onednn_layouts(False)
    try:
        with passes(0):
            found = run(hidden, d, True, fix_gamma=False)
    finally:
        _library.use_onednn_layouts(True)
    check_all(found, d, True, fix_gamma=False)


def test_where_the_selftest_fails_plain_data_is_used_and_that_is_said():
    done = run_script(
        """
        import warnings
        import mxnet as mx
        warnings.simplefilter("always")
        from unittest import mock
        import numpy as np
        close = np.allclose
        def wrong(a, b, *args, **kwargs):   # the comparison of the layouts, not that of the values
            return close(a, b, *args, **kwargs) and getattr(a, "ndim", 0) != 4
        with warnings.catch_warnings(record=True) as caught, mock.patch("numpy.allclose", wrong):
            import mxbn
        texts = [str(w.message) for w in caught if str(w.message).startswith("mxbn")]
        before = mxbn._library.onednn_layout_passes()
        from test_onednn_layouts import convolved, run, check_all
        hidden, d = convolved(16)
        check_all(run(hidden, d, True, fix_gamma=False), d, True, fix_gamma=False)
        assert mxbn._library.onednn_layout_passes() == before
        print(len(texts), texts[0])
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 mxbn: data in oneDNN's layouts is converted first")
