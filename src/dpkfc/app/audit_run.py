"""Audits of a run: of the settings in a run folder, or of settings that have not been trained yet."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file

from dpkfc.app.assembly import make_augment, make_optimizer
from dpkfc.app.preparation import Prepared
from dpkfc.app.progress import Console
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.settings import ConfigError, RunConfig, flatten, read_toml
from dpkfc.app.train import prepare
from dpkfc.audit import (
    Audit,
    Finding,
    MembershipResult,
    OneRunResult,
    Subject,
    audit_one_run,
    audit_step,
    infer_membership,
)
from dpkfc.audit.harness import to_rows
from dpkfc.audit.neighbors import RUNS
from dpkfc.checkpoint import CheckpointError
from dpkfc.config import Plan
from dpkfc.privacy.accounting import event_to_dict
from dpkfc.privacy.ledger import LedgerError, Verified, certified_before, verify
from dpkfc.report.card import CardFacts, build_card, failed_checks, to_markdown
from dpkfc.report.verify import Card, CardError, agrees, check_weights, read_card, verify_history

# --------------------------------------------------------------------------------------------------
# Whether the privacy card in a run folder is what its settings and its ledger give, and its weights
# those it names.

_COMPARED = ("plan_hash", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature")
_MISSING = "nothing"


def card_finding(ledger: Path, plan: Plan, device: str) -> Finding | None:
    """Whether the card beside a ledger states what plan and ledger give, and the weights beside it are those it names.

    Args:
        ledger: of the run folder.
        plan: of the settings in the folder.
        device: of the settings.

    Returns:
        None where no card lies there: the run has not ended.
    """
    try:
        card = read_card(ledger)
        if card is None:
            return None
        wrong = _unlike_card(card, plan, len(verify(ledger).releases), device) or _other_weights(card)
    except (CardError, LedgerError) as error:
        wrong = str(error)
    return Finding(
        check="card", measured="differs" if wrong else "as plan and ledger give it", bound="what plan and ledger give",
        passed=not wrong, detail=wrong or "ε, mechanism and plan are those of settings and ledger, the weights those it names",
    )  # fmt: skip


def _unlike_card(card: Card, plan: Plan, releases: int, device: str) -> str:
    """The first statement of a card that is not what it would be; empty where all are."""
    kept = {"releases": releases}
    facts = CardFacts(title="", releases=releases, ledger=kept, assumed_public={}, chosen_by="", not_private={}, device=device)
    try:
        expected = _compared(json.loads(json.dumps(build_card(plan, facts))))
    except ValueError as error:  # more releases than the plan's
        return str(error)
    held = _compared(card.content)
    for name in _COMPARED:
        if where := _difference(held.get(name), expected.get(name), name):
            return where
    return ""


def _compared(content: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that plan and ledger decide: without the refreshes, and without the number of an accelerator."""
    parts = {name: content.get(name) for name in _COMPARED}
    if isinstance(curvature := parts["curvature"], Mapping):
        parts["curvature"] = {name: value for name, value in curvature.items() if name != "refreshes"}
    if isinstance(mechanism := parts["mechanism"], Mapping):
        noise = re.sub(r" on ([a-z]+):\d+,", r" on \1,", str(mechanism.get("noise_generator")))
        parts["mechanism"] = {**mechanism, "noise_generator": noise}
    return parts


def _difference(stated: Any, expected: Any, where: str) -> str:
    """Where two values differ first, and how; empty where they agree."""
    if agrees(stated, expected):
        return ""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        for name in [*expected, *(name for name in stated if name not in expected)]:
            both = stated.get(name, _MISSING), expected.get(name, _MISSING)
            if found := _difference(*both, f"{where}, {str(name)[:60]}"):
                return found
    return f"{where}: the card says {_told(stated)}, plan and ledger give {_told(expected)}"


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:120]


def _other_weights(card: Card) -> str:
    told = check_weights(card)
    return "" if told.startswith("those of") else f"weights {told}"


# --------------------------------------------------------------------------------------------------

