"""Curvature-aware differentially private training.

Three tiers: the command line `dpkfc`, a `Session` over a `Plan`, and an Opacus-shaped engine in
`dpkfc.integrations.opacus`. Under them lie pure functions for norms, clip factors, curvature factors and noise.
"""

from __future__ import annotations

from dpkfc.allocator import keep_freed_memory
from dpkfc.config import PrivacyConfig
from dpkfc.curvature.generated import generated_text
from dpkfc.curvature.leaves import DeadLeaves
from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probes import FeatureNoise, PinkNoise, PublicData, WhiteNoise
from dpkfc.curvature.refined import Refined
from dpkfc.curvature.tokens import TokenNoise
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.session import Session
from dpkfc.tracking import register_batch_rule

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
]
