"""The device code: how build_images.py compiles it, and that the library holds it whole."""

import ctypes
import importlib.util
import re
import shutil
import struct
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mxbn import _library

PROJECT = Path(__file__).resolve().parents[1]
SCRIPT = PROJECT / "build_images.py"


def load_script():
    spec = importlib.util.spec_from_file_location("build_images", str(SCRIPT))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_images = load_script()
MACHINE_CODE = [image for image in build_images.IMAGES if image.startswith("sm_")]
KERNELS = {
    f"mxbn_{step}_{dtype}"
    for step in (
        "statistics_rows",
        "statistics_columns",
        "forward_finish",
        "forward_rows",
        "forward_columns",
        "backward_reduce_rows",
        "backward_reduce_columns",
        "backward_finish",
        "backward_rows",
        "backward_columns",
    )
    for dtype in ("float16", "float32", "float64")
}

try:
    build_images.find_nvrtc()
    NVRTC_IS_HERE = True
except build_images.ImageError:
    NVRTC_IS_HERE = False
needs_nvrtc = pytest.mark.skipif(not NVRTC_IS_HERE, reason=f"needs {build_images.REQUIREMENT}")


# --------------------------------------------------------------------------------- in the library


class Image(ctypes.Structure):
    """mxbn::cuda::Image."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("is_ptx", ctypes.c_bool),
        ("code", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def symbols():
    """The address and the size of what the loaded library holds, by name."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of binutils")
    printed = subprocess.run(
        ["nm", "--print-size", str(_library.LIBRARY)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    if "_ZN4mxbn4cuda7kImagesE" not in printed:
        pytest.skip("the library was stripped of its symbols")
    found = re.findall(r"^([0-9a-f]+) ([0-9a-f]+) \w (\S+)$", printed, re.MULTILINE)
    found = {name: (int(address, 16), int(size, 16)) for address, size, name in found}
    library = ctypes.CDLL(str(_library.LIBRARY))
    start = ctypes.cast(library.mxbn_register, ctypes.c_void_p).value - found["mxbn_register"][0]
    return {name: (start + address, size) for name, (address, size) in found.items()}


@pytest.fixture(scope="module")
def table(symbols):
    """The images, as the library's own code finds them."""
    count = ctypes.c_int.from_address(symbols["_ZN4mxbn4cuda11kImageCountE"][0]).value
    return list((Image * count).from_address(symbols["_ZN4mxbn4cuda7kImagesE"][0]))


@pytest.fixture(scope="module")
def codes(symbols, table):
    """What each image in the library is, by name; a zero follows it."""
    sizes = {address: size for address, size in symbols.values()}
    found = {}
    for image in table:
        content = ctypes.string_at(image.code, sizes[image.code] + 1)
        assert content[-1] == 0
        found[image.name.decode()] = content[:-1]
    return found


class Cubin:
    """A file of machine code: an ELF file of 64 bits."""

    def __init__(self, content):
        assert content[:6] == b"\x7fELF\2\1"
        self.machine, self.flags = struct.unpack_from("<H28xI", content, 18)
        start, count, names = struct.unpack_from("<Q12xHH", content, 40)[0], 0, 0
        count, names = struct.unpack_from("<HH", content, 60)
        headers = list(struct.iter_unpack("<II8xQQQ24x", content[start : start + 64 * count]))
        text = content[headers[names][3] :]
        self.sections = {}
