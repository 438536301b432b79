"""On mx.gpu(): beside CPUs and other GPUs, however MXNet runs it, and when the driver fails."""

import contextlib
import os
import re
import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from device import IS_FAKE
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
    run_script,
    same_bits,
)

import mxbn

GPUS = mx.context.num_gpus()
GPU, OTHER_GPU, CPU = mx.gpu(0), mx.gpu(1), mx.cpu()
FLAGS = {"fix_gamma": False, "eps": 0.25, "momentum": 0.75}
INPUTS = ("x", "gamma", "beta", "moving_mean", "moving_var")
RESULTS = ("output", "dx", "dgamma", "dbeta", "moving_mean", "moving_var")

pytestmark = pytest.mark.skipif(GPUS == 0, reason="MXNet sees no GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="MXNet sees fewer than two GPUs")
fake_gpu = pytest.mark.skipif(not IS_FAKE, reason="only the fake GPU fails when it is told to")
trainings = pytest.mark.parametrize("is_train", [True, False])


def arrays_on(context, d):
    with context:
        return arrays(d)


def symbol_of(d, **attributes):
    return mxbn.sym.BatchNorm(mx.sym.var("x"), name="bn", axis=d.axis, **attributes)


# Each way makes, of a drawing and its arrays, a function of is_train that runs a forward and gives
# its output and what runs the backward.


def recorded(compute, a):
    def forward(is_train):
        with mx.autograd.record(train_mode=is_train):
            output = compute()
        return output, lambda **flags: output.backward(a.dy, **flags)

    return forward


def imperative(d, a, **attributes):
    return recorded(lambda: call(d, a, **attributes), a)


def hybridized(flags):
    def make(d, a, **attributes):
        graph = mx.nd.CachedOp(symbol_of(d, **attributes), list(flags.items()))
        arguments = [getattr(a, key) for key in INPUTS[:3]]
        return recorded(lambda: graph(*arguments, a.moving_mean.detach(), a.moving_var.detach()), a)

    return make


def bound(d, a, **attributes):
    executor = symbol_of(d, **attributes).bind(
        a.x.context, [a.x, a.gamma, a.beta], [a.x.grad, a.gamma.grad, a.beta.grad],
        aux_states=[a.moving_mean, a.moving_var],
    )  # fmt: skip

    def forward(is_train):
        output = executor.forward(is_train=is_train)[0]
        return output, lambda train_mode=True: executor.backward(a.dy, is_train=train_mode)

    return forward


WAYS = {"imperative": imperative, "bound": bound}
WAYS.update({k: hybridized(flags) for k, flags in HYBRIDIZE.items() if flags is not None})


def run(way, d, a, is_train=True, **attributes):
    output, backward = WAYS[way](d, a, **FLAGS, **attributes)(is_train)
    backward()
    return output


def results(a, output):
    mx.nd.waitall()
    values = (output, a.x.grad, a.gamma.grad, a.beta.grad, a.moving_mean, a.moving_var)
    return dict(zip(RESULTS, values))


def run_on(context, d, is_train=True, way="imperative", **attributes):
    a = arrays_on(context, d)
    found = results(a, run(way, d, a, is_train, **attributes))
    assert all(value.context == context for value in found.values())
    return found


def check_right(found, want, units=8, names=RESULTS):
    for name in names:
        # Gradients of parameters are sums of many values, whose size a sum near 0 does not show.
        scale = max(1, np.abs(getattr(want, name)).max()) if name.startswith("d") else None
        check(found[name], getattr(want, name), units, scale, name)


# --------------------------------------------------------------------------------- ways of running


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running(way, mode, dtype):
    d = draw((6, 5, 4, 3), dtype=dtype)
    is_train, use_global_stats, use_batch_stats = MODES[mode]
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    check_right(run_on(GPU, d, is_train, way, **flags), right(d, is_train, **FLAGS, **flags))


@pytest.mark.parametrize("dtype", DTYPES)
@trainings
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((6,), 0), ((7, 4), 1), ((7, 4), -1), ((3, 5), 0), ((2, 3, 40), 1), ((2, 40, 3), -1),
        ((2, 3, 4, 5), 2), ((2, 3, 4, 5, 2), -5), ((2, 65, 32), 1), ((3, 7, 64), -1),
    ],
)  # fmt: skip
def test_axes(shape, axis, is_train, dtype):
    d = draw(shape, axis, dtype, seed=1)
    check_right(run_on(GPU, d, is_train), right(d, is_train, **FLAGS))


