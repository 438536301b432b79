"""MXNet's operators that normalize with moving statistics."""

from __future__ import annotations

MXBN = "mxbn_BatchNorm"
SYNC = "mxbn_SyncBatchNorm"
OURS = (MXBN, SYNC)
WITH_RELU = "_contrib_BatchNormWithReLU"
CONTRIB_SYNC = "_contrib_SyncBatchNorm"
OPERATORS = (*OURS, "BatchNorm", "CuDNNBatchNorm", "BatchNorm_v1", CONTRIB_SYNC, WITH_RELU)
INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var")
