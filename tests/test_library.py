"""The loader: what it accepts, what it refuses, and in which words; and the library it loads."""

import re
import shutil
import subprocess
from pathlib import Path

import mxnet as mx
import pytest
from helpers import run_script

import mxbn
from mxbn import _library, _selftest, reference

WHEELS = "mxnet==1.9.1 (CPU) and mxnet-cu112==1.9.1 (CUDA 11.2)"
INSTALL = "install one with: pip install 'mxbn[cpu]' (or 'mxbn[cu112]')"

# Imports the package twice and prints both errors; then what is left behind.
IMPORT = """
import sys
sys.path[:0] = {path!r}
{before}
for _ in range(2):
    try:
        import mxbn
    except ImportError as error:
        print("ImportError", type(error).__name__, error)
    else:
        print("imported")
assert "mxbn" not in sys.modules
{after}
print("done")
"""
NOTHING_LEFT = """
import mxnet as mx
for module in (mx.nd, mx.nd.op, mx.sym, mx.sym.op):
    assert not hasattr(module, "mxbn_BatchNorm"), module
from mxnet.contrib.amp import lists
assert "mxbn_BatchNorm" not in lists.symbol_fp16.FP16_FP32_FUNCS
assert mx.nd.BatchNorm(mx.nd.ones((2, 3)), *[mx.nd.ones(3)] * 4).asnumpy().shape == (2, 3)
"""


def refused(before="", after=NOTHING_LEFT, path=(), **environment):
    """Return the text of the ImportError, the same at both attempts, without 'mxbn: '."""
    code = IMPORT.format(path=[str(p) for p in path], before=before, after=after)
    result = run_script(code, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = re.findall("^ImportError ImportError (.*)$", result.stdout, re.MULTILINE)
    assert len(lines) == 2, result.stdout + result.stderr
    assert lines[0] == lines[1]
    assert lines[0].startswith("mxbn: ")
    return lines[0][len("mxbn: ") :]


@pytest.fixture
def package(tmp_path):
    """A copy of the package, to spoil."""
    source = Path(mxbn.__file__).parent
    shutil.copytree(str(source), str(tmp_path / "mxbn"), ignore=shutil.ignore_patterns("__pyc*"))
    return tmp_path / "mxbn"


def fake_mxnet(folder, code):
    (folder / "mxnet").mkdir()
    (folder / "mxnet" / "__init__.py").write_text(code)
    return [folder]


# ------------------------------------------------------------------------------------------- MXNet


def test_mxnet_is_missing():
    text = refused("sys.modules['mxnet'] = None", after="")
    assert "MXNet is not installed" in text
    assert WHEELS in text
    assert INSTALL in text


def test_something_that_mxnet_needs_is_missing(tmp_path):
    """Python's own error names it, so it is left as it is."""
    path = fake_mxnet(tmp_path, "import a_package_that_is_not_there")
    code = f"import sys\nsys.path[:0] = {[str(p) for p in path]!r}\nimport mxbn"
    result = run_script(code)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("__version__ = '1.8.0'", "1.8.0"),
        ("__version__ = '2.0.0'", "2.0.0"),
        ("__version__ = '1.9.1.post0'", "1.9.1.post0"),
        ("", "unknown"),
    ],
    ids=["older", "newer", "nearly", "none"],
)
def test_another_version_of_mxnet(tmp_path, code, found):
    text = refused(path=fake_mxnet(tmp_path, code), after="")
    assert f"found MXNet {found}." in text
    assert WHEELS in text
    assert INSTALL in text


@pytest.mark.parametrize("missing", [1, 7])
def test_another_build_of_mxnet(missing):
    gone = _library.SYMBOLS[:missing]
    text = refused(
        f"""
import mxnet as mx
class OtherBuild:
    _name = "/somewhere/libmxnet.so"
    def __init__(self, library): self.library = library
    def __getattr__(self, name):
        if name in {gone!r}:
            raise AttributeError(name)
        return getattr(self.library, name)
library = mx.base._LIB
mx.base._LIB = OtherBuild(library)
""",
        after="mx.base._LIB = library\n" + NOTHING_LEFT,
    )
    assert "this MXNet 1.9.1 (/somewhere/libmxnet.so) is another build than the released" in text
    assert f"it lacks {_library.SYMBOLS[0]}" in text
    assert (" and 6 more symbols." in text) == (missing == 7)
    assert ("more symbol" in text) == (missing == 7)
    assert WHEELS in text
    assert INSTALL in text


def test_numpy_is_too_new():
    """As NumPy from 1.24 on, which has no np.bool."""
    text = refused(
        """
import numpy
def gone(name):
    raise AttributeError(f"module 'numpy' has no attribute {name!r}")
numpy.__getattr__ = gone
numpy.__version__ = "1.26.4"
""",
        after="",
    )
    assert "could not be imported with NumPy 1.26.4" in text
    assert "module 'numpy' has no attribute 'bool'" in text
    assert "pip install 'numpy<1.24'" in text


