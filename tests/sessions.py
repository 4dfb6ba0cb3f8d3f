"""Sessions of tests: a plan, an optimizer and a data set around any model, in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session

FIELDS = {field.name for field in dataclasses.fields(PrivacyConfig)}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each example of (inputs, labels)."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def open_session(
    model: nn.Module,
    dataset: Any,
    noise: float = 1.0,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 0.1,
    size: int | None = None,
    **settings: Any,
) -> Session:
    """Open a session of two steps over 8 examples in test mode, with δ = 1e-3.

    Args:
        model: whose trainable parameters are trained.
        dataset: a tuple of tensors or a data set.
        noise: noise multiplier.
        optimizer: SGD if None.
        lr: of SGD.
        size: number of records or units; None for the number in the data set.
        settings: of PrivacyConfig and of Session.
    """
    values = {"expected_batch_size": 8, "steps": 2, "test_mode_seed": 1}
    values |= {name: value for name, value in settings.items() if name in FIELDS}
    rest = {name: value for name, value in settings.items() if name not in FIELDS}
    if size is None:
        size = len(dataset[0]) if isinstance(dataset, tuple) else len(dataset)
    plan = PrivacyConfig(**values).with_noise(noise, 1e-3, size)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Session(plan, model, optimizer or torch.optim.SGD(trained, lr), dataset, **rest)


def train(
    model: nn.Module, dataset: Any, loss_fn: Any = cross_entropy, *args: Any, **settings: Any
) -> Session:
    """Train a model to the end of the plan of `open_session`."""
    with open_session(model, dataset, *args, **settings) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
    return session


def assert_refused(
    session: Session, message: str, loss_fn: Any = cross_entropy, *, times: int = 1
) -> None:
    """Check that the first step is refused in one line as often as it is tried, free of charge."""
    with session:
        for _ in range(times):
            with pytest.raises(ValueError, match=message) as caught:
                session.step(next(session.batches()), loss_fn)
            assert len(str(caught.value)) <= 160
    assert session.ledger.count == 0
