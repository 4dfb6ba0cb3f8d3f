"""Write checkpoints: tensors in safetensors, all other values in JSON, a manifest of hashes.

A checkpoint is written atomically, and nothing is unpickled. The caller decides what is written.
The session writes released parameters, optimizer state, the preconditioner and its own counters,
never a noise stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError

from dpkfc.disk_sync import sync

if TYPE_CHECKING:
    # Ledgers are verified without torch, which takes seconds to import.

    from dpkfc.tensors import Groups, NamedTensors, Tensors

StrPath = str | os.PathLike[str]
# Plain values by name.
Values = Mapping[str, Any]

ADVICE = "use another checkpoint, or start a new run: what the ledger holds stays spent"
_FORMAT = 3
_STATE = "state"  # the group of the tensors inside meta
_GROUP = re.compile(r"\w[\w-]*")  # a name that stays inside the folder
_PART = re.compile(r"manifest\.json|.+\.safetensors")
# safetensors writes into a file with a name of this form, then renames it.
_UNFINISHED_PART = re.compile(rf"{_PART.pattern}|\.tmp\w{{6}}")
# Errors of code that trusts its input, when a file was made by hand. The file is wrong then.
MISFIT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another run."""


def write(
    folder: StrPath,
    tensors: Mapping[str, NamedTensors],
    meta: Values,
    *,
    private: bool = False,
) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never a mixture.

    Args:
        folder: the checkpoint's folder, or a link to it. An existing checkpoint is replaced, and
            nothing else ever is.
        tensors: group name (a file each) to named tensors.
        meta: plain values and tensors in dicts, lists and tuples.
        private: let the owner alone read the folder (mode 0700) and its files (mode 0600).

    Raises:
        CheckpointError: the folder cannot be written or holds something else, such as the ledger,
            or `meta` holds a value of another kind.
    """
    from dpkfc.tensors import pack

    target = Path(folder).resolve()
    fresh = target.with_name(target.name + ".new")
    old = target.with_name(target.name + ".old")
    meta_tensors: Tensors = {}
    try:
        packed_meta = pack(dict(meta), "meta", meta_tensors)
        groups = dict(tensors)
        if meta_tensors:
            groups[_STATE] = meta_tensors
        for place, part in ((target, _PART), (fresh, _UNFINISHED_PART), (old, _UNFINISHED_PART)):
            _check_replaceable(place, part)
        _bring_back(target, old)
        _delete(fresh)
        _write_files(fresh, groups, packed_meta, private)
        _delete(old)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        sync(target.parent)
        _delete(old)
    except TypeError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _bring_back(target, old)
        _delete(fresh)  # a full disk gets its space back
        kept = "; the one before is still there" if target.exists() else ""
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}{kept}") from error


def _write_files(
    folder: Path, groups: Mapping[str, NamedTensors], meta: Any, private: bool
) -> None:
    """Write and sync the files of a checkpoint into a new folder."""
    from safetensors.torch import save_file

    from dpkfc.tensors import separate

    manifest: dict[str, Any] = {"format": _FORMAT, "meta": meta, "sha256": {}}
    folder.mkdir(0o700 if private else 0o777, parents=True)
    for group, named in groups.items():
        path = folder / f"{group}.safetensors"
        tensors = separate(named)
        _write_synced(path, partial(save_file, tensors), private)
        manifest["sha256"][group] = file_digest(path)
    content = manifest | {"digest": digest_manifest(manifest)}
    text = json.dumps(content, indent=1)
    _write_synced(folder / "manifest.json", lambda part: part.write_text(text, "utf-8"), private)
    sync(folder)


def _write_synced(path: Path, write: Callable[[Path], object], private: bool) -> None:
    """Write a new file, and wait until the disk has it."""
    path.touch(0o600 if private else 0o666)
    mode = path.stat().st_mode
    write(path)
    # Safetensors renames a file over the new one that its owner alone may read.
    path.chmod(mode)
    sync(path)


def _check_replaceable(place: Path, part: re.Pattern[str]) -> None:
    """Refuse to replace a folder that holds anything but a checkpoint.

    Args:
        place: the folder.
        part: the names of files in it. Files named in `_PART` must be a complete checkpoint.

    Raises:
        CheckpointError: naming a file that would be deleted.
    """
    if not place.exists():
        return
    files = list(place.iterdir())
    names = [x.name for x in files]
    foreign = [x.name for x in files if x.is_dir() or not part.fullmatch(x.name)]
    if part is _PART and "manifest.json" not in names:
        foreign = foreign or names
    if foreign:
        raise CheckpointError(
            f"cannot write the checkpoint {place}: the folder holds {min(foreign)!r}, which is not "
            f"part of a checkpoint; give a folder of its own, such as {place / 'checkpoint'}"
        )


def _delete(folder: Path) -> None:
    """Delete the files of a checkpoint and their folder, as far as that can be done."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _bring_back(target: Path, old: Path) -> None:
    """Restore the old checkpoint, the only complete one, if a crash came between two renames."""
    if not target.exists() and old.exists():
        old.rename(target)


