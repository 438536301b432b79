"""The kernels for GPUs under sanitizers, over the emulation, and by NVIDIA's other compiler."""

import os
import re
import shutil
import subprocess

import pytest
from cuda import build

needs_compiler = pytest.mark.skipif(
    shutil.which(build.COMPILER[0]) is None, reason=f"needs the C++ compiler {build.COMPILER[0]}"
)
NVCC = shutil.which("nvcc")

KERNELS = build.OPERATOR / "batch_norm_kernels.cuh"
BARRIER = "__syncthreads();"
BARRIERS = KERNELS.read_text().count(BARRIER)


def run(program, **environment):
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [str(program)],
        env={**os.environ, **options, **environment},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )


@needs_compiler
@pytest.mark.parametrize("sanitizer", build.SANITIZERS)
def test_sanitizers_find_nothing(tmp_path, sanitizer):
    program = build.build_program(tmp_path, sanitizer)
    for seed in ("0", "1"):
        ran = run(program, MXBN_EMULATION_SEED=seed)
        assert ran.returncode == 0, ran.stdout
        assert ran.stdout == "right values\n"


@needs_compiler
@pytest.mark.parametrize("number", range(BARRIERS))
def test_every_barrier_is_missed_when_it_is_taken_out(tmp_path, number):
    pieces = KERNELS.read_text().split(BARRIER)
    kept = (BARRIER.join(pieces[: number + 1]), BARRIER.join(pieces[number + 1 :]))
    (tmp_path / KERNELS.name).write_text("".join(kept))
    ran = run(build.build_program(tmp_path, "thread", kernels=tmp_path))
    assert ran.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in ran.stdout


# What 256 threads of a block do, and what the emulation says about it.
SAID = {
    "__syncthreads();": "fine",
    "if (threadIdx.x < 64) return; __syncthreads(); __syncwarp();": "fine",
    "if (__shfl_xor_sync(~0u, threadIdx.x, 5) != (threadIdx.x ^ 5)) abort();": "fine",
    "if (threadIdx.x < 32) {__syncthreads();}\nelse {__syncthreads();}": (
        r"thread 32 of block \(0, 0\) is at the barrier of line \d+, others at that of line \d+"
    ),
    "if (threadIdx.x == 0) {__syncthreads();} else {__syncwarp();}": (
        r"deadlock: of 32 threads of a block, 1 wait at a barrier \(line \d+\), "
        "the others for their warps"
    ),
    "if (threadIdx.x != 7) __syncwarp();": (
        r"thread 7 of block \(0, 0\) exits while others of its warp wait for it"
    ),
    "if (threadIdx.x == 0) return; __syncwarp();": (
        r"thread 1 of block \(0, 0\) is in the operation of its warp in line \d+, "
        "which lacks lanes"
    ),
    "__shfl_xor_sync(0xffffu, 1, 1);": (
        r"thread 0 of block \(0, 0\) is in the operation of its warp in line \d+, "
        "which names only some lanes"
    ),
    "if (threadIdx.x < 3) {__syncwarp();}\nelse {__shfl_xor_sync(~0u, 1, 1);}": (
        r"thread 3 of block \(0, 0\) is in the operation of its warp in line \d+, "
        r"others in that of line \d+"
    ),
}
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <exception>
#include "cuda_emulation.h"
void Say(void (*kernel)()) {
  try {
    cuda_emulation::Launch({2, 1}, 256, kernel);
    std::puts("fine");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
int main() {
"""


@needs_compiler
def test_the_emulation_refuses_what_a_gpu_leaves_undefined(tmp_path):
    source, program = tmp_path / "program.cc", tmp_path / "program"
    source.write_text(PROGRAM + "".join(f"Say([] {{ {code} }});\n" for code in SAID) + "}")
    build.run(
        [*build.COMPILER, *build.FLAGS, source, build.build_emulation(tmp_path), "-o", program]
    )
    said = run(program).stdout.splitlines()
    assert len(said) == len(SAID)
    for line, (code, expected) in zip(said, SAID.items()):
        assert re.fullmatch(expected, line), f"{code} says: {line}"


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_nvcc_has_nothing_to_say(tmp_path):
    flags = ["-x", "cu", "-std=c++17", "-arch=sm_80", "-Xcompiler", "-Wall,-Wextra"]
    command = [NVCC, *flags, "-cubin", "-o", str(tmp_path / "kernels.cubin"), str(KERNELS)]
    ran = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout == ""
