"""Several processes over gloo, started once and used for many cases."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")  # torch is imported once for all processes
_CONTEXT.set_forkserver_preload(["dpkfc.session", "tests.distributed.cases"])
TIMEOUT = timedelta(seconds=30)


def start(rank: int, world: int, store: Path) -> None:
    """Join a group of this many processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)


def _main(work: Callable[..., Any], rank: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ.update(OMP_NUM_THREADS="1")
    torch.save(work(rank, Path(folder), *args), Path(folder) / f"result-{rank}.pt")


def run(work: Callable[..., Any], processes: int, *args: Any, folder: Path | None = None) -> list[Any]:
    """What `work(rank, folder, *args)` returns on every process; None of one that died.

    Args:
        work: a function of a module; it joins groups itself (`start`).
        processes: how many.
        args: further arguments.
        folder: shared by them; a temporary one by default.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        started = [_CONTEXT.Process(target=_main, args=(work, rank, str(place), args)) for rank in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
            process.kill()
        paths = [place / f"result-{rank}.pt" for rank in range(processes)]
        return [torch.load(path, weights_only=True) if path.exists() else None for path in paths]
