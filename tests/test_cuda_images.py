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
*MACHINE_CODE, PTX = build_images.IMAGES
HEADER = build_images.HEADERS[0]
KERNELS = {
    f"mxbn_{step}_{dtype}"
    for step in (
        "statistics_rows",
        "statistics_columns",
        "forward_finish",
        "forward_rows",
        "forward_columns",
        "forward_fused_rows",
        "forward_fused_columns",
        "backward_reduce_rows",
        "backward_reduce_columns",
        "backward_reduce_fused_rows",
        "backward_reduce_fused_columns",
        "backward_finish",
        "backward_rows",
        "backward_columns",
        "backward_fused_rows",
        "backward_fused_columns",
        "second_reduce",
        "second_finish",
        "second",
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
    """What each image in the library is, by name, without the zero that ends it."""
    sizes = dict(symbols.values())
    found = {}
    for image in table:
        content = ctypes.string_at(image.code, sizes[image.code])
        assert content[-1] == 0
        found[image.name.decode()] = content[:-1]
    return found


class Cubin:
    """A file of machine code, which is an ELF file of 64 bits."""

    def __init__(self, content):
        ident, _, self.machine, _, _, _, start, self.flags, _, _, _, _, count, names = (
            struct.unpack_from("<16sHHIQQQIHHHHHH", content)
        )
        assert ident[:6] == b"\x7fELF\2\1"
        headers = [struct.unpack_from("<IIQQQQIIQQ", content, start + 64 * i) for i in range(count)]
        names = headers[names][4]
        self.sections = {}
        for name, kind, _, _, offset, size, *_ in headers:
            text = content[names + name : content.index(b"\0", names + name)].decode()
            self.sections[text] = b"" if kind == 8 else content[offset : offset + size]
            assert kind == 8 or len(self.sections[text]) == size  # 8: of zeros, not in the file


def test_the_library_lists_every_image(table):
    listed = [(image.name.decode(), image.major, image.minor, image.is_ptx) for image in table]
    assert listed == [
        ("sm_50", 5, 0, False),
        ("sm_60", 6, 0, False),
        ("sm_70", 7, 0, False),
        ("sm_75", 7, 5, False),
        ("sm_80", 8, 0, False),
        ("sm_86", 8, 6, False),
        ("sm_89", 8, 9, False),
        ("sm_90", 9, 0, False),
        ("compute_90", 9, 0, True),
    ]
    assert [image.code % 64 for image in table] == [0] * len(table)


def test_images_are_read_only(table):
    maps = Path("/proc/self/maps").read_text()
    for image in table:
        (rights,) = (
            rights
            for first, last, rights in re.findall("^([0-9a-f]+)-([0-9a-f]+) (....)", maps, re.M)
            if int(first, 16) <= image.code < int(last, 16)
        )
        assert "w" not in rights, image.name


@pytest.mark.parametrize("image", MACHINE_CODE)
def test_machine_code_is_for_its_gpu_and_holds_every_kernel(codes, image):
    cubin = Cubin(codes[image])
    assert cubin.machine == 190  # CUDA
    assert cubin.flags & 0xFF == int(image[len("sm_") :])
    kernels = {name[len(".text.") :]: code for name, code in cubin.sections.items()
               if name.startswith(".text.mxbn_")}  # fmt: skip
    assert set(kernels) == KERNELS
    assert all(kernels.values())


def test_ptx_is_for_its_gpu_and_holds_every_kernel(codes):
    text = codes[PTX].decode("ascii")
    assert re.findall(r"^\.target (.*)$", text, re.M) == ["sm_90"]
    assert set(re.findall(r"\.visible \.entry (\w+)\(", text)) == KERNELS
    assert "\0" not in text


def test_arithmetic_is_as_exact_as_it_is_written(codes):
    """None of what --use_fast_math allows: the machine code is made with the same options."""
    text = codes[PTX].decode("ascii")
    assert {"div.rn.f64", "sqrt.rn.f64"} <= set(re.findall(r"\b(?:div|sqrt)[.\w]*", text))
    assert re.findall(r"\S+\.(?:approx|full|ftz)\b\S*", text) == []


def test_images_do_not_know_where_they_were_built(codes):
    text = codes[PTX]
    assert re.findall(rb"(?<!/)/(?!/).*|^\s*\.(?:loc|file)\b.*", text, re.M) == []
    for image in MACHINE_CODE:
        sections = Cubin(codes[image]).sections
        assert b"/" not in sections[".strtab"] + sections[".shstrtab"]
        assert not [name for name in sections if re.search("debug_(?!frame)", name)]


# --------------------------------------------------------------------------------------- compiling


def run_script(image, folder):
    command = [sys.executable, str(SCRIPT), image, str(folder)]
    subprocess.run(command, check=True, cwd=str(folder))
    return build_images.image_file(image, folder).read_bytes()


@needs_nvrtc
@pytest.mark.parametrize("image", ["sm_80", PTX])
def test_a_second_build_makes_the_same_image(tmp_path, codes, image):
    """As long as the library was built from these sources."""
    assert run_script(image, tmp_path) == codes[image]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with kernels that compile fast in place of the real ones."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (tmp_path / "images").mkdir()
    for name in build_images.HEADERS:
        (sources / name).write_text("")
    (sources / HEADER).write_text("constexpr int kNumber = 1234;\n")
    (sources / build_images.KERNELS).write_text(
        f'#include "{HEADER}"\nextern "C" __global__ void kernel(int* x) {{ *x = kNumber; }}\n'
    )
    monkeypatch.setattr(build_images, "SOURCES", sources)
    return tmp_path


def make(folder, image=PTX):
    build_images.build(image, folder / "images")
    return build_images.image_file(image, folder / "images").read_text()


@needs_nvrtc
def test_what_was_compiled_is_kept(small, monkeypatch):
    first = make(small)
    assert "1234" in first
    with monkeypatch.context() as patch:
        patch.delattr(build_images, "Program")
        assert make(small) == first


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "old", "new", "number"),
    [
        (build_images.KERNELS, "= kNumber", "= 1000 + kNumber", "2234"),
        (HEADER, "1234", "5678", "5678"),
    ],
    ids=["kernels", "header"],
)
def test_a_changed_text_is_compiled(small, file, old, new, number):
    first = make(small)
    assert number not in first
    source = small / "sources" / file
    source.write_text(source.read_text().replace(old, new))
    assert number in make(small)
    source.write_text(source.read_text().replace(new, old))
    assert make(small) == first


