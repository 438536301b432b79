"""The answers to two public questions: MindSpore's gradient in inference, PyTorch's by hand."""

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from helpers import check, nd

import mxbn

PYTORCH = dict(np.load(Path(__file__).parent / "golden" / "batch_norm_pytorch.npz"))

# MindSpore's test of BatchNorm2d in inference, differentiated with respect to its input.
MINDSPORE_DX = [
    [
        [[-0.3224156, -0.3840524], [1.1337637, -1.0998858]],
        [[-0.1724273, -0.877854], [0.0422135, 0.5828123]],
        [[-1.1006137, 1.1447179], [0.9015862, 0.5024918]],
    ]
]


@pytest.mark.parametrize("use_global_stats", [False, True])
@pytest.mark.parametrize("depth", [False, True])
def test_mindspore_gradient_in_inference(use_global_stats, depth):
    rs = np.random.RandomState(1)
    x, dy = rs.randn(1, 3, 2, 2).astype("float32"), rs.randn(1, 3, 2, 2).astype("float32")
    want = np.float32(MINDSPORE_DX)
    if depth:  # BatchNorm3d
        x, dy, want = x[:, :, None], dy[:, :, None], want[:, :, None]
    layer = mxbn.gluon.BatchNorm(
        epsilon=1e-5, momentum=0.1, in_channels=3, use_global_stats=use_global_stats
    )
    layer.initialize()
    x = nd(x)
    x.attach_grad()
    with mx.autograd.record(train_mode=False):
        y = layer(x)
    y.backward(nd(dy))
    mx.nd.waitall()
    np.testing.assert_allclose(x.grad.asnumpy(), want, rtol=0, atol=1e-6)
    assert (layer.running_mean.data().asnumpy() == 0).all()
    assert (layer.running_var.data().asnumpy() == 1).all()


def backward_by_hand(dy, x, gamma, mean, var, eps):
    """The derivative of BatchNorm2d in training, written out; all sums over N, H and W."""
    n = x.shape[0] * x.shape[2] * x.shape[3]
    gamma, mean, var = (v.reshape(1, -1, 1, 1) for v in (gamma, mean, var))
    inv_std = (var + eps) ** -0.5
    xhat = (x - mean) * inv_std
    dgamma = (dy * xhat).sum((0, 2, 3))
    dbeta = dy.sum((0, 2, 3))
    dxhat = dy * gamma
    dvar = -0.5 * (var + eps) ** -1.5 * (dxhat * (x - mean)).sum((0, 2, 3), keepdims=True)
    dmean = -(dxhat * inv_std).sum((0, 2, 3), keepdims=True)  # the part through var sums to zero
    dx = dxhat * inv_std + dvar * 2 * (x - mean) / n + dmean / n
    return dx, dgamma, dbeta


def operator(is_train):
    """What mxbn gives for the golden inputs, in float64: output, gradients, moving statistics."""
    arrays = {k: nd(PYTORCH[k], "float64") for k in ("gamma", "beta", "moving_mean", "moving_var")}
    x = nd(PYTORCH["x"], "float64")
    for array in (x, arrays["gamma"], arrays["beta"]):
        array.attach_grad()
    with mx.autograd.record(train_mode=is_train):
        y = mxbn.nd.BatchNorm(
            x, **arrays, fix_gamma=False,
            eps=float(PYTORCH["eps"]), momentum=1 - float(PYTORCH["momentum"]),
        )  # fmt: skip
    y.backward(nd(PYTORCH["dy"], "float64"))
    mx.nd.waitall()
    return {
        "y": y,
        "dx": x.grad,
        "dgamma": arrays["gamma"].grad,
        "dbeta": arrays["beta"].grad,
        "running_mean": arrays["moving_mean"],
        "running_var": arrays["moving_var"],
    }


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_operator_gives_what_pytorch_autograd_gives(mode):
    want = {k[len(mode) + 1 :]: v for k, v in PYTORCH.items() if k.startswith(mode + "_")}
    if mode == "train":  # PyTorch steps with the unbiased variance
        n = PYTORCH["x"].size // 3
        old, new = PYTORCH["moving_var"], PYTORCH["x"].var((0, 2, 3))
        unbiased = 0.9 * old + 0.1 * new * n / (n - 1)
        np.testing.assert_allclose(want["running_var"], unbiased, 1e-14)
        want["running_var"] = 0.9 * old + 0.1 * new
    got = operator(mode == "train")
    assert sorted(got) == sorted(want)
    for key, value in want.items():
        check(got[key], value, 20, what=key)  # two different orders of summation in float64


def test_the_derivative_by_hand_is_that_of_the_operator_and_of_pytorch():
    x = PYTORCH["x"]
    gradients = backward_by_hand(
        PYTORCH["dy"], x, PYTORCH["gamma"], x.mean((0, 2, 3)), x.var((0, 2, 3)), PYTORCH["eps"]
    )
    got = operator(True)
    for key, by_hand in zip(("dx", "dgamma", "dbeta"), gradients):
        check(by_hand, PYTORCH["train_" + key], 20, what=key)
        check(got[key], by_hand, 20, what=key)


@pytest.mark.parametrize(
    "fault",
    [
        {"n": PYTORCH["x"].shape[0]},  # the batch size alone
        {"mean": PYTORCH["moving_mean"], "var": PYTORCH["moving_var"]},  # the moving statistics
    ],
    ids=["n", "statistics"],
)
def test_the_faults_of_the_question_give_another_gradient(fault):
    x, dy = PYTORCH["x"], PYTORCH["dy"]
    n = fault.get("n", x.size // 3)
    along = (1, 3, 1, 1)
    mean = fault.get("mean", x.mean((0, 2, 3))).reshape(along)
    inv_std = (fault.get("var", x.var((0, 2, 3))).reshape(along) + PYTORCH["eps"]) ** -0.5
    xhat = (x - mean) * inv_std
    sums = [v.sum((0, 2, 3), keepdims=True) / n for v in (dy, dy * xhat)]
    dx = PYTORCH["gamma"].reshape(along) * inv_std * (dy - sums[0] - xhat * sums[1])
    assert np.abs(dx - PYTORCH["train_dx"]).max() > 1e-2
