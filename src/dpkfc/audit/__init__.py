"""Audits of a training: checks of the step that runs, and attacks that bound ε from below.

`audit_step` checks the training step of a plan without training. `audit_one_run` trains once with
canaries, and `infer_membership` attacks a trained model.
"""

from __future__ import annotations

from dpkfc.audit.attacks import (
    MembershipResult,
    OneRunResult,
    audit_one_run,
    epsilon_lower,
    infer_membership,
)
from dpkfc.audit.audit import Audit, audit_step
from dpkfc.audit.harness import Finding, Subject, select_failed

__all__ = [
    "Audit",
    "Finding",
    "MembershipResult",
    "OneRunResult",
    "Subject",
    "audit_one_run",
    "audit_step",
    "epsilon_lower",
    "infer_membership",
    "select_failed",
]
