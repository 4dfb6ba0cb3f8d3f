"""Keys from the operating system, drawn when they are used and never before.

Memory can repeat: two resumptions of one snapshot and the two processes after a fork begin with equal memory. A key in
memory would give both of them equal numbers. A key that is drawn at its use differs, because the kernel is asked anew.
"""

from __future__ import annotations

import hashlib
import os
import time

__all__ = ["draw_key"]


def draw_key() -> bytes:
    """Draw a fresh 256-bit key from the operating system.

    The key is BLAKE2b (RFC 7693) of two clocks, keyed with 32 bytes of the kernel. The kernel's bytes make the key
    unpredictable. The clocks separate two resumptions of a virtual machine without a generation identifier. Its kernel does
    not notice that it was resumed, and repeats its own bytes for a while.

    Returns:
        32 bytes.
    """
    clocks = f"{time.time_ns()} {time.perf_counter_ns()}"
    return hashlib.blake2b(clocks.encode(), key=os.urandom(32), digest_size=32).digest()
