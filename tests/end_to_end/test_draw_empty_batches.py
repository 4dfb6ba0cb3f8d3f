"""Train on dicts of texts of many lengths, in Poisson batches of no and of one example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Words
from tests.sessions import open_session

N = 30


class Sentences(torch.utils.data.Dataset):
    """Dicts, as tokenizers make them: sentences of 1 to 6 tokens."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {
            "ids": torch.randint(1, 9, (1 + i % 6,), generator=generator),
            "label": i % 3,
            "text": f"sentence {i}",
        }


def collate(rows):
    """Padded to the longest of the batch; it must never see an empty list."""
    assert rows
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {
        "ids": ids,
        "labels": torch.tensor([row["label"] for row in rows]),
        "texts": [row["text"] for row in rows],
    }


def loss_fn(model, batch):
    assert len(batch["texts"]) == len(batch["ids"]) > 0
    scores = model(batch["ids"])
    return F.cross_entropy(scores, batch["labels"], reduction="none")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 1}, {"sampler": "fixed"}])
def test_empty_and_single_batches_are_releases_like_any_other(workers, settings):
    if workers and settings:
        pytest.skip("one combination with workers is enough")
    torch.manual_seed(0)
    model, steps = Words(3, masked=True).double(), 40 if not workers else 12
    settings = {"expected_batch_size": 1, "steps": steps, "test_mode_seed": 3, **settings}
    # Behind plain SGD a batch that were not released would leave the weights as they are.
    loading = {"collate_fn": collate, "num_workers": workers}
    sizes = set()
    with open_session(model, Sentences(), **settings, **loading) as s:
        for batch in s.batches():
            before = [q.detach().clone() for q in model.parameters()]
            sizes.add(s.step(batch, loss_fn).batch_size)
            assert all(
                not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            )
        assert s.ledger.count == steps
    assert sizes == {1} if "sampler" in settings else {0, 1} <= sizes
