"""DP-KFC on one process, or several: torchrun --nproc-per-node=2 examples/distributed.py."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpkfc import KFAC, FeatureNoise, PrivacyConfig, Session
from dpkfc.checkpoint import exists

FOLDER = Path(os.environ.get("RUN_FOLDER", "runs/distributed"))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss an example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    """Train on this process's share of every batch."""
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every process: the same data, the same model
    x = torch.randn(4000, 16)
    data = (x, (x @ torch.randn(16, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)  # no DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    torch.manual_seed(1 + rank)  # dropout and augmentation: other numbers on every process
    kfac = KFAC(probe=FeatureNoise(16))
    config = PrivacyConfig(expected_batch_size=400, steps=60, preconditioner=kfac)
    plan = config.calibrate(epsilon=3.0, delta=1e-5, dataset_size=len(x))
    FOLDER.mkdir(parents=True, exist_ok=True)
    ledger = FOLDER / "ledger.jsonl"
    with Session(plan, model, optimizer, data, ledger_path=ledger, resume=True) as session:
        # torchrun --max-restarts=3 starts all processes again when one has died
        if exists(FOLDER / "checkpoint"):
            session.restore(FOLDER / "checkpoint")
        for batch in session.batches():
            session.step(batch, loss_fn)
            if session.steps_done % 20 == 0:
                session.save(FOLDER / "checkpoint")  # on every process; the first one writes
        if rank == 0:
            with torch.no_grad():  # on the training data
                score = (model(x.to(device)).argmax(1).cpu() == data[1]).float().mean()
            print(f"ε {session.epsilon:.2f}, accuracy {score:.2f}, {session.steps_done} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
