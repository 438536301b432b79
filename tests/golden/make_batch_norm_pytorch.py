"""Write batch_norm_pytorch.npz: PyTorch's autograd of BatchNorm2d in float64.

Not part of the tests: run it by hand, where PyTorch is installed (pip install torch==2.13.0), to
make the file anew:  python tests/golden/make_batch_norm_pytorch.py
"""

import os
from pathlib import Path

import numpy as np
import torch

TARGET = Path(__file__).with_name("batch_norm_pytorch.npz")
EPS, MOMENTUM = 1e-5, 0.1  # PyTorch's momentum weighs the new value


def main():
    rs = np.random.RandomState(0)
    shape, channels = (4, 3, 5, 6), 3
    values = {
        "x": rs.randn(*shape) * 2 + 1,
        "dy": rs.randn(*shape),
        "gamma": rs.uniform(0.5, 2, channels),
        "beta": rs.randn(channels),
        "moving_mean": rs.randn(channels),
        "moving_var": rs.uniform(0.5, 3, channels),
    }
    for mode in ("train", "eval"):
        layer = torch.nn.BatchNorm2d(channels, EPS, MOMENTUM, dtype=torch.float64)
        with torch.no_grad():
            layer.weight[:] = torch.from_numpy(values["gamma"])
            layer.bias[:] = torch.from_numpy(values["beta"])
            layer.running_mean[:] = torch.from_numpy(values["moving_mean"])
            layer.running_var[:] = torch.from_numpy(values["moving_var"])
        layer.train(mode == "train")
        x = torch.from_numpy(values["x"]).requires_grad_()
        y = layer(x)
        y.backward(torch.from_numpy(values["dy"]))
        values.update({
            f"{mode}_y": y.detach().numpy(),
            f"{mode}_dx": x.grad.numpy(),
            f"{mode}_dgamma": layer.weight.grad.numpy(),
            f"{mode}_dbeta": layer.bias.grad.numpy(),
            f"{mode}_running_mean": layer.running_mean.numpy().copy(),
            f"{mode}_running_var": layer.running_var.numpy().copy(),
        })  # fmt: skip
    new = TARGET.with_suffix(".new.npz")
    np.savez_compressed(new, eps=EPS, momentum=MOMENTUM, torch=torch.__version__, **values)
    os.replace(new, TARGET)


if __name__ == "__main__":
    main()
