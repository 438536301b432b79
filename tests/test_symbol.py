"""Symbols, executors and modules: modes, requests, names, inference, sharing."""

import itertools

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    CONTEXT,
    MODES,
    OTHER_CONTEXT,
    check,
    check_dgamma,
    draw,
    nd,
    right,
    run_script,
    same_bits,
)

import mxbn

ARGUMENTS = ("x", "bn_gamma", "bn_beta")
STATISTICS = ("bn_moving_mean", "bn_moving_var")

modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
trainings = pytest.mark.parametrize("is_train", [True, False])


def symbol(data=None, **attributes):
    attributes = {"fix_gamma": False, "name": "bn", **attributes}
    return mxbn.sym.BatchNorm(mx.sym.var("x") if data is None else data, **attributes)


def values_of(d, names):
    """The drawing's NDArrays by name."""
    keys = {name: name.replace("bn_", "") for name in names}
    return {name: nd(getattr(d, key), d.dtype if key == "x" else d.param)
            for name, key in keys.items()}  # fmt: skip


def filled(executor, d):
    executor.copy_params_from(values_of(d, ARGUMENTS), values_of(d, STATISTICS))
    mx.nd.waitall()
    return executor


def bound(d, grad_req="write", **attributes):
    s = symbol(axis=d.axis, **attributes)
    types = {"x": d.dtype}
    return filled(s.simple_bind(CONTEXT, grad_req=grad_req, type_dict=types, x=d.shape), d)


def check_statistics(aux, want, units=4):
    mx.nd.waitall()
    check(aux["bn_moving_mean"], want.moving_mean, units, what="moving mean")
    check(aux["bn_moving_var"], want.moving_var, units, what="moving variance")


def check_gradients(gradients, want):
    mx.nd.waitall()
    x, gamma, beta = (gradients[name] for name in ARGUMENTS)
    check(x, want.dx, what="gradient of data")
    check_dgamma(gamma, want)
    check(beta, want.dbeta, what="gradient of beta")


def continued(d, want):
    """Let the drawing go on from the statistics of a forward."""
    d.moving_mean, d.moving_var = want.moving_mean, want.moving_var


# --------------------------------------------------------------------------------------- executors


@modes
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_executor_mode_table(mode, dtype):
    is_train, use_global_stats, use_batch_stats = mode
    d = draw((6, 3, 4), dtype=dtype, seed=1)
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    executor = bound(d, **flags)
    for _ in range(2):
        want = right(d, is_train, fix_gamma=False, **flags)
        (output,) = executor.forward(is_train=is_train)
        assert output.dtype == np.dtype(dtype)
        check(output, want.output, what="output")
        check_statistics(executor.aux_dict, want)
        for backward_mode in (True, False, True):
            executor.backward([nd(d.dy, dtype)], is_train=backward_mode)
            check_gradients(executor.grad_dict, want)
        check_statistics(executor.aux_dict, want)
        continued(d, want)


def test_executor_changes_its_mode_from_call_to_call():
    d = draw((6, 3, 4), seed=2)
    executor = bound(d)
    for is_train in (True, False, False, True):
        want = right(d, is_train, fix_gamma=False)
        check(executor.forward(is_train=is_train)[0], want.output, what="output")
        executor.backward([nd(d.dy)])
        check_gradients(executor.grad_dict, want)
        check_statistics(executor.aux_dict, want)
        continued(d, want)


@trainings
def test_executor_bound_without_gradients(is_train):
    d = draw((6, 3, 4), seed=3)
    executor = bound(d, grad_req="null")
    want = right(d, is_train, fix_gamma=False)
    check(executor.forward(is_train=is_train)[0], want.output, what="output")
    check_statistics(executor.aux_dict, want)


def test_executor_forward_takes_data():
    d, other = draw((6, 3, 4), seed=4), draw((6, 3, 4), seed=5)
    executor = bound(d)
    d.x = other.x
    want = right(d, True, fix_gamma=False)
    check(executor.forward(is_train=True, x=nd(other.x))[0], want.output)


