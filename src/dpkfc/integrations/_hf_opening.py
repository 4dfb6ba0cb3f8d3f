"""How a run of a `PrivateTrainer` begins: the loss is checked, the session opened, a checkpoint restored."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from dpkfc.integrations._hf_arguments import check_schedule, steps_per_epoch
from dpkfc.integrations._hf_data import AsDict
from dpkfc.session import Session
from dpkfc.verification import public_rows

if TYPE_CHECKING:
    from dpkfc.integrations.huggingface import PrivateTrainer

__all__ = ["frozen_statistics", "open_session", "to_training"]

_log = logging.getLogger(__name__)


def frozen_statistics(model: nn.Module) -> list[nn.Module]:
    """Modules in eval mode whose training mode would make or move statistics: batch and instance norms, spectral norms."""

    def moves(module: nn.Module) -> bool:
        hooks = module._forward_pre_hooks.values()
        spectral = type(module).__name__ == "_SpectralNorm" or any(type(x).__name__ == "SpectralNorm" for x in hooks)
        return isinstance(module, _NormBase) or spectral

    return [x for x in model.modules() if not x.training and moves(x)]


def to_training(trainer: PrivateTrainer) -> None:
    """Put the model into training mode, but for what had frozen statistics when the trainer was made."""
    trainer.model.train()
    for module in trainer.frozen:
        module.eval()


def open_session(trainer: PrivateTrainer, resume: str | bool | None) -> Session:
    """The session of a run; optimizer, schedule and state of the trainer are set, from the beginning or a checkpoint.

    Args:
        trainer: before its run.
        resume: folder of a checkpoint, True for the last one.

    Raises:
        ValueError: a ledger that holds an earlier run, no checkpoint to resume, a loss that mixes examples.
        CheckpointError: a checkpoint of another run.
    """
    folder = get_last_checkpoint(trainer.args.output_dir) if resume is True else resume or None
    if resume is True and folder is None:
        raise ValueError(
            f"no checkpoint in {trainer.args.output_dir}; leave resume_from_checkpoint out, and where releases were made "
            "before the first checkpoint begin anew in another output_dir"
        )
    loader: Any = trainer.get_train_dataloader()  # for its dataset without unused columns, and its collate function
    collate = AsDict(loader.collate_fn)
    if trainer.args.activation_checkpointing:  # spares memory where most layers are frozen, as with adapters
        trainer.model.activation_checkpointing_enable()
    _settle_loss(trainer, loader.dataset, collate)
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
    )
    try:
        _begin(trainer, session, folder)
    except BaseException:
        session.close()
        raise
    return session


def _settle_loss(trainer: PrivateTrainer, dataset: Any, collate: AsDict) -> None:
    """Check on public rows that the default loss is the model's own."""
    if trainer.default_loss is not None:
        trainer.model.eval()
        singles = _public_singles(dataset[0], collate)
        trainer.default_loss.settle(trainer.model, (trainer._prepare_inputs(single) for single in singles))
    to_training(trainer)


def _public_singles(record: Any, collate: AsDict) -> Iterator[dict[str, Any]]:
    """Yield batches of one example, drawn to the types and shapes of a record."""
    for integers in ("tokens", "bits", "ones"):
        rows = public_rows(record, 8, collate, integers)
        for i in range(len(rows)):
            yield rows.batch([i])


def _begin(trainer: PrivateTrainer, session: Session, folder: str | None) -> None:
    if folder is None and session.steps_done:
        raise ValueError(
            f"the ledger {trainer.ledger_path} holds {session.steps_done} releases of an earlier run; continue it with "
            "resume_from_checkpoint=True, or choose another output_dir for a run with a budget of its own (what was spent "
            "here stays spent)"
        )
    handler, plan = trainer.callback_handler, trainer.plan
    exported = [x for x in [*handler.callbacks, trainer.control] if isinstance(x, ExportableState)]
    trainer.state = TrainerState(stateful_callbacks=exported)  # type: ignore[arg-type]
    if folder is not None:
        extra = session.restore(os.path.join(folder, "session"))
        trainer.state = TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))
        trainer._load_callback_state()
        trainer.lr_scheduler.load_state_dict(extra["scheduler"])
        for _ in range(session.steps_done - extra["releases"]):  # lost with the crash, but spent
            trainer.lr_scheduler.step()
    passes, asked = math.ceil(plan.steps / steps_per_epoch(plan)), trainer.args.num_train_epochs
    if trainer.args.max_steps <= 0 and round(asked * steps_per_epoch(plan)) != plan.steps:  # the default, or given as such
        _log.warning(
            "the plan makes %d releases, about %.3g passes over the data; num_train_epochs=%g plays no part",
            plan.steps, plan.steps / steps_per_epoch(plan), asked,
        )  # fmt: skip
    trainer.state.compute_steps(trainer.args, plan.steps)
    trainer.state.init_training_references(trainer, plan.steps, passes, None)
    trainer.state.global_step = session.steps_done
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
