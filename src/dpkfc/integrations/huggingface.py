"""Train with a `transformers.Trainer` whose training loop is a `Session`.

    plan = PrivacyConfig(expected_batch_size=256, epochs=3).calibrate(
        epsilon=3.0, delta=1e-5, dataset_size=len(train)
    )
    trainer = PrivateTrainer(
        model, TrainingArguments("out"), plan=plan, train_dataset=train, eval_dataset=test
    )
    trainer.train()

The session samples, clips, adds noise and writes the ledger. The Trainer's own step is refused,
because it would pass the gradient of a batch to the optimizer. Evaluation, metrics, callbacks, the
learning rate schedule, `save_model` and adapters of peft work as usual. The logs hold ε, the number
of releases and the learning rate. The training loss is computed from private data without noise, so
it is logged only with `log_private_loss=True`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan, check_plan
from dpkfc.data.duplicates import check_held_out
from dpkfc.data.loading import Collate
from dpkfc.data.missing_values import warn_of_missing_values
from dpkfc.gradients.loss_state import make_stateless
from dpkfc.integrations._hf_checks import (
    check_arguments,
    check_kind,
    check_overrides,
    check_own_settings,
    check_schedule,
    check_settings,
    check_vocabulary,
)
from dpkfc.integrations._hf_loss import LossFn, ModelLoss, per_example_cross_entropy
from dpkfc.integrations._shared import (
    CardWriter,
    refuse_unreleased_steps,
    steps_per_epoch,
    write_summary,
)
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger_lines import LedgerError, parse
from dpkfc.public_rows.template import Attempts, find_template
from dpkfc.session import Session

__all__ = ["PrivateTrainer", "per_example_cross_entropy"]
_log = logging.getLogger(__name__)
PRIVATE_LOSS = "loss (NOT private)"


@dataclass(frozen=True)
class AsDict:
    """A collate function whose batches are plain dicts, so that parts can move to a device."""

    collate: Collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Return the batch of these examples.

        Raises:
            ValueError: the collate function makes no mapping.
        """
        # Some collate functions change the examples that they are given.
        copies = [dict(x) if isinstance(x, Mapping) else x for x in examples]
        batch = self.collate(copies)
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"data_collator returned a {type(batch).__name__}; it must return a dict of tensors"
            )
        return dict(batch)


def frozen_statistics(model: nn.Module) -> list[nn.Module]:
    """Return modules in eval mode whose training mode would change statistics.

    They are batch, instance and spectral norms.
    """
    frozen = []
    for module in model.modules():
        kinds = {type(x).__name__ for x in (module, *module._forward_pre_hooks.values())}
        has_statistics = isinstance(module, _NormBase) or kinds & {"_SpectralNorm", "SpectralNorm"}
        if has_statistics and not module.training:
            frozen.append(module)
    return frozen


def set_training_mode(trainer: PrivateTrainer) -> None:
    """Put the model into training mode, except modules with frozen statistics."""
    trainer.model.train()
    for module in trainer.frozen:
        module.eval()


def open_session(trainer: PrivateTrainer, resume: str | bool | None) -> Session:
    """Return the session of a run; set optimizer, schedule and state of the trainer.

    Args:
        trainer: one that has not begun its run.
        resume: folder of a checkpoint, True for the last one.

    Raises:
        ValueError: the ledger holds an earlier run, its checkpoint is missing, or the loss
            mixes examples.
        CheckpointError: a checkpoint of another run.
    """
    warn_of_missing_values(stacklevel=3)
    # The checks of loss and accounting take seconds.
    if trainer.ledger_path.exists():
        _check_ledger(trainer.ledger_path, trainer.plan, may_continue=bool(resume))
    folder: Any = resume or None
    if resume is True:
        folder = get_last_checkpoint(trainer.args.output_dir)
        if folder is None:
            raise ValueError(
                f"no checkpoint in {trainer.args.output_dir}; leave resume_from_checkpoint out, and"
                " where releases were made "
                "before the first checkpoint begin anew in another output_dir"
            )
    # The loader has the collate function, and the dataset without unused columns.
    loader: Any = trainer.get_train_dataloader()
    collate = trainer.make_collate(loader.collate_fn)
    # Saves memory if most layers are frozen, as with adapters. The second name is the older one.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if vars(trainer.args).get(name):
            getattr(trainer.model, f"{name}_enable")()
            break
    _verify_default_loss(trainer, loader.dataset, collate)
    trainer.create_optimizer_and_scheduler(num_training_steps=trainer.plan.steps)
    check_schedule(trainer.optimizer, trainer.lr_scheduler)
    trainer.ledger_path.parent.mkdir(parents=True, exist_ok=True)
    session = trainer.session = Session(
        trainer.plan,
        trainer.model,
        trainer.optimizer,
        loader.dataset,
        units=trainer.units,
        ledger_path=trainer.ledger_path,
        collate_fn=collate,
        num_workers=trainer.args.dataloader_num_workers,
        budget=trainer.budget,
        # `_begin` refuses a ledger of an earlier run without a checkpoint.
        resume=True,
    )
    try:
        _begin(trainer, session, folder)
    except BaseException:
        session.close()
        raise
    return session


