import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import run_script

# (use_global_stats, use_batch_stats, is_train): (statistics used, where the moving ones step)
CONTRACT = {
    (False, False, True): ("batch", ["forward"]),
    (False, False, False): ("moving", []),
    (True, False, True): ("moving", []),
    (True, False, False): ("moving", []),
    (False, True, True): ("batch", ["forward"]),
    (False, True, False): ("batch", []),
}
FEW_ROUNDINGS = 4 * np.finfo("float32").eps


def start(*options, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "mxbn", "demo", *options],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )


def run(*options, **environment):
    process = start(*options, **environment)
    process.output, process.errors = process.communicate(timeout=200)
    return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "made" / "by the demo"


@pytest.fixture(scope="module")
def process(folder):
    pytest.importorskip("sklearn")
    pytest.importorskip("rich")
    return run("--json", "--out", str(folder))


@pytest.fixture(scope="module")
def results(process):
    return json.loads(process.output)


def key(mode):
    return mode["use_global_stats"], mode["use_batch_stats"], mode["is_train"]


def built_in(results, is_train, backward_is_train):
    (row,) = (
        row["built_in"]
        for row in results["modes"]
        if key(row["mode"]) == (False, False, is_train)
        and row["mode"]["backward_is_train"] == backward_is_train
    )
    return row


def test_ends_well_in_time(process, results):
    assert process.returncode == 0, process.errors
    assert results["problems"] == []
    assert results["seconds"] < 60


def test_progress_is_on_standard_error_without_noise(process):
    assert "Module  epoch 10/10" in process.errors
    assert "Gluon   epoch 10/10" in process.errors
    for noise in ("Warning", "MKLDNN", "\x1b", "\r"):
        assert noise not in process.errors


@pytest.mark.parametrize(
    ("network", "ways"),
    [("Module", ["mxbn.Module.load"]), ("Gluon", ["load_parameters", "SymbolBlock.imports"])],
)
def test_networks_learn_and_can_be_loaded(results, network, ways):
    network = results["networks"][network]
    assert network["accuracy"] >= 0.97
    assert sorted(network["loaded"]) == sorted(ways)
    for loaded in network["loaded"].values():
        assert loaded["same_predictions"] is True
        assert loaded["accuracy"] == network["accuracy"]


def test_saved_networks_are_kept_and_nothing_else(process, folder):
    assert sorted(os.listdir(folder)) == [
        "digits-gluon-0010.params",
        "digits-gluon-symbol.json",
        "digits-gluon.params",
        "digits-module-0010.params",
        "digits-module-symbol.json",
    ]


def test_modes_are_those_of_the_contract(results):
    seen = {key(row["mode"]) for row in results["modes"]}
    assert seen == set(CONTRACT)
    for row in results["modes"]:
        statistics, steps = CONTRACT[key(row["mode"])]
        assert row["mxbn"]["output_of"] == statistics
        assert row["mxbn"]["gradient_of"] == statistics
        assert row["mxbn"]["stepped_in"] == steps
        assert max(row["mxbn"]["difference"].values()) <= FEW_ROUNDINGS
        assert (row["built_in"] is None) == row["mode"]["use_batch_stats"]


def test_both_flags_are_refused(results):
    assert results["both_flags"].startswith("ValueError: mxbn: BatchNorm: ")


def test_known_faults_of_the_built_in_operator_show(results):
    default = built_in(results, is_train=False, backward_is_train=True)
    assert default["gradient_of"] == "neither"
    assert default["difference"]["data_gradient"] > 0.01
    assert default["difference"]["output"] < 1e-5

    asked = built_in(results, is_train=False, backward_is_train=False)
    assert asked["gradient_of"] == "moving"

    assert built_in(results, is_train=True, backward_is_train=True)["stepped_in"] == ["backward"]
    assert built_in(results, is_train=True, backward_is_train=False)["stepped_in"] == []


def test_tables_fit_and_low_accuracy_is_a_failure():
    pytest.importorskip("sklearn")
    pytest.importorskip("rich")
    process = run("--epochs", "1", COLUMNS="80", PYTHONIOENCODING="utf-8")
    assert process.returncode == 1
    assert process.errors == ""
    lines = process.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in process.output  # rich's mark of what it cut
    assert sum(line.startswith(("True ", "False ")) for line in lines) == 2 * 8 + 1
    assert "Wrong: Module: test accuracy 0." in process.output
    assert "Right:" not in process.output


def test_seed_decides_everything_and_numpy_keeps_its_own():
    pytest.importorskip("sklearn")
    from mxbn.demo.experiment import experiment

    def losses(seed):
        seen = []
        found = experiment(1, seed, None, lambda *epoch: seen.append(epoch))
        return seen, [row.mxbn for row in found.modes]

    np.random.seed(5)
    expected = np.random.RandomState(5).rand()
    first = losses(1)
    assert np.random.rand() == expected
    assert losses(1) == first
    assert losses(2) != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "argument --epochs: '0' is no whole number from 1 to 1000"),
        (["--epochs", "ten"], "argument --epochs: 'ten' is no whole number from 1 to 1000"),
        (["--seed=-1"], "argument --seed: '-1' is no whole number from 0 to 2147483647"),
        (["--out", __file__], "is no folder"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_options_are_named(options, message):
    process = run(*options)
    assert process.returncode == 2
    assert process.output == ""
    assert message in process.errors
    assert "Traceback" not in process.errors


@pytest.mark.parametrize(("module", "name"), [("sklearn", "scikit-learn"), ("rich", "rich")])
def test_missing_package_is_named(module, name):
    process = run_script(
        f"""
        import sys

        sys.modules["{module}"] = None  # as if it were not installed
        from mxbn.__main__ import main

        sys.exit(main(["demo"]))
        """
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert process.stderr == f"mxbn demo: needs {name}: pip install 'mxbn[demo]'\n"


@pytest.mark.parametrize("how", ["interrupted", "broken pipe"])
def test_early_end_leaves_no_traceback(how):
    pytest.importorskip("sklearn")
    pytest.importorskip("rich")
    with start("--epochs", "100") as process:
        process.stdout.readline()
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        status = process.wait(timeout=60)
        errors = process.stderr.read()
    assert status == (130 if how == "interrupted" else 1)
    assert errors == ("\nmxbn: interrupted\n" if how == "interrupted" else "")
