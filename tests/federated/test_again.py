"""The same run started once more: it goes on after its last round, and a finished one is left as it
is.
"""

import pytest
import torch

from dpkfc import KFAC, FeatureNoise
from dpkfc.checkpoint import CheckpointError
from dpkfc.federated import SecureAggregation, Server, TrustedServer, simulation
from dpkfc.federated.app import App
from dpkfc.federated.simulation import federate, run_round
from dpkfc.privacy.ledger import BudgetExhausted, verify
from dpkfc.report.federated_card import build_federated_card
from tests.federated.worlds import (
    Killed,
    datasets,
    head,
    kill_server,
    loss_fn,
    plan_of,
    run_round_without,
    vector,
)


class Stopped(Exception):
    """The host goes down."""


def app(rounds=4):
    plan = plan_of(privacy=TrustedServer(), rounds=rounds)
    parts = datasets()
    return App(
        plan=lambda settings: plan,
        model=lambda settings: head(),
        loss_fn=loss_fn,
        records=lambda number, settings: parts[number],
    )


def test_an_interrupted_run_goes_on_after_its_last_round(tmp_path):
    def stop(record, run):
        if record.round == 1:
            raise Stopped

    with pytest.raises(Stopped):
        app().run_here(folder=tmp_path, on_round=stop)
    seen = []
    run = app().run_here(folder=tmp_path, on_round=lambda record, run: seen.append(record.round))
    assert seen == [2, 3] and len(verify(tmp_path / "ledger.jsonl").releases) == 4
    assert (tmp_path / "ledger.jsonl").exists() and run.server.ledger.count == 4
    with pytest.raises(BudgetExhausted, match="nothing was sent"):
        app().run_here(folder=tmp_path)


def test_a_server_that_begins_anew_on_its_ledger_replaces_no_checkpoint(tmp_path):
    plan = plan_of(privacy=TrustedServer(), rounds=4)
    common = {"ledger_path": tmp_path / "ledger.jsonl", "checkpoint": tmp_path / "checkpoint"}

    def stop(record, run):
        raise Stopped

    with pytest.raises(Stopped):
        federate(plan, head(), loss_fn, datasets(), on_round=stop, **common)
    server = Server(plan, head(), ledger_path=common["ledger_path"])
    with pytest.raises(CheckpointError, match=r"from before this session.*go on with restore\(\)"):
        server.save(common["checkpoint"])
    server.restore(common["checkpoint"])
    server.save(common["checkpoint"])
    server.close()


def test_a_run_that_goes_on_remembers_its_rounds_and_figures(tmp_path, monkeypatch):
    plan = plan_of(privacy=SecureAggregation(), rounds=6)
    common = {"ledger_path": tmp_path / "ledger.jsonl", "checkpoint": tmp_path / "checkpoint"}

    def lose_a_client(server, clients):
        if server.next_round < 2:
            return run_round_without(server, clients, [0])
        return run_round(server, clients)

    monkeypatch.setattr(simulation, "run_round", lose_a_client)
    common |= {"evaluate": lambda model: float(model.weight.detach().norm()), "every": 2}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_server(patch, "open_round", 3)
        federate(plan, head(), loss_fn, datasets(), **common)
    run = federate(plan, head(), loss_fn, datasets(), resume=True, **common)
    rounds = [(r.round, r.dropped) for r in run.records]
    assert rounds == [(0, True), (1, True), (2, False), (4, False), (5, False)]
    assert [point[0] for point in run.history] == [2, 5, 6] and isinstance(run.history[0], tuple)
    card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
    assert (card["rounds"]["sent"], card["rounds"]["dropped"]) == (6, 2)


@pytest.mark.parametrize("readout", ["natural", "inverse"])
def test_masked_sums_of_a_float32_model_are_mapped_back(readout):
    model = head().float()
    parts = [(x.float(), y) for x, y in datasets()]
    plan = plan_of(
        privacy=SecureAggregation(),
        rounds=2,
        preconditioner=KFAC(probe=FeatureNoise(model.in_features), probe_size=16),
        readout=readout,
    )
    run = federate(plan, model, loss_fn, parts)
    assert [record.dropped for record in run.records] == [False, False]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_loss_of_one_number_is_refused_before_a_round():
    plan = plan_of(privacy=TrustedServer(), rounds=4)
    rounds = []
    options = {"on_round": lambda record, run: rounds.append(record.round)}
    with pytest.raises(ValueError, match="loss_fn must return one loss per example"):
        federate(plan, head(), lambda m, b: loss_fn(m, b).mean(), datasets(), **options)
    assert rounds == []


def test_records_of_unlike_width_are_collated():
    def rows(number):
        generator = torch.Generator().manual_seed(number)
        return [(torch.randn(3 + k % 3, generator=generator).double(), k % 3) for k in range(6)]

    def pad(chosen):
        x = torch.stack([torch.nn.functional.pad(row, (0, 5 - len(row))) for row, _ in chosen])
        return x, torch.tensor([label for _, label in chosen])

    plan = plan_of(0.0, privacy=TrustedServer(), rounds=2)
    clients = range(4)
    one = federate(plan, head(), loss_fn, [rows(n) for n in clients], collate_fn=pad)
    other = federate(plan, head(), loss_fn, [pad(rows(n)) for n in clients])
    found = vector(one.server.parameters)
    assert torch.allclose(found, vector(other.server.parameters), atol=1e-12)
