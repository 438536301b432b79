"""The contexts that the tests run on: CPUs, or GPUs where MXBN_TEST_DEVICE is gpu.

Importing it makes CONTEXT the default one, in every thread.
"""

import os
import threading

# MXNet hands the operators on all CPU contexts the same few temporary spaces, in the order of the
# program: one context's second layer would wait for the other's first. See the README's limits.
os.environ.setdefault("MXNET_CPU_TEMP_COPY", "1000")

import mxnet as mx

ON_GPU = os.environ.get("MXBN_TEST_DEVICE") == "gpu"
IS_FAKE = "FAKE_CUDA_DEVICES" in os.environ  # see cuda/fake_libraries.py
KIND = "gpu" if ON_GPU else "cpu"
CONTEXT, OTHER_CONTEXT = mx.Context(KIND, 0), mx.Context(KIND, 1)


class DefaultContext(threading.local):
    value = CONTEXT


mx.Context._default_ctx = DefaultContext()
