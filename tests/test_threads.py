"""Many threads, many iterations: right values, no deadlock, no leak."""

import gc
import os
import threading

import mxnet as mx
import numpy as np
import pytest
from helpers import CONTEXT, arrays, call, check, draw, right, run_script, same_bits

import mxbn

pytestmark = pytest.mark.timeout(120)  # a deadlock fails the test

THREADS = 4
FLAGS = {"fix_gamma": False, "eps": 0.25, "momentum": 0.75}


def resident_memory():
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_threads(work):
    """Run work(0) ... work(THREADS - 1) in a thread each; raise what one of them raised."""
    errors = []
    barrier = threading.Barrier(THREADS)

    def run(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def own_data(shape, axis):
    """Drawings with parameters in common, and the same values in another order for each thread.

    So whatever the order in which the threads step the moving statistics, they end up the same.
    """
    drawings = []
    for number in range(THREADS):
        d = draw(shape, axis)
        rows = np.moveaxis(d.x, axis, 0).reshape(shape[axis], -1)
        rows = rows[:, np.random.RandomState(number).permutation(rows.shape[1])]
        moved = [shape[axis], *np.delete(shape, axis)]
        d.x = np.moveaxis(rows.reshape(moved), 0, axis).copy()
        d.dy = draw(shape, axis, seed=100 + number).dy
        drawings.append(d)
    return drawings


def stepped(d, times):
    """Return the moving statistics after as many steps, each rounded to float32."""
    for _ in range(times):
        want = right(d, True, **FLAGS)
        d.moving_mean = want.moving_mean.astype("float32").astype("float64")
        d.moving_var = want.moving_var.astype("float32").astype("float64")
    return d.moving_mean, d.moving_var


@pytest.mark.parametrize(
    ("shape", "axis", "times"),
    [((4, 3, 5), 1, 60), ((16, 8, 40, 40), 1, 8), ((600, 100), -1, 20)],
    ids=["small", "rows", "columns"],
)
def test_shared_parameters(shape, axis, times):
    """Every thread has its own data; parameters, their gradients and statistics are shared."""
    drawings = own_data(shape, axis)
    shared = arrays(drawings[0], "add")
    turn = threading.Lock()

    def work(number):
        d = drawings[number]
        want = right(d, True, **FLAGS)
        own = arrays(d)
        own.gamma, own.beta = shared.gamma, shared.beta
        own.moving_mean, own.moving_var = shared.moving_mean, shared.moving_var
        for _ in range(times):
            with mx.autograd.record():
                output = call(d, own, **FLAGS)
            # MXNet's engine deadlocks, with any operator, where two threads enter operations that
            # write the same two arrays, here the gradients of gamma and beta.
            with turn:
                output.backward(own.dy)
            check(output, want.output, 16, what="output")
            check(own.x.grad, want.dx, 32, what="dx")

    in_threads(work)
    mx.nd.waitall()
    wanted = [right(d, True, **FLAGS) for d in drawings]
    check(shared.gamma.grad, times * sum(w.dgamma for w in wanted), 100 * times, what="dgamma")
    check(shared.beta.grad, times * sum(w.dbeta for w in wanted), 100 * times, what="dbeta")
    mean, var = stepped(drawings[0], times * THREADS)
    check(shared.moving_mean, mean, 16, what="moving_mean")
    check(shared.moving_var, var, 16, what="moving_var")


@pytest.mark.slow
def test_many_calls_on_the_same_statistics():
    """MXNet's own operators that write two arrays deadlock here, at every run."""
    done = run_script(
        """
        import threading
        import mxnet as mx, mxbn

        parameters = [mx.nd.ones(64) for _ in range(4)]

        def work():
            data = mx.nd.ones((4, 64))
            with mx.autograd.train_mode():
                for _ in range(5000):
                    mxbn.nd.BatchNorm(data, *parameters)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mx.nd.waitall()
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr


def test_every_thread_its_own_mode():
    """Modes and flags belong to a call, not to the process."""
    d = draw((6, 5, 4, 3))

    def work(number):
        train, flags = ((True, {}), (False, {}), (True, {"use_global_stats": True}),
                        (False, {"use_batch_stats": True}))[number % 4]  # fmt: skip
        want = right(d, train, **FLAGS, **flags)
        for _ in range(100):
            a = arrays(d)
            with mx.autograd.record(train_mode=train):
                output = call(d, a, **FLAGS, **flags)
            output.backward(a.dy)
            check(output, want.output, 16)
            check(a.x.grad, want.dx, 32)
            check(a.moving_mean, want.moving_mean)

    in_threads(work)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static_alloc"])
def test_every_thread_its_own_hybridized_layer_or_executor(static):
    d = draw((6, 5, 4, 3))
    want = right(d, True, **FLAGS)
    symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", **FLAGS)

    def work(number):
        a = arrays(d)
        if number % 2:
            flags = [("static_alloc", static), ("static_shape", static)]
            graph = mx.nd.CachedOp(symbol, flags)
        else:
            executor = symbol.bind(
                CONTEXT, [a.x, a.gamma, a.beta], [a.x.grad, a.gamma.grad, a.beta.grad],
                aux_states=[a.moving_mean, a.moving_var],
            )  # fmt: skip
        for _ in range(100):
            if number % 2:
                with mx.autograd.record():
                    statistics = a.moving_mean.detach(), a.moving_var.detach()
                    output = graph(a.x, a.gamma, a.beta, *statistics)
                output.backward(a.dy)
            else:
                output = executor.forward(is_train=True)[0]
                executor.backward(a.dy)
            check(output, want.output, 16)
            check(a.x.grad, want.dx, 32)
            check(a.gamma.grad, want.dgamma, 128)

    in_threads(work)


def test_errors_in_one_thread_leave_the_others_alone():
    d = draw((6, 5, 4, 3))
    want = right(d, True, **FLAGS)

    def work(number):
        a = arrays(d)
        for _ in range(100):
            if number % 2:
                with pytest.raises(ValueError, match="gamma has shape"):
                    mxbn.nd.BatchNorm(a.x, mx.nd.ones(3), a.beta, a.moving_mean, a.moving_var)
            else:
                with mx.autograd.record():
                    output = call(d, a, **FLAGS)
                output.backward(a.dy)
                check(output, want.output, 16)
                check(a.x.grad, want.dx, 32)

    in_threads(work)


# MXNet has one worker for a CPU unless it is told otherwise; NaiveEngine runs an operator in the
# thread that calls it, without Python's lock. Only so do several calls run at the same time.
@pytest.mark.parametrize(
    ("environment", "tests"),
    [
        ({"MXNET_CPU_WORKER_NTHREADS": "4"}, "shared_parameters or every_thread or errors_in"),
        ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, "every_thread or errors_in"),
    ],
    ids=["workers", "NaiveEngine"],
)
def test_calls_at_the_same_time(environment, tests):
    result = run_script(
        f"""
        import sys, pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", {tests!r}, {__file__!r}]))
        """,
        OMP_NUM_THREADS="1",
        **environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "parallel"])
def test_nodes_that_share_statistics(chained):
    """Two nodes of one executor with the same parameters and statistics: each steps them."""
    d = draw((16, 8, 20, 20))
    names = ("gamma", "beta", "moving_mean", "moving_var")
    shared = {name: mx.sym.var(name) for name in names}
    x = mx.sym.var("data")
    first = mxbn.sym.BatchNorm(x, **shared, name="first", **FLAGS)
    second = mxbn.sym.BatchNorm(first if chained else x * 2, **shared, name="second", **FLAGS)
    a = arrays(d)
    executor = mx.sym.Group([first, second]).bind(
        CONTEXT,
        {"data": a.x, "gamma": a.gamma, "beta": a.beta},
        aux_states={"moving_mean": a.moving_mean, "moving_var": a.moving_var},
    )
    for _ in range(20):
        want = right(d, True, **FLAGS)
        next_d = draw((16, 8, 20, 20))
        next_d.x = want.output if chained else 2 * d.x
        next_d.moving_mean, next_d.moving_var = want.moving_mean, want.moving_var
        want_second = right(next_d, True, **FLAGS)
        outputs = executor.forward(is_train=True)
        check(outputs[0], want.output, 16)
        check(outputs[1], want_second.output, 64)
        d.moving_mean, d.moving_var = want_second.moving_mean, want_second.moving_var
    check(a.moving_mean, d.moving_mean, 64)
    check(a.moving_var, d.moving_var, 64)


# --------------------------------------------------------------------------- a thousand iterations


def flat_memory(iteration, times, warm_up, at_most):
    """Check that iteration(i), times times after a warm-up, takes at_most MiB more memory."""
    for i in range(warm_up):
        iteration(i)
    mx.nd.waitall()
    gc.collect()
    before = resident_memory()
    for i in range(times):
        iteration(i)
    mx.nd.waitall()
    gc.collect()
    grown = resident_memory() - before
    assert grown <= at_most, f"{grown:.1f} MiB more after {times} iterations"


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 2000, 2), 1), ((2, 20, 400), 1)], ids=["columns", "rows"]
)
@pytest.mark.slow
def test_a_thousand_iterations(shape, axis):
    """Imperative, hybridized and bound in turn; every value as in the first round."""
    d = draw(shape, axis)
    symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", axis=axis, **FLAGS)
    graphs = [mx.nd.CachedOp(symbol), mx.nd.CachedOp(symbol, [("static_alloc", True)])]
    a = arrays(d)
    executor = symbol.bind(
        CONTEXT, [a.x, a.gamma, a.beta], [a.x.grad, a.gamma.grad, a.beta.grad],
        aux_states=[a.moving_mean, a.moving_var],
    )  # fmt: skip
    start = a.moving_mean.copy(), a.moving_var.copy()
    want = right(d, True, **FLAGS)
    first = []

    def iteration(i):
        way = i % 4
        start[0].copyto(a.moving_mean)
        start[1].copyto(a.moving_var)
        if way == 3:
            mx.nd.waitall()  # an executor does not wait for the statistics
            output = executor.forward(is_train=True)[0]
            executor.backward(a.dy)
        else:
            with mx.autograd.record():
                if way == 2:
                    output = call(d, a, **FLAGS)
                else:
                    output = graphs[way](
                        a.x, a.gamma, a.beta, a.moving_mean.detach(), a.moving_var.detach()
                    )
            output.backward(a.dy)
        got = [output, a.x.grad, a.gamma.grad, a.beta.grad, a.moving_mean, a.moving_var]
        got = [array.asnumpy() for array in got]
        if not first:
            for value, right_value in zip(got[:2], (want.output, want.dx)):
                check(value, right_value, 32)
            first.extend(got)
        assert all(same_bits(g, f) for g, f in zip(got, first)), f"iteration {i}"

    flat_memory(iteration, times=1000, warm_up=200, at_most=4)


@pytest.mark.slow
def test_many_small_calls_take_no_memory():
    """A leak of 200 bytes per call shows."""
    d = draw((2, 3))
    a = arrays(d)

    def iteration(_):
        with mx.autograd.record():
            output = call(d, a, **FLAGS)
        output.backward(a.dy)
        output.wait_to_read()

    flat_memory(iteration, times=10000, warm_up=2000, at_most=2)


def test_refused_calls_take_no_memory():
    d = draw((2, 3))
    a = arrays(d)
    bad = mx.nd.ones(4)

    def iteration(_):
        with pytest.raises(ValueError, match="gamma has shape"):
            mxbn.nd.BatchNorm(a.x, bad, a.beta, a.moving_mean, a.moving_var)
        with pytest.raises(ValueError, match="eps is"):
            mxbn.nd.BatchNorm(a.x, a.gamma, a.beta, a.moving_mean, a.moving_var, eps=-1)

    # MXNet itself forgets the outputs of a refused call, 240 bytes each, whatever the operator.
    flat_memory(iteration, times=3000, warm_up=1000, at_most=3000 * 4 * 240 / 2**20 + 1)


@pytest.mark.slow
def test_symbols_and_executors_take_no_memory():
    def iteration(_):
        symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", eps=0.25)
        symbol = mx.sym.load_json(symbol.tojson())
        executor = symbol.simple_bind(CONTEXT, data=(2, 3))
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((2, 3)))
        mx.nd.waitall()  # executors at work keep their memory

    flat_memory(iteration, times=1000, warm_up=500, at_most=4)


def test_layers_take_no_memory():
    """A layer that is gone leaves nothing behind, also after its flags were changed."""
    x = mx.nd.ones((2, 3))

    def iteration(_):
        layer = mxbn.gluon.BatchNorm(in_channels=3, prefix="bn_")
        layer.initialize()
        layer.hybridize()
        with mx.autograd.record():
            layer(x).backward()
        layer.use_global_stats = True
        layer(x).wait_to_read()

    flat_memory(iteration, times=100, warm_up=50, at_most=4)
