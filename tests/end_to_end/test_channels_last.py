"""A model laid out with its channels last: the same steps, and a run that goes on where it was
stopped, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc import KFAC, PinkNoise, PrivacyConfig, Session
from dpkfc.postprocess import DiSK

X, Y = (
    torch.randn(60, 2, 8, 8, generator=torch.Generator().manual_seed(0)).double(),
    torch.arange(60) % 3,
)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(
        model(batch[0].to(memory_format=torch.channels_last)), batch[1], reduction="none"
    )


def opened(folder: Path, *, last: bool = True) -> tuple[Session, nn.Module]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()
    model = model.to(memory_format=torch.channels_last) if last else model
    preconditioner = KFAC(probe=PinkNoise((2, 8, 8)), probe_size=80, every=3)
    plan = PrivacyConfig(
        expected_batch_size=12,
        steps=8,
        test_mode_seed=3,
        postprocess=(DiSK(),),
        preconditioner=preconditioner,
    ).with_noise(1.0, 1e-3, len(X))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(plan, model, optimizer, (X, Y), ledger_path=folder / "ledger.jsonl"), model


def trained(session: Session, steps: int = 8) -> None:
    for _, batch in zip(range(steps), session.batches(), strict=False):
        session.step(batch, loss_fn)


def test_steps_do_not_depend_on_the_layout(tmp_path: Path):
    (first, one), (second, other) = opened(tmp_path / "a"), opened(tmp_path / "b", last=False)
    with first, second:
        trained(first)
        trained(second)
    assert not one[3].weight.is_contiguous() and other[3].weight.is_contiguous()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path):
    whole, expected = opened(tmp_path / "whole")
    with whole:
        trained(whole)
    stopped, _ = opened(tmp_path / "cut")
    with stopped:
        trained(stopped, 4)
        stopped.save(tmp_path / "checkpoint")
    again, found = opened(tmp_path / "cut")
    with again:
        again.restore(tmp_path / "checkpoint")
        trained(again)
    assert all(
        torch.equal(p, q) for p, q in zip(expected.parameters(), found.parameters(), strict=True)
    )
