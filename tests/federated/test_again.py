"""The same run started once more: it goes on after its last round, and a finished one is left as it
is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpkfc import KFAC, FeatureNoise
from dpkfc.federated import ClientLevel, SecureAggregation, TrustedServer
from dpkfc.federated.flower import App
from dpkfc.federated.simulation import Killed, SimulatedRun, federate
from dpkfc.privacy.ledger import BudgetExhausted, verify
from dpkfc.report.federated_card import build_federated_card
from tests.federated.worlds import datasets, head, loss_fn, plan_of, vector, world


class Stopped(Exception):
    """The host goes down."""


def app(rounds: int = 4) -> App:
    plan = plan_of(privacy=TrustedServer(), rounds=rounds)
    parts = datasets()
    return App(
        plan=lambda settings: plan,
        model=lambda settings: head(),
        loss_fn=loss_fn,
        records=lambda number, settings: parts[number],
    )


def test_an_interrupted_run_goes_on_after_its_last_round(tmp_path: Path):
    def stop(record, run):
        if record.round == 1:
            raise Stopped

    with pytest.raises(Stopped):
        app().here(folder=tmp_path, on_round=stop)
    seen = []
    run = app().here(folder=tmp_path, on_round=lambda record, run: seen.append(record.round))
    assert seen == [2, 3] and len(verify(tmp_path / "ledger.jsonl").releases) == 4
    held = vector(run.server.parameters).clone()
    with pytest.raises(BudgetExhausted, match="nothing was sent"):
        app().here(folder=tmp_path)
    again = head()
    with pytest.raises(BudgetExhausted):
        federate(
            plan_of(privacy=TrustedServer(), rounds=4),
            again,
            loss_fn,
            datasets(),
            ledger_path=tmp_path / "ledger.jsonl",
            checkpoint=tmp_path / "checkpoint",
            resume=True,
        )
    assert torch.equal(torch.cat([p.detach().flatten() for p in again.parameters()]), held)


def test_records_of_unlike_width_are_collated_in_this_process_as_on_a_node(tmp_path: Path):
    def rows(number):
        generator = torch.Generator().manual_seed(number)
        return [(torch.randn(3 + k % 3, generator=generator).double(), k % 3) for k in range(6)]

    def padded(chosen):
        x = torch.stack([torch.nn.functional.pad(row, (0, 5 - len(row))) for row, _ in chosen])
        return x, torch.tensor([label for _, label in chosen])

    plan = plan_of(0.0, privacy=TrustedServer(), rounds=2)
    common = {"plan": lambda s: plan, "model": lambda s: head(), "loss_fn": loss_fn}
    one = App(**common, records=lambda number, s: rows(number), collate_fn=padded).here(
        folder=tmp_path / "one"
    )
    other = App(**common, records=lambda number, s: padded(rows(number))).here(
        folder=tmp_path / "other"
    )
    assert torch.allclose(
        vector(one.server.parameters), vector(other.server.parameters), atol=1e-12
    )
    run = federate(plan, head(), loss_fn, [rows(number) for number in range(4)], collate_fn=padded)
    assert torch.equal(vector(run.server.parameters), vector(one.server.parameters))


def test_a_run_that_goes_on_remembers_its_rounds_and_figures(tmp_path: Path):
    plan = plan_of(privacy=SecureAggregation(), rounds=6)
    common = {"ledger_path": tmp_path / "ledger.jsonl", "checkpoint": tmp_path / "checkpoint"}

    def fault(stage, number, client):
        missing = stage == "client" and number in (0, 1) and client == 0
        return missing or (stage, number, client) == ("opened", 3, -1)

    evaluate = {"evaluate": lambda model: float(model.weight.detach().norm()), "every": 2}
    with pytest.raises(Killed):
        federate(plan, head(), loss_fn, datasets(), fault=fault, **common, **evaluate)
    run = federate(plan, head(), loss_fn, datasets(), resume=True, **common, **evaluate)
    assert [(r.round, r.dropped) for r in run.records] == [
        (0, True),
        (1, True),
        (2, False),
        (4, False),
        (5, False),
    ]
    assert [point[0] for point in run.history] == [2, 5, 6] and isinstance(run.history[0], tuple)
    card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
    assert (card["rounds"]["sent"], card["rounds"]["dropped"]) == (6, 2)


def test_messages_that_were_rejected_before_are_remembered(tmp_path: Path):
    server, clients = world(plan_of(privacy=TrustedServer(), rounds=2))
    run, sent = SimulatedRun(server), server.open_round()
    for i, client in clients.items():
        server.receive(
            {**client.answer(sent[i]), "loss": 0.3} if i == 0 else client.answer(sent[i])
        )
    run.records.append(server.close_round())
    run.save(tmp_path / "checkpoint")
    again = SimulatedRun(server)
    server.rejected.clear()
    again.restore(tmp_path / "checkpoint")
    assert server.rejected == {"other-fields": 1} and again.records == run.records


def test_a_used_ledger_without_its_checkpoint_is_refused(tmp_path: Path):
    plan = plan_of(privacy=TrustedServer(), rounds=4)
    ledger = tmp_path / "ledger.jsonl"

    def stop(record, run):
        raise Stopped

    with pytest.raises(Stopped):
        federate(plan, head(), loss_fn, datasets(), ledger_path=ledger, on_round=stop)
    with pytest.raises(ValueError, match="1 releases of an earlier run"):
        federate(plan, head(), loss_fn, datasets(), ledger_path=ledger)
    assert len(verify(ledger).releases) == 1


@pytest.mark.parametrize(
    "privacy", [SecureAggregation(), ClientLevel(SecureAggregation())], ids=["records", "clients"]
)
@pytest.mark.parametrize("readout", ["natural", "inverse"])
def test_masked_sums_of_a_float32_model_are_mapped_back(privacy, readout):
    model = head().float()
    width = next(model.parameters()).shape[1]
    parts = [(x.float(), y) for x, y in datasets()]
    preconditioner = KFAC(probe=FeatureNoise(width), probe_size=16)
    plan = plan_of(privacy=privacy, rounds=2, preconditioner=preconditioner, readout=readout)
    run = federate(plan, model, loss_fn, parts)
    assert [record.dropped for record in run.records] == [False, False]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_loss_of_one_number_is_refused_before_a_round():
    def summed(model, batch):
        return loss_fn(model, batch).mean()

    plan = plan_of(privacy=TrustedServer(), rounds=4)
    rounds: list[int] = []
    with pytest.raises(ValueError, match="loss_fn must return one loss per example"):
        federate(
            plan,
            head(),
            summed,
            datasets(),
            on_round=lambda record, run: rounds.append(record.round),
        )
    assert rounds == []
