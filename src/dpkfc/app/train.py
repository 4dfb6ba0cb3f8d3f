"""The loop that trains any recipe under a plan and leaves a run folder behind."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from dpkfc._errors import first_line
from dpkfc.app.assembly import (
    Prepared,
    learning_rate,
    library_errors,
    make_augment,
    make_optimizer,
    make_plan,
    settle,
)
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.methods import METHOD_LABELS
from dpkfc.app.metrics import Metrics, Row
from dpkfc.app.owndata.recipes import KEPT
from dpkfc.app.place import change_places, data_digest, move_data
from dpkfc.app.pretraining import pretrain, read_labelled
from dpkfc.app.private_scores import make_form
from dpkfc.app.processes import (
    align_processes,
    check_named,
    check_same_settings,
    check_visible,
    is_started,
    join_shares,
    processes,
    use_own_device,
)
from dpkfc.app.progress import TrainingProgress
from dpkfc.app.recipes.catalogue import recipe_of
from dpkfc.app.recipes.objective import NOTHING_KNOWN
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.results import Result, evaluated_weights, make_curve, write_results
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.scores import Scores
from dpkfc.app.settings import RunConfig
from dpkfc.app.settings_file import (
    check_unchanged,
    deciding_settings,
    read_config,
    to_toml,
)
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.config import Plan
from dpkfc.curvature.second_moments import split_head
from dpkfc.distributed.context import DistributedContext
from dpkfc.early_stopping import PURPOSE, EarlyStopping, PrivateEarlyStopping, wrong_answers
from dpkfc.gradients.model_checks import check_finite
from dpkfc.integrations.loggers import Logger, check_logger, make_logger
from dpkfc.privacy.budget import Budget, Receipt
from dpkfc.report.card import stamp
from dpkfc.report.text import rounded_up
from dpkfc.session import Session
from dpkfc.step_record import Batch, StepRecord

if TYPE_CHECKING:
    from dpkfc.audit.one_run import OneRunResult
    from dpkfc.audit.run_canaries import PlantedCanaries

# What torch is built for, by the names of its devices.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")
# Called with the row of each evaluation after the first step. The run ends if it returns False.
Watch = Callable[[Row], bool]


def prepare(
    config: RunConfig,
    data: ExampleSet | None = None,
    *,
    recipe: Recipe | None = None,
    may_find_bounds: bool = False,
) -> Prepared:
    """Read data, make the plan, and build the model of a run.

    Args:
        config: settings.
        data: the examples, if `Recipe.data` has read them already.
        recipe: of the settings, where it has been made.
        may_find_bounds: whether the caller will find the bounds that the schema leaves out.

    Returns:
        Everything the run needs.

    Raises:
        DatasetError: missing or damaged data.
        ConfigError: settings that do not go together, or an unreachable budget.
    """
    run = config.run
    if run.threads:
        torch.set_num_threads(run.threads)
    try:
        check_logger(run.log)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    recipe = (recipe or recipe_of(config)).starting_from(config.model.pretrained)
    if config.data.bounds and not recipe.private_bounds:
        raise ConfigError(
            "bounds = 'private' is for numbers of a table whose bounds the schema leaves out,"
            f" and {recipe.title[:40]!r} has none: leave it out"
        )
    if recipe.find_bounds and not may_find_bounds:
        raise ConfigError(
            "bounds = 'private' is for dpkfc train on one process; elsewhere give bounds in the"
            " schema, or the folder of such a run"
        )
    # Refuse a wrong augmentation before data are read.
    make_augment(config, recipe.input_shape)
    if data is None:
        data = recipe.data(config, is_training=True)
    config = settle(config, data.size)
    model = recipe.model(run.seed)
    private = (
        data.train
        if "private-oracle" in (config.preconditioner.source, config.preconditioner.output_source)
        else None
    )
    counts = None
    if config.privacy.private_scores:
        counts = make_form(recipe, config)
        if DistributedContext.current().world_size > 1:
            raise ConfigError("private_scores is for one process; leave it out")
    make = partial(
        make_plan,
        config,
        recipe.input_shape,
        recipe_probe=recipe.probe,
        private=private,
        unit=recipe.unit,
        max_records_per_unit=recipe.max_records_per_unit,
        private_bounds=recipe.private_bounds,
        scores_norm=counts.norm if counts else 0.0,
        head_inputs=_head_inputs(config, recipe, model),
    )
    plan = make(dataset_size=data.size)
    canaries = run.audit
    if canaries:
        from dpkfc.audit.one_run import check_settings, is_harmless

        with library_errors():
            check_settings(plan, "planted", canaries, confidence=0.95)
        canaries *= is_harmless(plan, model, canaries)
        plan = make(dataset_size=data.size + canaries)
        with library_errors():
            # More records may change what noise = "auto" chooses.
            check_settings(plan, "planted", run.audit, confidence=0.95)
    # Refuse a schedule longer than the plan.
    learning_rate(config, 0, plan.steps)
    kind = run.device.partition(":")[0]
    if kind not in _DEVICES:
        raise ConfigError(f"unknown device {run.device!r:.40}; {nearest(kind, _DEVICES)}")
    try:
        model = model.to(torch.device(run.device))
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)[:60]
        raise ConfigError(f"device {run.device!r} cannot be used ({reason}); try cpu") from None
    start = ""
    if config.model.pretrain_epochs:
        start = pretrain(config, model, recipe.input_shape)
    return Prepared(
        config=config,
        recipe=recipe,
        data=data,
        model=model,
        plan=plan,
        start=start,
        stopping=_make_stopping(config, recipe, data),
        counts=counts,
        canaries=canaries,
    )


def _head_inputs(config: RunConfig, recipe: Recipe, model: nn.Module) -> int:
    """Return the inputs of the layer that a rule of C is for, 1 where there is none.

    Raises:
        ConfigError: the model has no such layer alone, or the rule does not hold for its inputs.
    """
    if config.preconditioner.preconditioner != "moments":
        if config.privacy.max_grad_norm:
            return 1
        if not recipe.is_whitened:
            raise ConfigError(
                "max_grad_norm = 0 is for texts by an encoder, or preconditioner = 'moments';"
                f" {recipe.title[:40]!r} needs C: give one above 0"
            )
    try:
        _, head = split_head(model)
    except ValueError:
        raise ConfigError(
            f"method = {config.run.method!r} is for one linear layer on fixed features, as tables"
            f" have; {config.run.recipe!r} has another model: take dp-kfc-a"
        ) from None
    return head.in_features


def _make_stopping(
    config: RunConfig, recipe: Recipe, data: ExampleSet
) -> EarlyStopping | PrivateEarlyStopping | None:
    """Return what ends a run early, None without `patience`.

    Raises:
        ConfigError: the data have no labels, or units of several records.
    """
    run = config.run
    if not run.patience:
        return None
    if config.stops_privately:
        return _make_private_stopping(config, recipe, data)
    path = Path(config.data.public_validation)
    inputs, labels = read_labelled(path, recipe.input_shape, "public_validation", "an early end")
    device = torch.device(run.device)
    # Public labels take the type of private ones: whole numbers for classes, floats for targets.
    labels = labels.to(device, data.train[1].dtype)
    return EarlyStopping(run.patience, on=(inputs.to(device), labels))


def _make_private_stopping(
    config: RunConfig, recipe: Recipe, data: ExampleSet
) -> PrivateEarlyStopping:
    """Return an early end by noisy losses on the validation split.

    Raises:
        ConfigError: there is no validation split, a unit has several records, the error of a
            regression is asked for, or several processes run.
    """
    run = config.run
    if recipe.max_records_per_unit is not None or data.validation is None:
        raise ConfigError(
            f"stop_on = {run.stop_on!r} needs a validation split of single records, each its own"
            " unit; take public_validation"
        )
    if run.stop_on == "private-error" and recipe.num_classes == 1:
        raise ConfigError("stop_on = 'private-error' counts wrong classes; take 'private-loss'")
    if DistributedContext.current().world_size > 1:
        raise ConfigError(f"stop_on = {run.stop_on!r} is for one process; take public_validation")
    most = config.privacy.stop_most_loss if run.stop_on == "private-loss" else 1.0
    device = torch.device(run.device)
    held_out = tuple(x[:].to(device) for x in data.validation)
    return PrivateEarlyStopping(run.patience, on=held_out, most=most)


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
            ranks.broadcast_from_rank0(partial(check_budget, prepared), "budget")
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
    folder.write_text(folder.schema, schema)
    found = recipe_of(config.change(schema=str(folder.schema)))
    data = found.data(config)
    if data.digest != prepared.data.digest:
        raise DatasetError(
            f"{config.data.data}: has changed since bounds were found; begin again when nothing"
            " writes to it"
        )
    return replace(prepared, recipe=found, data=data)


def check_budget(prepared: Prepared) -> None:
    """Refuse a run that does not fit into its budget, before anything is written."""
    if budget := _find_budget(prepared.config):
        budget.check(prepared.plan, prepared.plan.steps)


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
    if moved:
        config = move_data(config, moved, metrics.data)
        written = read_config(folder.config)
        folder.write_text(folder.config, to_toml(change_places(written, moved)))
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
        budget=_find_budget(config),
        resume=resumed,
        callbacks=_make_loggers(config, folder),
    )
    with session:
        if console is not None and session.receipt is not None:
            _announce_receipt(session.receipt, console)
        if resumed:
            session.restore(folder.checkpoint, any_world_size=any_world_size)
            is_spent = session.steps_done >= plan.steps
            if is_spent and ranks.broadcast_from_rank0(lambda: folder.is_complete, "results"):
                raise ConfigError(
                    f"the run in {folder.path} is complete: all {plan.steps} steps of its plan are"
                    " spent"
                )
        loop = _Loop(prepared, folder, session, metrics, ranks, watch, canaries)
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
            write = partial(write_results, prepared, folder, session, metrics)
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


def _announce_receipt(receipt: Receipt, console: Console) -> None:
    text = (
        f"budget of {receipt.people}: ε of all runs {rounded_up(receipt.before)} before this one,"
        f" {rounded_up(receipt.after)} with it, of {receipt.epsilon:g} at δ = {receipt.delta:g}"
    )
    console.print(text, markup=False, highlight=False)


def _make_loggers(config: RunConfig, folder: RunFolder) -> list[Logger]:
    """Return the logger that the settings name, if they name one."""
    run = config.run
    if not run.log:
        return []
    return [make_logger(run.log, folder.path, folder.path.name, private=run.log_private)]


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM in a list; let the second raise KeyboardInterrupt at once.

    Handlers are restored afterwards. Outside the main thread handlers cannot be set, and signals
    keep their meaning.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class _Loop:
    """Steps, evaluations and checkpoints of one run."""

    prepared: Prepared
    folder: RunFolder
    session: Session
    metrics: Metrics
    ranks: DistributedContext
    watch: Watch | None
    canaries: PlantedCanaries | None = None

    @cached_property
    def every(self) -> int:
        """Steps between evaluations."""
        config, plan = self.prepared.config, self.prepared.plan
        epoch = max(1, round(self.prepared.data.size / config.privacy.expected_batch_size))
        return config.run.evaluate_every or min(epoch, max(1, plan.steps // 5))

    def run(self, progress: TrainingProgress) -> bool:
        """Train to the end of the plan.

        Returns:
            Whether the run was interrupted; then a checkpoint is on the disk.
        """
        plan, done = self.prepared.plan, self.session.steps_done
        if not self.metrics.rows or done >= plan.steps:
            # Save before the first step: a run that is killed later can then be continued, and the
            # budget that it has spent is not lost. Evaluate a finished run again: it may have died
            # before the figures of its final weights were written.
            self.session.release_curvature()
            row = Row(step=done, epsilon=plan.curve.running_epsilon(done))
            self.metrics.add(self._evaluate(row, progress))
            self._save()
        with stop_on_signals() as stop:
            try:
                for batch in self.session.batches():
                    row = self._step(batch, progress)
                    if batch.step == done and self.session.unproved_operation:
                        progress.show_slow_operation(self.session.unproved_operation)
                    is_last = row.step == plan.steps
                    if is_last or row.step % self.every == 0:
                        row = self._evaluate(row, progress)
                    if not is_last and row.accuracy is not None:
                        row = self._release_loss(row)
                    self.metrics.add(row)
                    if row.accuracy is not None:
                        self._save()
                    if is_last:
                        continue
                    if self.ranks.any(self._is_over(row)):
                        self._end_early(row)
                        return False
                    if self.ranks.any(bool(stop) or not self._should_go_on(row)):
                        self._save()
                        return True
            except KeyboardInterrupt:
                if self.ranks.world_size > 1:
                    # All processes save a checkpoint together, and this one alone was interrupted.
                    raise
                self._save()
                return True
        return False

    def _step(self, batch: Batch, progress: TrainingProgress) -> Row:
        """Take one private step and return its row of the metrics."""
        self._set_learning_rate(batch.step)
        loss: Callable[..., Tensor] = self.prepared.recipe.task.loss
        if self.canaries is not None:
            self.canaries.start_step(batch)
            loss = self.canaries.loss
        record = self.session.step(batch, loss)
        self._note_refresh()
        bound = self.prepared.plan.curve.upper_bound(record.release, self.every)
        row = _row(record, bound)
        progress.advance(
            epsilon=row.epsilon,
            clipped_fraction=record.clipped_fraction,
            batch_size=record.batch_size,
        )
        return row

    def _is_over(self, row: Row) -> bool:
        """Return whether the losses so far, public or released with noise, end the run."""
        stopping = self.prepared.stopping
        if stopping is None or row.decisive_loss is None:
            return False
        losses = [row.decisive_loss for row in self.metrics.rows]
        return stopping.is_over([loss for loss in losses if loss is not None])

    def _release_loss(self, row: Row) -> Row:
        """Return a row with a charged, noisy mean on held-out private examples.

        A run that was cut off may have charged some evaluations twice. Once all are charged, the
        row is returned as it is.
        """
        stopping, session = self.prepared.stopping, self.session
        if not isinstance(stopping, PrivateEarlyStopping):
            return row
        if session.ledger.extra.get(PURPOSE, 0) >= session.plan.extra_counts[PURPOSE]:
            return row
        loss_fn = self.prepared.recipe.task.loss
        if self.prepared.config.run.stop_on == "private-error":
            loss_fn = wrong_answers
        with evaluated_weights(session):
            return replace(row, noisy_loss=stopping.loss(session, loss_fn))

    def _end_early(self, row: Row) -> None:
        """Charge the steps that are left.

        Released weights or losses have decided when the run ends, so ε is the whole plan's.
        """
        self.session.forfeit_steps()
        plan = self.prepared.plan
        self.metrics.add(replace(row, epsilon=plan.curve.epsilon(plan.steps)))
        self._save()

    def _should_go_on(self, row: Row) -> bool:
        """Return whether the operator's `watch` lets the run go on after this row."""
        return row.accuracy is None or self.watch is None or self.watch(row)

    def _set_learning_rate(self, step: int) -> None:
        config, plan = self.prepared.config, self.prepared.plan
        rate = learning_rate(config, step, plan.steps)
        for group in self.session.optimizer.param_groups:
            group["lr"] = rate

    def _evaluate(self, row: Row, progress: TrainingProgress) -> Row:
        """Return a row with the score and the mean loss on held-out examples.

        Where scores are released with noise, nothing else is computed from the test rows.
        """
        with evaluated_weights(self.session):
            judged = NOTHING_KNOWN
            if self.prepared.counts is None:
                judged = self.prepared.recipe.task.judge(
                    self.prepared.model, self.prepared.evaluation_examples
                )
            public_loss = self._public_loss()
        progress.accuracy(judged.accuracy, self.prepared.config.run.eval_on)
        return replace(row, accuracy=judged.accuracy, loss=judged.loss, public_loss=public_loss)

    def _public_loss(self) -> float | None:
        stopping = self.prepared.stopping
        if not isinstance(stopping, EarlyStopping):
            return None
        return stopping.loss(self.prepared.model, self.prepared.recipe.task.loss)

    def _note_refresh(self) -> None:
        """Remember step, digest and scale of a new preconditioner."""
        state = self.session.preconditioner
        refreshes = self.metrics.refreshes
        if state is None or any(state.step == known["step"] for known in refreshes):
            return
        refresh = {"step": state.step, "digest": state.digest, "scale": state.scale}
        if state.note:
            refresh["note"] = state.note
        refreshes.append(refresh)

    def _save(self) -> None:
        self.session.save(self.folder.checkpoint)
        write = partial(self.metrics.write, self.folder.metrics)
        self.ranks.broadcast_from_rank0(write, "metrics")


def _row(record: StepRecord, epsilon: float) -> Row:
    """Return the row of a step, without an evaluation."""
    return Row(
        step=record.release,
        epsilon=epsilon,
        seconds=record.seconds,
        batch_size=record.batch_size,
        clipped_fraction=record.clipped_fraction,
        nonfinite_fraction=record.nonfinite_fraction,
        median_norm=record.median_norm,
        floor_fraction=record.notes.get("adam_bc/floor_fraction"),
    )


def _make_result(
    prepared: Prepared,
    folder: RunFolder,
    session: Session,
    metrics: Metrics,
    interrupted: bool,
    scores: Scores | None,
) -> Result:
    """Return the result of a run that has ended, with the figures of its last evaluation."""
    last = metrics.evaluated()[-1]
    task = prepared.recipe.task
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
        errors=task.further(last.accuracy, last.loss),
        releases=session.ledger.count,
        figures=prepared.data.figures,
        scores=scores,
        classes=prepared.recipe.classes,
        noisy=prepared.counts is not None,
    )
