"""Curvature-aware differentially private training.

Three tiers: the command line `dpkfc`, a `Session` over a `Plan`, and an Opacus-shaped engine in
`dpkfc.integrations.opacus`. Under them lie pure functions for norms, clip factors, curvature
factors and noise.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpkfc.allocator import keep_freed_memory
    from dpkfc.callbacks import Callback, StepReport
    from dpkfc.checkpoint import CheckpointError
    from dpkfc.config import Plan, PrivacyConfig
    from dpkfc.curvature import (
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
    from dpkfc.early_stopping import EarlyStopping
    from dpkfc.gradients.rules import register_layer_rule
    from dpkfc.postprocess import (
        EMA,
        SOFIM,
        AdamBC,
        DiSK,
        LowPass,
        PostProcess,
        WeightEMA,
    )
    from dpkfc.privacy.ledger import BudgetExhausted
    from dpkfc.session import Session
    from dpkfc.tracking.batch_rules import register_batch_rule

__version__ = "0.1.0"

__all__ = [
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

# Where the names are. A module is imported when a name of it is used: torch alone takes seconds.
_NAMES = {
    "dpkfc.callbacks": "Callback StepReport",
    "dpkfc.early_stopping": "EarlyStopping",
    "dpkfc.checkpoint": "CheckpointError",
    "dpkfc.config": "Plan PrivacyConfig",
    "dpkfc.curvature": "GEP KFAC NGD AdaDPS Preconditioner Probe DeadLeaves FeatureNoise"
    " PinkNoise PublicData Refined TokenNoise WhiteNoise generated_text",
    "dpkfc.gradients.rules": "register_layer_rule",
    "dpkfc.allocator": "keep_freed_memory",
    "dpkfc.postprocess": "EMA SOFIM AdamBC DiSK LowPass PostProcess WeightEMA",
    "dpkfc.privacy.ledger": "BudgetExhausted",
    "dpkfc.session": "Session",
    "dpkfc.tracking.batch_rules": "register_batch_rule",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package, when it is first used."""
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        try:
            value = import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return [*globals(), *__all__]
