"""Train a model under a plan: the session is the one stateful object that a user holds.

The session owns sampling, micro-batching, clipping, noise, accounting and the refreshes of the
preconditioner. The user owns the model, the loss and a torch optimizer. The model is never wrapped.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from dpkfc import checkpoint, resume_checks
from dpkfc.callbacks import Callback, CallbackCalls, StepReport
from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan, check_plan
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.second_moments import pack_symmetric, split_head
from dpkfc.data.loading import Collate, MicroBatches, Part, layout
from dpkfc.data.sampling import Poisson, Sampler
from dpkfc.data.units import make_units
from dpkfc.distributed import fsdp
from dpkfc.distributed.consistency import check_alike, check_in_step
from dpkfc.distributed.context import DistributedContext
from dpkfc.distributed.shares import check_shares
from dpkfc.gradients.clipped_sum import GradientMode, clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.evaluation_points import EvaluationPoint
from dpkfc.gradients.layers import device_of_layers
from dpkfc.gradients.loss_function import LossFn
from dpkfc.gradients.model_checks import check_unchanged
from dpkfc.gradients.moment_sum import sum_second_moments
from dpkfc.gradients.optimizer_step import check_moved, check_optimizer, step_on_release, traces
from dpkfc.lazy_noise import LazyNoise
from dpkfc.loss_check import LossCheck
from dpkfc.memory import MicroBatchSize, available_bytes
from dpkfc.postprocess.pipeline import PostprocessPipeline, check_with_optimizer
from dpkfc.postprocess.weight_average import WeightAverage
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.extra_releases import ExtraRelease, charge_extra
from dpkfc.privacy.gaussian_pairs import Floats
from dpkfc.privacy.ledger import BudgetExhausted, Receipt
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.privacy.mechanism import ClippedSum, Released, release_vector
from dpkfc.privacy.rng import NoiseStream
from dpkfc.release_pipeline import ReleasePipeline, set_gradients
from dpkfc.shared_ledger import open_shared_ledger
from dpkfc.step_record import PRIVATE_FIGURES, Batch, StepRecord, step_record
from dpkfc.tensors import Groups, NamedTensors, Tensors, copy_tensors, unique_tensors
from dpkfc.tracking.states import Unknown
from dpkfc.weights import ReleasedWeights, check_recorded_weights, record_weights

_log = logging.getLogger(__name__)
# Rows of a pass over all of them, where the plan sets no limit. It changes no result.
_MOST_ROWS = 4096
# Rows whose numbers and norms memory holds at once.
_SUMMED_ROWS = 1 << 16


class Session:
    """Trains a model under a plan.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        model: any module, or one that `fully_shard` has sharded. BatchNorm in training mode and
            modules that mix examples are refused.
        optimizer: a torch optimizer over exactly the model's trainable parameters.
        dataset: a map-style dataset, or a tuple of tensors with a common leading axis, of
            `plan.dataset_size` examples.
        units: the unit of each record, one id a record `[len(dataset)]`, or the name of a column of
            the dataset. For a plan whose `unit` is larger than a record; `plan.dataset_size` is
            then the number of distinct ids.
        ledger_path: the file of the privacy ledger; None keeps the ledger in memory.
        collate_fn: makes a batch of examples (default: torch's).
        num_workers: the number of loader processes.
        augment: maps a batch on the model's device to one with as many rows, each changed at random
            independently. It is called once for every row of every view, see
            `PrivacyConfig.augmentations`.
        verify: check on public rows, before the first private row is read, that examples do not
            mix. Every pass is proved either way.
        public_records: records that are not private, for that check. By default numbers are drawn
            with the shapes of the tensors or the features of the dataset, or in types and lengths
            that most of a few records share.
        budget: of the people in the dataset. The whole plan is charged before the first private row
            is read, when all that public rows show has been checked; a session that goes on with
            its ledger is not charged again.
        resume: go on with a ledger that holds releases. Where they spend the plan, only evaluation
            is left. `restore` goes on with the weights, too.
        callbacks: see start, steps, refreshes and end; `dpkfc.integrations.loggers` has some.
        share: the dataset is the part of the records that this process holds and samples from;
            `plan.dataset_size` counts all parts. Public names of it, of files or rows as in
            "a.csv:0-500", are compared between processes; True names none. For Poisson sampling.
        capture_graphs: capture passes as graphs, which are proved once and replayed
            (docs/graph.md). Steps are faster after a first one of seconds to a minute. What cannot
            be captured runs as without. Results differ by rounding alone.
        compile: capture passes as graphs, and compile each by inductor. That takes minutes for a
            large model, and needs a C++ compiler on a CPU. What cannot be compiled is replayed.

    Attributes:
        ledger: the privacy ledger.

    Raises:
        ValueError: an uncovered parameter, an optimizer of other parameters, a dataset of another
            size.
        BudgetExhausted: the ledger has spent the plan and `resume` is False, or the plan does not
            fit into the budget. Nothing was charged then.

    Guarantee:
        Each `step` is one release of the plan's event, in the ledger before it exists. The
        optimizer sees that release and nothing else. `plan.steps` releases cost at most the plan's
        (ε, δ).
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        units: Any = None,
        ledger_path: StrPath | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        augment: Callable[[Any], Any] | None = None,
        verify: bool = True,
        public_records: Sequence[Any] | None = None,
        budget: Budget | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        share: bool | str | Sequence[str] = False,
        capture_graphs: bool = False,
        compile: bool = False,
    ) -> None:
        check_plan(plan)
        config = plan.config
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self._ranks = DistributedContext.current()
        self._step = 0
        self._callbacks = CallbackCalls(callbacks, self._ranks)
        self._loader = MicroBatches(dataset, collate_fn=collate_fn, num_workers=num_workers)
        check_alike(
            self._ranks,
            plan.hash,
            model,
            optimizer,
            # Records of shares differ, and are not compared.
            records=0 if share else len(self._loader),
            record=self._loader.example,
            passes={
                "max_physical_batch_size": config.max_physical_batch_size,
                "verify": verify,
                "capture_graphs": capture_graphs,
                "compile": compile,
            },
        )
        world_size = self._ranks.world_size
        limit = config.micro_batch
        self._is_sharded = fsdp.prepare(model, world_size, automatic=limit.automatic)
        self.layers = find_layers(model)
        fsdp.refuse_layers(self.layers)
        self._parameters: Tensors = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        check_optimizer(optimizer, self._parameters)
        self._dataset, self._augment = dataset, augment
        self._share = bool(share)
        self._sampler = self._sampler_of_share(share) if share else plan.sampler
        size = self._sampler.dataset_size
        self._units = make_units(config, dataset, units, len(self._loader), size)
        check_with_optimizer(config.postprocess, optimizer)
        self._size = MicroBatchSize(limit.most, limit.automatic, limit.least)
        self._clip = config.clip
        noise = plan.noise_stream()
        if plan.bands > 1:
            self._bound_kept_noise(noise)
        # Shares draw from streams of their own, in test mode too.
        self._sampling = plan.sampling_stream(self._ranks.rank if share else 0)
        self.ledger = open_shared_ledger(plan, ledger_path, self._ranks)
        probe_limit = config.refresh_rows(world_size)
        self._pipeline = ReleasePipeline(
            plan,
            noise,
            self.ledger,
            layers=self.layers,
            preconditioning=PreconditionerManager(
                config.preconditioner, model, self.layers, self._ranks, probe_limit
            ),
            postprocess=PostprocessPipeline(config.postprocess, config.readout, plan.bands > 1),
            ranks=self._ranks,
        )
        steps, extra = self._ranks.broadcast_from_rank0(
            lambda: (self.ledger.steps, self.ledger.extra)
        )
        self._match_ledger(steps, extra)
        self._average = WeightAverage(config.weight_average, self._parameters)
        self._pending: Batch | None = None
        self._gradient_mode = self._make_gradient_mode(capture_graphs or compile, compile)
        self._loss_check = LossCheck(
            model,
            self.layers,
            self._gradient_mode,
            verify=verify,
            expected_rows=config.expected_rows,
            public_records=public_records,
            augment=augment,
            is_sharded=self._is_sharded,
        )
        self._failed_rows = 0  # PRIVATE
        self._told_refusal: Unknown | None = None  # PRIVATE
        self._weights = ReleasedWeights(model)
        self._lazy = LazyNoise(plan, noise, self._weights)
        self._is_first_step = True
        # Releases of earlier runs in the ledger; 0 after `restore`.
        self._unrestored_releases = self.ledger.steps
        self._resume = resume
        # Whether the model holds the weights of the last release in the ledger.
        self._has_latest_weights = False
        if not resume:
            self.ledger.refuse_spent()
        if budget is not None:
            self._ranks.broadcast_from_rank0(
                lambda: budget.charge_on_begin(plan, self.ledger), "budget"
            )

    def _bound_kept_noise(self, noise: NoiseStream) -> None:
        """Let kept noise take a quarter of the free memory; say where it would take more."""
        noise.most_kept_bytes = available_bytes() // 4
        bytes_of_one = sum(p.numel() * max(4, p.element_size()) for p in self._parameters.values())
        needed = (self.plan.bands - 1) * bytes_of_one
        if needed > noise.most_kept_bytes:
            _log.warning(
                "noise of %d bands takes %d MiB, more than a quarter of the free memory: steps draw"
                " a part of it again and slow down; fewer bands are faster",
                self.plan.bands,
                needed >> 20,
            )

    def _sampler_of_share(self, share: bool | str | Sequence[str]) -> Sampler:
        """Return the sampler of this process's records, whose union the plan's event describes.

        Raises:
            ValueError: a plan whose batches are not unions of batches of parts, or bad shares.
        """
        sampler = self.plan.sampler
        if type(sampler) is not Poisson:
            raise ValueError(
                f"share= needs sampler='poisson', which decides for each record alone; with"
                f" {sampler.describe()['name']!r} give every process all records"
            )
        if self.plan.config.max_records_per_unit is not None or self._is_sharded:
            what = "fully_shard" if self._is_sharded else "units"
            raise ValueError(f"share= does not go with {what}; give every process all records")
        records = len(self._loader)
        check_shares(self._ranks, records, self.plan.dataset_size, share, self._dataset)
        return replace(sampler, dataset_size=records)

    def _make_gradient_mode(self, captures: bool, compiles: bool) -> GradientMode:
        """Return the way in which gradients are computed, as long as nothing is checked."""
        if captures and self._is_sharded:
            _log.warning("passes of a sharded model are not captured; they are followed as without")
        if not captures or self._is_sharded:
            return GradientMode()
        # The compiler takes a second to import.
        from dpkfc.graph.compilation import find_compiler_fault
        from dpkfc.graph.passes import GraphPasses

        data: Any = self._dataset
        leaves = data.tensors if isinstance(data, TensorDataset) else tree_leaves(data)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if compiles and (fault := find_compiler_fault()):
            compiles = False
            _log.warning("compile=True: %s; graphs are captured and run uncompiled", fault)
        graph = GraphPasses(self.model, self.layers, tensors, compiles=compiles)
        return GradientMode(graph=graph)

    @property
    def receipt(self) -> Receipt | None:
        """What the budget was charged, in the process with rank 0; None before that."""
        return self.ledger.receipt

    def _check_begun(self) -> None:
        """Refuse to begin at new weights on the ledger of an earlier run.

        Raises:
            LedgerError: nothing was restored, and `resume` is False.
        """
        if self._unrestored_releases and not self._resume:
            raise LedgerError(
                f"{self.ledger.name} holds {self._unrestored_releases} releases of an earlier run:"
                " session.restore() its checkpoint, or take another ledger_path"
            )

    def check_weights(self) -> None:
        """Check that the model holds weights that the ledger's releases have made.

        Raises:
            LedgerError: neither a step of this session nor `restore` has written them, and the
                record next to the ledger does not describe them.
            RuntimeError: a parameter was written since.
        """
        self._lazy.expose()
        if self._step == 0 and self.ledger.steps:
            check_recorded_weights(self.ledger, self.model)
        self._weights.check_parameters()

    # -- the loop ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Sample the remaining logical batches, each to be passed to `step` before the next.

        Raises:
            RuntimeError: a batch was not passed to `step`. Skipping batches by their content voids
                ε.
        """
        self._check_begun()
        if self._pending is not None and self.ledger.steps < self.plan.steps:
            # A loop has ended before its last batch was stepped. Another batch in its place would
            # have been chosen by its content.
            yield self._pending
        while self.ledger.steps < self.plan.steps:
            if self._pending is not None:
                raise RuntimeError(
                    "the last batch was not passed to session.step(); a sampled batch may not be "
                    "skipped"
                )
            if self._share:
                rows = self._ranks.run_on_all(self._draw)
            else:
                rows = self._ranks.broadcast_from_rank0(self._draw, f"batch {self._step}")
            self._pending = Batch(self._step, *rows)
            yield self._pending

    def _draw(self) -> tuple[Any, Any]:
        """Sample units and, if a unit is more than a record, the records that count this time."""
        generator = self.plan.generator(self._step, self._sampling)
        # Groups take turns by releases: a step that is made again after a crash is a further one.
        turn = self.ledger.steps if self.plan.bands > 1 else self._step
        units = self._sampler.indices(turn, generator)
        if self._units is None:
            return units, None
        return units, self._units.draw(units, generator)

    def step(self, batch: Batch, loss_fn: LossFn) -> StepRecord:
        """Make one private step: clipped sum, ledger, noise, post-processing, optimizer.

        Args:
            batch: the batch drawn last by `batches`.
            loss_fn: maps (model, micro-batch) to one loss per example `[B]`.

        Returns:
            What happened. ε does not protect the fields marked PRIVATE.

        Raises:
            BudgetExhausted: all releases of the plan have been made; nothing is changed.
            ValueError: bad losses, layers or data, before anything is released.
        """
        started = time.perf_counter()
        if self.ledger.steps >= self.plan.steps:
            raise BudgetExhausted(
                f"all {self.plan.steps} releases are spent at ε = {self.epsilon:.3g};"
                " a longer run needs another plan (docs/errors.md#budget)"
            )
        if self._pending is None or batch is not self._pending:
            raise RuntimeError(
                "pass each batch of session.batches() to session.step() once, in the order drawn"
            )
        self._average.start()
        self._lazy.begin_step(self._step, self.optimizer)
        self._check_state()
        if not self._callbacks.has_started:
            self._callbacks.start(self, self.preconditioner)
        run = self._ranks.run_collective if self._is_sharded else self._ranks.run_on_all
        run(partial(self._check_loss, loss_fn))
        self.release_curvature()
        self._pipeline.preconditioning.refresh(self._step)
        if self._is_first_step:
            # Nothing that follows is refused for public reasons alone.
            self._ranks.broadcast_from_rank0(self.ledger.begin, "budget")
        sums, norms = run(lambda: self._clipped_sum(batch, loss_fn))
        # A forward pass may write through `.data`, which torch does not count.
        self._ranks.run_on_all(partial(self._weights.check_parameters, after_passes=True))
        total = self._lazy.take_rows(self._ranks.sum(sums))
        clipped = ClippedSum(total, self._clip.max_grad_norm, self._clip.clipping)
        charged = self.ledger.steps
        try:
            released = self._release(clipped)
        except BaseException:
            if self.ledger.steps > charged:
                # It was charged, so the turn of this batch is over.
                self._pending = None
            raise
        self._pending = None
        self._count_failures()
        self._warn_of_refusal()
        update = self._pipeline.make_update(self._lazy.keep_rows(released))
        self._apply(update)
        self._average.update()
        record = step_record(batch, update, norms, self._clip.max_grad_norm, started)
        self._step += 1
        self._has_latest_weights = True
        if self._callbacks.active:
            self._call_back(record)
        return record

    def _count_failures(self) -> None:
        """Count records that raised an error, and tell the operator when they first appear."""
        failed = self._gradient_mode.failed_rows
        if failed and not self._failed_rows:
            self._warn_of_failures("this step", failed)
        self._failed_rows += failed

    def _warn_of_refusal(self) -> None:
        """Tell the operator once why passes are not captured as graphs."""
        graph = self._gradient_mode.graph
        refusal = None if graph is None else graph.refusal
        if refusal is not None and refusal != self._told_refusal:
            self._told_refusal = refusal
            _log.warning(
                "PRIVATE, for your eyes only: passes are not captured as graphs, because of %s: %s",
                refusal.operation,
                refusal.reason,
            )

    def _warn_of_failures(self, where: str, count: int) -> None:
        _log.warning(
            "PRIVATE, for your eyes only: in %s, %d times a record could not be read or raised an"
            " error, and contributed nothing; run loss_fn on such a record to see the error",
            where,
            count,
        )

    def _call_back(self, record: StepRecord) -> None:
        """Report a step to the callbacks."""
        self._callbacks.refresh(self.preconditioner)
        report = StepReport(
            step=record.step,
            release=record.release,
            epsilon=self.plan.curve.upper_bound(record.release),
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            noise_multiplier=self.plan.noise_multiplier,
            notes=record.notes,
        )
        figures = vars(record)
        self._callbacks.step(report, {name: figures[name] for name in PRIVATE_FIGURES})

    @property
    def unprotected_figures(self) -> dict[str, str]:
        """Figures that callbacks are given, and weights of other code, with the reason."""
        figures = self._callbacks.unprotected_figures(PRIVATE_FIGURES)
        return {**figures, **self._weights.unprotected_figures}

    def _check_state(self) -> None:
        """Check before a step that the model is the one of the last step."""

        def check() -> None:
            check_unchanged(self.model, self.layers, self._parameters, finite=self._is_sharded)
            self._weights.check_before_passes()

        self._ranks.run_on_all(check)
        if self._is_first_step and self._ranks.is_rank0 and self._unrestored_releases:
            # A script that crashed and was started again begins at new weights.
            warnings.warn(
                f"the ledger holds {self._unrestored_releases} releases from before; this session"
                f" begins at new weights and has {self.ledger.remaining} left. Go on from a"
                " checkpoint with session.restore(), or take a new ledger: then both ε add up",
                stacklevel=3,  # the caller of Session.step
            )

    def _release(self, clipped: ClippedSum) -> Released:
        """Make the release of this step. Audits override this method to see both."""
        return self._pipeline.release(clipped, self._step)

    def _check_loss(self, loss_fn: LossFn) -> None:
        """Check a loss on public rows, unless that was done before."""
        self._loss_check.check(
            loss_fn, self._dataset, self._loader.collate, self._size.bound, self._lazy
        )

    def _clipped_sum(self, batch: Batch, loss_fn: LossFn) -> tuple[Tensors, Tensor]:
        """Return the clipped sum of this rank's units and their private norms."""
        self._check_loss(loss_fn)  # for those who call this method alone
        with self._lazy.passes():
            return self._sum_in_passes(batch, loss_fn)

    def _sum_in_passes(self, batch: Batch, loss_fn: LossFn) -> tuple[Tensors, Tensor]:
        config = self.plan.config
        views = config.augmentations
        rows = np.asarray(batch.rows if self._share else self._ranks.shard(batch.rows))
        records = rows[rows >= 0]
        count = views * records.size
        points_of = self._pipeline.postprocess.evaluation_points
        if self._size.automatic:

            def measure(number: int) -> None:
                num_records = math.ceil(number / views)
                # Later steps may need more evaluation points than this one.
                points = points_of(self._parameters, for_later_steps=True)
                self._try_clipped_sum(loss_fn, records[:num_records], bound=None, points=points)

            self._size.measure(measure, count, device_of_layers(self.layers))
        rows_of_ranks = []
        least = None
        if self._is_sharded:
            # Processes that gather parameters must make equally many passes. Rows of all ranks show
            # how many that are.
            rows_of_ranks = self._ranks.shards(batch.rows)
            # These processes must also take the same path, and a micro-batch of one row would take
            # another path than larger ones. So there are at least two rows.
            least = 2
        attempt = partial(
            self._try_clipped_sum,
            loss_fn,
            rows,
            points=points_of(self._parameters),
            rows_of_ranks=rows_of_ranks,
            least=least,
        )
        return self._size.fit(attempt, count)

    def _try_clipped_sum(
        self,
        loss_fn: LossFn,
        rows: Any,
        bound: int | None,
        *,
        points: Sequence[EvaluationPoint],
        rows_of_ranks: Sequence[Any] = (),
        least: int | None = None,
    ) -> tuple[Tensors, Tensor]:
        """Return clipped sum and norms at one size of micro-batches; keep nothing on failure."""
        config = self.plan.config
        self._gradient_mode.failed_rows = 0

        def cut(rows: Any) -> list[Part]:
            return layout(rows, bound, config.unit_reduction, config.augmentations, least)

        parts = cut(rows)
        own_count = len(parts)
        # Fill up with passes that are not summed, until all processes make equally many.
        most_parts = max(map(cut, rows_of_ranks), key=len, default=[])
        parts = parts + most_parts[own_count:]
        loaded = self._loader.load([part.records for part in parts])
        return clipped_sum(
            self.model,
            self.layers,
            self._pipeline.preconditioning.metric,
            self._clip,
            loss_fn=loss_fn,
            micro_batches=zip(loaded, parts, strict=True),
            one_record=self._loader.load_one,
            mode=self._gradient_mode,
            points=points,
            augment=self._augment,
            num_summed=own_count,
            repeatable=self.plan.test_mode,
            by_row={layer.name for layer in self._lazy.tables.values()},
        )

    @property
    def unproved_operation(self) -> str:
        """The operation that forces one pass for each example; "" if the batch axis is proved."""
        return self._loss_check.unproved_operation

    @property
    def gradients(self) -> str:
        """How the gradients of examples are computed, the reason, and whether that was checked."""
        return self._loss_check.gradients

    @property
    def preconditioner(self) -> PreconditionerState | None:
        """The preconditioner in force; None before the first step and without one."""
        return self._pipeline.preconditioning.current

    # -- the optimizer ----------------------------------------------------------------------------

    def _apply(self, update: Released) -> None:
        """Hand a post-processed release, and nothing else, to the optimizer."""
        tables = self._lazy.tables
        parameters = {name: p for name, p in self._parameters.items() if name not in tables}
        before = traces(parameters) if self._is_first_step else {}
        self._pipeline.postprocess.record_parameters(self._parameters)
        # A gradient that was left on a frozen parameter is not a release.
        self.optimizer.zero_grad(set_to_none=True)
        set_gradients(self.optimizer, parameters, update)
        try:
            step_on_release(self.optimizer, parameters, self._record_step)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if self._is_first_step and self.plan.noise_multiplier > 0:
            check_moved(self.optimizer, parameters, before)
        self._is_first_step = False

    def _record_step(self) -> None:
        """Note what a step of the optimizer has made."""
        self._lazy.update(self.optimizer)
        self._weights.record()

    @contextmanager
    def lazy_noise(self) -> Iterator[None]:
        """Let noise of embedding rows that no record reads wait, inside a `with` block.

        A step then costs what its records read, and a table may have any number of rows. The
        distribution of the weights, the ledger and ε stay as they are without it. Inside
        the block a table (`nn.Embedding`) is empty: it holds NaN. `model.state_dict()`, a forward
        pass of your own and all methods of the session first bring all its rows up to date, which
        costs a pass over the table. Then the next step empties it again. So does the end of the
        block. It takes memory for a second copy of each table.

        Raises:
            ValueError: an optimizer other than SGD without momentum and weight decay; a
                preconditioner, post-processing, average, or noise other than "gaussian"; a table
                that is shared or of low precision, or none; several processes; captured graphs.
            RuntimeError: in a step: an empty table was moved or written.
        """
        has_graphs = self._gradient_mode.graph is not None
        if self._ranks.world_size > 1 or self._is_sharded or has_graphs:
            what = "captured graphs" if has_graphs else "several processes"
            raise ValueError(f"lazy_noise does not go with {what}; leave one of them out")
        with self._lazy.allowed(self.layers, self.optimizer):
            self._loss_check.forget()
            yield

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Put the average of the weights into the model inside a `with` block.

        Raises:
            RuntimeError: the plan keeps no average (`PrivacyConfig.weight_average`), or the average
                is in the model already.
        """
        self._average.check_swapped_out()
        self._lazy.expose()
        self._weights.check_parameters()
        return fsdp.run_resharded(self.model, self._average.swap_in())

    def accept_weights(self) -> None:
        """Continue from weights that you have written between two releases.

        The weights may depend on private data only through releases, such as an average of released
        weights. Nothing checks that, and ε is not valid otherwise, so the card says that it was
        done. All processes call this method.
        """
        self._lazy.expose()
        self._weights.accept(self.ledger.steps, self._ranks)

    def release_vector(self, purpose: str, vector: Floats, norm: float) -> Floats:
        """Charge one release beside the steps, and return a private vector with its noise.

        Args:
            purpose: of a kind in `PrivacyConfig.extra_releases`.
            vector: finite float64 `[n]`.
            norm: the largest L2 change of the vector when one record (unit) is added or removed.

        Returns:
            The noisy vector `[n]`, which is public.

        Raises:
            BudgetExhausted: the plan allows no further release of this kind; nothing was released.
            LedgerError: the charge could not be recorded, or the ledger is of an earlier run.
            ValueError: no such kind in the plan, one of a smaller norm, or several processes.
        """
        kind = self.plan.extra_release(purpose)
        if not norm <= kind.norm:
            raise ValueError(
                f"a record changes this vector by {norm:g}, and the plan's releases for {purpose}"
                f" allow {kind.norm:g}: raise norm"
            )
        if self._ranks.world_size > 1:
            raise ValueError("releases beside the steps are made by one process: train on one")
        return self._release_vector(kind, vector)

    def _release_vector(self, kind: ExtraRelease, vector: Floats) -> Floats:
        self._check_begun()
        self.ledger.begin()
        # In test mode every draw has a number of its own; others ignore it.
        draw = self.plan.steps + 1 + self.ledger.extra.get(kind.purpose, 0)
        return release_vector(vector, kind, self.plan, self.ledger, draw)

    def release_curvature(self) -> None:
        """Make the one release that the preconditioner is built from, if it needs one.

        The first step does so. Called before, a checkpoint of the initial weights holds it too.

        Raises:
            LedgerError: the release was charged, and no checkpoint holds its result.
            ValueError: a model that the preconditioner is not for, or one that is sharded.
        """
        config = self.plan.config.preconditioner
        if config is None or not config.purpose or self.preconditioner is not None:
            return
        kind = self.plan.extra_release(config.purpose)
        if self.ledger.extra.get(config.purpose):
            raise LedgerError(
                f"{self.ledger.name} has paid for {config.purpose}, and no checkpoint holds them:"
                " take a new ledger"
            )
        if self._is_sharded:
            raise ValueError(
                f"fully_shard does not go with {type(config).__name__}, which is released from the"
                " inputs of one layer; give every process all weights, or take KFAC"
            )
        own = None
        if self._share:
            own = self._ranks.run_on_all(lambda: self._sum_moments(kind))
            own = self._ranks.sum({"moments": own})["moments"]
        noisy = self._ranks.broadcast_from_rank0(
            lambda: self._release_moments(kind, own), f"release for {config.purpose}"
        )
        # Other processes count it in ledgers of their own.
        self._match_ledger(self.ledger.steps, {config.purpose: 1})
        self._pipeline.preconditioning.set_state(
            config.build_from_release(
                self.model, noisy, kind.stddev, self.plan.dataset_size, self._step
            )
        )

    def _release_moments(self, kind: ExtraRelease, total: Tensor | None) -> Floats:
        """Charge and return the noisy second moments of all records.

        Args:
            kind: of the plan.
            total: their sum; None where this process holds all records.
        """
        total = self._sum_moments(kind) if total is None else total
        return self._release_vector(kind, pack_symmetric(total).numpy())

    def _sum_moments(self, kind: ExtraRelease) -> Tensor:
        """Return the sum of the clipped second moments of this process's records, float64."""
        maps, head = split_head(self.model)
        self.ledger.begin()
        size = len(self._loader) if self._share else self.plan.dataset_size
        blocks: Iterable[Any] = (
            np.arange(start, min(start + _SUMMED_ROWS, size))
            for start in range(0, max(size, 1), _SUMMED_ROWS)
        )
        if self._units is not None:
            generator = self.plan.generator(self._step, self._sampling)
            blocks = [self._units.draw(np.arange(size), generator)]
        bound = self.plan.config.micro_batch.most or _MOST_ROWS
        total = torch.zeros((), dtype=torch.float64)
        for block in blocks:
            parts = layout(block, bound, self.plan.config.unit_reduction)
            loaded = self._loader.load([part.records for part in parts])
            added = sum_second_moments(
                maps, head, kind.norm, zip(loaded, parts, strict=True), self._loader.load_one
            )
            total = total + added.double().cpu()
        return total

    def forfeit_steps(self) -> None:
        """Charge all that the plan has left, without a release.

        Call this when what was released has decided to end the loop early. ε of fewer steps holds
        only for a number of steps that was chosen beforehand; ε of the plan always holds.

        Raises:
            LedgerError: the ledger is closed or cannot be written.
        """
        self._match_ledger(self.plan.steps, self.plan.extra_counts)

    def _match_ledger(self, steps: int, extra: Mapping[str, int]) -> None:
        """Charge until the ledger of this process holds so many releases of each kind."""
        for kind in self.plan.extra_releases:
            missing = extra.get(kind.purpose, 0) - self.ledger.extra.get(kind.purpose, 0)
            for _ in range(missing):
                charge_extra(self.ledger, kind, self._step)
        self._pipeline.match_release_count(self._step, steps)

    @property
    def steps_done(self) -> int:
        """Steps made so far, including earlier runs on the same ledger."""
        return self.ledger.steps

    @property
    def epsilon(self) -> float:
        """ε of all releases in the ledger at the plan's δ: an upper bound, in milliseconds.

        After the last planned step it is what the card says (`Plan.running_epsilon`).
        """
        return self.plan.running_epsilon(self.ledger.steps, self.ledger.extra)

    # -- the card ---------------------------------------------------------------------------------

    def write_card(self, folder: StrPath, **statements: Any) -> dict[str, Any]:
        """Write released weights, a copy of the ledger and the privacy card into a folder.

        `dpkfc ledger verify`, `audit`, `card` and `report` take the folder. All processes call this
        method, and rank 0 writes.

        Args:
            folder: made if it is missing. It may hold an earlier state of the same run.
            statements: `title`, `chosen_by`, `not_private`, `results`, `settings`, `declared`
                and `total` of `dpkfc.report.card.session_card`.

        Returns:
            The card.

        Raises:
            RuntimeError: nothing was released or restored, or the model does not hold what was
                released last; nothing is written then.
            CheckpointError: the folder holds another run, or cannot be written.
        """
        from dpkfc.report.card import session_card
        from dpkfc.report.card_files import write_weights_and_card

        self._ranks.run_on_all(self.check_released)
        state = self._ranks.run_on_all(self.released_state)

        def write() -> dict[str, Any]:
            return write_weights_and_card(
                folder, state, self.ledger, session_card(self, **statements)
            )

        return self._ranks.broadcast_from_rank0(write, "write_card")

    def check_released(self) -> None:
        """Raise unless the model holds what was released last, as a card needs it.

        Raises:
            RuntimeError: nothing was released or restored, or a tensor differs, by its name.
        """
        self._lazy.expose()
        self._weights.check()

    def released_state(self) -> Tensors:
        """Return the delivered tensors: released weights, averaged where the plan says so.

        All processes of a sharded model call this method.

        Raises:
            RuntimeError: as `check_released`, or a tensor that is neither a parameter nor a buffer.
        """
        self.check_released()
        has_average = self.plan.config.weight_average
        with self.averaged_weights() if has_average else nullcontext():
            if self._is_sharded:
                state = self._model_state()
                self._ranks.run_on_all(partial(self._weights.check_state, state))
            else:
                # No exchange: a process may call this method alone.
                state = self.model.state_dict()
                self._weights.check_state(state)
            tensors = copy_tensors(fsdp.gather_tree(state, keep=self._ranks.is_rank0))
        return tensors

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, folder: StrPath, extra: Any = None) -> None:
        """Write a checkpoint of released values, never of a noise stream.

        It holds released parameters, buffers, the states of optimizer and filters and the
        preconditioner. All processes call this method, and rank 0 writes.

        Args:
            folder: a folder of its own. An earlier checkpoint in it is replaced, and stays readable
                until the new one is complete.
            extra: the caller's own state, such as `scheduler.state_dict()`, which `restore`
                returns. It consists of plain values and tensors in dicts, lists and tuples. It must
                not hold anything that was computed from private data.

        Raises:
            CheckpointError: a folder that cannot be written or holds other files, or a checkpoint
                that this session did not continue from.
            LedgerError: the ledger holds an earlier run, and no state of it was restored.
        """
        self._check_begun()
        self._lazy.expose()
        if self._resume and self._unrestored_releases and self._step == 0:
            raise LedgerError(
                f"the model holds no weights of {self.ledger.name}: restore its checkpoint, or make"
                " a step, before session.save()"
            )
        check_in_step(self._ranks, self._parameters, "save")
        self._average.check_swapped_out()
        self._ranks.run_on_all(self._weights.check_parameters)
        self._ranks.broadcast_from_rank0(
            lambda: resume_checks.refuse_foreign_checkpoint(
                folder, self._unrestored_releases, self.ledger.contains
            )
        )
        state = (self._checkpoint_tensors(), self._checkpoint_meta(extra))
        tensors, meta = fsdp.gather_tree(state, keep=self._ranks.is_rank0)
        self._ranks.broadcast_from_rank0(lambda: checkpoint.write(folder, tensors, meta))

    def _checkpoint_tensors(self) -> Groups:
        tensors = {"model": self._model_state()}
        if self.preconditioner is not None:
            tensors["preconditioner"] = self.preconditioner.state_dict()
        optional = {
            "filters": self._pipeline.postprocess.state_dict(),
            "average": self._average.state_dict(),
        }
        return tensors | {group: values for group, values in optional.items() if values}

    def _checkpoint_meta(self, extra: Any) -> dict[str, Any]:
        preconditioner = self.preconditioner
        meta = {
            "plan": self.plan.hash,
            "caveats": list(self.plan.caveats),
            "step": self._step,
            "ledger_count": self.ledger.count,
            "ledger_head": self.ledger.head,
            "optimizer": self.optimizer.state_dict(),
            "world_size": self._ranks.world_size,
            "preconditioner_step": None if preconditioner is None else preconditioner.step,
            "extra": extra,
        }
        if self._callbacks.private_readers:
            meta["takers"] = list(self._callbacks.private_readers)
        if self._weights.accepted:
            meta["accepted"] = list(self._weights.accepted)
        state = self.model.state_dict()
        # What modules keep beside tensors (`get_extra_state`).
        plain = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        if plain:
            meta["plain"] = plain
        if self.plan.test_mode:
            # A run in test mode continues equal to the bit, dropout included. Other runs continue
            # with whatever torch draws.
            meta["torch_rng"] = torch.cat(self._ranks.all_gather(torch.get_rng_state()))
        return meta

    def _model_state(self) -> Tensors:
        if self._is_sharded:
            return fsdp.model_state(self.model)
        return unique_tensors(self.model.state_dict())

    def restore(self, folder: StrPath, *, any_world_size: bool = False) -> Any:
        """Continue from a checkpoint of the same plan and ledger, with a fresh noise stream.

        Releases that the ledger holds beyond the checkpoint stay charged: their steps are not given
        back. All processes call this method, and rank 0 reads.

        Args:
            folder: the folder that `save` wrote.
            any_world_size: accept another number of processes. Only the last bits of a release
                depend on it.

        Returns:
            The `extra` that was given to `save`.

        Raises:
            CheckpointError: damaged, or of another plan, model, optimizer, ledger or number of
                processes; nothing is loaded then.
            RuntimeError: a drawn batch waits for `step`, and the checkpoint is of another step.
        """
        self._lazy.expose()
        tensors, meta = self._ranks.broadcast_from_rank0(
            lambda: resume_checks.read_session(folder), "restore"
        )
        world_size = None if any_world_size else self._ranks.world_size
        resume_checks.check_run(meta, self.plan.hash, world_size, folder)
        count = meta["ledger_count"]
        head = meta["ledger_head"]
        is_own = self._ranks.broadcast_from_rank0(lambda: self.ledger.contains(count, head))
        resume_checks.check_ledger(is_own, count, folder)
        if self._pending is not None and meta["step"] != self._step:
            raise RuntimeError(
                f"a batch was drawn for step {self._step} and not passed to session.step(); pass it"
                f" first, or restore step {meta['step']} into a new session"
            )
        with resume_checks.explain_misfits(folder):
            self._ranks.run_on_all(lambda: self._load(tensors, meta))
        return meta["extra"]

    def _load(self, tensors: Groups, meta: dict[str, Any]) -> None:
        """Load what a checkpoint of this plan and ledger holds."""
        preconditioning = self._pipeline.preconditioning
        resume_checks.check_same_tensors(self._model_state(), tensors["model"])
        preconditioner = None
        if "preconditioner" in tensors:
            preconditioner = preconditioning.restore(tensors["preconditioner"])
        optimizer_state = fsdp.divided_optimizer_state(self.optimizer, meta["optimizer"])
        resume_checks.load_optimizer(self.optimizer, optimizer_state)
        self._pipeline.postprocess.load_state_dict(self._place(tensors.get("filters", {})))
        self._average.load_state_dict(self._place(tensors.get("average", {})))
        model_state = fsdp.divided_state(tensors["model"], self.model)
        self.model.load_state_dict(model_state | meta.get("plain", {}), strict=False)
        if "torch_rng" in meta:
            states = meta["torch_rng"].view(meta["world_size"], -1)
            torch.set_rng_state(states[self._ranks.rank % len(states)].clone())
        self._callbacks.note_private_readers(meta.get("takers", []))
        self._weights = ReleasedWeights(self.model, meta.get("accepted", ()))
        self._lazy.weights = self._weights
        self._weights.record()
        preconditioning.current = preconditioner
        self._step = meta["step"]  # a batch that was drawn for this step stays pending
        self._unrestored_releases = 0
        self._has_latest_weights = meta["ledger_count"] == self.ledger.count

    def _place(self, state: NamedTensors) -> Tensors:
        """Return a state on the device and in the sharding of the model."""
        device = device_of_layers(self.layers)
        moved = {name: x.to(device) for name, x in state.items()}
        return fsdp.divided_state(moved, self.model)

    def close(self) -> None:
        """Record the weights next to the ledger and close it; no step can follow."""
        self._lazy.expose()
        if self._has_latest_weights and self._ranks.is_rank0 and not self._is_sharded:
            self._has_latest_weights = False
            self._record_weights()
        self._callbacks.end(self)
        if self._failed_rows:
            self._warn_of_failures("this run", self._failed_rows)
            self._failed_rows = 0
        self.ledger.close()
        self._loader.close()

    def _record_weights(self) -> None:
        try:
            average: Tensors = {}
            if self.plan.config.weight_average:
                with self.averaged_weights():
                    average = copy_tensors(self.model.state_dict())
            record_weights(self.ledger, self._weights, average)
        except (RuntimeError, OSError) as error:
            _log.warning("no digest of the weights is kept next to the ledger: %s", error)

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the session."""
        self.close()
