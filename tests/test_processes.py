"""The operator in processes of every kind: engines, threads, forks, imports, ends."""

import platform
import re
import shutil
import subprocess

import mxnet as mx
import pytest
from helpers import arrays, call, draw, run_script, same_bits

# Uses the operator in every way in which MXNet calls it, and compares with the reference.
USE = """
import mxnet as mx, numpy as np
import mxbn
from helpers import *

def use(shape=(6, 5, 4, 3), axis=1, dtype="float32", units=16):
    d = draw(shape, axis, dtype)
    for mode, (train, use_global_stats, use_batch_stats) in MODES.items():
        flags = {
            "use_global_stats": use_global_stats, "use_batch_stats": use_batch_stats,
            "fix_gamma": False, "eps": 0.25, "momentum": 0.75,
        }
        want = right(d, train, **flags)
        a = arrays(d)
        with mx.autograd.record(train_mode=train):
            output = call(d, a, **flags)
        output.backward(a.dy)
        got = [("imperative", output, a.x.grad, a.gamma.grad, a.beta.grad, a)]
        b = arrays(d)
        symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn", axis=axis, **flags)
        executor = symbol.bind(
            CONTEXT, [b.x, b.gamma, b.beta], [b.x.grad, b.gamma.grad, b.beta.grad],
            "write", [b.moving_mean, b.moving_var],
        )
        output = executor.forward(is_train=train)[0]
        if train:
            executor.backward(b.dy)
            got.append(("executor", output, b.x.grad, b.gamma.grad, b.beta.grad, b))
        c = arrays(d)
        graph = mx.nd.CachedOp(symbol)
        with mx.autograd.record(train_mode=train):
            output = graph(c.x, c.gamma, c.beta, c.moving_mean, c.moving_var)
        output.backward(c.dy)
        got.append(("hybridized", output, c.x.grad, c.gamma.grad, c.beta.grad, c))
        for how, output, dx, dgamma, dbeta, all in got:
            scale = np.sqrt(d.x.size // d.x.shape[axis]) * 10
            check(output, want.output, units, what=f"{how} {mode} output")
            check(dx, want.dx, units, what=f"{how} {mode} dx")
            check(dgamma, want.dgamma, units, scale, what=f"{how} {mode} dgamma")
            check(dbeta, want.dbeta, units, scale, what=f"{how} {mode} dbeta")
            check(all.moving_mean, want.moving_mean, units, what=f"{how} {mode} moving_mean")
            check(all.moving_var, want.moving_var, units, what=f"{how} {mode} moving_var")
        e, addend = arrays(d), nd(d.dy, dtype)
        addend.attach_grad()
        with mx.autograd.record(train_mode=train):
            output = call(d, e, act_type="relu", addend=addend, **flags)
        output.backward(e.dy)
        check(output, np.maximum(want.output + d.dy, 0), units, what=f"fused {mode} output")
        g = reference.let_through(d.dy, output.asnumpy())
        check(addend.grad, g, 0, what=f"fused {mode} gradient of addend")
        dx = right(d, train, dy=g, **flags).dx
        check(e.x.grad, dx, units, what=f"fused {mode} dx")
"""


def runs(code, timeout=100, **environment):
    """Run code, which must end with status 0 and 'done'; return what it printed."""
    result = run_script(code, timeout, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^done$", result.stdout, re.MULTILINE), result.stdout + result.stderr
    return result.stdout


# -------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    "engine",
    ["", "NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"],
    ids=lambda e: e or "-",
)
def test_engine(engine):
    environment = {"MXNET_ENGINE_TYPE": engine} if engine else {}
    runs(USE + "use(); use((2, 8, 40, 40)); use((40, 3), -1); print('done')", **environment)


def test_without_bulking():
    off = {
        "MXNET_EXEC_BULK_EXEC_INFERENCE": "0",
        "MXNET_EXEC_BULK_EXEC_TRAIN": "0",
        "MXNET_ENGINE_INFO": "0",
    }
    runs(USE + "use(); print('done')", **off)


