"""Curvature-aware differentially private training.

Three tiers: the command line `dpkfc`, a `Session` over a `Plan`, and an Opacus-shaped engine in
`dpkfc.integrations.opacus`. Under them lie pure functions for norms, clip factors, curvature
factors and noise.
"""

from __future__ import annotations

from dpkfc.callbacks import Callback, EarlyStopping, StepReport
from dpkfc.checkpoint import CheckpointError
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.curvature import (
    DP2,
    GEP,
    KFAC,
    NGD,
    AdaDPS,
    DeadLeaves,
    FeatureNoise,
    PinkNoise,
    Preconditioner,
    Probe,
    PublicData,
    Refined,
    TokenNoise,
    WhiteNoise,
    generated_text,
)
from dpkfc.gradients.rules import register_layer_rule
from dpkfc.memory import keep_freed_memory
from dpkfc.postprocess import (
    EMA,
    SOFIM,
    AdamBC,
    DiSK,
    LowPass,
    PostProcess,
    PostProcessBase,
    WeightEMA,
)
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.session import Session
from dpkfc.tracking import register_batch_rule

__version__ = "0.1.0"

__all__ = [
    "DP2",
    "EMA",
    "GEP",
    "KFAC",
    "NGD",
    "SOFIM",
    "AdaDPS",
    "AdamBC",
    "BudgetExhausted",
    "Callback",
    "CheckpointError",
    "DeadLeaves",
    "DiSK",
    "EarlyStopping",
    "FeatureNoise",
    "LowPass",
    "PinkNoise",
    "Plan",
    "PostProcess",
    "PostProcessBase",
    "Preconditioner",
    "PrivacyConfig",
    "Probe",
    "PublicData",
    "Refined",
    "Session",
    "StepReport",
    "TokenNoise",
    "WeightEMA",
    "WhiteNoise",
    "generated_text",
    "keep_freed_memory",
    "register_batch_rule",
    "register_layer_rule",
]
