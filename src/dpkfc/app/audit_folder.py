"""Audit a run from its folder, or settings that have not been trained yet."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file

from dpkfc.app.assembly import Prepared, make_augment, make_optimizer
from dpkfc.app.prepare import prepare
from dpkfc.app.results import Result
from dpkfc.app.run_folder import RunFolder, write_json
from dpkfc.app.settings import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings
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
from dpkfc.audit.distinguishing import RUNS
from dpkfc.audit.findings import tabulate_findings
from dpkfc.audit.one_run import RELEASED
from dpkfc.checkpoint import CheckpointError
from dpkfc.config import Plan
from dpkfc.privacy.accounting import describe_extra
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import LedgerError, Verified, verify
from dpkfc.report.card import CardFacts, build_card, failed_checks, to_markdown, write_card_files
from dpkfc.report.promise import agrees
from dpkfc.report.verify import (
    check_recorded,
    check_texts,
    check_weights,
    verify_history,
    verify_ledger,
)
from dpkfc.report.written_card import Card, CardError, read_card
from dpkfc.terminal import make_table

# --------------------------------------------------------------------------------------------------
# The privacy card of a run folder against its settings and its ledger, and its weights against the
# card.

_COMPARED = ("plan_hash", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature")
_MISSING = "nothing"


def card_finding(ledger: Path, plan: Plan, device: str) -> Finding | None:
    """Check that the card next to a ledger states what plan and ledger give, and names its weights.

    Args:
        ledger: of the run folder.
        plan: of the settings in the folder.
        device: of the settings.

    Returns:
        The finding, or None where there is no card because the run has not ended.
    """
    try:
        card = read_card(ledger)
        if card is None:
            return None
        releases = verify(ledger).releases
        problem = _card_problem(card, plan, releases, device)
        if not problem:
            weights = check_weights(card)
            problem = "" if weights.startswith("equal to") else f"weights {weights}"
        if not problem:
            check_texts(card)
    except (CardError, LedgerError) as error:
        problem = str(error)
    return _finding(
        "card",
        "differs" if problem else "as plan and ledger give it",
        "what plan and ledger give",
        problem,
        "ε, mechanism and plan agree with settings and ledger, weights with their hashes",
    )


def _finding(check: str, measured: str, bound: str, problem: str, agreed: str) -> Finding:
    return Finding(
        check=check, measured=measured, bound=bound, passed=not problem, detail=problem or agreed
    )


def _card_problem(
    card: Card, plan: Plan, releases: Sequence[Mapping[str, Any]], device: str
) -> str:
    """Return the first statement of a card that differs from what it should be, or nothing."""
    facts = CardFacts(
        title="",
        releases=len(releases),
        ledger={"releases": len(releases)},
        assumed_public={},
        chosen_by="",
        not_private={},
        device=device,
        extra=describe_extra(releases, plan.delta),
    )
    try:
        expected = _compared_parts(json.loads(json.dumps(build_card(plan, facts))))
    except ValueError as error:
        # The ledger holds more releases than the plan has.
        return str(error)
    stated = _compared_parts(card.content)
    # An older card does not have the section.
    optional = ("meaning",) if "meaning" in card.content else ()
    for name in (*_COMPARED, *optional):
        difference = _difference(stated.get(name), expected.get(name), name)
        if difference:
            return difference
    return ""


def _compared_parts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plan and ledger decide: no refreshes, and no number of an accelerator."""
    parts = {name: content.get(name) for name in (*_COMPARED, "meaning")}
    curvature, mechanism = parts["curvature"], parts["mechanism"]
    if isinstance(curvature, Mapping):
        parts["curvature"] = {n: value for n, value in curvature.items() if n != "refreshes"}
    if isinstance(mechanism, Mapping):
        noise = str(mechanism.get("noise_generator"))
        noise = re.sub(r" on ([a-z]+):\d+,", r" on \1,", noise)
        parts["mechanism"] = {**mechanism, "noise_generator": noise}
    return parts


def _difference(stated: Any, expected: Any, where: str) -> str:
    """Return where two values differ first, and how; nothing where they agree."""
    if agrees(stated, expected):
        return ""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        for name in dict.fromkeys([*expected, *stated]):
            inner = _difference(
                stated.get(name, _MISSING),
                expected.get(name, _MISSING),
                f"{where}, {str(name)[:60]}",
            )
            if inner:
                return inner
    return f"{where}: the card says {_show(stated)}, plan and ledger give {_show(expected)}"


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:120]


# --------------------------------------------------------------------------------------------------

KINDS = ("step", "one-run", "membership")
# Name of a check, how far it has come, and how far it goes.
Show = Callable[[str, int, int], None]
_FEWEST_RUNS = 10
# Examples of the training set that canaries are put among.
EXAMPLES = 512
MEMBERS = 10_000


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


