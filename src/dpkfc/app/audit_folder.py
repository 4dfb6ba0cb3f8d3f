"""Audit a run from its folder, or settings that have not been trained yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file

from dpkfc.app.assembly import Prepared, make_augment, make_optimizer
from dpkfc.app.audit_verdict import AuditVerdict, write_verdict
from dpkfc.app.folder_findings import card_finding, ledger_finding, make_finding
from dpkfc.app.prepare import prepare
from dpkfc.app.results import Result
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings
from dpkfc.audit import (
    Audit,
    MembershipResult,
    OneRunResult,
    Subject,
    audit_one_run,
    audit_step,
    infer_membership,
)
from dpkfc.audit.distinguishing import RUNS
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.verify import verify_history, verify_ledger
from dpkfc.report.written_card import CardError

KINDS = ("step", "one-run", "membership")
# Name of a check, how far it has come, and how far it goes.
Show = Callable[[str, int, int], None]
_FEWEST_RUNS = 10
# Examples of the training set that canaries are put among.
EXAMPLES = 512
MEMBERS = 10_000


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
    return write_verdict(folder, verdict)


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
    ledger = make_finding(
        "ledger of the run",
        measured,
        "a chain that card and checkpoint remember",
        problem,
        "the chain holds; no settings lie here, so no step was audited",
    )
    card = make_finding(
        "card",
        "differs" if card_problem else "as the ledger gives it",
        "what the ledger gives",
        card_problem,
        "ε, its meaning, mechanism, pages and weights fit the ledger",
    )
    verdict = AuditVerdict(ledger=ledger, card=card)
    return write_verdict(folder, verdict)


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
    return write_verdict(folder, verdict).one_run


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
