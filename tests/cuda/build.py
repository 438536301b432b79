"""Compiles the kernels, over their emulation on a CPU, with g++."""

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPERATOR = HERE.parents[1] / "src" / "operator"
COMPILER = os.environ.get("CXX", "g++").split()
FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # nvcc's
    f"-I{HERE}",
    f"-I{OPERATOR}",
]
# As on a GPU, an access of 16 bytes at another address than a multiple of 16 ends the program.
TRAP_MISALIGNED = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def run(command):
    """Run a command; what it prints becomes part of the error if it fails."""
    result = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}")


def build_emulation(folder):
    """Compile what is always compiled without sanitizers, and return the object file."""
    target = Path(folder, "cuda_emulation.o")
    run([*COMPILER, *FLAGS, "-c", HERE / "cuda_emulation.cc", "-o", target])
    return target


def build_driver(folder):
    """Build the fake CUDA driver in a folder, and return its path."""
    target = Path(folder, "libcuda.so.1")
    source = HERE / "fake_driver.cc"
    link = ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-o", target, "-ldl"]
    run([*COMPILER, *FLAGS, *TRAP_MISALIGNED, source, build_emulation(folder), *link])
    return target


def build_program(folder, sanitizer, kernels=OPERATOR):
    """Build sanitized_kernels.cc, with the kernels of a folder, and return its path."""
    target = Path(folder, f"kernels_{sanitizer}")
    sources = [HERE / "sanitized_kernels.cc", OPERATOR / "batch_norm_gpu.cc"]
    # Unoptimized: no access is merged with another before it is looked at, and it compiles faster.
    flags = [f"-I{kernels}", *FLAGS, "-O0", *SANITIZERS[sanitizer]]
    link = ["-rdynamic", "-o", target, "-ldl"]
    run([*COMPILER, *flags, *sources, build_emulation(folder), *link])
    return target
