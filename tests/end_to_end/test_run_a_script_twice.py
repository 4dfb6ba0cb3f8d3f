"""Run a script twice: the second session finds the ledger of the first, and leaves its checkpoint
alone.
"""

import pytest
import torch

from dpkfc.checkpoint import CheckpointError
from tests.sessions import cross_entropy, open_session
from tests.test_session import data, net, weights


def start(folder, **how):
    settings = {"steps": 4, "test_mode_seed": None, "ledger_path": folder / "ledger.jsonl"}
    return open_session(net(), data(), **settings, **how)


def script(folder, steps, **how):
    with start(folder, **how) as session:
        for _, batch in zip(range(steps), session.batches(), strict=False):
            session.step(batch, cross_entropy)
        session.save(folder / "checkpoint")
    return weights(session.model)


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
    with start(tmp_path, resume=True) as session:
        session.restore(tmp_path / "checkpoint")
        assert torch.equal(weights(session.model), trained)
        session.save(tmp_path / "checkpoint")


def test_a_session_saves_again_what_it_saved_itself(tmp_path):
    """A job that was killed before its first checkpoint left releases in the ledger, and no
    checkpoint to go on from.
    """
    with start(tmp_path) as session:
        session.step(next(session.batches()), cross_entropy)
    with start(tmp_path, resume=True) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
            session.save(tmp_path / "checkpoint")
    assert session.steps_done == 4


def test_a_checkpoint_of_another_ledger_stays_though_it_knows_of_more_releases(tmp_path):
    (tmp_path / "other").mkdir()
    script(tmp_path / "other", 3)
    with start(tmp_path) as session:
        session.step(next(session.batches()), cross_entropy)
    with start(tmp_path, resume=True) as session:
        session.step(next(session.batches()), cross_entropy)
        with pytest.raises(CheckpointError, match="stays as it is"):
            session.save(tmp_path / "other" / "checkpoint")


def test_a_ledger_is_not_lost_to_a_checkpoint_in_its_folder(tmp_path):
    with start(tmp_path) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
            with pytest.raises(
                CheckpointError, match=r"holds 'ledger\.jsonl'.* a folder of its own"
            ):
                session.save(tmp_path)
    with start(tmp_path, resume=True) as session:
        assert session.steps_done == 4 and list(session.batches()) == []
