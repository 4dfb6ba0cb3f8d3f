"""Check that a checkpoint is one of this run, before it is loaded or replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dpkfc.checkpoint import (
    ADVICE,
    MISFIT,
    CheckpointError,
    StrPath,
    Values,
    exists,
    read,
    read_ledger_state,
    reason_of,
)
from dpkfc.tensors import Groups, NamedTensors

# What the checkpoint of a session holds beside tensors.
_SESSION = {
    "plan": str,
    "step": int,
    "ledger_count": int,
    "ledger_head": str,
    "optimizer": dict,
    "world_size": int,
}


def refuse_foreign_checkpoint(
    folder: StrPath, releases: int, is_own: Callable[[int, str], bool]
) -> None:
    """Refuse to overwrite a checkpoint that may be of an earlier run on the same ledger.

    Args:
        folder: where a session or a server is about to write.
        releases: the releases in the ledger that it neither made nor restored.
        is_own: whether its ledger had a head after a number of releases.

    Raises:
        CheckpointError: the folder holds a checkpoint, or parts of one. A checkpoint that knows of
            later releases is its own.
    """
    if not releases or not exists(folder):
        return
    with contextlib.suppress(CheckpointError):
        count, head = read_ledger_state(folder) or (0, "")
        if count > releases and is_own(count, head):
            # It was written since, on this ledger, which is open here alone.
            return
    raise CheckpointError(
        f"the ledger holds {releases} releases from before this session, so {folder} stays as it"
        " is; go on with restore(), or save into another folder"
    )


def read_session(folder: StrPath) -> tuple[Groups, dict[str, Any]]:
    """Read what a session saved.

    Raises:
        CheckpointError: as `read`, or a value that a session writes is missing or of another kind.
    """
    tensors, meta = read(folder)
    text = f"checkpoint {Path(folder)} was not saved by a session"
    misfit = _find_misfit(tensors, meta)
    if misfit:
        raise CheckpointError(f"{text}: {misfit} does not fit; {ADVICE}")
    return tensors, meta


def _find_misfit(tensors: Values, meta: Values) -> str:
    """Return the name of a value that a session would not have written, else ""."""
    for name, kind in _SESSION.items():
        value = meta.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            return name
    if "extra" not in meta:
        return "extra"
    if "model" not in tensors:
        return "model"
    for name, value in tensors.get("average", {}).items():
        trained = tensors["model"].get(name.removeprefix("average."))
        if name != "updates" and (trained is None or trained.shape != value.shape):
            return name
    if not 0 <= meta["step"] <= meta["ledger_count"]:
        return "step"
    if not meta["plan"].isprintable():
        return "plan"
    processes = meta["world_size"]
    if processes < 1:
        return "world_size"
    state = meta.get("torch_rng", torch.empty(0, dtype=torch.uint8))
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        return "torch_rng"
    if state.numel() % processes != 0:
        return "torch_rng"
    for name, kind in (("takers", str), ("accepted", int)):
        values = meta.get(name, [])
        if not isinstance(values, list) or not all(isinstance(x, kind) for x in values):
            return name
    return ""


def check_run(
    meta: Values,
    plan_hash: str,
    world_size: int | None,
    folder: StrPath,
) -> None:
    """Check that a checkpoint is of this plan and this number of processes.

    Args:
        meta: of the checkpoint.
        plan_hash: the hash of this run's plan.
        world_size: the processes of this run; None accepts any number.
        folder: for the message.

    Raises:
        CheckpointError: with the fix.
    """
    before = meta["world_size"]
    noun = "process" if before == 1 else "processes"
    if meta["plan"] != plan_hash:
        raise CheckpointError(
            f"the checkpoint {Path(folder)} belongs to plan {meta['plan'][:12]}…, this is plan "
            f"{plan_hash[:12]}…; resume with the configuration that wrote it"
        )
    if world_size not in (None, before):
        raise CheckpointError(
            f"{Path(folder)} was written by {before} {noun}, this run has {world_size}; use"
            f" --nproc-per-node={before}, or any_world_size=True (--any-world-size)"
        )


def check_ledger(is_own: bool, releases: int, folder: StrPath) -> None:
    """Check that a checkpoint is of the ledger of this run.

    Args:
        is_own: whether the ledger has the checkpoint's head after so many releases.
        releases: in the ledger when the checkpoint was written.
        folder: for the message.

    Raises:
        CheckpointError: it is of another ledger.
    """
    if not is_own:
        raise CheckpointError(
            f"the ledger does not contain the {releases} releases before the checkpoint"
            f" {Path(folder)}; resume with the ledger of the same run"
        )


@contextlib.contextmanager
def explain_misfits(folder: StrPath) -> Iterator[None]:
    """Turn errors inside the body, which loads a checkpoint, into one that names the checkpoint.

    Raises:
        CheckpointError: a value of the checkpoint does not fit; names the folder.
    """
    try:
        yield
    except MISFIT as error:
        raise CheckpointError(
            f"checkpoint {Path(folder)} does not fit ({reason_of(error)}); {ADVICE}"
        ) from error


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer of the same parameter groups.

    Raises:
        CheckpointError: the optimizer has other parameter groups, or is of another kind. It keeps
            its own state then.
    """
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
    except MISFIT as error:
        optimizer.load_state_dict(before)  # the error may have come halfway
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer ({type(error).__name__}: {error})"
        ) from error
    missing = set()
    for expected, group in zip(before["param_groups"], optimizer.param_groups, strict=True):
        missing |= {name for name in expected if name not in group}
    if missing:
        optimizer.load_state_dict(before)
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer: it has no {min(missing)!r} for "
            f"{type(optimizer).__name__}"
        )


def check_same_tensors(model: NamedTensors, saved: NamedTensors) -> None:
    """Check that a model and a checkpoint hold tensors of the same names and shapes.

    Raises:
        CheckpointError: naming the first tensor that differs.
    """
    for name in sorted(set(model) | set(saved)):
        in_model = tuple(model[name].shape) if name in model else "absent"
        in_checkpoint = tuple(saved[name].shape) if name in saved else "absent"
        if in_model != in_checkpoint:
            raise CheckpointError(
                f"the checkpoint belongs to another model: '{name}' is {in_checkpoint} in the "
                f"checkpoint and {in_model} in the model"
            )
