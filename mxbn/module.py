"""Module whose forwards run in their own modes, with a safe reading of the moving statistics."""

from __future__ import annotations

from typing import Any

import mxnet as mx


class Module(mx.mod.Module):  # type: ignore[misc]
    """`mx.mod.Module` whose parameters and auxiliary states are those of the last step.

    MXNet's executors do not tell its engine that they write auxiliary states. `get_params` of the
    built-in Module, right after `forward`, may therefore read moving statistics that are about to
    change, or not read them at all when nothing called `update`. This one waits first, and so do
    `save_params` and `save_checkpoint`, which call it.

    Nor do executors hand `is_train` to their operators when they are called, but when these run: a
    forward in another mode, right after one that still waits for its turn, changes the mode of that
    too. This one waits before such a change.
    """

    _is_train: bool | None = None  # of the last forward

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run forward, after all pending work if the last forward was of another mode.

        Parameters
        ----------
        data_batch : mx.io.DataBatch
            The data.
        is_train : bool, optional
            Training or inference; by default `for_training` of `bind`.
        """
        mode = bool(self.for_training if is_train is None else is_train)
        if self._is_train is not None and self._is_train != mode:
            mx.nd.waitall()
        self._is_train = mode
        super().forward(data_batch, is_train)

    def get_params(self) -> Any:
        """Wait for pending work, then return the parameters and auxiliary states.

        Returns
        -------
        (dict of str to mx.nd.NDArray, dict of str to mx.nd.NDArray)
            Parameters and auxiliary states by name.
        """
        if self.binded and self.params_initialized:
            mx.nd.waitall()
            self._params_dirty = True
        return super().get_params()

    @staticmethod
    def load(prefix: str, epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """Make a module of this class from a checkpoint, as `mx.mod.Module.load` does.

        Parameters
        ----------
        prefix, epoch : str, int
            Name ``prefix-symbol.json`` and ``prefix-%04d.params``.
        load_optimizer_states : bool, default False
            Also load ``prefix-%04d.states``.
        **kwargs
            For the constructor: `data_names`, `label_names`, `context`, ...

        Returns
        -------
        mxbn.Module
            Not bound yet; `bind` gives it the loaded parameters.
        """
        module = mx.mod.Module.load(prefix, epoch, load_optimizer_states, **kwargs)
        module.__class__ = Module
        return module  # type: ignore[no-any-return]
