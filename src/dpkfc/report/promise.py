"""Check that a card states what its ledger shows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.calibration import hash_plan
from dpkfc.privacy.events import is_gaussian, join_charges
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.report.card import check_total, neighbours
from dpkfc.report.officer import explain_guarantee, show_name
from dpkfc.report.spent import charges_of, relation_of_releases
from dpkfc.report.text import ensure_mapping, json_number
from dpkfc.report.written_card import DAMAGE, Card, CardError

# Two machines may differ by this much in an ε. An edited card differs by more.
_TINY = 1e-6
# A composition in another order has another grid, which moves ε by less than this.
_GRID = 1e-3
_ACCOUNTANTS = ["pld", "rdp"]

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
    # A run may go on after its card was written.
    ledger = replace(ledger, releases=ledger.releases[: card.releases])
    try:
        statements = list(_statements(card, ledger, cost))
        check_total(card.content.get("total"), charges_of(ledger.releases, ledger.groups))
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


def _statements(card: Card, ledger: Verified, cost: Cost) -> Iterator[Statement]:
    """Yield all that a card states and its ledger shows.

    Raises:
        CardError: the card names no accountant, or this one cannot treat the releases.
        ValueError: the card has no layout.
    """
    content, promise, header = card.content, card.promise, ledger.header
    accounting = content.get("accounting")
    # A federated card names no accountant.
    accountant = accounting.get("accountant") if isinstance(accounting, Mapping) else "pld"
    if accountant not in _ACCOUNTANTS:
        raise CardError(f"the privacy card {card.path} names no known accountant: it was changed")
    spent = cost(ledger.releases, card.delta, accountant)
    yield "plan", content.get("plan_hash"), header["plan_hash"]
    yield "number of releases", promise.get("releases"), card.releases
    yield "certified", promise.get("certified"), header.get("certified")
    if "plan" in content:
        stated_plan = hash_plan(ensure_mapping(content["plan"]))
        yield "content of the plan", stated_plan, header["plan_hash"]
    for name in ("unit", "neighbouring_relation", "delta"):
        if name in header and name in promise:
            yield show_name(name), promise[name], header[name]
    yield "ε", promise.get("epsilon"), json_number(spent)
    if "layout" not in content:
        raise ValueError("it has no layout")
    mechanism = content["mechanism"]
    yield "begin", content["dates"]["begun"], header.get("created", "")
    steps = [release for release in ledger.releases if not release.get("purpose")]
    for name in ("noise_multiplier", "stddev", "sensitivity") if steps else ():
        yield show_name(name), mechanism.get(name), steps[-1].get(name)
    extra = describe_extra(ledger.releases, card.delta)
    yield "releases beside the steps", mechanism.get("extra_releases", []), extra
    yield "meaning of ε", content.get("meaning"), _explain(card, ledger, spent)
    yield from _statements_of_plan(promise, ledger, spent)
    if steps and "privacy_model" not in promise:
        yield from _statements_of_sampling(mechanism, ledger, steps[-1]["event"])
    yield from _statements_of_accountants(card, ledger.releases, cost)


def _statements_of_plan(
    promise: Mapping[str, Any], ledger: Verified, spent: float
) -> Iterator[Statement]:
    """Yield what a card states of its plan and the first line of the ledger shows."""
    header = ledger.header
    is_federated = "privacy_model" in promise
    if "unit" in header and "neighbouring_relation" in header:
        unit = header["unit"].partition(" (all records")[0].removeprefix("one ")
        shown = neighbours(header["neighbouring_relation"], unit)
        yield "difference of neighbours", promise.get("neighbours_differ_in"), shown
    if "steps" in header:
        planned = promise.get("planned_releases" if is_federated else "planned_steps")
        yield "planned number of releases", planned, header["steps"]
    extra = sum(ledger.planned_extra.values())
    if extra and not is_federated:
        yield "planned releases", promise.get("planned_releases"), header["steps"] + extra
    target = promise.get("target_epsilon")
    if target is not None and not target >= spent * (1 - _TINY):
        yield "target of ε", target, spent


def _statements_of_sampling(
    mechanism: Mapping[str, Any], ledger: Verified, event: Mapping[str, Any]
) -> Iterator[Statement]:
    """Yield what a card states of the event of a step, and of the batches that it describes."""
    yield "event", mechanism.get("event"), event
    size = ledger.header.get("dataset_size")
    if size is None:
        return
    sampler = mechanism["sampler"]
    yield "sampled dataset", sampler.get("dataset_size"), size
    rate = _sampling_rate(event)
    if rate is None:
        return
    batch = rate * size / ledger.groups
    yield "divisor", mechanism.get("divisor"), batch
    for name, shown in (("sample_rate", rate), ("batch_size", batch)):
        if name in sampler:
            yield name, sampler[name], shown


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
) -> Iterator[Statement]:
    """Yield the names of a card's accountants, and each ε that differs from the ledger's."""
    accounting = card.content.get("accounting") or card.promise
    stated = accounting["epsilon_by"]
    yield "set of accountants", sorted(stated), _ACCOUNTANTS
    for name in _ACCOUNTANTS:
        if stated.get(name) is None:
            # The accountant does not treat the event.
            continue
        shown = cost(releases, card.delta, name)
        figure = float(stated[name])
        if not math.isclose(figure, shown, rel_tol=_GRID):
            yield f"ε by {name.upper()}", figure, shown


def _explain(card: Card, ledger: Verified, spent: float) -> dict[str, Any] | None:
    """Return the meaning of ε that a ledger gives, None without a certified guarantee."""
    if ledger.header.get("certified") is not True or not math.isfinite(spent):
        return None
    event, count = join_charges(charges_of(ledger.releases, ledger.groups))
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
        relation_of_releases(ledger.releases),
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
