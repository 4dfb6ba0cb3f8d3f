"""Worry: "The first two examples of my first batch happened to be alike, and the check saw nothing"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.micro import check_examples
from dpkfc.gradients.watch import Watch, code_of, differences, partners
from dpkfc.session import Session

N, D = 120, 4
Batch = tuple[Tensor, Tensor]


@contextmanager
def session(model: nn.Module, dataset: Any, seed: int = 0, steps: int = 3, **settings: Any) -> Iterator[Session]:
    own = {name: settings.pop(name) for name in ("collate_fn",) if name in settings}
    plan = PrivacyConfig(expected_batch_size=24, steps=steps, test_mode_seed=seed, **settings).with_noise(1.0, 1e-3, N)
    with Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), dataset, **own) as s:
        yield s


def train(s: Session, *losses: Callable[..., Tensor]) -> int:
    for i, batch in enumerate(s.batches()):
        s.step(batch, losses[min(i, len(losses) - 1)])
    return s.steps_done


def net(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), *more, nn.Tanh(), nn.Linear(6, 2)).double()


def data(seed: int, share: float = 0.1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, (torch.rand(N, generator=generator) < share).long()


def plain(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# -- examples that differ in what is mixed -----------------------------------------------------------------------------


def balanced(model: nn.Module, batch: Batch) -> Tensor:
    """Class weights of mean 1 over the batch: no gradient carries what others do to it, and equal labels do nothing."""
    w = torch.where(batch[1] > 0, 9.0, 1.0)
    return w / w.mean() * plain(model, batch)


@pytest.mark.parametrize("bound", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_class_weights_that_are_normalised_over_the_batch(seed: int, bound: int | None) -> None:
    with session(net(), data(seed, 0.3), seed, max_physical_batch_size=bound) as s:
        with pytest.raises(ValueError, match="mixes examples"):
            train(s, balanced)
        assert s.ledger.count == 0


def test_a_vector_of_losses_against_a_column_of_outputs() -> None:
    """mse_loss of [B, 1] and [B] is [B, B]; its mean over one axis looks like one loss an example."""

    def broadcast(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0])[:, :1], batch[1].double(), reduction="none").mean(1)

    with (
        session(net(), data(1), 1) as s,
        pytest.warns(UserWarning, match="target size"),
        pytest.raises(ValueError, match="mixes examples"),
    ):
        train(s, broadcast)


class Averaged(nn.Module):
    """The mean over a text, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 6), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def texts(seed: int, longer: float) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    full = [bool(torch.rand((), generator=g) < longer) for _ in range(N)]
    lengths = [9 if long else int(torch.randint(2, 9, (), generator=g)) for long in full]
    return [(torch.randint(1, 30, (t,), generator=g), torch.randint(2, (), generator=g)) for t in lengths]


def padded(rows: list[tuple[Tensor, Tensor]]) -> Batch:
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("bound", [None, 2])
@pytest.mark.parametrize("seed", range(4))
def test_texts_most_of_which_are_cut_to_one_length(seed: int, bound: int | None) -> None:
    with session(Averaged().double(), texts(seed, 0.8), seed, collate_fn=padded, max_physical_batch_size=bound) as s:
        with pytest.raises(ValueError, match="mixes examples.*padding to the longest"):
            train(s, plain)
        assert s.ledger.count == 0


def test_what_the_first_batch_has_not_is_looked_for_in_later_ones() -> None:
    x, y = data(0)
    with session(net(), (x, y), steps=10) as s:
        drawn = s.batches()
        for i, batch in enumerate(drawn):
            y.zero_()
            if i < 3:
                s.step(batch, balanced)  # equal labels: a mean over equal weights
                continue
            y[batch.indices[5]] = 1
            with pytest.raises(ValueError, match="mixes examples"):
                s.step(batch, balanced)
            break
        assert s.ledger.count == 3


class Counted(torch.utils.data.Dataset):
    """Says how often it was read; its labels are all alike."""

    def __init__(self) -> None:
        self.x, self.read = data(0)[0], 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read += 1
        return self.x[i], 0


