"""Build the privacy card of a session.

A card holds what is promised for a model, by which mechanism, on which assumptions, and what ε
does not cover. It is a dictionary of plain values that JSON can hold.

Sections of every card: format, layout, title, declared, dates, caveats, guarantee, meaning, total,
mechanism, assumed_public, results, not_private, ledger, weights (if they lie in a file), budget (if
the run was charged to one), plan_hash, plan (what that hash is of), and audit (after `dpkfc
audit`).
Sections of sessions alone: stamp, accounting, curvature, hyper_parameters, public_seeds, software.
Sections of federated runs alone: rounds, chosen_by.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from dpkfc.config import Plan
from dpkfc.privacy import accounting
from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.events import join_charges
from dpkfc.privacy.ledger import Ledger, Receipt
from dpkfc.privacy.ledger_lines import version
from dpkfc.report.officer import Declared, explain_guarantee
from dpkfc.report.text import json_number

if TYPE_CHECKING:
    import dp_accounting

    from dpkfc.federated.plan import FederatedPlan

FORMAT = 1
# Version of the texts of a card. `dpkfc ledger verify` compares texts of this version alone.
LAYOUT = 5
_NEIGHBOURS = {
    "add_or_remove_one": "one {} added or removed",
    "replace_one": "one {} replaced by another",
}
_PACKAGES = ("dpkfc", "torch", "dp-accounting", "numpy", "scipy")

# Steps before the clip and after the noise, with their labels. A card names the ones that are used.
OPTIONAL_STEPS = {
    "augmentations": "views of an example, averaged before the clip",
    "readout": "read-out",
    "postprocess": "between release and optimizer",
    "weight_average": "average of the weights, which is what is delivered",
}
_DEFAULTS: tuple[Any, ...] = (None, [], 1, "whitened")

# A stated total may be smaller by this fraction, from rounding or from another accountant.
_ROUNDING = 1e-3

# How a computer adds noise to the sum.
_NOISE = {
    "gaussian": "Gaussian in floating-point numbers, whose rounding is not accounted for",
    "rounded": "Gaussian, sum and noise rounded to one grid, which the sensitivity accounts for",
    "correlated": "Gaussian in floating-point numbers, correlated over {bands} consecutive steps",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says beside the plan.

    Attributes:
        title: of the model or run.
        releases: noisy sums that were released.
        ledger: "file", "head" and "releases" of the ledger.
        assumed_public: setting to (value, why it is public).
        chosen_by: how hyper-parameters were chosen.
        not_private: figure to the reason why ε does not protect it.
        results: figures of the model, with what they were computed on.
        seeds: public seeds.
        refreshes: step, digest and scale of every preconditioner that was used.
        settings: hyper-parameters of training that the plan does not hold.
        device: where the noise was drawn.
        limited: whether the run ends with the plan's steps. A script with an engine may take more.
        receipt: what the budget of these people was charged, None without one.
        declared: what the owner says about the run.
        start: when training began; "" if the ledger does not say.
        total: "epsilon", "delta" and "runs" of several runs on the same data, if it was computed.
        extra: releases beside the steps, as `describe_extra` gives them.
    """

    title: str
    releases: int
    ledger: Mapping[str, Any]
    assumed_public: Mapping[str, tuple[Any, str]]
    chosen_by: str
    not_private: Mapping[str, str]
    device: str
    results: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    refreshes: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    limited: bool = True
    receipt: Receipt | None = None
    declared: Declared = field(default_factory=Declared)
    start: str = ""
    total: Mapping[str, Any] | None = None
    extra: Sequence[Mapping[str, Any]] = ()

    @property
    def extra_counts(self) -> dict[str, int]:
        """Return the number of releases beside the steps, by purpose."""
        return {row["purpose"]: row["releases"] for row in self.extra}

    @property
    def steps(self) -> int:
        """Return the number of releases that are steps."""
        return self.releases - sum(self.extra_counts.values())


def stamp(plan: Plan) -> str:
    """Return the stamp of a run without a certified guarantee, "" for a certified run."""
    if plan.certified:
        return ""
    if plan.test_mode:
        return "NOT PRIVATE: test mode"
    if any(text.startswith("NOT PRIVATE") for text in plan.caveats):
        return "NOT PRIVATE"
    return "UNCERTIFIED"


