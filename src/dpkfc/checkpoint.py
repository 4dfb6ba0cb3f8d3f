"""Checkpoints: tensors in safetensors, everything else in JSON, a manifest of hashes, written atomically.

Nothing is unpickled. What may be written is decided by the caller; the session writes released parameters, optimizer
state, the metric and its own counters, never a noise stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "CheckpointError",
    "check_same_tensors",
    "flatten_optimizer",
    "read",
    "unflatten_optimizer",
    "unique_tensors",
    "write",
]

_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another run."""


def write(folder: str | os.PathLike[str], tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never a mixture.

    Args:
        folder: the checkpoint's folder; an existing one is replaced.
        tensors: group name (a file each) to named tensors.
        meta: JSON-able values.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    target = Path(folder)
    fresh, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        manifest: dict[str, Any] = {"format": _FORMAT, "meta": dict(meta), "sha256": {}}
        for group, named in tensors.items():
            path = fresh / f"{group}.safetensors"
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in named.items()}, path)
            manifest["sha256"][group] = _digest(path)
        _write_synced(fresh / "manifest.json", json.dumps(manifest, indent=1).encode())
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read a checkpoint written by `write`.

    Returns:
        (tensors by group, meta).

    Raises:
        CheckpointError: missing, truncated, corrupt or of another format.
    """
    target = Path(folder)
    if not (target / "manifest.json").exists():
        previous = target.with_name(target.name + ".old")
        if not (previous / "manifest.json").exists():
            raise CheckpointError(f"no checkpoint in {target}: manifest.json is missing")
        target = previous  # the crash came between the two renames
    try:
        manifest = json.loads((target / "manifest.json").read_text())
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"checkpoint {target} has format {manifest['format']}, this version reads {_FORMAT}")
        tensors = {}
        for group, digest in manifest["sha256"].items():
            path = target / f"{group}.safetensors"
            if _digest(path) != digest:
                raise CheckpointError(
                    f"{path} is damaged (its hash is not the one in manifest.json); use an older checkpoint"
                )
            tensors[group] = load_file(path)
        return tensors, manifest["meta"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {target} is damaged: {error}; use an older checkpoint") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as (tensors named `index.key`, JSON-able rest)."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                scalars.setdefault(str(index), {})[key] = value
    return tensors, {"scalars": scalars, "param_groups": state["param_groups"]}


def unflatten_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Load what `flatten_optimizer` wrote into an optimizer of the same shape.

    Raises:
        CheckpointError: the optimizer has other parameter groups.
    """
    state: dict[int, dict[str, Any]] = {int(i): dict(entries) for i, entries in rest["scalars"].items()}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = [dict(group) for group in rest["param_groups"]]
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint belongs to another optimizer: {error}") from error


def unique_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with each storage once (tied weights keep their first name)."""
    seen: set[tuple[int, torch.Size]] = set()
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        result[name] = tensor
    return result


def check_same_tensors(model: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise unless a model and a checkpoint hold tensors of the same names and shapes.

    Raises:
        CheckpointError: naming the first that differs.
    """
    for name in sorted(set(model) | set(saved)):
        if name not in model or name not in saved or model[name].shape != saved[name].shape:
            mine = tuple(model[name].shape) if name in model else "absent"
            theirs = tuple(saved[name].shape) if name in saved else "absent"
            raise CheckpointError(
                f"the checkpoint belongs to another model: '{name}' is {theirs} in the checkpoint and {mine} in the model"
            )
