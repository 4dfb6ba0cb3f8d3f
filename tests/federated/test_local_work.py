"""Work on clients beyond one gradient against plain loops: local steps, control variates, FedNew;
and secure aggregation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
from torch import nn

from dpkfc.federated import (
    ClientLevel,
    FedAvg,
    FedNew,
    FedNewStep,
    LocalSteps,
    PerUpload,
    Scaffold,
    ScaffoldSteps,
    SecureAggregation,
    TrustedServer,
    federate,
    make_clients,
)
from dpkfc.federated.client import LocalModel, Records
from dpkfc.federated.plan import FedGD, Participation
from dpkfc.federated.secure_aggregation import encode
from dpkfc.federated.simulation import run_round
from dpkfc.postprocess.pipeline import PostProcessBase
from tests.federated.test_equality import plain_clipped_sum
from tests.federated.worlds import CLIENTS, RECORDS, datasets, head, loss_fn, plan_of, vector, world


def gradient(model: nn.Module, data) -> torch.Tensor:
    found = torch.autograd.grad(loss_fn(model, data).mean(), list(model.parameters()))
    return torch.cat([x.flatten() for x in found])


def placed(model: nn.Module, values: torch.Tensor) -> None:
    with torch.no_grad():
        sizes = [p.numel() for p in model.parameters()]
        for p, piece in zip(model.parameters(), values.split(sizes), strict=True):
            p.copy_(piece.view(p.shape))


def at(values: torch.Tensor) -> nn.Module:
    placed(model := head(), values)
    return model


def test_federated_averaging_of_clipped_changes():
    plan = plan_of(
        0.0, privacy=ClientLevel(), local=LocalSteps(3, 0.2), rule=FedAvg(), max_grad_norm=0.02
    )
    run = federate(plan, head(), loss_fn, datasets())
    theta = vector(dict(head().named_parameters()))
    for _ in range(3):
        changes = []
        for data in datasets():
            own = theta.clone()
            for _ in range(3):
                own = own - 0.2 * gradient(at(own), data)
            change = theta - own
            changes.append(change * min(1.0, 0.02 / float(change.norm())))
        theta = theta - sum(changes) / CLIENTS
    assert float((theta - vector(run.server.parameters)).abs().max()) < 1e-7


@pytest.mark.parametrize("work", [LocalSteps(3, 0.2), ScaffoldSteps(5, 0.1)])
def test_local_steps_leave_the_weights_of_the_round_in_the_model(work):
    """What a client has walked to holds no noise, and a user may save the model."""
    rule = Scaffold() if isinstance(work, ScaffoldSteps) else FedAvg()
    plan = plan_of(privacy=ClientLevel(), local=work, rule=rule)
    server, clients = world(plan)
    client = next(iter(clients.values()))
    before = vector(dict(client.local.parameters)).clone()
    run_round(server, clients)
    assert torch.equal(vector(dict(client.local.parameters)), before)


def test_private_local_steps_of_single_examples():
    plan = plan_of(0.0, privacy=PerUpload(), local=LocalSteps(3, 0.2), rule=FedAvg(), rounds=2)
    run = federate(plan, head(), loss_fn, datasets())
    theta = vector(dict(head().named_parameters()))
    for _ in range(2):
        changes = []
        for data in datasets():
            own = theta.clone()
            for _ in range(3):
                own = own - 0.2 * plain_clipped_sum(at(own), data, 0.5) / (RECORDS // CLIENTS)
            changes.append(theta - own)
        theta = theta - sum(changes) / CLIENTS
    assert float((theta - vector(run.server.parameters)).abs().max()) < 1e-12
    assert run.server.ledger.count == 6 == plan.releases


class Listening(PostProcessBase):
    """A filter that changes nothing and notes the mean square of what it is given, and the variance
    that it is told.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[float, float | None]] = []

    def describe(self):
        return {"name": "listening"}

    def apply(self, released, state):
        self.heard.append(
            (float(vector(released.gradients).square().mean()), released.noise_variance)
        )
        return released, dict(state)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({"privacy": PerUpload()}, True),
        (
            {"privacy": ClientLevel(PerUpload()), "local": LocalSteps(3, 0.2), "rule": FedAvg()},
            True,
        ),
        ({"privacy": PerUpload(), "local": LocalSteps(3, 0.2), "rule": FedAvg()}, False),
    ],
)
def test_filters_are_told_the_variance_of_the_noise_where_it_is_known(options, known: bool):
    """Clients without records, so that what is released is noise."""
    filter_, empty = Listening(), [(x[:0], y[:0]) for x, y in datasets()]
    federate(plan_of(1.0, rounds=60, postprocess=(filter_,), **options), head(), loss_fn, empty)
    found, (known_variance,) = (
        sum(x for x, _ in filter_.heard) / 60,
        {variance for _, variance in filter_.heard},
    )
    assert (known_variance is not None) == known and (
        known_variance is None or 0.85 < found / known_variance < 1.15
    )