def build_card(plan: Plan, facts: CardFacts) -> dict[str, Any]:
    """Build the card of a session.

    Args:
        plan: of the run.
        facts: what the card says beside the plan.

    Returns:
        The card, with the sections that this module lists.

    Raises:
        ValueError: the number of releases differs from the ledger's, or exceeds the plan's steps;
            or the total is below the ε of this run alone.
    """
    _check_releases(plan, facts)
    extra = plan.extra_charges(facts.extra_counts)
    charges = [(plan.event, plan.count_events(facts.steps)), *extra]
    check_total(facts.total, charges)
    described = plan.describe()
    promise = {
        "unit": described["privacy_unit"],
        "neighbouring_relation": plan.neighbouring_relation,
        "neighbours_differ_in": neighbours(plan.neighbouring_relation, plan.config.unit),
        "releases": facts.releases,
        "planned_steps": plan.steps if facts.limited else None,
    }
    planned_extra = sum(plan.extra_counts.values())
    if planned_extra and facts.limited:
        promise["planned_releases"] = plan.steps + planned_extra
    mechanism = {
        "sampler": described["sampler"],
        "clipping": plan.clipping,
        "max_grad_norm": plan.max_grad_norm,
        "sensitivity": plan.sensitivity,
        "noise_multiplier": plan.noise_multiplier,
        "stddev": plan.stddev,
        "divisor": plan.expected_batch_size,
        "event": described["event"],
        "noise": _NOISE[plan.noise].format(bands=plan.bands),
        "noise_generator": _noise_generator(plan, facts.device),
    }
    for name in OPTIONAL_STEPS:
        if described.get(name) not in _DEFAULTS:
            mechanism[name] = described[name]
    if plan.bands > 1:
        mechanism["bands"] = plan.bands
    if facts.extra:
        mechanism["extra_releases"] = [dict(row) for row in facts.extra]
    epsilon = plan.epsilon(facts.steps, facts.extra_counts)
    event, count = join_charges(charges)
    public = {}
    for name, (value, why) in facts.assumed_public.items():
        public[name] = {"value": value, "why": why}
    checked = plan.cross_check(facts.steps, facts.extra_counts)
    curvature = described["preconditioner"]
    if curvature is not None:
        curvature = {**curvature, "refreshes": [dict(refresh) for refresh in facts.refreshes]}
    return {
        **make_introduction(facts.title, facts.declared, facts.start, facts.total),
        "stamp": stamp(plan) or None,
        "caveats": list(plan.caveats),
        "guarantee": describe_guarantee(plan, epsilon) | promise,
        "meaning": explain_meaning(
            plan,
            event,
            count,
            epsilon,
            # The turns of groups are fixed.
            independent=plan.bands == 1,
        ),
        "mechanism": mechanism,
        "accounting": {
            "accountant": plan.accountant,
            "library": "dp-accounting",
            "epsilon_by": json_numbers(checked),
        },
        "curvature": curvature,
        "assumed_public": public,
        "hyper_parameters": {"chosen_by": facts.chosen_by, **facts.settings},
        "not_private": dict(facts.not_private),
        "results": dict(facts.results),
        "public_seeds": dict(facts.seeds),
        "ledger": dict(facts.ledger),
        **budget_section(facts.receipt),
        "plan_hash": plan.hash,
        "plan": plan.describe_mechanism(),
        "software": software(),
    }