@pytest.mark.parametrize("data_request", ["write", "add", "null"])
@pytest.mark.parametrize("gamma_request", ["write", "add", "null"])
@pytest.mark.parametrize("beta_request", ["write", "add", "null"])
@pytest.mark.parametrize("is_train", [True, False])
def test_requests(data_request, gamma_request, beta_request, is_train):
    d = draw((6, 3, 40), seed=2)
    requests = dict(zip(("dx", "dgamma", "dbeta"), (data_request, gamma_request, beta_request)))
    a = arrays_on(GPU, d)
    names = ("x", "bn_gamma", "bn_beta")
    gradients = [mx.nd.full(value.shape, 0.5, GPU) for value in (a.x, a.gamma, a.beta)]
    executor = symbol_of(d, **FLAGS).bind(
        GPU, [a.x, a.gamma, a.beta], gradients, dict(zip(names, requests.values())),
        [a.moving_mean, a.moving_var],
    )  # fmt: skip
    want = right(d, is_train, **FLAGS)
    executor.forward(is_train=is_train)
    if set(requests.values()) != {"null"}:
        executor.backward(a.dy)
        executor.backward(a.dy)
    mx.nd.waitall()
    check(executor.outputs[0], want.output)
    for (name, request), gradient in zip(requests.items(), gradients):
        one = getattr(want, name)
        total = {"write": one, "add": 0.5 + 2 * one, "null": 0.5 + 0 * one}[request]
        check(gradient, total, 8, what=name)


@pytest.mark.parametrize("way", WAYS)
@trainings
def test_backward_is_of_the_forward_that_ran(way, is_train):
    """Whatever happened to the moving statistics since, in every mode of backward."""
    d = draw((6, 3, 4), seed=3)
    a = arrays_on(GPU, d)
    want = right(d, is_train, **FLAGS)
    forward = WAYS[way](d, a, **FLAGS)
    for train_mode in (True, False):
        nd(d.moving_mean).copyto(a.moving_mean)
        nd(d.moving_var).copyto(a.moving_var)
        output, backward = forward(is_train)
        check(output, want.output)
        mx.nd.waitall()
        a.moving_mean[:], a.moving_var[:] = 100, 1e-4
        backward(train_mode=train_mode)
        found = {"dx": a.x.grad, "dgamma": a.gamma.grad, "dbeta": a.beta.grad}
        check_right(found, want, names=found)
    assert (a.moving_mean.asnumpy() == 100).all()


@pytest.mark.parametrize("dtype", DTYPES)
@trainings
def test_output_mean_var(is_train, dtype):
    d = draw((6, 3, 40), dtype=dtype, seed=4)
    a = arrays_on(GPU, d)
    with mx.autograd.record(train_mode=is_train):
        output, mean, inv_std = call(d, a, output_mean_var=True, **FLAGS)
    output.backward(a.dy)
    want = right(d, is_train, **FLAGS)
    check_right(results(a, output), want)
    check(mean, want.mean, what="mean")
    check(inv_std, want.inv_std, what="inv_std")


@trainings
def test_monitor_sees_hidden_outputs(is_train):
    d = draw((6, 3, 40), seed=5)
    a = arrays_on(GPU, d)
    executor = symbol_of(d, **FLAGS).bind(
        GPU, [a.x, a.gamma, a.beta], aux_states=[a.moving_mean, a.moving_var]
    )
    monitor = mx.mon.Monitor(1, stat_func=lambda array: array.copy())
    monitor.install(executor)
    monitor.tic()
    executor.forward(is_train=is_train)
    seen = {name: value.asnumpy() for _, name, value in monitor.queue}
    want = right(d, is_train, **FLAGS)
    check(seen["bn_output"], want.output, what="output")
    check(seen["bn_mean"], want.mean, what="mean")
    check(seen["bn_var"], want.inv_std, what="inv_std")


@trainings
@pytest.mark.parametrize("way", ["bound", "hybridized"])
def test_mirroring(is_train, way):
    """MXNet runs the forward again within backward; it must not step again."""
    d = draw((6, 3, 40), seed=6)
    with mx.AttrScope(force_mirroring="True"):
        found = run_on(GPU, d, is_train, way)
    check_right(found, right(d, is_train, **FLAGS))


def test_empty_batch():
    with mx.util.np_shape():
        for shape, axis in (((0, 3, 2), 1), ((4, 0, 3), -1)):
            d = draw(shape, axis, seed=7)
            found = run_on(GPU, d)
            assert found["output"].shape == found["dx"].shape == shape
            for name in ("dgamma", "dbeta"):
                assert (found[name].asnumpy() == 0).all()
            for name in ("moving_mean", "moving_var"):
                assert same_bits(found[name], getattr(d, name).astype("float32"))


