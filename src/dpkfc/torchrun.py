"""Read what torchrun tells the processes that it starts. All of it is in the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence


def is_launched() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def read_number(name: str, default: int) -> int:
    """Return a number that torchrun has set; the default without torchrun."""
    return int(os.environ.get(name, default)) if is_launched() else default


def processes_on_this_host() -> int:
    """Return the number of processes that share the memory of this host; 1 without torchrun."""
    return read_number("LOCAL_WORLD_SIZE", 1)


def is_first() -> bool:
    """Return whether this process speaks for the run: alone, or the first of torchrun's."""
    return read_number("RANK", 0) == 0


def check_single(command: Sequence[str]) -> None:
    """Refuse to run any command of `dpkfc` but `train` under torchrun.

    Raises:
        ValueError: torchrun has started the command. Each process would spend the whole budget, and
            each restart would spend it again.
    """
    if is_launched() and list(command) != ["train"]:
        name = " ".join(["dpkfc", *command])
        raise ValueError(
            f"`{name}` runs in one process; start it without torchrun (only `dpkfc train` divides "
            "its batches over processes)"
        )
