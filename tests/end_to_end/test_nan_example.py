"""Worry: "One broken example (NaN, infinity, an overflow) ruins the weights, or tells that it was
there".
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.session import Session
from tests.test_session import N, data, kfac, loss_fn, net, plan, train, weights

BROKEN = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": -float("inf"),
    "overflow": 1e300,
}


@pytest.mark.quick(
    "nan-{}-*", "infinity-*8}-kfac", "minus infinity-*8}-identity", "overflow-*3}-identity"
)
@pytest.mark.parametrize("preconditioner", [None, kfac()], ids=["identity", "kfac"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_physical_batch_size": 3}, {"pad_to_multiple": 8}], ids=str
)
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_the_run_is_the_one_without_the_example(
    value: float, settings: dict[str, object], preconditioner: object
) -> None:
    """With its loss masked away the example contributes zero; with the broken value it must
    contribute the same.
    """
    found = trained(value, settings, preconditioner)
    assert bool(torch.isfinite(found).all())
    # an overflow in the inputs alone may still have a finite gradient, which is then clipped
    if value != 1e300:
        expected = masked(tuple(settings.items()), preconditioner)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@cache
def masked(settings: tuple[tuple[str, object], ...], preconditioner: object) -> Tensor:
    """The weights of a run in which the example counts zero."""
    return trained(None, dict(settings), preconditioner)


def trained(value: float | None, settings: dict[str, object], preconditioner: object) -> Tensor:
    """The weights of a run with a broken value, or without the example."""
    model, (x, y) = net(), data()
    mask = torch.ones(N, dtype=torch.float64)
    if value is None:
        mask[5] = 0.0
    else:
        x[5] = value

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]

    p = plan(1.0, expected_batch_size=20, steps=3, preconditioner=preconditioner, **settings)
    with Session(p, model, torch.optim.SGD(model.parameters(), 0.1), (x, y, mask)) as s:
        for batch in s.batches():
            s.step(batch, loss)
    return weights(model)


class Token(nn.Module):
    """A parameter of its own, and dropout below: it cannot be run again for single examples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.body, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.position.expand(
            x.shape[1] + 1, -1
        )
        return self.head(self.drop(self.body(x).relu()).mean(1))


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_with_dropout_that_cannot_be_run_again_trains_on(verify: bool) -> None:
    """From the first step on, with gradients of zero below the head, and in batches as long as the
    seven positions.
    """
    torch.manual_seed(3)
    model, x, y = Token(), torch.randn(N, 6, 4), torch.randint(0, 3, (N,))
    x[::3] = float("nan")
    nn.init.zeros_(model.head.weight)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    p, optimizer = (
        plan(1.0, expected_batch_size=7, steps=30),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    with Session(p, model, optimizer, (x, y), verify=verify) as s:
        for batch in s.batches():
            s.step(batch, loss)
    assert bool(weights(model).isfinite().all())


def test_a_loss_that_is_not_finite_contributes_zero() -> None:
    results = []
    for broken in (float("nan"), float("inf"), 0.0):
        model = net()

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], broken: float = broken) -> Tensor:
            return loss_fn(model, batch) * torch.ones_like(batch[0][:, 0]).masked_fill(
                batch[1] == 2, broken
            )

        p = plan(1.0, expected_batch_size=20, steps=3)
        with Session(p, model, torch.optim.SGD(model.parameters(), 0.1), data(), verify=False) as s:
            for batch in s.batches():
                s.step(batch, loss)
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[2], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(results[1], results[2], rtol=1e-9, atol=1e-11)


def test_a_batch_of_broken_examples_alone_is_pure_noise() -> None:
    model, (x, y) = net(), data()
    p = plan(1.0, expected_batch_size=20, steps=2)
    with Session(
        p, model, torch.optim.SGD(model.parameters(), 0.1), (x * float("nan"), y), verify=False
    ) as s:
        train(s)
        assert s.steps_done == 2
    assert bool(torch.isfinite(weights(model)).all())