def test_module():
    d = draw((6, 3, 40), seed=8)
    module = mxbn.Module(symbol_of(d, **FLAGS), ["x"], None, context=GPU)
    module.bind([("x", d.shape)], inputs_need_grad=True)
    a = arrays(d)
    module.init_params(
        arg_params={"bn_gamma": a.gamma, "bn_beta": a.beta},
        aux_params={"bn_moving_mean": a.moving_mean, "bn_moving_var": a.moving_var},
    )
    want = right(d, True, **FLAGS)
    module.forward(mx.io.DataBatch([a.x]), is_train=True)
    states = module.get_params()[1]  # right after forward
    check(states["bn_moving_mean"], want.moving_mean)
    check(states["bn_moving_var"], want.moving_var)
    module.backward([a.dy])
    (output,), (gradient,) = module.get_outputs(), module.get_input_grads()
    assert output.context == gradient.context == GPU
    check(output, want.output)
    check(gradient, want.dx)


@pytest.mark.parametrize(("shape", "axis"), [((8, 5, 640), 1), ((900, 6), 1)])
def test_the_same_bits_every_time(shape, axis):
    d = draw(shape, axis, seed=9)
    first = run_on(GPU, d)
    for _ in range(10):
        again = run_on(GPU, d)
        assert all(same_bits(again[name], first[name]) for name in RESULTS)


# --------------------------------------------------------------------------------- other devices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_cpu_and_gpu_agree(mode, dtype):
    """In one process, in turn."""
    d = draw((6, 5, 40), dtype=dtype, seed=10)
    is_train, use_global_stats, use_batch_stats = MODES[mode]
    flags = {"use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats}
    want = right(d, is_train, **FLAGS, **flags)
    for way in WAYS:
        found = {context: run_on(context, d, is_train, way, **flags) for context in (CPU, GPU)}
        for name in RESULTS:
            check(found[GPU][name], found[CPU][name].asnumpy(), 8, what=name)
        for each in found.values():
            check_right(each, want)


@trainings
def test_layer_on_cpu_and_gpu(is_train):
    """One Gluon layer with parameters on both, as MXNet's Trainer keeps them."""
    contexts = [CPU, GPU]
    layer = mxbn.gluon.BatchNorm(in_channels=3, momentum=0.75, epsilon=0.25)
    layer.initialize(ctx=contexts)
    for context, seed in zip(contexts, (11, 12)):
        d = draw((6, 3, 40), seed=seed)
        d.gamma, d.beta, d.moving_mean, d.moving_var = (
            np.ones(3),
            np.zeros(3),
            np.zeros(3),
            np.ones(3),
        )
        x = arrays_on(context, d).x
        with mx.autograd.record(train_mode=is_train):
            output = layer(x)
        want = right(d, is_train, **FLAGS)
        check(output, want.output)
        check(layer.running_mean.data(context), want.moving_mean)
        check(layer.running_var.data(context), want.moving_var)


def test_layer_moves_to_the_gpu_and_back():
    d = draw((6, 3, 40), seed=13)
    layer = mxbn.gluon.BatchNorm(in_channels=3)
    layer.initialize(ctx=CPU)
    layer.hybridize()
    for context in (CPU, GPU, CPU):
        layer.collect_params().reset_ctx(context)
        a = arrays_on(context, d)
        for key in ("gamma", "beta"):
            getattr(layer, key).set_data(getattr(a, key))
        layer.running_mean.set_data(a.moving_mean)
        layer.running_var.set_data(a.moving_var)
        assert layer(a.x).context == context
        check(layer(a.x), right(d, False, fix_gamma=False, eps=1e-5).output)


@trainings
def test_a_graph_with_one_part_on_the_gpu(is_train):
    d = draw((6, 3, 40), seed=14)
    with mx.AttrScope(ctx_group="gpu"):
        s = symbol_of(d, **FLAGS)
    executor = mx.sym.negative(s).simple_bind(CPU, group2ctx={"gpu": GPU}, x=d.shape)
    a = arrays(d)
    executor.copy_params_from(
        {"x": a.x, "bn_gamma": a.gamma, "bn_beta": a.beta},
        {"bn_moving_mean": a.moving_mean, "bn_moving_var": a.moving_var},
    )
    assert executor.aux_dict["bn_moving_mean"].context == GPU
    want = right(d, is_train, **FLAGS)
    check(executor.forward(is_train=is_train)[0], -want.output)
    executor.backward(nd(-d.dy))
    check(executor.grad_dict["x"], want.dx)
    check(executor.aux_dict["bn_moving_var"], want.moving_var)


@pytest.mark.parametrize("name", INPUTS[1:])
@pytest.mark.parametrize("contexts", [(GPU, CPU), (CPU, GPU)], ids=str)
def test_inputs_on_different_devices(name, contexts):
    d = draw((6, 3, 4), seed=15)
    where, elsewhere = contexts
    a, b = arrays_on(where, d), arrays_on(elsewhere, d)
    setattr(a, name, getattr(b, name))
    message = f"mxbn: BatchNorm: {name} is on {elsewhere}, expected {where}, where data is"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(d, a)
    # MXNet's own words, or, for the states of executors, which it does not check, ours.
    for way in ("bound", "hybridized"):
        with pytest.raises(mx.base.MXNetError, match=re.escape(str(elsewhere))):
            run(way, d, a).asnumpy()
    with contextlib.suppress(mx.base.MXNetError):  # of the backward
        mx.nd.waitall()
    check_right(run_on(where, d), right(d, True, **FLAGS))


@pytest.mark.parametrize("way", ["imperative", "hybridized"])
@pytest.mark.parametrize("contexts", [(GPU, CPU), (CPU, GPU)], ids=str)
def test_head_gradient_on_another_device(way, contexts):
    where, elsewhere = contexts
    d = draw((6, 3, 4), seed=16)
    a = arrays_on(where, d)
    a.dy = arrays_on(elsewhere, d).dy
    message = (
        f"mxbn: BatchNorm: the head gradient is on {elsewhere}, expected {where}, where data is"
    )
    with pytest.raises(mx.base.MXNetError, match=re.escape(message)):
        results(a, run(way, d, a))
    check_right(run_on(where, d), right(d, True, **FLAGS))


@pytest.mark.parametrize("contexts", [(GPU, CPU), (CPU, GPU)], ids=str)
def test_executors_fetch_the_head_gradient(contexts):
    where, elsewhere = contexts
    d = draw((6, 3, 4), seed=16)
    a = arrays_on(where, d)
    a.dy = arrays_on(elsewhere, d).dy
    check_right(results(a, run("bound", d, a)), right(d, True, **FLAGS))


@two_gpus
def test_two_gpus_in_turn():
    d = draw((6, 3, 40), seed=17)
    for context in (GPU, OTHER_GPU, GPU, OTHER_GPU):
        for way in WAYS:
            check_right(run_on(context, d, True, way), right(d, True, **FLAGS))


def at_once(contexts, times=20):
    """Run on several contexts, in a thread each, at the same time."""
    errors, barrier = [], threading.Barrier(len(contexts))

    def work(number, context):
        try:
            d = draw((6, 5, 40), seed=18 + number)
            want = right(d, True, **FLAGS)
            barrier.wait()
            for i in range(times):
                check_right(run_on(context, d, True, list(WAYS)[i % len(WAYS)]), want)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=item, daemon=True) for item in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def test_cpu_and_gpu_at_once():
    at_once([CPU, GPU, CPU, GPU])


