"""Makes a folder of fake CUDA libraries, with which mxnet-cu112 loads and has mx.gpu(i).

    python tests/cuda/fake_libraries.py FOLDER/mxnet/libmxnet.so TARGET

Put TARGET into LD_LIBRARY_PATH. The runtime and the driver emulate (see fake_runtime.c and
fake_driver.cc); of the others (cuBLAS, cuDNN, ...), what libmxnet.so takes returns 0 and does
nothing.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import build

DRIVER, RUNTIME, NCCL = "libcuda.so.1", "libcudart.so.11.0", "libnccl.so.2"
STUB_VALUES = {"cudnnGetVersion": 8101}  # the version with which the wheel was built
C_FLAGS = ["-O1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
OWN_FUNCTIONS = "fake_memory_*; fake_stream_*;"  # which the driver calls


def symbols(library, kind):
    command = ["nm", "-D", f"--{kind}-only", str(library)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [line.split()[-1].partition("@")[::2] for line in printed.splitlines()]


def taken(libmxnet):
    """Return the functions of CUDA libraries that libmxnet.so takes, by the library's name."""
    functions = defaultdict(set)
    for name, version in symbols(libmxnet, "undefined"):
        # The driver's functions and NCCL's carry no version.
        if re.match("lib(cu|nv)", version):
            functions[version].add(name)
        elif re.match("cu[A-Z]", name):
            functions[DRIVER].add(name)
        elif name.startswith("nccl"):
            functions[NCCL].add(name)
    return functions


def compile_c(folder, source):
    target = Path(folder, source.stem + ".o")
    build.run(["gcc", *C_FLAGS, "-c", source, "-o", target])
    return target


def link(folder, library, objects):
    """Make a library whose functions carry its name as their version, as NVIDIA's do."""
    script = Path(folder, "versions.map")
    shown = f"cu*; nv*; nccl*; __cuda*; {OWN_FUNCTIONS}"
    script.write_text(f"{library} {{ global: {shown} local: *; }};\n")
    flags = ["-shared", "-pthread", f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
    build.run([*build.COMPILER, *flags, *objects, "-o", Path(folder, library)])


def build_runtime(folder):
    kernels = Path(folder, "fake_kernels.o")
    build.run([*build.COMPILER, *build.FLAGS, "-c", build.HERE / "fake_kernels.cc", "-o", kernels])
    link(folder, RUNTIME, [kernels, compile_c(folder, build.HERE / "fake_runtime.c")])


def build_stub(folder, library, functions):
    source = Path(folder, "stub.c")
    source.write_text(
        "".join(
            f"long {name}(void) {{ return {STUB_VALUES.get(name, 0)}; }}\n"
            for name in sorted(functions)
        )
    )
    link(folder, library, [compile_c(folder, source)])


def main(libmxnet, folder):
    functions = taken(libmxnet)
    Path(folder).mkdir(parents=True, exist_ok=True)
    build_runtime(folder)
    build.build_driver(folder)
    for library in (RUNTIME, DRIVER):
        offered = {name for name, _ in symbols(Path(folder, library), "defined")}
        missing = functions.pop(library) - offered
        assert not missing, f"the fake {library} lacks {sorted(missing)}"
    for library, names in functions.items():
        build_stub(folder, library, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