REQUESTS = list(itertools.product(("write", "add", "null"), repeat=3))


@pytest.mark.parametrize("requests", REQUESTS, ids="-".join)
@pytest.mark.parametrize("fix_gamma", [True, False])
def test_requests_per_argument(requests, fix_gamma):
    d = draw((6, 3, 4), seed=6)
    attributes = {"fix_gamma": fix_gamma, "use_batch_stats": True}
    gradients = {name: mx.nd.full(d.shape if name == "x" else (3,), 0.5) for name in ARGUMENTS}
    executor = symbol(**attributes).bind(
        CONTEXT,
        values_of(d, ARGUMENTS),
        args_grad=gradients,
        grad_req=dict(zip(ARGUMENTS, requests)),
        aux_states=values_of(d, STATISTICS),
    )
    for _ in range(2):
        executor.forward(is_train=False)
        if set(requests) != {"null"}:
            executor.backward([nd(d.dy)])
    mx.nd.waitall()
    want = right(d, False, **attributes)
    check(executor.outputs[0], want.output, what="output")
    for name, key, request in zip(ARGUMENTS, ("dx", "dgamma", "dbeta"), requests):
        one = getattr(want, key)
        total = {"write": one, "add": 0.5 + 2 * one, "null": 0.5 + 0 * one}[request]
        check(gradients[name], total, what=key)
    assert same_bits(executor.arg_dict["bn_gamma"], d.gamma.astype("float32"))


@trainings
@pytest.mark.parametrize("allow_up_sizing", [True, False])
def test_reshape_to_another_batch(is_train, allow_up_sizing):
    d, other = draw((6, 3, 4), seed=7), draw((9, 3, 2), seed=8)
    if not allow_up_sizing:
        other = draw((4, 3, 4), seed=8)
    first = bound(d)
    second = first.reshape(x=other.shape, allow_up_sizing=allow_up_sizing)
    want = right(d, is_train, fix_gamma=False)
    check(first.forward(is_train=is_train)[0], want.output, what="output")
    check_statistics(first.aux_dict, want)
    other.gamma, other.beta = d.gamma, d.beta
    continued(other, want)  # the statistics are shared
    want = right(other, is_train, fix_gamma=False)
    check(second.forward(is_train=is_train, x=nd(other.x))[0], want.output, what="output")
    second.backward([nd(other.dy)])
    check_gradients(second.grad_dict, want)
    check_statistics(first.aux_dict, want)


@trainings
def test_executor_that_shares_memory(is_train):
    d, other = draw((6, 3, 4), seed=9), draw((4, 3, 4), seed=10)
    first = bound(d)
    second = symbol().simple_bind(CONTEXT, grad_req="write", shared_exec=first, x=other.shape)
    filled(second, other)
    for executor, each in ((first, d), (second, other)):
        want = right(each, is_train, fix_gamma=False)
        filled(executor, each)
        check(executor.forward(is_train=is_train)[0], want.output, what="output")
        executor.backward([nd(each.dy)])
        check_gradients(executor.grad_dict, want)
        check_statistics(executor.aux_dict, want)


@trainings
def test_context_groups(is_train):
    d = draw((6, 3, 4), seed=11)
    with mx.AttrScope(ctx_group="other"):
        s = symbol()
    s = mx.sym.negative(s)
    executor = s.simple_bind(
        CONTEXT, grad_req="write", group2ctx={"other": OTHER_CONTEXT}, x=d.shape
    )
    filled(executor, d)
    assert executor.aux_dict["bn_moving_mean"].context == OTHER_CONTEXT
    want = right(d, is_train, fix_gamma=False)
    check(executor.forward(is_train=is_train)[0], -want.output, what="output")
    executor.backward([nd(-d.dy)])
    check_gradients(executor.grad_dict, want)
    check_statistics(executor.aux_dict, want)


