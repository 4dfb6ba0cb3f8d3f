"""Audits of a training: checks of the step that runs, and attacks that bound ε from below.

`audit_step` checks the training step of a plan without training. `audit_one_run` trains once with
canaries, and `infer_membership` attacks a trained model.
"""

from __future__ import annotations

from dpkfc.audit.epsilon_bounds import epsilon_lower
from dpkfc.audit.findings import Finding, select_failed
from dpkfc.audit.harness import Subject
from dpkfc.audit.membership import MembershipResult, infer_membership
from dpkfc.audit.one_run import OneRunResult, audit_one_run
from dpkfc.audit.step import Audit, audit_step

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
