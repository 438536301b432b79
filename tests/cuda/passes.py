"""Runs passes on the fake GPU, through the exports of the library, in a process of their own."""

import ctypes
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np

GUARD = 64  # bytes around each array that nothing may change
DEVICES = 16
RESULTS = ("y", "mean", "inv_std", "x", "gamma", "beta")  # of forward, and the gradients
OF_DATA = ("x", "y", "addend")  # results of the shape of data
SECOND = ("dy", "x", "gamma")  # that the second derivatives are for


def start_process(driver, capabilities="8.0"):
    """A process with a fake driver, whose submit(f, ...) runs f there: a crash stays there too."""
    return ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _load, (str(driver), capabilities)
    )


def _load(driver, capabilities):
    os.environ["FAKE_CUDA_DEVICES"] = str(DEVICES)
    os.environ["FAKE_CUDA_COMPUTE_CAPABILITY"] = capabilities
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)  # dlopen("libcuda.so.1") now finds this one


class Memory:
    """Arrays in the memory of the fake GPU, filled with what is NaN in every type."""

    def __init__(self):
        self._blocks = []

    def empty(self, shape, dtype, offset=0):
        """An array whose address is `offset` values beyond a multiple of 16 bytes."""
        item = np.dtype(dtype).itemsize
        size, skipped = math.prod(shape) * item, offset * item
        block = np.full(GUARD + 16 + skipped + size + GUARD, 0xFF, "uint8")
        start = GUARD + -(block.ctypes.data + GUARD) % 16 + skipped
        self._blocks.append((block, start, start + size))
        return block[start : start + size].view(dtype).reshape(shape)

    def array(self, values, dtype, offset=0):
        result = self.empty(values.shape, dtype, offset)
        result[...] = values
        return result

    def allocate(self, count):
        return self.empty((count,), "float64").ctypes.data

    def check(self):
        for block, start, end in self._blocks:
            assert (block[:start] == 0xFF).all(), "a kernel wrote before an array"
            assert (block[end:] == 0xFF).all(), "a kernel wrote beyond an array"


def address(array):
    return None if array is None or array.size == 0 else array.ctypes.data


def run(
    d, is_train, requests=None, fill=0.0, offset=0, in_place=False, device=0, seed=0,
    act_type=None, with_addend=False, spread=False, **attributes,
):  # fmt: skip
    """Forward and backward of a drawing: what they write, under the names of test_operator.

    requests are "write" (the default), "add" or "null", per result; fill is what results that are
    added to hold before. With in_place, y is written over x. The addend is the drawing's; its
    gradient is asked for where there is a ReLU. With spread, data is one of two parts of a batch,
    of which the other is the same.
    """
    os.environ["MXBN_EMULATION_SEED"] = str(seed)
    names = (*RESULTS, "addend") if act_type and with_addend else RESULTS
    memory, requests = Memory(), {**dict.fromkeys(names, "write"), **(requests or {})}
    inputs = SimpleNamespace(
        x=memory.array(d.x, d.dtype, offset),
        dy=memory.array(d.dy, d.dtype, offset),
        addend=memory.array(d.addend, d.dtype, offset) if with_addend else None,
        relu=bool(act_type),
        **{
            name: memory.array(getattr(d, name), d.param)
            for name in ("gamma", "beta", "moving_mean", "moving_var")
        },
        saved=memory.empty((2 * len(d.gamma) + 1,), "float64"),
        counters=memory.array(np.zeros(4), "int64"),
    )
    results = {}
    for name in names:
        request, of_data = requests[name], name in OF_DATA
        array = memory.empty(
            d.shape if of_data else d.gamma.shape,
            d.dtype if of_data else d.param,
            offset if of_data else 0,
        )
        if request == "add":
            array[...] = fill
        results[name] = None if request == "null" else array
    if in_place:
        results["y"] = inputs.x
    inputs.part = memory.empty((2 * len(d.gamma) + 2,), "float64") if spread else None
    plan = _forward(d, is_train, inputs, results, requests, memory, device, **attributes)
    if in_place:
        results["y"] = memory.array(inputs.x, d.dtype, offset)
        inputs.x[...] = d.x
    stepped = inputs.moving_mean.copy(), inputs.moving_var.copy()
    inputs.moving_mean[...] = inputs.moving_var[...] = np.nan  # of no use to backward
    _backward(d, inputs, results, requests, memory, device, attributes.get("fix_gamma", True))
    memory.check()
    for name in ("x", "dy", "gamma", "beta"):
        array = getattr(inputs, name)
        np.testing.assert_array_equal(array, getattr(d, name).astype(array.dtype), name)
    return SimpleNamespace(
        **{name: results[name] for name in ("y", "mean", "inv_std")},
        **{
            name: SimpleNamespace(grad=results.get(name))
            for name in ("x", "gamma", "beta", "addend")
        },
        saved=inputs.saved,
        counters=list(inputs.counters),
        moving_mean=stepped[0],
        moving_var=stepped[1],
        plan=plan,
    )


