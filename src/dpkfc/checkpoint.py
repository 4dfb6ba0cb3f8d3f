"""Checkpoints: tensors in safetensors, everything else in JSON, a manifest of hashes, written atomically.

Nothing is unpickled. What may be written is decided by the caller; the session writes released parameters, optimizer
state, the metric and its own counters, never a noise stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Plain values with tensors among them, as JSON that keeps them exactly beside named tensors.
#
# Nothing is pickled, so that reading a file runs no code of whoever wrote it.

_MARKS = ("!tensor", "!tuple", "!dict")


def packed(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON keeps exactly: tensors move to `tensors` under their path; tuples and keys that are no texts are marked.

    Raises:
        TypeError: a value of another kind, by its path.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Tensor):
        while where in tensors:
            where += "'"
        tensors[where] = value
        return {"!tensor": where}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: packed(item, f"{where}.{key}", tensors) for key, item in value.items()}
        pairs = [
            (packed(key, where, tensors), packed(item, f"{where}.{key}", tensors)) for key, item in value.items()
        ]
        return {"!dict": [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        items = [packed(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which no checkpoint can hold; give plain values and tensors in dicts, lists "
        "and tuples"
    )


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` has written, with its tensors."""
    match value:
        case {"!tensor": name}:
            return tensors[name]
        case {"!tuple": items}:
            return tuple(unpacked(item, tensors) for item in items)
        case {"!dict": pairs}:
            return {unpacked(key, tensors): unpacked(item, tensors) for key, item in pairs}
        case dict():
            return {key: unpacked(item, tensors) for key, item in value.items()}
        case list():
            return [unpacked(item, tensors) for item in value]
    return value


# --------------------------------------------------------------------------------------------------

_ADVICE = "use another checkpoint, or start a new run: what the ledger holds stays spent"
_FORMAT = 3
_READABLE = (2, 3)  # 2 had no digest of the manifest itself
_STATE = "state"  # the group of tensors that were found inside meta
_GROUP = re.compile(r"\w[\w-]*")  # a name that stays inside the folder
_PART = re.compile(r"manifest\.json|.+\.safetensors")
_BEGUN = re.compile(rf"{_PART.pattern}|\.tmp\w{{6}}")  # safetensors writes into a file of such a name, then renames it
_NO_STATE = torch.empty(0, dtype=torch.uint8)
_SESSION = {"plan": str, "step": int, "ledger_count": int, "ledger_head": str, "optimizer": dict}
# What code that trusts its input does with a file that was made by hand: it is the file that is wrong.
_UNFIT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another run."""


def write(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never a mixture.

    Args:
        folder: the checkpoint's folder, or a link to it; an existing checkpoint is replaced, and nothing else ever is.
        tensors: group name (a file each) to named tensors.
        meta: plain values and tensors in dicts, lists and tuples.
        private: let the owner alone read the folder (mode 0700) and its files (mode 0600).

    Raises:
        CheckpointError: the folder cannot be written or holds something else, such as the ledger; `meta` holds a value of
            another kind.
    """
    target = Path(folder).resolve()
    fresh, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
    inside: dict[str, Tensor] = {}
    file_mode = 0o600 if private else 0o666
    try:
        manifest: dict[str, Any] = {"format": _FORMAT, "meta": packed(dict(meta), "meta", inside), "sha256": {}}
        for place in (target, fresh, old):
            _check_replaceable(place, whole=place == target)
        _bring_back(target, old)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(0o700 if private else 0o777, parents=True)
        for group, named in {**tensors, **({_STATE: inside} if inside else {})}.items():
            path = fresh / f"{group}.safetensors"
            path.touch(file_mode)
            mode = path.stat().st_mode  # safetensors renames a file over it that its owner alone may read
            save_file(_separate(named), path)
            path.chmod(mode)
            _sync(path)
            manifest["sha256"][group] = file_digest(path)
        (fresh / "manifest.json").touch(file_mode)
        (fresh / "manifest.json").write_text(json.dumps(manifest | {"digest": _digest_of(manifest)}, indent=1), "utf-8")
        _sync(fresh / "manifest.json")
        _sync(fresh)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except TypeError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _bring_back(target, old)
        shutil.rmtree(fresh, ignore_errors=True)  # a full disk gets its space back
        kept = "; the one before is still there" if target.exists() else ""
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}{kept}") from error