def _check_ledger(path: Path, plan: Plan, *, may_continue: bool) -> None:
    """Refuse the ledger of an earlier run, unless this run continues it."""
    try:
        state = parse(path.read_bytes(), str(path))
    except (LedgerError, OSError):
        return  # The session says what is wrong.
    if state.header["plan_hash"] != plan.hash:
        raise ValueError(
            f"{path} is the ledger of a run with other settings: choose another output_dir, or"
            " give its settings and resume_from_checkpoint=True"
        )
    if not may_continue:
        _refuse_releases(path, len(state.releases))


def _refuse_releases(path: Path, releases: int) -> None:
    if releases:
        raise ValueError(
            f"the ledger {path} holds {releases} releases of an earlier run; continue with"
            " resume_from_checkpoint=True, or choose another output_dir"
        )


def _verify_default_loss(trainer: PrivateTrainer, dataset: Any, collate: Collate) -> None:
    """Check on public rows that the default loss is the model's own."""
    if isinstance(trainer.default_loss, ModelLoss):
        trainer.model.eval()
        attempts = find_template(dataset).attempts(collate, trainer.args.device)
        trainer.default_loss.check_against_model(
            trainer.model, (trainer._prepare_inputs(single) for single in _singles_of(attempts))
        )
    set_training_mode(trainer)


def _singles_of(attempts: Attempts) -> Iterator[dict[str, Any]]:
    """Yield batches of one public example."""
    for attempt in attempts:
        rows = attempt(8)
        for i in range(len(rows)):
            yield rows.batch([i])


def _begin(trainer: PrivateTrainer, session: Session, folder: str | None) -> None:
    """Set the state that callbacks read; restore the checkpoint in `folder` if it is not None."""
    if folder is None:
        _refuse_releases(trainer.ledger_path, session.steps_done)
    handler = trainer.callback_handler
    plan = trainer.plan
    exported = [x for x in [*handler.callbacks, trainer.control] if isinstance(x, ExportableState)]
    trainer.state = TrainerState(stateful_callbacks=exported)  # type: ignore[arg-type]
    if folder is not None:
        extra = session.restore(os.path.join(folder, "session"))
        trainer.state = TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))
        trainer._load_callback_state()
        trainer.lr_scheduler.load_state_dict(extra["scheduler"])
        for _ in range(session.steps_done - extra["releases"]):  # lost with the crash, but spent
            trainer.lr_scheduler.step()
    epoch = steps_per_epoch(plan)
    epochs = trainer.args.num_train_epochs
    # Only the default number of epochs can differ from the plan here.
    if trainer.args.max_steps <= 0 and round(epochs * epoch) != plan.steps:
        _log.warning(
            "the plan makes %d releases, about %.3g passes over the data; num_train_epochs=%g"
            " plays no part",
            plan.steps,
            plan.steps / epoch,
            epochs,
        )
    trainer.state.compute_steps(trainer.args, plan.steps)
    trainer.state.init_training_references(trainer, plan.steps, math.ceil(plan.steps / epoch), None)
    trainer.state.global_step = session.steps_done
    handler.model = trainer.model
    handler.optimizer = trainer.optimizer
    handler.lr_scheduler = trainer.lr_scheduler


