"""The white-box audit of one training step: everything that can be checked without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dpkfc.assurance.accounting import accounting
from dpkfc.assurance.batch_sizes import batch_sizes
from dpkfc.assurance.charges import charges
from dpkfc.assurance.checkpoints import checkpoints
from dpkfc.assurance.low_bits import low_bits
from dpkfc.assurance.noise_law import noise_law
from dpkfc.assurance.noise_run import noise_run
from dpkfc.assurance.replay import prepared_canaries, replay
from dpkfc.assurance.sampling_law import sampler_law
from dpkfc.assurance.shares import shares
from dpkfc.assurance.subject import Subject
from dpkfc.assurance.two_worlds import RUNS, two_worlds
from dpkfc.assurance.verdict import Finding, failed
from dpkfc.plan import Plan

__all__ = ["Audit", "audit_step"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict on a step.

    Attributes:
        findings: one a check.
        plan_hash: of the plan that was audited.
        canaries: how many were used.
        seconds: it took.
        date: when, UTC.
    """

    findings: tuple[Finding, ...]
    plan_hash: str
    canaries: int
    seconds: float
    date: str

    @property
    def passed(self) -> bool:
        """Whether every check held. That is no proof of privacy; one that fails disproves it."""
        return not failed(self.findings)

    def describe(self) -> dict[str, Any]:
        """Plain values for the card."""
        return {
            "passed": self.passed,
            "date": self.date,
            "plan_hash": self.plan_hash,
            "canaries": self.canaries,
            "seconds": round(self.seconds, 1),
            "findings": [finding.describe() for finding in self.findings],
        }


def audit_step(subject: Subject, *, runs: int = RUNS, progress: Progress | None = None) -> Audit:
    """Audit the step of a plan: sensitivity, shares, batch sizes, metric, hand-over, noise, two worlds, sampler, ledger.

    Args:
        subject: plan, model, examples and loss.
        runs: releases of each of the two worlds.
        progress: called with (name of the check, done, of all).

    Raises:
        ValueError: a plan without noise, or with a repeatable stream; a forward pass that is random.
    """
    plan = subject.plan
    if plan.noise_multiplier == 0:
        raise ValueError("the plan adds no noise: there is no guarantee to audit")
    if plan.test_mode:
        raise ValueError("the plan is in test mode, in which noise can be repeated: audit it without test_mode_seed")
    started = time.perf_counter()

    def said(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(name, done, of)

    canaries = prepared_canaries(subject)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "neighbour replay": lambda: replay(subject, canaries, progress=said("neighbour replay")).findings(),
        "shares": lambda: [shares(subject, canaries, progress=said("shares of examples"))],
        "batch sizes": lambda: batch_sizes(subject, progress=said("batch sizes")),
        "law of the noise": lambda: noise_law(subject, progress=said("law of the noise")),
        "noise of a run": lambda: noise_run(subject, progress=said("noise of a run")),
        "low bits": lambda: [low_bits(subject, progress=said("low bits"))],
        "two worlds": lambda: [two_worlds(subject, canaries, runs=runs, progress=said("two worlds")).finding()],
        "ledger": lambda: charges(subject),
        "checkpoint": lambda: [checkpoints(subject)],
        "sampler": lambda: _sampling(plan),
        "accounting": lambda: accounting(plan),
    }
    found = [finding for name, check in checks.items() for finding in _tried(name, check)]
    return Audit(
        findings=tuple(found),
        plan_hash=plan.hash,
        canaries=len(canaries.names),
        seconds=time.perf_counter() - started,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _tried(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check found; that it could not be run to its end is a finding too."""
    try:
        return list(check())
    except RuntimeError as error:
        return [Finding(check=name, measured="could not be ended", bound="can be", passed=False, detail=str(error))]


def _sampling(plan: Plan) -> Iterator[Finding]:
    """The sampler's own law; one that has no certified event fails by its name."""
    if plan.sampler.certified:
        found = sampler_law(plan)
        yield from failed(found)
        if found and not failed(found):
            names = ", ".join(finding.check.removeprefix("sampler: ") for finding in found)
            bound = f"p {found[0].bound} in each"
            yield Finding(
                check="sampler", measured=f"{len(found)} tests held", bound=bound, passed=True,
                detail=f"{found[0].detail}: {names}",
            )  # fmt: skip
        return
    yield Finding(
        check="sampler", measured=type(plan.sampler).__name__, bound="a sampler whose event is proved", passed=False,
        detail="; ".join(plan.caveats),
    )  # fmt: skip
