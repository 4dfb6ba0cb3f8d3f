"""Keep freed memory in the process: a training step asks for the same sizes again and again.

glibc gives large freed blocks back to the system, which clears their pages before it hands them
out again. A private step frees and allocates more than a plain one (rows, norms, noise), so it
pays more. docs/results/speed.md has both times.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # numbers of glibc's malloc.h
_KEPT = (1 << 31) - 1
_LARGEST = 1 << 30
_PAD = 1 << 24


@contextmanager
def import_without_collection() -> Iterator[None]:
    """Import modules without a search for garbage among their objects, now and later.

    It saves an eighth of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to 2 GiB of freed memory of this process for the next allocation.

    No result changes. Less memory is given back between peaks, and fragmentation may raise the
    peak. Call this function once, before the first step; the command line does so by itself.
    Settings in the environment (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, glibc's
    tunables) are kept.

    Returns:
        Whether glibc accepted the settings. False without glibc (macOS, Windows, musl) and if the
        environment has its own settings.
    """
    has_settings = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if has_settings or "glibc.malloc" in tunables or not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return False
    # musl has a mallopt that does nothing. glibc has this name too.
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_TRIM_THRESHOLD, _KEPT), (_MMAP_THRESHOLD, _LARGEST), (_TOP_PAD, _PAD))
    return all([library.mallopt(name, value) == 1 for name, value in settings])
