"""The card of a run of one's own is made from the session, and cannot say another number of
releases than its ledger.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpkfc import KFAC, PinkNoise, PrivacyConfig, Session
from dpkfc.app.html.page import render_card
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.card import CardFacts, build_card, session_card
from dpkfc.report.card_files import to_markdown
from dpkfc.report.verify import verify_ledger
from tests.sessions import cross_entropy as loss

N, X, Y = 40, torch.randn(40, 1, 8, 8), torch.randint(2, (40,))
SAID = {
    "title": "mine",
    "chosen_by": "beforehand",
    "not_private": {"loss": "of private data"},
}


def train_session(
    plan,
    path,
    *,
    steps,
    save=None,
    restore=None,
    **more,
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with Session(
        plan, model, torch.optim.SGD(model.parameters(), 0.1), (X, Y), ledger_path=path, **more
    ) as session:
        if restore:
            session.restore(restore)
        for _, batch in zip(range(steps), session.batches(), strict=False):
            session.step(batch, loss)
        if save:
            session.save(save)
    return session


def plan_of(**changed):
    settings = {"expected_batch_size": 10, "steps": 6, "accountant": "rdp", **changed}
    return PrivacyConfig(**settings).with_noise(1.0, 1e-3, 10 if "unit" in changed else N)


def kfac():
    return KFAC(probe=PinkNoise((1, 8, 8)), every=2, probe_size=8)


def test_a_card_of_a_session_agrees_with_its_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    session = train_session(plan_of(preconditioner=kfac()), path, steps=5)
    card = session_card(session, **SAID)
    assert (
        card["guarantee"]["releases"] == card["ledger"]["releases"] == 5
        and card["ledger"]["file"] == "ledger.jsonl"
    )
    assert (
        card["guarantee"]["epsilon"] == session.epsilon
        and "AES-256" in card["mechanism"]["noise_generator"]
    )
    text = to_markdown(card)
    assert (
        "| refreshes | 3, before steps 0, 2, 4 |" in text and session.preconditioner.digest in text
    )
    assert (
        "5 of 6 planned" in text
        and "number of examples N" in text
        and "5 of 6 planned" in render_card(card)
    )
    (tmp_path / "privacy_card.json").write_text(json.dumps(card))
    assert verify_ledger(path)["weights"] == "not compared: the card names no digest of them"


@pytest.mark.parametrize("missing", SAID)
def test_a_card_without_a_statement_says_which_ones_it_needs(tmp_path, missing):
    session = train_session(plan_of(), tmp_path / "ledger.jsonl", steps=1)
    statements = {name: value for name, value in SAID.items() if name != missing}
    with pytest.raises(TypeError, match="give title, chosen_by .* and not_private"):
        session.write_card(tmp_path / "card", **statements)
    assert not (tmp_path / "card").exists()
    session.write_card(tmp_path / "card", **statements, **{missing: SAID[missing]})


def test_a_restored_session_says_which_refreshes_it_does_not_know(tmp_path):
    plan, path = plan_of(preconditioner=kfac()), tmp_path / "ledger.jsonl"
    train_session(plan, path, steps=3, save=tmp_path / "checkpoint")
    for steps, first in ((0, 2), (2, 4)):
        text = to_markdown(
            session_card(
                train_session(plan, path, steps=steps, restore=tmp_path / "checkpoint"), **SAID
            )
        )
        assert f"| refreshes | 1, before steps {first} |" in text
        assert f"refreshes before step {first} came before the checkpoint" in text


def test_an_engine_without_a_limit_has_planned_nothing():
    model, engine = nn.Linear(64, 2), PrivacyEngine(accountant="rdp")
    optimizer, data = (
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(TensorDataset(X.flatten(1), Y), batch_size=20),
    )
    with pytest.raises(RuntimeError, match="call make_private"):
        session_card(engine, **SAID)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    card = session_card(engine, **SAID)
    assert (
        card["guarantee"]["planned_steps"] is None
        and card["guarantee"]["releases"] == engine.ledger.count == 6
    )
    assert "| releases | 6, without a limit |" in to_markdown(
        card
    ) and "6, without a limit" in render_card(card)
    assert card["guarantee"]["epsilon"] == pytest.approx(engine.get_epsilon(engine.plan.delta))
    engine.close()


def test_a_card_that_was_counted_by_hand_is_refused():
    facts = CardFacts(
        title="t",
        releases=1,
        ledger={"releases": 6},
        assumed_public={},
        chosen_by="x",
        not_private={},
        device="cpu",
    )
    with pytest.raises(ValueError, match="counts 1 releases, its ledger 6"):
        build_card(plan_of(), facts)
    with pytest.raises(ValueError, match="its ledger None"):
        build_card(plan_of(), replace(facts, ledger={}))
    with pytest.raises(ValueError, match="exceed the plan's 6"):
        build_card(plan_of(), replace(facts, releases=7, ledger={"releases": 7}))


def test_a_script_that_is_started_again_after_a_crash_is_told(tmp_path):
    path = tmp_path / "ledger.jsonl"
    train_session(plan_of(), path, steps=2, save=tmp_path / "checkpoint")
    message = "holds 2 releases from before; this session begins at new weights and has 4 left"
    with pytest.raises(LedgerError, match=r"2 releases of an earlier run: session.restore\(\)"):
        train_session(plan_of(), path, steps=2)
    with pytest.warns(UserWarning, match=message) as seen:
        train_session(plan_of(), path, steps=2, resume=True)
    assert len(seen) == 1 and seen[0].filename == __file__
