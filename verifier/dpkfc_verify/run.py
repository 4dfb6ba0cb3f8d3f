"""Check the folder of a run: its ledger and ε first, then all that lies beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpkfc_verify import documents
from dpkfc_verify.accountant import epsilon
from dpkfc_verify.ledger import Mismatch, Unchecked, read_ledger
from dpkfc_verify.report import FAILS, HOLDS, OPEN, Kept, Report, round_up
from dpkfc_verify.stamps import check_signature, read_stamp

__all__ = ["FAILS", "HOLDS", "NEVER", "OPEN", "Kept", "Report", "add_up", "verify_run"]

NEVER = (
    "that the program trained as the ledger says; what the owner states (purpose, people, results, "
    "figures outside ε); that all files were not replaced together, unless somebody kept a head"
)


def verify_run(run: Path, kept: Kept | None = None) -> Report:
    """Check all that the folder of a run states against its ledger."""
    report = Report(run, kept or Kept())
    report.check("ledger", _read_ledger)
    if report.ledger.heads:
        report.check("guarantee", _check_guarantee)
        report.check("privacy card", documents.read_card)
        report.check("privacy loss", _account)
        if report.card:
            report.check("statements of the card", documents.check_card)
            report.check("plan", documents.check_plan)
            report.check("ε on the card", documents.check_epsilon)
            report.check("attack rates", documents.check_rates)
            report.check("page of the card", documents.check_page)
        report.check("weights", documents.check_weights)
        report.check("certificate", documents.check_certificate)
        report.check("head that was kept", _check_head)
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
    if any(body["noise_multiplier"] == 0 for body, _ in report.ledger.kinds):
        raise Mismatch("NOT PRIVATE: the ledger holds releases without noise")
    if header.get("certified") is not True or rng is None:
        raise Mismatch("UNCERTIFIED: the ledger says that this run had no certified guarantee")
    if (header.get("delta") or 0) * (header.get("dataset_size") or 0) >= 1:
        raise Mismatch(f"δ = {header['delta']:g} is not below one over the number of units")
    planned = {"": header.get("steps"), **(header.get("extra") or {})}
    for purpose in {body.get("purpose", "") for body, _ in report.ledger.kinds}:
        number = sum(n for body, n in report.ledger.kinds if body.get("purpose", "") == purpose)
        if (most := planned.get(purpose, 0)) is not None and number > most:
            raise Mismatch(f"{number:,} releases for {purpose or 'steps'}; {most:,} were planned")
    return f"certified for {header.get('unit', 'units that are not named')}, within its plan"


def _account(report: Report) -> str:
    stated = report.ledger.header.get("delta") or report.card.get("guarantee", {}).get("delta")
    if isinstance(stated, float) and 0 < stated < 1:
        report.delta = stated
    spent = epsilon(report.ledger.charges(), report.delta)
    if not math.isfinite(spent):
        raise Mismatch("ε is infinite: a release has no noise to speak of")
    report.epsilon = spent
    return f"ε = {round_up(spent)} at δ = {report.delta:g}, by this program's integral"


def _check_head(report: Report) -> str:
    head, releases, ledger = report.kept.head, report.kept.releases, report.ledger
    if releases is None:
        return ""
    if not ledger.contains(releases, head.strip().lower()):
        raise Mismatch(f"after {releases} of {ledger.count} releases the ledger has another")
    return f"the ledger had it after {releases:,} releases"


def _check_stamp(report: Report, path: Path) -> str:
    heads, root, content = report.ledger.heads, report.kept.root, path.read_bytes()
    count, time = read_stamp(content, heads)
    text = f"the ledger had its first {count:,} releases at {time}"
    if root is None:
        raise Unchecked(f"{text}, if its signature holds: give --tsa-root")
    check_signature(content, heads[count], root)
    return f"{text}, signed under {root.name}"


def add_up(reports: Sequence[Report]) -> str:
    """Return ε of several runs on the same people together, or why there is none.

    δ is the largest of theirs. It cannot be checked for runs of different units, or a ledger that
    is given twice.
    """
    headers = [report.ledger.header for report in reports]
    kinds = {(str(x.get("unit")).split(" (")[0], x.get("neighbouring_relation")) for x in headers}
    if not all(headers) or len(kinds) > 1:
        return f"{OPEN}: these runs have no common unit, so their ε do not add up"
    if len({report.ledger.heads[0] for report in reports}) < len(reports):
        return f"{OPEN}: a ledger is given twice"
    delta = max(report.delta for report in reports)
    try:
        spent = epsilon([x for report in reports for x in report.ledger.charges()], delta)
    except Unchecked as error:
        return f"{OPEN}: {error}"
    return f"ε = {round_up(spent)} at δ = {delta:g} for all {len(reports)} runs together"
