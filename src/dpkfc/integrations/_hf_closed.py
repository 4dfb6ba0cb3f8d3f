"""A `transformers.Trainer` without the parts that would train on gradients without noise, and what it leaves in a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import Trainer

from dpkfc.data.repeats import check_held_out
from dpkfc.integrations._summary import write_summary
from dpkfc.plan import Plan
from dpkfc.session import Session

__all__ = ["PRIVATE_LOSS", "ClosedTrainer"]

PRIVATE_LOSS = "loss (NOT private)"


class ClosedTrainer(Trainer):
    """A Trainer that evaluates, logs and saves, and whose own training step is an error.

    Attributes:
        plan: of the run.
        session: of the run, None before it.
        ledger_path: file of its ledger.
    """

    model: Any  # set by the Trainer, which leaves them open
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    plan: Plan
    session: Session | None = None
    ledger_path: Path
    _held_out: Sequence[Any] = ()  # data sets that were compared with the private one

    # -- closed --------------------------------------------------------------------------------------------------------

    def training_step(self, *_: Any, **__: Any) -> NoReturn:
        """Closed.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the Trainer's own training step would hand the gradient of a batch to the optimizer without noise; call train()"
        )

    _inner_training_loop = training_step

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Closed: every trial is a run on the private data.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("every trial of a search spends a budget of its own; plan and train each run by itself")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As of `transformers.Trainer`, for other data than was trained on.

        Raises:
            ValueError: the train_dataset or a part of it, whose metrics would be logged without noise.
        """
        used: Any = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        used = used[eval_dataset] if isinstance(eval_dataset, str) else used
        if used is not None and not any(used is x for x in self._held_out):
            check_held_out(used, self.train_dataset, "eval_dataset")
            self._held_out = [*self._held_out, used]
        return super().get_eval_dataloader(eval_dataset)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Autocast of the forward pass where `bf16=True`."""
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)

    def _build_accelerator_args(self, **others: Any) -> dict[str, Any]:
        """Accelerate would replace `model.forward` by one under autocast and scale losses; neither is left to it."""
        return {**super()._build_accelerator_args(**others), "mixed_precision": "no"}

    def _save_rng_state(self, output_dir: str) -> None:
        """No random state is kept: a stream that is restored and meets other batches gives something away."""

    def _save_scaler(self, output_dir: str) -> None:
        """There is none."""

    # -- what it leaves ------------------------------------------------------------------------------------------------

    def spent(self) -> dict[str, float]:
        """ε and the number of releases so far."""
        session = self.session
        return {} if session is None else {"epsilon": session.epsilon, "releases": session.steps_done}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the released weights for `from_pretrained`, and `privacy.json` beside them: what they cost."""
        self.write_summary(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def write_summary(self, folder: str | None) -> None:
        """Write `privacy.json`: what was spent, by which plan, recorded in which ledger."""
        if self.session is not None and folder is not None:
            write_summary(folder, self.session, self.ledger_path, self._not_private())

    def _not_private(self) -> list[str]:
        """What the logs hold, those of resumed runs included, that ε does not cover."""
        names = {name for row in self.state.log_history for name in row}
        found = [f"{PRIVATE_LOSS}, in logs and trainer_state.json"] if PRIVATE_LOSS in names else []
        if any(name.startswith("eval_") for name in names):
            found.append("eval_*, in logs and trainer_state.json: of eval_dataset, which the plan does not cover")
        return found

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.session is not None
        extra = {"scheduler": self.lr_scheduler.state_dict(), "releases": self.session.steps_done}
        self.session.save(os.path.join(output_dir, "session"), extra)
