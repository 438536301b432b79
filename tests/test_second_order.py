"""Second derivatives: of the operator, and of networks with it."""

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    DTYPES,
    HYBRIDIZE,
    MODES,
    arrays,
    call,
    check,
    draw,
    nd,
    right,
    rounded,
    same_bits,
)
from mxnet import autograd
from test_operator import flags_of
from test_reference import central_difference, keywords

import mxbn
from mxbn import reference

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
MODE = pytest.mark.parametrize("mode", MODES)
GOLDEN = Path(__file__).parent / "golden"
RESULTS = ("dy", "x", "gamma")

# Units of rounding, at the size of the terms. A value is the sum of three products, of factors that
# were rounded themselves.
UNITS = 4


def draw_heads(d, seed=1):
    """Gradients of a loss with respect to dx, dgamma and dbeta."""
    rs = np.random.RandomState(seed)
    channels = len(d.gamma)
    u = rounded(rs.randn(*d.shape), d.dtype)
    return u, *(rounded(rs.randn(channels), d.param) for _ in range(2))


def kept_by(d, is_train, **attributes):
    """What a forward of the drawing keeps."""
    return reference.forward(
        d.x, d.gamma, d.beta, d.moving_mean, d.moving_var,
        is_train=is_train, axis=d.axis, **attributes,
    )  # fmt: skip


def right_second(d, heads, is_train, dy=None, **attributes):
    """The gradients for dy, x and gamma, and how large the terms are that they add up."""
    fixed = attributes.get("fix_gamma", True)
    dy = d.dy if dy is None else dy
    kept = kept_by(d, is_train, **attributes)
    want = reference.second_backward(heads, dy, d.x, d.gamma, kept, fix_gamma=fixed, axis=d.axis)
    if d.x.size == 0:
        return dict(zip(RESULTS, want)), dict.fromkeys(RESULTS, 1.0)
    by_channel = [
        np.moveaxis(v, d.axis, 0).reshape(len(kept.mean), -1) for v in (*heads[:1], dy, d.x)
    ]
    u, dy, x = (np.abs(v) for v in by_channel)
    p, q = (np.abs(v) for v in heads[1:])
    s = np.abs(kept.inv_std)
    xh = np.abs(by_channel[2] - kept.mean[:, None]) * s[:, None]
    # Float64 data is computed in float64 like the reference, and both round x - mean.
    xh = xh + (x * s[:, None] if d.dtype == "float64" else 0)
    scale = s if fixed else s * np.abs(d.gamma)
    u_xh, dy_xh, u_dy = (v.mean(1) for v in (u * xh, dy * xh, u * dy))
    u, dy, xh = (v.max(1) for v in (u, dy, xh))
    a = (0 if fixed else p) + scale * u_xh
    sizes = (
        scale * u + a * xh + q,
        s * (a * dy + scale * dy_xh * u + xh * (a * dy_xh + scale * (dy_xh * u_xh + u_dy))),
        s * (u_dy + dy_xh * u_xh) * d.x.size / len(s),
    )
    return dict(zip(RESULTS, want)), {k: 1e-30 + v.max() for k, v in zip(RESULTS, sizes)}


def check_second(got, want, sizes, units=UNITS):
    for name, value in got.items():
        check(value, want[name], units, sizes[name], f"gradient for {name}")


VARIABLES = ("x", "gamma", "beta")


def record_gradients(d, a, is_train, of=VARIABLES, **attributes):
    """The first gradients, recorded; the head gradient is a constant."""
    with autograd.record(train_mode=is_train):
        y = call(d, a, **attributes)
        return autograd.grad(y, [getattr(a, key) for key in of], a.dy, create_graph=True)


def head_arrays(d, heads):
    return [nd(heads[0], d.dtype), nd(heads[1], d.param), nd(heads[2], d.param)]


def only(heads, of):
    """The heads of some gradients; those of the others are 0."""
    return [h if key in of else np.zeros_like(h) for key, h in zip(VARIABLES, heads)]


def run(d, heads, is_train, of=VARIABLES, grad_req="write", fill=None, **attributes):
    """A loss of some gradients, differentiated; fill is what was in the arrays of gradients."""
    a = arrays(d, dict.fromkeys(of, grad_req) if isinstance(grad_req, str) else grad_req)
    if fill is not None:
        for key in of:
            getattr(a, key).grad[:] = fill
    gradients = record_gradients(d, a, is_train, of, **attributes)
    asked = [array for key, array in zip(VARIABLES, head_arrays(d, heads)) if key in of]
    autograd.backward(gradients, asked)
    return a


