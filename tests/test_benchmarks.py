"""The benchmark's command runs and writes every number; how large they are is not tested."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parents[1] / "benchmarks" / "batch_norm.py"
WORKS = {"inference forward", "training forward", "training backward", "moving backward"}


def run(*options, **environment):
    return subprocess.run(
        [sys.executable, str(COMMAND), *options],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("benchmarks") / "made" / "by it"


@pytest.fixture(scope="module")
def process(folder):
    process = run("--quick", "--out", str(folder), PYTHONIOENCODING="utf-8")
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def results(process, folder):
    return json.loads((folder / "batch_norm.json").read_text(encoding="utf-8"))


def test_only_whole_files_are_left(process, folder):
    files = {"batch_norm.md", "batch_norm.json"}
    if "no plot" not in process.stderr:
        files.add("batch_norm.png")
        assert (folder / "batch_norm.png").read_bytes().startswith(b"\x89PNG")
    assert set(os.listdir(folder)) == files


def test_every_work_has_every_number(results):
    peers = {"mxbn", "built-in", "copy"} | (
        {"PyTorch"} if results["environment"]["torch"] else set()
    )
    seen = set()
    for row in results["operators"]:
        assert set(row["peers"]) == peers
        assert set(row["ratios"]) == peers - {"mxbn"}
        for peer in row["peers"].values():
            assert_positive(peer[key] for key in ("ms", "low_ms", "high_ms", "runs", "gb_per_s"))
            assert peer["low_ms"] <= peer["ms"] <= peer["high_ms"]
        assert_positive(row["ratios"].values())
        seen.add((row["group"], row["work"], row["threads"]))
    groups = {"small", "odd", "NHWC", "1-D", "5-D"}
    assert seen == {(g, w, t) for g in groups for w in WORKS for t in (1, 2)}


def test_what_is_fused_has_every_number(results):
    works = WORKS - {"moving backward"}
    assert len(results["fused"]) == 3 * len(works) * 2
    for row in results["fused"]:
        assert {"mxbn", "mxbn unfused", "built-in", "copy"} <= set(row["peers"])
        assert row["work"] in works
        assert_positive(row["ratios"].values())
        assert_positive(peer["gb_per_s"] for peer in row["peers"].values())


@pytest.mark.parametrize(("name", "works"), [("calls", 2), ("networks", 5)])
def test_calls_and_networks_have_every_number(results, name, works):
    assert len(results[name]) == 2 * works
    for row in results[name]:
        assert set(row["peers"]) == {"mxbn", "built-in"}
        for peer in row["peers"].values():
            assert_positive(peer[key] for key in ("ms", "low_ms", "high_ms", "runs"))
        assert_positive(row["ratios"].values())


def test_table_is_printed_and_has_every_row(process, results, folder):
    text = (folder / "batch_norm.md").read_text(encoding="utf-8")
    assert process.stdout == text + "\n"
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    for lines in tables:
        for line in lines:
            assert line.count("|") == lines[0].count("|")
    rows = sum(len(results[name]) for name in ("operators", "fused", "calls", "networks"))
    assert sum(len(lines) - 2 for lines in tables) == rows
    for column in ("mxbn ms", "mxbn GB/s", "copy GB/s", "÷ copy", "÷ built-in"):
        assert f"| {column} |" in text
    environment = results["environment"]
    for value in (environment["cpu"], environment["mxnet"], environment["mxbn"]):
        assert value in text


def assert_positive(numbers):
    for number in numbers:
        assert math.isfinite(number)
        assert number > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "argument --seconds: '0' is no positive number"),
        (["--threads", "two"], "argument --threads: 'two' is no positive number"),
        (["--quick", "--threads", "1", "--only", "nothing"], "nothing matches --only nothing"),
        (["--out", __file__], "File exists"),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path):
    process = run("--out", str(tmp_path), *options)
    assert process.returncode == 2
    assert process.stdout == ""
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert os.listdir(tmp_path) == []
