"""BatchNorm layers of PyTorch's state dicts as arrays and attributes of MXNet's."""

from __future__ import annotations

import os
from typing import Any, Iterator, Mapping, NamedTuple

import mxnet as mx
import numpy as np

from ..gluon import BatchNorm

ENTRIES = {  # of a state dict, for each input of the operator
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_var": "running_var",
}
EPS = 1e-5  # PyTorch's defaults
MOMENTUM = 0.1
AS_IT_IS = (
    "running_var is that of PyTorch, made of the unbiased variances of batches, and is taken as it "
    "is: give values_per_channel to have the biased ones that MXNet keeps"
)
NO_AFFINE = "affine=False: gamma is fixed at 1, and beta is 0 and must not be trained"
NO_STATISTICS = "track_running_stats=False: the statistics of the batch count in inference too"
CUMULATIVE = (
    "momentum=None: PyTorch averaged all batches alike, which MXNet does not: the average is "
    "taken, and further training moves it with momentum 0.9"
)


class TorchLayer(NamedTuple):
    """A BatchNorm layer of PyTorch in MXNet's terms.

    Attributes
    ----------
    name : str
        What it is called in MXNet.
    arrays : dict of str to mx.nd.NDArray
        gamma, beta, moving_mean and moving_var, shape (channels,), float64 if one was float64 in
        PyTorch, otherwise float32.
    attributes : dict
        ``eps, momentum, fix_gamma, use_batch_stats`` of the operator.
    remarks : tuple of str
        What is not the same as in PyTorch.
    """

    name: str
    arrays: dict[str, Any]
    attributes: dict[str, Any]
    remarks: tuple[str, ...]


def from_pytorch(
    state: Any,
    names: Mapping[str, str] | None = None,
    *,
    values_per_channel: Any = None,
    eps: Any = EPS,
    momentum: Any = MOMENTUM,
) -> dict[str, TorchLayer]:
    """Take the BatchNorm layers out of a state dict of PyTorch.

    Parameters
    ----------
    state : str, os.PathLike or mapping of str to array
        The arrays by name, or an .npz file of them, as this writes it:
        ``np.savez(file, **{name: t.cpu().numpy() for name, t in net.state_dict().items()})``.
    names : mapping of str to str, optional
        Which layers to take, and what they are called in MXNet, as in
        ``{'layer1.0.bn1': 'stage1_batchnorm0'}``; the state dict of a single layer has the layer
        ``''``. By default all with running statistics (an InstanceNorm that tracks them looks the
        same), with underscores for dots.
    values_per_channel : int or dict of str to int, optional
        Over how many values a training step took the variance of a channel: samples of a batch (on
        one device) times positions; in a dict, by PyTorch's name of the layer. The running variance
        is then times (m - 1) / m. By default it is taken as it is.
    eps : float or dict of str to float, default 1e-5
        As the layers were made with in PyTorch: a state dict does not hold it.
    momentum : float or None, or dict of str to them, default 0.1
        As in PyTorch: the weight of the new value, MXNet's is 1 - momentum. None is the cumulative
        average, which MXNet has not: see `remarks` of the layer.

    Returns
    -------
    dict of str to TorchLayer
        By PyTorch's name, in the order of `names` or of the state dict.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not what it should be, a layer is not in it, or an argument is out of its range.

    Notes
    -----
    PyTorch builds running_var of variances divided by m - 1, MXNet of those divided by m. The
    value that running_var started with, 1, has the weight (1 - momentum) ** num_batches_tracked;
    it is scaled along, which matters only after few steps. num_batches_tracked itself is not
    needed.

    A layer made with affine=False has no weight and bias: gamma is 1 and fixed, beta 0. One made
    with track_running_stats=False has no running statistics and must be in `names`: it gets
    use_batch_stats, and the moving statistics 0 and 1.
    """
    entries = state if isinstance(state, Mapping) else _read(state)
    if names is None:
        keys = [key.rpartition(".") for key in entries]
        found = [layer for layer, _, entry in keys if entry == ENTRIES["moving_mean"]]
        names = {layer: layer.replace(".", "_") or "batchnorm" for layer in found}
    if len(set(names.values())) < len(names):
        raise ValueError("mxbn: names gives one name to several layers")
    return {
        source: _layer(
            entries,
            source,
            name,
            _option(values_per_channel, source, None),
            _option(eps, source, EPS),
            _option(momentum, source, MOMENTUM),
        )
        for source, name in names.items()
    }