def exists(folder: StrPath) -> bool:
    """Return whether a checkpoint is here, or an earlier one that a crash has left."""
    target = Path(folder).resolve()
    return target.exists() or target.with_name(target.name + ".old").exists()


def read_ledger_state(folder: StrPath) -> tuple[int, str] | None:
    """Return releases and head of the ledger when a checkpoint was written; None without one.

    Only the manifest is read.

    Raises:
        CheckpointError: damaged, or it remembers no ledger.
    """
    target = Path(folder).resolve()
    if not exists(target):
        return None
    try:
        meta = _read_manifest(_find_newest(target))["meta"]
        return int(meta["ledger_count"]), str(meta["ledger_head"])
    except (OSError, *MISFIT) as error:
        raise _describe_damage(target, error) from error


def _find_newest(target: Path) -> Path:
    """Return the folder, or the one before if a crash came between the two renames."""
    if (target / "manifest.json").exists():
        return target
    previous = target.with_name(target.name + ".old")
    if not (previous / "manifest.json").exists():
        raise CheckpointError(
            f"no checkpoint in {target}: manifest.json is missing; name the folder that was saved"
            " to"
        )
    return previous


def read(folder: StrPath) -> tuple[Groups, dict[str, Any]]:
    """Read a checkpoint written by `write`.

    Returns:
        (tensors by group, meta).

    Raises:
        CheckpointError: missing, truncated, corrupt or of another format.
    """
    from safetensors.torch import load_file

    from dpkfc.tensors import unpack

    target = Path(folder).resolve()
    try:
        target = _find_newest(target)
        manifest = _read_manifest(target)
        tensors = {}
        for group, digest in manifest["sha256"].items():
            path = target / f"{group}.safetensors"
            if file_digest(path) != digest:
                raise CheckpointError(
                    f"{path} is damaged (its hash is not the one in manifest.json); {ADVICE}"
                )
            # Tensors of a file begin at any address, and sums over them could differ in the last
            # bit.
            tensors[group] = {name: tensor.clone() for name, tensor in load_file(path).items()}
        return tensors, unpack(manifest["meta"], tensors.pop(_STATE, {}))
    except (OSError, SafetensorError, *MISFIT) as error:
        raise _describe_damage(target, error) from error


def _read_manifest(target: Path) -> dict[str, Any]:
    """Return the manifest after its own hash was checked."""
    path = target / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    version = manifest["format"]
    if version != _FORMAT:
        raise CheckpointError(
            f"checkpoint {target} has format {version!r:.40}, this version reads {_FORMAT};"
            f" {ADVICE}"
        )
    if manifest.pop("digest", None) != digest_manifest(manifest):
        raise CheckpointError(f"{path} is damaged (its hash does not fit); {ADVICE}")
    wrong = [name for name in manifest["sha256"] if not _GROUP.fullmatch(name)]
    if wrong or not isinstance(manifest["meta"], dict):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint; {ADVICE}")
    return manifest


def digest_manifest(manifest: Values) -> str:
    """Return the SHA-256 of plain values, as their JSON with sorted keys."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _describe_damage(target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {target} is damaged ({reason_of(error)}); {ADVICE}")


def reason_of(error: Exception) -> str:
    """Return the kind and the text of an error."""
    return f"{type(error).__name__}: {error}"


def place_file(path: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Write a file that a crash leaves either old or new: write another name, sync, rename.

    Args:
        path: the file; its folder is created.
        write: writes the content to the path that it is given.
        private: let the owner alone read the file (mode 0600).

    Raises:
        CheckpointError: the disk cannot take the file; an earlier file of that name remains.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A crash may have left the part with another mode.
        part.unlink(missing_ok=True)
        _write_synced(part, write, private)
        part.replace(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"file {path} cannot be written ({reason}); make room, change its rights, or choose"
            " another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hash_file(file)


def hash_file(file: IO[bytes]) -> str:
    """Return the SHA-256 of an open file, which is at its beginning before and after."""
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()
