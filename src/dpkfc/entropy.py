"""Keys from the operating system, drawn when they are used and never before.

Memory can repeat: two resumptions of one snapshot and the two processes after a fork begin with
equal memory. A key in memory would give both of them equal numbers. A key that is drawn at its use
differs, because the kernel is asked anew.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time


def draw_key() -> bytes:
    """Draw a fresh 256-bit key from the operating system.

    The key is BLAKE2b (RFC 7693) of two clocks, keyed with 32 bytes of the kernel. The kernel's
    bytes make the key unpredictable. The clocks separate two resumptions of a virtual machine
    without a generation identifier. Its kernel does not notice that it was resumed, and repeats its
    own bytes for a while.

    Returns:
        32 bytes.
    """
    clocks = f"{time.time_ns()} {time.perf_counter_ns()}"
    return hashlib.blake2b(clocks.encode(), key=os.urandom(32), digest_size=32).digest()


# --------------------------------------------------------------------------------------------------
# The number of forks between the first process and this one.
#
# A process identifier does not show a fork: with PID namespaces a parent and its child can both be
# process 1.


class _Process:
    """Counts in every child that is forked from a process in which this module was imported."""

    forks = 0

    @classmethod
    def add_fork(cls) -> None:
        cls.forks += 1


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_Process.add_fork)


def count_forks() -> int:
    """Return the number of forks.

    An object that stores it can tell a child from the process that made the object.
    """
    return _Process.forks