def check_mirrored(is_train):
    """Train with a symbol whose forward MXNet repeats in backward, to save memory."""
    d = draw((6, 3, 4), seed=12)
    executor = symbol(data=mx.sym.negative(mx.sym.var("x"))).simple_bind(
        CONTEXT, grad_req="write", x=d.shape
    )
    filled(executor, d)
    executor.arg_dict["x"][:] = nd(-d.x)
    want = right(d, is_train, fix_gamma=False)
    want.dx = -want.dx
    check(executor.forward(is_train=is_train)[0], want.output, what="output")
    executor.backward([nd(d.dy)])
    check_gradients(executor.grad_dict, want)
    check_statistics(executor.aux_dict, want)


@trainings
def test_forced_mirroring(is_train):
    with mx.AttrScope(force_mirroring="True"):
        check_mirrored(is_train)


def test_a_mirror_of_moving_statistics_that_are_used_and_step_is_refused():
    with mx.AttrScope(force_mirroring="True"):
        net = symbol(data=mx.sym.negative(mx.sym.var("x")), use_global_stats=True,
                     step_global_stats=True)  # fmt: skip
        with pytest.raises(RuntimeError, match="cannot run again in backward: expected step"):
            net.simple_bind(CONTEXT, grad_req="write", x=(6, 3, 4))


@trainings
def test_mirroring_by_environment(is_train):
    done = run_script(
        f"import test_symbol; test_symbol.check_mirrored({is_train}); print('done')",
        MXNET_BACKWARD_DO_MIRROR="1",
    )
    assert done.stdout == "done\n", done.stderr[-2000:]


@modes
@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_numeric_gradient(mode, fix_gamma, axis):
    is_train, use_global_stats, use_batch_stats = mode
    d = draw((4, 3, 2), axis=axis, dtype="float64", seed=13)
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    weights = nd(d.dy, "float64")
    s = symbol(axis=axis, fix_gamma=fix_gamma, **flags) * mx.sym.var("weights")
    s = mx.sym.make_loss(s)
    arguments = {**values_of(d, ARGUMENTS), "weights": weights}
    executor = s.simple_bind(
        CONTEXT, grad_req="write", type_dict={"x": "float64"}, x=d.shape, weights=d.shape
    )
    executor.copy_params_from(arguments, values_of(d, STATISTICS))
    executor.forward(is_train=is_train)
    executor.backward()
    numeric = mx.test_utils.numeric_grad(
        executor,
        {name: arguments[name].asnumpy() for name in ARGUMENTS},
        {name: value.asnumpy() for name, value in values_of(d, STATISTICS).items()},
        eps=1e-4,
        use_forward_train=is_train,
        dtype=np.float64,
    )
    for name in ARGUMENTS:
        got = executor.grad_dict[name].asnumpy()
        np.testing.assert_allclose(got, numeric[name], rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "predict"])
def test_mxnet_checks_the_gradient(mode):
    """MXNet's check runs its forward in training, so it cannot know the plain inference mode."""
    is_train, use_global_stats, use_batch_stats = MODES[mode]
    d = draw((4, 3, 2), dtype="float64", seed=14)
    mx.test_utils.check_numeric_gradient(
        symbol(use_global_stats=use_global_stats, use_batch_stats=use_batch_stats),
        values_of(d, ARGUMENTS),
        values_of(d, STATISTICS),
        numeric_eps=1e-4,
        rtol=1e-7,
        atol=1e-8,
        use_forward_train=is_train,
        dtype=np.float64,
    )


# ---------------------------------------------------------------------------- names and attributes


def inputs_of(s):
    return s.list_arguments() + s.list_auxiliary_states()


def test_automatic_variables():
    with mx.name.NameManager():
        s = mxbn.sym.BatchNorm()
        assert inputs_of(s) == [
            f"batchnorm0_{key}" for key in ("data", "gamma", "beta", "moving_mean", "moving_var")
        ]
        assert s.list_outputs() == ["batchnorm0_output"]
        assert mxbn.sym.BatchNorm().name == "batchnorm1"
    assert inputs_of(symbol()) == [*ARGUMENTS, *STATISTICS]


