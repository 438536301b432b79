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

NCCL = "libnccl.so.2"
DRIVER, RUNTIME = "libcuda.so.1", "libcudart.so.11.0"
CUDNN_VERSION = 8101  # with which the wheel was built
C_COMPILER = ["gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]


def taken(libmxnet):
    """Return the functions of CUDA libraries that libmxnet.so takes, by the library's name."""
    printed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(libmxnet)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    functions = defaultdict(set)
    for line in printed.splitlines():
        name, _, version = line.split()[-1].partition("@")
        # The driver's functions and NCCL's carry no version.
        if re.match("lib(cu|nv)", version):
            functions[version].add(name)
        elif re.match("cu[A-Z]", name):
            functions[DRIVER].add(name)
        elif name.startswith("nccl"):
            functions[NCCL].add(name)
    return functions


def offered(library):
    printed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in printed.splitlines()}


def link(folder, library, source):
    """Compile a library whose functions carry its name as their version, as NVIDIA's do."""
    script = Path(folder, library + ".map")
    script.write_text(f"{library} {{ global: *; }};\n")
    flags = [f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", "-lpthread"]
    build.run([*C_COMPILER, source, "-o", Path(folder, library), *flags])


def build_stub(folder, library, functions):
    source = Path(folder, library + ".c")
    values = {"cudnnGetVersion": CUDNN_VERSION}
    source.write_text(
        "".join(
            f"long {name}() {{ return {values.get(name, 0)}; }}\n" for name in sorted(functions)
        )
    )
    link(folder, library, source)


def main(libmxnet, folder):
    functions = taken(libmxnet)
    Path(folder).mkdir(parents=True, exist_ok=True)
    link(folder, RUNTIME, build.HERE / "fake_runtime.c")
    driver = build.build_driver(folder)
    for library, path in ((RUNTIME, Path(folder, RUNTIME)), (DRIVER, driver)):
        missing = functions.pop(library) - offered(path)
        assert not missing, f"the fake {library} lacks {sorted(missing)}"
    for library, names in functions.items():
        build_stub(folder, library, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
