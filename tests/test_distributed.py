"""Layers that several processes share, as mpirun starts them on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_script

MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
try:
    import mpi4py  # noqa: F401
except ImportError:
    MPIRUN = None

pytestmark = pytest.mark.cpu
needs_mpi = pytest.mark.skipif(
    MPIRUN is None, reason="needs mpi4py and mpirun: pip install 'mxbn[mpi]'"
)
CHECKS = [
    "check_parts_of_any_size",
    "check_far_from_zero",
    "check_several_devices_in_each_process",
    "check_layers_overlap",
    "check_a_process_that_does_not_come",
    "check_training",
]


def mpirun(processes, *arguments, timeout=100):
    here = Path(__file__).resolve().parent
    path = [str(here), str(here.parent), os.environ.get("PYTHONPATH")]
    command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return subprocess.run(
        [*command, sys.executable, "-W", "ignore", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "OMP_NUM_THREADS": "1",
        },
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_mpi
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_compute_what_one_does_on_the_whole_batch(processes):
    script = str(Path(__file__).with_name("distributed_worker.py"))
    result = mpirun(processes, script, *CHECKS)
    output = result.stdout + result.stderr
    for check in CHECKS:
        assert f"passed {check}" in result.stdout, output
    assert result.returncode == 0, output


@needs_mpi
def test_a_process_that_dies_ends_the_others():
    code = """
import mxnet as mx, mxbn
comm = mxbn.distributed.init()
layer = mxbn.gluon.SyncBatchNorm(in_channels=3)
layer.initialize()
if comm.rank == 1:
    raise ValueError("out of data")
with mx.autograd.record():
    layer(mx.nd.ones((2, 3))).wait_to_read()
"""
    result = mpirun(2, "-c", code, timeout=60)
    assert result.returncode != 0
    assert "ValueError: out of data" in result.stderr
    assert "mxbn: process 1 of 2 failed, which ends the others" in result.stderr


def test_without_mpi4py():
    code = """
    import sys
    sys.modules["mpi4py"] = None
    import mxbn
    try:
        mxbn.distributed.init()
    except ImportError as error:
        print(error)
    """
    assert "needs mpi4py and an MPI: pip install 'mxbn[mpi]'" in run_script(code).stdout
