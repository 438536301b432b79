"""benchmarks/gpu_check.py on an emulated GPU; what it makes of times and of compute-sanitizer."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import DTYPES, run_script

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RESULTS = {"y", "mean", "inv_std", "moving_mean", "moving_var", "dx", "dgamma", "dbeta"}

pytestmark = pytest.mark.cpu


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


def command(*options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), *map(str, options)],
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )


def test_every_result_of_every_type_is_right_and_repeats(driver, tmp_path):
    folder = tmp_path / "made by it"
    process = command("--fake", driver, "--quick", "--output", folder)
    assert process.returncode == 0, process.stderr + process.stdout
    assert "**Nothing failed**" in process.stdout
    assert process.stdout == (folder / "gpu_check.md").read_text(encoding="utf-8") + "\n"
    results = json.loads((folder / "gpu_check.json").read_text(encoding="utf-8"))
    assert results["failed"] == 0
    assert "fake GPU, compute capability 8.0" in results["environment"]["GPU"]
    assert "sm_80" in results["environment"]["mxbn"]
    values, bits = results["parts"].values()
    assert set(values["worst"]) == set(DTYPES)
    for worst in values["worst"].values():
        assert set(worst) == RESULTS
        # Something was compared, with a type that rounds.
        assert all(0 < units <= allowed for units, allowed in worst.values())
    assert bits["comparisons"] > 0
    assert results["speed"] == results["verdicts"] == []


FAULTS = {  # before or after the forward is called with `a`, and what is said then
    "eps": ("before", "a.eps *= 1.01", "y is off by "),
    "guard": ("after", "a.out and write(a.out + size, 0)", "memory beside y was written"),
    "input": ("after", "size and write(a.x, 0x3c)", "x was written"),
    "saved": ("after", "write(a.saved + 7, 0x40)", "dx is off by "),
    # In every second run the last bit of a value is another, which is as good as the right one.
    "bits": ("after", "size and a.out and write(a.out, read(a.out) ^ (runs % 2))", "bits of y"),
}
WITH_FAULT = """
    import ctypes, sys
    sys.path.insert(0, {folder!r})
    import gpu_cases, gpu_check
    from mxbn import _gpu

    gpu_cases.QUICK_SHAPES = (((3, 5, 40), 1), ((9, 4), -1))
    right, runs = _gpu.forward, 0

    def read(address):
        return ctypes.c_uint8.from_address(address).value

    def write(address, byte):
        ctypes.c_uint8.from_address(address).value = byte

    def wrong(a, dtype, *rest, **queue):
        global runs
        runs += 1
        size = a.outer * a.channels * a.inner * int(dtype[len("float"):]) // 8
        {before}
        right(a, dtype, *rest, **queue)
        {after}

    _gpu.forward = wrong
    sys.exit(gpu_check.main(["--fake", {driver!r}, "--quick", "--output", {output!r}]))
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_listed_and_is_the_status(driver, tmp_path, fault):
    when, change, message = FAULTS[fault]
    code = {"before": "pass", "after": "pass", when: change}
    places = {"folder": str(BENCHMARKS), "driver": str(driver), "output": str(tmp_path)}
    process = run_script(WITH_FAULT.format(**code, **places))
    assert process.returncode == 1, process.stderr
    results = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    values, bits = results["parts"].values()
    failures = (bits if fault == "bits" else values)["failures"]
    assert any(message in failure for failure in failures), failures
    assert results["failed"] == len(values["failures"]) + len(bits["failures"])
    for failure in failures:
        assert f"\n- {failure}\n" in process.stdout


def test_what_the_driver_says_is_a_failure(driver, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuLaunchKernel")
    process = command("--fake", driver, "--quick", "--output", tmp_path)
    assert process.returncode == 1
    assert "- RuntimeError: mxbn_statistics_" in process.stdout
    assert "CUDA error 999" in process.stdout
    assert "**2 failed**" in process.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fake", "nowhere/libcuda.so.1"], "nowhere/libcuda.so.1: cannot open"),
        (["--device", "1000"], "gpu_check: "),  # no torch, or no GPU, or not so many
        (["--output", __file__], "File exists"),
    ],
)
def test_without_what_it_needs_it_says_so(options, message, tmp_path):
    process = command(*(["--output", tmp_path] if "--output" not in options else []), *options)
    assert process.returncode == 2
    assert process.stdout == ""
    assert message in process.stderr
    assert "Traceback" not in process.stderr


def speed_row(module, work, ours, torch, copy, shape=(2, 3, 4, 5), dtype="float16"):
    case = module("cases").Case("channels-first", shape, 1)
    times = {"mxbn": [ours] * 3, "PyTorch": [torch] * 3, "copy": [copy / 2, copy, 9 * copy]}
    return module("gpu_report").speed_row(case, dtype, work, times)


