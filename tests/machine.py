"""What a test run needs of its machine, and one line that says what is missing."""

from __future__ import annotations

import platform
import shutil
import tempfile

import torch

# A whole run leaves less behind; a failing test keeps its files.
ENOUGH_AT_START = 1 << 30
FULL = 16 << 20


def find_missing() -> str:
    """Return what keeps every test of this machine from running, or nothing."""
    try:
        # The check writes, since the superuser is told that every folder may be written.
        with tempfile.TemporaryFile() as file:
            file.write(b"0")
    except OSError as error:
        return f"no folder for temporary files ({error.strerror or error}): set TMPDIR to one"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < ENOUGH_AT_START:
        return (
            f"{tempfile.gettempdir()} has {free >> 20} MiB left and the tests need"
            f" {ENOUGH_AT_START >> 20}: free some, or set TMPDIR to another disk"
        )
    return ""


def is_disk_full() -> bool:
    """Return whether temporary files find no room any more."""
    return shutil.disk_usage(tempfile.gettempdir()).free < FULL


def untried_processor() -> str:
    """Return a remark on a processor that not all tests were tried on, or nothing."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        return ""
    return (
        f"this {platform.machine()} has {capability} in the place of AVX2 or AVX512, where some"
        " tests alone were tried (docs/assurance.md#other-processors)"
    )
