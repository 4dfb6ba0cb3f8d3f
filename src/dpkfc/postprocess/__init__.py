"""Process a release before the optimizer, by read-outs and filters that cost no privacy."""

from __future__ import annotations

from dpkfc.postprocess.filters import EMA, DiSK, LowPass
from dpkfc.postprocess.optimizers import SOFIM, AdamBC, WeightEMA
from dpkfc.postprocess.pipeline import PostProcess, PostProcessBase

__all__ = [
    "EMA",
    "SOFIM",
    "AdamBC",
    "DiSK",
    "LowPass",
    "PostProcess",
    "PostProcessBase",
    "WeightEMA",
]
