"""Worry: "Missing values make records count nothing, and the operator never hears of it"."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkfc import PrivacyConfig, Session
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.session import StepRecord

N, STEPS = 40, 3


def table(missing: int) -> tuple[Tensor, Tensor]:
    """N records, of which the first ones lack a value."""
    x = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    x[:missing, 2] = float("nan")
    return x, y


def net() -> nn.Module:
    return nn.Linear(5, 2)


def by_session(missing: int) -> list[StepRecord]:
    model = net()
    plan = PrivacyConfig(expected_batch_size=N // 2, steps=STEPS, sampler="fixed").with_noise(
        1.0, 1e-3, N
    )
    with Session(
        plan, model, torch.optim.SGD(model.parameters(), 0.1), table(missing), verify=False
    ) as session:
        return [
            session.step(batch, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
            for batch in session.batches()
        ]


def by_engine(missing: int) -> None:
    model = net()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(*table(missing)), batch_size=N // 2),
        verify=False,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.close()


def test_the_record_of_a_step_holds_the_fraction_of_records_that_are_not_finite() -> None:
    assert [record.nonfinite_fraction for record in by_session(0)] == [0.0] * STEPS
    assert [record.nonfinite_fraction for record in by_session(N)] == [1.0] * STEPS
    fractions = [record.nonfinite_fraction for record in by_session(N // 2)]
    assert all(0 < fraction < 1 and (fraction * N / 2).is_integer() for fraction in fractions)


@pytest.mark.parametrize("run", [by_session, by_engine])
def test_no_message_depends_on_the_records(run: Callable, caplog: pytest.LogCaptureFixture) -> None:
    # The first run has what is said once a process.
    run(0)
    messages = []
    for missing in (0, 3 * N // 4, N):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
            warnings.simplefilter("always")
            run(missing)
        logged = [record.getMessage() for record in caplog.records]
        messages.append([str(warning.message) for warning in caught] + logged)
    assert messages[0] == messages[1] == messages[2]


def test_every_script_has_a_warning_on_what_becomes_of_missing_values() -> None:
    with pytest.warns(UserWarning, match="look for missing values in the data") as caught:
        by_engine(0)
    assert all(len(str(warning.message)) <= 160 for warning in caught)