def _forward(
    d, is_train, inputs, results, requests, memory, device, *,
    fix_gamma=True, eps=1e-3, momentum=0.9, use_global_stats=False, use_batch_stats=False,
    step_global_stats=False,
):  # fmt: skip
    from mxbn import _gpu  # in this process alone

    arguments = _gpu.Arguments(
        **_common(d, inputs, fix_gamma),
        **_results(("y", "mean", "inv_std"), results, requests),
        beta=address(inputs.beta),
        moving_mean=address(inputs.moving_mean),
        moving_var=address(inputs.moving_var),
        eps=eps,
        momentum=momentum,
        use_batch=use_batch_stats or (is_train and not use_global_stats),
        step=is_train and (step_global_stats or not use_global_stats),
        counters=address(inputs.counters),
        fused=address(inputs.addend),
        relu=inputs.relu,
    )
    if inputs.part is not None:
        part = _gpu.Arguments(
            **{**_common(d, inputs, fix_gamma), "saved": memory.allocate(2 * len(d.gamma) + 1)},
            eps=eps,
            use_batch=arguments.use_batch,
            part=address(inputs.part),
        )
        _gpu.forward(part, d.dtype, memory.allocate, device=device)
        inputs.part[-2] *= 2
        arguments.batch = address(inputs.part)
    _gpu.forward(arguments, d.dtype, memory.allocate, device=device)
    return {
        "form": "columns" if arguments.columns else "rows",
        "vectors": bool(arguments.vectors),
        "splits": arguments.splits,
    }


def _backward(d, inputs, results, requests, memory, device, fix_gamma):
    from mxbn import _gpu

    arguments = _gpu.Arguments(
        **_common(d, inputs, fix_gamma),
        **_results(("x", "gamma", "beta"), results, requests),
        dy=address(inputs.dy),
        fused=address(results["y"]) if inputs.relu else None,
        daddend=address(results.get("addend")),
        daddend_add=requests.get("addend") == "add",
    )
    if inputs.part is not None:
        out, arguments.out, arguments.part = arguments.out, None, address(inputs.part)
        _gpu.backward(arguments, d.dtype, memory.allocate, device=device)
        inputs.part[:-1] *= 2
        arguments = _gpu.Arguments(
            **_common(d, inputs, fix_gamma),
            dy=address(inputs.dy),
            out=out,
            out_add=requests["x"] == "add",
            batch=address(inputs.part),
        )
    _gpu.backward(arguments, d.dtype, memory.allocate, device=device)


def _view(d):
    axis = d.axis % len(d.shape)
    return {
        "outer": math.prod(d.shape[:axis]),
        "channels": d.shape[axis],
        "inner": math.prod(d.shape[axis + 1 :]),
    }


def _common(d, inputs, fix_gamma):
    return {
        **_view(d),
        "x": address(inputs.x),
        "gamma": None if fix_gamma else address(inputs.gamma),
        "saved": address(inputs.saved),
    }


def _results(names, results, requests):
    fields = {}
    for field, name in zip(("out", "first", "second"), names):
        fields[field] = address(results[name])
        fields[field + "_add"] = requests[name] == "add"
    return fields


def run_second(
    d, heads, kept, requests=None, fill=0.0, offset=0, fix_gamma=False, device=0, seed=0
):
    """The gradients for dy, x and gamma, of what a forward kept, under these names."""
    from mxbn import _gpu

    os.environ["MXBN_EMULATION_SEED"] = str(seed)
    memory, requests = Memory(), {**dict.fromkeys(SECOND, "write"), **(requests or {})}
    saved = np.concatenate([kept.mean, kept.inv_std, [kept.used_batch]])
    inputs = {
        "x": memory.array(d.x, d.dtype, offset),
        "dy": memory.array(d.dy, d.dtype, offset),
        "ddx": memory.array(heads[0], d.dtype, offset),
        "ddgamma": memory.array(heads[1], d.param),
        "ddbeta": memory.array(heads[2], d.param),
        "gamma": None if fix_gamma else memory.array(d.gamma, d.param),
        "saved": memory.array(saved, "float64"),
    }
    before = {name: array.copy() for name, array in inputs.items() if array is not None}
    results = {}
    for name, request in requests.items():
        array = memory.empty(*((d.gamma.shape, d.param) if name == "gamma" else (d.shape, d.dtype)))
        array[...] = fill
        results[name] = None if request == "null" else array
    fields = {}
    for field, name in (("for_dy", "dy"), ("out", "x"), ("first", "gamma")):
        fields[field] = address(results[name])
        fields[field + "_add"] = requests[name] == "add"
    arguments = _gpu.Arguments(
        **_view(d),
        **{name: address(array) for name, array in inputs.items()},
        **fields,
        second_order=1,
    )
    _gpu.second(arguments, d.dtype, memory.allocate, device=device)
    memory.check()
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array, name)
    return results, arguments.splits


def describe(number):
    """The image that a GPU gets, or what is wrong."""
    from mxbn import _gpu

    try:
        return _gpu.describe(number).image.decode()
    except RuntimeError as error:
        return str(error)


def variance_by_one_block(values):
    """The variance of a channel of float32 values, all added up by the threads of one block."""
    from mxbn import _gpu, _library

    memory, dtype = Memory(), _gpu.DTYPES.index("float32")
    moving_var = memory.array(np.zeros(1), "float32")
    arguments = _gpu.Arguments(
        outer=1,
        channels=1,
        inner=len(values),
        x=address(memory.array(values, "float32")),
        beta=address(memory.array(np.zeros(1), "float32")),
        moving_mean=address(memory.array(np.zeros(1), "float32")),
        moving_var=address(moving_var),
        momentum=0,
        use_batch=1,
        step=1,
        saved=memory.allocate(3),
        parts=memory.allocate(4),
        terms=memory.allocate(2),
    )
    sizes = ctypes.c_int64(), ctypes.c_int64()
    plan = _library.function("mxbn_gpu_plan", None)
    plan(ctypes.byref(arguments), dtype, *map(ctypes.byref, sizes))
    arguments.splits, arguments.piece = 1, len(values)
    forward = _library.function("mxbn_gpu_forward", ctypes.c_char_p)
    assert forward(ctypes.byref(arguments), dtype, 0, None) is None
    memory.check()
    return moving_var
