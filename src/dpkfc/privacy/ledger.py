"""The ledger: what was released, one hash-chained JSON line a release, on the disk before the release exists.

A crash can therefore make the ledger count a release that never left (an over-count, which is safe) and never the
reverse. The chain shows any change to a line before its end; lines cut off at the end are noticed by a checkpoint that
recorded a later head.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import dp_accounting

from dpkfc.privacy.events import event_to_dict

try:
    import fcntl
except ImportError:  # not on Windows: there, nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["BudgetExhausted", "Ledger", "LedgerError", "Verified", "verify"]

logger = logging.getLogger(__name__)

FORMAT = 1
_START = b'{"format":'
_RESERVED = {"format", "plan_hash", "created", "prev", "hash"}


class LedgerError(RuntimeError):
    """A ledger that cannot be read, written or trusted."""


class BudgetExhausted(RuntimeError):
    """A release beyond the plan: refused, nothing was written and nothing may leave."""


@dataclass(frozen=True)
class Verified:
    """A ledger whose chain holds.

    Attributes:
        header: the first line.
        releases: the other lines, in order.
        heads: hash of every line; `heads[n]` is the head after n releases.
        size: bytes that these lines take.
    """

    header: dict[str, Any]
    releases: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    size: int = 0


class Ledger:
    """The one writer of a ledger; make it with `Ledger.open` or `Ledger.in_memory`, close it or use it in a `with`.

    Attributes:
        path: the file, None in memory.
        plan_hash: hash of the plan whose releases it holds.
        max_releases: releases that the plan allows, None for no limit.
    """

    def __init__(self, state: Verified, path: Path | None, descriptor: int | None, max_releases: int | None) -> None:
        self.path = path
        self.plan_hash: str = state.header["plan_hash"]
        self.max_releases = max_releases
        self._state = state
        self._size = state.size
        self._descriptor, self._pid = descriptor, os.getpid()
        self._failure: str | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        plan_hash: str,
        header: Mapping[str, Any] | None = None,
        max_releases: int | None = None,
    ) -> Ledger:
        """Open or begin a ledger file and lock it against other writers.

        Args:
            path: the file; its folder must exist.
            plan_hash: hash of the plan of this run.
            header: what else the first line says: "certified" (bool) and "rng" ("secure" or "repeatable"), in which a
                ledger that exists must agree, and anything else that JSON can hold.
            max_releases: releases that the plan allows.

        Raises:
            ValueError: the header sets a key that the ledger writes itself.
            LedgerError: the file cannot be written or is open elsewhere; it belongs to another plan or another header;
                a line was changed, left out or damaged. A last line that a crash cut short is removed with a warning:
                its release never left.
        """
        path = Path(path)
        first = _header(plan_hash, header)
        line, head = _line(first)
        descriptor = _open_locked(path)
        try:
            content = _without_torn_end(_read_all(descriptor), descriptor, path)
            if content:
                state = _parse(content, str(path))
                _check_header(state.header, first, str(path))
            else:
                _write(descriptor, line, 0)
                _sync_folder(path)
                state = Verified(first | {"hash": head}, [], [head], len(line))
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise _unwritable(path, error) from error
            raise
        return cls(state, path, descriptor, max_releases)

    @classmethod
    def in_memory(
        cls, plan_hash: str, header: Mapping[str, Any] | None = None, max_releases: int | None = None
    ) -> Ledger:
        """A ledger that ends with the process; for tests and for callers who keep their own."""
        first = _header(plan_hash, header)
        _, head = _line(first)
        return cls(Verified(first | {"hash": head}, [], [head]), None, None, max_releases)

    @property
    def header(self) -> dict[str, Any]:
        """The first line."""
        return dict(self._state.header)

    @property
    def count(self) -> int:
        """Number of releases charged."""
        return len(self._state.releases)

    @property
    def head(self) -> str:
        """Hash of the last line; together with `count` it identifies the whole history."""
        return self._state.heads[-1]

    @property
    def releases(self) -> tuple[dict[str, Any], ...]:
        """All releases, in order."""
        return tuple(self._state.releases)

    @property
    def remaining(self) -> int | None:
        """Releases left under the plan, None for no limit."""
        return None if self.max_releases is None else max(0, self.max_releases - self.count)

    def contains(self, count: int, head: str) -> bool:
        """Whether this history passed through `head` after `count` releases; ask before a resume."""
        return 0 <= count <= self.count and self._state.heads[count] == head

    def charge(
        self, step: int, event: dp_accounting.DpEvent, noise_multiplier: float, stddev: float, sensitivity: float
    ) -> int:
        """Record one release. When this returns the record is on the disk, and the release may be made.

        Args:
            step: number of the step the release belongs to; a repeated step is a new release.
            event: its privacy event.
            noise_multiplier: standard deviation over sensitivity.
            stddev: standard deviation of the noise on the sum.
            sensitivity: of the sum.

        Returns:
            Number of this release, from 1.

        Raises:
            BudgetExhausted: the plan allows no further release; nothing was written.
            LedgerError: the ledger is closed, or could not be written; the release must not be made.
        """
        failure = self._failure or ("a forked process needs its own ledger" if os.getpid() != self._pid else None)
        if failure is not None:
            raise LedgerError(f"{self._name} takes no further release: {failure}")
        if self.max_releases is not None and self.count >= self.max_releases:
            raise BudgetExhausted(
                f"the plan allows {self.max_releases} releases and {self.count} are charged in {self._name}; "
                "calibrate a plan with more steps, nothing was released"
            )
        record = {
            "release": self.count + 1,
            "step": int(step),
            "event": event_to_dict(event),
            "noise_multiplier": float(noise_multiplier),
            "stddev": float(stddev),
            "sensitivity": float(sensitivity),
            "prev": self.head,
        }
        line, head = _line(record)
        if self._descriptor is not None:
            self._append(line)
        self._state.releases.append(record | {"hash": head})
        self._state.heads.append(head)
        return self.count

    def close(self) -> None:
        """Give the file and its lock back; a closed ledger takes no release."""
        self._failure = self._failure or "it is closed"
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _name(self) -> str:
        return "the ledger in memory" if self.path is None else f"the ledger {self.path}"

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        try:
            _write(self._descriptor, line, self._size)
        except BaseException as error:
            # The release is not made, so its line must not stay half written before the next one.
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self._failure = f"an earlier line could not be written or taken back ({error})"
            if isinstance(error, OSError):
                raise LedgerError(f"{self._name} could not be written ({error}); nothing was released") from error
            raise
        self._size += len(line)


def verify(path: str | os.PathLike[str]) -> Verified:
    """Read a ledger and check its chain, without changing it.

    Raises:
        LedgerError: it cannot be read, or a line (its number is named) was changed, left out, damaged or cut short.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read ({error})") from error
    if not content:
        raise LedgerError(f"the ledger {path} is empty")
    return _parse(content, str(path))


