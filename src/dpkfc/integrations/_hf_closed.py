"""A `transformers.Trainer` without the parts that would train on gradients without noise, and what it leaves in a folder."""

from __future__ import annotations

import json
import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import Trainer

from dpkfc.plan import Plan
from dpkfc.session import Session

__all__ = ["ClosedTrainer"]


class ClosedTrainer(Trainer):
    """A Trainer that evaluates, logs and saves, and whose own training step is an error.

    Attributes:
        plan: of the run.
        session: of the run, None before it.
        ledger_path: file of its ledger.
        not_private: what it writes that ε does not protect.
    """

    model: Any  # set by the Trainer, which leaves them open
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    plan: Plan
    session: Session | None = None
    ledger_path: Path
    not_private: tuple[str, ...] = ()

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
        session = self.session
        if session is None or folder is None:
            return
        epsilon = session.epsilon if math.isfinite(session.epsilon) else "inf"
        summary = {
            "spent": {"epsilon": epsilon, "delta": self.plan.delta},
            "ledger": {"file": self.ledger_path.name, "releases": session.steps_done, "head": session.ledger.head},
            "not_private": list(self.not_private),
            "plan": self.plan.describe(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "privacy.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.session is not None
        extra = {"scheduler": self.lr_scheduler.state_dict(), "releases": self.session.steps_done}
        self.session.save(os.path.join(output_dir, "session"), extra)
