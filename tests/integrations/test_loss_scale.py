"""What a loss divides by, seen from its gradients: honest means pass, in every batch, and a divisor of the batch does not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.integrations._loss_scale import LossScale
from dpkfc.integrations.opacus import PrivacyEngine

Make = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
BALANCED, RARE = torch.tensor([2 / 3, 2.0]), torch.tensor([1.0, 20.0])
bce = F.binary_cross_entropy_with_logits


def classes(*shares: float) -> Make:
    """Logits that learn their labels from batch to batch."""

    def make(g: torch.Generator, n: int, batch: int) -> tuple[Tensor, Tensor]:
        y = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=g)
        return torch.randn(n, len(shares), generator=g) * 0.3 + 0.2 * batch * F.one_hot(y, len(shares)), y

    return make


def tokens(to_longest: bool = False) -> Make:
    def make(g: torch.Generator, n: int, batch: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(7, (n, 9), generator=g)
        lengths = torch.randint(1, 10, (n,), generator=g)
        y[torch.arange(9) >= lengths[:, None]] = -100
        y = y[:, : int(lengths.max())] if to_longest else y
        return torch.randn(*y.shape, 7, generator=g) * 0.5, y

    return make


def binary(share: float = 0.3, shape: tuple[int, ...] = (-1,)) -> Make:
    def make(g: torch.Generator, n: int, batch: int) -> tuple[Tensor, Tensor]:
        y = (torch.rand(n, generator=g) < share).float()
        return (torch.randn(n, generator=g) * 0.3 + 0.2 * batch * (2 * y - 1)).reshape(shape), y.reshape(shape)

    return make


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.movedim(-1, 1), y, reduction="none")


def own_mean(o: Tensor, y: Tensor) -> Tensor:
    return (each(o, y).sum(1) / (y != -100).sum(1).clamp(min=1)).mean()


def focal(o: Tensor, y: Tensor) -> Tensor:
    return ((1 - (-each(o, y)).exp()) ** 2 * each(o, y)).mean()


def weighted(o: Tensor, y: Tensor) -> Tensor:
    w = (3 * o.detach()[:, 0]).exp()
    return (w * each(o, y)).sum() / w.sum()


def mean_with_weights(w: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, weight=w, reduction="none").mean()


def a_few_without_label(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y.masked_fill(torch.arange(len(y)) < len(y) % 3, -100))


def seen(loss: Loss, make: Make, seed: int, *, batches: int = 25, mean: float = 48.0, reduction: str = "mean") -> tuple[str, int]:
    """The error of a run of Poisson batches, "warned" or "", and the batch it came in."""
    g, scale = torch.Generator().manual_seed(seed), LossScale(reduction)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(batches):
            n = max(1, int(torch.poisson(torch.tensor(mean), generator=g)))
            o, y = make(g, n, i)
            o.requires_grad_()
            gradient = torch.autograd.grad(loss(o, y), o)[0]
            try:
                scale.check(o.detach(), gradient, len(o))
            except ValueError as error:
                return str(error), i
            scale.warn_without_verdict()
    return "warned" if caught else "", batches


HONEST: dict[str, tuple[Loss, Make]] = {
    "mean": (F.cross_entropy, classes(0.5, 0.5)),
    "times": (lambda o, y: 0.5 * F.cross_entropy(o, y), classes(0.2, 0.5, 0.3)),
    "weights": (lambda o, y: F.cross_entropy(o, y, weight=BALANCED, reduction="none").mean(), classes(0.75, 0.25)),
    "thousand": (F.cross_entropy, classes(*[1.0] * 1000)),
    "own positions": (own_mean, tokens()),
    "own positions, to the longest": (own_mean, tokens(True)),
    "all positions of one length": (lambda o, y: each(o, y).mean(), tokens()),
    "summed positions": (lambda o, y: each(o, y).sum(1).mean(), tokens(True)),
    "binary": (bce, binary()),
    "binary, a column": (bce, binary(shape=(-1, 1))),
    "binary, weighted": (lambda o, y: bce(o, y, pos_weight=torch.tensor(5.0)), binary(0.05)),
    "several labels": (lambda o, y: bce(o, F.one_hot(y, 3).float()), classes(0.2, 0.3, 0.5)),
    "probabilities": (lambda o, y: F.binary_cross_entropy(o.sigmoid().detach() * 0 + o.sigmoid(), y), binary()),
}
ON_TRUST: dict[str, tuple[Loss, Make]] = {
    "focal": (focal, classes(0.2, 0.3, 0.5)),
    "smoothed": (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), classes(0.5, 0.2, 0.3)),
    "squares": (lambda o, y: F.mse_loss(o, F.one_hot(y, 2).to(o)), classes(0.5, 0.5)),
    "squares of one number": (F.mse_loss, binary()),
    "soft targets": (lambda o, y: bce(o, 0.8 * y + 0.1), binary()),
}
WRONG: dict[str, tuple[Loss, Make]] = {
    "class weights": (lambda o, y: F.cross_entropy(o, y, weight=RARE), classes(0.99, 0.01)),
    "half the class weights": (lambda o, y: 0.5 * F.cross_entropy(o, y, weight=RARE), classes(0.99, 0.01)),
    "ignored": (a_few_without_label, classes(0.5, 0.5)),
    "half of ignored": (lambda o, y: 0.5 * a_few_without_label(o, y), classes(0.5, 0.5)),
    "sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), classes(0.5, 0.5)),
    "weighted sum": (lambda o, y: F.cross_entropy(o, y, weight=RARE, reduction="sum"), classes(0.7, 0.3)),
    "example weights": (weighted, classes(0.2, 0.3, 0.5)),
    "part of example weights": (lambda o, y: 0.3 * weighted(o, y), classes(0.2, 0.3, 0.5)),
    "tokens": (lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), tokens()),
    "half of tokens": (lambda o, y: 0.5 * F.cross_entropy(o.flatten(0, 1), y.flatten()), tokens()),
    "longest": (lambda o, y: each(o, y).mean(), lambda g, n, i: tokens(True)(g, min(n, 5), i)),
    "binary sum": (lambda o, y: bce(o, y, reduction="sum"), binary()),
    "binary weighted sum": (lambda o, y: bce(o, y, reduction="sum", pos_weight=torch.tensor(5.0)), binary()),
    "binary weights": (lambda o, y: (lambda w: (w * bce(o, y, reduction="none")).sum() / w.sum())(1 + 4 * y), binary()),
    "by positives": (lambda o, y: bce(o, y, reduction="sum") / y.sum().clamp(min=1), binary(shape=(-1, 1))),
}


@pytest.mark.parametrize("mean", [4.0, 48.0])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_mean_is_never_refused_nor_warned_of(name: str, mean: float) -> None:
    for seed in range(6):
        error, batch = seen(*HONEST[name], seed, mean=mean)
        assert error == "" or (error == "warned" and mean < 8), (seed, batch, error)


@pytest.mark.parametrize("name", ON_TRUST)
def test_a_loss_that_shows_nothing_is_warned_of(name: str) -> None:
    assert {seen(*ON_TRUST[name], seed)[0] for seed in range(6)} == {"warned"}


@pytest.mark.parametrize("name", WRONG)
def test_a_divisor_of_the_batch_is_refused_whatever_stands_before_it(name: str) -> None:
    for seed in range(6):
        error, batch = seen(*WRONG[name], seed, batches=40)
        assert "depends on" in error or "divides by" in error or "loss is a sum" in error, (seed, error)
        assert batch < 20, seed


def test_weights_that_balance_the_labels_pass_in_a_thousand_first_batches() -> None:
    """In some of them the labels have their very proportions, and the weights add up to the number of examples."""
    three = torch.tensor([1 / 1.5, 1 / 0.9, 1 / 0.6])
    for weights, make in ((BALANCED, classes(0.75, 0.25)), (three, classes(0.5, 0.3, 0.2))):
        loss = functools.partial(mean_with_weights, weights)
        assert {seen(loss, make, seed, batches=1)[0] for seed in range(1000)} == {""}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_know_the_same(kind: torch.dtype) -> None:
    for name in ("mean", "weights", "class weights", "sum"):
        loss, wrong = (HONEST | WRONG)[name], name in WRONG
        g, scale, refused = torch.Generator().manual_seed(0), LossScale("mean"), False
        for i in range(20):
            o, y = loss[1](g, 40 + i, 0)
            o = o.to(kind).requires_grad_()
            gradient = torch.autograd.grad(loss[0](o.float(), y), o)[0]
            try:
                scale.check(o.detach(), gradient, 40 + i)
            except ValueError:
                refused = True
        assert refused == wrong


def test_each_output_has_a_weight_of_its_own() -> None:
    g, scale = torch.Generator().manual_seed(0), LossScale("mean")
    for i in range(10):
        for place, factor in ((0, 1.0), (2, 0.3)):
            o, y = classes(0.4, 0.6)(g, 30 + i, i)
            o.requires_grad_()
            scale.check(o.detach(), torch.autograd.grad(factor * F.cross_entropy(o, y), o)[0], 30 + i, place)


# -- in an engine ------------------------------------------------------------------------------------------------------


def trained(loss: Loss, y: Tensor, out: int = 2, steps: int = 60, scaler: torch.amp.GradScaler | None = None) -> int:
    """Releases of a run; warnings are errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(len(y), 6), y), batch_size=32), test_mode_seed=1,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while engine.ledger.count < steps:
            for a, b in loader:
                value = loss(model(a), b)
                (value if scaler is None else scaler.scale(value)).backward()
                optimizer.step()
    return engine.ledger.count


