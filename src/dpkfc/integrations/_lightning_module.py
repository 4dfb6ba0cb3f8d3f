"""The LightningModule of a private fit, and what a Trainer may not do with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

if TYPE_CHECKING:
    from dpkfc.integrations.lightning import PrivateTraining

__all__ = ["PrivateModule", "Steps", "refused"]


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

    def per_example_loss(self, batch: Any) -> Tensor:
        """One loss per example `[B]` of a batch.

        Raises:
            NotImplementedError: not defined.
        """
        raise NotImplementedError(
            f"define {type(self).__name__}.per_example_loss(batch), which returns one loss per example"
        )

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
            f"{type(self).__name__} trains under a plan; add PrivateTraining(plan, dataset) to Trainer(callbacks=[...])"
        )


def refused(trainer: Any, module: pl.LightningModule) -> Iterator[tuple[bool, str]]:
    """What a private fit refuses: whether it applies, and the message with the fix."""
    name = type(module).__name__
    yield (
        not isinstance(module, PrivateModule),
        f"{name} has a training_step of its own, whose loss of a whole batch cannot be clipped for each example; derive it from "
        "dpkfc.integrations.lightning.PrivateModule and define per_example_loss(batch) -> [B] instead",
    )
    yield (
        getattr(type(module), "per_example_loss", None) is PrivateModule.per_example_loss,
        f"{name} does not define per_example_loss(batch), which returns one loss per example",
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
    yield trainer.overfit_batches > 0, "overfit_batches replaces the sampler that ε is computed for; leave it out"