MIRROR = """
from helpers import *

F = {"fix_gamma": False, "eps": 0.25, "momentum": 0.75}
d = draw((6, 5, 4, 3))
want = right(d, True, **F)
for forced in (None, "True", "False"):
    for way in ("executor", "graph"):
        a = arrays(d)
        with mx.AttrScope(**({} if forced is None else {"__force_mirroring__": forced})):
            symbol = mxbn.sym.BatchNorm(mx.sym.var("data") * 1, name="bn", **F)
            symbol = mx.sym.Activation(symbol + 100, act_type="relu")
        if way == "executor":
            executor = symbol.bind(
                CONTEXT, [a.x, a.gamma, a.beta], [a.x.grad, a.gamma.grad, a.beta.grad],
                "write", [a.moving_mean, a.moving_var],
            )
            executor.forward(is_train=True)
            executor.backward(a.dy)
        else:
            graph = mx.nd.CachedOp(symbol)
            with mx.autograd.record():
                output = graph(a.x, a.gamma, a.beta, a.moving_mean, a.moving_var)
            output.backward(a.dy)
        mx.nd.waitall()
        what = f"{way}, forced {forced}: "
        check(a.x.grad, want.dx, 32, what=what + "dx")
        check(a.moving_mean, want.moving_mean, 8, what=what + "moving_mean")
        check(a.moving_var, want.moving_var, 8, what=what + "moving_var")
print("done")
"""


@pytest.mark.parametrize("option", ["MXNET_BACKWARD_DO_MIRROR", "MXNET_MEMORY_OPT", "NONE"])
@pytest.mark.mxnet_operators
def test_recomputation_does_not_step_twice(option):
    """MXNet can drop results of a forward and compute them again in the backward."""
    runs("import mxnet as mx\nimport mxbn" + MIRROR, **{option: "1"})


