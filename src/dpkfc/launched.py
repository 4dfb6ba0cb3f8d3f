"""What torchrun says to the processes that it starts, read from the environment: nothing of torch is imported for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["check_single", "is_first", "is_launched", "processes_on_this_host", "processes_started"]


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes_started() -> int:
    """Processes that torchrun has started, on all hosts; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def processes_on_this_host() -> int:
    """Processes that torchrun has started here, which share the memory of this host; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched() else 1


def is_first() -> bool:
    """Whether this process speaks for the run: alone, or the first of torchrun's."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def check_single(command: Sequence[str]) -> None:
    """Refuse a command of `dpkfc` that is not divided over processes: all but `train`.

    Raises:
        ValueError: torchrun has started it. Each process would spend the whole budget, and each restart once more.
    """
    if is_launched() and list(command) != ["train"]:
        raise ValueError(
            f"`{' '.join(['dpkfc', *command])}` runs on one process and is not continued by a restart: start it without torchrun "
            "(`dpkfc train` divides its batches over the processes of torchrun)"
        )
