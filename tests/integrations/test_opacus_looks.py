"""When an engine compares the model with plain autograd, and what it cuts into examples to do so."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.gradients.layers import find_layers
from dpkfc.integrations._checks import check_model
from dpkfc.integrations._rows import picker
from tests.gradients.test_finer import Rounded
from tests.integrations.opacus_cases import backward, loader, mlp, private, train


class Switched(nn.Module):
    """Centres over the batch when it is told to; mixes a share of the batches at random."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()
        self.centre, self.strength, self.share = False, 0.0, share

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.training and random.random() < self.share:
            h = 0.7 * h + 0.3 * h[torch.randperm(len(h))]
        return self.second(h - h.mean(0) * (1.0 if self.centre else self.strength))


def test_a_switch_is_seen_in_the_batch_in_which_it_is_thrown() -> None:
    engine, model, optimizer, batches = private(Switched())
    train(model, optimizer, batches, 2)
    model.centre = True
    with pytest.raises(ValueError, match="batch of 2 differs.*what was released before may have no bound"):
        train(model, optimizer, batches)
    assert engine.ledger.count == 2


def test_a_change_that_is_no_switch_is_seen_at_the_next_power_of_two() -> None:
    engine, model, optimizer, batches = private(Switched())
    train(model, optimizer, batches, 2)
    model.strength = 1.0
    with pytest.raises(ValueError, match=r"batch of 2 differs.*This is batch 4"):
        train(model, optimizer, batches)
    assert engine.ledger.count == 3


def test_a_model_that_turns_its_switches_every_time_is_not_looked_at_forever() -> None:
    calls = []

    class Restless(Switched):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    _, model, optimizer, batches = private(Restless(), data_loader=loader(batch_size=20))
    for k in range(40):
        for name in range(6):
            setattr(model, f"flag{name}", bool(k >> name & 1))
        train(model, optimizer, batches, 1)
    at_first = len(calls)
    for k in range(40, 50):
        for name in range(6):
            setattr(model, f"flag{name}", bool(k >> name & 1))
        train(model, optimizer, batches, 1)
    assert len(calls) == at_first + 10


def test_mixing_at_random_is_found_under_other_numbers_than_the_first() -> None:
    def smallest(seed: int) -> float:
        numbers = random.Random(seed)
        return min(numbers.random() for _ in range(8))

    random.seed(next(seed for seed in range(10000) if smallest(seed) > 0.5)), torch.manual_seed(0)
    engine, model, optimizer, batches = private(Switched(share=0.5), data_loader=loader(batch_size=20))
    with pytest.raises(ValueError, match="when only the examples beside it did"):
        train(model, optimizer, batches)
    assert engine.ledger.count == 0


def test_a_look_leaves_all_generators_where_they_were() -> None:
    _, model, _, batches = private(Switched(1e-12), data_loader=loader(batch_size=20))
    batch = next(iter(batches))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    backward(model, batch)
    after = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.random()  # of the one pass itself
    assert after == (random.random(), np.random.rand(), torch.rand(()))


class Standardised(nn.Module):
    """Divides by the batch: what it makes of one example alone is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - x.mean(0)) / x.std(0))


def test_a_model_that_is_nan_without_company_is_refused() -> None:
    engine, model, optimizer, batches = private(Standardised())
    with warnings.catch_warnings(), pytest.raises(ValueError, match="alone is NaN|not where the example stands alone"):
        warnings.simplefilter("ignore")
        train(model, optimizer, batches)
    assert engine.ledger.count == 0


# -- what is cut -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A character model that takes its hidden state, and returns it too."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, *, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8)
        self.rnn = kind(8, 8, num_layers=layers, bidirectional=both, batch_first=True)
        self.head = nn.Linear(16 if both else 8, 3)

    def forward(self, ids: Tensor, hidden=None):
        out, hidden = self.rnn(self.table(ids), hidden)
        return self.head(out[:, -1]), hidden


def texts(n: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(1, 20, (n, 7), generator=generator), torch.randint(3, (n,), generator=generator))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("kind", "layers", "both"), [(nn.LSTM, 1, False), (nn.LSTM, 2, False), (nn.GRU, 1, True)])
def test_hidden_states_are_cut_along_their_second_axis(kind, layers: int, both: bool, given: bool) -> None:
    data = DataLoader(texts(), batch_size=12)
    engine, model, optimizer, batches = private(Recurrent(kind, layers, both=both), data_loader=data)
    for ids, y in batches:
        h = torch.zeros(layers * (2 if both else 1), len(ids), 8)
        logits, _ = model(ids, (h, h) if kind is nn.LSTM else h) if given else model(ids)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    assert engine.ledger.count == 4


class Packed(nn.Module):
    """Takes lengths, as a list or a tensor, or a sequence that is packed already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, lengths=None) -> Tensor:
        packed = x if lengths is None else pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])