def run_for_dy(d, heads, is_train, **attributes):
    """The gradient for dy, where dy is twice y + t, and that dy."""
    a, t = arrays(d), nd(d.dy, d.dtype)
    t.attach_grad()
    with autograd.record(train_mode=is_train):
        shifted = mx.nd.elemwise_add(call(d, a, **attributes), t)
        gradients = autograd.grad(mx.nd.square(shifted), [a.x, a.gamma, a.beta], create_graph=True)
    autograd.backward(gradients, head_arrays(d, heads))
    return t.grad.asnumpy() / 2, 2 * shifted.asnumpy().astype("float64")


def run_and_check(d, is_train=True, **attributes):
    heads = draw_heads(d)
    a = run(d, heads, is_train, **attributes)
    got = {"x": a.x.grad, "gamma": a.gamma.grad}
    check_second(got, *right_second(d, heads, is_train, **attributes))
    return a


# ---------------------------------------------------------------------------------- the reference


@MODE
@pytest.mark.parametrize("fix_gamma", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((4, 3), 1), ((3, 2, 4), -1)])
def test_the_reference_is_the_central_differences_of_first_gradients(mode, fix_gamma, shape, axis):
    d = draw(shape, axis, "float64", seed=1)
    u, p, q = draw_heads(d)
    options = {"eps": 1e-2, "axis": axis, "fix_gamma": fix_gamma, **keywords(mode)}

    def forward():
        return reference.forward(d.x, d.gamma, d.beta, d.moving_mean, d.moving_var, **options)

    def loss():
        dx, dgamma, dbeta = reference.backward(
            d.dy, d.x, d.gamma, forward(), fix_gamma=fix_gamma, axis=axis
        )
        return float((u * dx).sum() + (p * dgamma).sum() + (q * dbeta).sum())

    second = reference.second_backward(
        (u, p, q), d.dy, d.x, d.gamma, forward(), fix_gamma=fix_gamma, axis=axis
    )
    for gradient, variable in zip(second, (d.dy, d.x, d.gamma)):
        np.testing.assert_allclose(gradient, central_difference(loss, variable), 1e-6, 1e-7)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.mxnet_operators
def test_the_reference_and_the_operator_give_what_pytorch_gives(mode):
    given = dict(np.load(GOLDEN / "batch_norm_pytorch.npz"))
    golden = dict(np.load(GOLDEN / "second_order_pytorch.npz"))
    d = draw(given["x"].shape, dtype="float64")
    for key in ("x", "dy", "gamma", "beta", "moving_mean", "moving_var"):
        setattr(d, key, given[key])
    heads = [golden[key] for key in ("u", "p", "q")]
    options = {"fix_gamma": False, "eps": float(given["eps"])}
    want, sizes = right_second(d, heads, mode == "train", **options)
    golden = {key: golden[f"{mode}_for_{key}"] for key in RESULTS}
    check_second(want, golden, sizes)
    a = run(d, heads, mode == "train", **options)
    check_second({"x": a.x.grad, "gamma": a.gamma.grad}, golden, sizes)


# ----------------------------------------------------------------------------------- the operator


@DTYPE
@MODE
@pytest.mark.parametrize("fix_gamma", [False, True])
def test_every_mode(dtype, mode, fix_gamma):
    d = draw((4, 3, 2, 5), dtype=dtype, seed=10)
    is_train, flags = flags_of(mode)
    a = run_and_check(d, is_train, fix_gamma=fix_gamma, eps=1e-2, **flags)
    assert (a.beta.grad.asnumpy() == 0).all()  # no gradient depends on beta


@DTYPE
@MODE
@pytest.mark.parametrize("fix_gamma", [False, True])
@pytest.mark.mxnet_operators
def test_the_gradient_for_the_head_gradient(dtype, mode, fix_gamma):
    d = draw((4, 3, 20), dtype=dtype, seed=11)
    is_train, flags = flags_of(mode)
    options = {"fix_gamma": fix_gamma, **flags}
    heads = draw_heads(d)
    got, dy = run_for_dy(d, heads, is_train, **options)
    check_second({"dy": got}, *right_second(d, heads, is_train, dy, **options))


@DTYPE
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7,), 0),
        ((9, 3), -1),
        ((2, 3, 1025), 1),
        ((4, 5, 3, 2), 2),
        ((2, 3, 2, 2, 3), -2),
        ((300, 1030), 1),
        ((1, 1, 200000), 1),
        ((30000, 5), 1),
        ((1, 4), 1),  # one value per channel
    ],
)
def test_every_form(dtype, shape, axis):
    run_and_check(draw(shape, axis, dtype, seed=12), fix_gamma=False)


