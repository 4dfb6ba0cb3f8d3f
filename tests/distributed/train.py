"""What torchrun starts: trains a small model, writes a checkpoint a step, and goes on from one that
is there.

A fault says which rank dies, where: rank:step:place, once (a file marks that it has happened).
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.distributed.cases import Case
from tests.distributed.group import TIMEOUT
from tests.test_session import kfac, loss_fn, net, weights


class Dropped(nn.Module):
    """A model with dropout, whose random numbers are each process's own."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = net(), nn.Dropout(0.3)

    def forward(self, x):
        return self.net[2](self.drop(torch.tanh(self.net[0](x))))


CASE = Case({"preconditioner": kfac(), "steps": 5}, Dropped)


def die(folder):
    """The end of a process without a word, the first time."""
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder, fault="-1:0:nowhere"):
    """Train in the process group that is there, and leave the weights of each process in the
    folder.
    """
    rank = dist.get_rank()
    victim, step, place = fault.split(":")
    armed = rank == int(victim) and not (folder / "died").exists()
    s, model = CASE.open(folder / "ledger.jsonl", verify=False)
    torch.manual_seed(100 + rank)  # other dropout on every process
    with s:
        if (folder / "checkpoint").exists():
            s.restore(folder / "checkpoint")

        def loss(model, batch):
            if armed and s.steps_done == int(step) and place == "loss":
                die(folder)
            return loss_fn(model, batch)

        if armed and place == "release":  # charged, and gone before the others receive it
            spread = s._ranks.__class__.broadcast_tensors
            s._ranks.__class__.broadcast_tensors = lambda *a: (
                die(folder) if s.steps_done > int(step) else spread(*a)
            )
        for batch in s.batches():
            s.step(batch, loss)
            s.save(folder / "checkpoint")
        save_file({"weights": weights(model)}, folder / f"weights-{rank}.safetensors")


def main(folder, fault):
    """One process of torchrun, whose environment says which."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    train(Path(folder), fault)
    dist.destroy_process_group()
