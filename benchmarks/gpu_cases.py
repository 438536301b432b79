"""What gpu_check.py computes: calls, shapes and data."""

import math
from collections import namedtuple

import numpy as np

from mxbn import _gpu

EPS = 1e-5


class Variant(
    namedtuple(
        "Variant",
        "name use_batch step fix_gamma add shift unwanted",
        defaults=(True, True, False, False, 0, ()),
    )
):
    """How a check calls: `use_batch` to `add` are the library's arguments.

    The tensors lie `shift` values off an aligned address; `unwanted` results get null pointers.
    """

    @property
    def added(self):
        """What the results hold before the call."""
        return 2.5 if self.add else math.nan


VARIANTS = (
    Variant("training"),
    Variant("training, fix_gamma, add", fix_gamma=True, add=True),
    Variant("training, unaligned", shift=1),
    Variant("training, unaligned, add", shift=1, add=True),
    Variant("batch's statistics, no step", step=False),
    Variant("moving statistics", use_batch=False, step=False),
    Variant("moving statistics, fix_gamma", use_batch=False, step=False, fix_gamma=True),
    Variant("moving statistics, add", use_batch=False, step=False, add=True),
)
TRAINING = VARIANTS[0]
NULLS = (
    Variant("training, only y", unwanted=("mean", "inv_std", "dx", "dgamma", "dbeta")),
    Variant("training, only dx", unwanted=("y", "mean", "inv_std", "dgamma", "dbeta")),
    Variant("training, only dgamma", unwanted=("y", "dx", "dbeta")),
    Variant("moving, only dx", use_batch=False, step=False, unwanted=("dgamma", "dbeta")),
    Variant("moving, only dbeta", use_batch=False, step=False, unwanted=("dx", "dgamma")),
)

SHAPES = (  # and the axis of the channels
    ((7,), 0),
    ((1000, 37), 1),
    ((4096, 256), 1),
    ((33, 1001, 1, 1), 1),
    ((3, 31, 7), 1),
    ((2, 257, 31), 1),
    ((2, 65, 32), 1),
    ((2, 96, 33), 1),
    ((6, 5, 1023), 1),
    ((1, 3, 1025), 1),
    ((3, 31, 7, 7), 1),
    ((8, 65, 33, 33), 1),
    ((1, 3, 513, 511), 1),
    ((64, 2, 32, 36), 1),
    ((4, 5, 6, 7), 0),
    ((4, 5, 6, 7), 2),
    ((5, 17, 19, 33), -1),
    ((32, 14, 14, 96), -1),
    ((3, 1025, 3), -1),
    ((9, 9, 1), -1),
    ((2, 33, 5, 13, 17), 1),
    ((2, 5, 13, 17, 24), -1),
)
QUICK_SHAPES = (
    ((7,), 0),
    ((65, 37), 1),
    ((3, 31, 7, 7), 1),
    ((4, 2, 32, 36), 1),
    ((3, 7, 5, 33), -1),
    ((70, 7, 64), -1),
    ((2, 5, 3, 4, 5), 1),
)


def one_value(d):
    d.x[:, 0] = 3


def not_finite(d):
    d.x[0, 1, 0] = np.inf
    d.x[-1, 3, -1] = np.nan


def largest_float16(d):
    d.x[:] = np.where(d.x > 0, 65504, -65504)


EDITS = {
    "a channel of one value, eps 0": one_value,
    "inf and NaN in two channels": not_finite,
    "+-65504": largest_float16,
}


class View(namedtuple("View", "outer channels inner")):
    """How the library sees a tensor of some shape with an axis of channels."""

    @classmethod
    def of(cls, shape, axis):
        axis %= len(shape)
        return cls(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


class Check(
    namedtuple("Check", "shape axis dtype variant mean std eps edit", defaults=(1, 2, EPS, None))
):
    """A forward and a backward on random data of a mean and a standard deviation, edited."""

    @property
    def text(self):
        words = [f"{'x'.join(map(str, self.shape))} axis {self.axis} {self.dtype}"]
        words.append(self.variant.name)
        if self.mean > 100 * self.std:
            words.append(f"mean/std {self.mean / self.std:g}")
        return ", ".join([*words, *([self.edit] if self.edit else [])])

    @property
    def view(self):
        return View.of(self.shape, self.axis)


def value_checks(quick):
    """Yield the checks of values."""
    for dtype in _gpu.DTYPES:
        for shape, axis in QUICK_SHAPES if quick else SHAPES:
            for variant in VARIANTS:
                yield Check(shape, axis, dtype, variant)
        far = 1e3 if dtype == "float16" else 1e5
        for shape, axis in (((3, 5, 40), 1), ((90, 5), -1)):
            for variant in NULLS:
                yield Check(shape, axis, dtype, variant)
            yield Check(shape, axis, dtype, TRAINING, mean=far, std=1)
            yield Check(shape, axis, dtype, TRAINING, eps=0, edit="a channel of one value, eps 0")
            yield Check(shape, axis, dtype, TRAINING, edit="inf and NaN in two channels")
            yield Check(shape, axis, "float16", TRAINING, edit="+-65504")
            yield Check((0, *shape[1:]), axis, dtype, TRAINING)
        yield Check((1, 5, 1), 1, dtype, TRAINING)
        if not quick:
            yield Check((16, 5, 65, 65), 1, dtype, TRAINING, mean=far, std=1)
            yield Check((16, 65, 65, 5), -1, dtype, TRAINING, mean=far, std=1)


def repeat_checks(quick):
    """Yield the checks whose bits must be the same in every run."""
    shapes = QUICK_SHAPES[1:6] if quick else SHAPES[1:3] + SHAPES[11:14] + SHAPES[16:18]
    for dtype in _gpu.DTYPES:
        for shape, axis in shapes:
            yield Check(shape, axis, dtype, TRAINING)
