"""A criterion that an engine is given is called on single examples: one that mixes them is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.opacus_cases import loader, private, train

Loss = Callable[[Tensor, Tensor], Tensor]


class Of(nn.Module):
    """A loss function as a module."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target)


def contrastive(o: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(o)))


def cox(o: Tensor, y: Tensor) -> Tensor:
    risk = o[o[:, 1].argsort(), 0]
    return -(risk - risk.logcumsumexp(0)).mean()


def auc(o: Tensor, y: Tensor) -> Tensor:
    return (1 - (o[y > 0][:, None, 0] - o[y == 0][None, :, 0])).relu().mean()


def dice(o: Tensor, y: Tensor) -> Tensor:
    p, t = o[:, 0].sigmoid(), (y > 0).to(o)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1)


def centred(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o - o.mean(0), y)


def weighted(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, weight=torch.tensor([1.0, 5.0, 2.0]).to(o))


def focal(o: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(o, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def squares(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o, F.one_hot(y, 3).to(o))


def trained(criterion: nn.Module, given: bool = True, **settings: object):
    settings |= {"criterion": criterion} if given else {}
    engine, model, optimizer, batches = private(data_loader=loader(batch_size=20), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            train(model, optimizer, batches, criterion=criterion)
    return engine, [str(x.message) for x in caught]


@pytest.mark.parametrize("loss", [contrastive, cox, auc, dice, centred, weighted])
def test_a_criterion_that_is_no_mean_of_the_examples_losses_is_refused(loss: Loss) -> None:
    settings = {"data_loader": loader(batch_size=20), "criterion": Of(loss)}
    engine, model, optimizer, batches = private(**settings)
    with pytest.raises(ValueError, match="not the mean of the losses of single examples"):
        train(model, optimizer, batches, criterion=settings["criterion"])
    assert engine.ledger.count == 0


@pytest.mark.parametrize("loss", [focal, squares, F.cross_entropy])
def test_an_honest_criterion_passes_and_needs_no_warning(loss: Loss) -> None:
    criterion = Of(loss)
    engine, told = trained(criterion)
    assert told == [] and engine.ledger.count == 6
    engine.close()
    assert not criterion._forward_hooks


def test_a_sum_is_compared_with_a_sum() -> None:
    def summed(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o, F.one_hot(y, 3).to(o), reduction="sum")

    assert trained(Of(summed), loss_reduction="sum")[0].ledger.count == 6
    with pytest.raises(ValueError, match="not the sum of the losses"):
        trained(Of(squares), loss_reduction="sum")


def test_a_loss_that_begins_to_mix_later_is_seen_at_a_later_call() -> None:
    class Warm(Of):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += self.training and torch.is_grad_enabled()
            return contrastive(output, target) if self.calls > 2 else squares(output, target)

    with pytest.raises(ValueError, match="not the mean"):
        trained(Warm(squares))


def test_what_is_not_given_is_not_seen_and_the_warning_says_so() -> None:
    _, told = trained(Of(cox), given=False)
    assert len(told) == 1 and "depends on the others (contrastive, Cox, AUC" in told[0] and "criterion=" in told[0]


@pytest.mark.parametrize("kind", ["random", "another axis", "never called"])
def test_what_the_calls_do_not_tell_stays_on_trust(kind: str) -> None:
    def random(o: Tensor, y: Tensor) -> Tensor:
        return (squares(o, y) * (1 + torch.rand(()))).mean()

    def turned(o: Tensor, y: Tensor) -> Tensor:
        if len(o) < 3:
            raise RuntimeError("several, please")
        return squares(o, y)

    criterion = {"random": Of(random), "another axis": Of(turned), "never called": Of(squares)}[kind]
    if kind == "never called":
        engine, model, optimizer, batches = private(data_loader=loader(batch_size=20), criterion=criterion)
        with pytest.warns(UserWarning, match="do not show by what it divides"):
            train(model, optimizer, batches, criterion=Of(focal))
        return
    assert any("do not show by what it divides" in text for text in trained(criterion)[1])
