"""The folder of a run: where each file lies, and one clear error before training when it cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RunFolder", "RunFolderError"]


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
        path = Path(path).expanduser()
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"run folder {path} is a file; choose another name with --out")
        try:
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
        folder = cls(Path(path).expanduser())
        if not folder.config.is_file():
            raise RunFolderError(f"{path} is not a run folder (no config.toml); give the folder of an earlier run")
        if not folder.checkpoint.is_dir():
            raise RunFolderError(f"{path} holds no checkpoint to resume; start a new run with --config config.toml")
        return folder._writable()

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

    def remove_if_empty(self) -> None:
        """Take the folder away again if nothing was written into it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_text(self, path: Path, text: str) -> Path:
        """Write a text file so that a crash leaves the old one or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text, "utf-8")
        part.replace(path)
        return path

    def write_json(self, path: Path, content: Mapping[str, Any]) -> Path:
        """Write JSON in the same way."""
        return self.write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"run folder {path} cannot be written ({error.strerror or error}); change its rights or --out"
    )
