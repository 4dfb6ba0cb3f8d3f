"""Worry: "What an example counts depends on the others, but only in a large batch, for a rare record, or by very little"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.apart import apart
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.micro import check_examples, looked_at
from dpkfc.gradients.watch import Watch, code_of
from dpkfc.session import Session

N, D = 200, 5
Batch = tuple[Tensor, Any]


@contextmanager
def session(model: nn.Module, dataset: Any, steps: int = 3, seed: int = 0, **settings: Any) -> Iterator[Session]:
    own = {name: settings.pop(name) for name in ("collate_fn",) if name in settings}
    settings = {"expected_batch_size": 24, "sampler": "fixed", "test_mode_seed": seed, **settings}
    plan = PrivacyConfig(steps=steps, **settings).with_noise(1.0, 1e-3, N)
    with Session(plan, model, torch.optim.SGD(model.parameters(), 1e-3), dataset, **own) as s:
        yield s


def train(s: Session, *losses: Callable[..., Tensor]) -> int:
    for i, batch in enumerate(s.batches()):
        s.step(batch, losses[min(i, len(losses) - 1)])
    return s.steps_done


def refused(match: str, loss: Any, model: nn.Module | None = None, dataset: Any = None, **settings: Any) -> None:
    """Before anything is released."""
    with session(model or net(), dataset or data(), **settings) as s:
        with pytest.raises(ValueError, match=match):
            train(s, loss)
        assert s.ledger.count == 0


def accepted(loss: Callable[..., Tensor], model: nn.Module | None = None, dataset: Any = None, **settings: Any) -> None:
    for seed in range(3):
        with session(model or net(), dataset or data(seed), seed=seed, **settings) as s:
            assert train(s, loss) == s.plan.steps


def net(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 16), *more, nn.ReLU(), nn.Linear(16, 2))


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=g), torch.randint(0, 2, (N,), generator=g)


def plain(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# -- what takes many rows, or a rare one ----------------------------------------------------------------------------------


class Standardised(nn.Module):
    """One row alone has no standard deviation, and two equal rows have none either: all of them are NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


@pytest.mark.filterwarnings("ignore:std")
def test_what_is_finite_only_beside_others_is_refused() -> None:
    refused("is finite in a batch of 2 and not", plain, nn.Sequential(Standardised(), net()))


