"""The card of a run, the document's example, and the demo's in-process half at a size that takes
seconds.
"""

import json
import math
from pathlib import Path

import pytest

from dpkfc.federated import (
    ClientLevel,
    FederatedConfig,
    PerUpload,
    SecureAggregation,
    TrustedServer,
    federate,
    simulation,
)
from dpkfc.report.card_files import to_markdown
from dpkfc.report.federated_card import build_federated_card
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError
from tests.documents import blocks
from tests.federated.worlds import (
    CLIENTS,
    RECORDS,
    datasets,
    head,
    loss_fn,
    plan_of,
    run_round_without,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_of_the_document_runs():
    found = [
        block for block in blocks(ROOT / "docs" / "federated.md") if block.language == "python"
    ]
    assert found
    for block in found:
        exec(compile(block.text, "docs/federated.md", "exec"), {})


@pytest.mark.parametrize(
    "privacy", [TrustedServer(), SecureAggregation(), PerUpload(), ClientLevel()]
)
def test_a_card_says_who_is_protected_from_whom(privacy):
    config = FederatedConfig(clients=CLIENTS, rounds=2, expected_records=RECORDS, privacy=privacy)
    plan = config.calibrate(2.0, 1e-3)
    run = federate(plan, head(), loss_fn, datasets())
    card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
    json.dumps(card, allow_nan=False)
    text = to_markdown(card)
    assert privacy.name in text and config.adversaries in text
    assert f"one {privacy.unit} added or removed" in text
    assert 1.99 < card["guarantee"]["epsilon"] <= 2.0 and card["ledger"]["count"] == 2
    assert card["guarantee"]["epsilon"] == run.server.epsilon == plan.epsilon(2)
    for party, epsilon in plan.views().items():
        shown = card["guarantee"]["epsilon_for_others"][party]
        assert shown == (epsilon if math.isfinite(epsilon) else "inf")


@pytest.mark.slow
def test_the_demo_leaves_a_folder_a_method(tmp_path):
    pytest.importorskip("sklearn")
    from dpkfc.app.federated_demo import METHODS, federated_demo

    chosen = tuple(METHODS)[1:]
    demo = federated_demo(str(tmp_path / "demo"), rounds=2, methods=chosen)
    assert tuple(run.method for run in demo.runs) == chosen
    assert all(run.epsilon <= 3.0 for run in demo.runs)
    for method in chosen:
        names = {path.name for path in (tmp_path / "demo" / method).iterdir()}
        assert {
            "ledger.jsonl",
            "checkpoint",
            "privacy_card.json",
            "privacy_card.md",
            "model.safetensors",
        } <= names
        answers = verify_ledger(tmp_path / "demo" / method / "ledger.jsonl")
        assert answers["privacy card"] == "states what the ledger shows" and answers[
            "privacy unit"
        ].startswith("one ")
        assert answers["weights"] == "equal to the card's (SHA-256)"
    card = (tmp_path / "demo" / chosen[0] / "privacy_card.md").read_text("utf-8")
    assert "| weights, file | `model.safetensors` |" in card and "| weights, sha256 | `" in card
    one, other = (tmp_path / "demo" / name / "model.safetensors" for name in chosen)
    one.write_bytes(other.read_bytes())
    with pytest.raises(CardError, match="does not hold the weights"):
        verify_ledger(tmp_path / "demo" / chosen[0] / "ledger.jsonl")
    assert {"comparison.png"} <= {path.name for path in (tmp_path / "demo").iterdir()}


def test_dropped_rounds_and_test_mode_are_on_the_card(monkeypatch):
    plan = plan_of(privacy=TrustedServer("clients"), rounds=3)

    def lose_clients(server, clients):
        dead = clients if server.next_round == 1 else ()
        return run_round_without(server, clients, dead)

    monkeypatch.setattr(simulation, "run_round", lose_clients)
    run = federate(plan, head(), loss_fn, datasets())
    card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
    assert card["rounds"] == {"sent": 3, "dropped": 1, "rejected_messages": {}}
    assert math.isfinite(card["guarantee"]["epsilon"]) and not card["guarantee"]["certified"]
    assert "**NOT PRIVATE**" in to_markdown(card)
