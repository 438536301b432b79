"""What all tests share: see helpers.py for drawings, right values and comparisons."""

import contextlib
import shutil

import mxnet as mx
import pytest
from cuda import build
from device import IS_FAKE, ON_GPU

MARKERS = {
    "cpu": "is about the CPU, or about no context at all",
    "mxnet_operators": "needs MXNet's own operators, which the fake GPU lacks",
    "slow": "takes minutes on the fake GPU",
}


def pytest_configure(config):
    for marker, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")


def pytest_collection_modifyitems(items):
    on_fake = ON_GPU and IS_FAKE
    skipped = {"cpu": ON_GPU, "mxnet_operators": on_fake, "slow": on_fake}
    for item in items:
        for marker, meaning in MARKERS.items():
            if skipped[marker] and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=meaning))


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A CUDA driver that emulates a GPU, compiled once."""
    if shutil.which(build.COMPILER[0]) is None:
        pytest.skip(f"needs the C++ compiler {build.COMPILER[0]}")
    return build.build_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def idle_engine():
    """Leave no pending work, nor the error of a refused call, to the next test."""
    yield
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()