@needs_nvrtc
@pytest.mark.parametrize("changed", ["options", "compiler"])
def test_a_changed_compilation_is_made(small, monkeypatch, changed):
    make(small)
    if changed == "options":
        monkeypatch.setattr(build_images, "OPTIONS", ("--std=c++17",))
    else:
        library, _ = build_images.find_nvrtc()
        monkeypatch.setattr(build_images, "find_nvrtc", lambda: (library, "11.8.90"))
    monkeypatch.delattr(build_images, "Program")
    with pytest.raises(NameError, match="Program"):
        make(small)


@needs_nvrtc
def test_a_build_that_was_stopped_is_made_again(small, monkeypatch):
    first = make(small)
    source = small / "sources" / HEADER
    source.write_text("constexpr int kNumber = 5678;\n")
    with monkeypatch.context() as patch:
        patch.setattr(build_images.Program, "compile", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(small)
    build_images.image_file(PTX, small / "images").write_text("cut")
    source.write_text("constexpr int kNumber = 1234;\n")
    assert make(small) == first


@needs_nvrtc
def test_a_mistake_in_the_kernels_is_shown(small, capfd):
    (small / "sources" / HEADER).write_text("int kNumber = nothing;\n")
    with pytest.raises(build_images.ImageError, match="failed: NVRTC_ERROR_COMPILATION"):
        make(small)
    log = capfd.readouterr().err
    assert f'{HEADER}(1): error: identifier "nothing" is undefined' in log


@needs_nvrtc
def test_a_gpu_that_the_compiler_does_not_know(small):
    with pytest.raises(build_images.ImageError, match="failed: NVRTC_ERROR_INVALID_OPTION"):
        make(small, "sm_20")


def test_the_compiler_is_missing(monkeypatch):
    def distribution(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(build_images, "distribution", distribution)
    with pytest.raises(build_images.ImageError) as error:
        build_images.find_nvrtc()
    assert str(error.value) == (
        "nvidia-cuda-nvrtc-cu11 is not installed. NVRTC compiles the device code: "
        "pip install nvidia-cuda-nvrtc-cu11==11.8.89"
    )


def test_the_compiler_is_the_one_that_the_project_requires():
    """To build and to test."""
    project = (PROJECT / "pyproject.toml").read_text()
    assert set(re.findall('nvidia-cuda-nvrtc[^";]*', project)) == {build_images.REQUIREMENT}
    assert project.count(build_images.REQUIREMENT) == 2
