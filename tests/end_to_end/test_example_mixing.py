"""Losses and modules in which one example sees another: refused by name before anything is released
or charged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session
from tests.gradients.loop import assert_equals_a_loop, examples

N, T, D = 24, 3, 4
Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


MIXES = "mixes examples|depends on the batch"


def refused(model: nn.Module, loss: Loss, *, shape: tuple[int, ...] = (D,)) -> None:
    """The first step of a session raises, nothing is charged and no parameter moves."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (N,), generator=generator)
    plan = PrivacyConfig(expected_batch_size=12, steps=3, test_mode_seed=3).with_noise(1.0, 1e-3, N)
    before = [p.detach().clone() for p in model.parameters()]
    with Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), (x, y)) as session:
        for _ in range(2):  # trying again does not help
            with pytest.raises(ValueError, match=MIXES):
                session.step(next(session.batches()), loss)
        assert session.ledger.count == 0
        assert session.epsilon == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def encoder(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), *more, nn.Linear(D, 2)).double()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# -- losses ----------------------------------------------------------------------------------------


def info_nce(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Every other example of the batch is a negative."""
    one, two = F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[0] + 0.1), dim=1)
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)), reduction="none")


def detached_negatives(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """No gradient flows into the negatives, but an example's own gradient still depends on them."""
    one, two = (
        F.normalize(model(batch[0]), dim=1),
        F.normalize(model(batch[0] + 0.1), dim=1).detach(),
    )
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)), reduction="none")


def centred_logits(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits - logits.mean(0), batch[1], reduction="none")


def weighted_by_frequency(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Class weights counted in the batch."""
    counts = torch.bincount(batch[1], minlength=2).clamp(min=1)
    return cross_entropy(model, batch) / counts[batch[1]]


def spread_penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    features = model(batch[0])
    return cross_entropy(model, batch) + (features - features.mean(0)).square().sum(1)


def shuffled_mixup(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mixup with a partner from the batch."""
    x = 0.7 * batch[0] + 0.3 * batch[0].flip(0)
    return 0.7 * cross_entropy(model, (x, batch[1])) + 0.3 * cross_entropy(
        model, (x, batch[1].flip(0))
    )


@pytest.mark.parametrize(
    "loss",
    [
        info_nce,
        detached_negatives,
        centred_logits,
        weighted_by_frequency,
        spread_penalty,
        shuffled_mixup,
    ],
    ids=lambda f: f.__name__,
)
def test_losses_that_mix_examples(loss: Loss) -> None:
    refused(encoder(), loss)


def test_contrastive_pairs_as_two_rows_an_example() -> None:
    def two_views(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        z = F.normalize(model(torch.cat([batch[0], batch[0] + 0.1])), dim=1)  # [2N, D]
        n = len(batch[0])
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
        partners = torch.arange(2 * n).roll(n)
        return F.cross_entropy(scores, partners, reduction="none").view(2, n).sum(0)

    refused(encoder(), two_views)


# -- modules ---------------------------------------------------------------------------------------


class BatchSum(nn.Module):
    """Returns one row for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)


class AddsMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0, keepdim=True)


class AttendsOverTheBatch(nn.Module):
    """Attention whose time axis is the batch: [N, D] is read as one sequence of N positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class ReadsTheBatch(nn.Module):
    """A recurrent layer built without batch_first runs over the examples as if they were time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][:, -1]


class FunctionalBatchNorm(nn.Module):
    """Batch normalisation that no inspection of modules can see."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True) if len(x) > 1 else x


class LearnedCentre(nn.Module):
    """Owns a parameter and mixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.gain


@pytest.mark.parametrize(
    "module", [BatchSum, AddsMean, AttendsOverTheBatch, FunctionalBatchNorm, LearnedCentre]
)
def test_modules_that_mix_examples(module: type[nn.Module]) -> None:
    refused(encoder(module()), cross_entropy)


def test_recurrence_over_the_batch() -> None:
    refused(encoder(ReadsTheBatch()), cross_entropy, shape=(T, D))
    refused(encoder(ReadsTheBatch()), cross_entropy, shape=(2, D))


class TimeFirst(nn.Module):
    """The batch is the second axis inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = module, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).mean(0))


@pytest.mark.parametrize(
    "module", [nn.Linear(D, D), nn.LayerNorm(D)], ids=lambda m: type(m).__name__
)
def test_a_batch_on_the_second_axis(module: nn.Module) -> None:
    x, y = torch.randn(N, T, D, dtype=torch.float64), torch.randint(0, 2, (N,))
    assert_equals_a_loop(TimeFirst(module).double(), cross_entropy, (x, y), examples((x, y), N))


def test_a_batch_on_the_second_axis_of_a_recurrent_layer_is_what_it_says() -> None:
    """With batch_first=False the layer itself says where the batch is."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.GRU(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x.transpose(0, 1))[1][0])

    model = Reads().double()
    plan = PrivacyConfig(expected_batch_size=12, steps=2, test_mode_seed=3).with_noise(1.0, 1e-3, N)
    data = (torch.randn(N, T, D, dtype=torch.float64), torch.randint(0, 2, (N,)))
    with Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), data) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session.ledger.count == 2


# -- what two examples cannot show -----------------------------------------------------------------


def mined_triplets(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The hardest positive and negative of the batch; two examples make no triplet."""
    z, y = model(batch[0]), batch[1]
    far = torch.cdist(z, z)
    same, other = (y == y[:, None]).double(), (y != y[:, None]).double()
    positive = (far * (same - torch.eye(len(y)))).max(1).values
    negative = (far + 1e3 * (1 - other)).min(1).values
    enough = (same.sum(1) > 1) & (other.sum(1) > 0)
    return torch.where(enough, F.relu(positive - negative + 5), 0 * z.sum(1))


class GroupsOfFour(nn.Module):
    """Mixes examples two apart."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(2, 0) if len(x) > 2 else x


@pytest.mark.parametrize(
    ("more", "loss"),
    [((), mined_triplets), ((GroupsOfFour(),), cross_entropy)],
    ids=["mined triplets", "groups of four"],
)
def test_mixing_that_takes_more_than_two_examples(more: tuple[nn.Module, ...], loss: Loss) -> None:
    refused(encoder(*more), loss)


def test_dropout_and_recurrent_layers_of_an_honest_model_pass() -> None:
    class Honest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = (
                nn.LSTM(D, D, batch_first=True),
                nn.Sequential(nn.Dropout(0.5), nn.Linear(D, 2)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x)[0]).mean(1)

    model = Honest().double()
    plan = PrivacyConfig(expected_batch_size=12, steps=2, test_mode_seed=3).with_noise(1.0, 1e-3, N)
    data = (torch.randn(N, T, D, dtype=torch.float64), torch.randint(0, 2, (N,)))
    with Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), data) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session.unproved_operation == ""


def test_a_mean_made_into_a_vector_again_mixes() -> None:
    def repeated(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(model, batch).mean().expand(len(batch[0]))

    refused(encoder(), repeated)
