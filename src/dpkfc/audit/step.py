"""Audit a training step from outside, white-box, by the checks of this folder.

It checks charges, checkpoints, the step on neighbouring batches and on batches of many sizes, and
whether two worlds can be distinguished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from dpkfc.audit.batch_sizes import check_batch_sizes
from dpkfc.audit.charges import check_accounting, check_charges
from dpkfc.audit.checkpoints import check_checkpoints
from dpkfc.audit.contributions import check_contributions
from dpkfc.audit.distinguishing import RUNS, distinguish_neighbors
from dpkfc.audit.findings import Finding, select_failed
from dpkfc.audit.harness import Progress, Subject, ignore_progress
from dpkfc.audit.low_bits import check_low_bits
from dpkfc.audit.noise_tests import check_noise, check_run_noise
from dpkfc.audit.replay import (
    prepare_canaries,
    replay,
)
from dpkfc.audit.sampler_tests import check_sampler
from dpkfc.config import Plan


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict on a step.

    Attributes:
        findings: one a check.
        plan_hash: of the audited plan.
        canaries: how many were used.
        seconds: duration.
        date: in UTC.
    """

    findings: tuple[Finding, ...]
    plan_hash: str
    canaries: int
    seconds: float
    date: str

    @property
    def passed(self) -> bool:
        """Whether every check held.

        An audit that holds does not prove privacy; one that fails disproves it.
        """
        return not select_failed(self.findings)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card."""
        return {
            "passed": self.passed,
            "date": self.date,
            "plan_hash": self.plan_hash,
            "canaries": self.canaries,
            "seconds": round(self.seconds, 1),
            "findings": [finding.describe() for finding in self.findings],
        }


def audit_step(
    subject: Subject,
    *,
    runs: int = RUNS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Audit:
    """Audit the training step of a plan.

    The checks cover sensitivity, contributions, batch sizes, metric, the optimizer's gradients,
    noise, distinguishability, sampler, ledger, checkpoint and accounting.

    Args:
        subject: plan, model, examples and loss.
        runs: releases with and without a canary in the distinguishing test.
        progress: called with (name of the check, done, of all).

    Raises:
        ValueError: a plan without noise or with a repeatable stream; a random forward pass.

    Example:
        >>> subject = Subject(plan=plan, model=make_model, dataset=(x, y), loss_fn=loss_fn)
        >>> audit = audit_step(subject)
        >>> print(audit.passed, [f.check for f in audit.findings if not f.passed])
        True []
    """
    plan = subject.plan
    if plan.noise_multiplier == 0:
        raise ValueError("the plan adds no noise: there is no guarantee to audit")
    if plan.test_mode:
        raise ValueError("the plan is in test mode with repeatable noise: drop test_mode_seed")
    if plan.bands > 1:
        raise ValueError(
            f"the audit tests independent noise, and this plan's has {plan.bands} bands; audit it"
            " with noise='gaussian' (docs/methods/correlated-noise.md)"
        )
    started = time.perf_counter()

    def report(name: str) -> Progress:
        if progress is None:
            return ignore_progress
        return partial(progress, name)

    canaries = prepare_canaries(subject)
    checks: dict[str, Callable[[Progress], Iterable[Finding]]] = {
        "neighbour replay": lambda p: replay(subject, canaries, progress=p).findings(),
        "contributions": lambda p: [check_contributions(subject, canaries, progress=p)],
        "batch sizes": lambda p: check_batch_sizes(subject, progress=p),
        "noise distribution": lambda p: check_noise(subject, progress=p),
        "noise of a run": lambda p: check_run_noise(subject, progress=p),
        "low bits": lambda p: [check_low_bits(subject, progress=p)],
        "two worlds": lambda p: [
            distinguish_neighbors(subject, canaries, runs=runs, progress=p).finding()
        ],
        "ledger": lambda p: check_charges(subject),
        "checkpoint": lambda p: [check_checkpoints(subject)],
        "sampler": lambda p: _summarize_sampler(plan),
        "accounting": lambda p: check_accounting(plan),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += list(check(report(name)))
        except RuntimeError as error:
            finding = Finding(
                check=name,
                measured="could not be ended",
                bound="can be",
                passed=False,
                detail=str(error),
            )
            findings.append(finding)
    return Audit(
        findings=tuple(findings),
        plan_hash=plan.hash,
        canaries=len(canaries.names),
        seconds=time.perf_counter() - started,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _summarize_sampler(plan: Plan) -> list[Finding]:
    """Return the failed tests of a certified sampler, or one finding that all held.

    A sampler without a certified event fails by its name.
    """
    if not plan.sampler.certified:
        finding = Finding(
            check="sampler",
            measured=type(plan.sampler).__name__,
            bound="a sampler whose event is proved",
            passed=False,
            detail="; ".join(plan.caveats),
        )
        return [finding]
    findings = check_sampler(plan)
    failed = select_failed(findings)
    if failed or not findings:
        return failed
    names = ", ".join(finding.check.removeprefix("sampler: ") for finding in findings)
    summary = Finding(
        check="sampler",
        measured=f"{len(findings)} tests held",
        bound=f"p {findings[0].bound} in each",
        passed=True,
        detail=f"{findings[0].detail}: {names}",
    )
    return [summary]
