"""Process a release before the optimizer, by read-outs and filters that cost no privacy."""

from __future__ import annotations

from dpkfc.postprocess.adam_bc import AdamBC
from dpkfc.postprocess.disk import DiSK
from dpkfc.postprocess.ema import EMA
from dpkfc.postprocess.low_pass import LowPass
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.postprocess.sofim import SOFIM
from dpkfc.postprocess.weight_average import WeightEMA

__all__ = [
    "EMA",
    "SOFIM",
    "AdamBC",
    "DiSK",
    "LowPass",
    "PostProcess",
    "WeightEMA",
]
