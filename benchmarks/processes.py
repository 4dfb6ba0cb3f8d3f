"""Processes that take the steps of one logical batch together (gloo), each told through a pipe what
to do.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# the case and its preconditioner, or None; a function of a module, for a new process
Make = Callable[[], tuple[Any, Any]]


@contextmanager
def start_processes(
    ways: Mapping[str, tuple[int, int]], make: Make
) -> Iterator[dict[str, list[Any]]]:
    """The processes of every way, all alive at once and ready.

    Args:
        ways: name to processes and threads of each.
        make: what they train.

    Yields:
        Name to the pipes of its processes; see `seconds`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, list[Any]] = {way: [] for way in ways}
        running = []
        for number, (way, (world, threads)) in enumerate(ways.items()):
            for rank in range(world):
                here, there = context.Pipe()
                running.append(
                    context.Process(
                        target=_worker,
                        args=(f"{number}", rank, world, threads, make, folder, there),
                    )
                )
                running[-1].start()
                pipes[way].append(here)
        everyone = [pipe for own in pipes.values() for pipe in own]
        try:
            for pipe in everyone:
                pipe.recv()
            yield pipes
            for pipe in everyone:
                pipe.send("stop")
        except BaseException:
            for process in running:
                process.kill()
            raise
        finally:
            for process in running:
                process.join()


def seconds(pipes: list[Any], what: str) -> float:
    """How long all processes of a way take together for a `step`, or a `refresh` of K-FAC."""
    time.sleep(0.02)  # idle threads of the one before have stopped spinning
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send(what)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - start


def _worker(
    way: str, rank: int, world: int, threads: int, make: Make, folder: str, pipe: Any
) -> None:
    """One process: does what it is told, until it is told to stop."""
    import torch
    import torch.distributed as dist

    from contenders import open_session, setting_for
    from memory import wake_libraries

    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{way}-store", rank=rank, world_size=world
        )
    case, preconditioner = make()
    setting = setting_for(case, Path(folder), copies=False)
    session, step = open_session(setting, ledger=way, preconditioner=preconditioner)
    wake_libraries("cpu")
    done = 0

    pipe.send("ready")
    while (what := pipe.recv()) != "stop":
        if what == "step":
            step()
        else:
            done += 1
            session._pipeline.preconditioning.refresh(10_000 * done)  # a step at which it is due
        pipe.send(what)
    session.close()
    if world > 1:
        dist.destroy_process_group()
