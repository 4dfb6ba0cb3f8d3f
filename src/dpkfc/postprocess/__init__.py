"""Process a release before the optimizer, by read-outs and filters that cost no privacy."""

from __future__ import annotations

from dpkfc.postprocess.pipeline import PostProcess, WeightEMA
from dpkfc.postprocess.steps import EMA, SOFIM, AdamBC, DiSK, LowPass

__all__ = [
    "EMA",
    "SOFIM",
    "AdamBC",
    "DiSK",
    "LowPass",
    "PostProcess",
    "WeightEMA",
]
