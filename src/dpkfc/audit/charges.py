"""Check that each release is charged before it exists, and as its plan says."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Subject, WatchedSession
from dpkfc.audit.step_canaries import Canaries
from dpkfc.config import Plan
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.ledger import verify
from dpkfc.privacy.ledger_lines import LedgerError

if TYPE_CHECKING:
    import dp_accounting


def check_charges(subject: Subject) -> list[Finding]:
    """Check the order of charge and release, and the ledger after every step.

    A few steps run, and the ledger is read from the disk after each. Then a charge fails, and
    nothing may get out.
    """
    canaries = Canaries()
    canaries.add("as it is", subject.example(0))
    script = [[0, subject.size], [], [0], [0, subject.size]]
    loss = canaries.loss(subject)
    late = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        session, walk = canaries.open_session(subject, [*script, [0]], ledger_path=path)
        with session:
            batches = session.batches()
            for step, _ in enumerate(script):
                session.step(next(batches), loss)
                is_equal = _count_charges(path) == len(session.released) == step + 1
                if not is_equal and not late:
                    late = f", not equal behind step {step}"
            walk.gradients = {}
            leak = _step_without_ledger(session, next(batches), loss)
            if not leak and walk.gradients:
                leak = "the optimizer was handed something"
        charges = verify(path).releases
    is_stated = all(_states_plan(charge, subject.plan) for charge in charges)
    is_complete = len(charges) == len(session.released) == len(script)
    return [
        Finding(
            check="ledger",
            measured=f"{len(charges)} charges for {len(session.released)} releases{late}",
            bound="equal after every step, with the plan's event and noise",
            passed=is_complete and not late and is_stated,
            detail="read back from the file while it was written, hash chain verified",
        ),
        Finding(
            check="charge before release",
            measured=leak or "nothing got out",
            bound="nothing gets out",
            passed=not leak,
            detail="a step whose charge cannot be written",
        ),
    ]


def _states_plan(charge: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a charge has the event and the noise of a plan."""
    return (
        math.isclose(charge["stddev"], plan.stddev)
        and math.isclose(charge["noise_multiplier"], plan.noise_multiplier)
        and charge["event"] == event_to_dict(plan.event)
    )


def _count_charges(path: Path) -> int:
    """Count the releases that a process would find in the file after a crash."""
    try:
        return len(verify(path).releases)
    except LedgerError:
        return 0


class _FullDisk:
    """A ledger whose charge fails as on a full disk."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def charge(self, *args: Any, **kwargs: Any) -> int:
        raise LedgerError("the disk is full (audit)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


def _step_without_ledger(session: WatchedSession, batch: Any, loss: Any) -> str:
    """Return what a step did although it could not be charged, "" if it did nothing."""
    releases = len(session.released)
    draws = session.noise_draws
    ledger = session.ledger
    session._pipeline.ledger = _FullDisk(ledger)  # type: ignore[assignment]
    try:
        session.step(batch, loss)
    except LedgerError:
        if len(session.released) > releases:
            return "a release got out"
        return "noise was drawn" if session.noise_draws > draws else ""
    finally:
        session._pipeline.ledger = ledger
    return "a release got out"


def accounted_noise(event: dp_accounting.DpEvent) -> float | None:
    """Return noise over sensitivity of the one Gaussian release of an event, None without one."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent
    sampled = dp_accounting.PoissonSampledDpEvent, dp_accounting.SampledWithoutReplacementDpEvent
    if isinstance(event, gaussian):
        return float(event.noise_multiplier)
    if isinstance(event, sampled):
        return accounted_noise(event.event)
    return None


def check_accounting(plan: Plan) -> Iterator[Finding]:
    """Check the plan's claim, its event, ε by every accountant, the reported ε, and the budget."""
    import dp_accounting

    yield Finding(
        check="guarantee",
        measured="claimed" if plan.certified else "none",
        bound="claimed",
        passed=plan.certified,
        detail="; ".join(plan.caveats) or "the plan has no caveat",
    )
    noise = accounted_noise(plan.event)
    planned = plan.stddev / plan.sensitivity
    yield Finding(
        check="event",
        measured="not one Gaussian release" if noise is None else f"noise multiplier {noise:.6g}",
        bound=f"one release with {planned:.6g} × sensitivity",
        passed=noise is not None and math.isclose(noise, planned, rel_tol=1e-9),
        detail=f"{plan.event}",
    )
    try:
        epsilons = plan.cross_check()
    except (ValueError, dp_accounting.UnsupportedEventError) as error:
        yield Finding(
            check="accountants",
            measured="they contradict each other",
            bound="agree",
            passed=False,
            detail=str(error),
        )
        return
    known = {name: epsilon for name, epsilon in epsilons.items() if epsilon is not None}
    yield Finding(
        check="accountants",
        measured=", ".join(f"{name} {epsilon:.4g}" for name, epsilon in known.items()),
        bound="agree within what is known of them",
        passed=True,
        detail=f"ε of all planned releases at δ = {plan.delta:g}",
    )
    reported = plan.epsilon()
    least = min(known.values())
    yield Finding(
        check="reported ε",
        measured=f"{reported:.4g}",
        bound=f"at least {least:.4g}",
        passed=reported >= least * (1 - 1e-6),
        detail=f"by {plan.accountant}, of all planned releases",
    )
    if plan.target_epsilon is not None:
        yield Finding(
            check="budget",
            measured=f"ε = {reported:.4g}",
            bound=f"at most {plan.target_epsilon:g}",
            passed=reported <= plan.target_epsilon,
            detail="of all planned releases",
        )