def make_subject(prepared: Prepared) -> Subject:
    """Return the step of a run for `audit_step`, among a few hundred of its training examples."""
    units = prepared.data.units
    return Subject(
        plan=prepared.plan,
        model=lambda: copy.deepcopy(prepared.model),
        dataset=tuple(x[:EXAMPLES] for x in prepared.data.train),
        loss_fn=prepared.recipe.task.loss,
        augment=make_augment(prepared.config, prepared.recipe.input_shape),
        units=None if units is None else units[:EXAMPLES],
    )


def audit(
    config: RunConfig,
    kinds: Sequence[str],
    *,
    canaries: int = 1000,
    runs: int = RUNS,
    console: Console | None = None,
) -> AuditVerdict:
    """Audit the training that settings describe.

    Args:
        config: settings of the run.
        kinds: of `KINDS`.
        canaries: of the one-run audit.
        runs: releases for each dataset of the neighbouring-dataset distinguishing test.
        console: where progress is drawn; None draws nothing.

    Raises:
        ConfigError: an unknown kind, or membership inference, which needs a trained model.
        DatasetError: missing or damaged data.
    """
    _check_kinds(kinds, runs, None)
    prepared = prepare(config.change(test_mode=False))
    return _run_audits(prepared, kinds, canaries, runs, None, console)


def _check_kinds(kinds: Sequence[str], runs: int, weights: Path | None) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"unknown audit {kind!r}; choose from {', '.join(KINDS)}")
    if runs < _FEWEST_RUNS:
        raise ConfigError(
            f"the two-world test needs {_FEWEST_RUNS} releases of each world or more (--runs), "
            f"got {runs}"
        )
    if "membership" in kinds and weights is None:
        raise ConfigError(
            "membership inference needs a trained model: give the run folder of a finished run"
        )


def _run_audits(
    prepared: Prepared,
    kinds: Sequence[str],
    canaries: int,
    runs: int,
    weights: Path | None,
    console: Console | None,
) -> AuditVerdict:
    parts: dict[str, Any] = {}
    with _bars(console) as show:
        if "step" in kinds:
            parts["step"] = _audit_step(prepared, runs, show)
        if "one-run" in kinds:
            parts["one_run"] = _audit_copy(prepared, canaries, show)
        if "membership" in kinds and weights is not None:
            parts["membership"] = _infer_membership(prepared, weights)
    return AuditVerdict(**parts)


def audit_folder(
    path: Path,
    kinds: Sequence[str],
    *,
    canaries: int = 1000,
    runs: int = RUNS,
    console: Console | None = None,
) -> AuditVerdict:
    """Audit a run folder and write the verdict into it: audit.json, and a section of its card.

    The folder's own ledger, card and weights are checked whatever else is asked for.

    Raises:
        RunFolderError: no run folder.
        ConfigError: as `audit`; a run in test mode, which promises nothing; attacks on a folder
            of another host, which holds no settings to train with.
    """
    folder = RunFolder.locate(path)
    if folder.card.is_file() and not folder.config.is_file():
        return _audit_release(folder, kinds)
    folder = RunFolder.open(path)
    config = read_settings(folder)
    if config.privacy.test_mode:
        raise ConfigError(
            f"{path} was trained in test mode, where noise can be repeated from a seed: "
            "NOT PRIVATE, not audited"
        )
    weights = folder.model if folder.model.is_file() else None
    _check_kinds(kinds, runs, weights)
    prepared = prepare(config.change(out=""))
    # The ledger is read before training, as an audit may run long.
    ledger = ledger_finding(folder.ledger, prepared.plan)
    verdict = _run_audits(prepared, kinds, canaries, runs, weights, console)
    card = card_finding(folder.ledger, prepared.plan, config.run.device)
    verdict = replace(verdict, ledger=ledger, card=card)
    return _write_verdict(folder, verdict)


def _audit_release(folder: RunFolder, kinds: Sequence[str]) -> AuditVerdict:
    """Audit ledger, card and weights of a folder that a host has written by `write_card`."""
    if list(kinds) != ["step"]:
        raise ConfigError(
            f"{folder.path} has no settings, so only ledger, card and weights are audited: leave"
            " out --kind"
        )
    problem = card_problem = ""
    measured = "cannot be trusted"
    try:
        measured = f"{len(verify_history(folder.ledger).releases):,} releases"
        card_problem = _find_release_problem(folder.ledger)
    except (LedgerError, CardError, CheckpointError) as error:
        problem = card_problem = str(error)
    ledger = _finding(
        "ledger of the run",
        measured,
        "a chain that card and checkpoint remember",
        problem,
        "the chain holds; no settings lie here, so no step was audited",
    )
    card = _finding(
        "card",
        "differs" if card_problem else "as the ledger gives it",
        "what the ledger gives",
        card_problem,
        "ε, its meaning, mechanism, pages and weights fit the ledger",
    )
    verdict = AuditVerdict(ledger=ledger, card=card)
    return _write_verdict(folder, verdict)


