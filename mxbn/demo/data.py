"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any, NamedTuple

import mxnet as mx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH_SIZE = 32

Array = Any


class Digits(NamedTuple):
    """Images (float32, from 0 to 1, shape (n, 1, 8, 8)) and labels (n,), for training and test."""

    train_images: Array
    test_images: Array
    train_labels: Array
    test_labels: Array

    def training_batches(self) -> mx.io.NDArrayIter:
        """Return an iterator over shuffled batches; incomplete ones are left out."""
        return mx.io.NDArrayIter(
            self.train_images,
            self.train_labels,
            BATCH_SIZE,
            shuffle=True,
            last_batch_handle="discard",
        )

    def test_batches(self) -> mx.io.NDArrayIter:
        """Return an iterator over the test digits in their order."""
        return mx.io.NDArrayIter(self.test_images, self.test_labels, BATCH_SIZE)

    def accuracy(self, probabilities: Array) -> float:
        """Return the share of the test digits to which the right label is the most probable."""
        return float((probabilities.argmax(axis=1) == self.test_labels).mean())


def load() -> Digits:
    """Load 1797 digits of 8 x 8 pixels, a fixed quarter of them for the test.

    Returns
    -------
    Digits
        With every label in the same proportion in both parts.
    """
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype("float32")
    labels = digits.target.astype("float32")
    return Digits(
        *train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    )
