"""Check the folder of a run: ledger, plan, mechanism, ε, card, weights, total and certificate."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc_verify.accountant import attack_rates, epsilon
from dpkfc_verify.ledger import DAMAGE, Ledger, Mismatch, Unchecked, read_json, read_ledger
from dpkfc_verify.stamps import check_signature, read_stamp

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
        run: the folder, or the ledger in it.
        kept: outside of it.
        findings: check, verdict and one sentence each, in the order of the checks.
        verdict: `FAILS` if a check failed, `OPEN` if a needed one could not be made.
        reason: the sentence behind the verdict, "" where all holds.
        epsilon, delta: recomputed; None where they cannot be.
        ledger: an empty one where it cannot be read.
        card: empty where it cannot be read.
    """

    run: Path
    kept: Kept
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    verdict: str = HOLDS
    reason: str = ""
    epsilon: float | None = None
    delta: float = 1e-5
    ledger: Ledger = field(default_factory=Ledger)
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return where ledger, card and weights lie."""
        return self.run if self.run.is_dir() else self.run.parent

    def check(self, name: str, function: Callable[..., str], *words: Any) -> None:
        """Make one check, and note what came out; "" is nothing to check."""
        try:
            verdict, text = HOLDS, function(self, *words)
        except (Mismatch, Unchecked) as error:
            verdict, text = FAILS if isinstance(error, Mismatch) else OPEN, str(error)
        except DAMAGE as error:
            verdict, text = FAILS, f"damaged or changed ({type(error).__name__}: {error})"[:150]
        if text:
            self.findings.append((name, verdict, text))
        is_new = self.verdict == HOLDS or (self.verdict == OPEN and verdict == FAILS)
        if is_new and (verdict == FAILS or (verdict == OPEN and name in _NEEDED)):
            self.verdict, self.reason = verdict, f"{name}: {text}"


def verify_run(run: Path, kept: Kept | None = None) -> Report:
    """Check all that the folder of a run states against its ledger."""
    report = Report(run, kept or Kept())
    report.check("ledger", _read_ledger)
    if report.ledger.heads:
        for name, function in _CHECKS.items():
            if report.card or name not in _OF_A_CARD:
                report.check(name, function)
        for stamp in sorted(report.folder.glob("*.tsr")):
            report.check(f"time stamp {stamp.name}", _check_stamp, stamp)
    return report


def _read_ledger(report: Report) -> str:
    path = report.run / "ledger.jsonl" if report.run.is_dir() else report.run
    if not path.is_file():
        raise Unchecked(f"there is no ledger {path}; give the folder of a run")
    ledger = report.ledger = read_ledger(path)
    return f"the chain of {ledger.count:,} releases is unbroken; head {ledger.heads[-1]}"


def _check_guarantee(report: Report) -> str:
    header, rng = report.ledger.header, report.ledger.header.get("rng")
    if rng not in ("secure", None):
        raise Mismatch("NOT PRIVATE: the ledger says that the noise repeats from a seed")
    if any(body["noise_multiplier"] == 0 for body in report.ledger.bodies):
        raise Mismatch("NOT PRIVATE: the ledger holds releases without noise")
    if header.get("certified") is not True or rng is None:
        raise Mismatch("UNCERTIFIED: the ledger says that this run had no certified guarantee")
    if (header.get("delta") or 0) * (header.get("dataset_size") or 0) >= 1:
        raise Mismatch(f"δ = {header['delta']:g} is not below one over the number of units")
    planned = {"": header.get("steps"), **(header.get("extra") or {})}
    counts: Counter[str] = Counter()
    for body, number in report.ledger.releases():
        counts[body.get("purpose", "")] += number
    for purpose, number in counts.items():
        if (most := planned.get(purpose, 0)) is not None and number > most:
            raise Mismatch(f"{number:,} releases for {purpose or 'steps'}; {most:,} were planned")
    return f"certified for {header.get('unit', 'units that are not named')}, within its plan"


def _account(report: Report) -> str:
    stated = report.ledger.header.get("delta") or report.card.get("guarantee", {}).get("delta")
    if isinstance(stated, float) and 0 < stated < 1:
        report.delta = stated
    report.epsilon = epsilon(report.ledger.charges(), report.delta)
    if not math.isfinite(report.epsilon):
        raise Mismatch("ε is infinite: a release has no noise to speak of")
    text = f"ε = {round_up(report.epsilon)} at δ = {report.delta:g}, by this program's integral"
    if (groups := report.ledger.groups) > 1:
        text += f"; each unit in one of {groups} groups that take turns, as line 1 says"
    return text


# -- the card --------------------------------------------------------------------------------------


def _read_card(report: Report) -> str:
    path = _find(report, "privacy_card.json")
    content = read_json(path.read_text("utf-8"))
    if content.get("format") != FORMAT:
        raise Unchecked(f"{path.name} has format {content.get('format')}; known is {FORMAT}")
    report.card = content
    return f"{path.name} can be read"


def _find(report: Report, name: str) -> Path:
    path = report.folder / Path(name).name
    if not path.is_file():
        raise Unchecked(f"there is no {path.name} in the folder")
    return path


def _check_card(report: Report) -> str:
    ledger, card, header = report.ledger, report.card, report.ledger.header
    promise, mechanism = card["guarantee"], card["mechanism"]
    count = card["ledger"].get("releases", card["ledger"].get("count"))
    if not ledger.contains(count, card["ledger"]["head"]):
        raise Mismatch(
            f"the card was written after {count} releases with another head: lines of the ledger "
            "were removed or replaced, or the card is of another run"
        )
    _compare("card", "plan", card["plan_hash"], header["plan_hash"])
    _compare("card", "number of releases", promise["releases"], count)
    _compare("card", "begin", card.get("dates", {}).get("begun"), header.get("created"))
    for name in ("certified", "unit", "neighbouring_relation", "delta"):
        if name in header and (name in promise or name == "certified"):
            _compare("card", name, promise.get(name), header[name])
    if steps := [body for body, _ in ledger.releases(count) if not body.get("purpose")]:
        for name in ("noise_multiplier", "stddev", "sensitivity", "event"):
            _compare("card", name, mechanism.get(name), steps[-1][name])
        if isinstance(sampler := mechanism.get("sampler"), Mapping):
            size, event = sampler["dataset_size"], steps[-1]["event"]
            _compare("card", "number of units", size, header.get("dataset_size"))
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
        if figure is not None:
            what = f"card states ε{name and ' by ' + name.upper()}"
            is_tight = (name or accounting.get("accountant", "pld")) == "pld"
            _compare_epsilon(what, figure, spent, is_tight)
    if promise.get("target_epsilon") is not None:
        _compare_epsilon("card states a target of ε", promise["target_epsilon"], spent)
    return "plan, unit, δ, ε, noise and number of releases are the ledger's"


def _compare(where: str, name: str, said: Any, shown: Any) -> None:
    is_equal = type(said) is type(shown) and said == shown
    if isinstance(shown, float) and type(said) in (int, float):
        is_equal = math.isclose(said, shown, rel_tol=1e-9)
    if not is_equal:
        said, shown = (f"{x:.6g}" if isinstance(x, float) else str(x)[:60] for x in (said, shown))
        text = f"the {where} states another {name.replace('_', ' ')} than the ledger"
        raise Mismatch(f"{text}: {said}, not {shown}")


def _compare_epsilon(what: str, said: Any, spent: float, is_tight: bool = False) -> None:
    """Check that a stated ε covers what was spent; a tight one may not be much larger either."""
    slack = _AGREEMENT * max(1.0, spent)
    said = float("inf" if said == "inf" else said if type(said) is not bool else "nan")
    if not said >= spent - slack or (is_tight and said > spent + 2 * slack):
        raise Mismatch(f"the {what} = {said:.6g}, and the releases cost {round_up(spent)}")


def _check_rates(report: Report) -> str:
    if not (meaning := report.card.get("meaning")):
        raise Unchecked("the card states none")
    bounds = attack_rates(report.ledger.charges(), float(report.card["guarantee"]["epsilon"]))
    names = ("right_at_even_odds", "found_at_1_percent_false_alarms")
    for name, bound in zip(names, bounds, strict=True):
        if not meaning[name] >= bound - _AGREEMENT:
            text = f"the card states {meaning[name]:.2%} {name.replace('_', ' ')}, and the releases"
            raise Mismatch(f"{text} allow {bound:.2%}")
    right, found = bounds
    return f"{right:.1%} right at even odds, {found:.1%} found; ε of groups is not recomputed"


def _check_plan(report: Report) -> str:
    if (plan := report.card.get("plan")) is None:
        raise Unchecked("the card holds no plan whose hash could be compared")
    for body in report.ledger.bodies:
        if not body.get("purpose"):
            said, shown = plan.get("noise_multiplier"), body["noise_multiplier"]
            _compare("plan on the card", "noise multiplier", said, shown)
    ledger = report.ledger
    groups = plan.get("sampler", {}).get("groups", 1)
    _compare("plan on the card", "number of groups", groups, ledger.groups)
    bands = plan.get("config", {}).get("bands", 1)
    if bands > ledger.groups:
        raise Mismatch(f"the noise has {bands} bands, too many for {ledger.groups} groups of units")
    if (
        _digest(json.dumps(plan, sort_keys=True, separators=(",", ":")))
        != (ledger.header["plan_hash"])
    ):
        raise Mismatch("the plan on the card is not the one whose hash the ledger began with")
    return "the ledger has its hash, and every step has its noise"


def _check_page(report: Report) -> str:
    card, promise = report.card, report.card["guarantee"]
    path, spent = _find(report, "privacy_card.md"), promise["epsilon"]
    text = path.read_text("utf-8")
    parts = [f"| ε spent | {round_up(spent) if isinstance(spent, float) else spent} |"]
    parts += [f"| δ | {promise['delta']:g} |", card["plan_hash"], card["ledger"]["head"]]
    for part in [*parts, (card.get("weights") or {}).get("sha256", "")]:
        if part not in text:
            raise Mismatch(f"{path.name} lacks what the card states: {part[:60]}")
    return f"{path.name} has ε, δ, plan, head and weights of the card"


def _check_total(report: Report) -> str:
    total, budget = report.card.get("total"), report.card.get("budget")
    claims = [(total["epsilon"], total["delta"])] if total else []
    claims += [(budget["after"], budget["delta"])] if budget else []
    for stated, delta in claims:
        spent = epsilon(report.ledger.charges(), float(delta))
        _compare_epsilon("total of the card is ε", stated, spent)
    if not claims:
        raise Unchecked("the card states none; give the folders of all runs to add them up")
    return "at least ε of this run; give the folders of all runs to add them up"


# -- weights, checkpoint, certificate, stamps ------------------------------------------------------


def _check_weights(report: Report) -> str:
    named = report.card.get("weights") or {}
    path = _find(report, str(named.get("file", "model.safetensors")))
    if named and digest_file(path) != named["sha256"]:
        raise Mismatch(f"{path.name} does not hold the weights that the card was written for")
    record = report.folder / "ledger.weights.json"
    if not record.is_file():
        if not named:
            raise Unchecked("neither card nor ledger names a digest of them")
        return f"{path.name} is the one that the card names (SHA-256)"
    content = read_json(record.read_text("utf-8"))
    stated, releases, ledger = content.pop("hash"), content["releases"], report.ledger
    if _digest(json.dumps(content, sort_keys=True)) != stated:
        raise Mismatch(f"{record.name} was changed: its hash does not fit")
    is_its = content["ledger"] == ledger.header.get("id", ledger.heads[0])
    if not is_its or not ledger.contains(releases, content["head"]):
        raise Mismatch(f"{record.name} is the record of another ledger")
    if releases < ledger.count:
        raise Unchecked(f"their digest is of release {releases:,}, before the last one")
    found = digest_tensors(path)
    for known in filter(None, (content["weights"], content["average"])):
        if found.items() <= known.items() and set(known.values()) == set(found.values()):
            return f"each tensor of {path.name} is the last release's (SHA-256)"
    raise Mismatch(f"{path.name} does not hold the weights of the last release")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
            kind = re.sub(r"^(BF|F|I|U|C)(?=\d)", lambda x: words[x[1]], tensor["dtype"]).lower()
            digest = hashlib.sha256(f"torch.{kind} {tuple(tensor['shape'])}\n".encode())
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            digest.update(file.read(end - begin))
            digests[name] = digest.hexdigest()
    return digests


def _check_checkpoint(report: Report) -> str:
    manifest = report.folder / "checkpoint" / "manifest.json"
    if not manifest.is_file():
        return ""
    meta = read_json(manifest.read_text("utf-8"))["meta"]
    if not report.ledger.contains(meta["ledger_count"], meta["ledger_head"]):
        text = f"it remembers another head after {meta['ledger_count']} releases: lines of the"
        raise Mismatch(f"{text} ledger were removed or replaced")
    return f"it remembers the head after {meta['ledger_count']:,} releases"


def _check_certificate(report: Report) -> str:
    path, ledger = report.kept.certificate or report.folder / "certificate.json", report.ledger
    if not path.is_file():
        if report.kept.certificate is None:
            return ""
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
        file = report.folder / Path(name).name
        if name and (not file.is_file() or digest_file(file) != digest):
            raise Mismatch(f"{path.name} was written for another {file.name}")
    if _digest(f"{said['head']}\n{weights['sha256']}\n") != content["fingerprint"]:
        raise Mismatch(f"the fingerprint in {path.name} belongs to another ledger or other weights")
    if report.epsilon is not None:
        _compare_epsilon("certificate states ε", promise["epsilon"], report.epsilon)
    return f"{path.name} is of this ledger, these weights and this card"


def _check_stamp(report: Report, path: Path) -> str:
    head, time = read_stamp(path)
    if head not in report.ledger.heads:
        raise Mismatch(f"{path.name} is the time stamp of another head than any of this ledger")
    text = f"the ledger had its first {report.ledger.heads.index(head):,} releases at {time}"
    if report.kept.root is None:
        raise Unchecked(f"{text}, if its signature holds: give --tsa-root")
    check_signature(path, head, report.kept.root)
    return f"{text}, signed under {report.kept.root.name}"


def _check_head(report: Report) -> str:
    head, releases, ledger = report.kept.head, report.kept.releases, report.ledger
    if releases is None:
        return ""
    if not ledger.contains(releases, head.strip().lower()):
        raise Mismatch(f"after {releases} of {ledger.count} releases the ledger has another")
    return f"the ledger had it after {releases:,} releases"


_OF_A_CARD = {
    "statements of the card": _check_card,
    "plan": _check_plan,
    "attack rates": _check_rates,
    "page of the card": _check_page,
    "total over several runs": _check_total,
}
_CHECKS: Mapping[str, Callable[[Report], str]] = {
    "guarantee": _check_guarantee,
    "privacy card": _read_card,
    "privacy loss": _account,
    **_OF_A_CARD,
    "weights": _check_weights,
    "checkpoint": _check_checkpoint,
    "certificate": _check_certificate,
    "head that was kept": _check_head,
}


def add_up(reports: list[Report]) -> tuple[float, float]:
    """Return ε of several runs on the same people together, and its δ: the largest of theirs.

    Raises:
        Unchecked: runs of different units, a ledger that is given twice, or no ε.
    """
    headers = [report.ledger.header for report in reports]
    kinds = {(str(x.get("unit")).split(" (")[0], x.get("neighbouring_relation")) for x in headers}
    if not all(headers) or len(kinds) > 1:
        raise Unchecked("these runs have no common unit, so their ε do not add up")
    if len({report.ledger.heads[0] for report in reports}) < len(reports):
        raise Unchecked("a ledger is given twice")
    delta = max(report.delta for report in reports)
    return epsilon([x for report in reports for x in report.ledger.charges()], delta), delta


def round_up(value: float) -> str:
    """Return a number with four decimals, rounded up."""
    units = round(value * 10_000)
    return f"{(units if units / 10_000 >= value else math.ceil(value * 10_000)) / 10_000:.4f}"
