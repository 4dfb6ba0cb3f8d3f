"""Check the folder of a run: its ledger and ε first, then all that lies beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc_verify import documents
from dpkfc_verify.accountant import epsilon, round_up
from dpkfc_verify.ledger import DAMAGE, Ledger, Mismatch, Unchecked, read_ledger
from dpkfc_verify.stamps import read_stamp

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be checked"
NEVER = (
    "that the program trained as the ledger says; what the owner states (purpose, people, results, "
    "figures outside ε); other words of privacy_card.md (dpkfc ledger verify does); that a PDF has "
    "the words of its JSON; that all files were not replaced together, unless somebody kept a head"
)
# Checks without which nothing is known.
_NEEDED = {"ledger", "privacy loss", "certificate"}


@dataclass
class Report:
    """What was found in the folder of a run.

    Attributes:
        run: the folder, or the ledger in it.
        verdict: `FAILS` if a check failed, `OPEN` if a needed one could not be made.
        reason: the sentence behind the verdict, "" where all holds.
        epsilon, delta: recomputed; None where they cannot be.
        releases, head: of the ledger.
        findings: check, verdict and one sentence each, in the order of the checks.
        ledger: an empty one where it cannot be read.
        card: empty where it cannot be read.
    """

    run: Path
    verdict: str = HOLDS
    reason: str = ""
    epsilon: float | None = None
    delta: float = 1e-5
    releases: int | None = None
    head: str | None = None
    findings: list[dict[str, str]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    card: Mapping[str, Any] = field(default_factory=dict)

    def check(self, name: str, function: Callable[..., str], *inputs: Any) -> None:
        """Make one check, and note what it says."""
        try:
            verdict, text = HOLDS, function(*inputs)
        except (Mismatch, Unchecked) as error:
            verdict, text = FAILS if isinstance(error, Mismatch) else OPEN, str(error)
        except DAMAGE as error:
            verdict, text = FAILS, f"damaged or changed ({type(error).__name__}: {error})"[:150]
        self.findings.append({"check": name, "verdict": verdict, "text": text})
        counts = verdict == FAILS or (verdict == OPEN and name in _NEEDED)
        if counts and self.verdict not in (FAILS, verdict):
            self.verdict, self.reason = verdict, f"{name}: {text}"


def verify_run(
    run: Path,
    certificate: Path | None = None,
    head: tuple[int, str] | None = None,
    root: Path | None = None,
) -> Report:
    """Check all that the folder of a run states against its ledger.

    Args:
        run: the folder, or the ledger in it.
        certificate: its JSON file; None takes `certificate.json` in the folder, if it is there.
        head: a number of releases, and the head after them, that somebody has kept.
        root: certificate of the time-stamping authority that you trust.
    """
    path = run / "ledger.jsonl" if run.is_dir() else run
    folder, report = path.parent, Report(run)
    report.check("ledger", _read_ledger, report, path)
    ledger = report.ledger
    if not ledger.heads:
        return report
    report.check("guarantee", _check_guarantee, ledger)
    report.check("privacy card", _read_card, report, folder)
    report.check("privacy loss", _account, report)
    if card := report.card:
        report.check("statements of the card", documents.check_card, card, ledger)
        report.check("plan", documents.check_plan, card, ledger)
        report.check("ε on the card", documents.check_epsilon, card, ledger, report.delta)
        report.check("attack rates", documents.check_rates, card, ledger)
        report.check("several units", documents.check_groups, card, ledger)
        report.check("page of the card", documents.check_page, card, folder)
    elif (folder / "privacy_card.md").is_file() and report.verdict == HOLDS:
        report.verdict, report.reason = OPEN, "privacy_card.md has no privacy_card.json to compare"
    report.check("weights", documents.check_weights, card, folder)
    if certificate or (folder / "certificate.json").is_file():
        certificate = certificate or folder / "certificate.json"
        report.check("certificate", documents.check_certificate, certificate, card, ledger, folder)
    if head is not None:
        report.check("head that was kept", _check_head, ledger, *head)
    for stamp in sorted(folder.glob("*.tsr")):
        report.check(f"time stamp {stamp.name}", _check_stamp, stamp, ledger.heads, root)
    return report


def _read_ledger(report: Report, path: Path) -> str:
    if not path.is_file():
        raise Unchecked(f"there is no ledger {path}; give the folder of a run")
    report.ledger = read_ledger(path)
    report.releases, report.head = report.ledger.count, report.ledger.heads[-1]
    return f"the chain of {report.releases:,} releases is unbroken; head {report.head}"


def _read_card(report: Report, folder: Path) -> str:
    card = json.loads(documents.find(folder, "privacy_card.json").read_text("utf-8"))
    if card.get("format") != documents.FORMAT:
        raise Unchecked(f"format {card.get('format')}, and this program reads {documents.FORMAT}")
    report.card = card
    return "it can be read"


def _check_guarantee(ledger: Ledger) -> str:
    header, rng = ledger.header, ledger.header.get("rng")
    if rng not in ("secure", None):
        raise Mismatch("NOT PRIVATE: the ledger says that the noise repeats from a seed")
    if any(body["noise_multiplier"] == 0 for body, _ in ledger.kinds):
        raise Mismatch("NOT PRIVATE: the ledger holds releases without noise")
    if header.get("certified") is not True or rng is None:
        raise Mismatch("UNCERTIFIED: the ledger says that this run had no certified guarantee")
    if (header.get("delta") or 0) * (header.get("dataset_size") or 0) >= 1:
        raise Mismatch(f"δ = {header['delta']:g} is not below one over the number of units")
    planned = {"": header.get("steps"), **(header.get("extra") or {})}
    for purpose in {body.get("purpose", "") for body, _ in ledger.kinds}:
        number = sum(n for body, n in ledger.kinds if body.get("purpose", "") == purpose)
        if (most := planned.get(purpose, 0)) is not None and number > most:
            raise Mismatch(f"{number:,} releases for {purpose or 'steps'}; {most:,} were planned")
    return f"certified for {header.get('unit', 'units that are not named')}, within its plan"


def _account(report: Report) -> str:
    stated = report.ledger.header.get("delta") or report.card.get("guarantee", {}).get("delta")
    if isinstance(stated, float) and 0 < stated < 1:
        report.delta = stated
    report.epsilon = spent = epsilon(report.ledger.charges(), report.delta)
    return f"ε = {round_up(spent)} at δ = {report.delta:g}, by this program's integral"


def _check_head(ledger: Ledger, releases: int, head: str) -> str:
    if not ledger.contains(releases, head.strip().lower()):
        raise Mismatch(f"after {releases} of {ledger.count} releases the ledger has another")
    return f"the ledger had it after {releases:,} releases"


def _check_stamp(path: Path, heads: Sequence[str], root: Path | None) -> str:
    count, time = read_stamp(path.read_bytes(), heads, root)
    text = f"the ledger had its first {count:,} releases at {time}"
    if root is None:
        raise Unchecked(f"{text}: give --tsa-root")
    return text


def add_up(reports: Sequence[Report]) -> str:
    """Return ε of several runs on the same people together, or why there is none.

    δ is the largest of theirs. It cannot be checked for runs of different units, or a copy of a
    ledger. Two copies that have both gone on both count.
    """
    headers = [report.ledger.header for report in reports]
    kinds = {(str(x.get("unit")).split(" (")[0], x.get("neighbouring_relation")) for x in headers}
    if not all(headers):
        return f"{OPEN}: a ledger cannot be read, see above"
    if len(kinds) > 1:
        return f"{OPEN}: these runs have no common unit, so their ε do not add up"
    for report, other in itertools.permutations(reports, 2):
        if other.ledger.contains(report.ledger.count, report.head):
            return f"{OPEN}: {report.run} is a copy of {other.run}; leave it out"
    delta = max(report.delta for report in reports)
    try:
        spent = epsilon([x for report in reports for x in report.ledger.charges()], delta)
    except (Mismatch, Unchecked) as error:
        return f"{OPEN}: {error}"
    return f"ε = {round_up(spent)} at δ = {delta:g} for all {len(reports)} runs together"
