"""The folder of a run: where each file lies, and one clear error before training when it cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

__all__ = ["LAST_PLOT", "RunFolder", "RunFolderError", "placed"]

LAST_PLOT = "spectra.png"  # the file that a finished run writes last


class RunFolderError(ValueError):
    """A run folder that cannot be written, is not empty, or is not one."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run below one folder. Make it with `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """A new, empty, writable folder.

        Raises:
            RunFolderError: it exists and holds files, is no folder, or cannot be written.
        """
        path = _expanded(path)
        try:
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"run folder {path} is a file; choose another name with --out")
            if path.is_dir() and any(path.iterdir()):
                raise RunFolderError(
                    f"run folder {path} is not empty; choose another with --out, or continue it with --resume {path}"
                )
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path)._writable()

    @classmethod
    def fresh(cls, parent: str | os.PathLike[str], name: str) -> RunFolder:
        """A new folder below a parent: `name`, or `name-2`, `name-3`, … where that is taken.

        Raises:
            RunFolderError: the parent cannot be written.
        """
        parent = Path(parent)
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)._writable()
            except FileExistsError:
                number += 1
            except OSError as error:
                raise _unwritable(path, error) from None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was begun before.

        Raises:
            RunFolderError: it is no run folder, has no checkpoint, or cannot be written.
        """
        folder = cls(_expanded(path))
        before = folder.checkpoint.with_name(folder.checkpoint.name + ".old")  # left by a crash while the next was put in place
        try:
            if not folder.config.is_file():
                raise RunFolderError(f"{path} is not a run folder (no config.toml); give the folder of an earlier run")
            if not (folder.checkpoint.is_dir() or before.is_dir()):
                raise RunFolderError(f"{path} holds no checkpoint to resume; start a new run with --config config.toml")
        except OSError as error:
            raise RunFolderError(f"run folder {path} cannot be read ({error.strerror or error}); change its rights") from None
        return folder._writable()

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of this name, whatever is there.

        Raises:
            RunFolderError: no folder can have such a name.
        """
        return cls(_expanded(path))

    def _writable(self) -> RunFolder:
        trial = self.path / f".writable-{os.getpid()}"
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise _unwritable(self.path, error) from None
        return self

    @property
    def config(self) -> Path:
        """Settings that replay the run."""
        return self.path / "config.toml"

    @property
    def model(self) -> Path:
        """Released weights."""
        return self.path / "model.safetensors"

    @property
    def metrics(self) -> Path:
        """Figures of every step."""
        return self.path / "metrics.parquet"

    @property
    def ledger(self) -> Path:
        """Hash-chained record of every release."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        """State from which a run continues."""
        return self.path / "checkpoint"

    @property
    def card(self) -> Path:
        """The privacy card as JSON; the Markdown lies beside it."""
        return self.path / "privacy_card.json"

    @property
    def plots(self) -> Path:
        """PNG files."""
        return self.path / "plots"

    @property
    def is_complete(self) -> bool:
        """Whether all that a finished run leaves is there; a run that ended while it was written goes on from here."""
        return all(path.is_file() for path in (self.model, self.card, self.card.with_suffix(".md"), self.plots / LAST_PLOT))

    def begin(self, settings: str) -> Path:
        """Write the settings of a new run; of two runs that begin in one folder the second is refused.

        Raises:
            RunFolderError: another run has begun here, or the disk cannot take them.
        """
        try:
            with self.config.open("x", encoding="utf-8") as file:
                file.write(settings)
            _sync(self.config)
        except FileExistsError:
            raise RunFolderError(f"another run has begun in {self.path} just now; choose another folder with --out") from None
        except OSError as error:
            self.config.unlink(missing_ok=True)
            raise _unwritable(self.config, error, "file") from None
        return self.config

    def take_away(self) -> None:
        """Remove what a run has written that was cut off before its first checkpoint, which nothing can go on from.

        Raises:
            RunFolderError: the files cannot be removed.
        """
        fresh = self.checkpoint.with_name(self.checkpoint.name + ".new")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            for path in (self.ledger, self.metrics, self.metrics.with_name(self.metrics.name + ".part"), self.config):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def remove_if_empty(self) -> None:
        """Take the folder away again if nothing was written into it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_text(self, path: Path, text: str) -> Path:
        """Write a text file as `placed` does."""
        return placed(path, lambda part: part.write_text(text, "utf-8"))

    def write_json(self, path: Path, content: Mapping[str, Any]) -> Path:
        """Write JSON in the same way."""
        return self.write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def placed(path: Path, write: Callable[[Path], object], *, private: bool = False) -> Path:
    """A file that a crash leaves as it was or as it will be: written under another name, synced, renamed.

    Args:
        path: the file; its folder is made.
        write: writes the content to the path that it is given.
        private: let the owner alone read the file (mode 0600), because ε does not protect what the file holds.

    Raises:
        RunFolderError: the disk cannot take it; an earlier file of that name is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # a crash may have left the part with another mode
        part.touch(0o600 if private else 0o666)
        mode = part.stat().st_mode  # safetensors renames a file over it that its owner alone may read
        write(part)
        part.chmod(mode)
        _sync(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise _unwritable(path, error, "file") from None
    return path


def _sync(path: Path) -> None:
    """Wait until the disk has a file: its name must not come before its content."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _expanded(path: str | os.PathLike[str]) -> Path:
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path).expanduser()
    except (UnicodeEncodeError, RuntimeError):  # half a character, or the home of nobody
        pass
    raise RunFolderError(f"run folder {str(path)!r} is no name that a folder can have; choose another with --out")


def _unwritable(path: Path, error: Exception, what: str = "run folder") -> RunFolderError:
    reason = getattr(error, "strerror", None) or error
    return RunFolderError(f"{what} {path} cannot be written ({reason}); make room, change its rights, or choose another --out")