def _check_replaceable(place: Path, *, whole: bool) -> None:
    """Raise where a folder holds anything but a checkpoint (`whole`) or what is left of one: it would be deleted with it.

    Raises:
        CheckpointError: naming it.
    """
    if not place.exists():
        return
    held, part = list(place.iterdir()), _PART if whole else _BEGUN
    others = [x for x in held if x.is_dir() or not part.fullmatch(x.name)]
    if whole and "manifest.json" not in {x.name for x in held}:
        others = others or held
    if others:
        raise CheckpointError(
            f"cannot write the checkpoint {place}: the folder holds {sorted(x.name for x in others)[0]!r}, which is no part of a "
            "checkpoint and would be deleted with the one before; give a folder of its own, such as "
            f"{place / 'checkpoint'}"
        )


def _bring_back(target: Path, old: Path) -> None:
    """After a crash between the two renames the old checkpoint is the only complete one."""
    if not target.exists() and old.exists():
        old.rename(target)


def is_there(folder: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint lies here, or the one before that a crash has left."""
    target = Path(folder).resolve()
    return target.exists() or target.with_name(target.name + ".old").exists()


def keep_of_others(folder: str | os.PathLike[str], releases: int, is_own: Callable[[int, str], bool]) -> None:
    """Raise where a session that began at new weights, on a ledger that was in use, would write over a checkpoint.

    Args:
        folder: where it is to write.
        releases: in the ledger from before, neither made nor restored by the session.
        is_own: whether the session's ledger passed through a head after so many releases.

    Raises:
        CheckpointError: the folder is there, with a checkpoint or what is left of one; it stays as it is. One that knows of
            later releases is the session's own.
    """
    if not releases or not is_there(folder):
        return
    with contextlib.suppress(CheckpointError):
        count, head = remembered_ledger(folder) or (0, "")
        if count > releases and is_own(count, head):
            return  # written since, on this ledger, which is open here alone: by this session
    raise CheckpointError(
        f"the ledger holds {releases} releases from before this session, which began without them, and {folder}, which "
        "may hold their checkpoint, stays as it is. Go on from it with session.restore(), or save into another folder"
    )


def remembered_ledger(folder: str | os.PathLike[str]) -> tuple[int, str] | None:
    """Releases and head of the ledger when a checkpoint was written, from its manifest alone; None without a checkpoint.

    Raises:
        CheckpointError: damaged, or it remembers no ledger.
    """
    target = Path(folder).resolve()
    if not is_there(target):
        return None
    try:
        meta = _manifest(_newest(target))["meta"]
        return int(meta["ledger_count"]), str(meta["ledger_head"])
    except (OSError, *_UNFIT) as error:
        raise CheckpointError(f"checkpoint {target} is damaged ({_reason(error)}); {_ADVICE}") from error


def _newest(target: Path) -> Path:
    """Where the files are: in the folder, or in the one before, if a crash came between the two renames."""
    if (target / "manifest.json").exists():
        return target
    previous = target.with_name(target.name + ".old")
    if not (previous / "manifest.json").exists():
        raise CheckpointError(f"no checkpoint in {target}: manifest.json is missing")
    return previous


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read a checkpoint written by `write`.

    Returns:
        (tensors by group, meta).

    Raises:
        CheckpointError: missing, truncated, corrupt or of another format.
    """
    target = Path(folder).resolve()
    try:
        target = _newest(target)
        manifest = _manifest(target)
        tensors = {}
        for group, digest in manifest["sha256"].items():
            path = target / f"{group}.safetensors"
            if file_digest(path) != digest:
                raise CheckpointError(f"{path} is damaged (its hash is not the one in manifest.json); {_ADVICE}")
            # Copies: those of a file begin at any address, and sums over them could differ in the last bit.
            tensors[group] = {name: tensor.clone() for name, tensor in load_file(path).items()}
        return tensors, unpacked(manifest["meta"], tensors.pop(_STATE, {}))
    except (OSError, SafetensorError, *_UNFIT) as error:
        raise CheckpointError(f"checkpoint {target} is damaged ({_reason(error)}); {_ADVICE}") from error


def _manifest(target: Path) -> dict[str, Any]:
    """The manifest, once it is known to be whole."""
    path = target / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    found = manifest["format"]
    if found not in _READABLE:
        raise CheckpointError(f"checkpoint {target} has format {found!r:.40}, this version reads {_FORMAT}")
    digest = manifest.pop("digest", None)
    if digest != (None if found == _READABLE[0] else _digest_of(manifest)):
        raise CheckpointError(f"{path} is damaged (its hash does not fit); {_ADVICE}")
    wrong = [name for name in manifest["sha256"] if not _GROUP.fullmatch(name)]
    if wrong or not isinstance(manifest["meta"], dict):
        raise CheckpointError(f"{path} is no manifest of a checkpoint; {_ADVICE}")
    return manifest


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode("utf-8")).hexdigest()


