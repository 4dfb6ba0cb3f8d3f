"""A `transformers.Trainer` whose training loop is a `Session`; the rest of the Trainer stays as it is.

    plan = PrivacyConfig(expected_batch_size=256, epochs=3).calibrate(epsilon=3.0, delta=1e-5, dataset_size=len(train))
    trainer = PrivateTrainer(model, TrainingArguments("out"), plan=plan, train_dataset=train, eval_dataset=test)
    trainer.train()

Sampling, clipping, noise and ledger are the session's. The Trainer's own step, in which a gradient of a batch would reach
the optimizer, is closed. Evaluation, metrics, callbacks, the learning rate schedule, `save_model` and adapters of peft work
as ever. Logged are ε, the number of releases and the learning rate; the training loss is computed from private data without
noise and is left out unless `log_private_loss=True`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import TrainOutput

from dpkfc.gradients.loss_state import isolated
from dpkfc.integrations._guard import refuse_gradient_hooks, refuse_unreleased_steps
from dpkfc.integrations._hf_arguments import check_arguments, check_overrides, check_settings, steps_per_epoch
from dpkfc.integrations._hf_closed import PRIVATE_LOSS, ClosedTrainer
from dpkfc.integrations._hf_losses import LossFn, ModelLoss, per_example_cross_entropy
from dpkfc.integrations._hf_opening import frozen_statistics, open_session, to_training
from dpkfc.plan import Plan
from dpkfc.session import Session

__all__ = ["PrivateTrainer", "per_example_cross_entropy"]


class PrivateTrainer(ClosedTrainer):
    """Trains a model under a plan; one trainer, one run.

    Args:
        model: a transformers model or any module that takes keywords, with adapters of peft or without. Batch, instance and
            spectral norms that are in eval mode stay in it: their statistics are frozen.
        args: training arguments; one that contradicts the plan, or would let private data out, is an error.
        plan: from `PrivacyConfig.calibrate`, for the examples (or units) of `train_dataset`.
        per_example_loss: maps (model, inputs) to one loss per example `[N]`; default: the cross-entropy of logits and
            labels, averaged over each example's own labelled positions.
        units: as of `Session`; a name is that of a column of `train_dataset`.
        ledger_path: file of the privacy ledger; default: `ledger.jsonl` in the output folder.
        log_private_loss: also log the mean training loss, which ε does NOT protect.
        settings: as of `transformers.Trainer`.

    Raises:
        ValueError: arguments that do not go with private training, naming each fix.

    Guarantee:
        That of `Session`: every step of the optimizer is one release, in the ledger before it exists.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: Plan,
        per_example_loss: LossFn | None = None,
        units: Any = None,
        ledger_path: str | os.PathLike[str] | None = None,
        log_private_loss: bool = False,
        **settings: Any,
    ) -> None:
        check_arguments(args, plan)
        check_settings(settings)
        check_overrides(type(self), ClosedTrainer, per_example_loss is not None)
        if hasattr(model, "_orig_mod"):
            raise ValueError("the model is compiled, and shows no calls of its layers; pass the plain module")
        self.frozen = frozen_statistics(model)  # stay so, while the rest is trained
        super().__init__(model, args, **settings)
        self.plan = plan
        self.units = self.train_dataset[units] if isinstance(units, str) else units
        default = ModelLoss(model, args.label_smoothing_factor) if per_example_loss is None else None
        self.default_loss, self._loss_fn = default, default if per_example_loss is None else isolated(per_example_loss)
        self.ledger_path = Path(ledger_path or Path(str(args.output_dir)) / "ledger.jsonl")
        self._losses: list[Tensor] | None = [] if log_private_loss else None
        self._private_loss = math.nan

    # -- the run -------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Make the releases that the plan has left.

        Args:
            resume_from_checkpoint: a folder, or True for the last one; releases made after it stay charged.
            trial: only None.
            ignore_keys_for_eval: as of `transformers.Trainer`.

        Returns:
            Steps and metrics; its training loss is NaN, since that is private.

        Raises:
            ValueError: a ledger of an earlier run without `resume_from_checkpoint`; a loss that the default is not.
            CheckpointError: a checkpoint of another run.
        """
        if trial is not None:
            self.hyperparameter_search()
        started, self.is_in_train = time.time(), True
        try:
            with open_session(self, resume_from_checkpoint) as session:
                guard = refuse_unreleased_steps(session)
                try:
                    self._run(session, ignore_keys_for_eval)
                finally:
                    guard.remove()
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                    self._load_best_model()
                self._event("on_train_end")
                self.write_summary(self.args.output_dir)
                metrics = {"train_runtime": time.time() - started, **self.spent()}
        finally:
            self.is_in_train = False
        return TrainOutput(self.state.global_step, math.nan, metrics)

    def _run(self, session: Session, ignore_keys: list[str] | None) -> None:
        """The loop over logical batches, with the events of a Trainer around each."""
        length = steps_per_epoch(self.plan)
        self._event("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate(ignore_keys=ignore_keys)
        for batch in session.batches():
            if self.state.global_step % length == 0:
                self._event("on_epoch_begin")
            self._event("on_step_begin")
            to_training(self)
            refuse_gradient_hooks(self.model)
            record = session.step(batch, self.per_example_loss)
            if self._losses and record.batch_size:  # those before are of the check of the first step
                self._private_loss = float(torch.cat(self._losses)[-record.batch_size :].mean())
                self._losses.clear()
            self.lr_scheduler.step()
            self.state.global_step = session.steps_done
            self.state.epoch = session.steps_done / length
            self._event("on_step_end")
            self._respond(ignore_keys)
            if self.state.global_step % length == 0 or self.state.global_step == self.plan.steps:
                self._event("on_epoch_end")
                self._respond(ignore_keys)
            if self.control.should_training_stop:
                break

    def _event(self, name: str) -> None:
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control)

    def _respond(self, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save where a callback has asked for it."""
        if self.control.should_log:
            shown = {} if self._losses is None else {PRIVATE_LOSS: self._private_loss}
            self.log({**self.spent(), "learning_rate": self.lr_scheduler.get_last_lr()[0], **shown})
        if self.control.should_evaluate:
            better = self._determine_best_metric(self.evaluate(ignore_keys=ignore_keys), None)
            if self.args.save_strategy == "best":
                self.control.should_save = better
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self._event("on_save")

    def per_example_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Losses `[N]` of a batch; autocast only where the model trains, so that checks compare in full precision."""
        with self.autocast_smart_context_manager() if model.training else nullcontext():
            losses = self._loss_fn(model, inputs)  # type: ignore[misc]
        if self._losses is not None:
            self._losses.append(losses.detach())
        return losses
