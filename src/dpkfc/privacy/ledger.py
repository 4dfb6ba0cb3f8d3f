"""Record each release as a hash-chained JSON line, on the disk before the release exists.

A crash can therefore make the ledger count a release that never left (an over-count, which is safe)
and never the reverse. The chain shows any change to a line before its end; lines cut off at the end
are noticed by a checkpoint that recorded a later head.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkfc.disk_sync import sync
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.ledger_lines import (
    LedgerError,
    Values,
    Verified,
    begins_a_ledger,
    check_header,
    encode_line,
    is_complete,
    make_header,
    parse,
    read_line,
)
from dpkfc.privacy.locks import take_lock
from dpkfc.privacy.rng import count_forks

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)


class BudgetExhausted(RuntimeError):
    """A release beyond the plan: refused, nothing was written and nothing may leave."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a run was told when it charged a budget.

    Attributes:
        people: whom the budget is about.
        epsilon, delta: of the budget.
        before, after: total ε without and with this run, at δ.
    """

    people: str
    epsilon: float
    delta: float
    before: float
    after: float


class Ledger:
    """The one writer of a ledger.

    Make it with `Ledger.open`, and close it or use it in a `with`.

    Attributes:
        path: the file, None in memory.
        place: its absolute path, wherever the process goes from here.
        plan_hash: hash of the plan whose releases it holds.
        max_releases: steps that the plan allows, None for no limit.
        on_begin: called with the ledger once, by `begin`; returns the receipt.
        on_end: called with the ledger after the last release of the plan, and before it closes.
        receipt: what a budget of several runs was charged, None before that and without one.
    """

    def __init__(
        self,
        state: Verified,
        path: Path | None,
        descriptor: int | None,
        max_releases: int | None,
        extra: Mapping[str, int] | None = None,
        lock: BaseFileLock | None = None,
    ) -> None:
        self.path = path
        # Wherever the process goes from here.
        self.place = None if path is None else path.absolute()
        self.plan_hash: str = state.header["plan_hash"]
        self.max_releases = max_releases
        self.on_begin: Callable[[Ledger], Receipt] | None = None
        self.on_end: Callable[[Ledger], None] | None = None
        self.receipt: Receipt | None = None
        self._extra = dict(extra or {})
        self._state = state
        self._counts = Counter(line.get("purpose", "") for line in state.releases)
        self._size = state.size
        self._descriptor = descriptor
        self._lock = lock
        self._forks = count_forks()
        self._failure: str | None = None
        self._is_new = False
        # For the next line: copies of a ledger that both go on get different heads.
        self._mark: dict[str, str] = {}
        # The releases of a run share one event.
        self._event: DpEvent | None = None
        self._event_values: dict[str, Any] = {}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        plan_hash: str,
        header: Values | None = None,
        max_releases: int | None = None,
        extra: Mapping[str, int] | None = None,
    ) -> Ledger:
        """Open or begin a ledger file and lock it against other writers.

        Args:
            path: the file; its folder must exist. None keeps the ledger in memory.
            plan_hash: hash of the plan of this run.
            header: what else the first line says: "certified" (bool) and "rng" ("secure" or
                "repeatable"), in which a ledger that exists must agree, and anything else that JSON
                can hold.
            max_releases: steps that the plan allows; "steps" of a ledger that exists must agree.
            extra: releases that it allows beside the steps, by purpose.

        Raises:
            ValueError: the header sets a key that the ledger writes itself.
            LedgerError: the file cannot be written or locked, or is open elsewhere; it belongs to
                another plan or another header; a line was changed, left out or damaged. A last line
                that a crash cut short is removed with a warning: its release never left.
        """
        first = make_header(plan_hash, header)
        line, head = encode_line(first)
        state = Verified(first | {"hash": head}, [], [head], len(line))
        if path is None:
            return cls(state, None, None, max_releases, extra)
        path = Path(path)
        descriptor, lock = _open_locked(path)
        try:
            content = _repair_torn_end(_read_all(descriptor), descriptor, path)
            if content:
                state = parse(content, str(path))
                check_header(state.header, first | {"steps": max_releases}, str(path))
                # A checkpoint counts lines that a killed process may not have synced.
                os.fsync(descriptor)
            else:
                _write(descriptor, line, 0)
            sync(path.parent)
        except BaseException as error:
            os.close(descriptor)
            lock.release()
            if isinstance(error, OSError):
                raise _unwritable(path, error) from error
            raise
        ledger = cls(state, path, descriptor, max_releases, extra, lock)
        ledger._is_new = not content
        if content:
            ledger._mark = {"resumed": uuid.uuid4().hex}
        return ledger

    @property
    def id(self) -> str:
        """Return the name of this ledger, drawn at random when it was begun."""
        return self._state.id

    @property
    def header(self) -> dict[str, Any]:
        """Return the first line."""
        return dict(self._state.header)

    @property
    def count(self) -> int:
        """Return the number of releases charged."""
        return len(self._state.releases)

    @property
    def steps(self) -> int:
        """Return the number of steps charged: all releases without a purpose."""
        return self._counts[""]

    @property
    def extra(self) -> dict[str, int]:
        """Return the number of releases charged beside the steps, by purpose."""
        return {purpose: count for purpose, count in self._counts.items() if purpose}

    @property
    def head(self) -> str:
        """Hash of the last line; together with `count` it identifies the whole history."""
        return self._state.heads[-1]

    @property
    def releases(self) -> tuple[dict[str, Any], ...]:
        """Return all releases, in order."""
        return tuple(self._state.releases)

    @property
    def remaining(self) -> int | None:
        """Steps left under the plan, None for no limit."""
        return None if self.max_releases is None else max(0, self.max_releases - self.steps)

    def contains(self, count: int, head: str) -> bool:
        """Return whether this history had `head` after `count` releases; ask before a resume."""
        return self._state.contains(count, head)

    def refuse_spent(self) -> None:
        """Close the ledger if its plan is spent.

        Raises:
            BudgetExhausted: no step is left.
        """
        if self.remaining == 0:
            self.close()
            raise BudgetExhausted(
                f"all {self.steps} releases of the plan are spent in {self.name}: take another"
                " ledger_path, or resume=True to evaluate"
            )

    def begin(self) -> Receipt | None:
        """Let the budget of several runs charge this one, and return what it was charged.

        Call this before the first value of a private record can decide anything, a refusal too.
        `charge` calls it before the first release in any case.

        Raises:
            BudgetError, BudgetExhausted: as `Budget.charge`; nothing may be read or released.
        """
        if self.on_begin is not None:
            self.receipt = self.on_begin(self)
            self.on_begin = None
        return self.receipt

    def charge(
        self,
        step: int,
        event: DpEvent,
        noise_multiplier: float,
        stddev: float,
        sensitivity: float,
        purpose: str = "",
    ) -> int:
        """Record one release; when this returns the record is on the disk, and release may follow.

        Args:
            step: number of the step the release belongs to; a repeated step is a new release.
            event: its privacy event.
            noise_multiplier: standard deviation over sensitivity.
            stddev: standard deviation of the noise on the sum.
            sensitivity: of the sum.
            purpose: of a release beside the steps; "" for a step.

        Returns:
            Number of this release among the releases of its purpose, from 1.

        Raises:
            BudgetExhausted: the plan allows no further release; nothing was written.
            LedgerError: the ledger is closed, could not be written, or its file was deleted,
                replaced or changed since it was opened; the release must not be made.
        """
        failure = self._failure or (
            "a forked process needs its own ledger" if count_forks() != self._forks else None
        )
        if failure is not None:
            raise LedgerError(f"{self.name} takes no further release: {failure}")
        most = self.max_releases
        charged = self._counts[purpose]
        if purpose:
            most = self._extra.get(purpose, 0)
        if most is not None and charged >= most:
            kind = f" for {purpose}" if purpose else ""
            raise BudgetExhausted(
                f"the plan allows {most} releases{kind} and {charged} are charged in"
                f" {self.name}; calibrate a plan with more steps, nothing was released"
            )
        self.begin()
        if event is not self._event:
            self._event = event
            self._event_values = event_to_dict(event)
        history = self._state
        record = {
            "release": len(history.releases) + 1,
            "step": int(step),
            **self._mark,
            "event": self._event_values,
            "noise_multiplier": float(noise_multiplier),
            "stddev": float(stddev),
            "sensitivity": float(sensitivity),
            **({"purpose": purpose} if purpose else {}),
            "prev": history.heads[-1],
        }
        line, head = encode_line(record)
        if self._descriptor is not None:
            self._append(line)
        history.releases.append(record | {"hash": head})
        history.heads.append(head)
        self._mark = {}
        self._counts[purpose] += 1
        self._failure = None
        if self._counts[""] == self.max_releases:
            self._report_end()
        return self._counts[purpose]

    def close(self) -> None:
        """Give the file and its lock back; a closed ledger takes no release."""
        self._report_end()
        self._failure = self._failure or "it is closed"
        self._close_file()
        if self._lock is not None:
            # In a forked process this does nothing.
            self._lock.release()

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _report_end(self) -> None:
        is_own = self._failure is None and count_forks() == self._forks
        if is_own and self.on_end is not None:
            self.on_end(self)

    def abandon(self) -> None:
        """Close the ledger; remove its file if it was begun here and holds no release."""
        if self._is_new and not self.count and self._descriptor is not None:
            self._check_place()
            assert self.place is not None
            # Windows deletes no open file.
            self._close_file()
            self.place.unlink()
            if self._lock is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._lock.lock_file)
        self.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Return the words by which messages name the ledger."""
        return "the ledger in memory" if self.path is None else f"the ledger {self.path}"

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        self._check_place()
        # Until the line is counted: Ctrl-C may come in between.
        self._failure = "a charge was interrupted; resume from a checkpoint"
        try:
            _write(self._descriptor, line, self._size)
        except BaseException as error:
            # The release is not made, so its line must not stay half written before the next one.
            try:
                os.ftruncate(self._descriptor, self._size)
                self._failure = None
            except OSError:
                self._failure = f"an earlier line could not be written or taken back ({error})"
            if isinstance(error, OSError):
                raise LedgerError(
                    f"{self.name} could not be written ({error}); nothing was released"
                ) from error
            raise
        self._size += len(line)

    def _check_place(self) -> None:
        """Check that the file has its name and its size, so that a later reader finds its lines."""
        assert self._descriptor is not None and self.place is not None
        status = os.fstat(self._descriptor)
        try:
            is_same_file = os.path.samestat(status, os.stat(self.place))
        except OSError:
            is_same_file = False
        if not is_same_file or status.st_size != self._size:
            what = "changed by another program" if is_same_file else "deleted or replaced"
            self._failure = (
                f"its file was {what} while it was open; put it back as it was, then resume"
            )
            raise LedgerError(f"{self.name} takes no further release: {self._failure}")


