"""Several processes over gloo, started once and used for many cases."""

import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests import forked

TIMEOUT = timedelta(minutes=3)  # a busy machine is no fault


def start(rank, world, store):
    """Join a group of this many processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )


def _main(work, rank, folder, args):
    os.environ.update(OMP_NUM_THREADS="1")
    found = json.dumps(work(rank, Path(folder), *args), default=torch.Tensor.tolist)
    (Path(folder) / f"result-{rank}.json").write_text(found, "utf-8")


def run(work, processes, *args, folder=None):
    """What `work(rank, folder, *args)` returns on every process, tensors as lists of the very
    numbers; None of one that died.

    Args:
        work: a function of a module; it joins groups itself (`start`) and returns what JSON holds,
            and tensors.
        processes: how many.
        args: further arguments.
        folder: shared by them; a temporary one by default.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        started = [forked.start(_main, work, rank, str(place), args) for rank in range(processes)]
        for process in started:
            process.join(1200)
            process.kill()
        paths = [place / f"result-{rank}.json" for rank in range(processes)]
        return [json.loads(path.read_text("utf-8")) if path.exists() else None for path in paths]