# --------------------------------------------------------------------------------------- libmxbn.so


def test_library_is_missing(package):
    (package / "libmxbn.so").unlink()
    text = refused(path=[package.parent])
    assert f"libmxbn.so is missing in {package}: the package was not built" in text
    assert "pip install '.[cpu]'" in text


@pytest.mark.parametrize("content", ["empty", "text", "cut", "folder"])
def test_library_cannot_be_loaded(package, content):
    library = package / "libmxbn.so"
    whole = library.read_bytes()
    library.unlink()
    if content == "folder":
        library.mkdir()
    else:
        library.write_bytes({"empty": b"", "text": b"not a library\n", "cut": whole[:100]}[content])
    text = refused(path=[package.parent])
    assert f"{library} cannot be loaded (" in text
    assert "Build it on this machine" in text
    assert "pip install --force-reinstall --no-deps ." in text


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("void nowhere(); void (*f)() = nowhere;", "undefined symbol: _Z7nowherev"),
        ("int another_library;", "mxbn_register"),
        (
            'extern "C" const char* mxbn_register() { return "no room"; }',
            "MXNet refused the operator: no room",
        ),
    ],
    ids=["undefined_symbol", "another_library", "refused"],
)
def test_library_is_another(package, code, found):
    library = package / "libmxbn.so"
    library.unlink()
    source = package / "other.cc"
    source.write_text(code)
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    assert found in refused(path=[package.parent])


# ---------------------------------------------------------------------------------------- self-test


@pytest.mark.parametrize(
    ("wrong", "right", "found"),
    [
        ("0.5038365412834047", "0.5038", "training: output is"),
        ("6666, 1.1547005383792517", "6667, 1.1548", "inference: var is"),
        ('"momentum": 0.75', '"momentum": 0.5', "training: moving_mean is"),
        ('"axis": 2', '"axis": 3', "mxbn: BatchNorm: axis is 3, expected -3 to 2"),
    ],
    ids=["output", "inv_std", "momentum", "error"],
)
def test_selftest_fails(package, wrong, right, found):
    selftest = package / "_selftest.py"
    text = selftest.read_text()
    assert wrong in text
    selftest.write_text(text.replace(wrong, right))
    text = refused(path=[package.parent])
    assert f"the operator computes wrong values in this build of MXNet ({found}" in text
    assert "is not offered" in text
    assert WHEELS in text
    assert INSTALL in text


def test_selftest_that_failed_is_not_forgotten(package):
    """Modules of the package that were imported in between do not offer the operator."""
    selftest = package / "_selftest.py"
    selftest.write_text(selftest.read_text().replace("0.5038365412834047", "0.5"))
    refused(
        path=[package.parent],
        after=NOTHING_LEFT
        + """
for name in ("mxbn.nd", "mxbn.sym", "mxbn.gluon", "mxbn.module"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
""",
    )


def test_selftest_runs_with_values_of_the_reference():
    shape, axis = _selftest.SHAPE, _selftest.ATTRIBUTES["axis"]
    attributes = {k: v for k, v in _selftest.ATTRIBUTES.items() if k != "output_mean_var"}
    data = mx.nd.array(_selftest.DATA).reshape(shape).asnumpy().astype("float64")
    head = mx.nd.array(_selftest.HEAD_GRADIENT).reshape(shape).asnumpy().astype("float64")
    for stored, use_batch in ((_selftest.BATCH, True), (_selftest.MOVING, False)):
        given = {**_selftest.PARAMETERS, **_selftest.STATISTICS}
        kept = reference.forward(data, **given, is_train=use_batch, **attributes)
        gradients = reference.backward(
            head, data, given["gamma"], kept, fix_gamma=attributes["fix_gamma"], axis=axis
        )
        want = {
            "output": kept.output,
            "mean": kept.mean,
            "var": kept.inv_std,
            "moving_mean": kept.moving_mean,
            "moving_var": kept.moving_var,
        }
        want.update(zip(("data_gradient", "gamma_gradient", "beta_gradient"), gradients))
        assert sorted(stored) == sorted(want)
        for key, value in want.items():
            assert value.ravel().tolist() == pytest.approx(stored[key], rel=1e-14, abs=1e-15), key


def test_selftest_sets_every_attribute():
    """All that change a value differ from their defaults; the two flags take turns."""
    attributes = dict(_selftest.ATTRIBUTES)
    assert set(attributes) == {"eps", "momentum", "fix_gamma", "axis", "output_mean_var"}
    defaults = {
        "eps": 1e-3, "momentum": 0.9, "fix_gamma": True, "axis": 1, "output_mean_var": False,
    }  # fmt: skip
    assert all(attributes[key] != value for key, value in defaults.items())
    assert _selftest.run() is None


