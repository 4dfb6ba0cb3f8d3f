"""Memory that is freed stays with the process: a training step asks for the same sizes again and again.

glibc gives large blocks back to the system when they are freed, and the system clears their pages when they are asked for again.
A private step frees and asks for more than a plain one (rows, norms, noise), so it pays more for that; docs/speed.md has both.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

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
