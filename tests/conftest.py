"""What all tests share: see helpers.py for drawings, right values and comparisons."""

import contextlib

import mxnet as mx
import pytest


@pytest.fixture(autouse=True)
def idle_engine():
    """Leave no pending work, nor the error of a refused call, to the next test."""
    yield
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()
