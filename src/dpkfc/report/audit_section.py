"""Show the section of a card that `dpkfc audit` adds.

The section may come from a file that somebody has changed, so no entry is taken for granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpkfc.report.officer import show_name
from dpkfc.report.text import ensure_mapping, number, plain, round_up

_ABOUT = (
    "The rows of ledger, card and membership are about this run. All others are about its settings "
    "with the code of that day, not about the training that made these weights: one step at fresh "
    "initial weights, and for canaries in one run a training of their own. Two worlds bounds one "
    "release, without sampling."
)


def audit_rows(audit: Any) -> list[tuple[str, str, str, str, str]]:
    """Return check, measured value, bound, verdict and detail of every check of an audit."""
    sections = ensure_mapping(audit)
    rows = [_finding_row(ensure_mapping(sections[x])) for x in ("ledger", "card") if x in sections]
    findings = ensure_mapping(sections.get("step")).get("findings")
    if isinstance(findings, list):
        rows += [_finding_row(ensure_mapping(finding)) for finding in findings]
    for name in ("one_run", "membership"):
        if bound := ensure_mapping(sections.get(name)):
            rows.append(_bound_row(show_name(name), bound))
    return rows


def _finding_row(finding: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    check, measured, bound, detail = (
        _format_value(finding.get(key)) for key in ("check", "measured", "bound", "detail")
    )
    return check, measured, bound, _verdict(finding), detail


def _bound_row(name: str, bound: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return the row of a lower bound on ε."""
    lower, claimed = number(bound.get("epsilon_lower")), number(bound.get("claimed_epsilon"))
    measured = _format_value(bound.get("epsilon_lower")) if lower is None else f"{lower:.3g}"
    most = _format_value(bound.get("claimed_epsilon")) if claimed is None else round_up(claimed, 4)
    detail = _format_value(bound.get("detail"))
    return name, f"ε ≥ {measured}", f"ε ≤ {most}", _verdict(bound), detail


def failed_checks(audit: Any) -> list[str]:
    """Return the names of the checks that failed."""
    return [row[0] for row in audit_rows(audit) if row[3] != "held"]


def audit_summary(audit: Any) -> str:
    """Return when the audit was made, and what it was about."""
    sections = ensure_mapping(audit)
    dates = set()
    for name in ("ledger", "card", "step", "one_run", "membership"):
        date = ensure_mapping(sections.get(name)).get("date")
        if isinstance(date, str):
            dates.add(date)
    return f"Audited {', '.join(sorted(dates)) or 'at an unknown time'}. {_ABOUT}"


def _verdict(finding: Mapping[str, Any]) -> str:
    return "held" if finding.get("passed") is True else "FAILED"


def _format_value(value: Any) -> str:
    return "–" if value is None or value == "" else plain(value)