def test_a_rare_label_in_a_later_batch_ends_the_run() -> None:
    y = (torch.arange(1000) % 250 == 0).long()
    with pytest.raises(ValueError, match="begin anew|labels or lengths of the whole batch"):
        trained(nn.CrossEntropyLoss(weight=RARE), y)
    y[y == 1] = -100
    with pytest.raises(ValueError, match="reduction='none'.*mean.*learning rate divided by the batch size"):
        trained(nn.CrossEntropyLoss(), y)


def test_a_binary_mean_trains_without_a_warning() -> None:
    y = (torch.arange(400) % 3 == 0).float()
    assert trained(lambda o, t: bce(o[:, 0], t), y, out=1, steps=13) >= 13
    with pytest.raises(ValueError, match="loss is a sum.*loss_reduction='sum'"):
        trained(lambda o, t: bce(o[:, 0], t, reduction="sum"), y, out=1)


def test_a_grad_scaler_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="multiplied by 65536, as a GradScaler.*bfloat16"):
        trained(F.cross_entropy, torch.arange(200) % 2, scaler=scaler)
    with pytest.raises(ValueError, match="GradScaler"):
        trained(lambda o, t: bce(o[:, 0], t), (torch.arange(200) % 2).float(), out=1, scaler=scaler)


def smoothed(amount: float) -> Loss:
    return lambda o, y: F.cross_entropy(o, y, label_smoothing=amount)


