"""Train on Ray, each worker on its own part: python examples/cluster/ray_train.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOTAL = 4000


def read_rows(first: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the records of one part; read your own files here."""
    x = torch.randn(TOTAL, 16, generator=torch.Generator().manual_seed(0))
    return x[first:end], (x[first:end].sum(1) > 0).long()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return one loss an example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(settings: dict[str, Any]) -> None:
    """Train on the part of this worker. Ray has joined the process group."""
    from ray import train as ray_train

    from dpkfc import PrivacyConfig, Session

    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    first, end = rank * TOTAL // world, (rank + 1) * TOTAL // world
    torch.manual_seed(0)
    model = nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = PrivacyConfig(expected_batch_size=400, steps=settings["steps"])
    plan = config.calibrate(epsilon=3.0, delta=1e-5, dataset_size=TOTAL)
    # Worker 0 alone writes the ledger. A trainer that Ray starts again continues it.
    ledger = Path(settings["out"]) / "ledger.jsonl"
    share = f"rows:{first}-{end}"
    data = read_rows(first, end)
    with Session(plan, model, optimizer, data, ledger_path=ledger, share=share) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
        ray_train.report({"epsilon": session.epsilon, "steps": session.steps_done})


def main() -> None:
    """Start the workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"), help="on a shared disk")
    parser.add_argument("--address", help="of a cluster; left out: Ray on this machine")
    arguments = parser.parse_args()
    if len(sys.executable.split()) > 1:
        parser.error(
            f"Ray starts no workers where the path of Python has a space: {sys.executable}"
        )
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    local = {} if arguments.address else {"num_cpus": arguments.workers, "include_dashboard": False}
    ray.init(address=arguments.address, **local)
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": str(out), "steps": arguments.steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(storage_path=str(out)),
    )
    trainer.fit()
    ray.shutdown()
    print(f"dpkfc ledger verify {out}")


if __name__ == "__main__":
    main()