KINDS = ("step", "one-run", "membership")
_FEWEST_RUNS = 10
EXAMPLES = 512  # of the training set, among which canaries are put
MEMBERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the audits of one run found.

    Attributes:
        ledger: of a run folder, whether its ledger holds and is that of its settings.
        card: of a run folder with a card, whether card and weights are those of settings and ledger.
        step, one_run, membership: each that was asked for.
    """

    ledger: Finding | None = None
    card: Finding | None = None
    step: Audit | None = None
    one_run: OneRunResult | None = None
    membership: MembershipResult | None = None

    @property
    def findings(self) -> list[Finding]:
        """All of them, one a check."""
        first = [found for found in (self.ledger, self.card) if found is not None]
        others = [found.finding() for found in (self.one_run, self.membership) if found is not None]
        return [*first, *(self.step.findings if self.step else ()), *others]

    @property
    def passed(self) -> bool:
        """Whether every check held."""
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    def describe(self) -> dict[str, Any]:
        """Plain values for the card, with the date of each part."""
        now = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"}
        parts = {"ledger": self.ledger, "card": self.card, "step": self.step}
        found = {name: now | part.describe() for name, part in parts.items() if part is not None}
        others = {"one_run": self.one_run, "membership": self.membership}
        found |= {n: now | {"detail": x.finding().detail} | x.describe() for n, x in others.items() if x is not None}
        text = json.dumps({"passed": self.passed, **found}, default=lambda x: x.item())  # numbers of numpy among them
        plain: dict[str, Any] = json.loads(text)
        return plain


def subject_of(prepared: Prepared) -> Subject:
    """The step of a run, for `audit_step`; a few hundred of its training examples serve as company."""
    return Subject(
        plan=prepared.plan,
        model=lambda: copy.deepcopy(prepared.model),
        dataset=tuple(x[:EXAMPLES] for x in prepared.data.train),
        loss_fn=prepared.recipe.task.loss,
        augment=make_augment(prepared.config, prepared.recipe.input_shape),
    )


def audit(
    config: RunConfig,
    kinds: Sequence[str],
    *,
    canaries: int = 1000,
    runs: int = RUNS,
    weights: Path | None = None,
    console: Console | None = None,
) -> Verdict:
    """Audit the training that settings describe.

    Args:
        config: settings of the run.
        kinds: of `KINDS`.
        canaries: of the one-run audit.
        runs: releases of each world of the two-world test.
        weights: of the trained model, for membership inference.
        console: where progress is drawn; None draws nothing.

    Raises:
        ConfigError: an unknown kind, or membership inference without a trained model.
        DatasetError: missing or damaged data.
    """
    _check_kinds(kinds, runs, weights)
    return _audited(
        prepare(replace(config, test_mode=False)), kinds, canaries=canaries, runs=runs, weights=weights, console=console
    )


def _check_kinds(kinds: Sequence[str], runs: int, weights: Path | None) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"unknown audit {kind!r}; choose from {', '.join(KINDS)}")
    if runs < _FEWEST_RUNS:
        raise ConfigError(f"the two-world test needs {_FEWEST_RUNS} releases of each world or more (--runs), got {runs}")
    if "membership" in kinds and weights is None:
        raise ConfigError("membership inference needs a trained model: give the run folder of a finished run")


def _audited(
    prepared: Prepared, kinds: Sequence[str], *, canaries: int, runs: int, weights: Path | None, console: Console | None
) -> Verdict:
    with _Bars(console) as bars:
        return Verdict(
            step=_step(prepared, runs, bars) if "step" in kinds else None,
            one_run=_one_run(prepared, canaries, bars) if "one-run" in kinds else None,
            membership=_membership(prepared, weights) if weights is not None and "membership" in kinds else None,
        )


def audit_folder(
    path: Path, kinds: Sequence[str], *, canaries: int = 1000, runs: int = RUNS, console: Console | None = None
) -> Verdict:
    """Audit a run folder, and write the verdict into it: audit.json, and a section of the card where the run is finished.

    The folder's own ledger, card and weights are looked at first, whatever else is asked for.

    Raises:
        RunFolderError: no run folder.
        ConfigError: as `audit`; a run in test mode, which promises nothing that could be disproved.
    """
    folder = RunFolder.open(path)
    config = RunConfig(**flatten(read_toml(folder.config), str(folder.config)))
    if config.test_mode:
        raise ConfigError(f"{path} was trained in test mode, where noise can be repeated from a seed: NOT PRIVATE, not audited")
    weights = folder.model if folder.model.is_file() else None
    _check_kinds(kinds, runs, weights)
    prepared = prepare(replace(config, out=""))
    found = ledger_finding(folder.ledger, prepared.plan)
    verdict = _audited(prepared, kinds, canaries=canaries, runs=runs, weights=weights, console=console)
    verdict = replace(verdict, ledger=found, card=card_finding(folder.ledger, prepared.plan, config.device))
    described = verdict.describe()
    folder.write_json(folder.path / "audit.json", described)
    _note(folder, verdict, described)
    return verdict


def _note(folder: RunFolder, verdict: Verdict, described: dict[str, Any]) -> None:
    """Write a verdict into the card; one that was damaged beyond being shown stays as it is, and audit.json says so."""
    if verdict.card is None:
        return
    try:
        card = json.loads(folder.card.read_text("utf-8"))
        before = card.get("audit", {})
        card["audit"] = {name: before[name] for name in ("step", "one_run", "membership") if name in before} | described
        card["audit"]["passed"] = not failed_checks(card["audit"])
        card["not_private"] = {**card.get("not_private", {}), **_unprotected(described)}
        text = to_markdown(card)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        if verdict.card.passed:
            raise
        return
    folder.write_json(folder.card, card)
    folder.write_text(folder.card.with_suffix(".md"), text)


def ledger_finding(path: Path, plan: Plan) -> Finding:
    """Whether a run's ledger holds, begins with what card and checkpoint remember, and has no release but the plan's.

    Args:
        path: the ledger.
        plan: of the run's settings.
    """
    try:
        found = verify_history(path)
        wrong = _unlike(found, plan)
        measured = f"{len(found.releases):,} releases"
    except (LedgerError, CardError, CheckpointError) as error:
        measured, wrong = "cannot be trusted", str(error)
    return Finding(
        check="ledger of the run", measured=measured, bound=f"at most the plan's {plan.steps:,}, each with its event",
        passed=not wrong, detail=wrong or "the chain holds; card and checkpoint remember the same history",
    )  # fmt: skip


def _unlike(found: Verified, plan: Plan) -> str:
    """What a ledger says that its plan does not; empty where they agree."""
    if found.header["plan_hash"] != plan.hash:
        return "it belongs to another plan than the settings in the folder"
    if found.header.get("certified") is not plan.certified and not certified_before(found.header, plan.ledger_header):
        return f"it says certified: {found.header.get('certified')}, the plan {plan.certified}"
    if len(found.releases) > plan.steps:
        return f"it has more releases than the plan's {plan.steps:,}"
    own = {"event": event_to_dict(plan.event), "noise_multiplier": plan.noise_multiplier, "stddev": plan.stddev}
    own |= {"sensitivity": plan.sensitivity}
    for release in found.releases:
        for name, value in own.items():
            if release.get(name) != value:
                return f"release {release.get('release')} was charged with another {name} than the plan's"
    return ""


_MEASURED = "measured on private examples, without noise; for the operator, not for publication"
_TRAINED = f"{_MEASURED}; the audit trained once more on the private examples, and what is published of it adds to ε"


def _unprotected(described: Mapping[str, Any]) -> dict[str, str]:
    """Figures of an audit that ε does not protect, and why."""
    told = {"one_run": _TRAINED}
    parts = {f"audit: {name}": told.get(name, _MEASURED) for name, part in described.items() if isinstance(part, dict)}
    for public in ("audit: ledger", "audit: card"):
        parts.pop(public, None)
    return {**parts, "audit.json": _MEASURED}


def _step(prepared: Prepared, runs: int, bars: _Bars) -> Audit:
    """The audit of one step; on one thread, as thousands of small steps on two take four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(prepared.config.threads or 1)
    try:
        return audit_step(subject_of(prepared), runs=runs, progress=bars.said)
    finally:
        torch.set_num_threads(threads)


