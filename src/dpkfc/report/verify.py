"""Verify a ledger against the files of its run."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dpkfc._errors import one_line
from dpkfc.checkpoint import (
    file_digest,
    read_ledger_state,
)
from dpkfc.privacy.accounting import describe_extra, total_epsilon
from dpkfc.privacy.calibration import hash_plan
from dpkfc.privacy.events import event_from_dict, is_gaussian, relation_of
from dpkfc.privacy.ledger import Verified, verify
from dpkfc.report.card import (
    CARD,
    FORMAT,
    LAYOUT,
    LEDGER,
    REGISTRY,
    WEIGHTS,
    check_total,
    neighbours,
    to_json,
    to_markdown,
)
from dpkfc.report.officer import explain_guarantee, registry_record
from dpkfc.report.text import ensure_mapping
from dpkfc.weights_record import digest_file, find_record_path, read_weights_record

if TYPE_CHECKING:
    import dp_accounting

# Two machines may differ by this much in an ε. An edited card differs by more.
_TINY = 1e-6
# A composition in another order has another grid, which moves ε by less than this.
_GRID = 1e-3
# What parsing a damaged card raises. OverflowError comes from int(), RecursionError from json.
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class CardError(ValueError):
    """A ledger and what lies next to it disagree, are damaged, or cannot be accounted for."""


Statement = tuple[str, Any, Any]
"""Name of a figure, its value on the card, and its value by the ledger."""
Cost = Callable[[Sequence[dict[str, Any]], float, str], float]
"""A function of releases, δ and accountant that returns ε."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The statements of a privacy card that can be compared.

    Attributes:
        path: the file.
        content: all of it.
        releases, head: of the ledger, when the card was written.
        delta: δ.
    """

    path: Path
    content: Mapping[str, Any]
    releases: int
    head: str
    delta: float

    @property
    def promise(self) -> Mapping[str, Any]:
        """Return the section `guarantee`."""
        promise: Mapping[str, Any] = self.content["guarantee"]
        return promise


def read_card(ledger: Path) -> Card | None:
    """Return the card next to a ledger, None if there is none.

    Raises:
        CardError: the card is damaged, or a newer version wrote it.
    """
    path = ledger.parent / CARD
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        stated, delta = content["ledger"], float(content["guarantee"]["delta"])
        # A federated card calls the number of releases "count".
        releases = int(stated["releases"] if "releases" in stated else stated["count"])
        if releases < 0 or not 0 < delta < 1:
            raise ValueError(f"{releases} releases at δ = {delta}")
        version = int(content.get("format", FORMAT))
        head = str(stated["head"])
        card = Card(path=path, content=content, releases=releases, head=head, delta=delta)
    except _DAMAGE as error:
        raise CardError(
            f"the privacy card {path} is damaged ({type(error).__name__}: {error}) and cannot be "
            "compared: move it away to verify the ledger alone"
        ) from None
    if version > FORMAT:
        raise CardError(f"a newer dpkfc wrote {path}; read it with the version that it names")
    return card


def require_card(run: Path) -> Card:
    """Return the card of a run folder.

    Raises:
        CardError: the folder or its card is missing, or `read_card` refuses the card.
    """
    if not run.exists():
        raise CardError(f"{run} does not exist; give the folder of a run")
    card = read_card(run / LEDGER)
    if card is None:
        raise CardError(f"{run} holds no {CARD}; finish the run, or call write_card(folder)")
    return card


def verify_history(path: Path) -> Verified:
    """Verify a ledger's chain, and that it contains the heads that card and checkpoint remember.

    Returns:
        The verified ledger.

    Raises:
        LedgerError: the chain does not hold.
        CardError: the card is damaged, or card or checkpoint remember another head.
        CheckpointError: the checkpoint is damaged.
    """
    ledger = verify(path)
    if card := read_card(path):
        _check_remembered(path, ledger, card.releases, card.head, "privacy card")
    if remembered := read_ledger_state(path.parent / "checkpoint"):
        _check_remembered(path, ledger, *remembered, "checkpoint")
    return ledger


def _check_remembered(
    path: Path,
    ledger: Verified,
    releases: int,
    head: str,
    what: str,
) -> None:
    """Check that a ledger still begins with the history that a file next to it remembers."""
    if not ledger.contains(releases, head):
        raise CardError(
            f"the ledger {path} has {len(ledger.releases)} releases, the {what} next to it was "
            f"written after {releases} with another head: lines were removed or replaced"
        )


def check_copy(path: Path, ledger: Verified, head: str, releases: int) -> None:
    """Check that a ledger contains a head that somebody has kept.

    Args:
        path: of the ledger, for messages.
        ledger: of `verify_history`.
        head: hexadecimal; spaces around it and capitals do not matter.
        releases: number of releases after which the head was noted.

    Raises:
        CardError: the ledger has another head after that release.
    """
    if not ledger.contains(releases, head.strip().lower()):
        raise CardError(
            f"the ledger {path} does not contain the head {head[:12]}… after {releases} of its "
            f"{len(ledger.releases)} releases: the head belongs to another ledger"
        )


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
    except _DAMAGE as error:
        raise CardError(
            f"the privacy card {card.path} was changed, or is damaged ({type(error).__name__}:"
            f" {error})"
        ) from None
    for name, stated, shown in statements:
        if not agrees(stated, shown):
            raise CardError(
                f"the privacy card {card.path} states another {name} than its ledger "
                f"({_shorten(stated)} instead of {_shorten(shown)}): it was changed, or belongs to "
                "another run"
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
            statements.append((name.replace("_", " "), mechanism.get(name), steps[-1].get(name)))
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
    charges = charges_of(releases, ledger.groups)
    has_extra = any(release.get("purpose") for release in releases)
    # Releases of several kinds have no common event.
    event = charges[0][0] if len(charges) == 1 and not has_extra else None
    # A federated client is sampled with all its records; the turns of groups are fixed.
    is_sampled = "privacy_model" in card.promise and (event is None or not is_gaussian(event))
    return explain_guarantee(
        event,
        charges[0][1] if event is not None else len(releases),
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
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


def check_texts(card: Card) -> str:
    """Compare the Markdown and the record of the registry next to a card with the card.

    Returns:
        "say what the card says", or why nothing could be compared.

    Raises:
        CardError: a text next to the card says something else.
    """
    if card.content.get("layout") != LAYOUT:
        return "not compared: another version wrote them; dpkfc card writes them anew"
    markdown = card.path.with_suffix(".md")
    expected = {
        markdown: to_markdown(card.content),
        card.path.parent / REGISTRY: to_json(registry_record(card.content)),
    }
    for path, text in expected.items():
        if not path.is_file():
            return f"not compared: {path.name} is not next to the card"
        if path.read_text("utf-8") != text:
            raise CardError(
                f"{path} does not say what {CARD} says: it was changed; dpkfc card writes it anew"
            )
    return "say what the card says"


def _find_weights(file: Path, card: Card | None) -> Path:
    """Return the file of weights that a card names, next to another file."""
    named = {} if card is None else ensure_mapping(card.content.get("weights"))
    return file.parent / (Path(str(named.get("file", ""))).name or WEIGHTS)


def check_weights(card: Card) -> str:
    """Compare the weights next to a card with the digest that the card names.

    Returns:
        "equal to the card's (SHA-256)", or why nothing could be compared.

    Raises:
        CardError: the file next to the card holds other weights.
    """
    digest = ensure_mapping(card.content.get("weights")).get("sha256")
    if not isinstance(digest, str):
        return "not compared: the card names no digest of them"
    path = _find_weights(card.path, card)
    if not path.is_file():
        return f"not compared: {path.name} is not next to the card"
    if file_digest(path) != digest:
        raise CardError(
            f"{path} does not hold the weights that the card next to it was written for: one of "
            "them was changed"
        )
    return "equal to the card's (SHA-256)"


def check_recorded(path: Path, ledger: Verified, card: Card | None) -> str:
    """Compare the weights in a folder with those that a session recorded after its last release.

    Args:
        path: of the ledger.
        ledger: of `verify_history`.
        card: next to it, which may name the file of the weights.

    Returns:
        Which file holds them, or why nothing could be compared.

    Raises:
        CardError: the record is of another ledger, or the file holds other weights.
        CheckpointError: the record is damaged.
    """
    record = read_weights_record(path)
    if record is None:
        return "not compared: the ledger carries no digest of them"
    releases = record.releases
    if record.ledger != ledger.id or not ledger.contains(releases, record.head):
        raise CardError(
            f"{find_record_path(path)} is the record of another ledger than {path}: one of them"
            " was replaced"
        )
    if releases < len(ledger.releases):
        return f"not compared: their digest is of release {releases}, before the last one"
    weights = _find_weights(path, card)
    if weights.suffix != ".safetensors" or not weights.is_file():
        return "not compared: no safetensors file of them is next to the ledger"
    try:
        is_released = record.describes(digest_file(weights))
    except (OSError, SafetensorError) as error:
        raise CardError(f"{weights} is damaged ({error}): put back the delivered file") from error
    if not is_released:
        raise CardError(
            f"{weights} does not hold the weights of the last release in {path}: they were"
            " exchanged, or changed after training"
        )
    return f"equal to {weights.name} (SHA-256 of each tensor)"


# -- what a ledger says was spent ------------------------------------------------------------------

# Keys of the first line of a ledger, and their labels.
_STATED = {
    "unit": "privacy unit",
    "dataset_size": "number of units",
    "steps": "planned releases",
    "delta": "planned δ",
    "dpkfc": "version of dpkfc",
    "created": "begun",
}


def verify_ledger(
    path: Path,
    delta: float | None = None,
    *,
    copy: tuple[str, int] | None = None,
    pages: bool = True,
) -> dict[str, Any]:
    """Verify a ledger and account for its releases.

    A privacy card and a checkpoint next to the ledger must agree with it. A chain without its last
    lines is still valid, and only a file that remembers a later head can reveal that. The chain has
    no key; docs/accounting.md says what it proves.

    Args:
        path: the ledger.
        delta: δ of the reported ε; None takes the δ of the card next to the ledger, else the first
            line's, else 1e-5.
        copy: a head that somebody has kept, and the number of releases after which it was taken.
        pages: compare the Markdown and the record of the registry with the card too.

    Returns:
        Facts by name. What contradicts the guarantee comes first.

    Raises:
        LedgerError: the chain does not hold.
        CardError: card, checkpoint, copy or weights disagree with the ledger or with each other, or
            no accountant can treat what was released.
        CheckpointError: the checkpoint next to it is damaged.
    """
    ledger = verify_history(path)
    card = read_card(path)
    if copy is not None:
        check_copy(path, ledger, *copy)
    facts = _describe_chain(ledger)
    if card is not None:
        check_promise(card, ledger, functools.partial(_epsilon_of_releases, path, ledger.groups))
        facts["privacy card"] = "states what the ledger shows"
        facts["weights"] = check_weights(card)
        if pages:
            facts["pages of the card"] = check_texts(card)
    facts["weights of the last release"] = check_recorded(path, ledger, card)
    if delta is None:
        delta = card.delta if card is not None else _stated_delta(ledger)
    return facts | _describe_cost(path, ledger, delta)


def _describe_chain(ledger: Verified) -> dict[str, Any]:
    """Return what a ledger says of itself, with a doubt about the guarantee first."""
    header = ledger.header
    doubt = doubt_of(ledger)
    facts: dict[str, Any] = {"guarantee": doubt} if doubt else {}
    facts["chain"] = "holds"
    facts["releases"] = len(ledger.releases)
    facts["head"] = ledger.heads[-1]
    facts["plan"] = header["plan_hash"]
    facts["certified"] = header.get("certified")
    facts["noise generator"] = header.get("rng")
    for key, name in _STATED.items():
        if header.get(key) is not None:
            facts[name] = str(header[key])
    planned = [f"{count} for {purpose}" for purpose, count in ledger.planned_extra.items()]
    if planned:
        facts["planned beside the steps"] = ", ".join(planned)
    return facts


def _describe_cost(path: Path, ledger: Verified, delta: float) -> dict[str, Any]:
    """Return the neighbouring relation of a ledger, and ε of its releases at δ."""
    releases = ledger.releases
    relation = relation_of_releases(releases)
    accountants = ("rdp",) if relation == "replace_one" else ("pld", "rdp")
    stated = ledger.header.get("neighbouring_relation", relation)
    facts: dict[str, Any] = {"neighbouring relation": stated}
    if not releases:
        facts["ε"] = 0.0
        return facts
    for row in describe_extra(releases, delta):
        facts[f"releases for {row['purpose']}, part of ε"] = (
            f"{row['releases']}, noise multiplier {row['noise_multiplier']:.6g}; alone"
            f" ε = {row['epsilon_alone']:.4g} at δ = {delta:g}"
        )
    label = "ε if it were certified," if doubt_of(ledger) else "ε"
    for accountant in accountants:
        name = f"{label} by {accountant.upper()} at δ = {delta:g}"
        facts[name] = _epsilon_of_releases(path, ledger.groups, releases, delta, accountant)
    return facts


def doubt_of(ledger: Verified) -> str:
    """Return what the ledger says against the guarantee, "" if nothing."""
    header = ledger.header
    generator = header.get("rng")
    if generator not in ("secure", None):
        return "NOT PRIVATE: the noise repeats from a seed"
    if header.get("certified") is True:
        if generator == "secure":
            return ""
        return "UNCERTIFIED: the ledger does not say where its noise came from"
    if any(release["noise_multiplier"] == 0 for release in ledger.releases):
        return "NOT PRIVATE: releases without noise"
    return "UNCERTIFIED: the run that wrote this ledger had no certified guarantee"


def _stated_delta(ledger: Verified) -> float:
    """Return δ of the first line, 1e-5 if it states no valid one."""
    stated = ledger.header.get("delta")
    return stated if isinstance(stated, float) and 0 < stated < 1 else 1e-5


def relation_of_releases(releases: Sequence[dict[str, Any]]) -> str:
    """Return the neighbouring relation under which releases can be accounted for."""
    return relation_of(event_from_dict(releases[0]["event"])) if releases else "add_or_remove_one"


def charges_of(
    releases: Sequence[dict[str, Any]], groups: int = 1
) -> list[tuple[dp_accounting.DpEvent, int]]:
    """Return each distinct event of these releases, with the number of times that it counts.

    Args:
        releases: lines of a ledger, from the first on.
        groups: of the ledger; so many consecutive steps cost a unit one event.
    """
    texts = [json.dumps(release["event"], sort_keys=True) for release in releases]
    of_steps = {t for t, release in zip(texts, releases, strict=True) if "purpose" not in release}
    counts = Counter(texts)
    if len(of_steps) == 1:
        steps = sum("purpose" not in release for release in releases)
        counts[of_steps.pop()] -= steps - -(-steps // groups)
    return [(event_from_dict(json.loads(text)), count) for text, count in counts.items()]


def _epsilon_of_releases(
    path: Path, groups: int, releases: Sequence[dict[str, Any]], delta: float, accountant: str
) -> float:
    """Return ε of these releases together.

    Raises:
        CardError: the accountant cannot treat them.
    """
    try:
        return total_epsilon(charges_of(releases, groups), delta, accountant)
    except (TypeError, ValueError, ArithmeticError, MemoryError, AssertionError) as error:
        # dp-accounting asserts that rates and orders are possible.
        reason = one_line(error)
        raise CardError(
            f"the chain of the ledger {path} holds, but its ε cannot be computed: {reason}"
        ) from error