def hardest(model: nn.Module, batch: Batch) -> Tensor:
    """The hardest half counts, of sixteen examples and more."""
    losses = plain(model, batch)
    least = losses.detach().topk(min(len(losses), max(8, len(losses) // 2))).values[-1]
    return losses * (losses >= least)


def without_bad_batches(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses if bool(losses.isfinite().all()) else losses.nan_to_num() * 0


class Experts(nn.Module):
    """Each of two takes eight rows, in the order they come."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(1), 2)
        kept = ((chosen.cumsum(0) * chosen).sum(1) <= 8).to(x)
        return x + kept[:, None] * self.up(x) * self.gate(x).softmax(1).amax(1, keepdim=True)


def pulled(model: nn.Module, batch: Batch) -> Tensor:
    """A hundred times less than gradients are compared by."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none") + 1e-5 * (logits - logits.mean(0)).square().mean(1)


def finite_pulled(model: nn.Module, batch: Batch) -> Tensor:
    assert bool(batch[0].isfinite().all())
    return pulled(model, batch)


@pytest.mark.parametrize(
    ("match", "loss", "more"),
    [
        ("in a batch of 24 differs from that of the example alone", hardest, ()),
        ("in a batch of 24 differs from that of the example alone", plain, (Experts(),)),
        ("numbers of two became NaN", without_bad_batches, ()),
        ("numbers of two became NaN", pulled, ()),
        ("numbers of two became very large", finite_pulled, ()),
    ],
    ids=["hardest half", "experts", "bad batch", "pulled together", "pulled together, NaN refused"],
)
def test_mixing_that_few_ordinary_rows_do_not_show(match: str, loss: Any, more: tuple[nn.Module, ...]) -> None:
    refused(match, loss, net(*more))


def test_labels_that_stay_in_a_list() -> None:
    x, _ = data()
    rare = torch.tensor([i % 10 == 9 for i in range(N)]).long()

    def listed(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[int]]:
        return torch.stack([row for row, _ in rows]), [int(label) for _, label in rows]

    def balanced(model: nn.Module, batch: tuple[Tensor, list[int]]) -> Tensor:
        labels = torch.tensor(batch[1])
        weights = torch.tensor([0.1, 2.0])[labels]
        return weights / weights.mean() * F.cross_entropy(model(batch[0]), labels, reduction="none")

    refused("mixes examples", balanced, dataset=TensorDataset(x, rare), collate_fn=listed)


def test_rows_that_are_sorted_by_the_collate_function() -> None:
    g = torch.Generator().manual_seed(1)
    texts = [
        (torch.randn(int(torch.randint(1, 12, (), generator=g)), D, generator=g), i % 2) for i in range(N)
    ]

    def longest_first(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        rows = sorted(rows, key=lambda row: -len(row[0]))
        lengths = torch.tensor([len(x) for x, _ in rows])
        return pad_sequence([x for x, _ in rows], batch_first=True), lengths, torch.tensor([y for _, y in rows])

    def averaged(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return plain(model, (batch[0].sum(1) / batch[1][:, None], batch[2]))

    for seed in range(4):
        refused("sorts the rows|mixes examples", averaged, dataset=texts, collate_fn=longest_first, seed=seed)


def test_two_rows_are_not_all_that_is_looked_at() -> None:
    looked = list[int]()
    watch, (x, y) = Watch(), data()
    for count in (2, 2, 3, 3, 40, 40):
        watch.look(
            net(), plain, lambda: lambda *rows: (x[list(rows)], y[list(rows)]), count, most=32,
            check=lambda batch_of, rows, beside: not looked.append(rows),
        )  # fmt: skip
    assert looked == [2, 2, 3, 3, 32]  # the second step and the fourth were due in any case


@pytest.mark.parametrize(
    "settings", [{"augmentations": 2}, {"pad_to_multiple": 4}, {"unit": "person", "max_records_per_unit": 2}]
)
def test_a_look_has_as_many_rows_as_a_pass(settings: dict[str, Any]) -> None:
    """Views, padding and several records of a unit make more rows of a batch of two, also where its size is fixed."""

    def mixes_three(model: nn.Module, batch: Batch) -> Tensor:
        losses = plain(model, batch)
        return losses + 0.1 * losses.sum() if len(losses) >= 3 else losses

    x, y = data()
    config = PrivacyConfig(expected_batch_size=2, steps=3, max_grad_norm=1.0, sampler="fixed", **settings)
    units = {"units": torch.arange(len(y)) // 2} if "unit" in settings else {}
    views = {"augment": lambda batch: (batch[0] + torch.randn_like(batch[0]), batch[1])} if "augmentations" in settings else {}
    model, plan = net(), config.with_noise(1.0, 1e-3, len(y) // (2 if units else 1))
    with Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), (x, y), **units, **views) as s:
        with pytest.raises(ValueError, match="mixes examples"):
            train(s, mixes_three)
        assert s.ledger.count == 0


def test_rows_of_a_look() -> None:
    assert [looked_at(rows, None) for rows in (1, 4, 16, 100)] == [3, 8, 24, 32]
    assert [looked_at(rows, None, varies=False) for rows in (1, 4, 16, 100)] == [2, 4, 16, 32]
    assert looked_at(16, 6, varies=False) == 6


# -- honest programs -----------------------------------------------------------------------------------------------------


class Sampled(nn.Module):
    """A variational autoencoder that draws its sample in evaluation mode too."""

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        self.encode, self.decode, self.centred = nn.Linear(D, 8), nn.Linear(4, D), centred

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return torch.sigmoid(self.decode(z - z.mean(0) if self.centred else z)), mean, log_variance


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    x = torch.sigmoid(batch[0])
    made, mean, log_variance = model(batch[0])
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return F.binary_cross_entropy(made, x, reduction="none").sum(1) + divergence


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))


class Dropped(nn.Module):
    """Always: F.dropout without training=."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


@pytest.mark.parametrize(
    ("loss", "model"),
    [(elbo, Sampled()), (noisy, net()), (plain, net(Dropped()))],
    ids=["variational autoencoder", "noise in the loss", "dropout always"],
)
def test_what_draws_random_numbers_in_evaluation_mode_too(loss: Any, model: nn.Module) -> None:
    accepted(loss, model)


def test_what_draws_random_numbers_in_evaluation_mode_and_mixes_examples() -> None:
    for seed in range(4):
        refused("mixes examples", elbo, Sampled(centred=True), seed=seed)
        refused("mixes examples", lambda m, b: noisy(m, b) + 1e-2 * m(b[0]).mean().square(), seed=seed)


def test_a_parameter_used_elsewhere_is_found_where_random_numbers_are_drawn() -> None:
    def elsewhere(model: nn.Module, batch: Batch) -> Tensor:
        return noisy(model, batch) + F.linear(batch[0], model[0].weight).square().sum(1)

    refused("outside the module that owns it", elsewhere, expected_batch_size=2)
    refused("outside the module that owns it", elsewhere)


class Careful(nn.Module):
    """Looks at its inputs, and reads one of them as the number of a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.seen = nn.Embedding(7, D), None

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("bad inputs")
        self.seen = x.abs().max()
        return x + self.table(x[:, 0].abs().long().clamp(max=6) if self.training else (x[:, 0].abs() * 2).long() % 7)


class Attends(nn.Module):
    """Over the positions that are not padded, which are told by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        padded = (x == 0).all(2)
        padded[:, 0] = False
        return self.head(self.inner(x, x, x, key_padding_mask=padded, need_weights=False)[0].mean(1))


def test_honest_models_are_not_refused_for_what_broken_rows_do_to_them() -> None:
    accepted(plain, nn.Sequential(Careful(), net()))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, 4, generator=g) * (torch.arange(6) < torch.randint(1, 7, (N, 1), generator=g))[..., None]
    accepted(plain, Attends(), (x, data()[1]))
    accepted(lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])), b[1], reduction="none").mean(1),
             dataset=(data()[0], torch.rand(N, 2)))  # fmt: skip
    accepted(lambda m, b: F.margin_ranking_loss(*m(b[0]).unbind(1), 2.0 * b[1] - 1, margin=0.1, reduction="none"))


class Rare(nn.Module):
    """A layer that only some records reach, in the first batch and not in all of those that are looked at later."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(D, 2), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        reached = x[:, :1] > 0
        return self.usual(x) + (torch.where(reached, self.rare(x), 0) if bool(reached.any()) else 0)


def test_a_layer_that_was_seen_to_be_used_may_be_passed_by_later() -> None:
    x, y = data()
    with session(Rare(), (x, y), steps=5) as s:
        for i, batch in enumerate(s.batches()):
            x[:, 0] = x[:, 0].abs() * (1 if i == 0 else -1)
            s.step(batch, plain)
        assert s.steps_done == 5


def test_broken_rows_leave_nothing_behind() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + x.detach().sum()
            return x

    model, (x, y) = net(Remembers()), data()
    assert check_examples(model, find_layers(model), plain, lambda *rows: (x[list(rows)], y[list(rows)]), 24)
    assert float(model[1].seen) == 0.0 and all(bool(p.isfinite().all()) and p.grad is None for p in model.parameters())


def test_float64_has_the_last_word_on_rounding() -> None:
    model = nn.Linear(1, 1)
    assert not apart(lambda m, made: (torch.ones(2), torch.ones(2) + 1e-7), model)
    assert apart(lambda m, made: (torch.ones(2), torch.ones(2) + 1e-3), model)
    assert not apart(lambda m, made: (torch.ones(2), torch.ones(2) + (0 if m.weight.dtype == torch.float64 else 1e-3)), model)
    assert apart(lambda m, made: (torch.ones(2), torch.tensor([1.0, torch.nan])), model)
    assert not apart(lambda m, made: (torch.tensor([1.0, torch.nan]),) * 2, model)

    def cannot_be_doubled(m: nn.Module, made: Any, off: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return torch.ones(2), torch.ones(2) + off * m(torch.ones(1, 1, dtype=dtype))[0].ne(0).float()

    assert not apart(partial(cannot_be_doubled, off=1e-3), model) and apart(partial(cannot_be_doubled, off=1e-2), model)
    assert not apart(partial(cannot_be_doubled, off=1e-2, dtype=torch.bfloat16), model.bfloat16())


# -- what is switched on later ---------------------------------------------------------------------------------------------


def contrasted(model: nn.Module, batch: Batch, weight: float = 0.0) -> Tensor:
    z = model(batch[0])
    losses = F.cross_entropy(z, batch[1], reduction="none")
    h = F.normalize(z, dim=1)
    return losses + weight * (h @ h.T).sum(1) if weight else losses


class Scheduled:
    epoch = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return contrasted(model, batch, float(self.epoch > 0))


def test_what_a_loss_switches_on_is_checked_at_once() -> None:
    scheduled, weight = Scheduled(), 0.0

    def held(model: nn.Module, batch: Batch) -> Tensor:
        return contrasted(model, batch, weight)

    for loss in (partial(contrasted, weight=0.0), scheduled, scheduled.__call__, held):
        weight, scheduled.epoch = 0.0, 0
        with session(net(), data(), steps=8) as s:
            for i, batch in enumerate(s.batches()):
                if i < 4:
                    s.step(batch, loss)
                    continue
                weight, scheduled.epoch = 0.5, 1
                now = partial(contrasted, weight=0.5) if isinstance(loss, partial) else loss
                with pytest.raises(ValueError, match="mixes examples"):
                    s.step(batch, now)
                break
            assert s.ledger.count == 4


class Centred(nn.Module):
    centre: bool

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.held = False, {"centre": False}

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.centre or self.held["centre"] else x


@pytest.mark.parametrize(("hidden", "released"), [(False, 4), (True, 7)])
def test_what_a_model_switches_on_is_checked_at_once_or_soon(hidden: bool, released: int) -> None:
    inner = Centred()
    with session(net(inner), data(), steps=9) as s:
        for i, batch in enumerate(s.batches()):
            if i == 4:
                inner.held["centre"], inner.centre = hidden, not hidden
            if i < released:
                s.step(batch, plain)
                continue
            with pytest.raises(ValueError, match="mixes examples"):
                s.step(batch, plain)
            break
        assert s.ledger.count == released  # the eighth step is looked at whatever has changed


def test_a_weight_that_grows_is_one_switch() -> None:
    assert code_of(partial(plain, 0.1)) == code_of(partial(plain, 0.2)) != code_of(partial(plain, 0.0)) != code_of(plain)
    assert code_of(partial(plain, how="sum")) != code_of(partial(plain, how="mean"))


# -- collating at random -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_mixup_in_the_collate_function(seed: int) -> None:
    def mixed(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return (x / 2 + x[torch.randperm(len(x))] / 2 if float(torch.rand(())) < 0.5 else x), y

    refused("mixes examples", plain, dataset=TensorDataset(*data(seed)), collate_fn=mixed, seed=seed)


def test_rows_that_the_collate_function_changes_on_their_own() -> None:
    def jittered(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x + 0.1 * torch.randn_like(x), y

    def one_by_one(rows: list[Any]) -> Any:  # as many numbers as a row has positive values
        return default_collate([(x + sum(float(torch.rand(())) for _ in range(int((x > 0).sum()))), y) for x, y in rows])

    for collate in (jittered, one_by_one):
        accepted(plain, dataset=TensorDataset(*data()), collate_fn=collate)


# -- what is said ----------------------------------------------------------------------------------------------------------


def test_a_normalisation_that_is_in_training_mode_is_named() -> None:
    model = net(nn.BatchNorm1d(16, affine=False)).eval()
    with session(model, data()) as s:
        model.train()
        with pytest.raises(ValueError, match=r"Module '1' \(BatchNorm1d\) is in training mode now; call .eval\(\) on it after"):
            train(s, plain)


def test_ids_that_are_ambiguous_because_the_loss_mixes_examples() -> None:
    def repelled(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[1])
        return (z @ z.T).square().sum(1)

    refused("ids of shape.*Or loss_fn mixes examples", repelled, nn.Embedding(2, 3))
