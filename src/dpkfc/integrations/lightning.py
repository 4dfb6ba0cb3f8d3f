"""Private training in a Lightning Trainer: a module that says its loss per example, and a callback that owns the session.

    class Net(PrivateModule):
        def per_example_loss(self, batch): ...          # [B], instead of training_step
        def configure_optimizers(self): ...

    private = PrivateTraining(plan, train_set, ledger_path="ledger.jsonl")
    L.Trainer(max_epochs=-1, callbacks=[private]).fit(Net(), val_dataloaders=val_loader)

Every training step is one logical batch: drawn, clipped, noised, charged and stepped by the session. Validation, loggers,
checkpoints, early stopping, `max_steps` and `limit_train_batches` are Lightning's. Learning rate schedules are stepped once a
release. Logged is ε; whatever `per_example_loss` logs itself is private and not protected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from dpkfc.integrations._guard import refuse_unreleased_steps
from dpkfc.integrations._lightning_module import PrivateModule, refused
from dpkfc.plan import Plan
from dpkfc.session import Session

__all__ = ["PrivateModule", "PrivateTraining"]

_KEY = "dpkfc_session"


class PrivateTraining(pl.Callback):
    """Owns the session of a private fit.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        dataset: as of `Session`; `plan.dataset_size` examples (or units).
        ledger_path: file of the privacy ledger; None keeps it in memory, and such a run cannot be resumed.
        settings: `collate_fn`, `num_workers`, `units` and `verify` of `Session`.

    Attributes:
        session: of the fit, None before it.

    Guarantee:
        That of `Session`. The Trainer's own optimization is closed: automatic optimization is refused, and a step of the
        optimizer without a release is an error.
    """

    def __init__(
        self, plan: Plan, dataset: Any, *, ledger_path: str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        self.plan = plan
        self.session: Session | None = None
        self.steps_per_epoch = max(1, round(plan.dataset_size / plan.expected_batch_size))
        self._dataset, self._ledger_path, self._settings = dataset, ledger_path, settings
        self._batches: Iterator[Any] = iter(())
        self._restored: dict[str, Tensor] | None = None

    # -- the fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what would train otherwise than through the session.

        Raises:
            ValueError: naming the fix.
        """
        if stage != "fit":
            return
        for applies, message in refused(trainer, pl_module):
            if applies:
                raise ValueError(message)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the session, from the beginning or from a checkpoint.

        Raises:
            ValueError: several optimizers, a schedule that reads a metric, or a ledger that holds an earlier run.
            CheckpointError: the checkpoint is of another run or ledger.
        """
        optimizer = pl_module.optimizers()
        if isinstance(optimizer, list):
            raise ValueError("configure_optimizers must return one optimizer of all trainable parameters")
        if any(isinstance(x, torch.optim.lr_scheduler.ReduceLROnPlateau) for x in _schedules(trainer)):
            raise ValueError("ReduceLROnPlateau reads a metric; schedules are stepped on releases, choose another one")
        plain: Any = trainer.optimizers[0]
        session = Session(self.plan, pl_module, plain, self._dataset, ledger_path=self._ledger_path, **self._settings)
        self.session = session
        if self._restored is not None:
            _restore(session, self._restored)
        elif session.steps_done:
            raise ValueError(
                f"the ledger {self._ledger_path} holds {session.steps_done} releases of an earlier run; continue it with "
                "trainer.fit(ckpt_path=...), or choose another ledger_path for a run with a budget of its own"
            )
        session.optimizer = optimizer  # type: ignore[assignment]  # Lightning's own, which counts the steps
        refuse_unreleased_steps(session, plain)
        self._batches = session.batches()

    def step(self, module: PrivateModule, token: Any) -> None:
        """One release, and one step of every learning rate schedule.

        Raises:
            BudgetExhausted: the plan has no release left.
            ValueError: a batch of another loader.
        """
        session = self.session
        if session is None or not isinstance(token, int):
            raise ValueError(
                "the session draws the batches: call trainer.fit(module) without train_dataloaders and give the dataset to "
                "PrivateTraining"
            )
        device = module.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

        def losses(model: Any, batch: Any) -> Tensor:
            autocast = dtype is not None and model.training  # checks compare in full precision
            with torch.autocast(device, dtype, enabled=autocast):
                return model.per_example_loss(batch)

        with torch.autocast(device, enabled=False):
            session.step(next(self._batches), losses)
        trainer: Any = module.trainer
        for schedule in _schedules(trainer):
            schedule.step()
        last = session.steps_done >= self.plan.steps
        if last or session.steps_done % trainer.log_every_n_steps == 0:
            module.log("epsilon", session.epsilon, prog_bar=True, batch_size=1)
        trainer.should_stop = trainer.should_stop or last

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the session's checkpoint, file by file, into Lightning's."""
        if self.session is not None:
            with TemporaryDirectory() as folder:
                self.session.save(Path(folder) / "session")
                files = sorted((Path(folder) / "session").iterdir())
                checkpoint[_KEY] = {file.name: torch.from_numpy(np.fromfile(file, np.uint8)) for file in files}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the session's part until the session exists."""
        self._restored = checkpoint.get(_KEY)

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the session."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the session; what was released stays in the ledger."""
        self._close()

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
        self._batches = iter(())
        self._restored = None


def _schedules(trainer: pl.Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _restore(session: Session, files: dict[str, Tensor]) -> None:
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            content.cpu().numpy().tofile(Path(folder) / Path(name).name)
        session.restore(folder)
