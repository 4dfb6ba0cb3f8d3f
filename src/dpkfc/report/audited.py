"""What `dpkfc audit` left in a card: one row a check, what failed, and what the checks were about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpkfc.report.numbers import number, plain, rounded_up

__all__ = ["audit_rows", "audited", "failed_checks"]

_ABOUT = (
    "The rows of ledger, card and membership are about this run. All others are about its settings with the code of that day, "
    "not about the training that made these weights: one step at fresh initial weights, and for canaries in one run a "
    "training of their own. Two worlds bounds one release, without sampling."
)
_PARTS = ("ledger", "card", "step", "one_run", "membership")


def audit_rows(audit: Any) -> list[tuple[str, str, str, str, str]]:
    """Check, measured, allowed, verdict and how, of every check in the section of a card; nothing in it is trusted."""
    rows = []
    for part in ("ledger", "card"):
        if part in _mapping(audit):
            rows.append(_row(_mapping(audit[part])))
    findings = _mapping(_mapping(audit).get("step")).get("findings")
    rows += [_row(_mapping(finding)) for finding in (findings if isinstance(findings, list) else [])]
    for name in ("one_run", "membership"):
        found = _mapping(_mapping(audit).get(name))
        if found:
            lower, claimed = number(found.get("epsilon_lower")), number(found.get("claimed_epsilon"))
            least = _text(found.get("epsilon_lower")) if lower is None else f"{lower:.3g}"
            most = _text(found.get("claimed_epsilon")) if claimed is None else rounded_up(claimed, 4)
            rows.append((name.replace("_", " "), f"ε ≥ {least}", f"ε ≤ {most}", _held(found), _text(found.get("detail"))))
    return rows


def failed_checks(audit: Any) -> list[str]:
    """The checks that failed."""
    return [row[0] for row in audit_rows(audit) if row[3] != "held"]


def audited(audit: Any) -> str:
    """When it was, and what it was about."""
    parts = [_mapping(_mapping(audit).get(name)) for name in _PARTS]
    dates = sorted({part["date"] for part in parts if isinstance(part.get("date"), str)})
    return f"Audited {', '.join(dates) or 'at an unknown time'}. {_ABOUT}"


def _row(finding: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    check, measured, bound, detail = (_text(finding.get(key)) for key in ("check", "measured", "bound", "detail"))
    return check, measured, bound, _held(finding), detail


def _held(found: Mapping[str, Any]) -> str:
    return "held" if found.get("passed") is True else "FAILED"


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _text(value: Any) -> str:
    return "–" if value is None or value == "" else plain(value)
