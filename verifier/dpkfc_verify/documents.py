"""Check what card, plan, page and certificate state against ledger and ε."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc_verify.accountant import attack_rates, epsilon, group_epsilon, round_up
from dpkfc_verify.ledger import EXTRA, Ledger, Mismatch, Unchecked

Document = Mapping[str, Any]

FORMAT = 1  # of a card, and of a certificate
# What two accountants may differ by: below 1 absolute, above relative. Attack rates: absolute.
_AGREEMENT = 1e-3
# What the first line of a ledger and a release know, by the names that documents use too.
_HEADER = ("plan_hash", "certified", "unit", "neighbouring_relation", "delta", "dataset_size")
_RELEASE = ("noise_multiplier", "stddev", "sensitivity", "event")
_RATES = ("right_at_even_odds", "found_at_1_percent_false_alarms")
# What no card leaves out.
_PROMISE = ("unit", "delta", "releases", "epsilon")
_COPIED = ("guarantee", "meaning", "total", "plan_hash")  # from the card into the certificate


def find(folder: Path, name: str) -> Path:
    """Return a file beside the ledger."""
    path = folder / Path(name).name
    if not path.is_file():
        raise Unchecked(f"there is no {path.name} in the folder")
    return path


def _compare(where: str, ledger: Ledger, *sections: Document) -> None:
    """Check that sections state nothing else than the ledger where they use its names."""
    shown = {name: ledger.header.get(name) for name in _HEADER}
    shown |= {"begun": ledger.header.get("created"), "releases": ledger.count}
    shown["groups"] = ledger.groups
    statements = [statement for section in sections for statement in section.items()]
    for body, _ in ledger.steps or [({}, 0)]:
        shown |= {name: body.get(name) for name in _RELEASE}
        for name, said in statements:
            known = shown.get(name)
            if known is not None and not _is_same(said, known):
                text = f"the {where} states another {name.replace('_hash', '')} than the ledger"
                raise Mismatch(f"{text}: {said}, not {known}"[:160].replace("_", " "))


def _is_same(said: Any, known: Any) -> bool:
    if isinstance(known, float) and type(said) in (int, float):
        return math.isclose(said, known)
    return type(said) is type(known) and bool(said == known)


def check_card(card: Document, ledger: Ledger) -> str:
    """Check that the card is of this ledger, and states what the ledger does."""
    mechanism, kept = card["mechanism"], card["ledger"]
    count = kept.get("releases", kept.get("count"))
    if not ledger.contains(count, kept["head"]):
        text = f"the card was written after {count} releases with another head"
        raise Mismatch(f"{text}: lines of the ledger were removed, or it is of another run")
    missing = [name for name in _PROMISE if name not in card["guarantee"]]
    missing += [name for name in _RELEASE if ledger.steps and name not in mechanism]
    if missing:
        raise Mismatch(f"the card does not state {missing[0].replace('_', ' ')}")
    sampler = {"groups": 1} | (mechanism.get("sampler") or {})
    public = card["assumed_public"].items()
    sizes = [
        {"dataset_size": entry["value"]}
        for name, entry in public
        if name.split(" (")[0][-2:] == " N"
    ]
    _compare("card", ledger, card, card["dates"], card["guarantee"], mechanism, sampler, *sizes)
    unit = str(ledger.header.get("unit", "")).split(" (all records")[0]
    replaced = ledger.header.get("neighbouring_relation") == "replace_one"
    shown = f"{unit} {'replaced' if replaced else 'added or removed'}"
    differ = str(card["guarantee"].get("neighbours_differ_in", shown))
    if unit and not differ.startswith(shown):
        text = f"the card has other neighbours than the ledger: {differ}, not {shown}"
        raise Mismatch(text[:160])
    _compare_extra(card, ledger)
    return "plan, unit, δ, noise and number of releases are the ledger's"


def _compare_extra(card: Document, ledger: Ledger) -> None:
    """Check that the card has all releases beside the steps, and what they cost alone."""
    stated = card["mechanism"].get("extra_releases") or []
    if len(stated) != len(ledger.extra):
        text = f"the card has {len(stated)} kinds of releases beside the steps"
        raise Mismatch(f"{text}, and the ledger {len(ledger.extra)}")
    for said, (kind, charges) in zip(stated, ledger.extra.items(), strict=True):
        purpose = kind[0]
        shown = {**dict(zip(EXTRA, kind, strict=True)), "releases": sum(n for _, n in charges)}
        for name, known in shown.items():
            if not _is_same(said[name], known):
                text = f"the card states another {name.replace('_', ' ')} for {purpose}"
                raise Mismatch(f"{text} than the ledger: {said[name]}"[:160])
        spent = epsilon(charges, card["guarantee"]["delta"])
        _compare_epsilon(f"card, for {purpose} alone,", "pld", said["epsilon_alone"], spent)


def check_plan(card: Document, ledger: Ledger) -> str:
    """Check that the plan on the card is the one that the ledger began with."""
    if (plan := card.get("plan")) is None:
        raise Unchecked("the card holds no plan whose hash could be compared")
    _compare("plan on the card", ledger, plan, {"groups": 1} | plan.get("sampler", {}))
    if (bands := plan.get("config", {}).get("bands", 1)) > ledger.groups:
        raise Mismatch(f"the noise has {bands} bands, too many for {ledger.groups} groups of units")
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    if _digest_text(text) != ledger.header["plan_hash"]:
        raise Mismatch("the plan on the card is not the one whose hash the ledger began with")
    return "the ledger has its hash, and every step has its noise"


def check_epsilon(card: Document, ledger: Ledger, delta: float) -> str:
    """Check each ε that the card states; one by PLD may not be much larger either."""
    promise, spent = card["guarantee"], epsilon(ledger.charges(), delta)
    accounting = card.get("accounting") or {"epsilon_by": promise.get("epsilon_by", {})}
    _compare_epsilon("card", accounting.get("accountant", "pld"), promise["epsilon"], spent)
    for name, figure in accounting["epsilon_by"].items():
        _compare_epsilon(f"card, by {name.upper()},", name, figure, spent)
    further = {"total": "epsilon", "budget": "after"}
    if "target_epsilon" in promise:
        further["guarantee"] = "target_epsilon"
    for name, figure in further.items():
        if stated := card.get(name):
            spent = epsilon(ledger.charges(), float(stated["delta"]))
            _compare_epsilon(f"{name} of the card", "", stated[figure], spent)
    return "each ε on the card covers the releases"


def _compare_epsilon(what: str, accountant: str, said: Any, spent: float) -> None:
    slack, figure = _AGREEMENT * max(1.0, spent), float(math.inf if said is None else said)
    is_much = accountant == "pld" and math.inf > figure > spent + 2 * slack
    if is_much or not figure >= spent - slack:
        text = f"the {what} states ε = {figure:.6g}, and the releases cost"
        raise Mismatch(f"{text} {round_up(spent)}")


def check_rates(card: Document, ledger: Ledger) -> str:
    """Check the attack rates on the card."""
    if not (meaning := card.get("meaning")):
        raise Unchecked("the card states none")
    right, found = attack_rates(ledger.charges(), float(card["guarantee"]["epsilon"]))
    for name, bound in zip(_RATES, (right, found), strict=True):
        if not meaning[name] >= bound - _AGREEMENT:
            text = f"the card states {meaning[name]:.2%} {name.replace('_', ' ')}"
            raise Mismatch(f"{text}, and the releases allow {bound:.2%}")
    shares = round_up(100 * right, 1), round_up(100 * found, 1)
    return "{} % right at even odds, {} % found".format(*shares)


def check_groups(card: Document, ledger: Ledger) -> str:
    """Check what the card states for several units together."""
    if not (groups := (card.get("meaning") or {}).get("groups")):
        raise Unchecked("the card states no ε of groups")
    promise = card["guarantee"]
    # A federated client is sampled with all its records; the turns of groups are fixed.
    independent = "privacy_model" not in promise and ledger.groups == 1
    for size, entry in groups.items():
        delta, units = promise["delta"], int(size)
        spent = group_epsilon(ledger.charges(), delta, units, independent=independent)
        _compare_epsilon(f"card, for {size} units,", "", entry["epsilon"], spent)
    return f"ε for {', '.join(groups)} units is not too small"


def check_page(card: Document, folder: Path) -> str:
    """Check that the page of the card has the figures of the card."""
    page, promise = find(folder, "privacy_card.md").read_text("utf-8"), card["guarantee"]
    page = page.replace("\\", "")
    spent, delta = promise["epsilon"], f"{promise['delta']:g}"
    parts = [f"| δ | {delta} |"]
    spent = round_up(spent) if isinstance(spent, float) else spent
    parts.append(f"| ε spent | {spent} |")
    # What page one says where the card promises something.
    if promise.get("certified") is True and "**AUDIT FAILED" not in page:
        said = f"**(ε = {spent}, δ = {delta})-differentially private** for {promise['unit']}:"
        differ = promise.get("neighbours_differ_in", "")
        parts.append(f"{said} neighbouring data sets differ in {differ}")
        shares = [(card.get("meaning") or {}).get(name) for name in _RATES]
        parts += [f"at most **{round_up(100 * share, 1)} %**" for share in shares if share]
    parts += [card["plan_hash"], card["ledger"]["head"]]
    parts += [(card.get("weights") or {}).get("sha256", "")]
    for part in parts:
        if part not in page:
            raise Mismatch(f"privacy_card.md lacks what the card states: {part[:60]}")
    return "privacy_card.md has ε, δ, unit, rates, plan, head and weights of the card"


def check_weights(card: Document, folder: Path) -> str:
    """Check that the weights are those that the card was written for."""
    if not (named := card.get("weights")):
        raise Unchecked("the card names no digest of them")
    if _digest_file(find(folder, named["file"])) != named["sha256"]:
        raise Mismatch(f"{named['file']} does not hold the weights that the card was written for")
    return f"{named['file']} is the one that the card names (SHA-256)"


def check_certificate(path: Path, card: Document, ledger: Ledger, folder: Path) -> str:
    """Check that the certificate is of this ledger, these weights and this card."""
    content = json.loads(path.read_text("utf-8"))
    if content["certificate"] != FORMAT:
        text = f"{path.name} has version {content['certificate']}"
        raise Unchecked(f"{text}, and this program reads {FORMAT}: take a newer one")
    said, weights = content["ledger"], content["weights"]
    if not ledger.contains(said["releases"], said["head"]):
        raise Mismatch(f"{path.name} is the certificate of another run")
    wrong = [name for name in _COPIED if content[name] != card.get(name)]
    digests = {"privacy_card.json": content["card"], weights["file"]: weights["sha256"]}
    for name in filter(None, digests):
        if _digest_file(find(folder, name)) != digests[name]:
            wrong.append(name)
    if wrong:
        text = f"{path.name} was written for another {wrong[0]}"
        raise Mismatch(f"{text}; after an audit or new facts, dpkfc certify writes it anew")
    if _digest_text(f"{said['head']}\n{weights['sha256']}\n") != content["fingerprint"]:
        raise Mismatch(f"the fingerprint in {path.name} belongs to another ledger or other weights")
    return f"{path.name} is of this ledger, these weights and this card"


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
