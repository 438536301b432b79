"""mxbn.reference, the oracle of all other tests, by central differences and exact cases."""

import numpy as np
import pytest
from helpers import MODES, draw

from mxbn import reference

MODE = pytest.mark.parametrize("mode", MODES)


def keywords(mode):
    return dict(zip(("is_train", "use_global_stats", "use_batch_stats"), MODES[mode]))


def central_difference(f, x, h=1e-6):
    """The gradient of the number f() with respect to the array x, which f reads."""
    gradient = np.empty_like(x)
    for i in np.ndindex(*x.shape):
        kept = x[i]
        x[i] = kept + h
        above = f()
        x[i] = kept - h
        gradient[i] = (above - f()) / (2 * h)
        x[i] = kept
    return gradient


@MODE
@pytest.mark.parametrize("fix_gamma", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((5,), 0), ((4, 3), 1), ((2, 3, 2, 2), 1), ((3, 2, 4), -1)]
)
def test_gradients_are_the_central_differences(mode, fix_gamma, shape, axis):
    d = draw(shape, axis, "float64", seed=1)
    options = {"eps": 1e-2, "axis": axis, "fix_gamma": fix_gamma, **keywords(mode)}

    def forward():
        return reference.forward(d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, **options)

    def loss():
        return float((forward().output * d.dy).sum())

    gradients = reference.backward(d.dy, d.x, d.gamma, forward(), fix_gamma=fix_gamma, axis=axis)
    for gradient, variable in zip(gradients, (d.x, d.gamma, d.beta)):
        np.testing.assert_allclose(gradient, central_difference(loss, variable), 1e-6, 1e-7)


@MODE
@pytest.mark.parametrize("act_type", [None, "relu"])
def test_gradients_of_what_is_fused_are_the_central_differences(mode, act_type):
    d = draw((4, 3, 2), 1, "float64", seed=6)
    addend = draw((4, 3, 2), seed=7).x
    options = {"eps": 1e-2, "fix_gamma": False, **keywords(mode)}

    def forward():
        return reference.forward(
            d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, addend=addend, act_type=act_type,
            **options,
        )  # fmt: skip

    def loss():
        return float((forward().output * d.dy).sum())

    kept = forward()
    assert (kept.output == 0).any() == (act_type == "relu")
    gradients = reference.backward(d.dy, d.x, d.gamma, kept, fix_gamma=False, act_type=act_type)
    of_addend = reference.let_through(d.dy, kept.output) if act_type else d.dy
    variables = d.x, d.gamma, d.beta, addend
    for gradient, variable in zip((*gradients, of_addend), variables):
        np.testing.assert_allclose(gradient, central_difference(loss, variable), 1e-6, 1e-7)


def test_a_nan_stays_behind_a_relu():
    d = draw((4, 3), seed=8)
    d.x[1, 2] = np.nan
    kept = reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, is_train=False, act_type="relu"
    )
    assert np.isnan(kept.output).sum() == 1
    assert np.isnan(reference.let_through(d.dy, kept.output)[1, 2])
    assert (reference.let_through(d.dy, kept.output)[kept.output == 0] == 0).all()


@MODE
def test_the_mode_table(mode):
    d = draw((4, 3), dtype="float64", seed=2)
    flags = keywords(mode)
    kept = reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, momentum=0.75, **flags
    )
    batch = mode in ("train", "train_batch", "predict_batch")
    assert kept.used_batch == batch
    np.testing.assert_allclose(kept.mean, d.x.mean(0) if batch else d.moving_mean, 1e-14)
    np.testing.assert_allclose(
        kept.inv_std, 1 / np.sqrt((d.x.var(0) if batch else d.moving_var) + 1e-3), 1e-14
    )
    stepped = mode in ("train", "train_batch")
    for new, old, seen in (
        (kept.moving_mean, d.moving_mean, d.x.mean(0)),
        (kept.moving_var, d.moving_var, d.x.var(0)),
    ):
        np.testing.assert_allclose(new, 0.75 * old + 0.25 * seen if stepped else old, 1e-15)


@pytest.mark.parametrize("is_train", [True, False])
def test_moving_statistics_that_are_used_and_step(is_train):
    d = draw((4, 3), dtype="float64", seed=2)
    kept = reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, momentum=0.75, is_train=is_train,
        use_global_stats=True, step_global_stats=True,
    )  # fmt: skip
    assert not kept.used_batch
    np.testing.assert_array_equal(kept.mean, d.moving_mean)
    np.testing.assert_allclose(kept.inv_std, 1 / np.sqrt(d.moving_var + 1e-3), 1e-15)
    want = 0.75 * d.moving_var + 0.25 * d.x.var(0) if is_train else d.moving_var
    np.testing.assert_allclose(kept.moving_var, want, 1e-15)


def test_both_flags_are_refused():
    d = draw((4, 3))
    with pytest.raises(ValueError, match="exclude each other"):
        reference.forward(
            d.x, d.gamma, d.beta, d.moving_mean, d.moving_var,
            is_train=True, use_global_stats=True, use_batch_stats=True,
        )  # fmt: skip


def test_a_channel_that_is_not_finite_keeps_its_statistics():
    d = draw((4, 3), dtype="float64", seed=3)
    d.x[0, 1] = np.inf
    kept = reference.forward(d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, is_train=True)
    assert kept.moving_mean[1] == d.moving_mean[1]
    assert kept.moving_var[1] == d.moving_var[1]
    assert (kept.moving_mean[[0, 2]] != d.moving_mean[[0, 2]]).all()


def test_an_empty_batch_changes_nothing_and_gives_empty_output_and_zero_gradients():
    d = draw((0, 3, 2), seed=4)
    kept = reference.forward(d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, is_train=True)
    assert kept.output.shape == (0, 3, 2)
    np.testing.assert_array_equal(kept.moving_mean, d.moving_mean)
    np.testing.assert_array_equal(kept.moving_var, d.moving_var)
    dx, dgamma, dbeta = reference.backward(d.dy, d.x, d.gamma, kept, fix_gamma=False)
    assert dx.shape == (0, 3, 2)
    assert not dgamma.any()
    assert not dbeta.any()


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_a_channel_without_spread_gives_beta(eps):
    d = draw((4, 3), seed=5)
    d.x[:] = 7.25
    kept = reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, is_train=True, eps=eps
    )
    np.testing.assert_array_equal(kept.output, np.broadcast_to(d.beta, (4, 3)))


def test_statistics_are_the_mean_and_the_biased_variance():
    mean, var = reference.statistics([[1.0, 2.0], [3.0, 6.0]], axis=1)
    assert mean.tolist() == [2.0, 4.0]
    assert var.tolist() == [1.0, 4.0]
