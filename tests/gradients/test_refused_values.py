"""Records whose values torch refuses, or whose loss is a constant: they add nothing, and the run
goes on. A message or an end of the run would tell of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session

N, STEPS = 24, 3
Batch = tuple[Tensor, Tensor]


def data(value: float) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).double()
    if value:
        x[1::3, 2] = value
    return x, y


def net(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), *last).double()


def bce(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy(model(batch[0]), batch[1], reduction="none")


def gaussian(model: nn.Module, batch: Batch) -> Tensor:
    return -torch.distributions.Normal(model(batch[0]), 1.0).log_prob(batch[1])


def factorised(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    matrices = torch.diag_embed(torch.stack([out, 1 + out.square()], 1).exp())
    return torch.linalg.cholesky(matrices).sum((1, 2))


def constant_for_some(model: nn.Module, batch: Batch) -> Tensor:
    losses = bce(model, batch)
    # No public row is as large.
    is_kept = batch[0][:, 2] < 50
    return losses * is_kept if is_kept.all() else torch.zeros_like(batch[1])


def sliced(model: nn.Module, batch: Batch) -> Tensor:
    ends = [int(x) for x in batch[0][:, 2]]
    return model(batch[0]) + torch.tensor([float(end) for end in ends], dtype=batch[0].dtype)


def powered(model: nn.Module, batch: Batch) -> Tensor:
    powers = [math.exp(float(x)) for x in batch[0][:, 2]]
    return model(batch[0]) * torch.tensor(powers, dtype=batch[0].dtype)


LOSSES: list[tuple[Callable[[nn.Module, Any], Tensor], tuple[nn.Module, ...], float]] = [
    (bce, (nn.Sigmoid(),), math.nan),
    (bce, (nn.Sigmoid(),), -math.inf),
    (gaussian, (), math.nan),
    (gaussian, (), math.inf),
    (factorised, (), math.nan),
    (sliced, (), math.nan),
    (sliced, (), math.inf),
    (powered, (), 1e6),
    (constant_for_some, (nn.Sigmoid(),), 100.0),
]


@pytest.mark.parametrize(("loss_fn", "last", "value"), LOSSES)
def test_a_record_that_torch_refuses_adds_nothing(
    loss_fn: Callable[[nn.Module, Any], Tensor], last: tuple[nn.Module, ...], value: float
) -> None:
    x, y = data(value)
    model, bound = net(*last), 0.1
    plan = PrivacyConfig(
        expected_batch_size=8, steps=STEPS, test_mode_seed=1, max_grad_norm=bound
    ).with_noise(0.0, 1e-3, N)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 1.0)
    with Session(plan, model, optimizer, (x, y)) as session:
        for batch in session.batches():
            expected = [torch.zeros_like(p) for p in parameters]
            kept = [i for i in batch.rows if abs(x[i, 2]) < 50]
            for i in kept:
                loss = loss_fn(model, (x[i : i + 1], y[i : i + 1])).sum()
                gradients = torch.autograd.grad(loss, parameters)
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
                for total, gradient in zip(expected, gradients, strict=True):
                    total += gradient * min(1.0, bound / norm) / 8
            before = [p.detach().clone() for p in parameters]
            record = session.step(batch, loss_fn)
            moved = [old - p.detach() for old, p in zip(before, parameters, strict=True)]
            torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-12)
            if not math.isfinite(value):
                assert record.nonfinite_fraction == pytest.approx(1 - len(kept) / len(batch.rows))
        assert session.steps_done == STEPS


def test_a_label_outside_of_the_classes_is_named_without_its_value() -> None:
    x, y = data(0.0)
    labels = y.long()
    labels[1::2] = 7
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    plan = PrivacyConfig(expected_batch_size=8, steps=1, test_mode_seed=1).with_noise(0.0, 1e-3, N)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with Session(plan, model, torch.optim.SGD(model.parameters(), 1.0), (x, labels)) as session:
        with pytest.raises(ValueError, match="label or token id is outside the range") as error:
            session.step(next(session.batches()), loss_fn)
        assert "7" not in str(error.value)
