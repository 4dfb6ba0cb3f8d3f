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
ONLY_NOISE = "non-finite gradient; the releases hold noise only"


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


def test_passes_of_an_engine_say_nothing_about_their_records() -> None:
    """A warning after each pass would be a private bit of each, also where others have noise
    alone."""
    model = net()
    rows = TensorDataset(*table(N))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        target_epsilon=5.0,
        target_delta=1e-3,
        epochs=3,
        max_grad_norm=1.0,
        data_loader=DataLoader(rows, batch_size=N // 2),
        verify=False,
    )
    said = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        said.append(sum(ONLY_NOISE in str(warning.message) for warning in caught))
    engine.close()
    assert said == [0, 0, 1]


def test_the_record_of_a_step_holds_the_fraction_of_records_that_are_not_finite() -> None:
    assert [record.nonfinite_fraction for record in by_session(0)] == [0.0] * STEPS
    assert [record.nonfinite_fraction for record in by_session(N)] == [1.0] * STEPS
    fractions = [record.nonfinite_fraction for record in by_session(N // 2)]
    assert all(0 < fraction < 1 and (fraction * N / 2).is_integer() for fraction in fractions)


@pytest.mark.parametrize("run", [by_session, by_engine])
@pytest.mark.parametrize(("missing", "warns"), [(0, False), (3 * N // 4, False), (N, True)])
def test_a_run_that_released_noise_alone_warns_its_operator_once(
    run: Callable, missing: int, warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(missing)
    texts = [str(warning.message) for warning in caught if ONLY_NOISE in str(warning.message)]
    assert len(texts) == warns and all(
        text.startswith("private: do not share") and len(text) <= 160 for text in texts
    )


@pytest.mark.parametrize("run", [by_session, by_engine])
def test_a_filter_that_makes_errors_of_warnings_does_not_stop_the_run(
    run: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "dpkfc"):
        warnings.filterwarnings("error", message="private: do not share")
        run(N)
    assert ONLY_NOISE in caplog.text