def _header(plan_hash: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    extra = dict(extra or {})
    if taken := _RESERVED & set(extra):
        raise ValueError(f"a header of a ledger may not set {sorted(taken)}: the ledger writes these itself")
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "plan_hash": plan_hash, "created": created, "certified": None, "rng": None, **extra}


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def _line(record: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of a line and its hash, which covers all of it and, through "prev", all lines before."""
    head = hashlib.sha256(_canonical(record).encode("utf-8")).hexdigest()
    return (_canonical({**record, "hash": head}) + "\n").encode("utf-8"), head


def _parse(content: bytes, name: str) -> Verified:
    state: Verified | None = None
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        record = _record(raw, f"line {number} of the ledger {name}")
        if state is None:
            if record.get("format") != FORMAT or "plan_hash" not in record:
                raise LedgerError(f"line 1 of the ledger {name} is not a header of format {FORMAT}")
            state = Verified(record, [], [record["hash"]], len(content))
            continue
        if record.get("prev") != state.heads[-1] or record.get("release") != number - 1:
            raise LedgerError(
                f"line {number} of the ledger {name} does not follow line {number - 1}: lines are missing or in "
                "another order; the privacy spent is unknown"
            )
        state.releases.append(record)
        state.heads.append(record["hash"])
    assert state is not None
    return state


def _record(raw: bytes, where: str) -> dict[str, Any]:
    if not raw.endswith(b"\n"):
        raise LedgerError(f"{where} is cut short")
    try:
        record = json.loads(raw)
        stated = record.pop("hash")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise LedgerError(f"{where} is damaged; the privacy spent is unknown") from error
    line, head = _line(record)
    if head != stated or line != raw:
        raise LedgerError(f"{where} was changed: its hash does not fit; the privacy spent is unknown")
    return record | {"hash": stated}


def _check_header(found: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    if found["plan_hash"] != wanted["plan_hash"]:
        raise LedgerError(
            f"the ledger {name} belongs to the plan {found['plan_hash']}, this run to the plan {wanted['plan_hash']}; "
            "use another folder, or the settings the run was begun with"
        )
    for key in ("certified", "rng"):
        if found.get(key) != wanted[key]:
            raise LedgerError(
                f"the ledger {name} was begun with {key}={found.get(key)!r}, this run has {wanted[key]!r}; "
                "use another folder"
            )


def _without_torn_end(content: bytes, descriptor: int, path: Path) -> bytes:
    """Repair the last line where a crash interrupted its writing; whatever comes before is left to the check."""
    end = content.rfind(b"\n") + 1
    torn = content[end:]
    if not torn:
        return content
    begins_a_ledger = content.startswith(_START) or _START.startswith(content)
    if not begins_a_ledger:
        raise LedgerError(f"line 1 of the ledger {path} is damaged: this is no ledger, nothing was changed")
    if _is_complete(torn):
        # Only its newline is missing: kept, since a ledger may count too much but never too little.
        _record(torn + b"\n", f"the last line of the ledger {path}")
        _write(descriptor, b"\n", len(content))
        return content + b"\n"
    if end:
        _parse(content[:end], str(path))
    logger.warning(
        "the last line of the ledger %s was cut short by a crash and is removed: its release never left", path
    )
    os.ftruncate(descriptor, end)
    os.fsync(descriptor)
    return content[:end]


def _is_complete(torn: bytes) -> bool:
    """Whether a whole object stands here; the beginning of a line, which a crash leaves, is none."""
    try:
        json.JSONDecoder().raw_decode(torn.decode("utf-8", errors="replace"))
    except ValueError:
        return False
    return True


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise LedgerError(f"the ledger {path} is being written by another run; let it end first") from error
        except OSError as error:
            logger.warning("the file system cannot lock the ledger %s (%s): let only one run write it", path, error)
    return descriptor


def _unwritable(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"the ledger {path} cannot be written ({error}); without it nothing may be released: choose a folder that "
        "exists and can be written"
    )


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write at the offset and wait until the disk has it."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    """Make the name of a new file last, where folders can be synced."""
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
