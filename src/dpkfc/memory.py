"""Find how many rows fit into memory, unless the number is given.

If a device reports that it is out of memory, the size is halved until it fits. On a CPU the system
often ends the process without a report. There, the bytes of a few rows are measured first, and
they bound the size.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpkfc.rng_state import all_states, preserve_generators, restore_all_states
from dpkfc.torchrun import processes_on_this_host

# --------------------------------------------------------------------------------------------------
# Which errors say that memory ran out.

_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "memoryerror",  # the name in a report of another process
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, here or on another process."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error).lower()
    except Exception:  # noqa: BLE001  (of other code)
        return False
    return any(message in text for message in _MESSAGES)


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FRACTION = 0.5  # rows of other shapes may need more memory
_FIRST_ROWS = 4
_ROUNDS, _GROWTH = 3, 8  # further measurements, of more rows


class RowLimit(NamedTuple):
    """How many rows of a batch run at once.

    Attributes:
        most: the most rows; None for all.
        automatic: whether fewer rows are tried when memory runs out.
        least: rows that are never divided.
    """

    most: int | None = None
    automatic: bool = False
    least: int = 1


@dataclass
class MicroBatchSize:
    """The size of micro-batches in rows, remembered over the steps of a run.

    No result depends on the size. It is found from private batches, so it stays in memory and is in
    no checkpoint.

    Attributes:
        bound: most rows at once; None for the whole batch.
        automatic: whether the bound is found by trying. Otherwise running out of memory is an
            error.
        least: rows that cannot be divided: the rows of one privacy unit.
        what: what a row is, for errors.
    """

    bound: int | None = None
    automatic: bool = False
    least: int = 1
    what: str = "example"
    _is_measured: bool = False

    def measure(self, work: Callable[[int], object], rows: int, device: torch.device) -> None:
        """Bound the size by the bytes that a few rows take, once and on a CPU.

        Args:
            work: forward, backward and clipped sum of the first n rows of a batch. The result is
                dropped.
            rows: the number of rows in the batch.
            device: the device of the model.
        """
        if not self.automatic or self._is_measured or device.type != "cpu" or rows < 2:
            return
        self._is_measured = True
        budget = int(_FRACTION * available_bytes() / processes_on_this_host())
        n = min(_FIRST_ROWS, rows)
        for _ in range(_ROUNDS):
            try:
                with preserve_generators():
                    peak = peak_bytes(partial(work, n))
            except Exception as error:
                # The error comes again in the step itself. Its text may hold values of private
                # examples, so only its type is logged.
                kind = type(error).__name__
                logger.debug("the memory of %d rows could not be measured: %s", n, kind)
                return
            # Fixed costs count once, so k times the rows take at most k times the peak.
            fits = n * budget // max(1, peak)
            self.bound = max(self.least, self._round_down(fits))
            if not n < min(fits, rows) < rows:
                return
            n = min(fits, rows, _GROWTH * n)

    def fit(self, attempt: Callable[[int | None], T], rows: int) -> T:
        """Return the result of `attempt(bound)`; halve the bound as often as memory runs out.

        Args:
            attempt: does the whole work on micro-batches of at most `bound` rows. It keeps nothing
                when it fails.
            rows: the number of rows in the batch.

        Raises:
            RuntimeError: out of memory at a size that was given, or with the least size.
        """
        states = all_states()
        while True:
            try:
                return attempt(self.bound)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(rows, error)
            gc.collect()  # the failed pass may hold its activations in cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            restore_all_states(states)

    def _halve(self, rows: int, error: Exception) -> None:
        reason = type(error).__name__  # the text may hold values of private examples
        if not self.automatic:
            tried = "the whole logical batch"
            if self.bound is not None:
                tried = f"a micro-batch of {self.bound} {self.what}s"
            raise RuntimeError(
                f"{tried} does not fit into memory ({reason}); nothing was released. Lower "
                "max_physical_batch_size, or set it to 'auto' (docs/errors.md#memory)"
            ) from None
        size = min(rows, self.bound or rows)
        if size <= self.least:
            smallest = f"one {self.what}"
            if self.least > 1:
                smallest = f"the least micro-batch, {self.least} rows,"
            raise RuntimeError(
                f"{smallest} does not fit into memory ({reason}); nothing was released. Use a"
                " smaller model or shorter inputs (docs/errors.md#memory)"
            ) from None
        half = 1 << ((size - 1).bit_length() - 1)
        self.bound = max(self.least, self._round_down(half))

    def _round_down(self, rows: int) -> int:
        return rows // self.least * self.least


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes of new tensors that exist at one time during a piece of work.

    Memory inside an operation is not seen.
    """
    counter = _StorageCounter()
    with counter:
        work()
    return counter.peak


class _StorageCounter(TorchDispatchMode):
    """Adds up the bytes of storages that operations create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLW3201
        kwargs = kwargs or {}
        for x in _strided_tensors((args, kwargs)):
            self._count(x, is_new=False)
        result = func(*args, **kwargs)
        for x in _strided_tensors(result):
            self._count(x, is_new=True)
        return result

    def _count(self, x: Tensor, *, is_new: bool) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if is_new else 0
        if is_new:
            weakref.finalize(storage, self._discount, key)
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)

    def _discount(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _strided_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result of an operation."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.layout == torch.strided]


def available_bytes() -> int:
    """Return the bytes of main memory that this process could still take.

    They are limited by the machine and by the control group of the process.
    """
    kilobytes = _read_statistic(Path("/proc/meminfo"), "MemAvailable:")
    bounds = (1024 * kilobytes or None, _control_group())
    limits = [bound for bound in bounds if bound is not None]
    return min(limits) if limits else _available_without_proc()


# For both versions of control groups: folder, limit, use, and the part of the use that the system
# takes back when it must.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _control_group(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return what the process's control group and those above it leave; None without limits.

    Cached files count as free.
    """
    groups = {Path()}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or "memory" in names.split(","):
                group = Path(path.strip("/"))
                groups |= {group, *group.parents}
    free = []
    for folder, limit, used, cached in _GROUPS:
        for group in groups:
            place = root / folder / group
            with contextlib.suppress(OSError, ValueError):
                most = int((place / limit).read_text())
                now = int((place / used).read_text())
                free.append(max(0, most - now + _read_statistic(place / "memory.stat", cached)))
    return min(free) if free else None


def _read_statistic(table: Path, name: str) -> int:
    """Return one number of a table of names and numbers; 0 if it is absent."""
    with contextlib.suppress(OSError, ValueError):
        for line in table.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return 0


def _available_without_proc() -> int:
    with contextlib.suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().available)
    # Not all systems have these names, and Windows has no sysconf.
    with contextlib.suppress(AttributeError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62  # unknown, so nothing is bounded
