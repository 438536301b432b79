"""BatchNorm layers of PyTorch put into a Gluon network."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import mxnet as mx

from ..gluon import BatchNorm, clear_graphs
from .from_pytorch import TorchLayer
from .layers import parameters_of


def set_layers(net: mx.gluon.Block, layers: Mapping[str, TorchLayer]) -> None:
    """Give layers of a Gluon network the arrays and attributes of PyTorch's.

    Parameters
    ----------
    net : mx.gluon.Block
        Initialized. Layers are found by their names (``resnetv10_batchnorm0``) or their places, as
        `save_parameters` writes them (``features.1``).
    layers : dict of str to TorchLayer
        From `from_pytorch`, with such `names`. For affine=False gamma and beta get grad_req 'null'.

    Raises
    ------
    ValueError
        If a layer is not there, is not initialized, has another number of channels, or is the
        built-in one and has no use_batch_stats. Nothing is changed then.
    """
    there = dict(_places(net))
    steps = []
    for layer in layers.values():
        if layer.name not in there:
            raise ValueError(
                f"mxbn: the network has no BatchNorm layer {layer.name}, it has: "
                + ", ".join(place for place, _ in _places(net))
            )
        block = there[layer.name]
        _check_parameters(block, layer)
        steps.append((block, layer, _attributes(block, layer)))
    for block, layer, attributes in steps:
        for role, parameter in parameters_of(block).items():
            parameter.set_data(layer.arrays[role])
        if layer.attributes["fix_gamma"]:
            block.gamma.grad_req = block.beta.grad_req = "null"
        block._kwargs = attributes
    clear_graphs(block for block, _, _ in steps)


def _places(block: mx.gluon.Block, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(block, mx.gluon.nn.BatchNorm):
        yield from ((place, block), (block.name, block))
    for name, child in block._children.items():
        yield from _places(child, f"{place}.{name}".lstrip("."))


def _check_parameters(block: Any, layer: TorchLayer) -> None:
    for role, parameter in parameters_of(block).items():
        if parameter._data is None and not parameter._deferred_init:
            raise ValueError(f"mxbn: {parameter.name} is not initialized: initialize the network")
        shape = layer.arrays[role].shape
        if parameter.shape not in (shape, (0,)):
            raise ValueError(
                f"mxbn: {parameter.name} has shape {parameter.shape}, expected {shape} as in "
                "PyTorch"
            )


def _attributes(block: Any, layer: TorchLayer) -> dict[str, Any]:
    attributes = {**block._kwargs, **layer.attributes}
    if not layer.attributes["use_batch_stats"]:
        del attributes["use_batch_stats"]
    elif not isinstance(block, BatchNorm):
        raise ValueError(
            f"mxbn: layer {layer.name} is the built-in one, expected mxbn's: it alone has "
            "use_batch_stats (mxbn.convert makes it so)"
        )
    BatchNorm._check_attributes(attributes)
    return attributes
