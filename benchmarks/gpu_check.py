#!/usr/bin/env python3
"""Check the GPU half of the library on a GPU, and time it beside PyTorch's batch_norm and a copy.

Needs mxbn, beside either MXNet wheel, and PyTorch 2 with CUDA. MXNet's own kernels are not used, so
they need not run on this GPU. Writes gpu_check.md and gpu_check.json and prints the first. The
status is 1 if any check failed; the aims for speed have no influence on it.
"""

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys

import gpu_cases
import gpu_report
import gpu_speed
import gpu_values
import numpy as np
import report
from gpu_memory import HostMemory, TorchMemory

import mxbn
from mxbn import _gpu

FOLDER = os.path.dirname(os.path.abspath(__file__))
NAME = "gpu_check"
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # PyTorch tries what may fail
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}
TOOL_SECONDS = 90
TOOL_FOUND_ERRORS = 99  # the status by which a tool tells that


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.output:
            os.makedirs(options.output, exist_ok=True)
        memory, torch = open_gpu(options)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    results = check(options, memory, torch)
    text = gpu_report.markdown(results)
    if options.output:
        path = os.path.join(options.output, NAME)
        report.write_json(path + ".json", results)
        report.write_text(path + ".md", text)
    print(text)
    return 1 if results["failed"] else 0


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few shapes and short runs (default: four minutes)"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the files, made if missing (default: results, beside this file; with "
        "--fake: no files)",
    )
    parser.add_argument("--device", metavar="N", type=int, default=0, help="number of the GPU")
    parser.add_argument(
        "--fake",
        metavar="LIBCUDA",
        help="check the values without a GPU and PyTorch, with this emulated driver library",
    )
    parser.add_argument("--sanitized", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.output is None and not (options.fake or options.sanitized):
        options.output = os.path.join(FOLDER, "results")
    return options


def open_gpu(options):
    """Return the memory to use, and torch if it is its memory."""
    if options.fake:
        ctypes.CDLL(options.fake, ctypes.RTLD_GLOBAL)  # so that the library finds no other
        return HostMemory(), None
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU")
    torch.cuda.set_device(options.device)
    torch.cuda.set_stream(torch.cuda.Stream())
    return TorchMemory(torch, poison=not options.sanitized), torch


def check(options, memory, torch):
    results = {"environment": environment(memory, torch), "parts": {}, "sanitizer": {}}
    results.update(speed=[], verdicts=[])
    steps = {"Values": check_values}
    if not options.sanitized:
        steps["Bits of repeated runs"] = check_bits
    if torch and not options.sanitized:
        steps["Large tensors, and bits of repeated runs"] = check_large
    for title, step in steps.items():
        findings = gpu_values.Findings()
        try:
            step(options, memory, findings, results)
        except RuntimeError as error:  # of the driver or torch: later steps may still work
            findings.expect(False, f"{type(error).__name__}: {error}")
        results["parts"][title] = findings.summary()
    if torch and not options.sanitized:
        results["sanitizer"] = sanitize(options)
    results["failed"] = sum(len(part["failures"]) for part in results["parts"].values())
    results["failed"] += sum(said.startswith("failed") for said in results["sanitizer"].values())
    return results


def check_values(options, memory, findings, _):
    for one in gpu_cases.value_checks(options.quick):
        progress(one.text)
        gpu_values.check_values(memory, one, findings)


def check_bits(options, memory, findings, _):
    times = 3 if options.fake else 20 if options.quick else 50
    for one in gpu_cases.repeat_checks(options.quick):
        progress(f"{one.text}, {times} times")
        gpu_values.check_bits(memory, one, times, findings)


def check_large(options, memory, findings, results):
    left_out = "a quick run"
    if not options.quick:
        left_out = gpu_speed.check_huge(memory.torch, findings, progress)
    if left_out:
        results["environment"]["without tensors of more than 2**31 values"] = left_out
    for row, implementation in gpu_speed.rows(memory.torch, options.quick, findings, progress):
        results["speed"].append(row)
        results["environment"]["PyTorch's batch_norm"] = implementation
    results["verdicts"] = gpu_report.verdicts(results["speed"])


def environment(memory, torch):
    gpu, (_, cuda) = _gpu.describe(memory.device), _gpu.count()
    found = {
        "GPU": f"{gpu.name.decode()}, compute capability {gpu.major}.{gpu.minor}",
        "mxbn": f"{mxbn.__version__}, its image {gpu.image.decode()}",
        "driver": f"{driver_version()}, for CUDA {cuda // 1000}.{cuda % 1000 // 10}",
        "system": f"Python {platform.python_version()}, NumPy {np.__version__}, "
        + platform.platform(),
    }
    if torch:
        found["PyTorch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, "
        found["PyTorch"] += f"cuDNN {torch.backends.cudnn.version()}"
    return found


def driver_version():
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, check=False, capture_output=True, text=True)
        if said.returncode == 0:
            return said.stdout.split()[0]
    return "of unknown version"


def sanitize(options):
    """Run the quick checks of values under compute-sanitizer; return what each tool says."""
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    program = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if program is None:
        return {"all tools": "left out, since compute-sanitizer was not found"}
    found = {}
    for tool in list(TOOLS)[:1] if options.quick else TOOLS:
        progress(f"compute-sanitizer, {tool}")
        found[tool] = run_tool(program, tool, options.device)
    return found


def run_tool(program, tool, device):
    command = [program, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(TOOL_FOUND_ERRORS)]
    command += [sys.executable, os.path.abspath(__file__), "--quick", "--sanitized"]
    command += ["--device", str(device)]
    # Each tensor is an allocation of its own then, beyond which nothing is valid.
    one_by_one = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=one_by_one, check=False, timeout=TOOL_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"left out, since it took longer than {TOOL_SECONDS} s"
    if done.returncode == 0:
        return "found no errors"
    if "Device not supported" in done.stdout:
        return "left out, since it does not support this device or machine"
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return f"failed with status {done.returncode}: " + " ".join((lines or ["no output"])[:12])


def progress(what):
    print(f"gpu_check: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
