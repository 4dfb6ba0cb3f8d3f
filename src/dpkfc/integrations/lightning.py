"""Train privately in a Lightning Trainer.

A module gives its loss per example, and a callback owns the session.

    class Net(PrivateModule):
        def per_example_loss(self, batch): ...          # [B], instead of training_step
        def configure_optimizers(self): ...

    private = PrivateTraining(plan, train_set, ledger_path="ledger.jsonl")
    L.Trainer(max_epochs=-1, callbacks=[private]).fit(Net(), val_dataloaders=val_loader)

Every training step is one logical batch: drawn, clipped, noised, charged and stepped by the
session. Validation, loggers, checkpoints, early stopping, `max_steps` and `limit_train_batches` are
Lightning's. Learning rate schedules are stepped at their `interval`, where a step is a release.
Logged is ε; what the module logs while it trains must be marked, "(NOT private)" or "(public)".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan, check_plan
from dpkfc.data.duplicates import check_held_out
from dpkfc.data.missing_values import warn_of_missing_values
from dpkfc.gradients.loss_state import own_variables
from dpkfc.integrations._shared import (
    CardWriter,
    refuse_unreleased_steps,
    steps_per_epoch,
    write_summary,
)
from dpkfc.session import Session

# --------------------------------------------------------------------------------------------------
# The LightningModule of a private fit, and what a Trainer may not do with it.

MARK, PUBLIC = "(NOT private)", "(public)"
# Methods of a LightningModule that never see a batch, a loss or a step of the session.
_UNCALLED = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "backward",
    "on_before_backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
    "lr_scheduler_step",
)


class PrivateModule(pl.LightningModule):
    """A LightningModule that trains only through the session of a `PrivateTraining` callback.

    Write `per_example_loss` in place of `training_step`; everything else is as in any
    LightningModule, whose parameters and state_dict keys stay as they are.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name in ("training_step", "train_dataloader"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} must not define {name}, since the session makes batches and"
                    " steps; "
                    "define per_example_loss(batch) and give the dataset to PrivateTraining"
                )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.automatic_optimization = False
        self._in_release = False

    def per_example_loss(self, batch: Any) -> Tensor:
        """Return one loss per example `[B]` of a batch.

        Raises:
            NotImplementedError: not defined.
        """
        raise NotImplementedError(
            f"define {type(self).__name__}.per_example_loss(batch), which returns one loss per"
            " example"
        )

    def log(self, name: str, *args: Any, **settings: Any) -> None:
        """Log a value as `LightningModule` does, as private while training.

        The name of the value can say that it is public.

        Raises:
            ValueError: a name without a mark, in `per_example_loss` or a hook of the training;
                there "(public)" is a mark too.
        """
        trainer = self._trainer
        is_training = trainer is not None and trainer.training
        if self._in_release and not name.endswith(MARK):
            raise ValueError(
                f"per_example_loss logs '{name}', a private value that ε does not cover; leave it"
                f" out, or call it '{name} {MARK}'"
            )
        if is_training and not name.endswith((MARK, PUBLIC)):
            raise ValueError(
                f"'{name}' is logged while training; call it '{name} {MARK}', or"
                f" '{name} {PUBLIC}' if it depends on released values alone"
            )

        super().log(name, *args, **settings)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make one release of the session; what it logs is a value of private examples."""
        self._in_release = True
        try:
            self._private.step(self, batch)
        finally:
            self._in_release = False

    def train_dataloader(self) -> Any:
        """Return the numbers of the steps of a pass; a batch is drawn when its step begins."""
        return range(self._private.steps_per_epoch)

    @property
    def _private(self) -> PrivateTraining:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PrivateTraining):
                return callback
        raise RuntimeError(
            f"{type(self).__name__} has no plan; add PrivateTraining(plan, dataset) to"
            " Trainer(callbacks="
            "[...]). A search for a learning rate removes callbacks; leave it out"
        )


def check_trainer(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse a setting that does not go with a private fit."""
    kind: Any = type(module)
    name = kind.__name__
    if sum(isinstance(callback, PrivateTraining) for callback in trainer.callbacks) > 1:
        raise ValueError(
            "there are several PrivateTraining callbacks; a fit has one plan and one ledger, leave "
            "one"
        )
    if not isinstance(module, PrivateModule):
        raise ValueError(
            f"{name} has a training_step of its own, whose loss is of a whole batch; derive"
            " it from PrivateModule and define per_example_loss(batch) -> [B] instead"
        )
    if kind.per_example_loss is PrivateModule.per_example_loss:
        raise ValueError(
            f"{name} does not define per_example_loss(batch), which returns one loss per example"
        )
    for own in ("training_step", "train_dataloader", *_UNCALLED):
        if own in vars(module) or getattr(kind, own) is not getattr(PrivateModule, own):
            raise ValueError(
                f"{name} has a {own} of its own, which a private fit would not call; leave it"
                " to PrivateModule, which calls per_example_loss(batch) alone"
            )
    if module.automatic_optimization:
        raise ValueError(
            f"{name}.automatic_optimization is True: the Trainer would step the optimizer without"
            " noise; leave it False, as PrivateModule sets it"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ValueError(
            f"the Trainer runs {trainer.world_size} processes under"
            f" {type(trainer.strategy).__name__}; use devices=1 (a Session "
            "shares a batch over the ranks of a torch process group by itself)"
        )
    if str(trainer.precision).startswith("16"):
        raise ValueError(
            f"precision={trainer.precision!r} scales losses by a factor that follows overflows of"
            " private gradients; use 'bf16-mixed' or '32-true'"
        )
    _check_callbacks(trainer)
    if trainer.overfit_batches > 0:
        raise ValueError(
            "overfit_batches replaces the sampler that ε is computed for; leave it out"
        )


def _check_callbacks(trainer: Any) -> None:
    """Refuse a callback that decides by, or writes down, what is not private."""
    for callback in trainer.callbacks:
        for setting in ("monitor", "filename"):
            value = getattr(callback, setting, None)
            if MARK in str(value):
                raise ValueError(
                    f"{type(callback).__name__}({setting}={value!r:.40}) reads what private"
                    " examples give without noise; give it a metric of validation data, or leave "
                    "it out"
                )


def check_trainer_at_start(trainer: Any, releases: int) -> None:
    """Refuse optimizers and loaders that do not go with a private fit.

    Args:
        trainer: before its first step.
        releases: of the plan.
    """
    if len(trainer.optimizers) != 1:
        raise ValueError(
            "configure_optimizers must return one optimizer of all trainable parameters"
        )
    if any(
        isinstance(x.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        for x in trainer.lr_scheduler_configs
    ):
        raise ValueError(
            "ReduceLROnPlateau reads a metric; schedules are stepped on releases, choose another "
            "one"
        )
    least = max(
        trainer.min_steps or 0, (trainer.min_epochs or 0) * int(trainer.num_training_batches)
    )
    if least > releases:
        raise ValueError(
            f"min_steps or min_epochs ask for {least} steps but the noise was calibrated for"
            f" {releases} releases; leave them out, and set PrivacyConfig.steps"
        )


# --------------------------------------------------------------------------------------------------

_KEY = "dpkfc_session"


class PrivateTraining(CardWriter, pl.Callback):
    """Owns the session of a private fit.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        dataset: as of `Session`; `plan.dataset_size` examples (or units).
        ledger_path: file of the privacy ledger, next to which the end of a fit writes
            `privacy.json`; None keeps the ledger in memory, and such a run cannot be resumed or
            followed by another.
        settings: `collate_fn`, `num_workers`, `units`, `verify` and `budget` of `Session`.

    Attributes:
        session: of the fit, None before it.

    Guarantee:
        As in `Session`. The Trainer's own optimization is closed: automatic optimization is
        refused, and a step of the optimizer without a release is an error.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Any,
        *,
        ledger_path: StrPath | None = None,
        **settings: Any,
    ) -> None:
        check_plan(plan)
        self.plan = plan
        self.steps_per_epoch = steps_per_epoch(plan)
        self._dataset, self._ledger_path, self._settings = dataset, ledger_path, settings
        self._batches: Any = iter(())
        self._restored: dict[str, Tensor] | None = None

    # -- the fit -----------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what would train otherwise than through the session.

        Raises:
            ValueError: naming the fix.
        """
        if stage != "fit":
            return
        check_trainer(trainer, pl_module)
        if self._ledger_path is None and self.session is not None and self.session.steps_done:
            raise ValueError(
                f"this callback made {self.session.steps_done} releases in an earlier fit, with a"
                " ledger in memory; give PrivateTraining a ledger_path, and resume with ckpt_path="
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the session, from the beginning or from a checkpoint.

        Raises:
            ValueError: several optimizers, a schedule that reads a metric, more steps than the plan
                has, or a ledger that holds an earlier run.
            CheckpointError: the checkpoint is of another run or ledger.
        """
        check_trainer_at_start(trainer, self.plan.steps)
        warn_of_missing_values(stacklevel=2)
        self.on_validation_start(trainer, pl_module)
        plain: Any = trainer.optimizers[0]
        Path(self._ledger_path or "ledger").parent.mkdir(parents=True, exist_ok=True)
        session = self.session = Session(
            self.plan,
            pl_module,
            plain,
            self._dataset,
            # A ledger of an earlier run without its checkpoint is refused below.
            **{"ledger_path": self._ledger_path, **self._settings, "resume": True},
        )
        if self._restored is not None:
            with TemporaryDirectory() as folder:
                for name, content in self._restored.items():
                    content.cpu().numpy().tofile(Path(folder) / Path(name).name)
                session.restore(folder)
        elif session.steps_done:
            raise ValueError(
                f"the ledger {self._ledger_path} holds {session.steps_done} releases of an earlier"
                " run; continue with trainer.fit(ckpt_path=...), or choose another ledger_path"
            )
        session.optimizer = pl_module.optimizers()  # type: ignore[assignment]  # Lightning's own, which counts the steps
        refuse_unreleased_steps(session, plain)
        self._batches = session.batches()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse validation data of a fit that is, or holds, records of the private dataset.

        Raises:
            ValueError: naming the fix.
        """
        if trainer.state.fn == "fit":
            for loader in tree_leaves(trainer.val_dataloaders):
                check_held_out(getattr(loader, "dataset", None), self._dataset, "validation data")

    def step(self, module: PrivateModule, token: Any) -> None:
        """Make one release, and step every learning rate schedule that is due.

        Raises:
            BudgetExhausted: the plan has no release left.
            ValueError: a batch of another loader.
        """
        session = self.session
        if session is None or not isinstance(token, int):
            raise ValueError(
                "the session draws the batches; call trainer.fit(module) without train_dataloaders"
                " or datamodule, and give the dataset to PrivateTraining"
            )
        trainer: Any = module.trainer
        losses = _make_loss(module)
        batch: Any = next(self._batches, None)
        with torch.autocast(module.device.type, enabled=False):
            session.step(batch, losses)
        passes = trainer.current_epoch + 1 if trainer.is_last_batch else 0
        for config in trainer.lr_scheduler_configs:
            # A step of an interval is a release.
            count = session.steps_done if config.interval == "step" else passes
            if count and count % config.frequency == 0:
                config.scheduler.step()
        is_last = session.steps_done >= self.plan.steps
        every = trainer.log_every_n_steps
        if is_last or (every and session.steps_done % every == 0):
            pl.LightningModule.log(module, "epsilon", session.epsilon, prog_bar=True, batch_size=1)
        trainer.should_stop = trainer.should_stop or is_last

    # -- checkpoints -------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the session's checkpoint, file by file, into Lightning's."""
        if self.session is not None:
            with TemporaryDirectory() as folder:
                files = Path(folder) / "session"
                self.session.save(files)
                checkpoint[_KEY] = {
                    x.name: torch.from_numpy(np.fromfile(x, np.uint8))
                    for x in sorted(files.iterdir())
                }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the session's part until the session exists.

        Raises:
            ValueError: a fit would go on from a checkpoint of a run that was not private.
        """
        if trainer.state.fn != "fit":
            return
        if _KEY not in checkpoint:
            raise ValueError(
                "the checkpoint was not written by a private fit; load public weights with"
                " load_from_checkpoint() before the fit"
            )
        self._restored = checkpoint[_KEY]

    # -- the end -----------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the session."""
        self._close(pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the session; what was released stays in the ledger."""
        self._close(pl_module)

    def _close(self, module: Any) -> None:
        self._batches = iter(())
        self._restored = None
        if self.session is None:
            return
        if module.trainer.should_stop:
            # A callback has ended the fit by what was released, so ε is the plan's.
            self.session.forfeit_steps()
        self.session.close()
        if self._ledger_path is None:
            return
        logged = []
        for name in sorted(module.trainer.callback_metrics):
            if name != "epsilon" and not name.endswith(PUBLIC):
                is_marked = name.endswith(MARK)
                logged.append(
                    name if is_marked else f"{name}: logged by the module, not covered by the plan"
                )
        write_summary(Path(self._ledger_path).parent, self.session, self._ledger_path, logged)


def _make_loss(module: PrivateModule) -> Callable[[Any, Any], Tensor]:
    """Return the module's losses in the precision that the trainer has set."""
    trainer: Any = module.trainer
    device = module.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def losses(model: Any, batch: Any) -> Tensor:
        autocast = dtype is not None and model.training  # checks compare in full precision
        with (
            torch.autocast(device, dtype, enabled=autocast),
            own_variables(model.per_example_loss, model),
        ):
            return model.per_example_loss(trainer.precision_plugin.convert_input(batch))

    return losses
