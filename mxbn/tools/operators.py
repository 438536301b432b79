"""MXNet's operators that normalize with moving statistics."""

from __future__ import annotations

MXBN = "mxbn_BatchNorm"
WITH_RELU = "_contrib_BatchNormWithReLU"
OPERATORS = (  # the first three compute the same
    MXBN,
    "BatchNorm",
    "CuDNNBatchNorm",
    "BatchNorm_v1",
    "_contrib_SyncBatchNorm",
    WITH_RELU,
)
INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var")
