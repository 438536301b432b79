"""Compiles the device code with NVRTC, NVIDIA's compiler as a library: no CUDA toolkit, no GPU.

``python build_images.py sm_80 FOLDER`` makes one image; setup.py starts a process for each, since
NVRTC compiles one text at a time in a process.
"""

import ctypes
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src" / "operator"
KERNELS = "batch_norm_kernels.cuh"
# Those that the kernels include.
HEADERS = ("batch_norm_gpu_arguments.h", "batch_norm_second.cuh", "counter.h")
OPTIONS = ("--std=c++14",)
REQUIREMENT = "nvidia-cuda-nvrtc-cu11==11.8.89"  # as in pyproject.toml

# Machine code for the GPUs that CUDA 11 knows, and PTX, which drivers compile for newer ones.
IMAGES = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "compute_90")


class ImageError(Exception):
    """What went wrong, and what to do about it."""


def is_ptx(image):
    """Return whether an image is PTX, not machine code."""
    return image.startswith("compute_")


def image_file(image, folder):
    """Return where an image is written."""
    return Path(folder, image + (".ptx" if is_ptx(image) else ".cubin"))


def find_nvrtc():
    """Return the path of NVRTC's library, and its version."""
    remedy = f"NVRTC compiles the device code: pip install {REQUIREMENT}"
    name = REQUIREMENT.split("==")[0]
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise ImageError(f"{name} is not installed. {remedy}") from None
    for file in package.files or ():
        if file.name.startswith("libnvrtc.so"):
            return str(file.locate()), package.version
    raise ImageError(f"{name} {package.version} holds no libnvrtc.so. {remedy}")


class Program:
    """The kernels, as NVRTC compiles them."""

    def __init__(self, library):
        self._library = ctypes.CDLL(library)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self._program = ctypes.c_void_p()
        texts = ctypes.c_char_p * len(HEADERS)
        self._call(
            "CreateProgram",
            ctypes.byref(self._program),
            (SOURCES / KERNELS).read_bytes(),
            KERNELS.encode(),
            len(HEADERS),
            texts(*[(SOURCES / name).read_bytes() for name in HEADERS]),
            texts(*[name.encode() for name in HEADERS]),
        )

    def compile(self, image):
        """Return the image's bytes; what NVRTC has to say about it goes to the standard error."""
        options = [f"--gpu-architecture={image}".encode(), *(o.encode() for o in OPTIONS)]
        try:
            self._call(
                "CompileProgram",
                self._program,
                len(options),
                (ctypes.c_char_p * len(options))(*options),
            )
        finally:
            sys.stderr.write(self._get("ProgramLog").rstrip(b"\0").decode())
        # NVRTC ends a text with a zero.
        return self._get("PTX").rstrip(b"\0") if is_ptx(image) else self._get("CUBIN")

    def _get(self, what):
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", self._program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", self._program, content)
        return content.raw

    def _call(self, name, *arguments):
        result = getattr(self._library, f"nvrtc{name}")(*arguments)
        if result != 0:
            text = self._library.nvrtcGetErrorString(result).decode()
            raise ImageError(f"nvrtc{name} failed: {text}")


def build(image, folder):
    """Compile an image, unless the folder holds it, of the same texts and the same compiler."""
    library, version = find_nvrtc()
    key = hashlib.sha256(repr((image, OPTIONS, version)).encode())
    for name in (KERNELS, *HEADERS):
        key.update((SOURCES / name).read_bytes())
    target = image_file(image, folder)
    key_file = target.with_suffix(".key")
    if target.exists() and key_file.exists() and key_file.read_text() == key.hexdigest():
        return
    key_file.unlink(missing_ok=True)  # until the image is whole
    # NVRTC leaves a locale of its own to the thread that called it.
    with ThreadPoolExecutor(1) as thread:
        target.write_bytes(thread.submit(lambda: Program(library).compile(image)).result())
    key_file.write_text(key.hexdigest())


HEAD = r"""// Made by build_images.py.
#include "cuda_driver.h"

// Takes in a file, a zero after it, as the array mxbn_image_NAME.
#define MXBN_IMAGE(name, file)                                    \
  asm(".pushsection .rodata.mxbn_images, \"a\", @progbits\n"      \
      ".globl mxbn_image_" #name "\n"                             \
      ".hidden mxbn_image_" #name "\n"                            \
      ".balign 64\n"                                              \
      ".type mxbn_image_" #name ", @object\n"                     \
      "mxbn_image_" #name ":\n"                                   \
      ".incbin \"" file "\"\n"                                    \
      ".byte 0\n"                                                 \
      ".size mxbn_image_" #name ", . - mxbn_image_" #name "\n"    \
      ".popsection\n");                                           \
  extern "C" __attribute__((visibility("hidden"))) const char mxbn_image_##name[];

"""
TABLE = """
namespace mxbn {{
namespace cuda {{

const Image kImages[] = {{
{entries}
}};
const int kImageCount = {count};

}}  // namespace cuda
}}  // namespace mxbn
"""


def write_source(folder):
    """Write the C++ file that takes in the images in a folder, and return its path."""
    files, entries = [], []
    for image in IMAGES:
        major, minor = divmod(int(image.split("_")[1]), 10)
        ptx = "true" if is_ptx(image) else "false"
        files.append(f'MXBN_IMAGE({image}, "{image_file(image, folder)}")')
        entries.append(f'    {{"{image}", {major}, {minor}, {ptx}, mxbn_image_{image}}},')
    table = TABLE.format(entries="\n".join(entries), count=len(entries))
    source = Path(folder, "cuda_images.cc")
    source.write_text(HEAD + "\n".join(files) + "\n" + table)
    return source


if __name__ == "__main__":
    try:
        build(*sys.argv[1:])
    except ImageError as error:
        sys.exit(f"mxbn: {error}")
