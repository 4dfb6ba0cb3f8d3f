"""What an engine makes of a batch on its way to the model, of a run that was resumed, and of a
model that is taken away.
"""

import re
import warnings
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.integrations.opacus_cases import (
    B,
    N,
    backward,
    cut,
    loader,
    make_private,
    mlp,
    private,
    train,
)
from tests.models import Words
from tests.recording import Heard


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("same_length", [0, 60])
def test_padding_is_looked_for_in_any_mapping_and_behind_many_records_of_one_length(
    kind, same_length
):
    g = torch.Generator().manual_seed(0)
    lengths = [5] * same_length + [3, 9] * 4
    rows = [
        (torch.randint(1, 30, (n,), generator=g), torch.tensor(i % 3))
        for i, n in enumerate(lengths)
    ]

    def collate(batch):
        return kind(
            {
                "ids": pad_sequence([x for x, _ in batch], batch_first=True),
                "y": torch.stack([y for _, y in batch]),
            }
        )

    engine, model, optimizer, batches = private(
        Words(3), data_loader=DataLoader(rows, batch_size=8, collate_fn=collate)
    )
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        model(next(iter(batches))["ids"])
    assert engine.ledger.count == 0


@pytest.mark.quick("False-0", "True-1")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sequence_first", [False, True])
def test_the_check_of_a_model_takes_no_length_from_a_private_batch(first, sequence_first):
    """Its passes are the same whatever the longest text of the first batch is."""

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids):
            shapes.append(tuple(ids.shape))
            return self.head(self.table(ids).sum(0 if sequence_first else 1))

    def collate(batch):
        return pad_sequence([x for x, _ in batch], batch_first=True), torch.tensor([0] * len(batch))

    noted = []
    for longest in (21, 33):
        shapes = Heard()
        lengths = (4, 7, longest) * 14
        rows = [(torch.ones(length, dtype=torch.long), 0) for length in lengths]
        _, model, _, batches = private(
            Noted(), data_loader=DataLoader(rows, batch_size=16, collate_fn=collate)
        )
        ids = next(iter(batches))[0][:, first:]
        ids = ids.T if sequence_first else ids
        model(ids)
        noted.append(list(shapes)[: shapes.index(tuple(ids.shape))])
    assert noted[0] and noted[0] == noted[1]


# -- rows that change on their way -----------------------------------------------------------------


def list_warnings(change):
    _, model, optimizer, batches = private(data_loader=loader(batch_size=20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches:
            F.cross_entropy(model(change(x)), y).backward()
            optimizer.step()
    return [str(x.message) for x in caught]


class WithMean(nn.Module):
    """Returns the mean over the batch beside its outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x):
        y = self.layer(x)
        return y, y.mean(0)


def test_no_error_tells_the_size_of_a_private_batch():
    _, model, _, batches = private(WithMean(), verify=False)
    with pytest.raises(ValueError, match="needs one axis for the examples") as mixed:
        for x, _ in batches:
            model(x)
    assert re.findall("[0-9]+", str(mixed.value)) == ["3"]
    with pytest.raises(ValueError, match="was made by aten.flip") as hidden:
        list_warnings(lambda x: 0.7 * x + 0.3 * x.flip(0))
    assert not re.findall("[0-9]", str(hidden.value))


# -- a run that goes on ----------------------------------------------------------------------------


def train_pass(model, optimizer, batches, physical):
    if physical is None:
        return train(model, optimizer, batches)
    with cut(batches, optimizer, physical) as parts:
        return train(model, optimizer, parts)


@pytest.mark.parametrize("physical", [None, 3])
def test_a_resumed_run_ends_with_its_releases(tmp_path, physical):
    """Lost steps are spent: the last pass is shorter, and the script comes to its last
    checkpoint.
    """
    path = tmp_path / "ledger.jsonl"
    engine, model, optimizer, batches = make_private(ledger_path=path)
    train(model, optimizer, batches, 3)
    engine.close()
    engine, model, optimizer, batches = make_private(ledger_path=path, resume=True)
    train_pass(model, optimizer, batches, physical)
    assert engine.ledger.remaining == 2
    with pytest.warns(UserWarning, match="all 10 releases of the plan are spent, 3 of them before"):
        train_pass(model, optimizer, batches, physical)
    assert engine.ledger.remaining == 0 and engine.ledger.count == 2 * N // B
    assert train_pass(model, optimizer, batches, physical) == 0
    assert all(p.grad is None for p in model.parameters())
    engine.close()


# -- the model, taken away -------------------------------------------------------------------------


def test_a_model_is_scripted_once_its_engine_is_closed():
    engine, model, optimizer, batches = private(mlp())
    backward(model, next(iter(batches)))
    optimizer.step()
    model.eval()
    with pytest.raises(RuntimeError, match=r"call engine.close\(\) first"):
        torch.jit.script(model)
    engine.close()
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(torch.jit.script(model)(x), model(x))
