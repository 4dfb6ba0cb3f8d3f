"""Load modules under the names they had before November 2026; each import warns."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType

FORMER_MODULES = {
    "dpkfc.app.federated_demo": "dpkfc.app.demos",
    "dpkfc.app.tuning.pool": "dpkfc.app.tuning.runs",
    "dpkfc.assurance.audit": "dpkfc.audit.audit",
    "dpkfc.assurance.subject": "dpkfc.audit.harness",
    "dpkfc.blocks": "dpkfc.linalg.blocks",
    "dpkfc.curvature.damping": "dpkfc.curvature.kfac",
    "dpkfc.curvature.diagnostics": "dpkfc.curvature.probes",
    "dpkfc.curvature.preconditioner": "dpkfc.curvature.kfac",
    "dpkfc.curvature.probe_loss": "dpkfc.curvature.probe_pass",
    "dpkfc.curvature.text_probes": "dpkfc.curvature.probes",
    "dpkfc.data.public": "dpkfc.data.checks",
    "dpkfc.data.units": "dpkfc.data.sampling",
    "dpkfc.early_stopping": "dpkfc.callbacks",
    "dpkfc.entropy": "dpkfc.privacy.rng",
    "dpkfc.federated.app": "dpkfc.federated.flower",
    "dpkfc.federated.options": "dpkfc.federated.plan",
    "dpkfc.federated.partition": "dpkfc.federated.simulation",
    "dpkfc.federated.runner": "dpkfc.federated.simulation",
    "dpkfc.metric": "dpkfc.linalg.metric",
    "dpkfc.plan": "dpkfc.config",
    "dpkfc.postprocess.protocol": "dpkfc.postprocess.pipeline",
    "dpkfc.preconditioning": "dpkfc.private_step",
    "dpkfc.privacy.events": "dpkfc.privacy.accounting",
    "dpkfc.privacy.extra_release": "dpkfc.privacy.mechanism",
    "dpkfc.privacy.grid": "dpkfc.privacy.mechanism",
    "dpkfc.recipes.federated_demo": "dpkfc.app.demos",
    "dpkfc.report.of_session": "dpkfc.report.card",
    "dpkfc.studies.cell": "dpkfc.app.tuning.runs",
}


class FormerModule(ModuleType):
    """Looks names up in the module that took the place of another one."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"Deprecated: use `{target}`.")
        self._target = target

    def __getattr__(self, name: str) -> object:
        """Return a name of the new module, with a warning."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(self._target), name)
        warnings.warn(
            f"{self.__name__} is now {self._target}; import {name} from there",
            DeprecationWarning,
            stacklevel=2,
        )
        return value


def register_former_modules() -> None:
    """Make former modules importable. A module is loaded only when a name of it is asked for."""
    for name, target in FORMER_MODULES.items():
        sys.modules.setdefault(name, FormerModule(name, target))