def test_scaffold_against_its_algorithm():
    work = ScaffoldSteps(3, 0.2)
    plan = plan_of(
        0.0, privacy=ClientLevel(), local=work, rule=Scaffold(local=work), max_grad_norm=10.0
    )
    run = federate(plan, head(), loss_fn, datasets())
    theta, c, own_c = (
        vector(dict(head().named_parameters())),
        torch.zeros(18).double(),
        [torch.zeros(18).double()] * CLIENTS,
    )
    for _ in range(3):
        changes, controls = [], []
        for i, data in enumerate(datasets()):
            own = theta.clone()
            for _ in range(3):
                own = own - 0.2 * (gradient(at(own), data) - own_c[i] + c)
            controls.append(own_c[i] - c + (theta - own) / (3 * 0.2))
            changes.append(theta - own)
        c = c + sum(new - old for new, old in zip(controls, own_c, strict=True)) / CLIENTS
        theta, own_c = theta - sum(changes) / CLIENTS, controls
    assert float((theta - vector(run.server.parameters)).abs().max()) < 1e-10


def quadratic_run(options, rounds: int = 60):
    """Eight clients whose losses |w − aᵢ|² / 2 have unlike optima: (distance of w to that of their
    sum, server's c, mean cᵢ).
    """
    generator = torch.Generator().manual_seed(0)
    targets = (
        2 * torch.randn(8, 3, generator=generator).double()
        + torch.tensor([3.0, -1.0, 2.0]).double()
    )
    data = [(torch.ones(4, 1).double(), target.expand(4, 3).clone()) for target in targets]
    model = nn.Linear(1, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    plan = plan_of(0.0, clients=8, expected_records=32, rounds=rounds, **options)

    def loss(m, b):
        return 0.5 * ((m(b[0]) - b[1]) ** 2).sum(-1)

    clients = make_clients(plan, model, loss, data)
    server = federate(plan, model, loss, [], clients=clients).server
    own = sum(client._control.get("weight", torch.zeros(3, 1).double()) for client in clients) / 8
    distance = float((model.weight.detach().flatten() - targets.mean(0)).norm())
    return distance, server._state["weight"].flatten(), own.flatten()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_the_servers_control_variate_is_the_mean_of_the_clients(rate: float):
    """Over all of them, whoever was drawn: a mean over the drawn ones alone would be 1 / rate as
    large.
    """
    work = ScaffoldSteps(5, 0.1)
    common = {
        "local": work,
        "rule": Scaffold(local=work),
        "max_grad_norm": 1e6,
        "client_rate": rate,
    }
    distance, control, own = quadratic_run({**common, "privacy": PerUpload(), "min_survivors": 0})
    assert float((control - own).norm()) < 1e-9 and distance < 1e-3
    # the rate stands for who was drawn in secret
    _, control, _ = quadratic_run({**common, "privacy": ClientLevel()})
    assert float(control.norm()) < 1e-3


@pytest.mark.slow
def test_scaffold_finds_the_optimum_where_changes_are_clipped():
    """Control variates of changes before they were clipped drift away from what the server is sent:
    the run then stands still.
    """
    work = ScaffoldSteps(5, 0.1)
    common = {
        "privacy": ClientLevel(),
        "local": work,
        "rule": Scaffold(local=work),
        "max_grad_norm": 0.5,
    }
    distance, control, own = quadratic_run(common, rounds=60)
    assert float((control - own).norm()) < 1e-9 and distance < 0.05


def test_the_control_variate_of_a_private_client_is_made_of_its_releases():
    work = ScaffoldSteps(2, 0.2)
    plan = plan_of(1.0, privacy=PerUpload(), local=work, rule=Scaffold(local=work))
    server, clients = world(plan)
    sent = server.open_round()
    message = clients[0].answer(sent[0])
    change = vector({n: message[f"sum/{n}"] for n in server.shapes})
    # c and c_i were zero: c_i⁺ is the mean of the two noisy gradients
    control = vector(clients[0]._control)
    assert float((control - change / (2 * 0.2)).abs().max()) < 1e-12
    assert clients[0].ledger.count == 2


@pytest.mark.parametrize("privacy", [ClientLevel(), ClientLevel(SecureAggregation()), PerUpload()])
def test_fednew_takes_a_newton_direction_off_the_parameters(privacy):
    work = FedNewStep(alpha=0.5, rho=0.2)
    noise = 0.0 if not privacy.masked else 1e-3
    plan = plan_of(noise, privacy=privacy, local=work, rule=FedNew(), max_grad_norm=0.8)
    run = federate(plan, head(), loss_fn, datasets())
    theta, y = vector(dict(head().named_parameters())), torch.zeros(18).double()
    dual, last = [torch.zeros(18).double()] * CLIENTS, [None] * CLIENTS
    for _ in range(3):
        directions = []
        for i, data in enumerate(datasets()):
            if last[i] is not None:
                dual[i] = dual[i] + 0.2 * (last[i] - y)
            model = at(theta)
            rows = [
                gradient(model, (data[0][k : k + 1], data[1][k : k + 1]))
                for k in range(len(data[0]))
            ]
            h = torch.stack(rows).T @ torch.stack(rows) / len(rows)
            step = torch.linalg.solve(
                h + 0.7 * torch.eye(18).double(), gradient(model, data) - dual[i] + 0.2 * y
            )
            last[i] = step * min(1.0, 0.8 / float(step.norm()))
            directions.append(last[i])
        y = sum(directions) / CLIENTS
        theta = theta - y
    assert float((theta - vector(run.server.parameters)).abs().max()) < (
        1e-6 if noise == 0 else 0.02
    )


def test_a_dropped_round_moves_no_dual_variable_of_fednew(tmp_path):
    """Clients answered it, and there is no y of it: they go on as if it had not been, and so does a
    server that is restored.
    """
    work = FedNewStep(alpha=0.5, rho=0.2)
    plan = plan_of(
        0.0,
        privacy=ClientLevel(),
        local=work,
        rule=FedNew(),
        max_grad_norm=0.8,
        rounds=6,
        min_survivors=4,
    )

    def lost(stage, number, client):
        return (stage, number, client) == ("client", 2, 3)

    whole, clients = world(plan)
    for _ in range(4):
        run_round(whole, clients)
    server, others = world(plan)
    dropped = [run_round(server, others, lost).dropped for _ in range(3)]
    server.save(tmp_path / "checkpoint")
    server.restore(tmp_path / "checkpoint")
    dropped += [run_round(server, others).dropped for _ in range(2)]
    assert dropped == [False, False, True, False, False]
    assert torch.equal(vector(server.parameters), vector(whole.parameters))
    for one, other in zip(clients.values(), others.values(), strict=True):
        assert torch.equal(vector(one._control), vector(other._control))
    assert float(sum(vector(client._control) for client in others.values()).norm()) < 1e-12


def test_whole_batches_and_single_records_are_moved_to_the_models_device(monkeypatch):
    """A device without numbers, and so without autocast, stands for one that is not here."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    plan = plan_of(privacy=ClientLevel(), local=FedNewStep(), rule=FedNew())
    local, held = LocalModel(plan, head().to("meta"), loss_fn), Records(datasets()[0])
    assert {g.device.type for g in local.mean_gradient(held).values()} == {"meta"}
    assert local.fisher(held).device.type == "meta"
    clients = make_clients(plan, head().to("meta"), loss_fn, datasets(), verify=False)
    state = {"w": torch.zeros(3)}
    clients[0].load_state_dict({"control": state, "last": state})
    assert clients[0]._control["w"].device.type == clients[0]._last["w"].device.type == "meta"


def test_a_number_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="not on the grid"):
        encode({"w": torch.tensor([math.pi]).double()}, 2.0**-10)


def test_secret_cohorts_go_on_when_nobody_was_drawn():
    plan = plan_of(1.0, privacy=ClientLevel(), client_rate=0.05, rounds=4, test_mode_seed=1)
    run = federate(plan, head(), loss_fn, datasets())
    assert len(run.records) == 4 and not any(r.dropped for r in run.records)
    assert all(r.cohort is None and r.survivors is None for r in run.records)


@dataclasses.dataclass(frozen=True)
class Noting(FedGD):
    """Notes what the server says of participation."""

    noted: list[Participation] = dataclasses.field(default_factory=list)

    def step(self, direction, state, participation):
        self.noted.append(participation)
        return super().step(direction, state, participation)

    def describe(self):
        return {"name": "noting"}


@pytest.mark.parametrize("client_rate", [1.0, 0.5])
def test_a_rule_never_learns_how_many_secretly_sampled_clients_took_part(
    client_rate: float,
) -> None:
    rule = Noting()
    plan = plan_of(
        privacy=ClientLevel(TrustedServer()), client_rate=client_rate, rule=rule, rounds=6
    )
    federate(plan, head(), loss_fn, datasets())
    assert len(rule.noted) == 6
    divisor = plan.config.divisor / plan.config.clients
    assert set(rule.noted) == {
        Participation(divisor_fraction=divisor, survivor_fraction=client_rate)
    }
