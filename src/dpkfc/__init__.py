"""Curvature-aware differentially private training.

Three tiers: the command line `dpkfc`, a `Session` over a `Plan`, and an Opacus-shaped engine in
`dpkfc.integrations.opacus`. Under them lie pure functions for norms, clip factors, curvature
factors and noise.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

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


# --------------------------------------------------------------------------------------------------
# Modules under the names that they had before November 2026. Each import of a name warns.

FORMER_MODULES = {
    "dpkfc.app.datasets.formats": "dpkfc.app.datasets",
    "dpkfc.app.federated_demo": "dpkfc.app.demos",
    "dpkfc.app.owndata.records": "dpkfc.app.owndata",
    "dpkfc.app.recipes.recipe": "dpkfc.app.recipes",
    "dpkfc.app.tuning.pool": "dpkfc.app.tuning.runs",
    "dpkfc.assurance.audit": "dpkfc.audit.audit",
    "dpkfc.assurance.subject": "dpkfc.audit.harness",
    "dpkfc.audit.federated_runs": "dpkfc.audit.audit",
    "dpkfc.blocks": "dpkfc.linalg.blocks",
    "dpkfc.curvature.adadps": "dpkfc.curvature.diagonal",
    "dpkfc.curvature.damping": "dpkfc.curvature.kfac",
    "dpkfc.curvature.diagnostics": "dpkfc.curvature.probes",
    "dpkfc.curvature.dp2": "dpkfc.curvature.diagonal",
    "dpkfc.curvature.preconditioner": "dpkfc.curvature.kfac",
    "dpkfc.curvature.probe_loss": "dpkfc.curvature.refresh",
    "dpkfc.curvature.probe_pass": "dpkfc.curvature.refresh",
    "dpkfc.curvature.text_probes": "dpkfc.curvature.probes",
    "dpkfc.data.checks": "dpkfc.data.loading",
    "dpkfc.data.public": "dpkfc.data.loading",
    "dpkfc.data.units": "dpkfc.data.sampling",
    "dpkfc.early_stopping": "dpkfc.callbacks",
    "dpkfc.entropy": "dpkfc.privacy.rng",
    "dpkfc.features.joined": "dpkfc.features",
    "dpkfc.federated.app": "dpkfc.federated.flower",
    "dpkfc.federated.options": "dpkfc.federated.plan",
    "dpkfc.federated.partition": "dpkfc.federated.simulation",
    "dpkfc.federated.runner": "dpkfc.federated.simulation",
    "dpkfc.fsdp": "dpkfc.distributed",
    "dpkfc.gradients.clipping": "dpkfc.gradients.clipped_sum",
    "dpkfc.metric": "dpkfc.linalg.metric",
    "dpkfc.plan": "dpkfc.config",
    "dpkfc.postprocess.filters": "dpkfc.postprocess.steps",
    "dpkfc.postprocess.optimizers": "dpkfc.postprocess",
    "dpkfc.postprocess.protocol": "dpkfc.postprocess.pipeline",
    "dpkfc.preconditioning": "dpkfc.private_step",
    "dpkfc.privacy.events": "dpkfc.privacy.accounting",
    "dpkfc.privacy.extra_release": "dpkfc.privacy.mechanism",
    "dpkfc.privacy.grid": "dpkfc.privacy.mechanism",
    "dpkfc.privacy.tradeoff": "dpkfc.privacy.accounting",
    "dpkfc.recipes.federated_demo": "dpkfc.app.demos",
    "dpkfc.report.numbers": "dpkfc.report",
    "dpkfc.report.of_session": "dpkfc.report.card",
    "dpkfc.report.total": "dpkfc.report.verify",
    "dpkfc.studies.cell": "dpkfc.app.tuning.runs",
    "dpkfc.tracking.batch_rules": "dpkfc.tracking",
    "dpkfc.tracking.tracker": "dpkfc.tracking",
}


class FormerModule(ModuleType):
    """Looks names up in the module that took the place of another one."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"Deprecated: use `{target}`.")
        self._target = target

    def __getattr__(self, name: str) -> Any:
        """Return a name of the new module, with a warning."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(self._target), name)
        message = f"{self.__name__} is now {self._target}; import {name} from there"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value


def register_former_modules() -> None:
    """Make former modules importable. A module is loaded only when a name of it is asked for."""
    for name, target in FORMER_MODULES.items():
        sys.modules.setdefault(name, FormerModule(name, target))


register_former_modules()
