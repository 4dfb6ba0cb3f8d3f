"""What is done to a release before the optimizer sees it: read-outs and filters. All of it is post-processing, free of charge."""

from __future__ import annotations

from dpkfc.postprocess.adam_bc import AdamBC
from dpkfc.postprocess.disk import DiSK
from dpkfc.postprocess.ema import WeightEMA
from dpkfc.postprocess.lowpass import LowPass
from dpkfc.postprocess.moving_average import EMA
from dpkfc.postprocess.sofim import SOFIM

__all__ = ["EMA", "SOFIM", "AdamBC", "DiSK", "LowPass", "WeightEMA"]
