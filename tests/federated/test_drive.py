"""Clients that live in folders and servers that live on carriers: the same rounds as in one
process, whoever dies.
"""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from dpkfc.federated import federate
from dpkfc.federated.flower import _log_round
from dpkfc.federated.messages import make_failure
from dpkfc.federated.node import Node
from dpkfc.federated.node import _local_model as local_models
from dpkfc.federated.remote_rounds import TooFewClients, serve
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.server import Server
from dpkfc.privacy.ledger import BudgetExhausted, verify
from tests.federated.engines import APP, CASES, Wires
from tests.federated.worlds import CLIENTS, datasets, head, loss_fn, vector

QUICK = {"wait": 0.2, "timeout": 1.0}


def settings_of(tmp_path, **more):
    return APP.settings({"folder": str(tmp_path / "server"), **QUICK, **more})


@pytest.mark.quick("masked", "shares", "*kfac*")
@pytest.mark.parametrize("case", CASES)
def test_every_method_runs_on_clients_that_are_built_for_each_message(tmp_path, case):
    chosen = settings_of(tmp_path, case=case, noise=0.0 if case != "masked" else 1.0)
    wires = Wires(tmp_path, chosen)
    inner = wires.ask

    def ask_new_process(requests, timeout):
        local_models.cache_clear()  # as in a process that was just started
        return inner(requests, timeout)

    wires.ask = ask_new_process
    run = serve(APP, chosen, wires)
    assert [r.survivors for r in run.records] == [CLIENTS] * 4 and not run.server.rejected
    assert (tmp_path / "server" / "finished.txt").read_text() == "4 rounds"
    assert len(run.history) == 4
    if case != "masked":  # without noise one process has the same trajectory
        here = federate(APP.plan(chosen), head(), loss_fn, datasets())
        found = vector(run.server.parameters)
        assert torch.allclose(found, vector(here.server.parameters), atol=1e-12)
    if case == "kfac":  # the metric is sent once and kept by the client
        rounds = [m for _, m in wires.sent if m["kind"] == "round"]
        carried = [any(name.startswith("metric/") for name in m) for m in rounds]
        assert carried == [True] * CLIENTS + [False] * (3 * CLIENTS)
    for number in range(CLIENTS):
        (ledger,) = (tmp_path / "clients" / f"client-{number}").glob("*/ledger.jsonl")
        assert len(verify(ledger).releases) == run.server.plan.releases


def test_too_few_keys_end_the_run_before_the_round_is_charged(tmp_path):
    chosen = settings_of(tmp_path, case="masked", rounds=3)
    wires = Wires(tmp_path, chosen)
    with pytest.raises(
        TooFewClients, match=r"2 of 4 clients sent keys and round 1 needs 3; nothing was charged"
    ):
        serve(APP, chosen, wires, on_round=lambda record, run: wires.silent.update({100, 101}))
    assert len(verify(tmp_path / "server" / "ledger.jsonl").releases) == 1
    run = serve(APP, chosen, Wires(tmp_path, chosen))
    assert [r.round for r in run.records] == [0, 1, 2] and not any(r.dropped for r in run.records)


def test_a_server_that_dies_goes_on_after_its_last_round(tmp_path):
    chosen = settings_of(tmp_path, case="masked", rounds=5)
    wires = Wires(tmp_path, chosen)
    inner = wires.ask

    def ask_and_die(requests, timeout):
        answers = inner(requests, timeout)
        if any(m["kind"] == "round" and m["round"] == 2 for m in requests.values()):
            raise SystemExit  # after the clients have answered, before the server has heard
        return answers

    wires.ask = ask_and_die
    with pytest.raises(SystemExit):
        serve(APP, chosen, wires)
    assert len(verify(tmp_path / "server" / "ledger.jsonl").releases) == 3
    run = serve(APP, chosen, Wires(tmp_path, chosen))
    assert [r.round for r in run.records] == [0, 1, 3, 4]
    assert [h[0] for h in run.history] == [1, 2, 4, 5]
    assert run.server.epsilon == run.server.plan.curve.epsilon(5) and not run.server.rejected
    with pytest.raises(BudgetExhausted, match=r"all rounds .* are spent .* nothing was sent"):
        serve(APP, chosen, Wires(tmp_path, chosen))


def test_a_used_ledger_whose_checkpoint_is_lost_is_refused(tmp_path):
    chosen = settings_of(tmp_path, rounds=5)

    def stop(record, run):
        if record.round == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        serve(APP, chosen, Wires(tmp_path, chosen), on_round=stop)
    shutil.rmtree(tmp_path / "server" / "checkpoint")
    wires = Wires(tmp_path, chosen)
    with pytest.raises(
        ValueError, match="2 releases of an earlier run; resume from its checkpoint"
    ):
        serve(APP, chosen, wires)
    assert not wires.sent and not (tmp_path / "server" / "checkpoint").exists()
    assert len(verify(tmp_path / "server" / "ledger.jsonl").releases) == 2


def test_weights_that_no_engine_carries_are_refused_before_a_charge(tmp_path):
    app, chosen = (
        dataclasses.replace(APP, model=lambda settings: head().bfloat16()),
        settings_of(tmp_path),
    )
    with pytest.raises(
        ValueError, match=r"'weight' is torch.bfloat16; engines carry .* Nothing was charged"
    ):
        serve(app, chosen, Wires(tmp_path, chosen))
    assert not (tmp_path / "server" / "ledger.jsonl").exists()


def test_too_few_clients_are_one_line_and_cost_nothing(tmp_path):
    chosen = settings_of(tmp_path)
    with pytest.raises(
        TooFewClients, match=r"2 of 4 clients are there .* needs 3.* nothing was charged"
    ):
        serve(APP, chosen, Wires(tmp_path, chosen, {100: 0, 101: 1}))
    assert verify(tmp_path / "server" / "ledger.jsonl").releases == []


