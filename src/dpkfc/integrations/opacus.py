"""Offer the interface of Opacus 1.6, so that a script runs with only its import changed.

    from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager

`make_private` returns the very model and optimizer that it was given. The model gets hooks that
record its forward passes in training mode, and the optimizer gets hooks around its step. `close()`
removes them. Options of Opacus that this library does not have are refused by name, never ignored.

How the lines of a script make a private step, and where to read it:

    make_private(...)         here, `PrivacyEngine` and `attach`: plan, ledger, hooks and loader
    for x, y in loader:       here, `PrivateLoader`: draws a batch of the plan, and reports it
        out = model(x)        `_opacus_batch`, `BatchRecording`: a tracker follows the examples
        loss.backward()       the same: takes the gradient of every example, and writes no `p.grad`
        optimizer.step()      `_opacus_step`, `PrivateStep`: clips, charges and adds noise; then
                              the optimizer itself steps on the release in `p.grad`

The rest of this file holds the keywords of `make_private`, the accountant, the validator of models,
and the names of Opacus that a script must not import.

Visible differences:

* The preconditioner: `preconditioner=KFAC(...)`, with `readout="natural"` for the natural-gradient
  step.
* q = batch_size / len(dataset), and the divisor is batch_size. Opacus computes both from
  len(data_loader), which is rounded.
* Noise and sampling are keyed by the operating system, and no generator reaches them.
  `test_mode_seed` makes a run repeatable and not private.
* The accountant is PLD by default ("prv" names the same numerical composition and selects it).
* These raise an error: a model or loss that mixes examples, a skipped batch, two backward passes
  before a step, a penalty on weights.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import os
import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc import checkpoint
from dpkfc._checks import check_integer, check_positive, is_number
from dpkfc.checkpoint import StrPath
from dpkfc.clipping import CLIPPINGS
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.data.duplicates import check_once
from dpkfc.data.loading import Collate, split
from dpkfc.distributed.context import DistributedContext
from dpkfc.gradients.discovery import find_layers
from dpkfc.integrations._opacus_batch import Indices, PhysicalBatch
from dpkfc.integrations._opacus_step import LINE_BY_LINE, PrivateStep, StepHook
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, LedgerError
from dpkfc.privacy.rng import SamplingStream
from dpkfc.public_rows import find_template
from dpkfc.rng_state import fresh_seed, renew

# --------------------------------------------------------------------------------------------------
# The engine of a script.


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, as `opacus.PrivacyEngine` does.

    One engine serves one model.

    Args:
        accountant: "pld" (default), "prv" (the same) or "rdp".
        secure_mode: must be False. For protection against floating-point attacks use a `Session`
            with `noise="rounded"`. On a CPU the noise comes from a cipher without it.
        budget: of the people in the dataset. `make_private_with_epsilon` charges its whole plan to
            it, once for each ledger.

    Raises:
        ValueError: another accountant, or secure_mode=True.

    Guarantee:
        Each `optimizer.step()` that ends a logical batch is one release of the plan's event, in the
        ledger before it exists. A loss that is not a mean (or sum, as declared) of per-example
        losses is refused, before its batch contributes.
    """

    def __init__(
        self, *, accountant: str = "pld", secure_mode: bool = False, budget: Budget | None = None
    ) -> None:
        if secure_mode:
            raise ValueError(
                "secure_mode=True is not supported; leave it out (noise is a cipher's), or take a"
                " Session with PrivacyConfig(noise='rounded')"
            )
        self._budget = budget
        self.secure_mode = secure_mode
        self.accountant = Accountant(accountant)
        self._step: PrivateStep | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with a given noise; steps have no limit, and ε grows with each.

        The plan in the ledger covers ONE pass over the loader, and its δ is only descriptive.
        `get_epsilon(delta)` counts what was released, at any δ.

        Args:
            module: the model.
            optimizer: a torch optimizer of exactly its trainable parameters.
            data_loader: a torch DataLoader with a batch_size over a map-style dataset.
            noise_multiplier: standard deviation of the noise over max_grad_norm; 0 means no noise
                and no privacy.
            max_grad_norm: clipping norm C, measured in the coordinates of the preconditioner.
            options: see `Options`.

        Returns:
            The same module, the same optimizer and a private loader. With grad_sample_mode="ghost"
            the criterion comes before the loader.

        Raises:
            ValueError: a part cannot be made private, naming the fix; nothing has been changed.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        parts = (module, optimizer, find_source(data_loader))
        chosen = self._parse(options)
        config, size = make_config(chosen, self.accountant.name, parts, max_grad_norm, 1.0)
        ledger_delta = min(1e-5, 0.1 / max(1, size))
        plan = config.with_noise(noise_multiplier, ledger_delta, size)
        return self._attach(plan, parts, chosen, None)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with the least noise for `epochs` passes within (ε, δ).

        A step beyond those passes raises `BudgetExhausted` and changes nothing.

        Args:
            module: as in `make_private`.
            optimizer: as in `make_private`.
            data_loader: as in `make_private`.
            target_epsilon: ε of the whole run.
            target_delta: δ of the whole run.
            epochs: passes over the loader.
            max_grad_norm: as in `make_private`.
            options: see `Options`.

        Returns:
            As `make_private`.

        Raises:
            ValueError: as `make_private`, or a budget that no noise reaches.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        parts = (module, optimizer, find_source(data_loader))
        chosen = self._parse(options)
        config, size = make_config(chosen, self.accountant.name, parts, max_grad_norm, epochs)
        plan = config.calibrate(target_epsilon, target_delta, size)
        return self._attach(plan, parts, chosen, plan.steps)

    def _parse(self, options: dict[str, Any]) -> Options:
        if self._step is not None:
            raise ValueError(
                "this engine has made a model private already; use one PrivacyEngine for each"
                " model: engine = PrivacyEngine() before make_private"
            )
        return Options.parse(options)

    def _attach(
        self, plan: Plan, parts: Parts, options: Options, max_releases: int | None
    ) -> tuple[Any, ...]:
        module, optimizer, _ = parts
        self._step, loader = attach(plan, parts, options, max_releases, self._budget)
        self.accountant.attach(plan, self._step.ledger)
        if options.grad_sample_mode == "ghost":
            criterion = options.criterion or nn.CrossEntropyLoss(reduction=options.loss_reduction)
            return module, optimizer, criterion, loader
        return module, optimizer, loader

    def get_epsilon(self, delta: float) -> float:
        """Return ε of all releases so far at δ; 0 before `make_private`."""
        return self.accountant.get_epsilon(delta)

    @property
    def plan(self) -> Plan:
        """Return the plan, which is public; raise a RuntimeError before `make_private`."""
        return self._private.plan

    @property
    def ledger(self) -> Ledger:
        """Return the privacy ledger; raise a RuntimeError before `make_private`."""
        return self._private.ledger

    @property
    def _private(self) -> PrivateStep:
        if self._step is None:
            raise RuntimeError("call make_private or make_private_with_epsilon first")
        return self._step

    def write_card(self, folder: StrPath, **statements: Any) -> dict[str, Any]:
        """Write weights, ledger and privacy card, as `Session.write_card` does."""
        from dpkfc.report.card import session_card, write_weights_and_card

        card = session_card(self, **statements)
        return write_weights_and_card(folder, self._private.released_state(), self.ledger, card)

    def accept_weights(self) -> None:
        """Continue from weights that you have written between two releases; the card says so.

        As `Session.accept_weights`.
        """
        self._private.weights.accept(self.ledger.count)

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Check that a module can be trained privately; the ValueError names the fixes."""
        find_layers(module)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Return whether `validate` would pass."""
        return ModuleValidator.is_valid(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return what `ModuleValidator.fix_and_validate` returns."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: StrPath,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint without the ledger into the FOLDER `path`, without pickle.

        Args:
            path: a folder of its own; an earlier checkpoint in it is replaced.
            module: the model.
            optimizer: the optimizer.
            noise_scheduler: only None.
            grad_clip_scheduler: only None.
            checkpoint_dict: further plain values and tensors, which `load_checkpoint` returns.
            module_state_dict_kwargs: of `module.state_dict`.
            torch_save_kwargs: accepted and ignored.

        Raises:
            CheckpointError: the folder cannot be written or holds other files.
            ValueError: a schedule of noise or clip.
        """
        _refuse_schedules(noise_scheduler, grad_clip_scheduler)
        if not isinstance(path, (str, os.PathLike)) or os.path.isfile(path):
            raise checkpoint.CheckpointError(
                f"path={str(path)!r:.60} is a file; a checkpoint is a folder here, so give the name"
                " of a new one"
            )
        state = module.state_dict(**(module_state_dict_kwargs or {}))
        saved = {
            **(checkpoint_dict or {}),
            "module_state_dict": dict(state),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
        }
        if optimizer is not None:
            saved["optimizer_state_dict"] = optimizer.state_dict()
        checkpoint.write(path, {}, saved)

    def load_checkpoint(
        self,
        *,
        path: StrPath,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save_checkpoint`; the ledger must hold what was spent on it.

        Args:
            path: the folder.
            module: the model, after `make_private(..., ledger_path=..., resume=True)`.
            optimizer: the optimizer; None leaves its state out.
            noise_scheduler: only None.
            grad_clip_scheduler: only None.
            module_load_dict_kwargs: of `module.load_state_dict`.
            torch_load_kwargs: accepted and ignored.

        Returns:
            The checkpoint without the state of the optimizer.

        Raises:
            CheckpointError: missing, damaged, or of another model or optimizer.
            ValueError: the ledger does not hold the releases; nothing is loaded then.
        """
        _refuse_schedules(noise_scheduler, grad_clip_scheduler)
        _, saved = checkpoint.read(path)
        with checkpoint.explain_misfits(path):
            spent, weights = saved["privacy_accountant_state_dict"], saved["module_state_dict"]
        self.accountant.load_state_dict(spent)
        if not module_load_dict_kwargs:
            checkpoint.check_same_tensors(module.state_dict(), weights)
        with checkpoint.explain_misfits(path):
            module.load_state_dict(weights, **(module_load_dict_kwargs or {}))
        state = saved.pop("optimizer_state_dict", None)
        if optimizer is not None and state is not None:
            checkpoint.load_optimizer(optimizer, state)
        if self._step is not None and self._step.model is module:
            self._step.weights.record()
        return saved

    def close(self) -> None:
        """Remove all hooks, record the weights next to the ledger and close it.

        Model and optimizer are then NOT private.
        """
        if self._step is not None:
            self._step.record_weights()
            self._step.close()
            self._step.ledger.close()

    def __enter__(self) -> PrivacyEngine:
        """Return the engine itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine."""
        self.close()


# --------------------------------------------------------------------------------------------------
# From the keywords of a script to a configuration, and from a plan to hooks on model and optimizer.
# If a part is refused, nothing has been changed.

Parts = tuple[nn.Module, Optimizer, DataLoader[Any]]
"""Model, optimizer and loader of a script."""


def make_config(
    options: Options, accountant: str, parts: Parts, max_grad_norm: Any, epochs: float
) -> tuple[PrivacyConfig, int]:
    """Return the configuration behind a call and the number of examples.

    Raises:
        ValueError: a part cannot be made private, there is one bound per layer, or epochs <= 0.
    """
    module, optimizer, source = parts
    _check_parts(module, optimizer)
    check_loader(source)
    find_layers(module)
    size = len(cast(Sized, source.dataset))
    check_positive("epochs", epochs)
    if isinstance(max_grad_norm, (list, tuple)):
        raise ValueError(
            "max_grad_norm must be one number for all layers together; write"
            f" max_grad_norm={math.hypot(*max_grad_norm):.4g}, the norm of the list"
        )
    check_positive("max_grad_norm", max_grad_norm)
    config = PrivacyConfig(
        expected_batch_size=cast(int, source.batch_size),
        steps=math.ceil(epochs * _batches_per_pass(options, source, size)),
        max_grad_norm=float(max_grad_norm),
        clipping=options.clipping,
        sampler="poisson" if options.poisson_sampling else "shuffle",
        uncertified=options.uncertified,
        accountant=accountant,
        preconditioner=options.preconditioner,
        readout=options.readout,
        test_mode_seed=options.test_mode_seed,
    )
    return config, size


def attach(
    plan: Plan, parts: Parts, options: Options, max_releases: int | None, budget: Budget | None
) -> tuple[PrivateStep, PrivateLoader]:
    """Open the ledger, register the hooks and charge the budget.

    Args:
        plan: for the dataset of the loader.
        parts: model, optimizer and the script's own loader.
        options: keywords of `make_private`.
        max_releases: most steps in the ledger, None for no limit.
        budget: charged with the whole plan; None for no budget.

    Returns:
        The step behind `optimizer.step()`, and the private loader.

    Raises:
        ValueError: a part cannot be made private.
        LedgerError: the ledger cannot be written or belongs to another run.
        BudgetExhausted: the ledger has spent the plan, or the plan does not fit into the budget.
    """
    plan.check_accounting()
    module, optimizer, source = parts
    header = {**plan.ledger_header, "steps": max_releases}
    with ExitStack() as undo:
        ledger = Ledger.open(options.ledger_path, plan.hash, header, max_releases)
        undo.callback(ledger.abandon)
        _check_resumed(ledger, options.resume)
        step = PrivateStep(
            plan,
            module,
            optimizer,
            ledger,
            loss_reduction=options.loss_reduction,
            verify=options.verify,
            source=source,
        )
        undo.callback(step.close)
        length = _batches_per_pass(options, source, plan.dataset_size)
        loader = PrivateLoader(source, LogicalBatchSampler(plan, length), step)
        # Every script gets this warning: one that depended on records would tell of them.
        warnings.warn(_NAN_WARNING, UserWarning, stacklevel=4)
        if budget is not None:
            step.receipt = budget.charge(plan, ledger)
        undo.pop_all()
    _warn_of_earlier_run(source.dataset, ledger, has_budget=budget is not None)
    return step, loader


_NAN_WARNING = (
    "a record whose gradient is not finite (NaN) adds nothing, and no message tells of it: look"
    " for missing values in the data"
)

# The datasets of this process that are alive, each with the ledgers of runs on it.
_runs = WeakIdKeyDictionary()


def _warn_of_earlier_run(dataset: Any, ledger: Ledger, *, has_budget: bool) -> None:
    """Warn that the ε of a second run is not the total, unless a file or a budget counts it."""
    earlier = 0
    with contextlib.suppress(TypeError):  # a list or a tuple has no weak reference
        ledgers: list[Ledger] = _runs.setdefault(dataset, [])
        earlier = sum(book.count for book in ledgers)
        ledgers.append(ledger)
    if earlier and ledger.path is None and not has_budget:
        warnings.warn(
            f"engines have made {earlier} releases of this dataset before: the ε of all runs add"
            " up. Name one Budget for them, or keep their ledgers and run dpkfc total",
            stacklevel=5,
        )


def _check_resumed(ledger: Ledger, resume: bool) -> None:
    """Refuse the ledger of an earlier run, unless the script says that it goes on with it.

    Raises:
        BudgetExhausted: the ledger has no release left.
        LedgerError: the ledger holds releases, and more may follow.
    """
    if resume or not ledger.count:
        return
    if ledger.remaining == 0:
        raise BudgetExhausted(
            f"all {ledger.count} releases of the plan are spent in {ledger.name}: take another"
            " ledger_path, or resume=True to evaluate"
        )
    raise LedgerError(
        f"{ledger.name} holds {ledger.count} releases of an earlier run: load its checkpoint and"
        " pass resume=True, or take another ledger_path"
    )


def _check_parts(module: Any, optimizer: Any) -> None:
    """Refuse a model or an optimizer that cannot be made private."""
    processes = DistributedContext.current().world_size
    if processes > 1:
        raise ValueError(
            f"this script runs in {processes} processes, which would spend {processes} times the"
            " budget; run it in one, or use dpkfc.Session, which shares each batch"
        )
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch module, got {kind}")
    if "_module" in module._modules and hasattr(module, "to_standard_module"):
        raise ValueError(
            f"module is a {kind} of Opacus; pass the model inside: "
            "module=model.to_standard_module()"
        )
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(module, parallel) or hasattr(module, "_orig_mod") or kind.startswith("FSDP"):
        raise ValueError(
            f"module is wrapped in {kind}; pass the plain module on one device, uncompiled"
        )
    kind = type(optimizer).__name__
    if getattr(optimizer, "original_optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"optimizer is a {kind} of Opacus; pass the one inside:"
            " optimizer=optimizer.original_optimizer"
        )
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"optimizer must be a torch optimizer that steps without a closure, got {kind}"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ValueError(
            f"optimizer is wrapped in {kind}, whose steps cannot be seen; pass the plain torch"
            " optimizer, and leave optimizer and loader out of accelerator.prepare"
        )


def _batches_per_pass(options: Options, data_loader: DataLoader[Any], size: int) -> int:
    """Return the number of logical batches in one pass over the script's own loader.

    Shuffled batches must be whole, so a smaller last batch does not count.
    """
    length = len(data_loader)
    if not options.poisson_sampling:
        length = size // cast(int, data_loader.batch_size)
    return max(1, length)


def _refuse_schedules(noise_scheduler: Any, grad_clip_scheduler: Any) -> None:
    """Refuse schedules of noise and clipping norm, since a plan fixes both."""
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "schedulers in a checkpoint are not supported: noise, clip and batch size are fixed "
            "for the whole run; leave them out"
        )


