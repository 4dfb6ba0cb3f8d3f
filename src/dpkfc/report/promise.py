"""Check that a card states what its ledger shows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.calibration import hash_plan
from dpkfc.privacy.events import is_gaussian, join_charges
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.report.card import check_total, neighbours
from dpkfc.report.officer import explain_guarantee
from dpkfc.report.spent import charges_of, relation_of_releases
from dpkfc.report.text import ensure_mapping
from dpkfc.report.written_card import DAMAGE, Card, CardError

# Two machines may differ by this much in an ε. An edited card differs by more.
_TINY = 1e-6
# A composition in another order has another grid, which moves ε by less than this.
_GRID = 1e-3

Statement = tuple[str, Any, Any]
"""Name of a figure, its value on the card, and its value by the ledger."""
Cost = Callable[[Sequence[dict[str, Any]], float, str], float]
"""A function of releases, δ and accountant that returns ε."""


def check_promise(card: Card, ledger: Verified, cost: Cost) -> None:
    """Check that a card promises what its ledger shows.

    Args:
        card: of `read_card`, whose head the ledger has.
        ledger: of `verify_history`.
        cost: returns ε of releases by δ and accountant.

    Raises:
        CardError: naming the first statement that differs, or the damage.
    """
    promise, header = card.promise, ledger.header
    statements = [
        ("plan", card.content.get("plan_hash"), header["plan_hash"]),
        ("number of releases", promise.get("releases"), card.releases),
        ("certified", promise.get("certified"), header.get("certified")),
    ]
    if "plan" in card.content:
        stated_plan = hash_plan(ensure_mapping(card.content["plan"]))
        statements.append(("content of the plan", stated_plan, header["plan_hash"]))
    for name in ("unit", "neighbouring_relation", "delta"):
        if name in header and name in promise:
            statements.append((name.replace("_", " "), promise[name], header[name]))
    # A federated card names no accountant.
    accounting = card.content.get("accounting")
    accountant = accounting.get("accountant") if isinstance(accounting, Mapping) else "pld"
    if accountant not in ("pld", "rdp"):
        raise CardError(f"the privacy card {card.path} names no known accountant: it was changed")
    spent = cost(ledger.releases[: card.releases], card.delta, accountant)
    statements.append(("ε", promise.get("epsilon"), spent if math.isfinite(spent) else "inf"))
    try:
        statements += _further_statements(card, ledger, spent, cost)
        charges = charges_of(ledger.releases[: card.releases], ledger.groups)
        check_total(card.content.get("total"), charges)
    except CardError:
        raise
    except DAMAGE as error:
        raise CardError(
            f"the privacy card {card.path} was changed, or is damaged ({type(error).__name__}:"
            f" {error})"
        ) from None
    for name, stated, shown in statements:
        if not agrees(stated, shown):
            raise CardError(
                f"the privacy card {card.path} states another {name} than its ledger "
                f"({_shorten(stated)} instead of {_shorten(shown)}): it was changed"
            )


def _further_statements(
    card: Card,
    ledger: Verified,
    spent: float,
    cost: Cost,
) -> list[Statement]:
    """Return what a card states beside the promise.

    Raises:
        ValueError: the card has no layout.
    """
    content, releases = card.content, ledger.releases[: card.releases]
    if "layout" not in content:
        raise ValueError("it has no layout")
    statements = [("begin", content["dates"]["begun"], ledger.header.get("created", ""))]
    mechanism = content["mechanism"]
    steps = [release for release in releases if "purpose" not in release]
    if steps:
        for name in ("noise_multiplier", "stddev", "sensitivity"):
            label = name.replace("_", " ")
            statements.append((label, mechanism.get(name), steps[-1].get(name)))
    extra = describe_extra(releases, card.delta)
    statements.append(("releases beside the steps", mechanism.get("extra_releases", []), extra))
    statements.append(("meaning of ε", content.get("meaning"), _explain(card, ledger, spent)))
    statements += _statements_of_plan(card, ledger, spent)
    return statements + _statements_of_accountants(card, releases, cost)


def _statements_of_plan(card: Card, ledger: Verified, spent: float) -> list[Statement]:
    """Return what a card states of its plan and the ledger can show."""
    header, promise, mechanism = ledger.header, card.promise, card.content["mechanism"]
    is_federated = "privacy_model" in promise
    statements: list[Statement] = []
    if "unit" in header and "neighbouring_relation" in header:
        unit = header["unit"].partition(" (all records")[0].removeprefix("one ")
        shown = neighbours(header["neighbouring_relation"], unit)
        statements.append(("difference of neighbours", promise.get("neighbours_differ_in"), shown))
    if "steps" in header:
        planned = promise.get("planned_releases" if is_federated else "planned_steps")
        statements.append(("planned number of releases", planned, header["steps"]))
    extra = sum(ledger.planned_extra.values())
    if extra and not is_federated:
        planned = header["steps"] + extra
        statements.append(("planned releases", promise.get("planned_releases"), planned))
    target = promise.get("target_epsilon")
    if target is not None and not target >= spent * (1 - _TINY):
        statements.append(("target of ε", target, spent))
    steps = [line for line in ledger.releases[: card.releases] if not line.get("purpose")]
    if is_federated or not steps:
        return statements
    event = steps[-1]["event"]
    statements.append(("event", mechanism.get("event"), event))
    size, rate = header.get("dataset_size"), _sampling_rate(event)
    if size is None:
        return statements
    sampler = mechanism["sampler"]
    statements.append(("sampled dataset", sampler.get("dataset_size"), size))
    if rate is not None:
        shown_batch = rate * size / ledger.groups
        statements.append(("divisor", mechanism.get("divisor"), shown_batch))
        for name, value in (("sample_rate", rate), ("batch_size", shown_batch)):
            if name in sampler:
                statements.append((name, sampler[name], value))
    return statements


def _sampling_rate(event: Mapping[str, Any]) -> float | None:
    """Return the expected fraction of the units in a batch, None if the event does not hold it."""
    if "sample_size" in event:
        return float(event["sample_size"] / event["source_dataset_size"])
    if event["type"] == "GaussianDpEvent":
        return 1.0
    rate = event.get("sampling_probability")
    return None if rate is None else float(rate)


def _statements_of_accountants(
    card: Card, releases: Sequence[dict[str, Any]], cost: Cost
) -> list[Statement]:
    """Return the names of a card's accountants, and each ε that differs from the ledger's."""
    accounting = card.content.get("accounting") or card.promise
    stated = accounting["epsilon_by"]
    statements: list[Statement] = [("set of accountants", sorted(stated), ["pld", "rdp"])]
    for name in ("pld", "rdp"):
        if stated.get(name) is None:
            # The accountant does not treat the event.
            continue
        shown = cost(releases, card.delta, name)
        figure = float(stated[name])
        if not math.isclose(figure, shown, rel_tol=_GRID):
            statements.append((f"ε by {name.upper()}", figure, shown))
    return statements


def _explain(card: Card, ledger: Verified, spent: float) -> dict[str, Any] | None:
    """Return the meaning of ε that a ledger gives, None without a certified guarantee."""
    if ledger.header.get("certified") is not True or not math.isfinite(spent):
        return None
    releases = ledger.releases[: card.releases]
    event, count = join_charges(charges_of(releases, ledger.groups))
    stated = card.content.get("meaning")
    if isinstance(stated, Mapping) and stated.get("rates_by") == "ε and δ":
        # Bounds that hold for any releases: earlier cards have them for Gaussian ones of two kinds.
        event = None
    # A federated client is sampled with all its records; the turns of groups are fixed.
    is_sampled = "privacy_model" in card.promise and (event is None or not is_gaussian(event))
    return explain_guarantee(
        event,
        count,
        spent,
        card.delta,
        relation_of_releases(releases),
        independent=not is_sampled and ledger.groups == 1,
    )


def agrees(stated: Any, expected: Any) -> bool:
    """Return whether two plain values are equal, with floats compared up to rounding errors."""
    if isinstance(expected, Mapping):
        has_same_keys = isinstance(stated, Mapping) and {*stated} == {*expected}
        return has_same_keys and all(agrees(stated[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        is_as_long = isinstance(stated, list) and len(stated) == len(expected)
        return is_as_long and all(map(agrees, stated, expected))
    is_number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
    if isinstance(expected, float) and is_number:
        is_finite = abs(stated) <= sys.float_info.max
        return is_finite and math.isclose(stated, expected, rel_tol=_TINY, abs_tol=1e-12)
    return type(stated) is type(expected) and bool(stated == expected)


def _shorten(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 20 else f"{text[:19]}…"