def test_given_variables():
    given = {key: mx.sym.var(f"my_{key}") for key in ("gamma", "beta", "moving_mean", "moving_var")}
    for count in range(1, 5):
        for keys in itertools.combinations(given, count):
            s = symbol(**{key: given[key] for key in keys})
            want = [("my_" if key in keys else "bn_") + key for key in given]
            assert inputs_of(s) == ["x", *want]


def test_variables_may_be_given_by_position():
    names = ["a", "b", "c", "d", "e"]
    assert inputs_of(mxbn.sym.BatchNorm(*map(mx.sym.var, names))) == names


def test_one_variable_shared_by_two_symbols():
    """As in weight sharing: both layers step the same statistics, in the order of the graph."""
    d = draw((6, 3, 4), dtype="float64", seed=15)
    shared = {key: mx.sym.var(f"bn_{key}")
              for key in ("gamma", "beta", "moving_mean", "moving_var")}  # fmt: skip
    s = symbol(symbol(**shared, name="first"), **shared, name="second")
    assert inputs_of(s) == [*ARGUMENTS, *STATISTICS]
    executor = s.simple_bind(CONTEXT, type_dict={"x": "float64"}, x=d.shape)
    filled(executor, d)
    first = right(d, True, fix_gamma=False)
    between = draw(d.shape, dtype="float64")
    between.x, between.gamma, between.beta = first.output, d.gamma, d.beta
    continued(between, first)
    want = right(between, True, fix_gamma=False)
    check(executor.forward(is_train=True)[0], want.output, 8, what="output")
    check_statistics(executor.aux_dict, want, 8)


def test_statistics_carry_their_initial_values():
    attributes = symbol().attr_dict()
    assert attributes["bn_moving_mean"]["__init__"] == '["zero", {}]'
    assert attributes["bn_moving_var"]["__init__"] == '["one", {}]'
    assert "__init__" not in attributes.get("bn_gamma", {})
    own = symbol(moving_mean=mx.sym.var("m", init=mx.init.Constant(3))).attr_dict()
    assert own["m"]["__init__"] == mx.init.Constant(3).dumps()
    assert own["bn_moving_var"]["__init__"] == '["one", {}]'


@pytest.mark.parametrize("fix_gamma", [None, True, 1, "True", "true", "1"])
def test_automatic_gamma_under_fix_gamma_is_exempt_from_weight_decay(fix_gamma):
    options = {} if fix_gamma is None else {"fix_gamma": fix_gamma}
    s = mxbn.sym.BatchNorm(mx.sym.var("x"), name="bn", **options)
    assert s.attr_dict()["bn_gamma"]["__wd_mult__"] == "0.0"
    assert "__wd_mult__" not in s.attr_dict().get("bn_beta", {})


@pytest.mark.parametrize("fix_gamma", [False, 0, "False", "false", "0"])
def test_other_gammas_are_not_exempt(fix_gamma):
    s = mxbn.sym.BatchNorm(mx.sym.var("x"), name="bn", fix_gamma=fix_gamma)
    assert "__wd_mult__" not in s.attr_dict().get("bn_gamma", {})
    s = mxbn.sym.BatchNorm(mx.sym.var("x"), gamma=mx.sym.var("g"), name="bn")
    assert "__wd_mult__" not in s.attr_dict().get("g", {})


def notes_of(s):
    """The attributes that MXNet knows by name, of every variable and node."""
    return {
        name: {k: v for k, v in attributes.items() if k.startswith("__")}
        for name, attributes in s.attr_dict().items()
    }


SCOPES = [{"ctx_group": "a"}, {"lr_mult": "3"}, {"__mood__": "angry"}]


