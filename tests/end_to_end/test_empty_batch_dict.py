"""Worry: "My batches are dicts with tokens of many lengths; what happens when a Poisson batch is
empty, or has one example?".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session

N = 30


class Sentences(torch.utils.data.Dataset):
    """Dicts, as tokenizers make them: sentences of 1 to 6 tokens."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(i)
        return {
            "ids": torch.randint(1, 9, (1 + i % 6,), generator=generator),
            "label": i % 3,
            "text": f"sentence {i}",
        }


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded to the longest of the batch; it must never see an empty list."""
    assert rows
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {
        "ids": ids,
        "attention_mask": (ids > 0).double(),
        "labels": torch.tensor([row["label"] for row in rows]),
        "texts": [row["text"] for row in rows],
    }


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1))


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    assert len(batch["texts"]) == len(batch["ids"]) > 0
    scores = model(batch["ids"], batch["attention_mask"])
    return F.cross_entropy(scores, batch["labels"], reduction="none")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "settings", [{}, {"max_physical_batch_size": 1}, {"pad_to_multiple": 4}, {"sampler": "fixed"}]
)
def test_empty_and_single_batches_are_releases_like_any_other(
    workers: int, settings: dict[str, object]
) -> None:
    if workers and settings:
        pytest.skip("one combination with workers is enough")
    torch.manual_seed(0)
    model, steps = Classifier().double(), 40 if not workers else 12
    p = PrivacyConfig(expected_batch_size=1, steps=steps, test_mode_seed=3, **settings).with_noise(
        1.0, 1e-3, N
    )
    sizes = set()
    with Session(
        p,
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        Sentences(),
        collate_fn=collate,
        num_workers=workers,
    ) as s:
        for batch in s.batches():
            before = [q.detach().clone() for q in model.parameters()]
            sizes.add(s.step(batch, loss_fn).batch_size)
            assert all(
                not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            )
        assert s.ledger.count == steps
    assert sizes == {1} if "sampler" in settings else {0, 1} <= sizes


def test_before_the_first_example_nothing_is_verified_and_noise_is_released() -> None:
    model = Classifier().double()
    p = PrivacyConfig(expected_batch_size=1, steps=5, test_mode_seed=None).with_noise(1.0, 1e-3, N)
    s = Session(p, model, torch.optim.SGD(model.parameters(), 0.1), Sentences(), collate_fn=collate)
    with s:
        s._draw = lambda: (torch.zeros(0, dtype=torch.long).numpy(), None)
        for batch in s.batches():
            assert s.step(batch, None).batch_size == 0  # the loss is never called
        assert s._verify and s.ledger.count == 5
