"""Models on disk: PREFIX-symbol.json and PREFIX-EPOCH.params, as MXNet writes them."""

from __future__ import annotations

import json
import os
import re
from ctypes import byref
from typing import Any, Iterator, NamedTuple

import mxnet as mx
from mxnet.base import _LIB, OpHandle, c_str, check_call

from .files import atomic, refuse_existing



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
        symbol = _load_symbol(symbol_file)
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
        arrays = {f"arg:{name}": array for name, array in self.arg_params.items()}
        arrays.update({f"aux:{name}": array for name, array in self.aux_params.items()})
        with atomic(symbol_file) as symbol_written, atomic(params_file) as params_written:
            self.symbol.save(symbol_written)
            mx.nd.save(params_written, arrays)

    def check(self) -> None:
        """Raise ValueError if parameters are missing or have wrong shapes.

        Data and labels have no parameters, and neither have variables that take part in nothing
        but a loss: an argument may be missing if nothing can tell its shape. Auxiliary states may not.
        """
        missing = [n for n in self.symbol.list_auxiliary_states() if n not in self.aux_params]
        if missing:
            raise ValueError(
                f"{len(missing)} auxiliary states are missing, the first is {missing[0]}"
            )
        arguments = set(self.symbol.list_arguments())
        known = {n: a.shape for n, a in self.arg_params.items() if n in arguments}
        try:
            shapes = self.symbol.infer_shape_partial(**known)
        except mx.base.MXNetError as error:
            raise ValueError(f"the shapes do not fit: {last_line(error)}") from error
        expected = dict(zip(self.symbol.list_auxiliary_states(), shapes[2] or ()))
        for name, shape in expected.items():
            found = self.aux_params[name].shape
            if shape and 0 not in shape and found != tuple(shape):
                raise ValueError(f"{name} has shape {found}, expected {tuple(shape)}")


def names(prefix: str, epoch: int) -> tuple[str, str]:
    """Return the names of a checkpoint's files, the Symbol's and that of the parameters."""
    return f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params"


def last_line(error: Exception) -> str:
    """Return what MXNet says at the end of a message, after a stack trace if there is one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].replace("MXNetError: ", "").strip()


def _epochs(prefix: str) -> Iterator[int]:
    folder, name = os.path.split(prefix)
    for entry in sorted(os.listdir(folder or ".")):
        match = re.fullmatch(re.escape(name) + r"-(\d{4,})\.params", entry)
        if match:
            yield int(match.group(1))


def _load_symbol(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read()
            described = json.loads(text)
            _check_nodes(described)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            reason = error if isinstance(error, ValueError) else "its nodes are not in order"
            raise ValueError(f"{path} does not hold an MXNet Symbol: {reason}") from error
    try:
        return mx.sym.load_json(text)
    except mx.base.MXNetError as error:
        raise ValueError(f"{path} does not hold an MXNet Symbol: {last_line(error)}") from error


def _check_nodes(described: Any) -> None:
    """Refuse what would make MXNet read beyond its arrays."""
    nodes = described["nodes"]
    for place, node in enumerate(nodes):
        if node["op"] != "null":
            _check_operator(node["op"], node["name"])
        for source, output, *_ in node["inputs"]:
            if not 0 <= source < place or output < 0:
                raise ValueError(f"node {node['name']} takes a value that is not there")
    for source, *_ in described["heads"]:
        if not 0 <= source < len(nodes):
            raise ValueError("an output is not there")


def _check_operator(operator: str, name: str) -> None:
    try:
        check_call(_LIB.NNGetOpHandle(c_str(operator), byref(OpHandle())))
    except mx.base.MXNetError as error:
        raise ValueError(f"node {name} is of the operator {operator}, which is unknown") from error


def _load_params(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if not os.path.isfile(path):
        prefix, _, _ = path.rpartition("-")
        others = list(_epochs(prefix)) if os.path.isdir(os.path.dirname(prefix) or ".") else []
        there = f"; there are epochs {', '.join(map(str, others))}" if others else ""
        raise FileNotFoundError(f"{path} does not exist{there}")
    with open(path, "rb"):
        pass  # a file that may not be read is an OSError, not a damaged one
    try:
        arrays = mx.nd.load(path)
    except (mx.base.MXNetError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or not a parameter file: {last_line(error)}") from error
    if not isinstance(arrays, dict):
        raise ValueError(f"{path} holds arrays without names, expected names like arg:conv0_weight")
    found: dict[str, dict[str, Any]] = {"arg": {}, "aux": {}}
    for key, array in arrays.items():
        kind, _, name = key.partition(":")
        if kind not in found or not name:
            raise ValueError(
                f"{path} holds {key!r}, expected names like arg:conv0_weight and aux:bn0_moving_mean "
                "(save_parameters of a Gluon block writes other names; export writes these)"
            )
        found[kind][name] = array
    return found["arg"], found["aux"]