def verify(path: str | os.PathLike[str]) -> Verified:
    """Read a ledger and check its chain, without changing it.

    Raises:
        LedgerError: it cannot be read, or a line (its number is named) was changed, left out,
            damaged or cut short.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise LedgerError(
            f"the ledger {path} does not exist; give a run folder or its ledger.jsonl"
        ) from error
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be read ({error.strerror}); give a run folder or its"
            " ledger.jsonl"
        ) from error
    if not content:
        raise LedgerError(f"the ledger {path} is empty")
    return parse(content, str(path))


def _repair_torn_end(content: bytes, descriptor: int, path: Path) -> bytes:
    """Repair a last line that a crash cut short; the check judges whatever comes before."""
    end = content.rfind(b"\n") + 1
    torn = content[end:]
    if not torn:
        return content
    if not begins_a_ledger(content):
        raise LedgerError(
            f"line 1 of the ledger {path} is damaged: this is not a ledger; nothing was changed"
        )
    if is_complete(torn):
        # Only its newline is missing: kept, since a ledger may count too much but never too little.
        read_line(torn + b"\n", f"the last line of the ledger {path}")
        _write(descriptor, b"\n", len(content))
        return content + b"\n"
    if end:
        parse(content[:end], str(path))
    logger.warning(
        "the last line of the ledger %s was cut short by a crash and is removed: its release never"
        " left",
        path,
    )
    os.ftruncate(descriptor, end)
    os.fsync(descriptor)
    return content[:end]


def _open_locked(path: Path) -> tuple[int, BaseFileLock]:
    """Open a ledger's file and take its lock.

    Raises:
        LedgerError: it cannot be written or locked, is not an ordinary file, or is open elsewhere.
    """
    # In text mode Windows would write two bytes at the end of a line.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LedgerError(
                f"the ledger {path} is not an ordinary file; without one nothing may be released:"
                " choose another name"
            )
        return descriptor, take_lock(path)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LedgerError(
            f"the ledger {path} is being written by another run; let it end, or close() it"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise LedgerError(
            f"the ledger {path} cannot be locked ({error.strerror}), so two runs could release"
            " into it at once; choose a folder on another disk"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise


def _unwritable(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"the ledger {path} cannot be written ({error}); without it nothing may be released: choose"
        " a folder that exists and can be written"
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