@pytest.mark.parametrize(
    ("loss", "labels", "mean", "spread", "drift"),
    [
        (smoothed(0.1), 2, 2048, 0.003, 0.0), (smoothed(0.1), 2, 256, 0.003, 0.0), (smoothed(0.02), 2, 2048, 0.03, 0.0003),
        (smoothed(0.02), 10, 256, 0.1, 0.0005), (smoothed(0.02), 100, 128, 0.5, 0.0005), (smoothed(0.02), 10, 256, 0.1, 0.05),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_losses_that_look_like_others_while_little_is_learned_pass(
    loss: Loss, labels: int, mean: int, spread: float, drift: float, kind: torch.dtype
) -> None:
    """Smoothed labels at hardly any confidence: factors nearly of one label, and sums nearly of one size, by chance alone."""
    for seed in range(6):
        g, scale = torch.Generator().manual_seed(seed), LossScale("mean")
        for batch in range(8):
            n = int(torch.poisson(torch.tensor(float(mean)), generator=g))
            y = torch.randint(labels, (n,), generator=g)
            o = torch.randn(n, labels, generator=g) * spread * (1 + drift * batch) + F.one_hot(y, labels) * drift * batch
            o = o.to(kind).requires_grad_()
            scale.check(o.detach(), torch.autograd.grad(loss(o, y), o)[0], n)


def test_a_cross_entropy_in_half_precision_passes() -> None:
    for seed in range(10):
        g, scale = torch.Generator().manual_seed(seed), LossScale("mean")
        for _ in range(20):
            n = int(torch.poisson(torch.tensor(256.0), generator=g))
            y = torch.randint(10, (n,), generator=g)
            o = torch.randn(n, 10, generator=g).to(torch.bfloat16).requires_grad_()
            scale.check(o.detach(), torch.autograd.grad(F.cross_entropy(o, y), o)[0], n)
