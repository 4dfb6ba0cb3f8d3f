"""Name the files of a run folder, and refuse an unusable folder before training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from dpkfc.checkpoint import CheckpointError, place_file
from dpkfc.disk_sync import sync
from dpkfc.privacy.locks import find_lock_path
from dpkfc.weights_record import find_record_path


class RunFolderError(ValueError):
    """A run folder that cannot be written, is not empty, or is not one."""


def check_out(out: Path, start: bytes = b"") -> None:
    """Refuse to write over a file, but for one that has a start which is written anew.

    Raises:
        RunFolderError: the file would be lost or cannot be read, or there is a folder.
    """
    try:
        if out.exists() and not (start and out.open("rb").read(len(start)) == start):
            raise RunFolderError(f"--out {out} exists and would be lost; choose another name")
    except OSError as error:
        raise _unwritable(out, error, "file") from None


@dataclass(frozen=True)
class _Place:
    """An attribute of `RunFolder` that is the path of a file in it."""

    name: str

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files of a run below one folder. Make it with `create` or `open`."""

    path: Path

    # Settings that replay the run.
    config = _Place("config.toml")
    # What is public of a user's own data; absent where a recipe was trained.
    schema = _Place("schema.toml")
    # Released weights.
    model = _Place("model.safetensors")
    # Figures of every step.
    metrics = _Place("metrics.parquet")
    # Hash-chained record of every release.
    ledger = _Place("ledger.jsonl")
    # State from which a run continues.
    checkpoint = _Place("checkpoint")
    # Scores on held-out examples.
    scores = _Place("scores.json")
    # What each column of an additive model adds to its output.
    effects = _Place("effects.json")
    # The privacy card as JSON; a Markdown form is next to it.
    card = _Place("privacy_card.json")
    # What the pictures of the run show; a finished run writes it last.
    figures = _Place("figures.json")
    # PNG files, drawn by `dpkfc report`.
    plots = _Place("plots")

    @classmethod
    def check(cls, path: str | os.PathLike[str]) -> Path:
        """Return the path of a folder that can be created, as far as it shows without writing.

        Raises:
            RunFolderError: as `create`.
        """
        path = _expand(path)
        try:
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"run folder {path} is a file; choose another name with --out")
            if path.is_dir() and any(path.iterdir()):
                raise RunFolderError(
                    f"run folder {path} is not empty; choose another with --out, or continue it "
                    f"with --resume {quote(str(path))}"
                )
            home = next(place for place in (path, *path.absolute().parents) if place.exists())
            if not (home.is_dir() and os.access(home, os.W_OK)):
                raise _unwritable(path, RunFolderError(f"{home} takes no folder"))
        except OSError as error:
            raise _unwritable(path, error) from None
        return path

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Create an empty, writable folder.

        Raises:
            RunFolderError: the path is a file, holds files, or cannot be written.
        """
        path = cls.check(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path)._writable()

    @classmethod
    def make(cls, path: str, name: str) -> RunFolder:
        """Create a given folder, or else one below runs/ with a name and the time.

        Raises:
            RunFolderError: as `create` and `fresh`.
        """
        if path:
            return cls.create(path)
        return cls.fresh("runs", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")

    @classmethod
    def fresh(cls, parent: str | os.PathLike[str], name: str) -> RunFolder:
        """Create a folder below a parent: `name`, or `name-2`, `name-3`, … where that is taken.

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
        """Return the folder of an earlier run.

        Raises:
            RunFolderError: the path is not a run folder, has no checkpoint, or cannot be written.
        """
        folder = cls(_expand(path))
        # A crash while a new checkpoint was put in place leaves the old one under this name.
        old_checkpoint = folder.checkpoint.with_name(folder.checkpoint.name + ".old")
        try:
            folder.check_settings()
            if not (folder.checkpoint.is_dir() or old_checkpoint.is_dir()):
                raise RunFolderError(
                    f"{path} holds no checkpoint to resume; start a new run with --config"
                    " config.toml"
                )
        except OSError as error:
            reason = error.strerror or error
            raise RunFolderError(
                f"run folder {path} cannot be read ({reason}); change its rights"
            ) from None
        return folder._writable()

    @classmethod
    def locate(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of this name, whatever is there.

        Raises:
            RunFolderError: a folder cannot have such a name.
        """
        return cls(_expand(path))

    def check_settings(self) -> None:
        """Refuse a folder that holds no settings of a run.

        Raises:
            RunFolderError: the folder is missing, or is not a run folder.
        """
        if not self.path.exists():
            raise RunFolderError(f"{self.path} does not exist; give the folder of an earlier run")
        if not self.config.is_file():
            raise RunFolderError(
                f"{self.path} is not a run folder (no config.toml); give the folder of an earlier"
                " run"
            )

    def _writable(self) -> RunFolder:
        """Return the folder, or refuse one that cannot be written."""
        trial = self.path / f".writable-{os.getpid()}"
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise _unwritable(self.path, error) from None
        return self

    @property
    def is_complete(self) -> bool:
        """Whether all files of a finished run exist.

        A run that was killed while it wrote them continues from here.
        """
        files = (self.model, self.card, self.card.with_suffix(".md"), self.figures)
        return all(path.is_file() for path in files)

    def begin(self, settings: str, schema: str = "") -> Path:
        """Write the settings of a new run, and refuse the second of two runs in one folder.

        Args:
            settings: as TOML.
            schema: what is public of own data, as TOML; empty for a recipe.

        Raises:
            RunFolderError: another run has started here, or the disk cannot take the file.
        """
        try:
            with self.config.open("x", encoding="utf-8") as file:
                file.write(settings)
            sync(self.config)
        except FileExistsError:
            raise RunFolderError(
                f"another run has started in {self.path} just now; choose another folder with --out"
            ) from None
        except OSError as error:
            self.config.unlink(missing_ok=True)
            raise _unwritable(self.config, error, "file") from None
        if schema:
            write_text(self.schema, schema)
        return self.config

    def take_away(self) -> None:
        """Remove the files of a run that was cut off before its first checkpoint.

        Raises:
            RunFolderError: the files cannot be removed.
        """
        new_checkpoint = self.checkpoint.with_name(self.checkpoint.name + ".new")
        part = self.metrics.with_name(self.metrics.name + ".part")
        try:
            shutil.rmtree(new_checkpoint, ignore_errors=True)
            for path in (
                self.ledger,
                find_lock_path(self.ledger),
                find_record_path(self.ledger),
                self.metrics,
                part,
                self.schema,
                self.config,
            ):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing was written into it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def write_atomically(path: Path, write: Callable[[Path], object], *, private: bool = False) -> Path:
    """Write a file as `dpkfc.checkpoint.place_file` does, with an error that names a way out.

    Args:
        path: the file; its folder is created.
        write: writes the content to the path that it is given.
        private: let the owner alone read the file (mode 0600), because ε does not protect what the
            file holds.

    Raises:
        RunFolderError: the disk cannot take the file; an earlier file of that name remains.
    """
    try:
        place_file(path, write, private=private)
    except CheckpointError as error:
        raise RunFolderError(str(error)) from None
    return path


def write_text(path: Path, text: str, *, private: bool = False) -> Path:
    """Write a text file in UTF-8 as `write_atomically` does."""
    return write_atomically(path, lambda part: part.write_text(text, "utf-8"), private=private)


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write JSON as `write_atomically` does."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    return write_text(path, text + "\n")


def _expand(path: str | os.PathLike[str]) -> Path:
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path).expanduser()
    # Half a character, or the home of an unknown user.
    except (UnicodeEncodeError, RuntimeError):
        pass
    raise RunFolderError(
        f"run folder {str(path)!r} is not a name that a folder can have; choose another with --out"
    )


def _unwritable(path: Path, error: Exception, what: str = "run folder") -> RunFolderError:
    reason = getattr(error, "strerror", None) or error
    return RunFolderError(
        f"{what} {path} cannot be written ({reason}); make room, change its rights, or choose "
        "another --out"
    )