def read_session(folder: str | os.PathLike[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """`read` what a session saved.

    Raises:
        CheckpointError: as `read`, or something that a session writes is missing or of another kind.
    """
    tensors, meta = read(folder)
    wrong = [name for name, kind in _SESSION.items() if not isinstance(meta.get(name), kind)]
    wrong += [name for name in ("extra",) if name not in meta] + [name for name in ("model",) if name not in tensors]
    if not wrong and not 0 <= meta["step"] <= meta["ledger_count"]:
        wrong = ["step"]
    if not wrong and not meta["plan"].isprintable():
        wrong = ["plan"]
    world = meta.setdefault("world_size", 1)  # older checkpoints do not say it
    if not isinstance(world, int) or world < 1:
        wrong += ["world_size"]
        world = 1
    state = meta.get("torch_rng", _NO_STATE)
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() % world:
        wrong += ["torch_rng"]
    if wrong:
        raise CheckpointError(f"checkpoint {Path(folder)} was not saved by a session: {wrong[0]} does not fit; {_ADVICE}")
    return tensors, meta


def check_run(meta: Mapping[str, Any], plan_hash: str, world_size: int | None, folder: str | os.PathLike[str]) -> None:
    """Raise where a checkpoint is of another plan, or of another number of processes (more often a mistake than meant).

    Args:
        meta: of the checkpoint.
        plan_hash: of this run.
        world_size: processes of this run; None where any number will do.
        folder: for the message.

    Raises:
        CheckpointError: with the way out.
    """
    if meta["plan"] != plan_hash:
        raise CheckpointError(
            f"the checkpoint {Path(folder)} belongs to plan {meta['plan'][:12]}…, this is plan {plan_hash[:12]}…; "
            "resume with the configuration that wrote it"
        )
    before = meta["world_size"]
    if world_size is not None and before != world_size:
        raise CheckpointError(
            f"the checkpoint {Path(folder)} was written by {before} process{'es' * (before > 1)}, this run has {world_size}. "
            f"Start {before} (torchrun --nproc-per-node={before}), or go on with session.restore(folder, any_world_size=True), "
            "dpkfc train --any-world-size: no release depends on it, but for its last bits"
        )


@contextlib.contextmanager
def fitting(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Around the loading of what a checkpoint holds: whatever does not fit where it goes is the checkpoint's fault.

    Raises:
        CheckpointError: it does not; names the folder.
    """
    try:
        yield
    except _UNFIT as error:
        raise CheckpointError(f"checkpoint {Path(folder)} does not fit ({_reason(error)}); {_ADVICE}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def file_digest(path: Path) -> str:
    """SHA-256 of what a file holds."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def _separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, copied only where they are views or share memory, which the format cannot hold."""
    seen: set[int] = set()
    result = {}
    for name, tensor in named.items():
        x = tensor.detach().cpu()
        storage = x.untyped_storage()
        alone = x.is_contiguous() and storage.nbytes() == x.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        result[name] = x if alone else x.clone(memory_format=torch.contiguous_format)
    return result


def _sync(path: Path) -> None:
    """Wait until the disk has a file or, where folders can be synced, the names in a folder."""
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer of the same shape.

    Raises:
        CheckpointError: the optimizer has other parameter groups, or is of another kind; it keeps its own state then.
    """
    own = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
    except _UNFIT as error:
        optimizer.load_state_dict(own)  # what went wrong may have gone wrong halfway
        raise CheckpointError(f"the checkpoint belongs to another optimizer ({_reason(error)})") from error
    pairs = zip(own["param_groups"], optimizer.param_groups, strict=True)
    missing = {name for before, group in pairs for name in before if name not in group}
    if missing:
        optimizer.load_state_dict(own)
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer: it has no {sorted(missing)[0]!r} for {type(optimizer).__name__}"
        )


def plain_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """What modules keep in a state dict that is no tensor (`get_extra_state`)."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def unique_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, each storage once (tied weights keep their first name)."""
    seen: set[tuple[int, torch.Size]] = set()
    result = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
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