@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize(("shape", "axis"), [((16, 3, 14, 14), 1), ((16, 14, 14, 3), 3)])
@pytest.mark.mxnet_operators
def test_float32_is_exact_to_rounding_also_far_from_zero(mode, shape, axis):
    d = draw(shape, axis, seed=13, mean=1e5, std=1.0)
    d.moving_mean = np.float32(d.moving_mean + 1e5).astype("float64")
    options = {"fix_gamma": False, "eps": 1e-5}
    run_and_check(d, mode == "train", **options)
    heads = draw_heads(d)
    got, dy = run_for_dy(d, heads, mode == "train", **options)
    check_second({"dy": got}, *right_second(d, heads, mode == "train", dy, **options))


@pytest.mark.parametrize("fix_gamma", [False, True])
@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize("requests", [("write", "add"), ("add", "write"), ("add", "add")])
def test_every_result_honours_its_own_request(requests, mode, fix_gamma):
    d = draw((4, 3, 6), seed=14)
    heads, is_train = draw_heads(d), mode == "train"
    requests = dict(zip(VARIABLES, (*requests, "write")))
    a = run(d, heads, is_train, grad_req=requests, fill=2.0, fix_gamma=fix_gamma)
    want, sizes = right_second(d, heads, is_train, fix_gamma=fix_gamma)
    for name in ("x", "gamma"):
        added = 2.0 if requests[name] == "add" else 0.0
        check(getattr(a, name).grad, want[name] + added, UNITS, sizes[name] + added, name)


@pytest.mark.parametrize("fix_gamma", [False, True])
@pytest.mark.parametrize("mode", ["train", "predict"])
@pytest.mark.parametrize("of", [("x",), ("gamma",), ("x", "beta"), ("gamma", "beta")])
def test_some_variables_alone(of, mode, fix_gamma):
    """The others need no gradient, neither first nor second."""
    d = draw((4, 3, 6), seed=15)
    heads, is_train = only(draw_heads(d), of), mode == "train"
    a = run(d, heads, is_train, of, fix_gamma=fix_gamma)
    got = {key: getattr(a, key).grad for key in of if key != "beta"}
    check_second(got, *right_second(d, heads, is_train, fix_gamma=fix_gamma))


@pytest.mark.parametrize("of", VARIABLES)
def test_a_loss_of_one_gradient_alone(of):
    d = draw((4, 3, 6), seed=16)
    heads = only(draw_heads(d), of)
    a = arrays(d)
    gradients = dict(zip(VARIABLES, record_gradients(d, a, True, fix_gamma=False)))
    gradients[of].backward(dict(zip(VARIABLES, head_arrays(d, heads)))[of])
    got = {"x": a.x.grad, "gamma": a.gamma.grad}
    check_second(got, *right_second(d, heads, True, fix_gamma=False))


@MODE
def test_it_is_of_the_forward_that_ran_any_number_of_times_without_side_effects(mode):
    d = draw((6, 3, 4), seed=16)
    heads = draw_heads(d)
    is_train, flags = flags_of(mode)
    a = arrays(d)
    gradients = record_gradients(d, a, is_train, fix_gamma=False, **flags)
    mx.nd.waitall()
    stepped = right(d, is_train, fix_gamma=False, **flags)
    check(a.moving_mean, stepped.moving_mean)
    a.moving_mean[:], a.moving_var[:] = 100, 1e-4
    want, sizes = right_second(d, heads, is_train, fix_gamma=False, **flags)
    for train_mode in (True, False, True):
        autograd.backward(
            gradients, head_arrays(d, heads), retain_graph=True, train_mode=train_mode
        )
        check_second({"x": a.x.grad, "gamma": a.gamma.grad}, want, sizes)
    assert (a.moving_mean.asnumpy() == 100).all()


@DTYPE
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_a_channel_without_spread(dtype, eps):
    d = draw((4, 2, 3), dtype=dtype, seed=17)
    d.x[:, 0] = 3.5
    a = run_and_check(d, fix_gamma=False, eps=eps)
    if eps == 0:
        assert (a.x.grad.asnumpy()[:, 0] == 0).all()
        assert a.gamma.grad.asnumpy()[0] == 0