def make_introduction(
    title: str, declared: Declared, start: str, total: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the sections that say what the run is, for whom and when."""
    # The day alone: how long training took depends on the sizes of private batches.
    ended = datetime.now(timezone.utc).date().isoformat()
    return {
        "format": FORMAT,
        "layout": LAYOUT,
        "title": title,
        "declared": asdict(declared),
        "dates": {"begun": start, "ended": ended},
        "total": None if total is None else dict(total),
    }


def check_total(
    total: Mapping[str, Any] | None, charges: Sequence[tuple[dp_accounting.DpEvent, int]]
) -> None:
    """Check that the total ε of several runs is at least the ε of this run alone, at the same δ.

    Args:
        total: "epsilon", "delta" and "runs"; None needs no check.
        charges: events of this run, each with the number of its releases.

    Raises:
        ValueError: the total is below the ε of this run, or is not a number.
    """
    if not total:
        return
    epsilon, delta = float(total["epsilon"]), float(total["delta"])
    alone = accounting.total_epsilon(charges, delta)
    if not epsilon >= alone * (1 - _ROUNDING):
        raise ValueError(
            f"total states ε = {epsilon:g} of all runs, and this run alone has {alone:.4g} at"
            f" δ = {delta:g}; take both from dpkfc total"
        )


def explain_meaning(
    plan: Plan | FederatedPlan,
    event: dp_accounting.DpEvent | None,
    releases: int,
    epsilon: float,
    *,
    relation: str = "",
    independent: bool = True,
) -> dict[str, Any] | None:
    """Return what ε means, None without a certified guarantee."""
    if not plan.certified or not math.isfinite(epsilon):
        return None
    relation = relation or plan.neighbouring_relation
    return explain_guarantee(
        event, releases, epsilon, plan.delta, relation, independent=independent
    )


def _check_releases(plan: Plan, facts: CardFacts) -> None:
    """Check that the card counts the releases of the ledger, and no more than the plan allows."""
    releases, recorded = facts.releases, facts.ledger.get("releases")
    if recorded != releases:
        raise ValueError(
            f"the card counts {releases} releases, its ledger {recorded}: pass ledger.count as "
            "`releases` and in `ledger`"
        )
    if facts.limited and facts.steps > plan.steps:
        raise ValueError(
            f"{releases} releases exceed the plan's {plan.steps} steps: pass the plan of this run, "
            "or limited=False for an engine without a limit"
        )


def session_card(
    session: Any,
    *,
    title: str | None = None,
    chosen_by: str | None = None,
    not_private: Mapping[str, str] | None = None,
    results: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    declared: Declared | None = None,
    total: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the card of a training from its session; `to_markdown` renders it.

    `Session.write_card` writes it with weights and ledger, which is what most callers want.

    The session supplies releases, the head of the ledger, the device of the noise, the refreshes of
    the preconditioner and the number of units. The session may be closed. One process may call this
    function alone.

    Args:
        session: a `Session`, or a `PrivacyEngine` that has made a model private.
        title: of the model; required.
        chosen_by: how hyper-parameters were chosen, which ε does not cover; required.
        not_private: figure to the reason why ε does not protect it: what you publish beside the
            weights; required.
        results: figures of the model, with what they were computed on.
        settings: hyper-parameters that the plan does not hold, such as the learning rate.
        declared: what only the owner knows.
        total: "epsilon", "delta" and "runs" of several runs on the same data.

    Returns:
        The card, as of `build_card`.

    Raises:
        TypeError: `title`, `chosen_by` or `not_private` is missing.
        ValueError: the total is below the ε of this run alone.
        RuntimeError: the engine has made nothing private, or a parameter was written since the last
            release.
        LedgerError: the model does not hold the weights that its ledger's releases have made.
    """
    if title is None or chosen_by is None or not_private is None:
        raise TypeError(
            "a card states what only you know: give title, chosen_by (how hyper-parameters were"
            " chosen) and not_private (figures that you publish without noise, {} for none)"
        )
    from dpkfc.gradients.layers import device_of_layers

    # An engine keeps the session that it trains in this attribute.
    trained = getattr(session, "_private", session)
    trained.check_weights()
    trained.check_released()
    plan, ledger = trained.plan, trained.ledger
    facts = CardFacts(
        title=title,
        releases=ledger.count,
        ledger={"file": _ledger_name(ledger), "releases": ledger.count, "head": ledger.head},
        assumed_public=dataset_size(plan),
        chosen_by=chosen_by,
        not_private={**trained.unprotected_figures, **not_private},
        device=str(device_of_layers(trained.layers)),
        results=results or {},
        refreshes=_refreshes(trained),
        settings={"gradients": trained.gradients, **(settings or {})},
        limited=ledger.max_releases is not None,
        receipt=ledger.receipt,
        declared=declared or Declared(),
        start=str(ledger.header.get("created", "")),
        total=total,
        extra=describe_extra(ledger.releases, plan.delta),
    )
    return build_card(plan, facts)


def describe_guarantee(plan: Plan | FederatedPlan, epsilon: float) -> dict[str, Any]:
    """Return the entries that `guarantee` has on every card."""
    return {
        "certified": plan.certified,
        "epsilon": json_number(epsilon),
        "delta": plan.delta,
        "target_epsilon": plan.target_epsilon,
    }


def neighbours(relation: str, unit: str) -> str:
    """Return in words what neighbouring datasets differ in."""
    return _NEIGHBOURS[relation].format(unit)


def budget_section(receipt: Receipt | None) -> dict[str, dict[str, Any]]:
    """Return the section of a budget, for runs that were charged to one."""
    return {} if receipt is None else {"budget": asdict(receipt)}


def json_numbers(values: Mapping[str, float | None]) -> dict[str, float | str | None]:
    """Return numbers by name that JSON can hold; None stays None."""
    return {name: None if x is None else json_number(x) for name, x in values.items()}


def dataset_size(plan: Plan) -> dict[str, tuple[int, str]]:
    """Return what is assumed public about N: the number of examples, or of protected units."""
    name = "number of examples N"
    if plan.config.max_records_per_unit is not None and plan.config.unit:
        name = f"number of units N (each one {plan.config.unit}, with all records)"
    return {name: (int(plan.dataset_size), "sampling rate and divisor follow from it")}


def _noise_generator(plan: Plan, device: str) -> str:
    if plan.test_mode:
        return "repeatable: NOT PRIVATE"
    ciphers = "AES-256 in counter mode"
    if device.startswith("cuda"):
        ciphers += ", ChaCha20 for large draws"
    return f"{ciphers}, with a fresh key of the operating system for each release"


def _ledger_name(ledger: Ledger) -> str:
    if ledger.path is None:
        return "in memory, gone with the process"
    return ledger.path.name


def _refreshes(trained: Any) -> list[dict[str, Any]]:
    """Return the steps of all refreshes, with the digest of the preconditioner in force."""
    current = trained.preconditioner
    if current is None:
        return []
    steps = list(trained._pipeline.preconditioning.refreshed)
    if current.step not in steps:
        # The preconditioner came with a checkpoint.
        steps.insert(0, current.step)
    rows: list[dict[str, Any]] = [{"step": step} for step in steps]
    rows[steps.index(current.step)] |= {"digest": current.digest, "scale": current.scale}
    if steps[0] > 0:
        rows[0]["note"] = (
            f"refreshes before step {steps[0]} came before the checkpoint that was restored and "
            "are not listed"
        )
    return rows


def software() -> dict[str, str]:
    """Return the versions of the software that computed the model."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}
