"""The operator as a Gluon layer."""

from __future__ import annotations

import gc
from typing import Any, ClassVar, Iterable, Iterator

import mxnet as mx
from mxnet.gluon.parameter import Parameter

from . import sym
from ._attributes import is_true
from ._errors import PREFIX

# What the built-in layer does not know; False is the default.
OWN_FLAGS = ("use_batch_stats", "step_global_stats")
_EXCLUDES = {"use_global_stats": "use_batch_stats", "use_batch_stats": "use_global_stats"}


class _MovingStatistic(Parameter):  # type: ignore[misc]
    """A parameter that hands out its array without a place in any recorded graph.

    Otherwise two recorded calls of one hybridized layer would share a node, and the backward of the
    first would end the graph of the second.
    """

    def data(self, ctx: Any = None) -> Any:
        return super().data(ctx).detach()


def descendants(block: mx.gluon.Block) -> Iterator[mx.gluon.Block]:
    """Yield a block, its children, their children and so on."""
    yield block
    for child in block._children.values():
        yield from descendants(child)


def clear_graphs(blocks: Iterable[mx.gluon.Block]) -> None:
    """Make every hybridized block that is, or holds, one of the blocks trace it anew."""
    changed = {id(block) for block in blocks}
    for block in _hybrid_blocks() if changed else []:
        if any(id(each) in changed for each in descendants(block)):
            block._clear_cached_op()


def _hybrid_blocks() -> list[Any]:
    """Return all hybrid blocks of this process: Gluon's blocks do not know their parents."""
    frozen = gc.get_freeze_count() > 0  # objects that gc.get_objects() leaves out
    if frozen:
        gc.unfreeze()
    try:
        return [o for o in gc.get_objects() if issubclass(type(o), mx.gluon.HybridBlock)]
    finally:
        if frozen:
            gc.freeze()


class BatchNorm(mx.gluon.nn.BatchNorm):  # type: ignore[misc]
    """Batch normalization layer; see `mxbn.nd.BatchNorm` for what it computes.

    It takes the place of `mx.gluon.nn.BatchNorm` (and is one): names, parameters, deferred
    initialisation and `repr` are the same, so that exported networks and saved parameters
    interchange with the built-in layer both ways.

    Parameters
    ----------
    axis : int, default 1
        The axis of the channels; negative counts from the end.
    momentum : float, default 0.9
        Weight of the old moving statistics in a step, from 0 to 1.
    epsilon : float, default 1e-5
        Added to the variance; finite, at least 0.
    center : bool, default True
        Train beta; otherwise it stays as initialised.
    scale : bool, default True
        Train gamma; otherwise 1 is used in its place.
    use_global_stats : bool, default False
        Use the moving statistics, also in training.
    use_batch_stats : bool, default False
        Use the statistics of the batch, also in inference.
    beta_initializer, gamma_initializer : str or mx.init.Initializer, default 'zeros', 'ones'
        Initial shift and scale.
    running_mean_initializer, running_variance_initializer : as above, default 'zeros', 'ones'
        Initial moving statistics.
    in_channels : int, default 0
        Number of channels; 0 takes it from the first data.
    step_global_stats : bool, default False
        Step the moving statistics in training also where use_global_stats uses them.
    **kwargs
        `prefix` and `params`, as of any Gluon block.

    Raises
    ------
    ValueError
        If momentum or epsilon is out of its range, or both statistics flags are set.

    Notes
    -----
    Parameters `gamma`, `beta`, `running_mean` and `running_var` have shape (channels,) and are
    float64 after ``cast('float64')``, otherwise float32 (also after ``cast('float16')``).
    The three flags (`use_global_stats`, `use_batch_stats`, `step_global_stats`) can be set at any
    time and act from the next call on, also when the layer or a network around it is hybridized.
    """

    _kwargs: dict[str, Any]  # the operator's attributes
    _fused: ClassVar[dict[str, Any]] = {}  # those that belong to the class

    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        use_batch_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        in_channels: int = 0,
        step_global_stats: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            **kwargs,
        )
        for flag, value in (
            ("use_batch_stats", use_batch_stats),
            ("step_global_stats", step_global_stats),
        ):
            if value is not False:
                self._kwargs[flag] = value
        self._check_attributes(self._kwargs)
        for parameter in (self.running_mean, self.running_var):
            # Made by the parent's class, which offers no choice of the parameter's class.
            parameter.__class__ = _MovingStatistic

    @property
    def use_global_stats(self) -> bool:
        """Whether the moving statistics are used, also in training."""
        return is_true(self._kwargs["use_global_stats"])

    @use_global_stats.setter
    def use_global_stats(self, value: bool) -> None:
        self._set_flag("use_global_stats", value)

    @property
    def use_batch_stats(self) -> bool:
        """Whether the statistics of the batch are used, also in inference."""
        return is_true(self._kwargs.get("use_batch_stats", False))

    @use_batch_stats.setter
    def use_batch_stats(self, value: bool) -> None:
        self._set_flag("use_batch_stats", value)

    @property
    def step_global_stats(self) -> bool:
        """Whether the moving statistics step in training also where they are used."""
        return is_true(self._kwargs.get("step_global_stats", False))

    @step_global_stats.setter
    def step_global_stats(self, value: bool) -> None:
        self._set_flag("step_global_stats", value)

    def _set_flag(self, flag: str, value: bool) -> None:
        other = _EXCLUDES.get(flag)
        if other and is_true(value) and getattr(self, other):
            raise ValueError(
                f"{PREFIX}use_global_stats and use_batch_stats of layer {self.name} would both be "
                "True, expected at most one: set the other to False first"
            )
        attributes = {**self._kwargs, flag: value}
        self._check_attributes(attributes)
        if is_true(value) == getattr(self, flag):
            return
        attributes[flag] = is_true(value)
        if flag in OWN_FLAGS and not attributes[flag]:
            del attributes[flag]  # repr is then that of the built-in layer
        self._kwargs = attributes
        clear_graphs([self])

    @staticmethod
    def _check_attributes(attributes: dict[str, Any]) -> None:
        """Have the operator refuse what it does not take."""
        sym.BatchNorm(mx.sym.var("data"), name="check", **attributes)

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """Normalize x; F is `mx.nd` or `mx.sym`."""
        return F.mxbn_BatchNorm(
            x, gamma, beta, running_mean, running_var, name="fwd", **self._kwargs, **self._fused
        )