def test_few_records_are_read_for_it_and_one_day_none() -> None:
    dataset, more = Counted(), []
    with session(net(), dataset, steps=30, sampler="fixed") as s:
        for batch in s.batches():
            before = dataset.read
            s.step(batch, plain)
            more.append(dataset.read - before - len(batch.indices))
    # what is chosen from up to 64 records, later 16, is read once more for the check itself; all is checked in steps 2, 4, 8, 16
    assert 2 <= more[0] <= 64 + 24 and all(0 <= n <= 16 + 24 for n in more[1:25]) and more[5] > 0 and not any(more[25:])
    assert [i + 1 for i, n in enumerate(more) if n > 16] == [1, 2, 4, 8, 16]


def test_tensors_that_differ_from_the_start_are_read_once() -> None:
    looks = []
    watch = Watch()
    x, y = torch.randn(8, D), torch.arange(8)

    def batch_of(*rows: int) -> Batch:
        looks.append(rows)
        return x[list(rows), : 1 + rows[0] % 2], y[list(rows)]

    for _ in range(4):
        watch.look(net(), plain, lambda: batch_of, 8, most=6, check=lambda chosen, count, beside: True)
    assert len(looks) == 2 * 3  # in steps 1, 2 and 4


def test_the_choice_covers_every_difference_in_few_pairs() -> None:
    one = {"ids": torch.zeros(1, 3, dtype=torch.long), "y": torch.tensor([0]), "text": ["a"]}
    longer = {"ids": torch.zeros(1, 4, dtype=torch.long), "y": torch.tensor([0]), "text": ["b"]}
    other = {**one, "y": torch.tensor([1])}
    assert differences(one, one) == set()
    assert differences(one, longer) == {(0, "length"), (0, "value"), (2, "value")}
    assert differences([0, np.array([1, 2])], [1, np.array([1, 3])]) == {(0, "value"), (1, "value")}
    assert differences(one, other) == {(1, "value")}
    found = [differences(one, x) for x in (one, other, other, longer)]
    assert partners(found, 5, frozenset().union(*found)) == [3, 1]
    assert partners(found, 1, frozenset().union(*found)) == [3] and partners([], 5, {(0, "value")}) == []


class Flagged(Dataset[Any]):
    """One in twenty records counts, drawn anew on every reading."""

    def __init__(self) -> None:
        self.x, _ = data(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[i], torch.tensor(0), (torch.rand(()) < 0.05).double()


def over_those_that_count(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses * batch[2] / batch[2].sum().clamp(min=1)


def test_a_look_that_shows_nothing_is_repeated_under_other_numbers() -> None:
    with session(net(), Flagged(), steps=60) as s:
        with pytest.raises(ValueError, match="differs|do not add up"):
            train(s, over_those_that_count)
        assert s.steps_done > 0


# -- mixing at random ----------------------------------------------------------------------------------------------------


def mixup(model: nn.Module, batch: Batch, weight: Callable[[], float]) -> Tensor:
    part, partner = weight(), torch.randperm(len(batch[0]))
    out = model(part * batch[0] + (1 - part) * batch[0][partner])
    targets = (batch[1], batch[1][partner])
    one, other = (F.cross_entropy(out, y, reduction="none") for y in targets)
    return part * one + (1 - part) * other


def of_torch(model: nn.Module, batch: Batch) -> Tensor:
    return mixup(model, batch, lambda: float(torch.distributions.Beta(0.2, 0.2).sample()))


def of_numpy(model: nn.Module, batch: Batch) -> Tensor:
    return mixup(model, batch, lambda: float(np.random.beta(0.2, 0.2)))


def of_python(model: nn.Module, batch: Batch) -> Tensor:
    order = random.sample(range(len(batch[0])), len(batch[0]))
    return plain(model, (0.7 * batch[0] + 0.3 * batch[0][order], batch[1]))


class Manifold(nn.Module):
    """Mixes hidden features, in training mode alone, at times."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.training and float(torch.rand(())) < 0.7
        return 0.6 * x + 0.4 * x[torch.randperm(len(x))] if mixed else x


@pytest.mark.parametrize("case", [of_torch, of_numpy, of_python, "manifold"], ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("seed", range(8))
def test_mixup_is_refused_whatever_is_drawn(seed: int, case: Any) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    loss, more = (plain, (Manifold(),)) if case == "manifold" else (case, ())
    with pytest.raises(ValueError, match="mixes examples"), session(net(*more), data(seed, 0.5), seed) as s:
        train(s, loss)


class Skipped(nn.Module):
    """Leaves its layer out at times, for the whole batch: honest, by the generator of torch, numpy or Python."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if not self.training or self.draw() < 0.5 else x


DRAWS = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "python": random.random}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("seed", range(4))
def test_layers_left_out_at_random_and_dropout_are_no_mixing(seed: int, draw: Callable[[], float]) -> None:
    with session(net(Skipped(draw), nn.Dropout(0.3)), data(seed, 0.5), seed) as s:
        assert train(s, plain) == 3


def test_the_check_leaves_every_generator_where_it_was() -> None:
    x, y = data(0, 0.5)
    model = net(*(Skipped(draw) for draw in DRAWS.values())).train()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), np.random.get_state()[2], random.getstate()
    assert check_examples(model, find_layers(model), plain, lambda *rows: (x[list(rows)], y[list(rows)]), 6)
    assert torch.equal(before[0], torch.get_rng_state()) and before[3] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1]) and before[2] == np.random.get_state()[2]


