"""Wait until the disk has what was written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the disk has a file or, where the system can, the names in a folder."""
    if not path.is_dir():
        # Windows syncs only what can be written.
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
