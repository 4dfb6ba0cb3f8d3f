"""Checkpoints and ledgers that commit c5b9432 wrote, before the code was moved, go on to the
weights of that commit.

Each folder of `old` holds the ledger and the checkpoint of a run in test mode after half of its
steps, and the privacy card of the whole run.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from dpkfc.report.card import session_card, to_markdown
from dpkfc.report.officer import registry_record
from dpkfc.report.verify import verify_ledger
from tests.distributed.cases import CASES
from tests.golden.record import digest, flatten_weights, processor
from tests.test_session import loss_fn

OLD = Path(__file__).parent / "old"
INDEX = json.loads((OLD / "index.json").read_text("utf-8"))
SAME_MACHINE = INDEX["processor"] == processor() and INDEX["torch"] == torch.__version__
# Sections that cards of layout 2 have beside those of the old files.
ADDED = {"layout", "declared", "dates", "meaning", "total"}
DATED = {"created", "date", "dpkfc", "generated", "ledger", "software", "versions"}


@pytest.mark.parametrize("name", INDEX["runs"])
def test_an_old_run_goes_on(name: str, tmp_path: Path) -> None:
    folder, expected = tmp_path / name, INDEX["runs"][name]
    shutil.copytree(OLD / name, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session, model = CASES[expected["case"]].open(folder / "ledger.jsonl")
        with session:
            session.restore(folder / "checkpoint")
            for batch in session.batches():
                session.step(batch, loss_fn)
            card = session_card(session, title="old", chosen_by="fixed", not_private={})
    assert float(flatten_weights(model).norm()) == pytest.approx(expected["norm"], rel=1e-9)
    if SAME_MACHINE:
        assert digest(flatten_weights(model)) == expected["weights"]
    stored = json.loads((folder / "card.json").read_text("utf-8"))
    found = json.loads(json.dumps(card))
    if not SAME_MACHINE:
        # Digests of a metric depend on its last bits.
        del stored["curvature"]["refreshes"], found["curvature"]["refreshes"]
    assert set(found) - set(stored) == ADDED
    for key in set(stored) - DATED:
        assert found.get(key) == stored.get(key), key


@pytest.mark.parametrize("name", INDEX["runs"])
def test_an_old_card_is_shown(name: str) -> None:
    card = json.loads((OLD / name / "card.json").read_text("utf-8"))
    text = to_markdown(card)
    assert "an older version made it" in text or "no certified guarantee" in text
    assert card["plan_hash"] in text and registry_record(card)["url_slug"] == "old"


@pytest.mark.parametrize("name", INDEX["runs"])
def test_an_old_ledger_is_read(name: str) -> None:
    facts = verify_ledger(OLD / name / "ledger.jsonl", 1e-5)
    assert facts["chain"] == "holds" and facts["releases"] > 0
