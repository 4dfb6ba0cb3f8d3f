"""Records on which a client's work fails: the round is answered, one record moves the answer by C,
and nobody is told.
"""

import logging
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dpkfc import AdaDPS, WhiteNoise
from dpkfc.federated import (
    Client,
    ClientLevel,
    FedAvg,
    LocalModel,
    LocalSteps,
    PerUpload,
    SecureAggregation,
    Server,
    TrustedServer,
    federate,
)
from dpkfc.federated.messages import add_prefix, select_prefix
from dpkfc.federated.simulation import make_clients
from dpkfc.privacy.budget import Budget
from dpkfc.report.federated_card import build_federated_card
from tests.federated.outside_checks import check_record_bound, round_message
from tests.federated.worlds import (
    CLASSES,
    CLIENTS,
    FEATURES,
    datasets,
    head,
    loss_fn,
    plan_of,
    records,
    vector,
    world,
)

SINGLE = [
    {"privacy": TrustedServer("clients")},
    {"privacy": TrustedServer("clients"), "max_physical_batch_size": 3},
    {"privacy": PerUpload(), "local": LocalSteps(2, 0.3), "rule": FedAvg()},
]
WHOLE = [
    {"privacy": ClientLevel(TrustedServer("clients"))},
    {"privacy": ClientLevel(PerUpload()), "local": LocalSteps(2, 0.3), "rule": FedAvg()},
]


class Rows:
    """Six records that can be read, and one that cannot where it is told."""

    def __init__(self, broken=None):
        self.pairs, self.broken = list(zip(*records(6, seed=4), strict=True)), broken
        if broken is not None:
            self.pairs.insert(broken, self.pairs[0])

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"record {index} is damaged: bad label 7")
        return self.pairs[index]


def make_labelled(broken=None):
    """Tensors, with a label that the model has no class for."""
    x, y = records(6, seed=4)
    if broken is None:
        return x, y
    return torch.cat([x[:broken], x[:1], x[broken:]]), torch.cat(
        [y[:broken], torch.tensor([7]), y[broken:]]
    )


def wide(broken=None):
    """One record of another width: the default collate function cannot put it beside the others."""
    rows = list(zip(*records(6, seed=4), strict=True))
    return (
        rows
        if broken is None
        else [*rows[:broken], (torch.zeros(9).double(), rows[0][1]), *rows[broken:]]
    )


def draw_nothing():
    x, y = records(6)
    return x[:0], y[:0]


def answer(plan, data, loss=loss_fn, **options):
    client = Client(0, plan, LocalModel(plan, head(), loss), data, **options)
    found = client.answer(round_message(client.local.contract, 0, dict(head(3).named_parameters())))
    assert found["kind"] == "sum" and client.ledger.count == plan.per_round
    return client, found


