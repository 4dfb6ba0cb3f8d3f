"""Curvature from public or synthetic probes: factors, damping and the metric they give.

No function here takes private data: entry points take a probe, a model and a `capture` function.
"""

from __future__ import annotations

from dpkfc.curvature.adadps import AdaDPS
from dpkfc.curvature.delayed import DP2
from dpkfc.curvature.generated import generated_text
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.leaves import DeadLeaves
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.oracle import PrivateOracle
from dpkfc.curvature.preconditioner import KFAC, Preconditioner
from dpkfc.curvature.probes import FeatureNoise, PinkNoise, PublicData, WhiteNoise
from dpkfc.curvature.refined import Refined
from dpkfc.curvature.tokens import TokenNoise

__all__ = [
    "DP2",
    "GEP",
    "KFAC",
    "NGD",
    "AdaDPS",
    "DeadLeaves",
    "FeatureNoise",
    "PinkNoise",
    "Preconditioner",
    "PrivateOracle",
    "PublicData",
    "Refined",
    "TokenNoise",
    "WhiteNoise",
    "generated_text",
]
