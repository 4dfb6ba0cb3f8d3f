"""What an audit found: one line a check, with the figure, what it may be, and whether it held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "failed", "to_rows"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        check: its name.
        measured: the figure.
        bound: what the figure may be, in words.
        passed: whether it held.
        detail: what was done, and where it was worst.
    """

    check: str
    measured: str
    bound: str
    passed: bool
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", bool(self.passed))  # numpy's is no value of JSON

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def failed(findings: Sequence[Finding]) -> list[Finding]:
    """Those that did not hold."""
    return [finding for finding in findings if not finding.passed]


def to_rows(findings: Sequence[Finding]) -> list[list[str]]:
    """Cells of a table: check, measured, bound, verdict, detail."""
    return [[f.check, f.measured, f.bound, "held" if f.passed else "FAILED", f.detail] for f in findings]