@two_gpus
def test_two_gpus_at_once():
    at_once([GPU, OTHER_GPU, GPU, OTHER_GPU])


# --------------------------------------------------------------------------------------- failures


def failure(code, **environment):
    """What a process prints that survives."""
    done = run_script("import mxnet as mx, mxbn\nfrom helpers import *\n" + code, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("alive\n")
    return done.stdout


RIGHT_ON = """
def right_on(context):
    d = draw((6, 3, 4))
    with context:
        a = arrays(d)
    with mx.autograd.record():
        y = call(d, a)
    y.backward(a.dy)
    want = right(d, True)
    check(y, want.output)
    check(a.x.grad, want.dx)
    check(a.moving_mean, want.moving_mean)
    check(a.moving_var, want.moving_var)
"""


@fake_gpu
@pytest.mark.parametrize("way", WAYS)
def test_failed_launch(way, monkeypatch):
    d = draw((6, 3, 4), seed=19)
    run_on(GPU, d)
    a = arrays_on(GPU, d)
    mx.nd.waitall()
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuLaunchKernel")
    with pytest.raises(mx.base.MXNetError) as error:
        run(way, d, a).asnumpy()
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    assert (
        "mxbn: BatchNorm: on gpu(0): mxbn_statistics_columns_float32: CUDA error 999 "
        "(unknown error)"
    ) in str(error.value)
    with contextlib.suppress(mx.base.MXNetError):  # of the backward, which depended on it
        mx.nd.waitall()
    check_right(run_on(GPU, d, True, way), right(d, True, **FLAGS))
    for name in ("moving_mean", "moving_var"):
        assert same_bits(getattr(a, name).copy(), getattr(d, name).astype("float32"))


@fake_gpu
@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"])
def test_failed_exchange_between_devices(function, monkeypatch):
    d = draw((6, 3, 4), seed=19)
    a = arrays_on(GPU, d)
    arrays = (a.x, a.gamma, a.beta, a.moving_mean, a.moving_var)

    def forward():
        return mxbn.nd.SyncBatchNorm(*arrays, key="failed", **FLAGS)

    mx.nd.waitall()
    monkeypatch.setenv("FAKE_CUDA_FAIL", function)
    with pytest.raises(mx.base.MXNetError, match=r"on gpu\(0\): .*CUDA error 999"):
        forward().asnumpy()
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()
    check(forward(), right(d, False, **FLAGS).output)


@fake_gpu
def test_failed_launch_of_backward(monkeypatch):
    d = draw((6, 3, 4), seed=20)
    a = arrays_on(GPU, d)
    with mx.autograd.record():
        output = call(d, a, **FLAGS)
    mx.nd.waitall()
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuLaunchKernel")
    output.backward(a.dy, retain_graph=True)
    with pytest.raises(mx.base.MXNetError, match=r"gpu\(0\): mxbn_backward_reduce_columns_float32"):
        a.x.grad.asnumpy()
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    output.backward(a.dy)
    check_right(results(a, output), right(d, True, **FLAGS))


@fake_gpu
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuInit", "cuInit: CUDA error 999"),
        ("cuDeviceGet", "cuDeviceGet: CUDA error 999"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain: CUDA error 999"),
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent: CUDA error 999"),
        ("cuModuleLoadData", "cuModuleLoadData of sm_80: CUDA error 999"),
        ("cuModuleGetFunction", "mxbn_statistics_columns_float32: CUDA error 999"),
    ],
)
def test_failed_start(function, message):
    """At the first use of the GPU; the next one works."""
    printed = failure(
        RIGHT_ON
        + f"""
import os
os.environ["FAKE_CUDA_FAIL"] = {function!r}
try:
    right_on(mx.gpu(0))
except mx.base.MXNetError as error:
    print(error)
try:
    mx.nd.waitall()  # also for the backward
except mx.base.MXNetError:
    pass
right_on(mx.cpu())
del os.environ["FAKE_CUDA_FAIL"]
right_on(mx.gpu(0))
print("alive")
"""
    )
    assert f"mxbn: BatchNorm: on gpu(0): {message}" in printed


