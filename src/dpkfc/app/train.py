"""The loop that trains any recipe under a plan and leaves a run folder behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from torch import nn

from dpkfc.app.assembly import Prepared, make_augment, make_optimizer
from dpkfc.app.curvature_settings import library_errors
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples
from dpkfc.app.methods import METHOD_LABELS
from dpkfc.app.metrics import Metrics
from dpkfc.app.owndata.recipes import KEPT
from dpkfc.app.place import data_digest, move_data
from dpkfc.app.prepare import prepare
from dpkfc.app.processes import (
    align_processes,
    check_named,
    check_same_settings,
    check_visible,
    gather_judged,
    is_started,
    join_shares,
    processes,
    use_own_device,
)
from dpkfc.app.progress import TrainingProgress
from dpkfc.app.recipes.catalogue import recipe_of
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.results import Result, evaluated_weights, make_curve, write_results
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder, write_text
from dpkfc.app.scores import Scores
from dpkfc.app.settings_file import check_unchanged, deciding_settings, read_config, to_toml
from dpkfc.app.toml import ConfigError
from dpkfc.app.training_loop import TrainingLoop, Watch
from dpkfc.config import Plan
from dpkfc.distributed.context import DistributedContext
from dpkfc.gradients.model_checks import check_finite
from dpkfc.integrations.loggers import make_logger
from dpkfc.privacy.budget import Budget
from dpkfc.report.card import stamp
from dpkfc.report.text import round_up
from dpkfc.session import Session

if TYPE_CHECKING:
    from dpkfc.audit.one_run import OneRunResult
    from dpkfc.audit.run_canaries import PlantedCanaries


def run(
    config: RunConfig,
    console: Console | None = None,
    *,
    recipe: Recipe | None = None,
    any_world_size: bool = False,
) -> Result:
    """Train a recipe into a new run folder, on several processes where torchrun has started them.

    Args:
        config: settings. `out` names the folder; without it a new one below runs/ is made. Under
            torchrun every process must see the folder, the first process alone reads and writes
            it, and the same command continues the run that is there.
        console: where progress is drawn; None draws nothing.
        recipe: of the settings, where it has been made.
        any_world_size: let a restart go on with another number of processes.

    Returns:
        The result; `interrupted` after Ctrl-C or SIGTERM, with a checkpoint in the folder.

    Raises:
        RunFolderError: the folder cannot be used; before any training.
        DatasetError: missing or damaged data.
        ConfigError: settings that do not go together, an unreachable budget, or no `out` under
            torchrun.
        BudgetExhausted: the run does not fit into the budget of its dataset; nothing is written.
    """
    run = config.run
    check_named(config)
    with processes() as ranks:
        check_same_settings(config, ranks)
        if is_started(config, ranks):
            return _continue(run.out, console, ranks, any_world_size, {})
        name = f"{run.recipe}-{run.method}"
        make_folder = partial(RunFolder.make, run.out, name)
        folder = ranks.broadcast_from_rank0(make_folder, "run folder")
        try:
            config = use_own_device(config.change(out=str(folder.path)))
            prepared = _prepare_on_all(config, ranks, recipe, may_find_bounds=True)
            _check_private_bounds(prepared)
            ranks.broadcast_from_rank0(partial(check_budget, prepared, console), "budget")
            digest = ranks.broadcast_from_rank0(
                partial(data_digest, config, prepared.data.digest), "data"
            )
        except BaseException:
            if ranks.is_rank0:
                (folder.path / KEPT).unlink(missing_ok=True)
                folder.remove_if_empty()
            raise
        ranks.broadcast_from_rank0(
            lambda: folder.begin(to_toml(config), prepared.recipe.schema), "settings"
        )
        check_visible(folder, ranks)
        if prepared.recipe.find_bounds is not None:
            prepared = _find_bounds(prepared, folder)
        metrics = replace(_new_metrics(config), data=digest)
        return _train(prepared, folder, metrics, console)


def _prepare_on_all(
    config: RunConfig,
    ranks: DistributedContext,
    recipe: Recipe | None = None,
    *,
    may_find_bounds: bool = False,
) -> Prepared:
    """Prepare a run on every process, with the part of the records that each one holds."""
    if ranks.world_size == 1:
        return prepare(config, recipe=recipe, may_find_bounds=may_find_bounds)
    recipe = ranks.run_on_all(lambda: recipe or recipe_of(config))
    made = recipe
    data = ranks.run_on_all(lambda: made.data(config, is_training=True))
    if data.share:
        data = join_shares(data, ranks)
    return ranks.run_on_all(lambda: prepare(config, data, recipe=recipe))


def _check_private_bounds(prepared: Prepared) -> None:
    """Refuse `bounds = "private"` with a schema that already holds the bounds of an earlier run."""
    config, recipe = prepared.config, prepared.recipe
    if config.data.bounds and recipe.find_bounds is None:
        raise ConfigError(
            f"{Path(config.data.schema).name} has the bounds that a run has found; leave --bounds"
            " out to use them, or remove them"
        )


def _find_bounds(prepared: Prepared, folder: RunFolder) -> Prepared:
    """Find bounds by one release, write the schema with them, and encode the examples anew.

    The release is charged before it is made. A run that is cut off after the charge cannot be
    continued, since its folder holds no checkpoint.

    Returns:
        The run with the recipe of the new schema, and with the examples encoded by it.
    """
    config, recipe = prepared.config, prepared.recipe
    assert recipe.find_bounds is not None
    with prepared.plan.open_ledger(folder.ledger) as ledger:
        if budget := _find_budget(config):
            budget.charge(prepared.plan, ledger)
        schema = recipe.find_bounds(prepared.data, prepared.plan, ledger)
    write_text(folder.schema, schema)
    found = recipe_of(config.change(schema=str(folder.schema)))
    data = found.data(config)
    if data.digest != prepared.data.digest:
        raise DatasetError(
            f"{config.data.data}: has changed since bounds were found; begin again when nothing"
            " writes to it"
        )
    return replace(prepared, recipe=found, data=data)


def check_budget(prepared: Prepared, console: Console | None = None) -> None:
    """Refuse a run that does not fit into its budget, before anything is written; say what fits."""
    budget = _find_budget(prepared.config)
    if budget is None:
        return
    receipt = budget.check(prepared.plan, prepared.plan.steps)
    text = (
        f"budget of {receipt.people}: ε of all runs {round_up(receipt.before)} before this one,"
        f" {round_up(receipt.after)} with it, of {receipt.epsilon:g} at δ = {receipt.delta:g}"
    )
    if console is not None:
        console.print(text, markup=False, highlight=False)


def _find_budget(config: RunConfig) -> Budget | None:
    path = config.privacy.budget
    if len(path.splitlines()) > 1:
        raise ConfigError(f"budget must be a file on one line, got {path!r:.60}")
    return Budget(path) if path else None


def _new_metrics(config: RunConfig) -> Metrics:
    return Metrics(config.run.eval_on, settings=deciding_settings(config))


def measure(prepared: Prepared, folder: RunFolder, watch: Watch | None = None) -> Result:
    """Train for the figures alone, with ledger and metrics but without card, model and plots.

    Args:
        prepared: of `prepare`.
        folder: a new run folder.
        watch: is called with every evaluation, and ends the run by returning False. Evaluations
            are for the operator only.

    Returns:
        The result; `interrupted` if `watch` or a signal ended the run.
    """
    folder.begin(to_toml(prepared.config), prepared.recipe.schema)
    metrics = _new_metrics(prepared.config)
    return _train(prepared, folder, metrics, None, watch=watch, figures_only=True)


def resume(
    path: str | Path,
    console: Console | None = None,
    *,
    any_world_size: bool = False,
    moved: Mapping[str, str] | None = None,
) -> Result:
    """Continue a run from its checkpoint, with a fresh noise stream.

    Args:
        path: the run folder. Under torchrun every process must see it, and the first process alone
            reads and writes it.
        console: where progress is drawn; None draws nothing.
        any_world_size: go on with another number of processes than wrote the checkpoint.
        moved: new places of the same data, by the names of `dpkfc.app.place.MOVABLE`.

    Returns:
        The result, as of `run`.

    Raises:
        RunFolderError: no run folder, or one without a checkpoint.
        CheckpointError: a damaged checkpoint, one of other settings or of another number of
            processes.
        ConfigError: the run is complete, its ledger is gone, or its settings or data have changed.
    """
    with processes() as ranks:
        return _continue(path, console, ranks, any_world_size, moved or {})


def _continue(
    path: str | Path,
    console: Console | None,
    ranks: DistributedContext,
    any_world_size: bool,
    moved: Mapping[str, str],
) -> Result:
    """Continue a run by processes that exist already; see `resume`."""
    complete_metrics: list[Metrics] = []

    def read() -> tuple[RunFolder, RunConfig, Metrics]:
        folder, config, metrics = _read_run(path, moved)
        # Rank 0 alone keeps the figures that were computed from private examples.
        complete_metrics.append(metrics)
        return folder, config, metrics.drop_private()

    folder, config, metrics = ranks.broadcast_from_rank0(read, "run folder")
    check_visible(folder, ranks)
    prepared = _prepare_on_all(use_own_device(config), ranks)
    if complete_metrics:
        metrics = complete_metrics[0]
    return _train(prepared, folder, metrics, console, resumed=True, any_world_size=any_world_size)


def read_settings(folder: RunFolder) -> RunConfig:
    """Return the settings of a run folder, with the schema that lies in it.

    Raises:
        ConfigError: settings that cannot be read, or that do not go together.
    """
    config = read_config(folder.config)
    if folder.schema.is_file():
        config = config.change(schema=str(folder.schema))
    return config


def _read_run(path: str | Path, moved: Mapping[str, str]) -> tuple[RunFolder, RunConfig, Metrics]:
    """Return folder, settings and metrics of a run that was started before.

    The settings in the folder take the new places of moved data.
    """
    folder = RunFolder.open(path)
    ledger = folder.ledger
    if not ledger.exists() or (ledger.is_file() and not ledger.stat().st_size):
        raise ConfigError(
            f"{path} holds a checkpoint and no ledger, so what was spent is not known: "
            f"put {ledger.name} back"
        )
    config = read_settings(folder)
    metrics = Metrics.read(folder.metrics) if folder.metrics.is_file() else _new_metrics(config)
    check_unchanged(config, metrics.settings, str(folder.config))
    if moved or metrics.data:
        config = move_data(config, moved, metrics.data)
    if moved:
        written = read_config(folder.config)
        write_text(folder.config, to_toml(written.change(**moved)))
    return folder, config.change(out=str(path)), metrics


def _train(
    prepared: Prepared,
    folder: RunFolder,
    metrics: Metrics,
    console: Console | None,
    *,
    resumed: bool = False,
    any_world_size: bool = False,
    watch: Watch | None = None,
    figures_only: bool = False,
) -> Result:
    """Train to the end of the plan, and write weights, card and plots.

    Args:
        prepared: of `prepare`.
        folder: of the run, with its settings.
        metrics: of the steps before; the loop adds to them.
        console: where rank 0 draws progress; None draws nothing.
        resumed: whether the folder holds a checkpoint to restore.
        any_world_size: whether another number of processes may have written the checkpoint.
        watch: may end the run, see `measure`.
        figures_only: whether to leave out weights, card and plots.

    Returns:
        The result; `interrupted` if the plan has steps left and the run may go on.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another plan.
        ConfigError: the run is complete.
    """
    config, plan = prepared.config, prepared.plan
    ranks = DistributedContext.current()
    if not ranks.is_rank0:
        console = None
    align_processes(ranks, prepared)
    model, examples = prepared.training_parts()
    canaries = _plant_canaries(prepared, model, examples) if prepared.canaries else None
    if canaries is not None and resumed:
        raise ConfigError(
            f"the run in {folder.path} has canaries, whose scores ended with its process: it cannot"
            " be continued; train anew"
        )
    loggers = []
    if config.run.log:
        is_private = config.run.log_private
        name = folder.path.name
        loggers.append(make_logger(config.run.log, folder.path, name, private=is_private))
    session = _make_session(
        canaries,
        make_augment(config, prepared.recipe.input_shape),
        plan,
        model,
        make_optimizer(config, model),
        examples if canaries is None else canaries.dataset,
        ledger_path=folder.ledger,
        units=prepared.data.units,
        share=prepared.data.share or False,
        num_workers=config.run.num_workers,
        capture_graphs=config.run.capture_graphs,
        compile=config.run.compile,
        budget=_find_budget(config),
        resume=resumed,
        callbacks=loggers,
    )
    with session:
        if resumed:
            session.restore(folder.checkpoint, any_world_size=any_world_size)
            if ranks.is_rank0 and folder.metrics.is_file():
                # Another process may have gone on until this one had the ledger.
                metrics = Metrics.read(folder.metrics)
            is_spent = session.steps_done >= plan.steps
            if is_spent and ranks.broadcast_from_rank0(lambda: folder.is_complete, "results"):
                raise ConfigError(
                    f"the run in {folder.path} is complete: all {plan.steps} steps of its plan are"
                    " spent"
                )
        loop = TrainingLoop(prepared, folder, session, metrics, ranks, watch, canaries)
        with TrainingProgress(
            plan.steps,
            done=session.steps_done,
            console=console,
            label=METHOD_LABELS[config.run.method],
        ) as progress:
            interrupted = loop.run(progress)
        ranks.run_on_all(partial(check_finite, session.layers))
        scores = audit = None
        if not interrupted and not figures_only:
            with evaluated_weights(session):
                parts = gather_judged(prepared, ranks)
            write = partial(write_results, prepared, folder, session, metrics, parts)
            scores = ranks.broadcast_from_rank0(write, "results")
            if canaries is not None:
                audit = _judge_canaries(canaries, plan, metrics)
        result = _make_result(prepared, folder, session, metrics, interrupted, scores)
        return replace(result, audit=audit, plan=plan)


def _make_session(
    canaries: PlantedCanaries | None,
    augment: Callable[[Any], Any] | None,
    *words: Any,
    **options: Any,
) -> Session:
    """Return the session of a run; canaries, where there are any, observe its releases."""
    if canaries is None:
        return Session(*words, augment=augment, **options)
    from dpkfc.audit.one_run import ObservedSession
    from dpkfc.audit.planted_loss import augment_with_ids

    augment = augment_with_ids(augment)
    return ObservedSession(*words, augment=augment, observer=canaries, **options)


def _plant_canaries(prepared: Prepared, model: nn.Module, examples: Examples) -> PlantedCanaries:
    """Return the canaries of a run; their coins are tossed by the operating system."""
    from dpkfc.audit.run_canaries import PlantedCanaries

    rng = np.random.default_rng()
    coins = rng.random(prepared.canaries) < 0.5
    loss, is_augmented = prepared.recipe.task.loss, bool(prepared.config.data.augment)
    with library_errors():
        return PlantedCanaries(
            prepared.plan, model, examples, loss, coins, rng, is_augmented=is_augmented
        )


def _judge_canaries(canaries: PlantedCanaries, plan: Plan, metrics: Metrics) -> OneRunResult:
    from dpkfc.audit.one_run import RELEASED, judge_canaries

    seconds = sum(row.seconds or 0.0 for row in metrics.rows)
    claimed = plan.curve.epsilon(plan.steps)
    return judge_canaries(canaries, plan, claimed, seconds, where=RELEASED)


def _make_result(
    prepared: Prepared,
    folder: RunFolder,
    session: Session,
    metrics: Metrics,
    interrupted: bool,
    scores: Scores | None,
) -> Result:
    """Return the result of a run that has ended, with the figures of its last evaluation."""
    last = metrics.select_evaluated()[-1]
    task = prepared.recipe.task
    errors = task.derive_figures(last.accuracy, last.loss)
    for score in scores.scores if scores else ():
        errors.pop(score.name, None)
    return Result(
        folder=folder.path,
        accuracy=math.nan if last.accuracy is None else last.accuracy,
        measured_on=prepared.config.run.eval_on,
        epsilon=prepared.plan.epsilon(session.ledger.steps, session.ledger.extra),
        steps=session.steps_done,
        seconds=sum(row.seconds or 0.0 for row in metrics.rows),
        interrupted=interrupted,
        curve=make_curve(prepared, metrics),
        score=task.score,
        loss=last.loss,
        stamp=stamp(prepared.plan),
        head=session.ledger.head,
        errors=errors,
        releases=session.ledger.count,
        figures=prepared.data.figures,
        scores=scores,
        classes=prepared.recipe.classes,
        noisy=prepared.counts is not None,
    )