@pytest.mark.quick("*-Rows-3", "*-labelled-0", "*-wide-6")
@pytest.mark.parametrize("broken", [0, 3, 6])
@pytest.mark.parametrize("made", [Rows, make_labelled, wide], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", SINGLE, ids=lambda o: o["privacy"].name + str(len(o)))
def test_a_record_that_fails_adds_nothing_and_takes_nothing_from_the_others(
    options, made, broken, caplog
):
    plan = plan_of(noise=0.1, **options)
    client, found = answer(plan, made(broken))
    sound, other = answer(plan, made())
    assert client.last_error is not None and not client.failed and sound.last_error is None
    moved = vector(select_prefix(found, "sum")) - vector(select_prefix(other, "sum"))
    assert float(moved.abs().max()) < 1e-12 and check_record_bound(plan, found, other).passed
    assert any(
        r.levelno == logging.ERROR and r.name == "dpkfc.federated.client" for r in caplog.records
    )


@pytest.mark.parametrize("made", [Rows, make_labelled], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "options", WHOLE, ids=lambda o: o["privacy"].name + type(o.get("local")).__name__
)
def test_a_contribution_clipped_as_one_that_fails_is_that_of_a_client_without_records(
    options, made
):
    plan = plan_of(noise=0.1, **options)
    client, found = answer(plan, made(3))
    _, other = answer(plan, draw_nothing())
    assert client.last_error is not None and client.failed
    assert torch.equal(vector(select_prefix(found, "sum")), vector(select_prefix(other, "sum")))


def test_a_client_of_which_nothing_works_answers_with_its_noise():
    def fail(model, batch):
        raise RuntimeError(f"bad label {int(batch[1][0])} for record 812")

    plan = plan_of(privacy=TrustedServer("clients"), noise=0.1)
    _, noise = answer(plan, draw_nothing())
    client, found = answer(plan, datasets()[0], fail)
    assert client.failed and torch.equal(
        vector(select_prefix(found, "sum")), vector(select_prefix(noise, "sum"))
    )
    assert "812" not in str(found)


def test_a_loss_that_mixes_examples_is_refused_on_public_rows_before_a_client_answers():
    def mix(model, batch):
        losses = loss_fn(model, batch)
        return losses - 0.9 * losses.mean()

    def collate(items):
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    plan = plan_of(privacy=TrustedServer("clients"), noise=0.1)
    local = LocalModel(plan, head(), mix)
    for collate_fn in (None, collate):
        with pytest.raises(ValueError, match="mixes examples"):
            Client(0, plan, local, records(20), collate_fn=collate_fn)


def test_a_loss_that_is_refused_charges_no_budget(tmp_path):
    def mix(model, batch):
        losses = loss_fn(model, batch)
        return losses - 0.9 * losses.mean()

    plan = plan_of(privacy=TrustedServer("server"), noise=2.0, test_mode_seed=None)
    budget = Budget(tmp_path / "ward.toml", epsilon=1e6, delta=1e-2)
    with pytest.raises(ValueError, match="mixes examples"):
        federate(plan, head(), mix, datasets(), budget=budget)
    assert budget.charges == ()
    federate(plan, head(), loss_fn, datasets(), budget=budget)
    assert len(budget.charges) == 1


@pytest.mark.parametrize("reason", ["foreign file", "no checkpoint", "old ledger", "few clients"])
def test_a_run_that_is_refused_before_its_first_round_charges_no_budget(tmp_path, reason):
    plan = plan_of(noise=2.0, test_mode_seed=None)
    budget = Budget(tmp_path / "ward.toml", epsilon=1e6, delta=1e-2)
    folder, ledger = tmp_path / "checkpoint", tmp_path / "ledger.jsonl"
    options = {"ledger_path": ledger, "budget": budget, "checkpoint": folder}
    if reason == "foreign file":
        folder.mkdir()
        (folder / "notes.txt").write_text("ours")
    elif reason == "no checkpoint":
        options["resume"] = True
    elif reason == "old ledger":
        federate(plan, head(), loss_fn, datasets(), ledger_path=ledger)
    else:
        options["clients"] = make_clients(plan, head(), loss_fn, datasets())[:1]
    with pytest.raises((RuntimeError, ValueError)):
        federate(plan, head(), loss_fn, datasets(), **options)
    assert budget.charges == ()


def test_a_finished_run_that_is_restored_still_knows_its_charge(tmp_path):
    plan = plan_of(noise=2.0, test_mode_seed=None)
    budget = Budget(tmp_path / "ward.toml", epsilon=1e6, delta=1e-2)
    folder, ledger = tmp_path / "checkpoint", tmp_path / "ledger.jsonl"
    common = {"ledger_path": ledger, "budget": budget}
    run = federate(plan, head(), loss_fn, datasets(), checkpoint=folder, **common)
    server = Server(plan, head(), **common)
    server.restore(folder)
    server.close()
    assert len(budget.charges) == 1
    assert server.ledger.receipt == run.server.ledger.receipt is not None


def test_a_record_that_stands_twice_is_refused_where_one_example_is_protected():
    x, y = records(20)
    rows = TensorDataset(x, y)
    halves = [Subset(rows, range(12)), Subset(rows, range(8, 20))]
    plan = plan_of(privacy=TrustedServer(), clients=2)
    for data, why in (
        ([Subset(rows, [1, 1, 2]), rows], "some records .*: leave repeats out"),
        (halves, "some records .*: give each record to one client"),
        ([(x, y), (x, y)], "some records .*: give each record to one client"),
        ([(x[:10], y[:10]), (x[10:], y[10:])], None),
    ):
        with pytest.raises(ValueError, match=why) if why else nullcontext():
            make_clients(plan, head(), loss_fn, data)
    one_client = plan_of(privacy=ClientLevel(TrustedServer()), clients=2)
    make_clients(one_client, head(), loss_fn, [Subset(rows, [1, 1, 2]), rows])


def test_one_record_decides_nothing_that_is_public():
    plan = plan_of(privacy=SecureAggregation(), min_survivors=3, rounds=2, expected_records=25)
    cards = []
    for label in (1, 7):
        data = datasets()
        data[2] = (
            torch.cat([data[2][0], data[2][0][:1]]),
            torch.cat([data[2][1], torch.tensor([label])]),
        )
        run = federate(plan, head(), loss_fn, data)
        card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
        cards.append(
            (card["rounds"], [(r.cohort, r.survivors, r.dropped, r.rejected) for r in run.records])
        )
        assert not run.server.rejected
    assert cards[0] == cards[1]


class Remembering(nn.Module):
    """Turns the sign of its outputs from the first record that holds a rare value."""

    def __init__(self, place):
        super().__init__()
        self.linear, self.place = head(), place
        self.sign = 1.0
        if place == "buffer":
            del self.sign
            self.register_buffer("sign", torch.ones(()))

    def forward(self, x):
        if bool((x == 7).any()):
            if self.place == "buffer":
                self.sign.fill_(-1.0)
            else:
                self.sign = -1.0
        return self.sign * self.linear(x)


@pytest.mark.parametrize("options", WHOLE, ids=lambda o: o["privacy"].name + str(o.get("rule")))
@pytest.mark.parametrize("place", ["attribute", "buffer"])
def test_no_client_of_a_process_sees_what_a_model_keeps_of_another(options, place):
    plan = plan_of(noise=0.1, **options)
    answers = []
    for value in (0.0, 7.0):
        data = datasets()
        data[0][0][0, 0] = value
        server, clients = world(plan, data, Remembering(place))
        sent = server.open_round()
        clients[0].answer(sent[0])
        answers.append(vector(select_prefix(clients[1].answer(sent[1]), "sum")))
    assert torch.equal(*answers)


@pytest.mark.parametrize("options", WHOLE, ids=lambda o: o["privacy"].name + str(o.get("rule")))
def test_clients_with_16_bit_weights_answer_alike_with_and_without_records(options):
    plan = plan_of(noise=0.0, **options)
    x, y = records(6, scale=30.0)
    local = LocalModel(plan, head().bfloat16(), loss_fn)
    weights = dict(local.parameters)
    forms = []
    for data in ((x.bfloat16(), y), (x[:0].bfloat16(), y[:0])):
        client = Client(0, plan, local, data)
        found = client.answer(round_message(local.contract, 0, weights))
        sums = select_prefix(found, "sum")
        assert client.last_error is None
        assert float(vector(sums).norm()) <= plan.config.max_grad_norm * (1 + 1e-6)
        forms.append({name: value.dtype for name, value in sums.items()})
    assert forms[0] == forms[1]


@pytest.mark.parametrize("size", [0, 6])
def test_a_metric_that_is_not_finite_does_not_show_whether_a_client_has_records(size):
    probe = WhiteNoise((FEATURES,))
    plan = plan_of(privacy=PerUpload(), preconditioner=AdaDPS(probe=probe), rounds=1)
    model = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
    server, clients = world(plan, [records(size), *[draw_nothing()] * (CLIENTS - 1)], model)
    message = server.open_round()[0]
    state = select_prefix(message, "metric")
    state = {name: x * math.nan if x.is_floating_point() else x for name, x in state.items()}
    digest = clients[0].local.coordinates.restore(state).digest
    message |= add_prefix("metric", state) | {"metric_digest": digest}
    assert clients[0].answer(message)["kind"] == "sum"


@pytest.mark.parametrize("options", [SINGLE[-1], WHOLE[-1]], ids=lambda o: o["privacy"].name)
@pytest.mark.parametrize("wrong", [-1, 0.5])
def test_a_malformed_round_costs_nothing_and_leaves_no_trace(options, wrong):
    plan = plan_of(**options)
    data = tuple(x.float() if x.is_floating_point() else x for x in records(6))
    local = LocalModel(plan, head().float(), loss_fn)
    client = Client(0, plan, local, data)
    message = round_message(local.contract, 0, dict(local.parameters))
    message["round"] = wrong
    assert client.answer(message)["kind"] == "error"
    assert not client.ledger.count
    assert len(str(client.last_error)) <= 160