@pytest.mark.parametrize("notes", SCOPES, ids=str)
@pytest.mark.parametrize("way", ["scope", "argument", "both"])
@pytest.mark.parametrize("fix_gamma", [True, False])
def test_attributes_are_spread_as_the_built_in_operator_does(notes, way, fix_gamma):
    found = []
    for operator in (mxbn.sym.BatchNorm, mx.sym.BatchNorm):
        with mx.AttrScope(**({} if way == "argument" else notes)):
            attr = {**notes, "__own__": "1"} if way == "both" else notes
            attr = None if way == "scope" else attr
            s = operator(mx.sym.var("x"), name="bn", fix_gamma=fix_gamma, attr=attr)
        found.append(notes_of(s))
    if fix_gamma:
        assert found[0]["bn_gamma"].pop("__wd_mult__") == "0.0"
    assert found[0] == found[1]


def test_names_follow_name_managers():
    found = []
    for operator in (mxbn.sym.BatchNorm, mx.sym.BatchNorm):
        with mx.name.Prefix("net_"):
            symbols = [operator(mx.sym.var("x")), operator(mx.sym.var("x"), name="bn"), operator()]
        with mx.name.NameManager():
            symbols += [operator(mx.sym.relu()), operator()]
        found.append([s.list_inputs() + s.list_outputs() for s in symbols])
    assert found[0] == found[1]
    assert found[0][1][1:3] == ["net_bn_gamma", "net_bn_beta"]


def test_output_mean_var_outputs_by_name():
    d = draw((6, 3, 4), seed=16)
    s = symbol(output_mean_var=True)
    assert s.list_outputs() == ["bn_output", "bn_mean", "bn_var"]
    assert len(symbol().list_outputs()) == 1
    for is_train in (True, False):
        want = right(d, is_train, fix_gamma=False)
        values = {"bn_output": want.output, "bn_mean": want.mean, "bn_var": want.inv_std}
        for name, value in values.items():
            executor = filled(s[name].simple_bind(CONTEXT, grad_req="null", x=d.shape), d)
            check(executor.forward(is_train=is_train)[0], value, what=name)
            inner = mx.sym.relu(s[name]).get_internals()[name]
            assert inner.list_outputs() == [name]
        executor = filled(s.simple_bind(CONTEXT, grad_req="write", x=d.shape), d)
        executor.forward(is_train=is_train)
        for name, value in values.items():
            check(executor.output_dict[name], value, what=name)
        executor.backward([nd(d.dy), nd(np.full(3, 100.0)), nd(np.full(3, 100.0))])
        check_gradients(executor.grad_dict, want)  # none through mean and var


# --------------------------------------------------------------------------- inference of shapes


def test_infer_shape():
    s = symbol(axis=-1, output_mean_var=True)
    want = ([(2, 3, 4), (4,), (4,)], [(2, 3, 4), (4,), (4,)], [(4,), (4,)])
    assert s.infer_shape(x=(2, 3, 4)) == want
    assert s.infer_shape_partial(x=(2, 3, 4)) == want


@pytest.mark.filterwarnings("ignore:Cannot decide shape:UserWarning")
def test_infer_shape_of_unknown_data():
    s = symbol()
    assert s.infer_shape() == s.infer_shape(bn_gamma=(3,)) == (None, None, None)
    assert s.infer_shape_partial() == ([(), (), ()], [()], [(), ()])
    assert s.infer_shape_partial(bn_beta=(3,)) == ([(), (), (3,)], [()], [(), ()])


def test_infer_shape_of_data_known_in_part():
    s = symbol()
    want = ([(0, 3, 0), (3,), (3,)], [(0, 3, 0)], [(3,), (3,)])
    assert s.infer_shape_partial(x=(0, 3, 0)) == want
    arguments, outputs, _ = s.infer_shape_partial(x=(2, 0))
    assert arguments[0] == outputs[0] == (2, 0)


def test_infer_shape_and_type_from_the_output():
    s = symbol() + mx.sym.var("z")
    assert s.infer_shape(z=(2, 3, 4))[0] == [(2, 3, 4), (3,), (3,), (2, 3, 4)]
    assert s.infer_shape(z=(2, 3, 4))[2] == [(3,), (3,)]
    half, single = np.float16, np.float32
    assert s.infer_type(z="float16") == ([half, single, single, half], [half], [single, single])


