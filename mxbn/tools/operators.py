"""MXNet's operators that normalize with moving statistics."""

from __future__ import annotations

from .._library import OPERATOR, SYNC_OPERATOR

MXBN, SYNC = OPERATOR, SYNC_OPERATOR
OURS = (MXBN, SYNC)
WITH_RELU = "_contrib_BatchNormWithReLU"
CONTRIB_SYNC = "_contrib_SyncBatchNorm"
OPERATORS = (*OURS, "BatchNorm", "CuDNNBatchNorm", "BatchNorm_v1", CONTRIB_SYNC, WITH_RELU)
INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var")
