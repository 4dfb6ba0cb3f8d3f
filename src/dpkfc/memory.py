"""How many rows fit into memory: given as a number, or found by trying.

Where a device reports that it is out of memory, the size is halved until it fits. On a CPU such a report often never comes
(the system ends the process), so there the bytes of a few rows are measured first and bound the size.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dpkfc.distributed import processes_on_this_host

# --------------------------------------------------------------------------------------------------
# Which errors say that memory ran out.

_MESSAGES = (
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed",
    "memoryerror",  # as another process tells it
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on an accelerator or on the CPU, here or on another process."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)
    )


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SHARE = 0.5  # of the available memory: rows of other lengths than the measured ones may need more
_FEW = 4  # rows that are measured first
_ROUNDS, _GROWTH = 3, 8  # measurements of more rows, where few rows say that not all of them fit


@dataclass
class MicroBatchSize:
    """The size of micro-batches in rows, remembered over the steps of a run.

    No result depends on it. It is found from private batches, hence stays in memory: it is in no checkpoint.

    Attributes:
        bound: most rows at once; None for the whole batch.
        automatic: whether the bound is found by trying; otherwise running out of memory is an error.
        least: rows that cannot be divided: those of one privacy unit, or a padding multiple.
        what: rows are, for errors.
    """

    bound: int | None = None
    automatic: bool = False
    least: int = 1
    what: str = "example"
    _measured: bool = False

    def measure(self, work: Callable[[int], object], rows: int, device: torch.device) -> None:
        """Once, on a CPU: bound the size by the bytes that a few rows take.

        Args:
            work: forward, backward and clipped sum of the first so many rows of a batch, whose result is dropped.
            rows: rows in the batch.
            device: of the model.
        """
        if not self.automatic or self._measured or device.type != "cpu" or rows < 2:
            return
        self._measured = True
        budget, n = int(_SHARE * available_bytes() / processes_on_this_host()), min(_FEW, rows)
        for _ in range(_ROUNDS):
            try:
                with torch.random.fork_rng(devices=[]):
                    peak = peak_bytes(partial(work, n))
            except Exception as error:  # comes again where it belongs; its text may hold values of private examples
                logger.debug("the memory of %d rows could not be measured: %s", n, type(error).__name__)
                return
            # Fixed costs count once however many rows there are, so k times the rows take at most k times the peak.
            fits = n * budget // max(1, peak)
            self.bound = max(self.least, self._multiple(fits))
            if not n < min(fits, rows) < rows:
                return
            n = min(fits, rows, _GROWTH * n)

    def fit(self, attempt: Callable[[int | None], T], rows: int) -> T:
        """The result of `attempt(bound)`, started again from nothing with half the size as often as memory runs out.

        Args:
            attempt: does the whole work on micro-batches of at most so many rows; it keeps nothing when it fails.
            rows: rows in the batch.

        Raises:
            RuntimeError: out of memory at a size that was given, or with the least there is.
        """
        state = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
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
                torch.cuda.set_rng_state_all(state[1])
            torch.set_rng_state(state[0])

    def _halve(self, rows: int, error: Exception) -> None:
        if not self.automatic:
            size = "the whole logical batch" if self.bound is None else f"a micro-batch of {self.bound} {self.what}s"
            raise RuntimeError(
                f"{size} does not fit into memory ({_first_line(error)}); nothing was released. Make "
                "max_physical_batch_size smaller, or set it to 'auto'"
            ) from error
        tried = min(rows, self.bound or rows)
        if tried <= self.least:
            what = f"one {self.what}" if self.least == 1 else f"the least micro-batch, {self.least} rows,"
            raise RuntimeError(
                f"{what} does not fit into memory ({_first_line(error)}); nothing was released. Use a smaller model, shorter "
                "inputs or another device"
            ) from error
        self.bound = max(self.least, self._multiple(1 << ((tried - 1).bit_length() - 1)))

    def _multiple(self, rows: int) -> int:
        return rows // self.least * self.least


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of new tensors that exist at one time during a piece of work; memory inside an operation is not seen."""
    count = _Count()
    with count:
        work()
    return count.peak


class _Count(TorchDispatchMode):
    """Adds up the storages that operations create, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLW3201
        for x in _tensors((args, kwargs)):
            self._note(x, new=False)
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            self._note(x, new=True)
        return result

    def _note(self, x: Tensor, *, new: bool) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if new else 0
        if new:
            weakref.finalize(storage, self._gone, key)
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and x.layout == torch.strided]


def available_bytes() -> int:
    """Bytes of main memory that this process could still take: the machine's, and those of its control group."""
    free = [found for found in (_meminfo(), _control_group()) if found is not None]
    return min(free) if free else _without_proc()


def _meminfo() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


_GROUPS = (  # of both versions of control groups: folder, limit, use, and what of it the system takes back when it must
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _control_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the process's control group and those above it leave, cached files counted as free; None without limits."""
    paths = {Path()}
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        for of in (Path(path.strip("/")) for _, names, path in lines if not names or "memory" in names.split(",")):
            paths |= {of, *of.parents}
    found = []
    for folder, limit, used, cached in _GROUPS:
        for group in (root / folder / path for path in paths):
            with contextlib.suppress(OSError, ValueError):
                most, now = (int((group / name).read_text()) for name in (limit, used))
                found.append(max(0, most - now + _told(group / "memory.stat", cached)))
    return min(found) if found else None


def _told(stat: Path, name: str) -> int:
    """One number of a table of names and numbers; 0 where it is not there."""
    with contextlib.suppress(OSError, ValueError):
        return next((int(line.split()[1]) for line in stat.read_text().splitlines() if line.split()[:1] == [name]), 0)
    return 0


def _without_proc() -> int:
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except ImportError:
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        if not all(name in getattr(os, "sysconf_names", {}) for name in names):
            return 1 << 62  # unknown: nothing is bounded
        return os.sysconf(names[0]) * os.sysconf(names[1])


# --------------------------------------------------------------------------------------------------
# Memory that is freed stays with the process: a training step asks for the same sizes again and
# again.
#
# glibc gives large blocks back to the system when they are freed, and the system clears their pages
# when they are asked for again. A private step frees and asks for more than a plain one (rows,
# norms, noise), so it pays more for that; docs/speed.md has both.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # numbers of glibc's malloc.h
_KEPT, _LARGEST, _PAD = (1 << 31) - 1, 1 << 30, 1 << 24


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory of this process, up to 2 GiB at the top of its heap, for the next allocation.

    Nothing that is computed changes. Between peaks less memory is given back, and the peak may grow by what lies between blocks.
    Call it once, before the first step; the command line does so by itself. Where the environment sets MALLOC_TRIM_THRESHOLD_
    or MALLOC_MMAP_THRESHOLD_, or glibc's tunables, that stands.

    Returns:
        Whether glibc took it. False without glibc (macOS, Windows, musl) and where the environment has its own settings.
    """
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in own) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return False
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):  # musl's mallopt does nothing
        return False
    mallopt = library.mallopt
    settings = ((_TRIM_THRESHOLD, _KEPT), (_MMAP_THRESHOLD, _LARGEST), (_TOP_PAD, _PAD))
    return all([mallopt(name, value) == 1 for name, value in settings])
