"""Builds libmxbn.so and packs it; everything else about the package is in pyproject.toml."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip does not look in this folder
import build_images

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

SOURCES = Path("src/operator")
COMMON = ["-std=c++14", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]

# Files that see MXNet's headers. The released libmxnet.so was built with the old std::string, and
# with oneDNN, whose members are in the structures that the headers declare; the other features are
# switched off, since nothing here needs them.
MXNET_FILES = [
    "batch_norm.cc",
    "batch_norm_compute.cc",
    "batch_norm_gpu_compute.cc",
    "batch_norm_infer.cc",
    "batch_norm_onednn.cc",
    "mxnet_abi.cc",
    "onednn_layout.cc",
    "sync_batch_norm.cc",
    "sync_exchange.cc",
    "sync_exports.cc",
]
MXNET_FLAGS = [
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-fno-strict-aliasing",  # mxnet_abi.h reads structures through mirrors
    "-fvisibility-inlines-hidden",
    "-DDMLC_LOG_STACK_TRACE=0",
    "-DMXNET_USE_MKLDNN=1",
    "-DMXNET_USE_CUDA=0",
    *(f"-DMSHADOW_USE_{feature}=0" for feature in ("CUDA", "CBLAS", "MKL", "SSE", "F16C")),
]

FILE_FLAGS = {
    "onednn_layout.cc": ["-fno-access-control"],  # the layout of an NDArray is a private member
}

# Files of plain pointers.
PLAIN_FILES = [
    "batch_norm_cpu.cc",
    "batch_norm_cpu_select.cc",
    "batch_norm_gpu.cc",
    "batch_norm_second_cpu.cc",
    "counters.cc",
    "cuda_driver.cc",
    "gpu_exports.cc",
]

# The kernels, once per instruction set.
KERNELS = "batch_norm_cpu_kernels.cc"
KERNEL_FLAGS = ["-Wno-maybe-uninitialized"]  # GCC 12 warns of its own AVX-512 header
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "dq", "bw", "vl")]
INSTRUCTION_SETS = {
    "baseline": ["-msse2"],
    "avx2": AVX2,
    "avx512": [*AVX2, *AVX512, "-mprefer-vector-width=512"],
}

LINK_FLAGS = [
    "-shared",
    "-fopenmp",
    "-Wl,--wrap=_ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE",  # see mxnet_abi.cc
    "-Wl,--gc-sections",
    f"-Wl,--version-script={SOURCES / 'exports.map'}",
    # libmxnet.so's own needs (OpenBLAS, CUDA) are met when it is loaded, not here.
    "-Wl,--allow-shlib-undefined",
]


def fail(message):
    sys.exit(f"\nmxbn: {message}\n")


if not (3, 8) <= sys.version_info[:2] <= (3, 11):
    fail(
        f"Python 3.8 to 3.11 is needed, not {platform.python_version()}: MXNet 1.9.1 needs NumPy "
        "before 1.24, which no newer Python has"
    )


def mxnet_folder():
    spec = find_spec("mxnet")
    if spec is None:
        fail("MXNet's headers are needed to build: pip install mxnet==1.9.1")
    return Path(spec.origin).parent


class BuildLibrary(build_ext):
    """Compiles the operator with g++ alone; CXX, CXXFLAGS and LDFLAGS are honoured."""

    def build_extension(self, extension):
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            fail(f"only Linux on x86-64 is supported, not {platform.system()} {platform.machine()}")
        compiler = os.environ.get("CXX", "g++").split()
        if shutil.which(compiler[0]) is None:
            fail(
                f"the C++ compiler {compiler[0]} was not found. Install one, for example with "
                "'apt-get install g++', or name one in the environment variable CXX"
            )
        try:
            build_images.find_nvrtc()
        except build_images.ImageError as error:
            fail(error)
        mxnet = mxnet_folder()
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        images_folder = folder.parent / "images"  # of every Python's build: none has a part in them
        images_folder.mkdir(exist_ok=True)
        # The map keeps paths of this machine out of MXNet's error texts.
        headers = [mxnet / "include", mxnet / "include" / "mkldnn"]
        include = [f"-isystem{folder}" for folder in headers] + [f"-ffile-prefix-map={mxnet}=mxnet"]
        jobs = [
            (SOURCES / name, Path(name).stem, [*MXNET_FLAGS, *FILE_FLAGS.get(name, []), *include])
            for name in MXNET_FILES
        ]
        jobs += [(SOURCES / name, Path(name).stem, []) for name in PLAIN_FILES]
        for instruction_set, flags in INSTRUCTION_SETS.items():
            definition = f"-DMXBN_INSTRUCTION_SET={instruction_set}"
            stem = f"{Path(KERNELS).stem}_{instruction_set}"
            jobs.append((SOURCES / KERNELS, stem, [*KERNEL_FLAGS, definition, *flags]))

        def run(command):
            print(*command, flush=True)
            subprocess.run(command, check=True)

        def make_image(image):
            run([sys.executable, build_images.__file__, image, str(images_folder)])

        def compile_one(job):
            source, stem, flags = job
            target = str(folder / f"{stem}.o")
            more = os.environ.get("CXXFLAGS", "").split()
            run([*compiler, *COMMON, *flags, *more, "-c", str(source), "-o", target])
            return target

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                images = pool.map(make_image, build_images.IMAGES)
                objects = list(pool.map(compile_one, jobs))
                list(images)  # raises what went wrong
            source = build_images.write_source(images_folder)
            objects.append(compile_one((source, source.stem, [f"-I{SOURCES}"])))
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            libraries = ["-L" + str(mxnet), "-l:libmxnet.so", "-ldl"]
            more = os.environ.get("LDFLAGS", "").split()
            run([*compiler, *LINK_FLAGS, *objects, *libraries, *more, "-o", str(target)])
        except subprocess.CalledProcessError as error:
            fail(f"building libmxbn.so failed: {' '.join(map(str, error.cmd))}")

        # Also beside the sources: Python started in this folder imports the package from there.
        beside = Path("mxbn", target.name)
        if not beside.exists() or not beside.samefile(target):
            copy = beside.with_suffix(".new")
            shutil.copyfile(target, copy)
            os.replace(copy, beside)  # a running process keeps the library that it has loaded

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"  # not tied to a Python version


class BuildWheel(bdist_wheel):
    """Tags the wheel py3-none: its library is loaded by ctypes and uses no Python API."""

    def get_tag(self):
        # The library asks for no newer C library than that of the machine that built it.
        major, minor = platform.libc_ver()[1].split(".")[:2]
        return "py3", "none", f"manylinux_{major}_{minor}_x86_64"


setup(
    ext_modules=[Extension("mxbn.libmxbn", sources=[str(p) for p in sorted(SOURCES.glob("*.cc"))])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
)
