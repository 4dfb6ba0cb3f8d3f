"""The findings of checks, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        measured: the figure.
        bound: what the figure may be, in words.
        passed: whether the check held.
        detail: what was done, and the worst case.
    """

    check: str
    measured: str
    bound: str
    passed: bool
    detail: str = ""

    def __post_init__(self) -> None:
        # JSON cannot hold a boolean of numpy.
        object.__setattr__(self, "passed", bool(self.passed))

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def select_failed(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that did not hold.

    Example:
        >>> audit = audit_step(subject)
        >>> [finding.check for finding in select_failed(audit.findings)]
        []
    """
    return [finding for finding in findings if not finding.passed]


def tabulate_findings(findings: Sequence[Finding]) -> list[list[str]]:
    """Return the cells of a table: check, measured, bound, verdict, detail."""
    rows = []
    for finding in findings:
        verdict = "held" if finding.passed else "FAILED"
        rows.append([finding.check, finding.measured, finding.bound, verdict, finding.detail])
    return rows
