"""Clients and servers that die, messages that are wrong, budgets that end: ε stays what it was said
to be.
"""

import math
from functools import partial
from itertools import combinations

import pytest
import torch

from dpkfc import KFAC, FeatureNoise
from dpkfc.checkpoint import CheckpointError
from dpkfc.federated import (
    ClientLevel,
    FedAvg,
    FedGD,
    FedSOFIM,
    LocalModel,
    LocalSteps,
    PerUpload,
    SecureAggregation,
    Server,
    TrustedServer,
    federate,
)
from dpkfc.federated.client import Client
from dpkfc.federated.messages import REASONS
from dpkfc.federated.party import contract_of
from dpkfc.federated.simulation import make_clients, run_round
from dpkfc.privacy.ledger import BudgetExhausted, verify
from tests.federated.worlds import (
    CLIENTS,
    Killed,
    datasets,
    head,
    kill_server,
    loss_fn,
    plan_of,
    records,
    run_round_without,
    vector,
    world,
)

MODELS = [TrustedServer(), TrustedServer("clients"), SecureAggregation(), PerUpload()]


@pytest.mark.quick("*0")
@pytest.mark.parametrize("privacy", MODELS)
def test_any_set_of_dead_clients_leaves_enough_noise_or_no_release(privacy):
    for k in range(CLIENTS + 1):
        for dead in combinations(range(CLIENTS), k):
            plan = plan_of(privacy=privacy, min_survivors=3, rounds=1)
            server, clients = world(plan)
            before = vector(server.parameters)
            record = run_round_without(server, clients, dead)
            assert record.survivors == CLIENTS - k and record.dropped == (CLIENTS - k < 3)
            assert server.ledger.count == 1 and server.rounds_left == 0
            if record.dropped:
                assert torch.equal(before, vector(server.parameters))
            else:
                others = plan.hiding_stddev(record.survivors, plan.config.known_shares)
                assert others >= plan.stddev * (1 - 1e-12)
                assert not torch.equal(before, vector(server.parameters))


@pytest.mark.parametrize("privacy", [TrustedServer(), SecureAggregation()])
@pytest.mark.parametrize(
    "method, before",
    [
        ("open_round", False),
        ("fix_survivors", True),
        ("fix_survivors", False),
        ("close_round", True),
        ("close_round", False),
    ],
)
def test_a_server_killed_anywhere_keeps_its_ledger(tmp_path, monkeypatch, method, before, privacy):
    plan = plan_of(privacy=privacy, rounds=4, rule=FedSOFIM())
    clients = make_clients(plan, head(), loss_fn, datasets())
    ledger = tmp_path / "ledger.jsonl"
    common = {"clients": clients, "ledger_path": ledger, "checkpoint": tmp_path / "checkpoint"}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_server(patch, method, 2, before=before)
        federate(plan, head(), loss_fn, [], **common)
    # The charge came before anything was sent.
    assert len(verify(ledger).releases) == 3
    run = federate(plan, head(5), loss_fn, [], resume=True, **common)
    # The round in which it died has no record, and a charge.
    assert [r.round for r in run.records] == [0, 1, 3]
    assert len(verify(ledger).releases) == 4
    assert not any(r.dropped for r in run.records) and run.server.epsilon == plan.curve.epsilon(4)
    assert all(c.ledger.count <= 4 for c in clients)


def test_a_spent_budget_ends_before_anything_is_sent():
    plan = plan_of(rounds=2, privacy=TrustedServer("clients"))
    server, clients = world(plan)
    for _ in range(2):
        run_round(server, clients)
    with pytest.raises(BudgetExhausted, match="nothing was sent"):
        server.open_round()
    assert server.ledger.count == 2 and server._open is None


def test_a_client_refuses_rounds_beyond_the_plan_and_repeated_ones():
    plan = plan_of(rounds=2, privacy=TrustedServer("clients"))
    server, clients = world(plan)
    sent = server.open_round()
    assert clients[0].answer(sent[0])["kind"] == "sum"
    again = clients[0].answer(sent[0])
    assert (again["kind"], again["reason"]) == ("error", "repeated-round") and clients[
        0
    ].ledger.count == 1
    assert clients[0].answer({**sent[0], "round": 1})["kind"] == "sum"
    assert clients[0].answer({**sent[0], "round": 2})["reason"] == "budget-spent"


