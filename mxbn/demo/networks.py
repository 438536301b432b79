"""A small convolutional network with three BatchNorm layers, through Module and through Gluon."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any, Callable, NamedTuple

import mxnet as mx
from mxnet.gluon import nn

import mxbn

from .data import Digits

FILTERS = (16, 32, 64)
LEARNING_RATE = 0.003
# Of every BatchNorm.
ATTRIBUTES: dict[str, Any] = {"eps": 1e-5, "momentum": 0.9, "fix_gamma": False}

Array = Any
OnEpoch = Callable[[str, int, float, float], None]  # network, epoch, loss, accuracy in training


class Trained(NamedTuple):
    """A network's probabilities of the test digits: trained, and after each way of loading it."""

    probabilities: Array
    loaded: dict[str, Array]
    seconds: float


def symbol() -> mx.sym.Symbol:
    """Make the network for Module.

    Returns
    -------
    mx.sym.Symbol
        From ``data`` and ``softmax_label`` to the probabilities of ten labels.
    """
    x = mx.sym.var("data")
    # Names of its own: Module draws initial values in the order of the parameters' names.
    with mx.name.NameManager():
        for filters in FILTERS:
            x = mx.sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), no_bias=True)
            x = mxbn.sym.BatchNorm(x, **ATTRIBUTES)
            x = mx.sym.Activation(x, act_type="relu")
            x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")
        x = mx.sym.FullyConnected(x, num_hidden=10)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def block() -> nn.HybridSequential:
    """Make the same network for Gluon.

    Returns
    -------
    mx.gluon.nn.HybridSequential
        From images to ten numbers per image, whose softmax are the probabilities.
    """
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        for filters in FILTERS:
            net.add(
                nn.Conv2D(filters, kernel_size=3, padding=1, use_bias=False),
                mxbn.gluon.BatchNorm(
                    epsilon=ATTRIBUTES["eps"],
                    momentum=ATTRIBUTES["momentum"],
                    scale=not ATTRIBUTES["fix_gamma"],
                ),
                nn.Activation("relu"),
                nn.MaxPool2D(),
            )
        net.add(nn.Dense(10))
    return net


def train_module(digits: Digits, epochs: int, folder: Path, on_epoch: OnEpoch) -> Trained:
    """Train with Module, save a checkpoint, load it and predict.

    Parameters
    ----------
    digits : Digits
        The data.
    epochs : int
        How often to go through the training digits.
    folder : pathlib.Path
        Receives the checkpoint.
    on_epoch : callable
        Called after every epoch.

    Returns
    -------
    Trained
        Loaded by `mxbn.Module.load`.
    """
    batches = digits.training_batches()
    metric = _metric()
    module = mxbn.Module(symbol())
    start = time.perf_counter()
    module.fit(
        batches,
        eval_metric=metric,
        epoch_end_callback=lambda epoch, *_: on_epoch("Module", epoch, *metric.get()[1]),
        optimizer="adam",
        optimizer_params=_schedule(epochs, batches),
        initializer=mx.init.Xavier(),
        num_epoch=epochs,
    )
    seconds = time.perf_counter() - start

    test = digits.test_batches()
    prefix = str(folder / "digits-module")
    module.save_checkpoint(prefix, epochs)
    loaded = mxbn.Module.load(prefix, epochs)
    loaded.bind(test.provide_data, test.provide_label, for_training=False)
    return Trained(
        module.predict(test).asnumpy(),
        {"mxbn.Module.load": loaded.predict(test).asnumpy()},
        seconds,
    )


def train_gluon(
    digits: Digits, epochs: int, folder: Path, on_epoch: OnEpoch
) -> tuple[Trained, nn.HybridSequential]:
    """Train with Gluon, save parameters and the exported network, load both and predict.

    Parameters
    ----------
    digits, epochs, folder, on_epoch
        As of `train_module`.

    Returns
    -------
    (Trained, mx.gluon.nn.HybridSequential)
        Loaded by `load_parameters` and by `SymbolBlock.imports`; and the trained network.
    """
    batches = digits.training_batches()
    metric = _metric()
    net = block()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", _schedule(epochs, batches))
    cross_entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    start = time.perf_counter()
    for epoch in range(epochs):
        batches.reset()
        metric.reset()
        for batch in batches:
            images, labels = batch.data[0], batch.label[0]
            with mx.autograd.record():
                output = net(images)
                loss = cross_entropy(output, labels)
            loss.backward()
            trainer.step(len(images))
            metric.update([labels], [mx.nd.softmax(output)])
        on_epoch("Gluon", epoch, *metric.get()[1])
    seconds = time.perf_counter() - start

    prefix = str(folder / "digits-gluon")
    net.save_parameters(f"{prefix}.params")
    net.export(prefix, epochs)
    same = block()
    same.load_parameters(f"{prefix}.params")
    with warnings.catch_warnings():
        # No fault: the type of the data is not in the file.
        warnings.filterwarnings("ignore", "Cannot decide type for the following arguments")
        exported = mx.gluon.SymbolBlock.imports(
            f"{prefix}-symbol.json", ["data"], f"{prefix}-{epochs:04d}.params"
        )
    images = mx.nd.array(digits.test_images)
    trained, same, exported = (
        mx.nd.softmax(each(images)).asnumpy() for each in (net, same, exported)
    )
    loaded = {"load_parameters": same, "SymbolBlock.imports": exported}
    return Trained(trained, loaded, seconds), net


def _metric() -> mx.metric.EvalMetric:
    return mx.metric.create(["ce", "acc"])


def _schedule(epochs: int, batches: mx.io.NDArrayIter) -> dict[str, Any]:
    steps = epochs * (batches.num_data // batches.batch_size)
    return {
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": mx.lr_scheduler.CosineScheduler(steps, base_lr=LEARNING_RATE),
    }
