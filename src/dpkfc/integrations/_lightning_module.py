"""The LightningModule of a private fit, and what a Trainer may not do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

if TYPE_CHECKING:
    from dpkfc.integrations.lightning import PrivateTraining

__all__ = ["MARK", "PUBLIC", "PrivateModule", "Steps", "refused", "refused_at_start", "step_schedules"]

MARK, PUBLIC = "(NOT private)", "(public)"


@dataclass(frozen=True)
class Steps:
    """Numbers of the steps of one pass; the batch itself is drawn when its step begins, never ahead of it."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class PrivateModule(pl.LightningModule):
    """A LightningModule that trains only through the session of a `PrivateTraining` callback.

    Write `per_example_loss` in place of `training_step`; everything else is as in any LightningModule, whose parameters and
    state_dict keys stay as they are.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name in ("training_step", "train_dataloader"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} must not define {name}: the loss of a whole batch cannot be clipped for each example, and "
                    "the session draws the batches. Define per_example_loss(batch) and give the dataset to PrivateTraining"
                )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.automatic_optimization = False
        self._in_release = False

    def per_example_loss(self, batch: Any) -> Tensor:
        """One loss per example `[B]` of a batch.

        Raises:
            NotImplementedError: not defined.
        """
        raise NotImplementedError(
            f"define {type(self).__name__}.per_example_loss(batch), which returns one loss per example"
        )

    def log(self, name: str, *args: Any, **settings: Any) -> None:
        """As of `LightningModule`; what is logged while training is taken for private, unless its name says something else.

        Raises:
            ValueError: a name without a mark, in `per_example_loss` or a hook of the training; there "(public)" is a mark too.
        """
        trainer = self._trainer
        if self._in_release and not name.endswith(MARK):
            raise ValueError(
                f"per_example_loss logs '{name}', which is computed from private examples without noise: loggers and "
                f"checkpoints would hold it and ε would not cover it. Leave it out, or call it '{name} {MARK}'"
            )
        if trainer is not None and trainer.training and not name.endswith((MARK, PUBLIC)):
            raise ValueError(
                f"'{name}' is logged while training, where a meter that per_example_loss has filled would be private: call it "
                f"'{name} {MARK}', or '{name} {PUBLIC}' where it is made of released weights, learning rates and counts of steps "
                "alone. What validation hooks log needs no mark"
            )
        super().log(name, *args, **settings)

    @contextmanager
    def in_release(self) -> Iterator[None]:
        """While this is open, what is logged comes from private examples."""
        self._in_release = True
        try:
            yield
        finally:
            self._in_release = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One release of the session."""
        self._private.step(self, batch)

    def train_dataloader(self) -> Any:
        """The numbers of the steps of a pass."""
        return Steps(self._private.steps_per_epoch)

    @property
    def _private(self) -> PrivateTraining:
        from dpkfc.integrations.lightning import PrivateTraining

        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PrivateTraining):
                return callback
        raise RuntimeError(
            f"{type(self).__name__} trains under a plan; add PrivateTraining(plan, dataset) to Trainer(callbacks=[...]). A "
            "search for a learning rate or a batch size takes callbacks away, and would spend budget: leave it out"
        )


def refused(trainer: Any, module: pl.LightningModule) -> Iterator[tuple[bool, str]]:
    """What a private fit refuses: whether it applies, and the message with the fix."""
    from dpkfc.integrations.lightning import PrivateTraining

    name = type(module).__name__
    yield (
        sum(isinstance(callback, PrivateTraining) for callback in trainer.callbacks) > 1,
        "there are several PrivateTraining callbacks; a fit has one plan and one ledger, leave one",
    )
    yield (
        not isinstance(module, PrivateModule),
        f"{name} has a training_step of its own, whose loss of a whole batch cannot be clipped for each example; derive it from "
        "dpkfc.integrations.lightning.PrivateModule and define per_example_loss(batch) -> [B] instead",
    )
    yield (
        getattr(type(module), "per_example_loss", None) is PrivateModule.per_example_loss,
        f"{name} does not define per_example_loss(batch), which returns one loss per example",
    )
    for own in ("training_step", "train_dataloader"):
        yield (
            own in vars(module) or getattr(type(module), own, None) is not getattr(PrivateModule, own),
            f"{name} has a {own} of its own, from another base class or set on the object; leave it to PrivateModule and define "
            "per_example_loss(batch) -> [B]",
        )
    yield (
        module.automatic_optimization,
        f"{name}.automatic_optimization is True: the Trainer would step the optimizer without noise; leave it False, as "
        "PrivateModule sets it",
    )
    yield (
        trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy),
        f"the Trainer runs {trainer.world_size} processes under {type(trainer.strategy).__name__}; use devices=1 (a Session "
        "shares a batch over the ranks of a torch process group by itself)",
    )
    yield (
        str(trainer.precision).startswith("16"),
        f"precision={trainer.precision!r} scales losses by a factor that follows overflows of private gradients; use "
        "'bf16-mixed' or '32-true'",
    )
    yield from _refused_callbacks(trainer)
    yield trainer.overfit_batches > 0, "overfit_batches replaces the sampler that ε is computed for; leave it out"


def _refused_callbacks(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Callbacks that decide by, or write down, what is not private."""
    for callback in trainer.callbacks:
        for setting in ("monitor", "filename"):
            value = getattr(callback, setting, None)
            yield (
                MARK in str(value),
                f"{type(callback).__name__}({setting}={value!r}) reads what is computed from private examples without noise: "
                "when it stops, what it keeps and how it names it would tell of them, and ε does not cover that; give it a "
                "metric of validation data, or leave it out",
            )


def refused_at_start(trainer: Any, releases: int) -> Iterator[tuple[bool, str]]:
    """What can be refused only when optimizers and loaders exist: whether it applies, and the message with the fix.

    Args:
        trainer: before its first step.
        releases: of the plan.
    """
    yield len(trainer.optimizers) != 1, "configure_optimizers must return one optimizer of all trainable parameters"
    yield (
        any(isinstance(x.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) for x in trainer.lr_scheduler_configs),
        "ReduceLROnPlateau reads a metric; schedules are stepped on releases, choose another one",
    )
    least = max(trainer.min_steps or 0, (trainer.min_epochs or 0) * int(trainer.num_training_batches))
    yield (
        least > releases,
        f"min_steps or min_epochs ask for {least} steps but the noise was calibrated for {releases} releases; leave them out, "
        "and set PrivacyConfig.steps",
    )


def step_schedules(trainer: Any, releases: int) -> None:
    """Step every learning rate schedule whose `interval` and `frequency` say so, where a step is a release.

    Args:
        trainer: in a training step, whose release has been made.
        releases: made so far.
    """
    passes = trainer.current_epoch + 1 if trainer.is_last_batch else 0
    for config in trainer.lr_scheduler_configs:
        count = releases if config.interval == "step" else passes
        if count and count % config.frequency == 0:
            config.scheduler.step()