@pytest.mark.parametrize(
    ("dtype", "param"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_infer_type(dtype, param):
    data, param = np.dtype(dtype).type, np.dtype(param).type
    want = ([data, param, param], [data, param, param], [param, param])
    assert symbol(output_mean_var=True).infer_type(x=dtype) == want
    assert symbol(output_mean_var=True).infer_type_partial(x=dtype) == want


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
def test_infer_type_of_unknown_data():
    s = symbol()
    assert s.infer_type() == s.infer_type(bn_gamma="float64") == (None, None, None)
    want = ([None, np.float64, None], [None], [None, None])
    assert s.infer_type_partial(bn_gamma="float64") == want


@pytest.mark.filterwarnings("ignore:infer_shape error:UserWarning")
def test_wrong_shapes_and_types_are_refused():
    message = r"mxbn: BatchNorm: gamma has shape \(5,\), expected \(3,\)"
    with pytest.raises(mx.base.MXNetError, match=message):
        symbol().infer_shape(x=(2, 3), bn_gamma=(5,))
    with pytest.raises(mx.base.MXNetError, match="mxbn: BatchNorm: gamma has dtype float16"):
        symbol().infer_type(x="float16", bn_gamma="float16")


# ----------------------------------------------------------------------------------------- modules


def module_of(s, d, for_training=True, context=None, kind=mxbn.Module, **bind):
    module = kind(s, data_names=["x"], label_names=None, context=context or CONTEXT)
    module.bind([("x", d.shape)], for_training=for_training, **bind)
    module.init_params(arg_params=values_of(d, ARGUMENTS[1:]), aux_params=values_of(d, STATISTICS))
    mx.nd.waitall()
    return module


@modes
@pytest.mark.parametrize("for_training", [True, False])
@pytest.mark.parametrize("default", [True, False], ids=["default_is_train", "is_train"])
def test_module_mode_table(mode, for_training, default):
    is_train, use_global_stats, use_batch_stats = mode
    d = draw((6, 3, 4), seed=17)
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    module = module_of(symbol(**flags), d, for_training, inputs_need_grad=for_training)
    if default:
        is_train = for_training  # what forward takes where it is not told
    for _ in range(2):
        want = right(d, is_train, fix_gamma=False, **flags)
        batch = mx.io.DataBatch([nd(d.x)])
        module.forward(batch) if default else module.forward(batch, is_train=is_train)
        check(module.get_outputs()[0], want.output, what="output")
        check_statistics(module.get_params()[1], want)
        if for_training:
            module.backward([nd(d.dy)])
            check(module.get_input_grads()[0], want.dx, what="gradient of data")
            check_statistics(module.get_params()[1], want)
        continued(d, want)


@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.mxnet_operators
def test_module_update(fix_gamma):
    """Two steps of descent with weight decay, which must leave a fixed gamma alone."""
    d = draw((6, 3, 4), seed=18)
    module = module_of(symbol(fix_gamma=fix_gamma), d)
    options = {"learning_rate": 0.25, "wd": 0.5, "rescale_grad": 0.5}
    module.init_optimizer(optimizer_params=options)
    stored = d.gamma.astype("float32")
    for _ in range(2):
        want = right(d, True, fix_gamma=fix_gamma)
        module.forward(mx.io.DataBatch([nd(d.x)]), is_train=True)
        module.backward([nd(d.dy)])
        module.update()
        # Module decays no parameter whose name ends in _beta, but those that end in _gamma.
        d.beta = d.beta - 0.25 * 0.5 * want.dbeta
        if not fix_gamma:
            d.gamma = d.gamma - 0.25 * (0.5 * want.dgamma + 0.5 * d.gamma)
        arguments, aux = module.get_params()
        check(arguments["bn_beta"], d.beta, what="beta")
        check(arguments["bn_gamma"], d.gamma, what="gamma")
        check_statistics(aux, want)
        continued(d, want)
    if fix_gamma:
        assert same_bits(arguments["bn_gamma"], stored)


@pytest.mark.mxnet_operators
def test_module_on_several_contexts():
    d = draw((8, 3, 4), seed=19)
    module = module_of(symbol(), d, context=[CONTEXT, OTHER_CONTEXT], inputs_need_grad=True)
    module.init_optimizer(optimizer_params={"learning_rate": 0.25, "rescale_grad": 1.0})
    halves = []
    for x, dy in zip(np.split(d.x, 2), np.split(d.dy, 2)):
        half = draw((4, 3, 4), seed=19)
        half.__dict__.update(d.__dict__, x=x, dy=dy)
        halves.append(half)
    for _ in range(2):
        want = [right(half, True, fix_gamma=False) for half in halves]
        module.forward(mx.io.DataBatch([nd(d.x)]), is_train=True)
        module.backward([nd(d.dy)])
        module.update()
        check(module.get_outputs()[0], np.concatenate([w.output for w in want]), what="output")
        check(module.get_input_grads()[0], np.concatenate([w.dx for w in want]), what="dx")
        arguments, aux = module.get_params()
        mean_of_both = right(d, True, fix_gamma=False)
        mean_of_both.moving_mean = (want[0].moving_mean + want[1].moving_mean) / 2
        mean_of_both.moving_var = (want[0].moving_var + want[1].moving_var) / 2
        check_statistics(aux, mean_of_both)
        gamma = halves[0].gamma - 0.25 * (want[0].dgamma + want[1].dgamma)
        beta = halves[0].beta - 0.25 * (want[0].dbeta + want[1].dbeta)
        check(arguments["bn_gamma"], gamma, what="gamma")
        check(arguments["bn_beta"], beta, what="beta")
        for half, w in zip(halves, want):
            half.gamma, half.beta = gamma, beta
            continued(half, w)


def test_module_reshapes_to_another_batch():
    d, other = draw((6, 3, 4), seed=20), draw((4, 3, 2), seed=21)
    module = module_of(symbol(), d)
    for each in (d, other, d):
        each.gamma, each.beta = d.gamma, d.beta
        want = right(each, True, fix_gamma=False)
        module.forward(mx.io.DataBatch([nd(each.x)]), is_train=True)
        check(module.get_outputs()[0], want.output, what="output")
        check_statistics(module.get_params()[1], want)
        continued(d, want)
        continued(other, want)


@pytest.mark.mxnet_operators
def test_a_forward_in_another_mode_leaves_one_that_waits_for_its_turn_in_its_own():
    d = draw((6, 3, 4), seed=27)
    module = module_of(symbol(momentum=0.5), d)
    slow = mx.nd.ones((600, 600), ctx=CONTEXT)
    for _ in range(3):
        want = right(d, True, fix_gamma=False, momentum=0.5)
        for _ in range(3):
            slow = mx.nd.dot(slow, slow) * 0
        module.forward(mx.io.DataBatch([nd(d.x) + slow.sum()]), is_train=True)
        module.forward(mx.io.DataBatch([nd(d.x)]), is_train=False)
        check_statistics(module.get_params()[1], want)
        continued(d, want)


def test_modules_that_share_their_parameters():
    d, other = draw((6, 3, 4), seed=22), draw((4, 3, 4), seed=23)
    first = module_of(symbol(), d)
    second = mxbn.Module(symbol(), data_names=["x"], label_names=None, context=CONTEXT)
    second.bind([("x", other.shape)], shared_module=first)
    other.gamma, other.beta = d.gamma, d.beta
    for module, each in ((first, d), (second, other), (first, d)):
        want = right(each, True, fix_gamma=False)
        module.forward(mx.io.DataBatch([nd(each.x)]), is_train=True)
        check(module.get_outputs()[0], want.output, what="output")
        check_statistics(module.get_params()[1], want)
        continued(d, want)
        continued(other, want)


@pytest.mark.mxnet_operators
def test_bucketing_module():
    def sym_gen(length):
        flat = mx.sym.reshape(mx.sym.var("x"), (-1, 3 * length))
        split = mx.sym.reshape(flat, (-1, 3, length))
        return symbol(data=split), ["x"], None

    draws = {length: draw((4, 3, length), seed=length) for length in (8, 5, 3)}
    d = draws[8]
    module = mx.mod.BucketingModule(sym_gen, default_bucket_key=8, context=CONTEXT)
    module.bind([("x", d.shape)])
    module.init_params(arg_params=values_of(d, ARGUMENTS[1:]), aux_params=values_of(d, STATISTICS))
    module.init_optimizer(optimizer_params={"learning_rate": 0.25, "rescale_grad": 1.0})
    gamma, beta = d.gamma, d.beta
    for length in (8, 3, 5, 8, 3):
        each = draws[length]
        each.gamma, each.beta = gamma, beta
        continued(each, d)
        want = right(each, True, fix_gamma=False)
        batch = mx.io.DataBatch(
            [nd(each.x)], bucket_key=length, provide_data=[("x", each.shape)], provide_label=None
        )
        module.forward(batch, is_train=True)
        check(module.get_outputs()[0], want.output, 8, what="output")
        module.backward([nd(each.dy)])
        module.update()
        mx.nd.waitall()
        gamma, beta = gamma - 0.25 * want.dgamma, beta - 0.25 * want.dbeta
        arguments, aux = module.get_params()
        check(arguments["bn_gamma"], gamma, 8, what="gamma")
        check(arguments["bn_beta"], beta, 8, what="beta")
        check_statistics(aux, want, 8)
        continued(d, want)


def test_get_params_right_after_forward():
    """A race: nothing is awaited, and the forward takes a while."""
    d = draw((32, 3, 96, 96), seed=24)
    module = module_of(symbol(), d)
    batch = mx.io.DataBatch([nd(d.x)])
    mx.nd.waitall()
    for _ in range(10):
        want = right(d, True, fix_gamma=False)
        module.forward(batch, is_train=True)
        aux = module.get_params()[1]
        got = [aux[name].asnumpy() for name in STATISTICS]
        check(got[0], want.moving_mean, what="moving mean")
        check(got[1], want.moving_var, what="moving variance")
        continued(d, want)


def test_save_checkpoint_right_after_forward(tmp_path):
    d = draw((32, 3, 96, 96), seed=25)
    module = module_of(symbol(), d)
    batch = mx.io.DataBatch([nd(d.x)])
    mx.nd.waitall()
    want = right(d, True, fix_gamma=False)
    module.forward(batch, is_train=True)
    module.save_checkpoint(str(tmp_path / "net"), 1)
    check_statistics(mx.model.load_checkpoint(str(tmp_path / "net"), 1)[2], want)


def test_get_params_before_binding_and_initialising():
    module = mxbn.Module(symbol(), data_names=["x"], label_names=None, context=CONTEXT)
    with pytest.raises(AssertionError):
        module.get_params()
    module.bind([("x", (2, 3))])
    with pytest.raises(AssertionError):
        module.get_params()


def test_module_load_gives_an_mxbn_module(tmp_path):
    d = draw((6, 3, 4), seed=26)
    module_of(symbol(), d).save_checkpoint(str(tmp_path / "net"), 2)
    module = mxbn.Module.load(
        str(tmp_path / "net"), 2, data_names=["x"], label_names=None, context=CONTEXT
    )
    assert type(module) is mxbn.Module
    module.bind([("x", d.shape)], for_training=False)
    for is_train in (False, True):
        want = right(d, is_train, fix_gamma=False)
        module.forward(mx.io.DataBatch([nd(d.x)]), is_train=is_train)
        check(module.get_outputs()[0], want.output, what="output")
        check_statistics(module.get_params()[1], want)
