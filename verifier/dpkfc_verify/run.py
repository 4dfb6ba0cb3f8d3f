"""Check the folder of a run: ledger, plan, mechanism, ε, card, weights, total and certificate."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc_verify.accountant import attack_rates, epsilon
from dpkfc_verify.ledger import DAMAGE, Ledger, Mismatch, Unchecked, read_json, read_ledger
from dpkfc_verify.stamps import check_signature, read_stamp

Card = Mapping[str, Any]

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be checked"
FORMAT = 1  # of a card, and of a certificate
# What two accountants may differ by: below 1 absolute, above relative. Attack rates: absolute.
_AGREEMENT = 1e-3
NEVER = (
    "that the program trained as the ledger says; what the owner states (purpose, people, results, "
    "figures outside ε); that all files were not replaced together, unless somebody kept a head"
)
# Checks without which nothing is known.
_NEEDED = {"ledger", "privacy loss", "certificate"}


@dataclass(frozen=True)
class Kept:
    """What somebody has kept outside of the folder.

    Attributes:
        certificate: its JSON file; None takes `certificate.json` in the folder, if it is there.
        head, releases: a head, and the number of releases after which it was noted.
        root: certificate of the time-stamping authority that you trust.
    """

    certificate: Path | None = None
    head: str = ""
    releases: int | None = None
    root: Path | None = None


@dataclass
class Report:
    """What was found in the folder of a run.

    Attributes:
        run: the folder.
        findings: check, verdict and one sentence each, in the order of the checks.
        epsilon, delta: recomputed; None where they cannot be.
        ledger: None where it cannot be read.
    """

    run: Path
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    epsilon: float | None = None
    delta: float = 1e-5
    ledger: Ledger | None = None

    @property
    def verdict(self) -> str:
        """Return `FAILS` if a check failed, `OPEN` if a needed one could not be made."""
        verdicts = {verdict for _, verdict, _ in self.findings}
        is_open = any(x == OPEN and check in _NEEDED for check, x, _ in self.findings)
        return FAILS if FAILS in verdicts else OPEN if is_open else HOLDS

    @property
    def reason(self) -> str:
        """Return the sentence behind the verdict, "" where all holds."""
        found = [
            f"{check}: {text}"
            for check, verdict, text in self.findings
            if verdict == self.verdict != HOLDS and (verdict == FAILS or check in _NEEDED)
        ]
        return found[0] if found else ""

    def check(self, name: str, function: Callable[[], str]) -> None:
        """Make one check, and note what came out."""
        try:
            verdict, text = HOLDS, function()
        except Mismatch as error:
            verdict, text = FAILS, str(error)
        except Unchecked as error:
            verdict, text = OPEN, str(error)
        except DAMAGE as error:
            verdict, text = FAILS, f"damaged or changed ({type(error).__name__}: {error})"[:150]
        self.findings.append((name, verdict, text))


def verify_run(run: Path, kept: Kept | None = None) -> Report:
    """Check all that the folder of a run states against its ledger."""
    report, kept = Report(run), kept or Kept()
    path = run / "ledger.jsonl" if run.is_dir() else run
    folder = path.parent
    card: dict[str, Any] = {}
    report.check("ledger", lambda: _read_ledger(report, path))
    if report.ledger is None:
        return report
    ledger = report.ledger
    report.check("guarantee", lambda: _check_guarantee(ledger))
    report.check("privacy card", lambda: _read_card(folder, card))
    delta = ledger.header.get("delta") or card.get("guarantee", {}).get("delta")
    report.delta = delta if isinstance(delta, float) and 0 < delta < 1 else report.delta
    report.check("privacy loss", lambda: _account(report, ledger))
    for name, function in _CHECKS_OF_A_CARD.items() if card else ():
        report.check(name, functools.partial(function, report, ledger, card))
    report.check("weights", lambda: _check_weights(folder, ledger, card))
    manifest = folder / "checkpoint" / "manifest.json"
    if manifest.is_file():
        report.check("checkpoint", lambda: _check_checkpoint(manifest, ledger))
    place = kept.certificate or folder / "certificate.json"
    if kept.certificate or place.is_file():
        report.check("certificate", lambda: _check_certificate(place, report, ledger, folder))
    for stamp in sorted(folder.glob("*.tsr")):
        check = functools.partial(_check_stamp, stamp, ledger, kept.root)
        report.check(f"time stamp {stamp.name}", check)
    if kept.releases is not None:
        report.check("head that was kept", lambda: _check_head(ledger, kept))
    return report


def _read_ledger(report: Report, path: Path) -> str:
    if not path.is_file():
        raise Unchecked(f"there is no ledger {path}; give the folder of a run")
    ledger = report.ledger = read_ledger(path)
    return f"the chain of {ledger.count:,} releases is unbroken; head {ledger.heads[-1]}"


def _check_guarantee(ledger: Ledger) -> str:
    header = ledger.header
    if header.get("rng") not in ("secure", None):
        raise Mismatch("NOT PRIVATE: the ledger says that the noise repeats from a seed")
    if any(body["noise_multiplier"] == 0 for body in ledger.bodies):
        raise Mismatch("NOT PRIVATE: the ledger holds releases without noise")
    if header.get("certified") is not True or header.get("rng") != "secure":
        raise Mismatch("UNCERTIFIED: the ledger says that this run had no certified guarantee")
    if (header.get("delta") or 0) * (header.get("dataset_size") or 0) >= 1:
        raise Mismatch(f"δ = {header['delta']:g} is not below one over the number of units")
    counts: Counter[str] = Counter()
    for body, number in ledger.releases():
        counts[body.get("purpose", "")] += number
    planned = {"": header.get("steps"), **(header.get("extra") or {})}
    for purpose, number in counts.items():
        most = planned.get(purpose, 0)
        if most is not None and number > most:
            raise Mismatch(f"{number:,} releases for {purpose or 'steps'}; {most:,} were planned")
    return f"certified for {header.get('unit', 'units that are not named')}, within its plan"


def _account(report: Report, ledger: Ledger) -> str:
    report.epsilon = epsilon(ledger.charges(), report.delta)
    if not math.isfinite(report.epsilon):
        raise Mismatch("ε is infinite: a release has no noise to speak of")
    text = f"ε = {round_up(report.epsilon)} at δ = {report.delta:g}, by this program's integral"
    if ledger.groups > 1:
        text += f"; each unit in one of {ledger.groups} groups that take turns, as line 1 says"
    return text


# -- the card --------------------------------------------------------------------------------------


def _read_card(folder: Path, card: dict[str, Any]) -> str:
    path = folder / "privacy_card.json"
    if not path.is_file():
        raise Unchecked(f"there is no {path.name} in the folder")
    content = read_json(path.read_text("utf-8"))
    if content.get("format") != FORMAT:
        raise Unchecked(f"{path.name} has format {content.get('format')}; known is {FORMAT}")
    card.update(content, folder=folder)
    return f"{path.name} can be read"


def _check_card(report: Report, ledger: Ledger, card: Card) -> str:
    header, promise, stated = ledger.header, card["guarantee"], card["ledger"]
    count = stated.get("releases", stated.get("count"))
    if not ledger.contains(count, stated["head"]):
        raise Mismatch(
            f"the card was written after {count} releases with another head: lines of the ledger "
            "were removed or replaced, or the card is of another run"
        )
    _compare("card", "plan", card["plan_hash"], header["plan_hash"])
    _compare("card", "number of releases", promise["releases"], count)
    _compare("card", "begin", card.get("dates", {}).get("begun"), header.get("created"))
    for name in ("certified", "unit", "neighbouring_relation", "delta"):
        if name in header and (name in promise or name == "certified"):
            _compare("card", name.replace("_", " "), promise.get(name), header[name])
    steps = [body for body, _ in ledger.releases(count) if not body.get("purpose")]
    mechanism = card["mechanism"]
    for name in ("noise_multiplier", "stddev", "sensitivity", "event") if steps else ():
        _compare("card", name.replace("_", " "), mechanism.get(name), steps[-1][name])
    sampler = mechanism.get("sampler")
    if steps and isinstance(sampler, Mapping):
        _compare("card", "number of units", sampler["dataset_size"], header.get("dataset_size"))
        event = steps[-1]["event"]
        # The event of a sampler that takes everybody is a plain Gaussian.
        everybody = 1.0 if event.get("type") == "GaussianDpEvent" else None
        rate = event.get("sampling_probability", everybody)
        _compare("card", "sampling rate", sampler.get("sample_rate", rate), rate)
    if report.epsilon is None:
        raise Unchecked("all agrees but ε, which cannot be recomputed from these releases")
    spent = epsilon(ledger.charges(count), report.delta)
    accounting = card.get("accounting") or {"epsilon_by": promise.get("epsilon_by", {})}
    figures = {"": promise["epsilon"], **accounting["epsilon_by"]}
    for name, figure in figures.items():
        is_tight = (name or accounting.get("accountant", "pld")) == "pld"
        if figure is not None:
            _compare_epsilon(
                f"card states ε{name and ' by ' + name.upper()}", figure, spent, is_tight
            )
    if promise.get("target_epsilon") is not None:
        _compare_epsilon("card states a target of ε", promise["target_epsilon"], spent)
    return "plan, unit, δ, ε, noise and number of releases are the ledger's"


def _compare(where: str, name: str, said: Any, shown: Any) -> None:
    is_equal = type(said) is type(shown) and said == shown
    if isinstance(shown, float) and isinstance(said, (int, float)) and not isinstance(said, bool):
        is_equal = math.isclose(said, shown, rel_tol=1e-9)
    if not is_equal:
        said, shown = (f"{x:.6g}" if isinstance(x, float) else str(x)[:60] for x in (said, shown))
        raise Mismatch(f"the {where} states another {name} than the ledger: {said}, not {shown}")


def _compare_epsilon(what: str, said: Any, spent: float, is_tight: bool = False) -> None:
    """Check that a stated ε covers what was spent; a tight one may not be much larger either."""
    slack = _AGREEMENT * max(1.0, spent)
    said = float("inf" if said == "inf" else said if type(said) is not bool else "nan")
    if not said >= spent - slack or (is_tight and said > spent + 2 * slack):
        raise Mismatch(f"the {what} = {said:.6g}, and the releases cost {round_up(spent)}")


def _check_rates(report: Report, ledger: Ledger, card: Card) -> str:
    if not card.get("meaning"):
        raise Unchecked("the card states none")
    bounds = attack_rates(ledger.charges(), float(card["guarantee"]["epsilon"]))
    names = ("right_at_even_odds", "found_at_1_percent_false_alarms")
    for name, bound in zip(names, bounds, strict=True):
        said = card["meaning"][name]
        if not said >= bound - _AGREEMENT:
            text = f"the card states {said:.2%} {name.replace('_', ' ')}, and the releases allow"
            raise Mismatch(f"{text} {bound:.2%}")
    right, found = bounds
    return f"{right:.1%} right at even odds, {found:.1%} found; ε of groups is not recomputed"


def _check_plan(report: Report, ledger: Ledger, card: Card) -> str:
    if "plan" not in card:
        raise Unchecked("the card holds no plan whose hash could be compared")
    for body in ledger.bodies:
        if not body.get("purpose"):
            said, shown = card["plan"].get("noise_multiplier"), body["noise_multiplier"]
            _compare("plan on the card", "noise multiplier", said, shown)
    groups = card["plan"].get("sampler", {}).get("groups", 1)
    _compare("plan on the card", "number of groups", groups, ledger.groups)
    bands = card["plan"].get("config", {}).get("bands", 1)
    if bands > ledger.groups:
        raise Mismatch(f"the noise has {bands} bands, too many for {ledger.groups} groups of units")
    text = json.dumps(card["plan"], sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != ledger.header["plan_hash"]:
        raise Mismatch("the plan on the card is not the one whose hash the ledger began with")
    return "the ledger has its hash, and every step has its noise"


def _check_page(report: Report, ledger: Ledger, card: Card) -> str:
    path, promise = card["folder"] / "privacy_card.md", card["guarantee"]
    if not path.is_file():
        raise Unchecked(f"there is no {path.name} in the folder")
    text, spent = path.read_text("utf-8"), promise["epsilon"]
    parts = [f"| ε spent | {round_up(spent) if isinstance(spent, float) else spent} |"]
    parts += [f"| δ | {promise['delta']:g} |", card["plan_hash"], card["ledger"]["head"]]
    for part in [*parts, (card.get("weights") or {}).get("sha256", "")]:
        if part not in text:
            raise Mismatch(f"{path.name} lacks what the card states: {part[:60]}")
    return f"{path.name} has ε, δ, plan, head and weights of the card"


def _check_total(report: Report, ledger: Ledger, card: Card) -> str:
    total, budget = card.get("total"), card.get("budget")
    claims = [(total["epsilon"], total["delta"])] if total else []
    claims += [(budget["after"], budget["delta"])] if budget else []
    for stated, delta in claims:
        _compare_epsilon("total of the card is ε", stated, epsilon(ledger.charges(), float(delta)))
    if not claims:
        raise Unchecked("the card states none; give the folders of all runs to add them up")
    return "at least ε of this run; give the folders of all runs to add them up"


_CHECKS_OF_A_CARD: Mapping[str, Callable[[Report, Ledger, Card], str]] = {
    "statements of the card": _check_card,
    "plan": _check_plan,
    "attack rates": _check_rates,
    "page of the card": _check_page,
    "total over several runs": _check_total,
}

# -- weights, checkpoint, certificate, stamps ------------------------------------------------------


def _check_weights(folder: Path, ledger: Ledger, card: Card) -> str:
    named = card.get("weights") or {}
    path = folder / Path(str(named.get("file", "model.safetensors"))).name
    record = folder / "ledger.weights.json"
    if not path.is_file():
        raise Unchecked(f"{path.name} is not in the folder")
    if named and digest_file(path) != named["sha256"]:
        raise Mismatch(f"{path.name} does not hold the weights that the card was written for")
    if not record.is_file():
        if not named:
            raise Unchecked("neither card nor ledger names a digest of them")
        return f"{path.name} is the one that the card names (SHA-256)"
    content = read_json(record.read_text("utf-8"))
    stated, releases = content.pop("hash"), content["releases"]
    if hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() != stated:
        raise Mismatch(f"{record.name} was changed: its hash does not fit")
    id_ = ledger.header.get("id", ledger.heads[0])
    if content["ledger"] != id_ or not ledger.contains(releases, content["head"]):
        raise Mismatch(f"{record.name} is the record of another ledger")
    if releases < ledger.count:
        raise Unchecked(f"their digest is of release {releases:,}, before the last one")
    found = digest_tensors(path)
    for known in filter(None, (content["weights"], content["average"])):
        if found.items() <= known.items() and set(known.values()) == set(found.values()):
            return f"each tensor of {path.name} is the last release's (SHA-256)"
    raise Mismatch(f"{path.name} does not hold the weights of the last release")


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def digest_tensors(path: Path) -> dict[str, str]:
    """Return the SHA-256 of type, shape and numbers of each tensor of a safetensors file."""
    words = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}
    digests = {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        tensors = read_json(file.read(min(size, path.stat().st_size)))
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            kind = tensor["dtype"]
            letters = kind.rstrip("0123456789")
            known = words.get(letters, letters.lower()) + kind[len(letters) :]
            if kind.startswith("F8_"):
                known = "float" + kind[1:].lower()
            digest = hashlib.sha256(f"torch.{known} {tuple(tensor['shape'])}\n".encode())
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            digest.update(file.read(end - begin))
            digests[name] = digest.hexdigest()
    return digests


def _check_checkpoint(manifest: Path, ledger: Ledger) -> str:
    meta = read_json(manifest.read_text("utf-8"))["meta"]
    if not ledger.contains(meta["ledger_count"], meta["ledger_head"]):
        raise Mismatch(
            f"it remembers another head after {meta['ledger_count']} releases: lines of the ledger "
            "were removed or replaced"
        )
    return f"it remembers the head after {meta['ledger_count']:,} releases"


def _check_certificate(path: Path, report: Report, ledger: Ledger, folder: Path) -> str:
    if not path.is_file():
        raise Unchecked(f"{path} does not exist")
    content = read_json(path.read_text("utf-8"))
    if content["certificate"] != FORMAT:
        text = f"{path.name} has version {content['certificate']}"
        raise Unchecked(f"{text}, and this program reads {FORMAT}: take a newer one")
    said, weights, promise = content["ledger"], content["weights"], content["guarantee"]
    if not ledger.contains(said["releases"], said["head"]):
        raise Mismatch(f"{path.name} is the certificate of another run")
    if said["releases"] != ledger.count:
        raise Mismatch(f"{path.name} was written before the last release; write it anew")
    _compare("certificate", "plan", content["plan_hash"], ledger.header["plan_hash"])
    for name in ("delta", "unit"):
        if name in ledger.header:
            _compare("certificate", name, promise[name], ledger.header[name])
    digests = {"privacy_card.json": content["card"], **{weights["file"]: weights["sha256"]}}
    for name, digest in digests.items():
        file = folder / Path(name).name
        if name and (not file.is_file() or digest_file(file) != digest):
            raise Mismatch(f"{path.name} was written for another {file.name}")
    text = f"{said['head']}\n{weights['sha256']}\n"
    if hashlib.sha256(text.encode()).hexdigest() != content["fingerprint"]:
        raise Mismatch(f"the fingerprint in {path.name} belongs to another ledger or other weights")
    if report.epsilon is not None:
        _compare_epsilon("certificate states ε", promise["epsilon"], report.epsilon)
    return f"{path.name} is of this ledger, these weights and this card"


def _check_stamp(path: Path, ledger: Ledger, root: Path | None) -> str:
    head, time = read_stamp(path)
    if head not in ledger.heads:
        raise Mismatch(f"{path.name} is the time stamp of another head than any of this ledger")
    text = f"the ledger had its first {ledger.heads.index(head):,} releases at {time}"
    if root is None:
        raise Unchecked(f"{text}, if its signature holds: give --tsa-root")
    check_signature(path, head, root)
    return f"{text}, signed under {root.name}"


def _check_head(ledger: Ledger, kept: Kept) -> str:
    if not ledger.contains(kept.releases, kept.head.strip().lower()):
        raise Mismatch(f"after {kept.releases} of {ledger.count} releases the ledger has another")
    return f"the ledger had it after {kept.releases:,} releases"


def add_up(reports: list[Report]) -> tuple[float, float]:
    """Return ε of several runs on the same people together, and its δ: the largest of theirs.

    Raises:
        Unchecked: runs of different units, a ledger that is given twice, or no ε.
    """
    ledgers = [report.ledger for report in reports if report.ledger is not None]
    headers = [ledger.header for ledger in ledgers]
    kinds = {(str(x.get("unit")).split(" (")[0], x.get("neighbouring_relation")) for x in headers}
    if len(ledgers) < len(reports) or len(kinds) > 1:
        raise Unchecked("these runs have no common unit, so their ε do not add up")
    if len({ledger.heads[0] for ledger in ledgers}) < len(ledgers):
        raise Unchecked("a ledger is given twice")
    delta = max(report.delta for report in reports)
    return epsilon([charge for ledger in ledgers for charge in ledger.charges()], delta), delta


def round_up(value: float) -> str:
    """Return a number with four decimals, rounded up."""
    units = round(value * 10_000)
    return f"{(units if units / 10_000 >= value else math.ceil(value * 10_000)) / 10_000:.4f}"
