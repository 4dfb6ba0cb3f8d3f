"""What is done to a release before the optimizer sees it: read-outs and filters. All of it is post-processing, free of charge."""

from __future__ import annotations

from dpkfc.postprocess.filters import EMA, DiSK, LowPass
from dpkfc.postprocess.optimizers import SOFIM, AdamBC, WeightEMA

__all__ = ["EMA", "SOFIM", "AdamBC", "DiSK", "LowPass", "WeightEMA"]
