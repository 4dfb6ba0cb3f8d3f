"""The session: the one stateful object a user holds while training under a plan.

It owns sampling, micro-batching, clipping, noise, accounting and the preconditioner's refreshes; the user owns the model,
the loss and a torch optimizer. The model is never wrapped.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpkfc import checkpoint, fsdp
from dpkfc.config import Plan
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.data.checks import check_probes
from dpkfc.data.loading import MicroBatches, layout
from dpkfc.data.units import units_of
from dpkfc.distributed import RankLost, Ranks, check_alike, check_in_step
from dpkfc.gradients.clipped_sum import EvaluationPoint, LossFn, Proof, clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.state import WeightGuard, check_moved, check_optimizer, check_unchanged, traces
from dpkfc.memory import MicroBatchSize
from dpkfc.postprocess.optimizers import WeightAverage
from dpkfc.postprocess.pipeline import Chain, check_with_optimizer
from dpkfc.preconditioning import Coordinates
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, LedgerError, verify
from dpkfc.privacy.mechanism import ClippedSum, Released, release
from dpkfc.verification import public_rows
from dpkfc.verification.examples import check_on_public_rows, checked_verify, program_of
from dpkfc.verification.public_rows import PublicRows

# --------------------------------------------------------------------------------------------------
# What a step takes and what it reports.

_LOG = logging.getLogger(__name__)
_ONLY_NOISE = (
    "private: do not share. Every record of every step had a non-finite gradient; the releases hold noise only. "
    "Look for missing values (NaN)."
)


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: index of the step, from 0.
        release: number of releases so far, this one included.
        seconds: wall time of the step.
        batch_size: realised logical batch, in examples or units. PRIVATE, for the operator's eyes only.
        clipped_fraction: share of examples (units) that were clipped. PRIVATE.
        nonfinite_fraction: fraction of examples (units) whose gradient is not finite; they contribute zero. PRIVATE.
        median_norm: median upper bound of the norm of an example (unit) in the coordinates of the noise. PRIVATE.
        notes: what post-processing noted, public: `adam_bc/floor_fraction`, say.
    """

    step: int
    release: int
    seconds: float
    batch_size: int
    clipped_fraction: float
    nonfinite_fraction: float
    median_norm: float
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A sampled logical batch, to be handed to `Session.step` once.

    Attributes:
        step: number of the step.
        indices: sampled examples, or units where the plan protects more than a record `[n]`.
        records: of units, the records that count in this step `[n, k]`, -1 where a unit has fewer; None for examples.

    Arrays in `indices` and `records` become read-only.
    """

    step: int
    indices: Any
    records: Any = None

    def __post_init__(self) -> None:
        for drawn in (self.indices, self.records):
            if isinstance(drawn, np.ndarray):
                drawn.flags.writeable = False  # what is loaded is what the sampler drew

    @property
    def drawn(self) -> Any:
        """What is loaded: records, in rows of one unit where units are more than a record."""
        return self.indices if self.records is None else self.records

    def __iter__(self) -> NoReturn:
        """Refused by a TypeError: what is sampled is loaded by the session."""
        raise TypeError(
            "a batch of session.batches() holds indices, no data: `for batch in session.batches(): session.step(batch, loss_fn)` "
            "loads it, and loss_fn(model, data) gets its tensors"
        )


def step_record(batch: Batch, update: Released, norms: Tensor, max_grad_norm: float, started: float) -> StepRecord:
    """The report of a step.

    Args:
        batch: the logical batch.
        update: what the optimizer was handed.
        norms: private norms of this process's examples.
        max_grad_norm: C.
        started: `time.perf_counter()` when the step began.
    """
    fractions = [0.0, 0.0, math.nan]
    if norms.numel():
        clipped, nonfinite = (norms > max_grad_norm).double().mean(), (~torch.isfinite(norms)).double().mean()
        fractions = torch.stack([clipped, nonfinite, norms.median().double()]).tolist()
    return StepRecord(
        step=batch.step,
        release=update.release,
        seconds=time.perf_counter() - started,
        batch_size=len(batch.indices),
        clipped_fraction=fractions[0],
        nonfinite_fraction=fractions[1],
        median_norm=fractions[2],
        notes=dict(update.notes),
    )


class GradientTally:
    """Remember whether any record of a run had a finite gradient. PRIVATE: only a warning for the operator uses the answer.

    The tally decides neither what is released nor whether a run continues, and no file holds it.
    """

    def __init__(self) -> None:
        self._finite: Tensor | None = None  # stays on the device until the warning, so that no step waits for it

    def add(self, norms: Tensor) -> None:
        """Count records by their norms `[N]`, before noise."""
        if norms.numel():
            finite = torch.isfinite(norms).any()
            self._finite = finite if self._finite is None else self._finite | finite.to(self._finite.device)

    def warn(self) -> None:
        """Warn once if there were records and none of them had a finite gradient; never raise, whatever the filters say."""
        only_noise = self._finite is not None and not bool(self._finite)
        self._finite = None
        if not only_noise:
            return
        try:
            warnings.warn(_ONLY_NOISE, UserWarning, stacklevel=3)
        except UserWarning:  # a filter makes errors of warnings, but private data must not stop a run
            _LOG.warning(_ONLY_NOISE)


def warn_of_others(releases: int, left: int | None) -> None:
    """Say that a session begins at new weights on a ledger that was in use: a script that crashed and was started again.

    Args:
        releases: in the ledger from before, neither made nor restored by the session; 0 says nothing.
        left: releases that the plan still allows.
    """
    if releases:
        warnings.warn(
            f"the ledger holds {releases} releases from before; this session begins at new weights and has {left} "
            "left. Go on from a checkpoint with session.restore(), or take a new ledger: then both ε add up",
            stacklevel=3,
        )


def check_dataset(dataset: Any) -> None:
    """Refuse what holds data, but has no record i under the index i.

    Args:
        dataset: what a session was given.

    Raises:
        ValueError: a loader, a data frame or a mapping of columns; naming what to pass.
    """
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "a Session samples its batches itself; pass loader.dataset in the place of the DataLoader (and its collate_fn= and "
            "num_workers=)"
        )
    if hasattr(dataset, "iloc"):
        raise ValueError(
            f"a {type(dataset).__name__} is indexed by its columns, not by its records; pass tensors: "
            "(torch.as_tensor(frame[features].to_numpy(), dtype=torch.float32), torch.as_tensor(frame[label].to_numpy()))"
        )
    if isinstance(dataset, Mapping) and not all(isinstance(key, int) for key in dataset):
        raise ValueError(
            f"a {type(dataset).__name__} of columns is indexed by their names, not by records; pass a tuple of tensors, tuple("
            "columns.values()), or for batches that are dicts a list of them: [{k: x[i] for k, x in columns.items()} for i in "
            "range(n)]"
        )


# --------------------------------------------------------------------------------------------------
# One ledger for all processes of a run: the first writes it, and none may know of releases that it
# does not hold.


def open_shared(plan: Plan, path: str | os.PathLike[str] | None, ranks: Ranks) -> Ledger:
    """The ledger on the first process, one in memory on the others.

    After a restart another host may be the first, and find nothing under a path where its predecessor had written: the budget
    would be spent once more. So what any process finds there must be a part of the ledger in force.

    Raises:
        LedgerError: another process finds releases under this path that the first does not; before anything is spent.
        ValueError: as `Plan.open_ledger`.
    """
    ledger = ranks.together(lambda: plan.open_ledger(path if ranks.first else None))
    if ranks.world_size == 1 or ranks.everyone(path) == [None] * ranks.world_size:
        return ledger

    def found() -> tuple[int, str]:
        if path is None or ranks.first or not Path(path).is_file() or not Path(path).stat().st_size:
            return 0, ""
        own = verify(path)
        return len(own.releases), own.heads[len(own.releases)]

    def check() -> None:
        for rank, (count, head) in enumerate(known):
            if count and not ledger.contains(count, head):
                raise LedgerError(
                    f"process {rank} finds {count} releases in {path} that the ledger of process 0 does not hold: another host "
                    "was the first before. Put the ledger on a disk that all hosts share, or copy it to the host of process 0"
                )

    try:
        known = ranks.everyone(ranks.together(found))
        ranks.from_first(check, "ledger")
    except BaseException:
        ledger.close()
        raise
    return ledger


def count_along(ledger: Ledger, plan: Plan, step: int, releases: int) -> None:
    """Bring the count of a process that writes no ledger to that of the first.

    Args:
        ledger: in memory.
        plan: of the run.
        step: in which the first process made its last release.
        releases: that the ledger of the first process holds.
    """
    for _ in range(releases - ledger.count):
        ledger.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)


# --------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)


class Session:
    """Train a model under a plan.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        model: any module, or one that `fully_shard` has divided; BatchNorm in training mode and modules that mix examples are
            refused.
        optimizer: a torch optimizer over exactly the model's trainable parameters.
        dataset: a map-style dataset, or a tuple of tensors with a common leading axis; `plan.dataset_size` examples.
        units: one id a record `[len(dataset)]`, or the name of a column of the dataset: whom each record belongs to. For a
            plan whose `unit` is larger than a record; `plan.dataset_size` is then the number of distinct ids.
        ledger_path: file of the privacy ledger; None keeps the ledger in memory.
        collate_fn: how examples become a batch (default: torch's).
        num_workers: loader processes.
        augment: maps a batch on the model's device to one with as many rows, each changed at random on its own; called once
            for every row of every view, see `PrivacyConfig.augmentations`.
        verify: check on public rows, before the first private row is read, that examples do not mix. "strict" refuses
            operations whose batch axis cannot be followed; False leaves the check out. Every pass is proved either way.
        public_records: records that are no private data, for that check. By default numbers are drawn to the types and shapes
            of the first record.

    Raises:
        ValueError: an uncovered parameter, an optimizer of other parameters, a dataset of another size.

    Guarantee:
        Each `step` is one release of the plan's event, in the ledger before it exists; what reaches the optimizer is
        that release and nothing else. `plan.steps` releases cost at most the plan's (ε, δ).
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        units: Any = None,
        ledger_path: str | os.PathLike[str] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        augment: Callable[[Any], Any] | None = None,
        verify: bool | str = True,
        public_records: Sequence[Any] | None = None,
    ) -> None:
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self._ranks, self._step = Ranks.current(), 0
        check_dataset(dataset)
        self._loader = MicroBatches(dataset, collate_fn=collate_fn, num_workers=num_workers)
        passes = {n: getattr(plan.config, n) for n in ("max_physical_batch_size", "pad_to_multiple")} | {"verify": verify}
        read = self._loader.example
        check_alike(self._ranks, plan.hash, model, optimizer, records=len(self._loader), record=read, passes=passes)
        self._divided = fsdp.prepare(model, self._ranks.world_size, automatic=plan.config.micro_batch[1])
        self.layers: list[Layer] = find_layers(model)
        fsdp.refuse_layers(self.layers)
        self._parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        check_optimizer(optimizer, self._parameters)
        self._dataset, self._collate_fn, self._augment = dataset, collate_fn, augment
        self._units = units_of(plan.config, dataset, units, len(self._loader), plan.dataset_size)
        check_probes(plan.config.preconditioner, dataset)
        check_with_optimizer(plan.config.postprocess, optimizer)
        self._size = MicroBatchSize(*plan.config.micro_batch)
        self._clip = plan.config.clip(layer.name for layer in self.layers)
        self._noise, self._sampling = plan.noise_stream(), plan.sampling_stream()
        self._ledger = open_shared(plan, ledger_path, self._ranks)
        count_along(self._ledger, self.plan, self._step, self._ranks.from_first(lambda: self._ledger.count))
        rows = plan.config.refresh_rows(self._ranks.world_size)
        self._coordinates = Coordinates(plan.config.preconditioner, model, self.layers, self._ranks, rows)
        self._chain = Chain(plan.config.postprocess, plan.config.readout)
        self._average = WeightAverage(plan.config.weight_average, self._parameters)
        self._pending: Batch | None = None
        self._verify, self._public_records = checked_verify(verify), public_records
        self._proof = Proof()
        self._checked: set[Any] = set()
        self._unchecked = ""
        self._tally, self._weights = GradientTally(), WeightGuard(self._parameters)
        self._first, self._others = True, self._ledger.count

    # -- the loop ------------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Sample the remaining logical batches of the plan, each to be passed to `step` before the next is drawn.

        Raises:
            RuntimeError: a drawn batch was not passed to `step` (leaving batches out by their content voids ε).
        """
        if self._pending is not None and self._ledger.count < self.plan.steps:
            yield self._pending  # left behind by a loop that ended: another one in its place would have been chosen
        while self._ledger.count < self.plan.steps:
            if self._pending is not None:
                raise RuntimeError("the last batch was not passed to session.step(); a sampled batch may not be skipped")
            self._pending = Batch(self._step, *self._ranks.from_first(self._draw, f"batch {self._step}"))
            yield self._pending

    def _draw(self) -> tuple[Any, Any]:
        """Sampled units and, where a unit is more than a record, those of its records that count in this step."""
        generator = self.plan.generator(self._step, self._sampling)
        units = self.plan.sampler.indices(self._step, generator)
        return units, None if self._units is None else self._units.draw(units, generator)

    def step(self, batch: Batch, loss_fn: LossFn) -> StepRecord:
        """One private step: clipped sum, whitening, ledger, noise, optimizer.

        Args:
            batch: the batch drawn last by `batches`.
            loss_fn: maps (model, micro-batch) to one loss per example `[B]`.

        Returns:
            What happened; the fields marked PRIVATE are not protected by ε.

        Raises:
            BudgetExhausted: all releases of the plan have been made; nothing is changed.
            ValueError: bad losses, layers or data, before anything is released.
        """
        started = time.perf_counter()
        if self._ledger.count >= self.plan.steps:
            raise BudgetExhausted(f"all {self.plan.steps} releases of the plan are spent (ε = {self.epsilon:.3g})")
        if batch is not self._pending:
            raise RuntimeError("pass each batch of session.batches() to session.step() once, in the order drawn")
        self._ranks.together(lambda: check_unchanged(self.model, self.layers, self._parameters, finite=self._divided))
        self._ranks.together(self._weights.check)
        warn_of_others(self._others if self._first and self._ranks.first else 0, self._ledger.remaining)
        self._average.before_step()
        self._coordinates.refresh(self._step)
        run = self._ranks.in_step if self._divided else self._ranks.together
        sums, norms = run(lambda: self._clipped_sum(batch, loss_fn))
        clipped = ClippedSum(self._ranks.sum(sums), self._clip.max_grad_norm, self._clip.clipping)
        released = self._release(clipped)
        self._pending = None
        self._coordinates.observe(released)
        update = self._chain.apply(released, self._coordinates.metric, self.layers)
        self._apply(update)
        self._average.update()
        record = step_record(batch, update, norms, self._clip.max_grad_norm, started)
        self._step += 1
        self._tally.add(norms)
        if self._ledger.count >= self.plan.steps:
            self._tally.warn()
        return record

    def _release(self, clipped: ClippedSum) -> Released:
        """Charge and release on the first rank; the others receive the release and count it."""
        make = partial(release, clipped, self.plan, self._noise, self._ledger, self._step)
        try:
            released = self._ranks.released(make, self._device)
        except Exception as error:
            if not isinstance(error, RankLost):  # it may have been charged
                count_along(self._ledger, self.plan, self._step, self._ranks.from_first(lambda: self._ledger.count))
            raise
        count_along(self._ledger, self.plan, self._step, self._ledger.count + (not self._ranks.first))
        return released

    def _clipped_sum(self, batch: Batch, loss_fn: LossFn) -> tuple[dict[str, Tensor], Tensor]:
        """The clipped sum of this rank's units and their private norms; nothing outlives an exception in here."""
        self._check_once(loss_fn)
        drawn = np.asarray(self._ranks.share(batch.drawn))
        config, points = self.plan.config, self._points()
        records, views = drawn[drawn >= 0], config.augmentations
        shares = self._ranks.shares(batch.drawn) if self._divided else []

        def attempt(
            rows: Any, bound: int | None, multiple: int | None, at: list[EvaluationPoint]
        ) -> tuple[dict[str, Tensor], Tensor]:
            own, *others = (layout(x, bound, multiple, config.unit_reduction, views) for x in (rows, *shares))
            parts = own + max(others, key=len, default=[])[len(own) :]  # no process may make fewer passes than another
            loaded = self._loader.load([part.records for part in parts])
            return clipped_sum(
                self.model,
                self.layers,
                self._coordinates.metric,
                self._clip,
                loss_fn=loss_fn,
                micro_batches=zip(loaded, parts, strict=True),
                one_record=self._loader.alone,
                proof=self._proof,
                points=at,
                augment=self._augment,
                counted=len(own),
                repeatable=self.plan.test_mode,
            )

        # A share of one row would take another way than the others; processes that gather parameters must take one.
        multiple = config.pad_to_multiple or (2 if self._divided else None)
        rows = views * records.size  # measured with the points of the steps to come
        self._size.measure(lambda n: attempt(records[: -(-n // views)], None, None, self._points(True)), rows, self._device)
        return self._size.fit(lambda bound: attempt(drawn, bound, multiple, points), rows)

    def _points(self, all_of_them: bool = False) -> list[EvaluationPoint]:
        """Where this step's gradients are taken: one point, or several that a filter combines before the clip."""
        points = []
        for x in self._chain.evaluations(all_of_them):
            displaced = self._chain.displaced(self._parameters, x.ahead)
            points.append(EvaluationPoint(displaced, x.weight))
        return points

    def _check_once(self, loss_fn: LossFn) -> None:
        """Check a loss on public rows before its first release."""
        code = program_of(loss_fn)
        if not self._verify or code in self._checked:
            return
        self._proof.operation = None
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            loss_fn,
            self._public_rows(),
            expected=self.plan.config.expected_rows,
            bound=self._size.bound,
            augment=self._augment,
            strict=self._verify == "strict",
        )
        if self._divided and verdict.operation is not None:
            raise ValueError(
                f"{verdict.operation.operation}: {verdict.operation.reason[:60]}; a model divided by fully_shard needs a proved "
                "batch axis: register_batch_rule"
            )
        self._checked.add(code)
        self._proof.operation = verdict.operation
        if verdict.operation is not None:
            _log.warning("%s", self.gradients)
        self._unchecked = f": {verdict.unchecked.splitlines()[0][:60]}" if verdict.unchecked else ""
        verdict.warn(stacklevel=4)

    def _public_rows(self) -> list[Callable[[int], PublicRows]]:
        """Return ways to make public rows: those that were given, or drawn ones with two choices of integers."""
        given, collate = self._public_records, self._loader.collate
        if given is not None:
            return [lambda count: PublicRows([given[i % len(given)] for i in range(count)], collate)]
        record = self._loader.example()
        # A wrong label ends a CUDA process.
        kinds = ["tokens", "bits", "ones"] if self._device.type == "cpu" else ["bits", "ones"]
        return [partial(_drawn_rows, record, collate, integers) for integers in kinds]

    @property
    def unproved_operation(self) -> str:
        """Return the operation for which examples are differentiated one at a time; "" where whole micro-batches are."""
        return self._proof.operation.operation if self._proof.operation is not None else ""

    @property
    def gradients(self) -> str:
        """Say how the gradients of examples are computed, what makes it so, and whether public rows were compared."""
        checked = "" if self._checked and not self._unchecked else f"; not checked on public rows{self._unchecked}"
        lost = self._proof.operation
        if lost is None:
            return f"whole micro-batches, with a proved batch axis{checked}"
        return (
            f"one example at a time, since {lost.operation} hides the batch axis ({lost.reason}): "
            f"a micro-batch of n examples takes n passes; register_batch_rule makes it one{checked}"
        )

    @property
    def preconditioner(self) -> Preconditioner | None:
        """The preconditioner in force; None before the first step, and without one."""
        return self._coordinates.current

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _apply(self, released: Released) -> None:
        """Hand a release, and only a release, to the optimizer."""
        before = traces(self._parameters) if self._first else {}
        self._chain.before_update(self._parameters)
        self.optimizer.zero_grad(set_to_none=True)  # a gradient left on a frozen parameter is nobody's release
        for name, parameter in self._parameters.items():
            parameter.grad = fsdp.divided_as(released.gradients[name].to(parameter.dtype), parameter)
        try:
            self._weights.step(self.optimizer)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if self._first and self.plan.noise_multiplier > 0:
            check_moved(self.optimizer, self._parameters, before)
        self._first = False

    def averaged_weights(self) -> AbstractContextManager[None]:
        """`with session.averaged_weights():` puts the average of the weights into the model, and its own back at the end.

        Raises:
            RuntimeError: the plan keeps none (`PrivacyConfig.weight_average`), or it is in the model already.
        """
        return fsdp.resharded(self.model, self._weights.around(self._average.in_model()))

    def accept_weights(self) -> None:
        """Go on from weights that you have written between two releases, such as an average of released ones.

        They must not depend on private data except through releases: nothing checks that, and ε is not valid otherwise.
        """
        self._weights.accept()

    @property
    def steps_done(self) -> int:
        """Releases made so far, those of earlier runs on the same ledger included."""
        return self._ledger.count

    @property
    def epsilon(self) -> float:
        """ε of all releases in the ledger at the plan's δ."""
        return self.plan.epsilon(self._ledger.count)

    @property
    def ledger(self) -> Ledger:
        """The privacy ledger."""
        return self._ledger

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """Write a checkpoint: released parameters, buffers, states of optimizer and filters, metric; never a noise stream.

        Of several processes all call it, and the first writes.

        Args:
            folder: of its own; an earlier checkpoint in it is replaced, and stays readable until the new one is complete.
            extra: the caller's own state, such as `scheduler.state_dict()`, handed back by `restore`: plain values and tensors
                in dicts, lists and tuples. It must hold nothing that was computed from private data.

        Raises:
            CheckpointError: a folder that cannot be written, holds other files, or a checkpoint that was not gone on from.
        """
        check_in_step(self._ranks, self._parameters, "save")
        self._ranks.together(self._weights.check)
        self._ranks.from_first(lambda: checkpoint.keep_of_others(folder, self._others, self._ledger.contains))
        tensors = {"model": self._model_state()}
        if self.preconditioner is not None:
            tensors["preconditioner"] = self.preconditioner.state_dict()
        filters, average = self._chain.state_dict(), self._average.state_dict()
        more = {"filters": filters, "average": average, "past": dict(self._coordinates.past)}
        tensors |= {group: held for group, held in more.items() if held}
        meta = {
            "plan": self.plan.hash,
            "caveats": list(self.plan.caveats),
            "step": self._step,
            "ledger_count": self._ledger.count,
            "ledger_head": self._ledger.head,
            "optimizer": self.optimizer.state_dict(),
            "preconditioner_step": None if self.preconditioner is None else self.preconditioner.step,
            "extra": extra,
        }
        meta |= {"world_size": self._ranks.world_size} if self._ranks.world_size > 1 else {}
        meta |= {"plain": plain} if (plain := checkpoint.plain_entries(self.model.state_dict())) else {}
        if self.plan.test_mode:  # bit for bit, dropout included; elsewhere a run goes on with whatever torch draws
            meta["torch_rng"] = torch.cat(self._ranks.everyone(torch.get_rng_state()))
        held, told = fsdp.whole((tensors, meta), keep=self._ranks.first)
        self._ranks.from_first(lambda: checkpoint.write(folder, held, told))

    def _model_state(self) -> dict[str, Tensor]:
        return fsdp.model_state(self.model) if self._divided else checkpoint.unique_tensors(self.model.state_dict())

    def restore(self, folder: str | os.PathLike[str], *, any_world_size: bool = False) -> Any:
        """Continue from a checkpoint of the same plan and ledger, with a fresh noise stream.

        Releases that the ledger holds beyond the checkpoint stay charged: their steps are not given back. Of several
        processes all call it, and the first reads.

        Args:
            folder: that `save` wrote.
            any_world_size: go on with another number of processes; no release depends on it, but for its last bits.

        Returns:
            The `extra` that was given to `save`.

        Raises:
            CheckpointError: damaged, of another plan, model, optimizer, ledger or number of processes; nothing is loaded then.
            RuntimeError: a drawn batch waits for `step`, and the checkpoint is of another step.
        """
        tensors, meta = self._ranks.from_first(lambda: checkpoint.read_session(folder), "restore")
        checkpoint.check_run(meta, self.plan.hash, None if any_world_size else self._ranks.world_size, folder)
        if not self._ranks.from_first(lambda: self._ledger.contains(meta["ledger_count"], meta["ledger_head"])):
            missing = f"the ledger does not contain the {meta['ledger_count']} releases before the checkpoint {Path(folder)}"
            raise checkpoint.CheckpointError(f"{missing}; resume with the ledger of the same run")
        if self._pending is not None and meta["step"] != self._step:
            raise RuntimeError(
                f"a batch was drawn for step {self._step} and not passed to session.step(); pass it first, or restore step "
                f"{meta['step']} into a new session"
            )
        with checkpoint.fitting(folder):
            self._ranks.together(lambda: self._load(tensors, meta))
        return meta["extra"]

    def _load(self, tensors: dict[str, dict[str, Tensor]], meta: dict[str, Any]) -> None:
        """Take up what a checkpoint of this plan and ledger holds."""
        checkpoint.check_same_tensors(self._model_state(), tensors["model"])
        preconditioner = self._coordinates.loaded(tensors["preconditioner"]) if "preconditioner" in tensors else None
        checkpoint.load_optimizer(self.optimizer, fsdp.divided_optimizer_state(self.optimizer, meta["optimizer"]))
        self._chain.load_state_dict(self._here(tensors.get("filters", {})))
        self._coordinates.past = self._here(tensors.get("past", {}))
        self._average.load_state_dict(self._here(tensors.get("average", {})))
        self.model.load_state_dict(fsdp.divided_state(tensors["model"], self.model) | meta.get("plain", {}), strict=False)
        if "torch_rng" in meta:
            states = meta["torch_rng"].view(meta["world_size"], -1)
            torch.set_rng_state(states[self._ranks.rank % len(states)].clone())
        self._weights.accept()
        self._coordinates.current = preconditioner
        self._step, self._others = meta["step"], 0  # a batch that was drawn for it stays to be passed to `step`

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _here(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return fsdp.divided_state({name: x.to(self._device) for name, x in state.items()}, self.model)

    def close(self) -> None:
        """Close the ledger and the loader; the session cannot step afterwards."""
        self._tally.warn()
        self._ledger.close()
        self._loader.close()

    def __enter__(self) -> Session:
        """The session itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the session."""
        self.close()


def _drawn_rows(record: Any, collate: Callable[[list[Any]], Any], integers: str, count: int) -> PublicRows:
    return public_rows(record, count, collate, integers)
