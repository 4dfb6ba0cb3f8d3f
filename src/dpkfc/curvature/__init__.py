"""Curvature from public or synthetic probes: factors, damping and the metric they give.

No function here takes private data: entry points take a probe, a model and a `capture` function.
"""

from __future__ import annotations

from dpkfc.curvature.preconditioner import KFAC, Preconditioner
from dpkfc.curvature.probes import FeatureNoise, PinkNoise, PublicData, WhiteNoise
from dpkfc.curvature.tokens import TokenNoise

__all__ = ["KFAC", "FeatureNoise", "PinkNoise", "Preconditioner", "PublicData", "TokenNoise", "WhiteNoise"]