class BatchNormReLU(BatchNorm):
    """`BatchNorm` and a ReLU in one pass: ``relu(batch_norm(x))``.

    It takes the place of `mx.gluon.nn.BatchNormReLU`, with data of any rank, axis and type, in
    every mode and on every device. Parameters and names are those of `BatchNorm`.
    """

    _fused: ClassVar[dict[str, Any]] = {"act_type": "relu"}


class BatchNormAddReLU(BatchNorm):
    """`BatchNorm`, an addition and a ReLU in one pass: ``relu(batch_norm(x) + addend)``.

    Called as ``layer(x, addend)``: the end of a residual block. The addend has the shape and type
    of x. Parameters and names are those of `BatchNorm`.
    """

    _fused: ClassVar[dict[str, Any]] = {"act_type": "relu", "with_addend": True}

    def hybrid_forward(  # type: ignore[override]
        self,
        F: Any,
        x: Any,
        addend: Any,
        gamma: Any,
        beta: Any,
        running_mean: Any,
        running_var: Any,
    ) -> Any:
        """Normalize x and add; F is `mx.nd` or `mx.sym`."""
        return F.mxbn_BatchNorm(
            x, gamma, beta, running_mean, running_var, addend=addend, name="fwd",
            **self._kwargs, **self._fused,
        )  # fmt: skip


class SyncBatchNorm(BatchNorm):
    """Batch normalization layer over the devices of this process; see `mxbn.nd.SyncBatchNorm`.

    It takes the place of `mx.gluon.contrib.nn.SyncBatchNorm`: every context has a part of the
    batch, as `mx.gluon.utils.split_and_load` makes them, and the layer computes what one
    `BatchNorm` would on the whole batch. After `mxbn.distributed.init()` a layer that is made is
    also shared by all processes.

    Parameters
    ----------
    in_channels : int, default 0
        Number of channels; 0 takes it from the first data.
    num_devices : int, optional
        How many contexts have a part of every batch, an empty one counts; default is the number of
        contexts that the layer's parameters are on when it is first used.
    momentum, epsilon, center, scale, use_global_stats : optional
        As of `BatchNorm`.
    beta_initializer, gamma_initializer : str or mx.init.Initializer, default 'zeros', 'ones'
        Initial shift and scale.
    running_mean_initializer, running_variance_initializer : as above, default 'zeros', 'ones'
        Initial moving statistics.
    axis : int, default 1
        The axis of the channels; negative counts from the end.
    use_batch_stats : bool, default False
        Use the statistics of the batch, also in inference.
    key : str, optional
        By which the devices (and processes) find each other; default is the layer's prefix.
    timeout : float, default 300
        After how many seconds without one of the devices the others get an error.
    step_global_stats : bool, default False
        As of `BatchNorm`.
    **kwargs
        `prefix` and `params`, as of any Gluon block.

    Raises
    ------
    ValueError
        As of `BatchNorm`, or if num_devices or timeout is out of its range.
    """

    def __init__(
        self,
        in_channels: int = 0,
        num_devices: int | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        *,
        axis: int = 1,
        use_batch_stats: bool = False,
        key: str | None = None,
        timeout: float = 300.0,
        step_global_stats: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            use_batch_stats=use_batch_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            step_global_stats=step_global_stats,
            **kwargs,
        )
        self._shared: dict[str, Any] = {"key": key or self.prefix, "timeout": timeout}
        if num_devices is not None:
            self._shared["num_devices"] = num_devices
        # Refuses what the operator does not take; and other processes learn of the layer here.
        sym.SyncBatchNorm(mx.sym.var("data"), name="check", **self._shared)

    def hybrid_forward(
        self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        """Normalize x; F is `mx.nd` or `mx.sym`."""
        shared = {"num_devices": len(self.gamma.list_ctx()), **self._shared}
        return F.mxbn_SyncBatchNorm(
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            name="fwd",
            **shared,
            **self._kwargs,
        )