# -- what comes after the first step ---------------------------------------------------------------------------------------


def contrasted(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none") + plain(model, batch)


class TrainedMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0) if self.training else x


def test_another_loss_is_checked_when_it_comes() -> None:
    with session(net(), data(0, 0.5), steps=4) as s:
        with pytest.raises(ValueError, match="mixes examples"):
            train(s, plain, plain, contrasted)
        assert s.ledger.count == 2


def test_a_model_in_another_mode_is_checked_when_it_is() -> None:
    model = net(TrainedMean()).eval()
    with session(model, data(0, 0.5), steps=4) as s:
        for i, batch in enumerate(s.batches()):
            if i < 2:
                s.step(batch, plain)
                continue
            model.train()
            with pytest.raises(ValueError, match="mixes examples"):
                s.step(batch, plain)
            break
        assert s.ledger.count == 2


def test_what_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr("dpkfc.session.check_examples", lambda *args, **kwargs: not checked.append(args[4]))
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(1 + i % 2, D, generator=generator, dtype=torch.float64), i % 3 % 2) for i in range(N)]
    model = net()

    def collate(some: list[tuple[Tensor, int]]) -> Batch:
        return pad_sequence([x for x, _ in some], batch_first=True), torch.tensor([y for _, y in some])

    def summed(m: nn.Module, batch: Batch) -> Tensor:
        return plain(lambda x: m(x).sum(1), batch)

    with session(model, rows, steps=9, collate_fn=collate, sampler="fixed") as s:
        for i, batch in enumerate(s.batches()):
            model.train(i % 4 > 1)
            s.step(batch, [summed, partial(summed), lambda m, b: summed(m, b)][i % 3])
    # four first looks, of two modes of two functions (a partial is what it calls), and those of steps 2 and 8; 4 is a first one
    assert checked == [24] * 6


def test_what_a_loss_function_is() -> None:
    def made(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda m, b: inner(m, b)

    class Loss:
        def __call__(self, m: nn.Module, b: Batch) -> Tensor:
            return plain(m, b)

        def method(self, m: nn.Module, b: Batch) -> Tensor:
            return plain(m, b)

    @wraps(plain)
    def wrapped(*args: Any) -> Tensor:
        return plain(*args)

    assert code_of(made(plain)) == code_of(made(plain)) != code_of(made(balanced))
    assert code_of(Loss()) == code_of(Loss()) == Loss and code_of(Loss().method) == code_of(Loss().method)
    assert code_of(wrapped) == code_of(plain) == code_of(partial(plain)) != code_of(balanced)
    assert code_of(None) is type(None)