def test_clients_with_another_plan_model_or_number_are_refused(tmp_path):
    chosen = settings_of(tmp_path)
    wires = Wires(tmp_path, chosen, {100: 0, 101: 1, 102: 1, 103: 2})
    other = APP.settings(chosen, {"noise": 2.0})
    node = wires.node
    wires.node = lambda n: Node(APP, other, 2, tmp_path / "other") if n == 103 else node(n)
    with pytest.raises(TooFewClients, match="refused") as caught:
        serve(APP, chosen, wires)
    assert "1 whose number another node has" in str(caught.value)
    assert "1 with another plan, model or frozen weights" in str(caught.value)


def test_a_client_that_comes_back_as_another_node_takes_its_number_again(tmp_path):
    chosen = settings_of(tmp_path, case="masked")
    wires = Wires(tmp_path, chosen)

    def restart(record, run):
        if record.round == 0:
            wires.clients.pop(100)
            wires.clients[200] = 0

    run = serve(APP, chosen, wires, on_round=restart)
    assert [r.survivors for r in run.records] == [4, 4, 4, 4] and not run.server.rejected
    assert {n for n, m in wires.sent if m["kind"] == "round" and m["round"] > 0} == {
        101,
        102,
        103,
        200,
    }


def test_nobody_answers_for_another_client(tmp_path):
    chosen = settings_of(tmp_path)
    wires = Wires(tmp_path, chosen)
    inner = wires.ask

    def ask_and_lie(requests, timeout):
        answers = dict(inner(requests, timeout))
        if answers[100]["kind"] == "sum":
            answers[100] = {**answers[100], "client": 1}
        return list(answers.items()) + [(999, answers[101]), (102, None)]

    wires.ask = ask_and_lie
    run = serve(APP, chosen, wires)
    assert run.server.rejected == {"other-client": 4, "unknown-client": 4, "unknown-kind": 4}
    assert [r.survivors for r in run.records] == [3] * 4 and not any(r.dropped for r in run.records)


def test_a_failing_client_says_a_constant_and_keeps_its_reason(tmp_path):
    chosen = settings_of(tmp_path, case="masked")
    node = Node(APP, chosen, 0, tmp_path)
    hello = node.answer({"kind": "hello"})
    assert hello["kind"] == "hello"
    assert torch.equal(hello["key"], node.answer({"kind": "hello"})["key"])
    own = tmp_path / "client-0"
    (key,) = own.glob("*/channel.key")
    key.write_bytes(b"abc")
    answer = node.answer({"kind": "round", "round": 3})
    assert answer == make_failure(0, {"round": 3}, answer["contract"])
    assert answer["reason"] == "client-failed"
    assert "channel.key has 3 bytes" in (own / "last_error.txt").read_text("utf-8")
    kept = [own, key, own / "last_error.txt", *(path for path in own.rglob("*") if path.is_dir())]
    assert len(kept) > 3 and all(path.stat().st_mode & 0o077 == 0 for path in kept)


def test_a_round_of_secretly_sampled_clients_logs_no_number_of_survivors(caplog):
    run = SimpleNamespace(history=[], server=SimpleNamespace(epsilon=1.0))
    record = RoundRecord(round=0, cohort=None, survivors=None, dropped=False)
    with caplog.at_level("INFO", "flwr"):
        _log_round(record, run)
        run.history.append((1, 1.0, 0.75))
        _log_round(record, run)
    plain = "round 1: released, ε = 1.0000"
    assert caplog.messages == [plain, f"{plain}, evaluation 0.75"]


def test_a_survivor_set_is_answered_once_by_any_process(tmp_path):
    chosen = settings_of(tmp_path, case="masked")
    wires = Wires(tmp_path, chosen)
    server, nodes = Server(APP.plan(chosen), head()), range(100, 104)
    for node in nodes:
        assert server.enroll(wires.node(node).answer({"kind": "hello"}))
    for number, message in server.request_keys().items():
        assert server.receive(wires.node(100 + number).answer(message))
    sent = server.open_round()
    ask = {
        "kind": "unmask",
        "round": 0,
        "contract": server.contract,
        "survivors": torch.tensor([0, 1, 2]),
    }
    assert wires.node(100).answer(ask)["reason"] == "client-failed"  # it has sent no sum yet
    assert wires.node(100).answer(sent[0])["kind"] == "sum"
    one = wires.node(100).answer(ask)
    assert one["kind"] == "shares"
    other = wires.node(100).answer({**ask, "survivors": torch.tensor([0, 1, 3])})
    assert (other["kind"], other["reason"]) == ("error", "repeated-round")
    again = wires.node(100).answer({**ask, "survivors": torch.tensor([2, 1, 0])})
    assert torch.equal(again["shares"], one["shares"])
    (state,) = (tmp_path / "clients" / "client-0").glob("*/state")
    # its shares are for nobody else
    assert state.stat().st_mode & 0o077 == 0 or state.parent.stat().st_mode & 0o077 == 0
    # the secrets of the round are forgotten
    assert '"keys": null' in (state / "manifest.json").read_text("utf-8")


def test_settings_are_checked_by_name_and_kind(tmp_path):
    with pytest.raises(ValueError, match=r"unknown setting 'epsilom'"):
        APP.settings({"epsilom": 1.0})
    with pytest.raises(ValueError, match=r"'rounds' is of type int"):
        APP.settings({"rounds": 2.0})
    assert APP.settings({"noise": 2}, {"noise": 3})["noise"] == 3.0
    with pytest.raises(ValueError, match="needs folder="):
        serve(APP, APP.settings(), Wires(tmp_path, APP.settings()))
