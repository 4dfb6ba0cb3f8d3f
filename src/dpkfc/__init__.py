"""Curvature-aware differentially private training.

Three tiers: the command line `dpkfc`, a `Session` over a `Plan`, and an Opacus-shaped engine in
`dpkfc.integrations.opacus`. Under them lie pure functions for norms, clip factors, curvature factors and noise.
"""

from __future__ import annotations

from dpkfc.config import Plan, PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.probes import DeadLeaves, FeatureNoise, PinkNoise, PublicData, Refined, WhiteNoise
from dpkfc.curvature.text_probes import TokenNoise, generated_text
from dpkfc.gradients.rules import register_layer_rule
from dpkfc.memory import keep_freed_memory
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.session import Session
from dpkfc.tracking.batch_rules import register_batch_rule

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "BudgetExhausted",
    "DeadLeaves",
    "FeatureNoise",
    "PinkNoise",
    "Plan",
    "PrivacyConfig",
    "PublicData",
    "Refined",
    "Session",
    "TokenNoise",
    "WhiteNoise",
    "generated_text",
    "keep_freed_memory",
    "register_batch_rule",
    "register_layer_rule",
]