class PrivateTrainer(CardWriter, Trainer):
    """Trains a model under a plan; one trainer, one run.

    Args:
        model: a transformers model or any module that takes keywords, with adapters of peft or
            without. Batch, instance and spectral norms that are in eval mode stay in it: their
            statistics are frozen.
        args: training arguments; one that contradicts the plan, or would let private data out, is
            an error.
        plan: from `PrivacyConfig.calibrate`, for the examples (or units) of `train_dataset`.
        per_example_loss: maps (model, inputs) to one loss per example `[N]`; default: the
            cross-entropy of logits and labels, averaged over each example's own labelled positions.
        units: as of `Session`; a name is a column of `train_dataset`.
        ledger_path: file of the privacy ledger; default: `ledger.jsonl` in the output folder.
        budget: of the people in the dataset; the whole plan is charged to it.
        log_private_loss: also log the mean training loss, which ε does NOT protect.
        settings: as of `transformers.Trainer`.

    Attributes:
        session: of the run, None before it.
        ledger_path: file of its ledger.

    Raises:
        ValueError: arguments that do not go with private training, naming each fix.

    Guarantee:
        As in `Session`: every step of the optimizer is one release, in the ledger before it exists.
    """

    host: ClassVar[type[Trainer]] = Trainer
    """The trainer whose loop the session takes over."""
    host_arguments: ClassVar[type[TrainingArguments]] = TrainingArguments

    model: Any  # The Trainer sets these four, without types.
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: Plan,
        per_example_loss: LossFn | None = None,
        units: Any = None,
        ledger_path: StrPath | None = None,
        budget: Budget | None = None,
        log_private_loss: bool = False,
        **settings: Any,
    ) -> None:
        check_plan(plan)
        has_loss = per_example_loss is not None
        check_kind(args, self.host_arguments)
        check_arguments(args, plan, has_loss)
        check_own_settings(args, self.host_arguments)
        check_settings(settings)
        held_out = settings.get("eval_dataset")
        named = {"eval_dataset": held_out}
        if isinstance(held_out, dict):
            named = {f"eval_dataset['{name}']": dataset for name, dataset in held_out.items()}
        for name, dataset in named.items():
            check_held_out(dataset, settings.get("train_dataset"), name)
        check_overrides(type(self), PrivateTrainer, has_loss, model)
        check_vocabulary(model, settings)
        super().__init__(model, args=args, **settings)
        self.frozen = frozen_statistics(self.model)  # stay so, while the rest is trained
        self.plan = plan
        self.units = self.train_dataset[units] if isinstance(units, str) else units
        self.default_loss: LossFn | None = None
        if per_example_loss is None:
            self.default_loss = self.make_default_loss()
            self._loss_fn: Any = self.default_loss
        else:
            self._loss_fn = make_stateless(per_example_loss)
        self.ledger_path = Path(ledger_path or Path(str(args.output_dir)) / "ledger.jsonl")
        self.budget = budget
        self._losses: list[Tensor] | None = [] if log_private_loss else None
        self._private_loss = math.nan

    def make_default_loss(self) -> LossFn:
        """Return the losses of a batch that the model's own loss is the mean of."""
        return ModelLoss(self.model, self.args.label_smoothing_factor)

    def make_collate(self, collate: Collate) -> Collate:
        """Return the collate function of the training examples, from the Trainer's own."""
        return AsDict(collate)

    # -- the run -----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Make the releases that the plan has left.

        Args:
            resume_from_checkpoint: a folder, or True for the last one; releases made after it stay
                charged.
            trial: only None.
            ignore_keys_for_eval: as of `transformers.Trainer`.

        Returns:
            Steps and metrics; its training loss is NaN, since that is private.

        Raises:
            ValueError: the ledger holds an earlier run and `resume_from_checkpoint` is missing, or
                the model's own loss is not the default one.
            CheckpointError: a checkpoint of another run.
        """
        if trial is not None:
            self.hyperparameter_search()
        started = time.time()
        self.is_in_train = True
        try:
            with open_session(self, resume_from_checkpoint) as session:
                with (
                    refuse_unreleased_steps(session),
                    session.optimizer.register_step_pre_hook(
                        lambda *_: self._event("on_pre_optimizer_step")
                    ),
                ):
                    self._run(session, ignore_keys_for_eval)
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                    self._load_best_model()
                    # The weights of an earlier release, which were saved then.
                    session.accept_weights()
                self._event("on_train_end")
                self.write_summary(self.args.output_dir)
                metrics = {"train_runtime": time.time() - started, **self.report_budget()}
        finally:
            self.is_in_train = False
        return TrainOutput(self.state.global_step, math.nan, metrics)

    def _run(self, session: Session, ignore_keys: list[str] | None) -> None:
        """Loop over the logical batches, with the events of a Trainer around each."""
        length = steps_per_epoch(self.plan)
        self._event("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate(ignore_keys=ignore_keys)
        for batch in session.batches():
            if self.state.global_step % length == 0:
                self._event("on_epoch_begin")
            self._event("on_step_begin")
            set_training_mode(self)
            record = session.step(batch, self.per_example_loss)
            self._event("on_optimizer_step")
            # Earlier losses belong to the check before the first step.
            if self._losses and record.batch_size:
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
                # What was released may have decided it, so ε is the plan's.
                session.forfeit_steps()
                break

    def _event(self, name: str) -> None:
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control)

    def _respond(self, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save if a callback has asked for it."""
        if self.control.should_log:
            shown = {} if self._losses is None else {PRIVATE_LOSS: self._private_loss}
            self.log(
                {
                    **self.report_budget(),
                    "learning_rate": self.lr_scheduler.get_last_lr()[0],
                    **shown,
                }
            )
        if self.control.should_evaluate:
            better = self._determine_best_metric(self.evaluate(ignore_keys=ignore_keys), None)
            if self.args.save_strategy == "best":
                self.control.should_save = better
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self._event("on_save")

    def per_example_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses `[N]` of a batch.

        Autocast is on only in training mode, so that checks compare in full precision.
        """
        with self.autocast_smart_context_manager() if model.training else nullcontext():
            losses: Tensor = self._loss_fn(model, inputs)
        if self._losses is not None:
            self._losses.append(losses.detach())
        return losses

    # -- methods that are refused or restricted ----------------------------------------------------

    def training_step(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to step without noise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the Trainer's own training step would hand the gradient of a batch to the optimizer"
            " without noise; call train()"
        )

    _inner_training_loop = training_step

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to search: every trial is a run on the private data.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "every trial of a search spends a budget of its own; plan and train each run by itself"
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's loader for data that was not trained on.

        Raises:
            ValueError: the train_dataset or a part of it, whose metrics would be logged without
                noise.
        """
        held_out: Any = eval_dataset
        if eval_dataset is None:
            held_out = self.eval_dataset
        elif isinstance(eval_dataset, str):
            held_out = self.eval_dataset[eval_dataset]  # type: ignore[index]
        check_held_out(held_out, self.train_dataset, "eval_dataset")
        return super().get_eval_dataloader(eval_dataset)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """Return autocast of the forward pass if `bf16=True`."""
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)

    def _build_accelerator_args(self, **others: Any) -> dict[str, Any]:
        """Turn off mixed precision in Accelerate, which would replace `model.forward`."""
        return {**super()._build_accelerator_args(**others), "mixed_precision": "no"}

    def _save_rng_state(self, output_dir: str) -> None:
        """Save no random state: a restored stream on other batches could reveal private data."""

    # -- reports and checkpoints -------------------------------------------------------------------

    def report_budget(self) -> dict[str, float]:
        """Return ε and the number of releases so far."""
        session = self.session
        if session is None:
            return {}
        return {"epsilon": session.epsilon, "releases": session.steps_done}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the released weights for `from_pretrained`, and `privacy.json` next to them."""
        self.write_summary(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def write_summary(self, folder: str | None) -> None:
        """Write `privacy.json`: the spent budget, the plan and the ledger."""
        if self.session is not None and folder is not None:
            write_summary(folder, self.session, self.ledger_path, self._list_unprotected())

    def _list_unprotected(self) -> list[str]:
        """Return the logged values, also of resumed runs, that ε does not cover."""
        names = {name for row in self.state.log_history for name in row}
        uncovered = []
        if PRIVATE_LOSS in names:
            uncovered.append(f"{PRIVATE_LOSS}, in logs and trainer_state.json")
        if any(name.startswith("eval_") for name in names):
            uncovered.append(
                "eval_*, in logs and trainer_state.json: of eval_dataset, which the plan does not"
                " cover"
            )
        return uncovered

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.session is not None
        extra = {"scheduler": self.lr_scheduler.state_dict(), "releases": self.session.steps_done}
        self.session.save(os.path.join(output_dir, "session"), extra)