@fake_gpu
@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ("3.5", "no kernels for fake GPU, whose compute capability is 3.5"),
        ("6.1", None),
        ("7.5", None),
        ("8.9", None),
        ("9.0", None),
        ("12.0", None),
    ],
)
def test_compute_capabilities(capability, message):
    printed = failure(
        RIGHT_ON
        + """
try:
    right_on(mx.gpu(0))
    print("right")
except mx.base.MXNetError as error:
    print(error)
right_on(mx.cpu())
print("alive")
""",
        FAKE_CUDA_COMPUTE_CAPABILITY=capability,
    )
    assert (message or "right") in printed


@fake_gpu
def test_gpus_of_two_kinds():
    failure(
        RIGHT_ON
        + """
for _ in range(2):
    right_on(mx.gpu(0))
    right_on(mx.gpu(1))
print("alive")
""",
        FAKE_CUDA_COMPUTE_CAPABILITY="6.0,8.6",
        FAKE_CUDA_DEVICES="2",
    )


@fake_gpu
def test_without_a_gpu():
    failure(
        RIGHT_ON + "assert mx.context.num_gpus() == 0\nright_on(mx.cpu())\nprint('alive')",
        FAKE_CUDA_DEVICES="0",
        MXBN_TEST_DEVICE="cpu",
    )


@fake_gpu
def test_without_a_usable_driver(tmp_path):
    """As with the library that CUDA's toolkit has for linking only."""
    sys.path.append(os.path.join(os.path.dirname(__file__), "cuda"))
    import fake_libraries

    taken = fake_libraries.taken(mx.base._LIB._name)[fake_libraries.DRIVER]
    fake_libraries.build_stub(tmp_path, fake_libraries.DRIVER, taken)
    printed = failure(
        RIGHT_ON
        + """
right_on(mx.cpu())
try:
    right_on(mx.gpu(0))
except mx.base.MXNetError as error:
    print(error)
right_on(mx.cpu())
print("alive")
""",
        LD_LIBRARY_PATH=f"{tmp_path}:{os.environ['LD_LIBRARY_PATH']}",
        MXBN_TEST_DEVICE="cpu",
    )
    assert "mxbn: BatchNorm: on gpu(0): the CUDA driver is too old: it lacks cuInit" in printed
