"""Models on disk: PREFIX-symbol.json and PREFIX-EPOCH.params, as MXNet writes them."""

from __future__ import annotations

import os
import re
from typing import Any, Iterator, NamedTuple

import mxnet as mx

from .files import atomic, refuse_existing
from .graph import Graph, Node
from .operators import INPUTS, OPERATORS
from .params_file import last_line, load_arrays, save_arrays
from .symbol_file import load_symbol, roles

_PARAMETERS = ("weight", "bias", "gamma", "beta")  # as MXNet's operators name them


class Checkpoint(NamedTuple):
    """A model: a Symbol, its parameters and its auxiliary states, by name.

    Attributes
    ----------
    symbol : mx.sym.Symbol
    arg_params, aux_params : dict of str to mx.nd.NDArray
    """

    symbol: Any
    arg_params: dict[str, Any]
    aux_params: dict[str, Any]

    @staticmethod
    def load(prefix: str, epoch: int) -> Checkpoint:
        """Read a checkpoint.

        Parameters
        ----------
        prefix, epoch : str, int
            Name ``prefix-symbol.json`` and ``prefix-%04d.params``.

        Returns
        -------
        Checkpoint

        Raises
        ------
        OSError
            If a file cannot be read.
        ValueError
            If it is not what it should be, or the files do not belong together. The message names
            the file.
        """
        symbol_file, params_file = names(prefix, epoch)
        symbol = load_symbol(symbol_file)
        arg_params, aux_params = _load_params(params_file)
        checkpoint = Checkpoint(symbol, arg_params, aux_params)
        try:
            checkpoint.check()
        except ValueError as error:
            raise ValueError(f"{params_file} does not belong to {symbol_file}: {error}") from error
        return checkpoint

    def save(self, prefix: str, epoch: int, force: bool = False) -> None:
        """Write the checkpoint.

        Parameters
        ----------
        prefix, epoch : str, int
            As for `load`.
        force : bool, default False
            Write over files that exist.

        Raises
        ------
        OSError
            If a file cannot be written, or exists and `force` is False.
        """
        symbol_file, params_file = names(prefix, epoch)
        if not force:
            refuse_existing(symbol_file, params_file)
        with atomic(symbol_file) as symbol_written, atomic(params_file) as params_written:
            self.symbol.save(symbol_written)
            save_arrays(params_written, self.arg_params, self.aux_params)

    def check(self, **inputs: tuple[int, ...]) -> None:
        """Raise ValueError if parameters are missing or have wrong shapes.

        Arguments that are no weight, bias, gamma or beta may be missing: they may be data, labels,
        or first states.

        Parameters
        ----------
        **inputs
            The shapes of data. Without them MXNet cannot tell what most shapes should be.
        """
        arrays = {**self.arg_params, **self.aux_params}
        nodes = [node for _, node in Graph.from_symbol(self.symbol).walk()]
        auxiliary = self.symbol.list_auxiliary_states()
        missing = [name for name in auxiliary if name not in self.aux_params]
        if missing:
            raise ValueError(
                f"{len(missing)} auxiliary states are missing, the first is {missing[0]}"
            )
        missing = [n for n in _parameters(nodes, self._not_given(inputs)) if n not in arrays]
        if missing:
            raise ValueError(f"{len(missing)} parameters are missing, the first is {missing[0]}")
        _check_layers(nodes, arrays)
        arguments = self.symbol.list_arguments()
        known = {name: self.arg_params[name].shape for name in arguments if name in self.arg_params}
        try:
            shapes = self.symbol.infer_shape_partial(**{**known, **inputs})
        except mx.base.MXNetError as error:
            raise ValueError(f"the shapes do not fit: {last_line(error)}") from error
        expected = {
            **dict(zip(arguments, shapes[0] or ())),
            **dict(zip(auxiliary, shapes[2] or ())),
        }
        for name, shape in expected.items():
            if name in arrays and shape and 0 not in shape and arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}, expected {shape}")

    def _not_given(self, inputs: dict[str, Any]) -> set[str]:
        return {*self.symbol.list_arguments()} - {*self.arg_params} - {*inputs}


def names(prefix: str, epoch: int) -> tuple[str, str]:
    """Return the names of a checkpoint's files, the Symbol's and that of the parameters."""
    return f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params"


def _epochs(prefix: str) -> Iterator[int]:
    folder, name = os.path.split(prefix)
    for entry in sorted(os.listdir(folder or ".")):
        match = re.fullmatch(re.escape(name) + r"-(\d{4,})\.params", entry)
        if match:
            yield int(match.group(1))


def _parameters(nodes: list[Node], names_of: set[str]) -> list[str]:
    """Return which of the variables are parameters."""
    found = []
    for node in nodes:
        if any(entry.node.name in names_of for entry in node.inputs):
            for entry, role in zip(node.inputs, roles(node)):
                if entry.node.name in names_of and role in _PARAMETERS:
                    found.append(entry.node.name)
    return found


def _check_layers(nodes: list[Node], arrays: dict[str, Any]) -> None:
    """Check BatchNorms: the built-in one reads and writes beyond arrays that are too short."""
    for node in nodes:
        if node.op in OPERATORS:
            variables = [entry.node.name for entry in node.inputs[1 : len(INPUTS)]]
            shapes = {name: arrays[name].shape for name in variables if name in arrays}
            if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
                listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
                raise ValueError(f"{node.name} has {listed}, expected one shape (channels,)")


def _load_params(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if not os.path.lexists(path):
        prefix, _, _ = path.rpartition("-")
        others = list(_epochs(prefix)) if os.path.isdir(os.path.dirname(prefix) or ".") else []
        there = f"; there are epochs {', '.join(map(str, others))}" if others else ""
        raise FileNotFoundError(f"{path} does not exist{there}")
    found: dict[str, dict[str, Any]] = {"arg": {}, "aux": {}}
    for key, array in load_arrays(path).items():
        kind, _, name = key.partition(":")
        if kind not in found or not name:
            raise ValueError(
                f"{path} holds {key!r}, expected names like arg:conv0_weight and "
                "aux:bn0_moving_mean (save_parameters of a Gluon block writes other names; export "
                "writes these)"
            )
        found[kind][name] = array
    return found["arg"], found["aux"]
