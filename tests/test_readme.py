"""The examples in README.md run and do what they are there for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        timeout=200,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.parametrize("api", ["Module", "Gluon"])
def test_an_example_trains_on_real_data_and_predicts(api, tmp_path):
    examples = [each for each in EXAMPLES if "load_digits" in each]
    (code,) = [each for each in examples if ("mxbn.Module" in each) == (api == "Module")]
    accuracy = re.search(r"\d\.\d+", run(code, tmp_path)).group()
    assert float(accuracy) > 0.8


def test_guarded_training_counts_what_the_text_shows(tmp_path):
    (code,) = [each for each in EXAMPLES if "mxbn.Guard" in each]
    assert run(code, tmp_path) in README.read_text("utf-8")


def test_devices_share_the_statistics_that_the_text_shows(tmp_path):
    (code,) = [each for each in EXAMPLES if "mxbn.gluon.SyncBatchNorm" in each]
    assert run(code, tmp_path) in README.read_text("utf-8")


def test_existing_code_is_made_with_our_layers(tmp_path):
    (code,) = [each for each in EXAMPLES if "replace_builtin" in each]
    code = f"import mxnet as mx, mxbn\n{code}\nprint([type(layer) for layer in net.features])"
    assert "mxbn.gluon.BatchNorm" in run(code, tmp_path)


def test_a_gradient_penalty_has_a_gradient(tmp_path):
    (code,) = [each for each in EXAMPLES if "create_graph" in each]
    assert float(run(code, tmp_path)) > 0


def test_a_network_is_fused_as_the_text_shows(tmp_path):
    (code,) = [each for each in EXAMPLES if "mxbn.fuse" in each]
    assert run(code, tmp_path) in README.read_text("utf-8")
