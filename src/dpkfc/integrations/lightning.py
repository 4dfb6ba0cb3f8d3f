"""Private training in a Lightning Trainer: a module that says its loss per example, and a callback that owns the session.

    class Net(PrivateModule):
        def per_example_loss(self, batch): ...          # [B], instead of training_step
        def configure_optimizers(self): ...

    private = PrivateTraining(plan, train_set, ledger_path="ledger.jsonl")
    L.Trainer(max_epochs=-1, callbacks=[private]).fit(Net(), val_dataloaders=val_loader)

Every training step is one logical batch: drawn, clipped, noised, charged and stepped by the session. Validation, loggers,
checkpoints, early stopping, `max_steps` and `limit_train_batches` are Lightning's. Learning rate schedules are stepped at
their `interval`, where a step is a release. Logged is ε; what the module logs while it trains must be marked, "(NOT private)" or
"(public)".
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

from dpkfc.gradients.loss_state import forgotten
from dpkfc.integrations._guard import refuse_gradient_hooks, refuse_unreleased_steps
from dpkfc.integrations._lightning_module import MARK, PUBLIC, PrivateModule, refused, refused_at_start, step_schedules
from dpkfc.integrations._summary import write_summary
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.session import Session

__all__ = ["PrivateModule", "PrivateTraining"]

_KEY = "dpkfc_session"


class PrivateTraining(pl.Callback):
    """Owns the session of a private fit.

    Args:
        plan: from `PrivacyConfig.calibrate`.
        dataset: as of `Session`; `plan.dataset_size` examples (or units).
        ledger_path: file of the privacy ledger, beside which the end of a fit writes `privacy.json`; None keeps the ledger
            in memory, and such a run cannot be resumed or followed by another.
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
        if self._ledger_path is None and self.session is not None and self.session.steps_done:
            raise ValueError(
                f"this callback made {self.session.steps_done} releases in an earlier fit, with a ledger in memory; a second "
                "fit would spend a second budget. Give PrivateTraining a ledger_path, and resume with ckpt_path="
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the session, from the beginning or from a checkpoint.

        Raises:
            ValueError: several optimizers, a schedule that reads a metric, more steps than the plan has, or a ledger that
                holds an earlier run.
            CheckpointError: the checkpoint is of another run or ledger.
        """
        for applies, message in refused_at_start(trainer, self.plan.steps):
            if applies:
                raise ValueError(message)
        plain: Any = trainer.optimizers[0]
        Path(self._ledger_path or "ledger").parent.mkdir(parents=True, exist_ok=True)
        more: dict[str, Any] = {"ledger_path": self._ledger_path, **self._settings}
        session = self.session = Session(self.plan, pl_module, plain, self._dataset, **more)
        if self._restored is not None:
            _restore(session, self._restored)
        elif session.steps_done:
            raise ValueError(
                f"the ledger {self._ledger_path} holds {session.steps_done} releases of an earlier run; continue it with "
                "trainer.fit(ckpt_path=...), or choose another ledger_path for a run with a budget of its own"
            )
        session.optimizer = pl_module.optimizers()  # type: ignore[assignment]  # Lightning's own, which counts the steps
        refuse_unreleased_steps(session, plain)
        self._batches = session.batches()

    def step(self, module: PrivateModule, token: Any) -> None:
        """One release, and a step of every learning rate schedule that is due.

        Raises:
            BudgetExhausted: the plan has no release left.
            ValueError: a batch of another loader.
        """
        session = self.session
        if session is None or not isinstance(token, int):
            raise ValueError(
                "the session draws the batches: call trainer.fit(module) without train_dataloaders or datamodule (its "
                "val_dataloader() goes to val_dataloaders=) and give the dataset to PrivateTraining"
            )
        if session.steps_done >= self.plan.steps:
            raise BudgetExhausted(f"all {self.plan.steps} releases of the plan are spent; nothing is left to train")
        refuse_gradient_hooks(module)
        trainer: Any = module.trainer
        device = module.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

        def losses(model: Any, batch: Any) -> Tensor:
            autocast = dtype is not None and model.training  # checks compare in full precision
            with torch.autocast(device, dtype, enabled=autocast), forgotten(model.per_example_loss, model):
                return model.per_example_loss(trainer.precision_plugin.convert_input(batch))

        with torch.autocast(device, enabled=False), module.in_release():
            session.step(next(self._batches), losses)
        step_schedules(trainer, session.steps_done)
        last = session.steps_done >= self.plan.steps
        if last or (trainer.log_every_n_steps and session.steps_done % trainer.log_every_n_steps == 0):
            pl.LightningModule.log(module, "epsilon", session.epsilon, prog_bar=True, batch_size=1)
        trainer.should_stop = trainer.should_stop or last

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the session's checkpoint, file by file, into Lightning's."""
        if self.session is not None:
            with TemporaryDirectory() as folder:
                files = Path(folder) / "session"
                self.session.save(files)
                checkpoint[_KEY] = {x.name: torch.from_numpy(np.fromfile(x, np.uint8)) for x in sorted(files.iterdir())}

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
                "the checkpoint was not written by a private fit; load public weights with load_from_checkpoint() before the fit"
            )
        self._restored = checkpoint[_KEY]

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the session."""
        self._close(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the session; what was released stays in the ledger."""
        self._close(pl_module)

    def _close(self, module: Any) -> None:
        if self.session is not None:
            self.session.close()
            if self._ledger_path is not None:
                names = sorted(x for x in module.trainer.callback_metrics if x != "epsilon" and not x.endswith(PUBLIC))
                logged = [
                    x if x.endswith(MARK) else f"{x}: logged by the module, not covered by the plan" for x in names
                ]
                write_summary(Path(self._ledger_path).parent, self.session, self._ledger_path, logged)
        self._batches, self._restored = iter(()), None


def _restore(session: Session, files: dict[str, Tensor]) -> None:
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            content.cpu().numpy().tofile(Path(folder) / Path(name).name)
        session.restore(folder)
