"""The session: the one stateful object a user holds while training under a plan.

It owns sampling, micro-batching, clipping, noise, accounting and the preconditioner's refreshes; the user owns the model,
the loss and a torch optimizer. The model is never wrapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpkfc import checkpoint
from dpkfc.curvature.preconditioner import Preconditioner
from dpkfc.data.loader import MicroBatches, Rows, collate, split
from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.distributed import Ranks
from dpkfc.gradients.layers import Layer, find_layers
from dpkfc.gradients.tape import Tape, capture, check_losses
from dpkfc.gradients.verify import check_mode, check_per_example_gradients, restored_buffers
from dpkfc.metric import Metric
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.privacy.mechanism import ClippedSum, Released, release
from dpkfc.steps import Batch, StepRecord, step_record

__all__ = ["Batch", "Session", "StepRecord"]

LossFn = Callable[[nn.Module, Any], Tensor]


class Session:
    """Train a model under a plan.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        model: any module; BatchNorm in training mode and modules that mix examples are refused.
        optimizer: a torch optimizer over exactly the model's trainable parameters.
        dataset: a map-style dataset, or a tuple of tensors with a common leading axis; `plan.dataset_size` examples.
        ledger_path: file of the privacy ledger; None keeps the ledger in memory.
        collate_fn: how examples become a batch (default: torch's).
        num_workers: loader processes.
        verify: compare per-example gradients with plain autograd on two examples before the first release.

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
        ledger_path: str | os.PathLike[str] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        verify: bool = True,
    ) -> None:
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self.layers: list[Layer] = find_layers(model)
        self._parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        _check_optimizer(optimizer, self._parameters)
        self._dataset, self._collate_fn = dataset, collate_fn
        self._loader = MicroBatches(dataset, plan.config.max_physical_batch_size, collate_fn, num_workers)
        if len(self._loader) != plan.dataset_size:
            raise ValueError(
                f"the plan was calibrated for {plan.dataset_size} examples but the dataset has {len(self._loader)}; "
                "calibrate with dataset_size=len(dataset)"
            )
        self._clip = Clip(plan.config.max_grad_norm, plan.config.clipping, plan.config.automatic_gamma)
        self._noise = plan.noise_stream()
        self._sampling = plan.sampling_stream()
        self._ranks, self._step = Ranks.current(), 0
        self._ledger = self._ranks.together(lambda: _open_ledger(plan, ledger_path if self._ranks.first else None))
        for _ in range(self._ranks.from_first(lambda: self._ledger.count) - self._ledger.count):
            self._charge()  # the other ranks count along
        self.preconditioner: Preconditioner | None = None
        self._pending: Batch | None = None
        self._verify = verify
        self._first = True

    # -- the loop ------------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Sample the remaining logical batches of the plan, each to be passed to `step` before the next is drawn.

        Raises:
            RuntimeError: a drawn batch was not passed to `step` (leaving batches out by their content voids ε).
        """
        self._pending = None
        while self._ledger.count < self.plan.steps:
            if self._pending is not None:
                raise RuntimeError(
                    "the last batch was not passed to session.step(); a sampled batch may not be skipped, because which "
                    "batches are left out would depend on private data"
                )
            indices = self._ranks.from_first(lambda: self.plan.draw(self._step, self._sampling))
            self._pending = Batch(self._step, indices)
            yield self._pending

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
        self._check_identity()
        self._refresh()
        sums, norms = self._ranks.together(lambda: self._clipped_sum(batch, loss_fn))
        clipped = ClippedSum(self._ranks.sum(sums), self._clip.max_grad_norm, self._clip.clipping)
        released = self._release(clipped)
        self._pending = None
        self._apply(released)
        record = step_record(batch, self._ledger.count, norms, self._clip.max_grad_norm, started)
        self._step += 1
        return record

    def _release(self, clipped: ClippedSum) -> Released:
        """Charge and release on the first rank; the others receive the release and count it."""
        plan, step = self.plan, self._step
        released = self._ranks.from_first(lambda: release(clipped, plan, self._noise, self._ledger, step))
        if not self._ranks.first:
            self._charge()
        return released

    def _charge(self) -> None:
        plan = self.plan
        self._ledger.charge(self._step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)

    def _clipped_sum(self, batch: Batch, loss_fn: LossFn) -> tuple[dict[str, Tensor], Tensor]:
        """The clipped sum of this rank's examples and their private norms; nothing outlives an exception in here."""
        summer = ClippedSummer(self.layers, self._metric, self._clip)
        device = next(iter(self._parameters.values())).device
        norms = [torch.zeros(0)]
        indices = self._ranks.share(batch.indices)
        sizes = [len(part) for part in split(indices, self.plan.config.max_physical_batch_size)]
        for micro, n in zip(self._loader(indices), sizes, strict=True):
            self._check_once(batch, loss_fn)
            tape = Tape(self.model, self.layers)
            with torch.enable_grad(), restored_buffers(self.model), tape:
                losses = _losses(loss_fn, self.model, _to(micro, device))
            check_losses(losses, n)
            norms.append(summer.add(tape.backward(losses), n).norms.detach())
        return summer.result(), torch.cat([x.to(norms[-1]) for x in norms])

    def _check_once(self, batch: Batch, loss_fn: LossFn) -> None:
        """Before the first release: does the tape agree with plain autograd on two examples of this batch?"""
        if not self._verify:
            return
        device = next(iter(self._parameters.values())).device
        few = batch.indices[:2]
        rows = Rows(self._dataset)
        held = {k: rows[int(i)] for k, i in enumerate(few)}  # fetched once: augmentation may be random

        def batch_of(*chosen: int) -> Any:
            return _to(collate(held, np.array(chosen), self._collate_fn), device)

        singles = [batch_of(i) for i in range(len(few))]
        with torch.enable_grad(), restored_buffers(self.model), torch.random.fork_rng(devices=[]):
            check_per_example_gradients(self.model, self.layers, _wrapped(loss_fn), batch_of(*range(len(few))), singles)
            if len(few) == 2:
                check_mode(self.model, self.layers, _wrapped(loss_fn), batch_of(0, 1), batch_of(0, 0))
        self._verify = len(few) < 2  # one example alone cannot show whether examples are mixed

    # -- the preconditioner --------------------------------------------------------------------------------------------

    @property
    def _metric(self) -> Metric:
        return {} if self.preconditioner is None else self.preconditioner.metric

    def _refresh(self) -> None:
        """Rebuild the metric when its interval has passed: a function of probes, released weights and the step only."""
        kfac: Any = self.plan.config.preconditioner
        if kfac is None or not (self.preconditioner is None or kfac.due(self._step)):
            return
        if self.preconditioner is not None and self.preconditioner.step == self._step:
            return
        rules = {layer.name: layer.rule for layer in self.layers}
        self.preconditioner = kfac.build(
            self.model, lambda model, loss: capture(model, self.layers, loss), self._step, rules=rules
        )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _apply(self, released: Released) -> None:
        """Hand a release, and only a release, to the optimizer."""
        before = {n: _trace(p) for n, p in self._parameters.items()} if self._first else {}
        self.optimizer.zero_grad(set_to_none=True)  # a gradient left on a frozen parameter is nobody's release
        for name, parameter in self._parameters.items():
            parameter.grad = released.gradients[name].to(parameter.dtype)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if self._first:
            self._first = False
            self._check_moved(before)

    def _check_moved(self, before: dict[str, tuple[int, Tensor]]) -> None:
        """Every parameter was written to, or at least changed (some optimizers write behind the version counter)."""
        rates = {p: g.get("lr", 1.0) for g in self.optimizer.param_groups for p in g["params"]}
        for name, parameter in self._parameters.items():
            version, values = before[name]
            still = parameter._version == version and torch.equal(values, _trace(parameter)[1])
            if still and rates[parameter] > 0 and self.plan.noise_multiplier > 0:
                raise RuntimeError(
                    f"parameter '{name}' did not move in the first step although its learning rate is {rates[parameter]}: "
                    "the optimizer holds another tensor than the model"
                )

    def _check_identity(self) -> None:
        for layer in self.layers:
            for role, full in layer.parameters.items():
                if layer.tensor(role) is not self._parameters[full]:
                    raise RuntimeError(
                        f"parameter '{full}' was replaced after the session was built; move, cast or adapt the model before "
                        "creating the optimizer and the session"
                    )
                if not self._parameters[full].requires_grad:
                    raise RuntimeError(
                        f"parameter '{full}' was frozen after the session was built; build a new session"
                    )

    # -- what was spent ------------------------------------------------------------------------------------------------

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

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint: released parameters, buffers, optimizer, metric and counters; never a noise stream.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        optimizer_tensors, optimizer_rest = checkpoint.flatten_optimizer(self.optimizer)
        tensors = {"model": checkpoint.unique_tensors(self.model.state_dict()), "optimizer": optimizer_tensors}
        if self.preconditioner is not None:
            tensors["preconditioner"] = self.preconditioner.state_dict()
        meta = {
            "plan": self.plan.hash,
            "step": self._step,
            "ledger_count": self._ledger.count,
            "ledger_head": self._ledger.head,
            "optimizer": optimizer_rest,
            "preconditioner_step": None if self.preconditioner is None else self.preconditioner.step,
        }
        self._ranks.from_first(lambda: checkpoint.write(folder, tensors, meta))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint of the same plan and ledger, with a fresh noise stream.

        Releases that the ledger holds beyond the checkpoint stay charged: their steps are not given back.

        Raises:
            CheckpointError: damaged, of another plan, model or ledger; nothing is loaded then.
        """
        tensors, meta = checkpoint.read(folder)
        if meta["plan"] != self.plan.hash:
            raise checkpoint.CheckpointError(
                f"the checkpoint {Path(folder)} belongs to plan {meta['plan'][:12]}…, this is plan {self.plan.hash[:12]}…; "
                "resume with the configuration that wrote it"
            )
        if not self._ranks.from_first(lambda: self._ledger.contains(meta["ledger_count"], meta["ledger_head"])):
            raise checkpoint.CheckpointError(
                f"the ledger does not contain the {meta['ledger_count']} releases that the checkpoint {Path(folder)} was "
                "written after; resume with the ledger of the same run"
            )
        checkpoint.check_same_tensors(checkpoint.unique_tensors(self.model.state_dict()), tensors["model"])
        preconditioner = self._loaded(tensors["preconditioner"]) if "preconditioner" in tensors else None
        checkpoint.unflatten_optimizer(self.optimizer, tensors["optimizer"], meta["optimizer"])
        self.model.load_state_dict(tensors["model"], strict=False)
        self.preconditioner = preconditioner
        self._step, self._pending = meta["step"], None

    def _loaded(self, state: dict[str, Tensor]) -> Preconditioner:
        device = next(iter(self._parameters.values())).device
        preconditioner = Preconditioner.from_state_dict(state).to(device)
        preconditioner.check(
            {layer.name: {r: layer.tensor(r).shape for r in layer.parameters} for layer in self.layers}
        )
        return preconditioner

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the ledger and the loader; the session cannot step afterwards."""
        self._ledger.close()
        self._loader.close()

    def __enter__(self) -> Session:
        """The session itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the session."""
        self.close()


