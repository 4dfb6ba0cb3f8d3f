"""Cards and their verification where releases beside the steps were made."""

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.early_stopping import PrivateEarlyStopping, wrong_answers
from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.report.spent import charges_of
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError
from tests.sessions import cross_entropy as loss_fn

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
TEXTS = {"title": "t", "chosen_by": "a test", "not_private": {}}


def open_session(folder, noise, count, steps=4):
    kind = ExtraRelease(purpose="evaluation", noise_multiplier=noise, norm=1.0, count=count)
    config = PrivacyConfig(expected_batch_size=20, steps=steps, extra_releases=(kind,))
    plan = config.with_noise(1.0, 1e-3, 200)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(plan, model, optimizer, (X, Y), ledger_path=folder / "ledger.jsonl")


def test_a_card_verifies_where_an_evaluation_is_the_last_release(tmp_path):
    with open_session(tmp_path, noise=20.0, count=2) as session:
        stop = PrivateEarlyStopping(2, on=(X[:50], Y[:50]), most=1.0)
        for batch in session.batches():
            session.step(batch, loss_fn)
            if batch.step % 2:
                stop.loss(session, wrong_answers)
        session.write_card(tmp_path, **TEXTS)
    facts = verify_ledger(tmp_path / "ledger.jsonl")
    assert facts["releases"] == 6 and facts["planned releases"] == "6"
    assert facts["of them beside the steps"] == "2 for evaluation"
    card = tmp_path / "privacy_card.json"
    text = card.read_text("utf-8")
    card.write_text(text.replace('"planned_releases": 6', '"planned_releases": 5'), "utf-8")
    with pytest.raises(CardError):
        verify_ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(("noise", "count"), [(300.0, 40), (0.8, 1)])
def test_a_total_covers_every_kind_of_release(noise, count, tmp_path):
    with open_session(tmp_path, noise, count, steps=2) as session:
        for _ in range(count):
            session.release_vector("evaluation", np.zeros(1), 1.0)
        for batch in session.batches():
            session.step(batch, loss_fn)
        honest = total_epsilon(charges_of(session.ledger.releases), 1e-3)
        assert session.epsilon == pytest.approx(honest, rel=1e-3)
        total = {"delta": 1e-3, "runs": ["this"]}
        with pytest.raises(ValueError, match="total"):
            session.write_card(tmp_path, **TEXTS, total={"epsilon": 0.6 * honest, **total})
        session.write_card(tmp_path, **TEXTS, total={"epsilon": honest, **total})
    assert verify_ledger(tmp_path / "ledger.jsonl")["releases"] == count + 2


def test_a_release_without_noise_takes_the_guarantee_away():
    kind = ExtraRelease(purpose="bounds", noise_multiplier=1e-6, norm=1.0, count=1)
    config = PrivacyConfig(expected_batch_size=20, steps=2, extra_releases=(kind,))
    plan = config.with_noise(1.0, 1e-3, 200)
    assert not plan.certified and "NOT PRIVATE" in plan.caveats[0]