def ragged(as_list: bool):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(2 + i % 5, 4, generator=generator), torch.tensor(i % 3)) for i in range(48)]

    def collate(examples):
        lengths = [len(x) for x, _ in examples]
        x = pad_sequence([x for x, _ in examples], batch_first=True)
        return x, lengths if as_list else torch.tensor(lengths), torch.stack([y for _, y in examples])

    return DataLoader(rows, batch_size=12, collate_fn=collate)


@pytest.mark.parametrize("as_list", [True, False])
def test_lengths_may_be_a_list(as_list: bool) -> None:
    engine, model, optimizer, batches = private(Packed(), data_loader=ragged(as_list))
    for x, lengths, y in batches:
        F.cross_entropy(model(x, lengths), y).backward()
        optimizer.step()
    assert engine.ledger.count == 4


def test_a_list_of_lengths_does_not_hide_that_padding_is_read() -> None:
    class Mean(Packed):
        def forward(self, x, lengths=None) -> Tensor:
            return self.head(self.rnn(x)[0].mean(1))

    engine, model, _, batches = private(Mean(), data_loader=ragged(as_list=True))
    with pytest.raises(ValueError, match="how far it is padded"):
        for x, lengths, _y in batches:
            model(x, lengths)
    assert engine.ledger.count == 0


def test_an_empty_batch_of_packed_sequences_is_stepped_alone() -> None:
    settings = {"data_loader": DataLoader(ragged(False).dataset, batch_size=2, collate_fn=ragged(False).collate_fn)}
    engine, model, optimizer, batches = private(Packed(), **settings)
    empty = 0
    for x, lengths, y in batches:
        empty += len(y) == 0
        if len(y):
            F.cross_entropy(model(x, lengths), y).backward()
        optimizer.step()
    assert empty and engine.ledger.count == len(batches)


def test_a_packed_sequence_has_no_examples() -> None:
    for verify, match in ((True, "PackedSequence.*pack them inside forward"), (False, "pack them inside forward")):
        engine, model, optimizer, batches = private(Packed(), data_loader=ragged(as_list=False), verify=verify)
        with pytest.raises((ValueError, RuntimeError), match=match):
            for x, lengths, y in batches:
                F.cross_entropy(model(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)), y).backward()
                optimizer.step()
        assert engine.ledger.count == 0


class Turned(nn.Module):
    """Takes something whose batch is on the second axis, and only as much of it as of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            raise RuntimeError("the model's own mistake")
        return self.inner(x + y.transpose(0, 1))


def test_what_cannot_be_cut_is_told_with_its_ways_out() -> None:
    engine, model, _, batches = private(Turned())
    with pytest.raises(ValueError, match=r"takes the whole batch but not single examples.*inside forward.*verify=False"):
        for x, _y in batches:
            model(x, x.transpose(0, 1))
    assert engine.ledger.count == 0


def test_a_mistake_of_the_models_own_is_told_as_it_is() -> None:
    _, model, _, batches = private(Turned())
    with pytest.raises(RuntimeError, match="the model's own mistake"):
        for x, _y in batches:
            model(x.float(), x.transpose(0, 1))


def test_what_is_shared_stays_whole() -> None:
    table, size = torch.randn(3, 5), (4, 5)
    inputs = ((torch.arange(8.0).reshape(4, 2), table, [1, 2, 3, 4], ["a"], 0.5), {"more": {"y": torch.arange(4)}})
    args, kwargs = picker(inputs, size[0])(2, 0)
    assert args[0].tolist() == [[4, 5], [0, 1]] and args[1] is table and args[2:] == ([3, 1], ["a"], 0.5)
    assert kwargs["more"]["y"].tolist() == [2, 0]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_kink_that_rounding_decides_is_no_mixing_of_examples(mixing: float) -> None:
    torch.manual_seed(0)
    model = Rounded(mixing)
    x = torch.randn(4, 40)
    with pytest.raises(ValueError, match="differs from that of the example alone") if mixing else nullcontext():
        check_model(model, find_layers(model), ((x,), {}), 4)