def test_an_empty_batch_has_zero_gradients():
    d = draw((0, 3, 2), seed=18)
    with mx.util.np_shape():
        a = run(d, draw_heads(d), True, fill=5.0, fix_gamma=False)
        assert a.x.grad.shape == (0, 3, 2)
        assert (a.gamma.grad.asnumpy() == 0).all()


def test_a_value_that_is_not_finite_stays_in_its_channel():
    for mode in ("train", "predict"):
        d = draw((6, 3, 4), seed=19)
        heads = draw_heads(d)
        heads[0][2, 1, 3] = np.inf
        a = run(d, heads, mode == "train", fix_gamma=False)
        want, sizes = right_second(d, draw_heads(d), mode == "train", fix_gamma=False)
        check(a.x.grad.asnumpy()[:, ::2], want["x"][:, ::2], UNITS, sizes["x"])
        assert np.isfinite(a.x.grad.asnumpy()[:, 1]).all() == (mode == "predict")
        assert not np.isfinite(a.gamma.grad.asnumpy()[1])


# ------------------------------------------------------------------------------------- its errors


def test_a_third_derivative_is_refused():
    d = draw((6, 3), seed=21)
    a = arrays(d)
    with autograd.record():
        y = call(d, a, fix_gamma=False)
        (first,) = autograd.grad(y, [a.x], a.dy, create_graph=True)
        (second,) = autograd.grad(first, [a.x], a.dy, create_graph=True)
    with pytest.raises(mx.base.MXNetError, match="mxbn: BatchNorm: a third derivative was asked"):
        second.backward()


@pytest.mark.parametrize(
    ("which", "name", "expected"),
    [(0, "data", r"\(6, 3\) like data"), (1, "gamma", r"\(3,\) like gamma")],
)
def test_a_head_gradient_that_does_not_fit_is_refused(which, name, expected):
    d = draw((6, 3), seed=22)
    a = arrays(d)
    gradients = record_gradients(d, a, True)

    def differentiate():
        gradients[which].backward(mx.nd.ones(5))
        mx.nd.waitall()

    text = rf"the head gradient of {name}'s gradient has shape \(5,\), expected {expected}"
    with pytest.raises(mx.base.MXNetError, match=text):
        differentiate()


# ------------------------------------------------------------------------------------ in networks


class Network(mx.gluon.HybridBlock):
    """Two layers of BatchNorm, of operators that MXNet itself can differentiate twice.

    These are few: neither Convolution nor sums; and FullyConnected drops a part.
    """

    def __init__(self, **flags):
        super().__init__()
        with self.name_scope():
            self.first = self.params.get("first", shape=(1, 5, 4))
            self.second = self.params.get("second", shape=(1, 2, 5))
            self.norms = [mxbn.gluon.BatchNorm(axis=2, in_channels=n, **flags) for n in (5, 2)]
            for i, norm in enumerate(self.norms):
                self.register_child(norm, f"norm{i}")

    def hybrid_forward(self, F, x, first, second):
        hidden = F.tanh(self.norms[0](F.batch_dot(x, first, transpose_b=True)))
        return F.square(F.sigmoid(self.norms[1](F.batch_dot(hidden, second, transpose_b=True))))


def make_network(**flags):
    net = Network(**flags)
    net.initialize()
    net.cast("float64")
    rs = np.random.RandomState(2)
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    for parameter in parameters:
        parameter.set_data(nd(rs.randn(*parameter.shape), "float64"))
    return net, parameters


def gradients_of(net, parameters, x, is_train=True, create_graph=False):
    with autograd.record(train_mode=is_train):
        variables = [parameter.data() for parameter in parameters]
        return autograd.grad(net(x), [x, *variables], create_graph=create_graph)


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("flags", [{}, {"use_global_stats": True}, {"scale": False}], ids=str)
@pytest.mark.mxnet_operators
def test_the_hessian_vector_product_of_a_network(is_train, flags):
    net, parameters = make_network(**flags)
    rs = np.random.RandomState(3)
    x = nd(rs.randn(1, 8, 4), "float64")
    x.attach_grad()
    first = gradients_of(net, parameters, x, is_train, create_graph=True)
    vectors = [nd(rs.randn(*each.shape), "float64") for each in first]
    autograd.backward(first, vectors)
    variables = [x, *(parameter.data() for parameter in parameters)]
    kept = [variable.copy() for variable in variables]
    moved = []
    for h in (1e-5, -1e-5):
        for variable, value, vector in zip(variables, kept, vectors):
            variable[:] = value + h * vector
        moved.append([g.asnumpy() for g in gradients_of(net, parameters, x, is_train)])
    for variable, above, below in zip(variables, *moved):
        assert np.abs(variable.grad.asnumpy()).max() > 1e-3
        np.testing.assert_allclose(variable.grad.asnumpy(), (above - below) / 2e-5, 1e-6, 1e-7)


