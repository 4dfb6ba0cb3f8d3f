"""Curvature from public or synthetic probes: factors, damping and the metric they give.

No function here takes private data: entry points take a probe, a model and a `capture` function.
"""

from __future__ import annotations

from dpkfc.curvature.base import Preconditioner, PreconditionerState
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.curvature.generated_text import generated_text
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.noise_probes import DeadLeaves, FeatureNoise, PinkNoise, WhiteNoise
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.refined import Refined
from dpkfc.curvature.second_moments import SecondMoments
from dpkfc.curvature.token_noise import TokenNoise

__all__ = [
    "GEP",
    "KFAC",
    "NGD",
    "AdaDPS",
    "DeadLeaves",
    "FeatureNoise",
    "PinkNoise",
    "Preconditioner",
    "PreconditionerState",
    "PrivateOracle",
    "Probe",
    "PublicData",
    "Refined",
    "SecondMoments",
    "TokenNoise",
    "WhiteNoise",
    "generated_text",
]