def _plain(message):
    return {name: message[name] for name in ("round", "contract", "client")}


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: {**m, "loss": 0.3}, "other-fields"),
        (lambda m: {k: v for k, v in m.items() if k != "sum/bias"}, "other-fields"),
        (lambda m: {**m, "kind": "metrics"}, "unknown-kind"),
        (lambda m: {**m, "round": 1.0}, "wrong-type"),
        (lambda m: {**m, "sum/bias": m["sum/bias"].numpy()}, "wrong-type"),
        (lambda m: {**m, "sum/bias": m["sum/bias"].long()}, "wrong-type"),
        (lambda m: {**m, "sum/bias": m["sum/bias"].to_sparse()}, "wrong-type"),
        (lambda m: {**m, "sum/bias": m["sum/bias"].to("meta")}, "wrong-type"),
        (lambda m: None, "unknown-kind"),
        (lambda m: {**m, "sum/bias": m["sum/bias"][:2]}, "wrong-shape"),
        (lambda m: {**m, "sum/bias": m["sum/bias"] * math.nan}, "not-finite"),
        (lambda m: {**m, "sum/bias": m["sum/bias"] + 1e6}, "oversized"),
        (lambda m: {**m, "round": 7}, "stale"),
        (lambda m: {**m, "contract": "0" * 64}, "other-contract"),
        (lambda m: {**m, "client": 9}, "unknown-client"),
        (lambda m: {**_plain(m), "kind": "error", "reason": "bad label 7"}, "other-reason"),
    ],
)
def test_messages_off_the_list_are_rejected_and_counted(change, reason):
    plan = plan_of(privacy=TrustedServer("clients"), min_survivors=3)
    server, clients = world(plan)
    sent = server.open_round()
    answers = {i: c.answer(sent[i]) for i, c in clients.items()}
    assert not server.receive(change(answers[0]))
    assert server.rejected == {reason: 1}
    assert all(server.receive(answers[i]) for i in (1, 2, 3))
    assert not server.receive(answers[1]) and server.rejected["duplicate"] == 1
    record = server.close_round()
    assert record.survivors == 3 and not record.dropped
    assert torch.isfinite(vector(server.parameters)).all()
    assert not server.receive(answers[0]) and server.rejected["no-round"] == 1


HONEST = [{"privacy": privacy} for privacy in (*MODELS, ClientLevel(), ClientLevel(PerUpload()))]
HONEST += [{"privacy": PerUpload(), "local": LocalSteps(k, 0.3), "rule": FedAvg()} for k in (1, 3)]


@pytest.mark.parametrize("options", HONEST)
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_no_honest_message_is_oversized(options, noise):
    data = records(scale=1e4)
    plan = plan_of(noise=noise, rounds=3, **options)
    cut = [(data[0][:0], data[1][:0])] * (CLIENTS - 1) + [data]  # one client holds everything
    run = federate(plan, head(), loss_fn, cut)
    assert not run.server.rejected and not any(r.dropped for r in run.records)


def test_the_largest_honest_message_grows_with_the_rate_and_the_number_of_local_steps():
    def largest(*work):
        plan = plan_of(privacy=PerUpload(), local=LocalSteps(*work), rule=FedAvg())
        return plan.largest_message(18) / plan.stddev

    assert largest(3, 0.6) == pytest.approx(2 * largest(3, 0.3), rel=1e-9)
    with_noise_of_more_steps = largest(6, 0.3) / largest(3, 0.3)
    assert 1.2 < with_noise_of_more_steps <= 2


def test_a_hello_that_is_no_mapping_is_rejected():
    server, _ = world(plan_of())
    assert not server.enroll(None) and server.rejected == {"unknown-kind": 1}


def test_settings_are_no_plan():
    config = plan_of().config
    for begin in (Server, partial(federate, loss_fn=loss_fn, datasets=[])):
        with pytest.raises(ValueError, match="plan must be a FederatedPlan, got FederatedConfig"):
            begin(config, head())


@pytest.mark.parametrize("message", [None, ["kind", "round"], "round"])
def test_a_message_that_is_no_mapping_is_one_clear_error(message):
    client = world(plan_of())[1][0]
    assert client.answer(message) == {
        "kind": "error",
        "round": -1,
        "contract": client.local.contract,
        "client": 0,
        "reason": "client-failed",
    }
    assert "a message must be a dictionary, got" in str(client.last_error)
    assert client.failed and client.ledger.count == 0