# -------------------------------------------------------------------------------------- the loaded


def test_operator_is_offered_everywhere():
    for module in (mx.nd, mx.nd.op):
        assert module.mxbn_BatchNorm is mxbn.nd.BatchNorm
    for module in (mx.sym, mx.sym.op):
        assert module.mxbn_BatchNorm is mxbn.sym.BatchNorm
    from mxnet.contrib.amp import lists

    assert lists.symbol_fp16.FP16_FP32_FUNCS.count("mxbn_BatchNorm") == 1
    assert lists.symbol_bf16.FP32_FUNCS.count("mxbn_BatchNorm") == 1


def test_two_copies_of_the_package_in_one_process(package):
    """The second either works or is refused in words; it never harms the first."""
    result = run_script(
        f"""
        import sys
        import mxnet as mx
        import mxbn as first
        for name in [name for name in sys.modules if name.split(".")[0] == "mxbn"]:
            del sys.modules[name]
        sys.path.insert(0, {str(package.parent)!r})
        try:
            import mxbn as second
            assert second is not first
        except ImportError as error:
            assert str(error).startswith("mxbn: MXNet refused the operator: "), error
        x = mx.nd.array([[1, 2], [3, 6]])
        y = first.nd.BatchNorm(x, *[mx.nd.ones(2)] * 4, use_batch_stats=True, eps=0)
        print(y.asnumpy().tolist())
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("[[0.0, 0.0], [2.0, 2.0]]")


def names(*arguments):
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of binutils")
    printed = subprocess.run(
        ["nm", *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in printed.splitlines() if line.strip()}


def test_symbols_are_those_that_the_library_takes():
    taken = names("-D", "--undefined-only", _library.LIBRARY)
    offered = names("-D", "--defined-only", mx.base._LIB._name)
    assert taken & offered == set(_library.SYMBOLS)
    assert len(_library.SYMBOLS) == len(set(_library.SYMBOLS))


def test_library_shows_nothing_else():
    assert names("-D", "--defined-only", _library.LIBRARY) == {
        "mxbn_register",
        "mxbn_instruction_set",
        "mxbn_same_context_and_known_shapes",
        "mxbn_use_onednn_layouts",
        "mxbn_uses_onednn_layouts",
        "mxbn_onednn_layout_passes",
        "mxbn_count",
        "mxbn_gpu_count",
        "mxbn_gpu_describe",
        "mxbn_gpu_plan",
        "mxbn_gpu_forward",
        "mxbn_gpu_backward",
        "mxbn_gpu_second",
        "mxbn_sync_connect",
        "mxbn_sync_abandon",
        "mxbn_sync_take",
        "mxbn_sync_answer",
    }


def test_library_does_not_know_where_it_was_built():
    """No path of the building machine, which messages of MXNet's headers would show."""
    content = _library.LIBRARY.read_bytes()
    assert set(re.findall(rb"(?<![\w.+-])/[\w.+/-]+\.(?:h|cc|hpp)\b", content)) == set()


def test_instruction_sets_stay_apart():
    """No wide instruction outside the kernels made for it: other processors would stop there.

    Otherwise the linker could take, of a function that several files hold, the copy that was
    compiled for a newer processor.
    """
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump, of binutils")
    if not any("6avx512" in name for name in names(_library.LIBRARY)):
        pytest.skip("the library was stripped of its symbols")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(_library.LIBRARY)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    function, wide = "", {"ymm": set(), "zmm": set(), "vex": set()}
    for line in code.splitlines():
        heading = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if heading:
            function = heading.group(1)
        elif "%zmm" in line or "%k1" in line:
            wide["zmm"].add(function)
        elif "%ymm" in line:
            wide["ymm"].add(function)
        elif re.search(r"\tv[a-z]+\d*.*%xmm", line):
            wide["vex"].add(function)
    assert wide["zmm"]
    assert all("4mxbn6avx512" in name for name in wide["zmm"])
    assert wide["ymm"]
    for name in wide["ymm"] | wide["vex"]:
        assert "4mxbn6avx512" in name or "4mxbn4avx2" in name, name


def test_tools_are_imported_when_they_are_used():
    code = """
        import sys
        import mxbn
        print([name for name in sys.modules if name.startswith(("mxbn.tools", "mxbn.callback"))])
        assert set(mxbn.__all__) <= set(dir(mxbn))
        for name in mxbn.__all__:
            getattr(mxbn, name)
        assert mxbn.fold is sys.modules["mxbn.tools.fold"].fold
        try:
            mxbn.unknown
        except AttributeError as error:
            print(error)
    """
    process = run_script(code)
    assert process.stdout == "[]\nmodule 'mxbn' has no attribute 'unknown'\n", process.stderr