def _find_release_problem(ledger: Path) -> str:
    """Return what contradicts a ledger, or could not be compared although a release must have it.

    An empty text says that nothing is wrong.
    """
    try:
        facts = verify_ledger(ledger)
    except CardError as error:
        return str(error)
    for name in ("weights", "pages of the card"):
        if str(facts.get(name)).startswith("not compared"):
            return f"{name} {facts[name]}"
    return ""


def _write_verdict(folder: RunFolder, verdict: AuditVerdict) -> AuditVerdict:
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


def finish_audit(result: Result, canaries: int, device: str) -> OneRunResult | None:
    """Write what the canaries of a run that has ended show into audit.json and the card.

    Without canaries in the released model, a copy of its first weights is trained with them.

    Args:
        result: of `train`.
        canaries: that were asked for.
        device: of the settings.
    """
    if result.audit is None or result.plan is None:
        return audit_folder(result.folder, ["one-run"], canaries=canaries).one_run
    folder = RunFolder.open(result.folder)
    verdict = AuditVerdict(
        ledger=ledger_finding(folder.ledger, result.plan),
        card=card_finding(folder.ledger, result.plan, device),
        one_run=result.audit,
    )
    return _write_verdict(folder, verdict).one_run


def ledger_finding(path: Path, plan: Plan) -> Finding:
    """Check a run's ledger: its chain, what card and checkpoint remember, and the plan's releases.

    Args:
        path: the ledger.
        plan: of the run's settings.
    """
    problem = ""
    measured = "cannot be trusted"
    try:
        ledger = verify_history(path)
        check_recorded(path, ledger, None)
        measured = f"{len(ledger.releases):,} releases"
        _check_ledger(ledger, plan)
    except (LedgerError, CardError, CheckpointError) as error:
        problem = str(error)
    return _finding(
        "ledger of the run",
        measured,
        f"at most the plan's {plan.steps:,}, each with its event",
        problem,
        "the chain holds; card and checkpoint remember the same history",
    )


def _check_ledger(ledger: Verified, plan: Plan) -> None:
    """Refuse a ledger that says what its plan does not."""
    header = ledger.header
    if header["plan_hash"] != plan.hash:
        raise LedgerError("it belongs to another plan than the settings in the folder")
    if header.get("certified") is not plan.certified:
        raise LedgerError(
            f"it says certified: {header.get('certified')}, the plan {plan.certified}"
        )
    planned: dict[str, Plan | ExtraRelease] = {"": plan}
    most = {"": plan.steps, **plan.extra_counts}
    planned |= {kind.purpose: kind for kind in plan.extra_releases}
    counts = Counter(release.get("purpose", "") for release in ledger.releases)
    for purpose, count in counts.items():
        kind = f" for {purpose}" if purpose else ""
        if count > most.get(purpose, 0):
            raise LedgerError(
                f"it has more releases{kind} than the plan's {most.get(purpose, 0):,}"
            )
    for release in ledger.releases:
        number = release.get("release")
        for name, value in _expect_charge(planned[release.get("purpose", "")]).items():
            if release.get(name) != value:
                raise LedgerError(
                    f"release {number} was charged with another {name} than the plan's"
                )


def _expect_charge(kind: Plan | ExtraRelease) -> dict[str, Any]:
    """Return what every line of a kind of releases states."""
    return {
        "event": event_to_dict(kind.event),
        "noise_multiplier": kind.noise_multiplier,
        "stddev": kind.stddev,
        "sensitivity": kind.sensitivity,
    }


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


def _audit_step(prepared: Prepared, runs: int, show: Show) -> Audit:
    """Audit one step, on one thread: thousands of small steps on two take four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(prepared.config.run.threads or 1)
    try:
        return audit_step(make_subject(prepared), runs=runs, progress=show)
    finally:
        torch.set_num_threads(threads)


def _audit_copy(prepared: Prepared, canaries: int, show: Show) -> OneRunResult:
    """Train a copy of the model of a run with canaries, and return what they show."""
    model = copy.deepcopy(prepared.model)
    return audit_one_run(
        prepared.plan,
        model,
        make_optimizer(prepared.config, model),
        prepared.data.train,
        prepared.recipe.task.loss,
        canaries=canaries,
        augment=make_augment(prepared.config, prepared.recipe.input_shape),
        progress=partial(show, "one run with canaries"),
    )


def _infer_membership(prepared: Prepared, weights: Path) -> MembershipResult:
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


@contextmanager
def _bars(console: Console | None) -> Iterator[Show]:
    """Yield what shows how far each check has come, with one progress bar for each."""
    tasks: dict[str, Any] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        TimeRemainingColumn(),
        console=console or Console(quiet=True),
        disable=console is None,
    ) as progress:

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        yield show


def verdict_table(verdict: AuditVerdict) -> Table:
    """Return a table with one row for each check."""
    table = make_table("check", "measured", "allowed", "verdict", "how")
    for check, measured, allowed, result, how in tabulate_findings(verdict.findings):
        colour = "green" if result == "held" else "bold red"
        table.add_row(check, measured, allowed, f"[{colour}]{result}[/{colour}]", how)
    return table