# --------------------------------------------------------------------------------------------------
# The loader of the script: a torch DataLoader over the same dataset whose batches the plan draws.
#
# Batches are drawn in this process, even if workers load the examples. The size of each batch and
# the end of each logical batch are therefore known when a batch is yielded, however far workers are
# ahead.


class LogicalBatchSampler:
    """Draws the logical batches of a plan, in one sequence over all passes.

    Args:
        plan: sampler and streams.
        length: number of logical batches in one pass.

    Attributes:
        pending: the indices of an unfinished logical batch. The next pass begins with it,
            and counts it among its own.
    """

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan = plan
        self.length = length
        self._stream: SamplingStream = plan.sampling_stream()
        self._next = 0
        self.pending: Indices | None = None

    def __iter__(self) -> Iterator[Indices]:
        """Yield the indices of one pass. Shuffling starts a new order in each pass."""
        period = self.plan.sampler.steps_per_draw
        self._next = -(-self._next // period) * period
        pending, self.pending = self.pending, None
        length = self.length
        if pending is not None:
            length -= 1
            yield pending
        for _ in range(length):
            self._next += 1
            yield self.plan.draw(self._next - 1, self._stream)


class _PhysicalBatchSampler:
    """Cuts logical batches into physical ones, and announces each of them in order."""

    def __init__(self, logical: LogicalBatchSampler, bound: int | None) -> None:
        self.logical = logical
        self.bound = bound
        self.announced: deque[PhysicalBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.announced.clear()
        for indices in self.logical:
            parts = split(indices, self.bound) or [indices]
            for i, part in enumerate(parts):
                is_last = i == len(parts) - 1
                self.announced.append(PhysicalBatch(len(part), i == 0, is_last, indices))
                yield part.tolist()

    def __len__(self) -> int:
        """Return the number of batches in one pass, an expected number if batches are cut."""
        size = self.logical.plan.expected_batch_size
        return self.logical.length * -(-size // (self.bound or size))


@dataclass(frozen=True)
class _CollateWithEmpty:
    """A collate function that can also make an empty batch.

    After each batch the operating system seeds the global generators anew, also in a worker.
    Otherwise one seed would last for the whole life of a worker, and a snapshot of its memory would
    reveal all its numbers.
    """

    collate: Collate
    empty: Any
    repeatable: bool

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collate(examples) if examples else copy.deepcopy(self.empty)
        if not self.repeatable:
            renew()
        return batch


class PrivateLoader(DataLoader[Any]):
    """The private loader, made by `PrivacyEngine.make_private`.

    Args:
        source: the user's loader. Its dataset, collate function and workers are used, its order is
            not.
        sampler: draws the logical batches.
        step: gets a report of every batch.
        bound: the largest physical batch, None for whole logical batches.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        sampler: LogicalBatchSampler,
        step: PrivateStep,
        bound: int | None = None,
    ) -> None:
        self.source = source
        self.logical = sampler
        self.step = step
        self.physical = _PhysicalBatchSampler(sampler, bound)
        self._is_repeatable = sampler.plan.test_mode
        collate = source.collate_fn
        empty = _make_empty(_collate_one(source))
        # The generator makes the seeds of worker processes.
        generator = source.generator if self._is_repeatable else torch.Generator()
        super().__init__(
            source.dataset,
            batch_sampler=self.physical,
            collate_fn=_CollateWithEmpty(collate, empty, self._is_repeatable),
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=generator,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of one pass, first the pending one; a batch may be empty."""
        token = self.step.begin_pass()
        self.logical.pending = self.step.pending
        if not self._is_repeatable:
            self.generator.manual_seed(fresh_seed())
        for yielded, batch in enumerate(self._fetch(super().__iter__())):
            if self.step.should_end(yielded):
                break
            self.step.register_batch(self.physical.announced.popleft(), token, batch)
            yield batch
        self.step.finish_pass(token)

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; seed the global generators anew before each.

        Nobody can then learn what the dataset, the collate function and dropout draw for a batch.
        """
        while True:
            if not self._is_repeatable:
                renew()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @property
    def sample_rate(self) -> float:
        """Return q, the expected share of the examples in a batch."""
        plan = self.logical.plan
        return plan.expected_batch_size / plan.dataset_size

    def cut(self, bound: int) -> PrivateLoader:
        """Return the same loader with physical batches of at most `bound` examples."""
        return PrivateLoader(self.source, self.logical, self.step, bound)


def find_source(loader: Any) -> Any:
    """Return the loader that a private one was made from; any other loader as it is.

    A script that trains several models hands the private loader of one to the next.
    """
    if not isinstance(loader, PrivateLoader):
        return loader
    warnings.warn(
        "data_loader has served another private run; each engine counts its own releases, and the"
        " ε of runs on the same examples add up",
        UserWarning,
        stacklevel=3,
    )
    return loader.source


def check_loader(loader: Any) -> None:
    """Refuse a loader whose sampling or iteration cannot be replaced as its user would expect.

    Raises:
        ValueError: naming the part and the fix.
    """
    _check_kind(loader)
    try:
        check_once(loader.dataset)
    except ValueError as error:
        # The message proposes units=, which a Session takes and an engine does not.
        reason = str(error).split(":")[0]
        raise ValueError(f"{reason}; leave repeats out. Units need a Session") from None


def _check_kind(loader: Any) -> None:
    """Refuse a loader whose batches cannot be replaced by batches of a plan."""
    kind = type(loader).__name__
    if kind == "DPDataLoader":
        raise ValueError(
            "data_loader is a DPDataLoader of Opacus; pass the DataLoader that it was made from:"
            " make_private samples by itself"
        )
    if type(loader) is not DataLoader:
        raise ValueError(
            f"data_loader is a {kind}, whose own iteration would be lost; pass a torch DataLoader"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} cannot be sampled at random; pass a map-style dataset with a"
            " length"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader has no batch_size or a batch sampler of its own, which would be replaced; "
            "pass DataLoader(dataset, batch_size=...)"
        )
    sampler = loader.sampler
    is_plain = type(sampler) in (RandomSampler, SequentialSampler)
    takes_all = is_plain and len(cast(Sized, sampler)) == len(dataset)
    if not takes_all or getattr(sampler, "replacement", False):
        raise ValueError(
            f"the {type(sampler).__name__} would be replaced by uniform sampling; pass"
            " shuffle=True, weight the losses or take a Subset (docs/errors.md#sampler)"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "data_loader has in_order=False, but batches must come in the order of the draws; leave"
            " in_order out"
        )


def _make_empty(batch: Any) -> Any:
    """Return an empty batch with the structure of a batch of one example.

    Raises:
        ValueError: the batch axis of a part is unknown.
    """
    if batch is None:
        return None
    if isinstance(batch, PackedSequence):
        raise ValueError(
            "collate_fn packs, which hides the examples: return padded x and lengths, and in"
            " forward write pack_padded_sequence(x, lengths, enforce_sorted=False, ...)"
        )
    if isinstance(batch, (Tensor, np.ndarray)) and batch.shape[:1] == (1,):
        # A slice alone would keep the memory of the example.
        return batch[:0].clone() if isinstance(batch, Tensor) else batch[:0].copy()
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        return kind({key: _make_empty(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if len(batch) == 1 and isinstance(batch[0], (str, bytes, int, float)):
            return kind()
        parts = [_make_empty(value) for value in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise ValueError(
        f"the collate function makes a {type(batch).__name__}{shape} of one example; every part of"
        " a batch must be a tensor with the batch as its leading axis"
    )


def _collate_one(source: DataLoader[Any]) -> Any:
    """Return a batch of one public record, or of a private one where the function refuses those."""
    for make_rows in find_template(source.dataset).attempts(source.collate_fn, torch.device("cpu")):
        with suppress(Exception):
            return make_rows(1).batch([0])
    for i in range(1, len(cast(Sized, source.dataset))):
        with suppress(Exception):
            return source.collate_fn([source.dataset[i]])
    return source.collate_fn([source.dataset[0]])


# --------------------------------------------------------------------------------------------------
# Split logical batches into physical batches.


class BatchMemoryManager:
    """Splits logical batches as `opacus.utils.batch_memory_manager.BatchMemoryManager`.

    `optimizer.step()` after a physical batch that does not end its logical batch changes no
    parameter and no state.

    Args:
        data_loader: from `make_private`.
        max_physical_batch_size: largest physical batch.
        optimizer: from the same `make_private`.

    Raises:
        ValueError: a loader that is not private, another optimizer, a size below 1.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int,
        optimizer: Optimizer,
    ) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise ValueError("data_loader is not private; pass the one that make_private returned")
        if data_loader.step.optimizer is not optimizer:
            raise ValueError(
                "the optimizer belongs to another engine than data_loader; pass what make_private"
                " returned"
            )
        check_integer("max_physical_batch_size", max_physical_batch_size, 1)
        self._step = data_loader.step
        self._loader = data_loader.cut(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        """Return the loader of physical batches."""
        return self._loader

    def __exit__(self, *error: object) -> None:
        """Drop an unfinished logical batch."""
        self._step.forget()


# --------------------------------------------------------------------------------------------------
# The keywords of `make_private`: what is taken, and what is refused with its fix.

# How Opacus computes gradients of single examples. Here every mode gives the same values.
GRADIENT_MODES = ("hooks", "functorch", "ew", "ghost")

_UNITS_NEED_SESSION = (
    "an engine protects examples; take a Session: PrivacyConfig(unit=, max_records_per_unit=)"
)
_OTHER_CALL = "give it to make_private_with_epsilon(...)"
# Keywords of other calls, and where they go.
_MISPLACED_KEYWORDS = {
    "unit": _UNITS_NEED_SESSION,
    "units": _UNITS_NEED_SESSION,
    "max_records_per_unit": _UNITS_NEED_SESSION,
    "max_physical_batch_size": (
        "give it to BatchMemoryManager(data_loader=, max_physical_batch_size=, optimizer=)"
    ),
    "noise": "take a Session: PrivacyConfig(noise='rounded')",
    "accountant": "give it to PrivacyEngine(...)",
    "secure_mode": "give it to PrivacyEngine(...)",
    "target_epsilon": _OTHER_CALL,
    "target_delta": _OTHER_CALL,
    "epochs": _OTHER_CALL,
    "steps": "write epochs=steps / len(data_loader)",
    "noise_multiplier": "the target (ε, δ) decides the noise; leave it out, or use make_private",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The other keywords of `make_private` and `make_private_with_epsilon`.

    Arguments of Opacus come first.

    Attributes:
        criterion: the script's loss, returned as it is where `grad_sample_mode="ghost"`.
        batch_first: only True.
        loss_reduction: of the script's loss, "mean" or "sum"; with "sum" the gradient is not
            divided by the batch size.
        poisson_sampling: False shuffles, which needs `uncertified=True`.
        clipping: "flat", "per_layer" with one max_grad_norm C (each of L layers is clipped to C /
            √L), or this library's "normalised" or "automatic".
        noise_generator: only None.
        grad_sample_mode: "hooks", "functorch", "ew", or "ghost" for the four return values of such
            a script; all compute the same.
        wrap_model: ignored; the module itself is always returned.
        rand_on_empty: only False; an empty batch has a leading axis of size 0.
        preconditioner: for example `curvature.KFAC(probe=PinkNoise((1, 28, 28)))`; None is plain
            DP-SGD.
        readout: how a release becomes a step, "whitened", "natural" or "inverse", as in
            `PrivacyConfig`.
        ledger_path: file of the privacy ledger; None keeps it in memory.
        resume: go on with a ledger that holds releases, after the script has loaded the weights of
            its last checkpoint. If the plan is spent, only evaluation is left.
        uncertified: accept shuffled batches, whose ε is not a guarantee.
        test_mode_seed: repeatable noise and sampling; NOT PRIVATE.
        verify: check on public rows, at the first call of the model, that examples do not mix.
            "strict" refuses operations whose batch axis cannot be followed. Every batch is proved
            either way.

    Raises:
        ValueError: a value is not supported, naming the fix.
    """

    criterion: nn.Module | None = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False
    preconditioner: Any = None
    readout: str = "whitened"
    ledger_path: StrPath | None = None
    resume: bool = False
    uncertified: bool = False
    test_mode_seed: int | None = None
    verify: bool | str = True

    @classmethod
    def parse(cls, keywords: Mapping[str, Any]) -> Options:
        """Return the options of a call.

        Raises:
            ValueError: an unknown keyword, naming the nearest known one or its replacement; a value
                that is not supported.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                if name in _MISPLACED_KEYWORDS:
                    raise ValueError(
                        f"keyword {name!r} is not supported: {_MISPLACED_KEYWORDS[name]}"
                    )
                near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
                hint = f"did you mean {near[0]!r}?" if near else LINE_BY_LINE
                raise ValueError(f"unknown keyword {name!r}; {hint}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        _check_options(self)


def _check_options(options: Options) -> None:
    """Refuse an option that is not supported."""
    if not options.batch_first:
        raise ValueError("batch_first=False is not supported; put the batch on the leading axis")
    if options.loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {options.loss_reduction!r}")
    if options.clipping == "adaptive":
        raise ValueError(
            "clipping='adaptive' is not supported: it spends a budget on norms; write "
            "clipping='automatic', which needs no bound"
        )
    if options.clipping not in CLIPPINGS:
        raise ValueError(
            f"clipping={options.clipping!r} is not supported; choose one of {', '.join(CLIPPINGS)}"
        )
    if options.noise_generator is not None:
        raise ValueError(
            "noise_generator is not supported; leave it out, or use test_mode_seed= for a"
            " repeatable run that is not private"
        )
    if options.grad_sample_mode not in GRADIENT_MODES:
        raise ValueError(
            f"grad_sample_mode={options.grad_sample_mode!r} is not supported; leave it out: every"
            " mode computes the same, in one process"
        )
    if options.rand_on_empty:
        raise ValueError(
            "rand_on_empty=True is not supported; where the model takes no empty batch, write:"
            " if len(y) == 0: optimizer.step(); continue"
        )

    if not options.poisson_sampling and not options.uncertified:
        raise ValueError(
            "poisson_sampling=False has no certified ε: leave it out, or write uncertified=True,"
            " which is stamped on the ledger"
        )
    if options.poisson_sampling and options.uncertified:
        raise ValueError(
            "uncertified=True goes with poisson_sampling=False; leave it out for Poisson sampling"
        )
    if options.criterion is not None and not isinstance(options.criterion, nn.Module):
        raise ValueError(
            f"criterion must be a torch module, got {type(options.criterion).__name__}; wrap it in"
            " one, or leave criterion out"
        )
    reduction = getattr(options.criterion, "reduction", options.loss_reduction)
    if reduction != options.loss_reduction:
        raise ValueError(
            f"criterion has reduction={reduction!r} but loss_reduction={options.loss_reduction!r};"
            " make them equal"
        )


# --------------------------------------------------------------------------------------------------
# Report ε of an engine's releases, with the methods of an Opacus accountant.

_ACCOUNTANTS = {"pld": "pld", "prv": "pld", "rdp": "rdp"}


class Accountant:
    """Reports the spent budget; the `accountant` attribute of an engine."""

    def __init__(self, name: str) -> None:
        if name not in _ACCOUNTANTS:
            raise ValueError(
                f"accountant={name!r} is not supported; choose one of {', '.join(_ACCOUNTANTS)} (a"
                " central-limit accountant as 'gdp' is not an upper bound)"
            )
        self.name = _ACCOUNTANTS[name]
        self._run: tuple[Plan, Ledger] | None = None
        self._warned = False

    def attach(self, plan: Plan, ledger: Ledger) -> None:
        """Report the releases of this ledger from now on."""
        self._run = (plan, ledger)
        self._warned = False

    def get_epsilon(
        self,
        delta: float,
        alphas: Any = None,
        eps_error: float | None = None,
        delta_error: float | None = None,
    ) -> float:
        """Return ε of all releases so far, including earlier runs on the ledger.

        A plan without a certified guarantee (test mode, shuffled batches) warns once that ε is not
        valid.

        Args:
            delta: any δ in (0, 1), not only the plan's.
            alphas: ignored; this library chooses its own orders.
            eps_error: ignored; this library has a precision of its own.
            delta_error: as `eps_error`.

        Raises:
            ValueError: δ outside (0, 1).
        """
        if not (is_number(delta) and 0 < delta < 1):
            raise ValueError(f"delta must be in (0, 1), got {delta!r}")
        if self._run is None:
            return 0.0
        plan, ledger = self._run
        self._warn_once(plan)
        curve = EpsilonCurve(
            plan.event, delta, plan.neighbouring_relation, plan.accountant, horizon=plan.steps
        )
        return curve.running_epsilon(ledger.count)

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """Return ε as `get_epsilon` does, and NaN where Opacus gives the best order."""
        return self.get_epsilon(delta), math.nan

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Return one (noise multiplier, sample rate, releases); no entry before the first."""
        if self._run is None or not len(self):
            return []
        plan, ledger = self._run
        rate = plan.expected_batch_size / plan.dataset_size
        return [(plan.noise_multiplier, rate, ledger.count)]

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the history and the name of the accountant; ε is read from the ledger alone."""
        state = {} if destination is None else destination
        state |= {"history": self.history, "mechanism": self.mechanism()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the ledger holds all releases that a state lists; change nothing.

        Raises:
            ValueError: the state lists no releases, or some that the ledger does not hold.
        """
        if not state_dict or "history" not in state_dict:
            raise ValueError("state_dict has no 'history'; pass what accountant.state_dict() gave")
        history = state_dict["history"]
        count = sum(int(releases) for _, _, releases in history)
        is_same_run = all(
            np.allclose(saved[:2], own[:2], rtol=1e-9, atol=0.0)
            for saved, own in product(history, self.history)
        )
        if count > len(self) or not is_same_run:
            raise ValueError(
                f"the state has {count} releases that the ledger does not hold; go on with that"
                " run's file, then load: make_private(ledger_path=..., resume=True)"
            )

    def get_optimizer_hook_fn(self, sample_rate: float) -> StepHook:
        """Return a step hook that does nothing: each release is in the ledger before it exists."""
        return lambda optimizer: None

    def step(self, *, noise_multiplier: float, sample_rate: float) -> NoReturn:
        """Refuse to count by hand.

        Raises:
            RuntimeError: always, naming what counts.
        """
        raise RuntimeError(
            "accountant.step() is absent: optimizer.step() counts every release; leave it out"
        )

    def _warn_once(self, plan: Plan) -> None:
        """Warn once that ε is not valid; without noise it is infinite and needs no warning."""
        if plan.caveats and plan.noise_multiplier > 0 and not self._warned:
            self._warned = True
            reasons = ". ".join(plan.caveats)
            text = f"the reported epsilon is not a guarantee of this run. {reasons}"
            warnings.warn(text, stacklevel=4)  # the caller of get_epsilon

    def mechanism(self) -> str:
        """Return the name of the accountant: "pld" or "rdp"."""
        return self.name

    def __len__(self) -> int:
        return 0 if self._run is None else self._run[1].count


# --------------------------------------------------------------------------------------------------
# Check models for private training, with the methods of Opacus's validator.


class ModuleValidator:
    """Says whether a model can be trained privately, and replaces norms that mix examples."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[ValueError]:
        """Return the error that keeps a model from private training; an empty list without one.

        Raises:
            ValueError: this error, if `strict` is true.
        """
        try:
            find_layers(module)
        except ValueError as error:
            if strict:
                raise
            return [error]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether `validate` finds nothing."""
        return not cls.validate(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """Return a copy with GroupNorm for every BatchNorm, and instance norms without statistics.

        A model that needs neither is returned itself. Frozen BatchNorm in eval mode stays. New
        norms have new weights, so make the optimizer afterwards.
        """
        replaced = {}
        for name, part in module.named_modules():
            norm = _replacement(part)
            if norm is not None:
                replaced[name] = norm
        if not replaced:
            return module
        if "" in replaced:
            return replaced[""]
        fixed = copy.deepcopy(module)
        for name, norm in replaced.items():
            fixed.set_submodule(name, norm)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Return what `fix` returns, after `validate` has found nothing.

        Raises:
            ValueError: naming the module that cannot be trained privately, and the ways out.
        """
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


def _replacement(part: nn.Module) -> nn.Module | None:
    """Return the norm that replaces one that mixes examples; None for any other module."""
    if not isinstance(part, _NormBase):
        return None
    is_instance_norm = isinstance(part, nn.modules.instancenorm._InstanceNorm)
    is_separate = is_instance_norm and not part.track_running_stats
    is_trained = part.training or any(p.requires_grad for p in part.parameters())
    if is_separate or not is_trained:
        return None
    settings: dict[str, Any] = {"eps": part.eps, "affine": part.affine}
    if part.weight is not None:
        settings |= {"device": part.weight.device, "dtype": part.weight.dtype}
    count = part.num_features
    new: nn.Module = nn.GroupNorm(math.gcd(32, count), count, **settings)
    if is_instance_norm:
        new = type(part)(count, momentum=part.momentum, **settings)
    return new.train(part.training)


# --------------------------------------------------------------------------------------------------
# Names that scripts import from Opacus beside its engine.

# No other name may raise an ImportError: pickle asks all modules for names.
_OF_OPACUS = re.compile(
    "DP[A-Z]|GradSample|GradClip|DPOptimizer|Noise$|Accountant|DifferentiallyPrivate|AdaptiveClip"
    "|Sampler$|ModuleError|ConfigurationError|^register_|^wrap_|^prepare_module|^create_accountant"
    "|^get_optimizer_class|^get_noise_multiplier"
)


def __getattr__(name: str) -> NoReturn:
    """Refuse an import of a name that only Opacus has.

    Raises:
        ImportError: a name of Opacus.
        AttributeError: any other name.
    """
    if _OF_OPACUS.search(name):
        raise ImportError(f"dpkfc.integrations.opacus has no {name}; {LINE_BY_LINE}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