@pytest.mark.parametrize(
    ("work", "accesses", "once"),
    [("inference forward", 2, 2), ("training forward", 3, 2), ("training backward", 5, 3)],
)
def test_ratios_and_bandwidth(module, work, accesses, once):
    row = speed_row(module, work, ours=6e-3, torch=4e-3, copy=2e-3)
    tensor_bytes = 2 * 3 * 4 * 5 * 2
    gb_per_s = {peer: each["gb_per_s"] for peer, each in row["peers"].items()}
    assert gb_per_s == pytest.approx(
        {
            "mxbn": accesses * tensor_bytes / 6e-3 / 1e9,
            "PyTorch": accesses * tensor_bytes / 4e-3 / 1e9,
            "copy": 2 * tensor_bytes / 2e-3 / 1e9,
        }
    )
    assert row["ratios"] == pytest.approx(
        {
            "copy": 3,
            "PyTorch": 1.5,
            "bound": 6 / (accesses / 2 * 2),
            "bound if read once": 6 / (once / 2 * 2),
        }
    )


def test_verdicts(module):
    rows = [
        speed_row(module, "inference forward", 1.25e-3, 1.25e-3, 1e-3),  # 80 % of the copy's speed
        speed_row(module, "inference forward", 1.0e-3, 2e-3, 1e-3),
        speed_row(module, "training forward", 1.94e-3, 2e-3, 1e-3),  # 1.29 times 1.5
        speed_row(module, "training forward", 1.96e-3, 2e-3, 1e-3, (9, 7, 5, 3), "float32"),
        speed_row(module, "training backward", 3.2e-3, 3.1e-3, 1e-3),  # 1.28 times 2.5, 1.03 times
    ]
    cudnn, inference, forward, backward = module("gpu_report").verdicts(rows)
    assert (cudnn["verdict"], cudnn["met"], cudnn["of"]) == ("missed", 4, 5)
    assert cudnn["worst"] == pytest.approx(3.2 / 3.1)
    assert cudnn["where"] == "2x3x4x5 channels-first float16, training backward"
    assert (inference["verdict"], inference["met"], inference["of"]) == ("met", 2, 2)
    assert (forward["verdict"], forward["met"], forward["of"]) == ("missed", 1, 2)
    assert forward["worst"] == pytest.approx(1.96 / 1.5)
    assert forward["where"] == "9x7x5x3 channels-first float32, training forward"
    assert (backward["verdict"], backward["worst"]) == ("met", pytest.approx(3.2 / 2.5))

    text = module("gpu_report").markdown(
        {
            "environment": {"GPU": "one"},
            "parts": {},
            "sanitizer": {"memcheck": "found no errors"},
            "speed": rows,
            "verdicts": module("gpu_report").verdicts(rows),
            "failed": 0,
        }
    )
    assert "| training forward within 1.3 times its traffic bound | missed | 1 of 2 |" in text
    assert "- memcheck: found no errors" in text
    for table in (part.splitlines() for part in text.split("\n\n") if part.startswith("|")):
        assert len({line.count("|") for line in table}) == 1
    assert sum("| channels-first |" in line for line in text.splitlines()) == len(rows)


class FakeTorch:
    """A GPU that takes 2 ms for each call, and waits for so many cycles before."""

    def __init__(self, cycles_to_queue):
        self.calls, self.waits, self.cycles_to_queue = [], [], cycles_to_queue
        self.cuda = SimpleNamespace(_sleep=self.waits.append, Event=self.event, synchronize=int)

    def event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, torch):
        self.torch = torch

    def record(self):
        self.time = 2.0 * len(self.torch.calls)

    def query(self):
        return self.torch.waits[-1] < self.torch.cycles_to_queue

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.time - self.time


def test_a_time_counts_only_if_all_was_queued_ahead(module):
    speed = module("gpu_speed")
    torch = FakeTorch(cycles_to_queue=3 * speed.FIRST_CYCLES)
    calls = {name: lambda name=name: torch.calls.append(name) for name in "ab"}
    times = speed.take_turns(torch, calls, seconds=0)
    assert times == {name: [pytest.approx(2e-3)] * speed.FEWEST_RUNS for name in "ab"}
    first = speed.FIRST_CYCLES
    assert torch.waits[:7] == [first, 2 * first, 4 * first] * 2 + [4 * first]
    assert torch.calls[:12] == list("aabbaaabbbba")  # warm-up, waits found, turned round
    with pytest.raises(RuntimeError, match="CUDA_LAUNCH_BLOCKING"):
        speed.take_turns(FakeTorch(2**40), {"a": int}, seconds=0)


@pytest.mark.parametrize(
    ("status", "said", "result"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", "found no errors"),
        (99, "noise\n========= Invalid __global__ write", "failed with status 99: ========= Inv"),
        (1, "", "failed with status 1: no output"),
        (1, "========= Error: Device not supported", "left out, since it does not support"),
    ],
)
def test_compute_sanitizer(module, monkeypatch, tmp_path, status, said, result):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nprintf "{said}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check = module("gpu_check")
    found = check.sanitize(SimpleNamespace(quick=False, device=3))
    assert list(found) == ["memcheck", "racecheck", "synccheck", "initcheck"]
    assert all(each.startswith(result) for each in found.values())
    first = (tmp_path / "log").read_text().splitlines()[0]
    assert first.startswith("--tool memcheck ")
    assert first.endswith("gpu_check.py --quick --sanitized --device 3")


def test_without_compute_sanitizer(module, monkeypatch):
    check = module("gpu_check")
    monkeypatch.setattr(check.shutil, "which", lambda *_, **__: None)
    (said,) = check.sanitize(SimpleNamespace(quick=True, device=0)).values()
    assert "was not found" in said
