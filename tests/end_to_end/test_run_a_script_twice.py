"""Run a script twice: the second session finds the ledger of the first, and leaves its checkpoint
alone.
"""

from __future__ import annotations

import pytest
import torch

from dpkfc import PrivacyConfig, Session
from dpkfc.checkpoint import CheckpointError
from tests.test_session import N, data, loss_fn, net, weights


def script(folder, steps, **how):
    model = net()
    plan = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, N)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    path = folder / "ledger.jsonl"
    with Session(plan, model, optimizer, data(), ledger_path=path, **how) as session:
        for _, batch in zip(range(steps), session.batches(), strict=False):
            session.step(batch, loss_fn)
        session.save(folder / "checkpoint")
    return weights(model)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_session_that_was_not_restored_keeps_the_checkpoint_of_another(tmp_path, steps):
    trained = script(tmp_path, steps)
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    refused = (
        "all 4 releases of the plan are spent in .* resume=True to evaluate"
        if steps == 4
        else r"holds 2 releases of an earlier run: session.restore\(\)"
    )
    with pytest.raises(RuntimeError, match=refused):
        script(tmp_path, 4)
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger
    with pytest.raises(RuntimeError, match="from before .* stays as it is|holds no weights of"):
        script(tmp_path, 1, resume=True)
    model = net()
    plan = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, N)
    with Session(
        plan,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        data(),
        ledger_path=tmp_path / "ledger.jsonl",
        resume=True,
    ) as session:
        session.restore(tmp_path / "checkpoint")
        assert torch.equal(weights(model), trained)
        session.save(tmp_path / "checkpoint")


def test_a_session_saves_again_what_it_saved_itself(tmp_path):
    """A job that was killed before its first checkpoint left releases in the ledger, and no
    checkpoint to go on from.
    """
    plan = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, N)
    for steps in (1, 3):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Session(
            plan,
            model,
            optimizer,
            data(),
            ledger_path=tmp_path / "ledger.jsonl",
            resume=steps > 1,
        ) as session:
            for _, batch in zip(range(steps), session.batches(), strict=False):
                session.step(batch, loss_fn)
                if steps > 1:
                    session.save(tmp_path / "checkpoint")
    assert session.steps_done == 4


def test_a_checkpoint_of_another_ledger_stays_though_it_knows_of_more_releases(tmp_path):
    (tmp_path / "other").mkdir()
    script(tmp_path / "other", 3)
    plan = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, N)
    for saves in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Session(
            plan, model, optimizer, data(), ledger_path=tmp_path / "ledger.jsonl", resume=saves
        ) as session:
            session.step(next(session.batches()), loss_fn)
            if saves:
                with pytest.raises(CheckpointError, match="stays as it is"):
                    session.save(tmp_path / "other" / "checkpoint")


def test_a_ledger_is_not_lost_to_a_checkpoint_in_its_folder(tmp_path):
    model = net()
    plan = PrivacyConfig(expected_batch_size=8, steps=2).with_noise(1.0, 1e-3, N)
    with Session(
        plan,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        data(),
        ledger_path=tmp_path / "ledger.jsonl",
    ) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
            with pytest.raises(
                CheckpointError, match=r"holds 'ledger\.jsonl'.* a folder of its own"
            ):
                session.save(tmp_path)
    with Session(
        plan,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        data(),
        ledger_path=tmp_path / "ledger.jsonl",
        resume=True,
    ) as session:
        assert session.steps_done == 2 and list(session.batches()) == []