def as_params(
    layers: Mapping[str, TorchLayer], statistics: str = "moving"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays by the names that a Symbol or a Gluon network gives them.

    Parameters
    ----------
    layers : dict of str to TorchLayer
        From `from_pytorch`.
    statistics : {'moving', 'running'}, default 'moving'
        'running' for the names of Gluon: NAME_running_mean.

    Returns
    -------
    arg_params, aux_params : dict of str to mx.nd.NDArray
        As `Module.set_params` takes them, with allow_missing=True.
    """
    arguments, states = {}, {}
    for layer in layers.values():
        for role in ("gamma", "beta"):
            arguments[f"{layer.name}_{role}"] = layer.arrays[role]
        for moment in ("mean", "var"):
            states[f"{layer.name}_{statistics}_{moment}"] = layer.arrays[f"moving_{moment}"]
    return arguments, states


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            loaded = np.load(file, allow_pickle=False)
            entries = dict(loaded.items()) if isinstance(loaded, np.lib.npyio.NpzFile) else {}
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds
            raise ValueError(f"mxbn: {path} is not an .npz file of arrays: {error}") from error
    if not entries or not all(isinstance(each, np.ndarray) for each in entries.values()):
        raise ValueError(
            f"mxbn: {path} is not an .npz file of arrays (torch.save writes another format): write "
            "it with np.savez(file, **{n: t.cpu().numpy() for n, t in net.state_dict().items()})"
        )
    return entries


def _option(value: Any, layer: str, default: Any) -> Any:
    return value.get(layer, default) if isinstance(value, Mapping) else value


def _layer(
    entries: Mapping[str, Any], source: str, name: str, m: Any, eps: float, momentum: float | None
) -> TorchLayer:
    keys = {role: f"{source}.{entry}".lstrip(".") for role, entry in ENTRIES.items()}
    arrays = {role: _array(entries, key) for role, key in keys.items() if key in entries}
    affine, tracked = "gamma" in arrays, "moving_mean" in arrays
    if not arrays or ("beta" in arrays) != affine or ("moving_var" in arrays) != tracked:
        there = ", ".join(ENTRIES[role] for role in arrays) or "nothing"
        raise ValueError(
            f"mxbn: the state dict has {there} of layer {source}, expected weight and bias, "
            "running_mean and running_var, or all four"
        )
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1:
        raise ValueError(f"mxbn: the arrays of layer {source} have the shapes {sorted(shapes)}")
    if m is not None and m < 2:
        raise ValueError(f"mxbn: values_per_channel of layer {source} is {m}, expected at least 2")
    if momentum is not None and not 0 <= momentum <= 1:
        raise ValueError(
            f"mxbn: momentum of layer {source} is {momentum}, expected None or from 0 to 1"
        )
    dtype = np.result_type("float32", *(array.dtype for array in arrays.values()))
    channels = np.ones(shapes.pop(), dtype)
    complete = {"gamma": channels, "beta": channels * 0, "moving_mean": channels * 0,
                "moving_var": channels, **arrays}  # fmt: skip
    if tracked and m is not None:
        complete["moving_var"] = complete["moving_var"].astype("float64") * ((m - 1) / m)
    attributes = {
        "eps": eps,
        "momentum": 0.9 if momentum is None else 1 - momentum,
        "fix_gamma": not affine,
        "use_batch_stats": not tracked,
    }
    BatchNorm._check_attributes(attributes)
    return TorchLayer(
        name,
        {role: mx.nd.array(array, dtype=dtype) for role, array in complete.items()},
        attributes,
        tuple(_remarks(affine, tracked, m, momentum)),
    )


def _array(entries: Mapping[str, Any], key: str) -> Any:
    array = np.asarray(entries[key])
    if array.ndim != 1 or array.dtype.kind != "f":
        raise ValueError(
            f"mxbn: {key} is {array.dtype} of shape {array.shape}, expected a floating type and "
            "one dimension: one value per channel"
        )
    return array


def _remarks(affine: bool, tracked: bool, m: Any, momentum: float | None) -> Iterator[str]:
    if tracked and m is None:
        yield AS_IT_IS
    if not affine:
        yield NO_AFFINE
    if not tracked:
        yield NO_STATISTICS
    if momentum is None:
        yield CUMULATIVE