def _one_run(prepared: Prepared, canaries: int, bars: _Bars) -> OneRunResult:
    model = copy.deepcopy(prepared.model)
    return audit_one_run(
        prepared.plan,
        model,
        make_optimizer(prepared.config, model),
        prepared.data.train,
        prepared.recipe.task.loss,
        canaries=canaries,
        augment=make_augment(prepared.config, prepared.recipe.input_shape),
        progress=lambda done, of: bars.said("one run with canaries", done, of),
    )


def _membership(prepared: Prepared, weights: Path) -> MembershipResult:
    model = copy.deepcopy(prepared.model)
    model.load_state_dict(load_file(weights), strict=False)
    return infer_membership(
        model,
        prepared.recipe.task.loss,
        tuple(x[:MEMBERS] for x in prepared.data.train),
        tuple(x[:MEMBERS] for x in prepared.data.test),
        delta=prepared.plan.delta,
        claimed_epsilon=prepared.plan.epsilon(),
    )


class _Bars:
    """One bar a check."""

    def __init__(self, console: Console | None) -> None:
        self._progress = None
        if console is not None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def said(self) -> Callable[[str, int, int], None]:
        """Told (name, done, of all)."""

        def told(name: str, done: int, of: int) -> None:
            if self._progress is not None:
                task = self._tasks.get(name)
                if task is None:
                    task = self._tasks[name] = self._progress.add_task(name, total=of)
                self._progress.update(task, completed=done)

        return told


def verdict_table(verdict: Verdict) -> Table:
    """One row a check."""
    table = Table(header_style="bold", show_lines=False)
    for column in ("check", "measured", "allowed", "verdict", "how"):
        table.add_column(column, overflow="fold")
    for row in to_rows(verdict.findings):
        colour = "green" if row[3] == "held" else "bold red"
        table.add_row(row[0], row[1], row[2], f"[{colour}]{row[3]}[/{colour}]", row[4])
    return table
