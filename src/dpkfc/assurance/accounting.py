"""What is accounted for, against what is done: the event, the accountants, the ε that is reported."""

from __future__ import annotations

import math
from collections.abc import Iterator

import dp_accounting

from dpkfc.assurance.verdict import Finding
from dpkfc.plan import Plan

__all__ = ["accounted_noise", "accounting"]


def accounted_noise(event: dp_accounting.DpEvent) -> float | None:
    """Noise over sensitivity of the one Gaussian release that an event is about; None for an event of another form."""
    if isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return float(event.noise_multiplier)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent | dp_accounting.SampledWithoutReplacementDpEvent):
        return accounted_noise(event.event)
    return None


def accounting(plan: Plan) -> Iterator[Finding]:
    """Whether the plan claims a guarantee, its event, ε by every accountant that knows it, the reported ε, and the budget."""
    yield Finding(
        check="guarantee", measured="claimed" if plan.certified else "none", bound="claimed", passed=plan.certified,
        detail="; ".join(plan.caveats) or "the plan has no caveat",
    )  # fmt: skip
    noise, planned = accounted_noise(plan.event), plan.stddev / plan.sensitivity
    yield Finding(
        check="event",
        measured="not one Gaussian release" if noise is None else f"noise multiplier {noise:.6g}",
        bound=f"one release with {planned:.6g} × sensitivity",
        passed=noise is not None and math.isclose(noise, planned, rel_tol=1e-9),
        detail=f"{plan.event}",
    )
    try:
        checked = plan.cross_check()
    except (ValueError, dp_accounting.UnsupportedEventError) as error:
        yield Finding(check="accountants", measured="they contradict each other", bound="agree", passed=False, detail=str(error))
        return
    known = {name: value for name, value in checked.items() if value is not None}
    yield Finding(
        check="accountants",
        measured=", ".join(f"{name} {value:.4g}" for name, value in known.items()),
        bound="agree within what is known of them",
        passed=True,
        detail=f"ε of {plan.steps:,} releases at δ = {plan.delta:g}",
    )
    yield from _reported(plan, known)


def _reported(plan: Plan, known: dict[str, float]) -> Iterator[Finding]:
    reported, least = plan.epsilon(), min(known.values())
    yield Finding(
        check="reported ε", measured=f"{reported:.4g}", bound=f"at least {least:.4g}", passed=reported >= least * (1 - 1e-6),
        detail=f"by {plan.accountant}, of all planned releases",
    )  # fmt: skip
    if plan.target_epsilon is not None:
        yield Finding(
            check="budget", measured=f"ε = {reported:.4g}", bound=f"at most {plan.target_epsilon:g}",
            passed=reported <= plan.target_epsilon, detail="of all planned releases",
        )  # fmt: skip
