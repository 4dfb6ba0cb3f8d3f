"""What a step costs beside a large embedding table, whose rows are hardly read."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

Row = tuple[str, float, float | None]
ROWS, WIDTH, BATCH, READS, RECORDS = 2_000_000, 32, 512, 20, 50_000


def embeddings(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step with and without privacy, and with noise that waits."""
    import torch

    from dpkfc import PrivacyConfig, Session

    class Bag(torch.nn.Module):
        def __init__(self, sparse: bool = False) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse)
            self.head = torch.nn.Linear(WIDTH, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids).mean(1))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (RECORDS, READS), generator=generator)
    labels = torch.randint(0, 2, (RECORDS,), generator=generator)
    plan = PrivacyConfig(expected_batch_size=BATCH, steps=10_000).with_noise(1.0, 1e-6, RECORDS)
    seconds: dict[str, list[float]] = {"plain sparse": [], "lazy noise": [], "DP-SGD": []}
    plain = Bag(sparse=True)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step_plainly() -> None:
        rows = torch.randint(0, RECORDS, (BATCH,))
        loss(plain, (ids[rows], labels[rows])).mean().backward()
        sgd.step()
        sgd.zero_grad()

    with ExitStack() as stack:
        steps: dict[str, Any] = {"plain sparse": step_plainly}
        for name in ("lazy noise", "DP-SGD"):
            model = Bag()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session = stack.enter_context(Session(plan, model, optimizer, (ids, labels)))
            if name == "lazy noise":
                stack.enter_context(session.lazy_noise())
            batches = session.batches()
            steps[name] = lambda session=session, batches=batches: session.step(next(batches), loss)
        for _ in range(3 * repeats + 1):
            for name, step in steps.items():
                begun = time.process_time()
                step()
                seconds[name].append(time.process_time() - begun)
        begun = time.process_time()
        stack.close()
        filled = time.process_time() - begun
    # The first step checks the loss, and empties the table.
    least = {name: min(found[1:]) for name, found in seconds.items()}
    return {
        "rows": ROWS,
        "width": WIDTH,
        "batch_size": BATCH,
        "reads_of_a_record": READS,
        "milliseconds": {name: 1000 * value for name, value in least.items()},
        "milliseconds_of_the_end": 1000 * filled,
        "ratio": least["lazy noise"] / least["plain sparse"],
        "ratio_without_lazy_noise": least["DP-SGD"] / least["plain sparse"],
        "goal": 20,
    }


def embedding_rows(found: dict[str, Any]) -> list[Row]:
    """Return what was found, with its goal."""
    table = f"embeddings {found['rows']:,} × {found['width']}, batch {found['batch_size']}"
    return [
        (f"{table}: step with lazy noise ÷ plain sparse step", found["ratio"], found["goal"]),
        (f"{table}: without lazy noise", found["ratio_without_lazy_noise"], None),
    ]
