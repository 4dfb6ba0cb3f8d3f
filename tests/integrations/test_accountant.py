"""An ε that is not a guarantee is never handed out without saying so."""

from __future__ import annotations

import warnings

import pytest

from dpkfc.integrations.opacus import PrivacyEngine
from tests.integrations.opacus_cases import private, train, with_epsilon


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"test_mode_seed": 0}, "NOT PRIVATE: test mode"),
        ({"poisson_sampling": False, "uncertified": True}, "UNCERTIFIED: shuffled batches"),
    ],
)
def test_a_plan_with_caveats_warns_once(settings: dict, reason: str):
    engine, model, optimizer, batches = with_epsilon(**settings)
    train(model, optimizer, batches, 1)
    with pytest.warns(UserWarning, match=f"not a guarantee of this run. {reason}") as caught:
        spent = engine.get_epsilon(1e-3)
    assert 0 < spent <= 5.0 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(1e-3) == engine.accountant.get_epsilon(1e-3) == spent
        assert engine.get_epsilon(1e-2) < spent
    engine.close()


@pytest.mark.parametrize("settings", [{"noise_multiplier": 1.0, "test_mode_seed": None}, {}])
def test_a_certified_plan_and_one_without_noise_say_nothing(settings: dict):
    engine, model, optimizer, batches = private(engine=PrivacyEngine(accountant="rdp"), **settings)
    train(model, optimizer, batches, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(1e-3) > 0
    engine.close()
