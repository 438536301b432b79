"""What the operator found on this machine: MXNet's build, the processor, the GPUs."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from . import _gpu, _library


def info() -> dict[str, Any]:
    """Say what was found, and what the operator makes of it.

    Looking for GPUs opens NVIDIA's driver and loads the kernels on every GPU.

    Returns
    -------
    dict
        Of values that JSON can hold:

        ``mxnet`` : str
            The version.
        ``mxnet_build`` : str
            The wheel: ``'mxnet'`` (CPU) or ``'mxnet-cu112'``.
        ``instruction_set`` : str
            Of the kernels on this CPU: ``'avx512'``, ``'avx2'`` or ``'baseline'``.
        ``onednn_layouts`` : bool
            Whether data that a convolution left in one of oneDNN's layouts is taken as it is.
        ``cuda_driver`` : str or None
            The version of CUDA that the driver supports, such as ``'11.2'``.
        ``gpus`` : list of dict
            Per GPU, in MXNet's order: ``name``, ``compute_capability`` (such as ``'8.0'``) and
            ``image``, the kernels it runs: machine code (``'sm_80'``) or PTX (``'compute_90'``);
            or ``problem``.
        ``gpu_problem`` : str or None
            Why no GPU can be used.
    """
    found: dict[str, Any] = {
        "mxnet": mx.__version__,
        "mxnet_build": "mxnet-cu112" if mx.runtime.Features().is_enabled("CUDA") else "mxnet",
        "instruction_set": _library.instruction_set(),
        "onednn_layouts": _library.uses_onednn_layouts(),
        "cuda_driver": None,
        "gpus": [],
        "gpu_problem": None,
    }
    try:
        count, version = _gpu.count()
    except RuntimeError as error:
        found["gpu_problem"] = str(error)
        return found
    found["cuda_driver"] = f"{version // 1000}.{version % 1000 // 10}"
    found["gpus"] = [_describe(number) for number in range(count)]
    return found


def _describe(number: int) -> dict[str, str]:
    try:
        gpu = _gpu.describe(number)
    except RuntimeError as error:
        return {"problem": str(error)}
    return {
        "name": gpu.name.decode(),
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "image": gpu.image.decode(),
    }