@pytest.mark.parametrize("how", [*HYBRIDIZE, "inlined"])
@pytest.mark.mxnet_operators
def test_hybridized_where_mxnet_allows_it(how):
    """MXNet differentiates a hybridized block twice only if it runs operator by operator."""
    options = {"inline_limit": 100} if how == "inlined" else HYBRIDIZE[how]
    net, parameters = make_network()
    x = nd(np.random.RandomState(3).randn(1, 8, 4), "float64")
    x.attach_grad()
    autograd.backward(gradients_of(net, parameters, x, create_graph=True))
    want = x.grad.asnumpy()
    if options is not None:
        net.hybridize(**options)
    if how in ("imperative", "inlined"):
        autograd.backward(gradients_of(net, parameters, x, create_graph=True))
        assert same_bits(x.grad, want)
    else:
        with pytest.raises(mx.base.MXNetError, match="does not support higher order gradients"):
            gradients_of(net, parameters, x, create_graph=True)


@pytest.mark.parametrize("options", [{}, {"static_alloc": True}], ids=["plain", "static_alloc"])
def test_a_hybridized_layer_alone(options):
    d = draw((6, 3, 4), seed=23)
    heads = only(draw_heads(d), "x")
    layer = mxbn.gluon.BatchNorm(in_channels=3, epsilon=1e-3)
    layer.initialize()
    layer.gamma.set_data(nd(d.gamma))
    layer.hybridize(**options)
    x = nd(d.x)
    x.attach_grad()
    with autograd.record():
        y = layer(x)
        if options:
            with pytest.raises(mx.base.MXNetError, match="does not support higher order"):
                autograd.grad(y, [x], nd(d.dy), create_graph=True)
            return
        (gradient,) = autograd.grad(y, [x], nd(d.dy), create_graph=True)
    gradient.backward(nd(heads[0]))
    want, sizes = right_second(d, heads, True, fix_gamma=False)
    check_second({"x": x.grad, "gamma": layer.gamma.grad()}, want, sizes)


@pytest.mark.mxnet_operators
def test_arrays_of_numpy_mode():
    d = draw((6, 3, 4), seed=24)
    heads = only(draw_heads(d), "x")
    with mx.util.np_shape(), mx.util.np_array(True):
        x, dy, u, *rest = (
            mx.np.array(values, dtype="float32")
            for values in (d.x, d.dy, heads[0], d.gamma, d.beta, d.moving_mean, d.moving_var)
        )
        x.attach_grad()
        with autograd.record():
            y = mxbn.nd.BatchNorm(x, *rest, fix_gamma=False)
            (gradient,) = autograd.grad(y, [x], dy, create_graph=True)
        gradient.backward(u)
    check_second({"x": x.grad}, *right_second(d, heads, True, fix_gamma=False))


@DTYPE
@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.mxnet_operators
def test_a_fused_operator_is_differentiated_like_its_parts(with_addend, is_train, dtype):
    d = draw((6, 3, 5), dtype=dtype, seed=31, mean=0.5)
    heads = head_arrays(d, draw_heads(d)) + [nd(d.dy[:, ::-1], d.dtype)] * with_addend

    def second(fused):
        a = arrays(d)
        addend, t = nd(d.dy[::-1], dtype), nd(d.dy, dtype)
        variables = [a.x, a.gamma, a.beta] + [addend] * with_addend
        for array in (addend, t):
            array.attach_grad()
        with autograd.record(train_mode=is_train):
            if fused:
                other = addend if with_addend else None
                y = call(d, a, fix_gamma=False, act_type="relu", addend=other)
            else:
                y = call(d, a, fix_gamma=False)
                y = mx.nd.relu(mx.nd.elemwise_add(y, addend) if with_addend else y)
            # The gradient of its square for y depends on t.
            shifted = mx.nd.elemwise_add(y, t)
            gradients = autograd.grad(mx.nd.square(shifted), variables, create_graph=True)
        autograd.backward(gradients, heads)
        return [array.grad.asnumpy() for array in (t, *variables)]

    for got, want in zip(second(True), second(False)):
        assert (want != 0).any()
        check(got.astype(dtype), want, 16)  # the parts round their outputs to it
