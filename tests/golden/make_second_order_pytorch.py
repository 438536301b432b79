"""Write second_order_pytorch.npz: PyTorch's double backward of batch_norm in float64.

Not part of the tests: run it by hand, where PyTorch is installed (pip install torch==2.13.0), to
make the file anew:  python tests/golden/make_second_order_pytorch.py
"""

import os
from pathlib import Path

import numpy as np
import torch

TARGET = Path(__file__).with_name("second_order_pytorch.npz")
INPUTS = Path(__file__).with_name("batch_norm_pytorch.npz")


def main():
    given = dict(np.load(INPUTS))
    rs = np.random.RandomState(1)
    channels = given["gamma"].shape
    values = {"u": rs.randn(*given["x"].shape), "p": rs.randn(*channels), "q": rs.randn(*channels)}
    heads = [torch.from_numpy(values[key]) for key in ("u", "p", "q")]
    for mode in ("train", "eval"):
        x, dy, gamma, beta = (
            torch.from_numpy(given[key]).requires_grad_() for key in ("x", "dy", "gamma", "beta")
        )
        y = torch.nn.functional.batch_norm(
            x,
            torch.from_numpy(given["moving_mean"].copy()),
            torch.from_numpy(given["moving_var"].copy()),
            gamma,
            beta,
            training=mode == "train",
            eps=float(given["eps"]),
        )
        gradients = torch.autograd.grad(y, (x, gamma, beta), dy, create_graph=True)
        second = torch.autograd.grad(gradients, (dy, x, gamma), heads)
        for key, value in zip(("dy", "x", "gamma"), second):
            values[f"{mode}_for_{key}"] = value.numpy()
    new = TARGET.with_suffix(".new.npz")
    np.savez_compressed(new, torch=torch.__version__, **values)
    os.replace(new, TARGET)


if __name__ == "__main__":
    main()