def _trace(parameter: Tensor) -> tuple[int, Tensor]:
    """What tells whether a parameter has been written to: its version and its first entries."""
    return parameter._version, parameter.detach().flatten()[:16].clone()


def _open_ledger(plan: Plan, path: str | os.PathLike[str] | None) -> Ledger:
    header = {"certified": plan.certified, "rng": "repeatable" if plan.test_mode else "secure"}
    if path is None:
        return Ledger.in_memory(plan.hash, header, plan.steps)
    return Ledger.open(path, plan.hash, header, plan.steps)


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if p not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold trainable parameter '{missing[0]}'; pass it to the optimizer or freeze it with "
            "requires_grad_(False)"
        )
    foreign = [p for p in held if p.requires_grad and not any(p is q for q in parameters.values())]
    if foreign:
        raise ValueError(
            f"the optimizer holds a trainable parameter of shape {tuple(foreign[0].shape)} that is not in the model; the "
            "session would never give it a private gradient"
        )


def _wrapped(loss_fn: LossFn) -> LossFn:
    return lambda model, batch: _losses(loss_fn, model, batch)


def _losses(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    try:
        return loss_fn(model, batch)
    except IndexError as error:
        raise ValueError(
            f"loss_fn failed on a batch: {error}. A label or token id is outside the range the model was built for."
        ) from error


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)
