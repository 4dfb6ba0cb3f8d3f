"""Results of a study by the hash of the run: one JSON file, replaced as a whole, so that finished work is never lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from dpkfc.report.run_folder import RunFolderError, placed
from dpkfc.studies.errors import StudyError

__all__ = ["Store"]

KIND, VERSION = "dpkfc study", 1
_FLOAT = (float, int)
_NEEDED: Mapping[str, Any] = {"run": dict, "accuracy": _FLOAT, "epsilon": _FLOAT, "steps": int, "noise_multiplier": _FLOAT}
_OF_FIGURES: Mapping[str, Mapping[str, Any]] = {  # by measure; rows of another one may hold anything
    "dpkfc.studies.figures.course:measured": {"hash": str, "checkpoints": list, "sizes": dict, "epsilon": _FLOAT, "steps": int},
    "dpkfc.studies.figures.mean_field:measured": {
        "hash": str, "networks": list, "contraction": list, "seeds": int, "examples": int,
    },
}  # fmt: skip
_OF_CHECKPOINTS = {"step", "layers", "signal", "density"}

_LOG = logging.getLogger(__name__)


class Cell(Protocol):
    """What a row belongs to: `studies.cell.Run`, or another run with a hash."""

    @property
    def hash(self) -> str: ...  # noqa: D102


class Store:
    """The rows of one study.

    Only one process writes to it: `with` takes a lock beside the file. Reading needs none.

    Args:
        path: the JSON file; made when the first row comes.

    Raises:
        StudyError: the file is damaged, of another version, or cannot be read. It is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = _read(path)
        self._lock: TextIO | None = None

    def __enter__(self) -> Store:
        self._lock = _locked(self.path.with_name(self.path.name + ".lock"))
        self._rows = _read(self.path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows of training runs."""
        return iter([row for row in self._rows.values() if not row["run"].get("measure")])

    def figures(self) -> list[dict[str, Any]]:
        """Rows of runs with a measure of their own."""
        return [row for row in self._rows.values() if row["run"].get("measure")]

    def get(self, run: Cell) -> dict[str, Any] | None:
        """The row of a finished run."""
        return self._rows.get(run.hash)

    def put(self, run: Cell, row: Mapping[str, Any]) -> None:
        """Keep a row; on the disk when this returns.

        Raises:
            StudyError: the disk cannot take it; all earlier rows are still there.
        """
        self._rows[run.hash] = dict(row)
        content = {"kind": KIND, "version": VERSION, "rows": self._rows}
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            placed(self.path, lambda part: part.write_text(text, "utf-8"), private=True)
        except RunFolderError as error:
            raise StudyError(f"{error}; the results before it are kept, and the same command goes on from them") from None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StudyError(f"results file {path} cannot be read ({error.strerror or error}); change its rights") from None
    except (ValueError, RecursionError) as error:
        raise StudyError(f"results file {path} is damaged ({error}); put an earlier copy back, or move it away") from None
    if not isinstance(content, dict) or content.get("kind") != KIND or not isinstance(content.get("rows"), dict):
        raise StudyError(f"{path} is no results file of a study; choose another --out, or move it away")
    if content.get("version") != VERSION:
        raise StudyError(
            f"results file {path} is of version {content.get('version')!r}, this dpkfc reads {VERSION}; use the version that "
            "wrote it, or choose another --out"
        )
    rows = {key: row for key, row in content["rows"].items() if _is_row(row)}
    if len(rows) < len(content["rows"]):
        lost = len(content["rows"]) - len(rows)
        _LOG.warning("results file %s: %d entries are incomplete and will be run again", path, lost)
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("run"), dict):
        return False
    measure = row["run"].get("measure")  # a figure has rows of its own
    needed = _OF_FIGURES.get(str(measure), {}) if measure else _NEEDED
    if not all(isinstance(row.get(name), kind) and row[name] not in ([], {}) for name, kind in needed.items()):
        return False
    return not (measure and "checkpoints" in needed) or all(_is_checkpoint(one) for one in row["checkpoints"])


def _is_checkpoint(one: Any) -> bool:
    return isinstance(one, dict) and one.keys() >= _OF_CHECKPOINTS and isinstance(one["layers"], dict)


def _locked(path: Path) -> TextIO | None:
    """A lock that the system takes back when the process ends, however it ends; None where there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StudyError(f"{path} cannot be written ({error.strerror or error}); make room, or choose another --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StudyError(f"another process works on {path.with_suffix('')}; wait for it, or choose another --out") from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file