def test_a_refusal_says_nothing_but_a_constant():
    plan = plan_of(privacy=TrustedServer("clients"), min_survivors=2)
    server, clients = world(plan)
    sent = server.open_round()[0]
    answer = clients[0].answer({**sent, "theta/bias": sent["theta/bias"] * math.nan})
    assert answer == {
        "kind": "error",
        "round": 0,
        "contract": server.contract,
        "client": 0,
        "reason": "client-failed",
    }
    assert (
        answer["reason"] in REASONS
        and clients[0].ledger.count == 0
        and "not finite" in str(clients[0].last_error)
    )
    assert server.receive(answer) and server.rejected == {"client-failed": 1}


def test_other_plans_and_models_are_found_before_a_round():
    plan = plan_of(privacy=TrustedServer("clients"))
    server, clients = world(plan)
    hello = clients[0].hello()
    assert not server.enroll(hello) and server.rejected == {"duplicate": 1}
    frozen = head()
    frozen.bias.requires_grad_(False)
    others = [
        LocalModel(plan_of(privacy=TrustedServer("clients"), max_grad_norm=0.6), head(), loss_fn),
        LocalModel(plan, torch.nn.Linear(5, 2).double(), loss_fn),
        LocalModel(plan, torch.nn.Linear(5, 3), loss_fn),
        LocalModel(plan, frozen, loss_fn),
    ]
    for local in others:
        assert not server.enroll({"kind": "hello", "contract": local.contract, "client": 1})
    assert server.rejected["other-contract"] == len(others)
    assert contract_of(plan.hash, head(1)) == server.contract  # trained values are sent anyway
    client = Client(0, plan, others[1], datasets()[0])
    assert client.answer(server.open_round()[0])["reason"] == "contract-differs"


def test_too_few_clients_is_one_clear_line():
    plan = plan_of(privacy=TrustedServer("clients"), min_survivors=4)
    with pytest.raises(RuntimeError, match="3 clients are enrolled and a round needs 4"):
        federate(
            plan, head(), loss_fn, [], clients=make_clients(plan, head(), loss_fn, datasets())[:3]
        )


def test_a_wrong_metric_is_not_used():
    plan = plan_of(
        privacy=TrustedServer("clients"),
        preconditioner=KFAC(sides="both", probe=FeatureNoise(5), probe_size=32),
    )
    server, clients = world(plan)
    sent = server.open_round()
    moved = {
        k: v * 1.01 for k, v in sent[0].items() if k.startswith("metric/") and v.is_floating_point()
    }
    answer = clients[0].answer({**sent[0], **moved})
    assert answer["reason"] in ("metric-differs", "client-failed") and clients[0].ledger.count == 0
    missing = {k: v for k, v in sent[1].items() if not k.startswith("metric/")}
    clients[1].local.digest = ""
    assert clients[1].answer(missing)["reason"] == "metric-missing"


@pytest.mark.parametrize("stage", ["sum", "shares"])
def test_the_sum_of_a_masked_round_with_a_dead_client_is_exact(stage):
    moved = []
    for privacy in (SecureAggregation(), TrustedServer("clients")):
        plan = plan_of(privacy=privacy, min_survivors=3, rounds=1, rule=FedGD(1.0))
        server, clients = world(plan)
        before = vector(server.parameters)
        record = run_round_without(server, clients, [2], stage)
        assert (record.survivors, record.dropped) == (3 if stage == "sum" else 4, False)
        moved.append(before - vector(server.parameters))
    # The noise on the grid is wider by 2⁻²⁰.
    assert float((moved[0] - moved[1]).abs().max()) <= 1e-6


def test_a_checkpoint_of_another_ledger_or_plan_is_refused(tmp_path):
    settings = {"privacy": TrustedServer("clients"), "rounds": 4}
    where = {"checkpoint": tmp_path / "checkpoint"}
    ledger = {"ledger_path": tmp_path / "ledger.jsonl"}
    plan = plan_of(**settings, rule=FedSOFIM())
    federate(plan, head(), loss_fn, datasets(), **where, **ledger)
    other = plan_of(**settings, rule=FedSOFIM(rho=0.1))
    for made, message in ((plan, "does not contain"), (other, "another plan or model")):
        with pytest.raises(CheckpointError, match=message):
            federate(made, head(), loss_fn, datasets(), resume=True, **where)
