"""The results of the audits of one run: shown as a table, and written beside and into its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.table import Table

from dpkfc.app.run_folder import RunFolder, write_json
from dpkfc.audit import Audit, Finding, MembershipResult, OneRunResult
from dpkfc.audit.findings import tabulate_findings
from dpkfc.audit.one_run import RELEASED
from dpkfc.report.audit_section import failed_checks
from dpkfc.report.card_files import to_markdown, write_card_files
from dpkfc.terminal import make_table


@dataclass(frozen=True, kw_only=True)
class AuditVerdict:
    """Results of the audits of one run.

    Attributes:
        ledger: of a run folder, whether its ledger holds and belongs to its settings.
        card: of a run folder with a card, whether card and weights belong to settings and ledger.
        step, one_run, membership: each that was asked for.
    """

    ledger: Finding | None = None
    card: Finding | None = None
    step: Audit | None = None
    one_run: OneRunResult | None = None
    membership: MembershipResult | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings of all audits, one for each check."""
        findings = [finding for finding in (self.ledger, self.card) if finding is not None]
        if self.step is not None:
            findings += self.step.findings
        findings += [part.finding() for part in (self.one_run, self.membership) if part is not None]
        return findings

    @property
    def passed(self) -> bool:
        """Whether there are findings and every check held."""
        findings = self.findings
        return bool(findings) and all(finding.passed for finding in findings)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the card, with the date of each part."""
        date = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        described: dict[str, Any] = {"passed": self.passed}
        for name, part in (("ledger", self.ledger), ("card", self.card), ("step", self.step)):
            if part is not None:
                described[name] = {"date": date, **part.describe()}
        for name, attack in (("one_run", self.one_run), ("membership", self.membership)):
            if attack is not None:
                detail = attack.finding().detail
                described[name] = {"date": date, "detail": detail, **attack.describe()}
        # Numbers of numpy among the values become plain ones.
        plain: dict[str, Any] = json.loads(json.dumps(described, default=lambda x: x.item()))
        return plain


def write_verdict(folder: RunFolder, verdict: AuditVerdict) -> AuditVerdict:
    """Write a verdict into `audit.json` and into the card, and return it.

    A card too damaged to be shown stays as it is, and audit.json says so.
    """
    described = verdict.describe()
    write_json(folder.path / "audit.json", described)
    if verdict.card is None:
        return verdict
    try:
        card = json.loads(folder.card.read_text("utf-8"))
        before = card.get("audit", {})
        names = ("step", "one_run", "membership")
        section = {name: before[name] for name in names if name in before}
        section |= described
        section["passed"] = not failed_checks(section)
        card["audit"] = section
        card["not_private"] = {**card.get("not_private", {}), **_unprotected_figures(described)}
        to_markdown(card)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        if verdict.card.passed:
            raise
        return verdict
    write_card_files(folder.path, card)
    return verdict


_MEASURED = "measured on private examples, without noise; for the operator, not for publication"
_TRAINED = (
    f"{_MEASURED}; the audit trained once more on the private examples, and what is published of it"
    " adds to ε"
)


def _unprotected_figures(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of an audit that ε does not protect, with the reason."""
    figures = {}
    for name, part in described.items():
        # What was released, and made-up canaries, reveal no data of a person.
        is_released = isinstance(part, dict) and part.get("where") == RELEASED
        if isinstance(part, dict) and name not in ("ledger", "card") and not is_released:
            figures[f"audit: {name}"] = _TRAINED if name == "one_run" else _MEASURED
    return {**figures, "audit.json": _MEASURED}


def verdict_table(verdict: AuditVerdict) -> Table:
    """Return a table with one row for each check."""
    table = make_table("check", "measured", "allowed", "verdict", "how")
    for check, measured, allowed, result, how in tabulate_findings(verdict.findings):
        colour = "green" if result == "held" else "bold red"
        table.add_row(check, measured, allowed, f"[{colour}]{result}[/{colour}]", how)
    return table