@pytest.mark.cpu
def test_instruction_sets_give_right_values():
    """Each set that this processor has, and the request for more than it has."""
    ran = []
    for name in ("baseline", "avx2", "avx512"):
        printed = runs(
            USE
            + """
for dtype, units in (("float16", 16), ("float32", 16), ("float64", 16)):
    for shape, axis in (
        ((6, 5, 4, 3), 1), ((3, 7, 33), 1), ((37, 19), 1), ((5, 3, 130), 2), ((2, 3, 70000), 1),
        ((1, 1, 1), 1), ((9,), 0),
    ):
        use(shape, axis, dtype, units)
print("ran", mxbn._library.instruction_set())
print("done")
""",
            MXBN_INSTRUCTION_SET=name,
        )
        ran.append(re.search(r"^ran (\w+)$", printed, re.MULTILINE).group(1))
    with open("/proc/cpuinfo") as file:
        flags = set(re.search(r"^flags\s*: (.*)$", file.read(), re.MULTILINE).group(1).split())
    avx2 = "avx2" if flags >= {"avx2", "fma", "f16c"} else "baseline"
    avx512 = flags >= {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
    assert ran == ["baseline", avx2, "avx512" if avx512 else avx2]


# -------------------------------------------------------------------------- the same bits, always

HASHES = """
import hashlib
import mxnet as mx
import mxbn
from helpers import *

for shape, axis in (
    ((32, 7, 11, 13), 1),   # rows, some channels
    ((2, 3, 40000), 1),     # few channels with much data
    ((1, 1, 300000), 1),    # one channel
    ((4, 2, 70001), 1),     # rows longer than a piece
    ((8, 1500, 7), 1),      # many channels, short rows
    ((64, 128, 5, 5), 1),
    ((24, 14, 14, 65), -1), # channels last
    ((50001, 3), -1),       # channels last, few channels with much data
    ((70, 5000), -1),       # channels last, many channels
    ((33, 1029), 0),        # channels first
):
    for dtype in DTYPES:
        d = draw(shape, axis, dtype, mean=3)
        for train in (True, False):
            a = arrays(d)
            with mx.autograd.record(train_mode=train):
                output, mean, inv_std = call(d, a, fix_gamma=False, output_mean_var=True)
                variables = [a.x, a.gamma, a.beta]
                gradients = mx.autograd.grad(output, variables, a.dy, create_graph=True)
            mx.autograd.backward(gradients, variables)  # second derivatives
            hash = hashlib.sha256()
            for value in (
                output, mean, inv_std, *gradients, a.x.grad, a.gamma.grad, a.moving_mean,
                a.moving_var,
            ):
                hash.update(value.asnumpy().tobytes())
            with mx.autograd.record(train_mode=train):
                output = call(d, a, fix_gamma=False, act_type="relu", addend=a.dy)
            output.backward(a.dy)
            for value in (output, a.x.grad, a.gamma.grad, a.beta.grad):
                hash.update(value.asnumpy().tobytes())
            print("hash", shape, axis, dtype, train, hash.hexdigest())
print("done")
"""


@pytest.mark.cpu
def test_same_bits_for_every_number_of_threads():
    printed = {n: runs(HASHES, OMP_NUM_THREADS=str(n), OMP_DYNAMIC="false") for n in (1, 2, 4, 7)}
    assert printed[1].count("hash") == 60
    for threads in (2, 4, 7):
        assert printed[threads] == printed[1]


@pytest.mark.cpu
def test_same_bits_with_mxnets_limit_on_threads():
    limits = {"MXNET_OMP_MAX_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "4"}
    assert runs(HASHES, **limits) == runs(HASHES, MXNET_ENGINE_TYPE="NaiveEngine")


@pytest.mark.parametrize(
    ("shape", "axis"), [((8, 5, 40, 41), 1), ((9000, 6), 1)], ids=["rows", "columns"]
)
def test_same_bits_in_100_runs(shape, axis):
    d = draw(shape, axis)
    first = None
    for _ in range(100):
        a = arrays(d)
        with mx.autograd.record():
            output = call(d, a, fix_gamma=False)
        output.backward(a.dy)
        got = [output, a.x.grad, a.gamma.grad, a.beta.grad, a.moving_mean, a.moving_var]
        got = [array.asnumpy() for array in got]
        first = first or got
        assert all(same_bits(g, f) for g, f in zip(got, first))


# --------------------------------------------------------------------------------- ends of a life

ENDS = {
    "after use": "use()",
    "after waiting": "use()\nmx.nd.waitall()",
    "after the error of a call": """
try:
    mxbn.nd.BatchNorm(mx.nd.ones((8, 4)), *[mx.nd.ones(3)] * 4)
except ValueError:
    print("refused")
""",
    "after the error of a bind": """
try:
    mxbn.sym.BatchNorm(mx.sym.var("x"), name="bn").simple_bind(CONTEXT, x=(8,))
except RuntimeError:
    print("refused")
""",
    # MXNet takes (0,) for an unknown shape, so the operator itself refuses it, in the engine.
    "after an error in the engine": """
a, zero = mx.nd.ones(4), mx.nd.array(np.zeros(0))
symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn")
executor = symbol.bind(CONTEXT, [mx.nd.ones((8, 4)), zero, a], aux_states=[a, a])
executor.forward(is_train=True)
""",
    "after an error in the engine, caught": """
a, zero = mx.nd.ones(4), mx.nd.array(np.zeros(0))
symbol = mxbn.sym.BatchNorm(mx.sym.var("data"), name="bn")
executor = symbol.bind(CONTEXT, [mx.nd.ones((8, 4)), zero, a], aux_states=[a, a])
try:
    executor.forward(is_train=True)[0].asnumpy()
except mx.base.MXNetError:
    print("refused")
use()
""",
    "with pending work": """
d = draw((64, 64, 56, 56))
a = arrays(d)
for _ in range(5):
    with mx.autograd.record():
        output = call(d, a)
    output.backward(a.dy)
""",
    "inside record": """
import sys
print("done", flush=True)
with mx.autograd.record():
    x = mx.nd.ones((8, 4))
    x.attach_grad()
    y = mxbn.nd.BatchNorm(x, *[mx.nd.ones(4)] * 4)
    sys.exit(0)
""",
    "with live objects": """
import builtins
net = mxbn.gluon.BatchNorm()
net.initialize()
net.hybridize(static_alloc=True)
with mx.autograd.record():
    y = net(mx.nd.ones((8, 4)))
builtins.kept = net, y, mxbn.sym.BatchNorm(mx.sym.var("x")).simple_bind(CONTEXT, x=(8, 4))
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_ends_with_status_0(end):
    printed = runs(USE + ENDS[end] + "\nprint('done')")
    assert "refused" in printed or "refused" not in ENDS[end]


@pytest.mark.parametrize("end", ["after use", "inside record", "with live objects"])
def test_ends_with_status_0_without_threads(end):
    runs(USE + ENDS[end] + "\nprint('done')", MXNET_ENGINE_TYPE="NaiveEngine")


def test_uncaught_error_ends_with_status_1():
    result = run_script(
        "import mxnet as mx, mxbn\nmxbn.nd.BatchNorm(mx.nd.ones((8, 4)), *[mx.nd.ones(3)] * 4)"
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ValueError: mxbn: BatchNorm: gamma has shape (3,), expected (4,): data (8, 4) has 4 "
        "channels on axis 1"
    )


@pytest.mark.skipif(shutil.which("localedef") is None, reason="needs localedef")
def test_language_with_a_decimal_comma(tmp_path):
    """As graphical toolkits set it: numbers among the attributes keep their points."""
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if made.returncode != 0:
        pytest.skip("no source of a locale")
    code = """
import locale
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","
"""
    runs(code + USE + "use()\nprint('done')", LOCPATH=str(tmp_path))


# ---------------------------------------------------------------------------------------- importing


IMPORTS = {
    "inside record": """
import mxnet as mx
x = mx.nd.ones(3)
x.attach_grad()
with mx.autograd.record():
    y = x * 2
    import mxbn
    assert mx.autograd.is_recording() and mx.autograd.is_training()
    z = y * 3
z.backward()
assert x.grad.asnumpy().tolist() == [6, 6, 6]
""",
    "inside record of inference": """
import mxnet as mx
with mx.autograd.record(train_mode=False):
    import mxbn
    assert mx.autograd.is_recording() and not mx.autograd.is_training()
""",
    "in NumPy mode": """
import mxnet as mx
mx.npx.set_np()
import mxbn
assert mx.npx.is_np_array() and mx.npx.is_np_shape()
y = mxbn.nd.BatchNorm(mx.np.ones((8, 4)), *[mx.np.ones(4) for _ in range(4)])
assert type(y) is mx.np.ndarray
mx.npx.reset_np()
""",
    "in NumPy mode of shapes": """
import mxnet as mx
with mx.util.np_shape(True):
    import mxbn
    assert mx.npx.is_np_shape() and not mx.npx.is_np_array()
""",
    "under names and attributes": """
import mxnet as mx
with mx.name.Prefix("p_"), mx.AttrScope(ctx_group="g"), mx.engine.bulk(4):
    import mxbn
""",
    "with another default context": """
import mxnet as mx
with mx.cpu(1):
    import mxbn
""",
    "before mxnet": "import mxbn\nimport mxnet as mx",
    "twice": """
import mxbn, sys
first = mxbn
for name in [name for name in sys.modules if name.split(".")[0] == "mxbn"]:
    del sys.modules[name]
import mxbn
assert mxbn is not first
import mxnet as mx
assert mx.nd.mxbn_BatchNorm is mxbn.nd.BatchNorm
""",
    "reloaded": """
import importlib, mxbn, mxbn._library, mxbn.nd, mxbn.sym, mxbn.gluon
for module in (mxbn, mxbn._library, mxbn.nd, mxbn.sym, mxbn.gluon, mxbn._library, mxbn):
    importlib.reload(module)
""",
    "in a thread": """
import threading
def work():
    import mxbn
thread = threading.Thread(target=work)
thread.start()
thread.join(60)
assert not thread.is_alive()
""",
    "in several threads at once": """
import threading
barrier = threading.Barrier(4)
modules = []
def work():
    barrier.wait()
    import mxbn
    modules.append(mxbn)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert len(modules) == 4 and all(module is modules[0] for module in modules)
""",
    "in a forked child": """
import mxnet as mx
mx.nd.ones(4).asnumpy()
import os
pid = os.fork()
if pid == 0:
    import mxbn
    exec(use_it)
    os._exit(7)
assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 7
""",
}


@pytest.mark.parametrize("way", IMPORTS)
def test_import(way):
    """The package comes in without a trace in the modes of the importing code, and works."""
    use_it = USE + "use()\n"
    runs(f"use_it = {use_it!r}\n" + IMPORTS[way] + "\nexec(use_it)\nprint('done')")


# ------------------------------------------------------------------------------------------ forks

# Sizes with and without threads of OpenMP, which do not survive a fork.
FORK = """
import multiprocessing, os, signal
signal.alarm(90)  # a hang ends the process
context = multiprocessing.get_context("fork")

def work(queue):
    use()
    use((8, 6, 70, 70), units=32)
    queue.put("child")

def fork(generations=1):
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == "child"
    child.join(60)
    assert child.exitcode == 0, child.exitcode
"""


@pytest.mark.parametrize("engine", ["ThreadedEnginePerDevice", "NaiveEngine"])
@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.cpu
def test_fork(engine, threads):
    runs(
        USE
        + FORK
        + """
fork()                              # before use
use()
use((8, 6, 70, 70), units=32)
fork()                              # after use
a = arrays(draw((16, 16, 70, 70)))
with mx.autograd.record():
    output = mxbn.nd.BatchNorm(a.x, a.gamma, a.beta, a.moving_mean, a.moving_var)
output.backward(a.dy)
fork()                              # with pending work
use((8, 6, 70, 70), units=32)       # and the parent goes on
if os.fork() == 0:                  # a child of a child
    fork()
    os._exit(7)
assert os.WEXITSTATUS(os.wait()[1]) == 7
print("done")
""",
        MXNET_ENGINE_TYPE=engine,
        OMP_NUM_THREADS=threads,
    )


@pytest.mark.cpu
def test_fork_pool():
    """As data loaders do, while the parent computes."""
    runs(
        USE
        + FORK
        + """
def item(seed):
    d = draw((8, 6, 70, 70), seed=seed)
    a = arrays(d)
    with mx.autograd.record():
        output = call(d, a)
    output.backward(a.dy)
    want = right(d, True)
    check(output, want.output, 16)
    check(a.x.grad, want.dx, 16)
    return seed

use((8, 6, 70, 70), units=32)
pool = context.Pool(3)
pending = pool.map_async(item, range(12))
for _ in range(5):
    use((8, 6, 70, 70), units=32)
assert pending.get(60) == list(range(12))
pool.close()
pool.join()
print("done")
""",
        OMP_NUM_THREADS="4",
    )


def test_spawned_process(tmp_path):
    script = tmp_path / "spawn.py"
    body = (
        USE
        + """
def work(queue):
    use()
    queue.put("child")

if __name__ == "__main__":
    import multiprocessing
    use()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == "child"
    child.join(60)
    assert child.exitcode == 0
    print("done")
"""
    )
    script.write_text(body)
    runs(f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')")


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_the_library_is_loaded_once():
    runs(
        """
        import mxbn
        with open("/proc/self/maps") as file:
            files = {line.split()[-1] for line in file if ".so" in line}
        for name in ("libmxbn.so", "libmxnet.so"):
            assert sum(path.endswith("/" + name) for path in files) == 1, (name, files)
        print("done")
        """
    )
