"""A federated round against the central mechanism, against plain autograd, and rules against dense
algebra; all in float64.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpkfc import KFAC, FeatureNoise, PrivacyConfig, Session
from dpkfc.data.sampling import Poisson
from dpkfc.federated import (
    ClientLevel,
    FedAvgM,
    FedGD,
    FedSOFIM,
    PerUpload,
    SecureAggregation,
    TrustedServer,
    federate,
)
from dpkfc.federated.local_model import ClientRecords, LocalModel
from dpkfc.federated.party import PartyMechanism, stream_seed
from dpkfc.federated.simulation import run_round
from dpkfc.postprocess import EMA, AdamBC, LowPass
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, release
from dpkfc.privacy.rng import NoiseStream, SamplingStream
from tests.federated.worlds import (
    CLIENTS,
    FEATURES,
    RECORDS,
    check_end,
    datasets,
    head,
    loss_fn,
    plan_of,
    records,
    vector,
    world,
)

PROBE = FeatureNoise(FEATURES)


def plain_clipped_sum(model, data, max_grad_norm):
    """A loop of torch.autograd over single examples."""
    total = None
    for i in range(len(data[0])):
        loss = loss_fn(model, (data[0][i : i + 1], data[1][i : i + 1])).sum()
        g = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])
        g = g * min(1.0, max_grad_norm / float(g.norm()))
        total = g if total is None else total + g
    return total


def shared_noise(plan, number):
    """What all clients of a test-mode plan add to a round."""
    total = 0
    for client in range(plan.config.clients):
        stream = NoiseStream.repeatable(stream_seed(plan, client + 1))
        zeros = {n: torch.zeros_like(p) for n, p in head().named_parameters()}
        mechanism = PartyMechanism(plan, plan.client_stddev)
        ledger = Ledger.open(None, plan.hash)
        total = total + vector(
            release(
                ClippedSum(zeros, plan.config.max_grad_norm), mechanism, stream, ledger, number
            ).gradients
        )
    return total


@pytest.mark.parametrize("privacy", [TrustedServer("clients"), PerUpload(), SecureAggregation()])
def test_a_round_is_the_central_mechanism_on_the_pooled_data(privacy):
    plan = plan_of(privacy=privacy, rule=FedGD(1.0))
    server, clients = world(plan)
    before = vector(server.parameters)
    record = run_round(server, clients)
    assert (record.survivors, record.dropped) == (CLIENTS, False)
    moved = before - vector(server.parameters)
    central = (plain_clipped_sum(head(), records(), 0.5) + shared_noise(plan, 0)) / RECORDS
    slack = 1e-12 if not privacy.masked else CLIENTS * plan.grid(server.numbers) / RECORDS
    assert float((moved - central).abs().max()) <= slack
    assert float(moved.norm()) > 1e-3


@pytest.mark.parametrize("preconditioned", [False, True])
def test_a_trusted_servers_run_is_a_session_to_the_bit_where_one_client_holds_all(
    preconditioned,
):
    made = (
        KFAC(sides="both", probe=PROBE, probe_size=64, every=2, chunk=4) if preconditioned else None
    )
    plan = plan_of(
        clients=1, privacy=TrustedServer(), rule=FedGD(0.25), preconditioner=made, rounds=3
    )
    run = federate(plan, head(), loss_fn, [records()])
    config = PrivacyConfig(
        expected_batch_size=RECORDS,
        steps=3,
        max_grad_norm=0.5,
        preconditioner=made,
        test_mode_seed=7,
    )
    model = head()
    central = config.with_noise(1.0, 1e-3, RECORDS)
    with Session(
        central, model, torch.optim.SGD(model.parameters(), lr=0.25), records()
    ) as session:
        session._pipeline.noise = NoiseStream.repeatable(stream_seed(plan, 0))
        for batch in session.batches():
            session.step(batch, loss_fn)
    assert torch.equal(vector(dict(model.named_parameters())), vector(run.server.parameters))


@pytest.mark.parametrize("decay", [0.5, 0.0])
@pytest.mark.parametrize("privacy", [TrustedServer(), SecureAggregation()])
def test_every_client_whitens_in_the_servers_coordinates(decay, privacy):
    made = KFAC(sides="both", probe=PROBE, probe_size=64, every=2, decay=decay)
    noise = 1e-3 if privacy.masked else 0.0
    rule = FedGD(1.0)
    plan = plan_of(noise, privacy=privacy, preconditioner=made, rule=rule)
    server, clients = world(plan)
    for _ in range(3):
        before = vector(server.parameters)
        model = copy.deepcopy(server.model)
        record = run_round(server, clients)
        assert record.survivors == CLIENTS and not record.rejected
        pooled = clients[0].local
        pooled.load(dict(model.named_parameters()))
        sums = pooled.clipped_sum(ClientRecords(records()), torch.arange(RECORDS).numpy())
        error = before - vector(server.parameters) - vector(sums) / RECORDS
        assert float(error.abs().max()) < (1e-3 if privacy.masked else 1e-12)
    assert server.preconditioner is not None and bool(server.preconditioner.running) == (decay > 0)
    # Clients are not sent the past.
    assert replace(server.preconditioner, running=()).digest == clients[0].local.digest


def test_a_client_level_contribution_is_the_mean_gradient_clipped_once():
    plan = plan_of(0.0, privacy=ClientLevel(), rule=FedGD(1.0), max_grad_norm=0.05)
    server, clients = world(plan)
    before, expected = vector(server.parameters), 0
    for x, y in datasets():
        g = torch.autograd.grad(loss_fn(model := head(), (x, y)).mean(), list(model.parameters()))
        flat = torch.cat([part.flatten() for part in g])
        expected = expected + flat * min(1.0, 0.05 / float(flat.norm()))
    run_round(server, clients)
    assert float((before - vector(server.parameters) - expected / CLIENTS).abs().max()) < 1e-9


@pytest.mark.parametrize("direction", ["gradient", "momentum"])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_sofim_is_the_dense_solve(direction, bias_correction):
    rule = FedSOFIM(
        0.7, rho=0.3, beta=0.8, direction=direction, bias_correction=bias_correction, warmup=1
    )
    plan = plan_of(0.0, privacy=TrustedServer(), rule=rule, rounds=4)
    server, clients = world(plan)
    momentum, t = torch.zeros(18, dtype=torch.float64), 0
    for _ in range(4):
        before, g = (
            vector(server.parameters),
            plain_clipped_sum(copy.deepcopy(server.model), records(), 0.5) / RECORDS,
        )
        run_round(server, clients)
        t += 1
        momentum = 0.8 * momentum + 0.2 * g
        m = momentum / (1 - 0.8**t) if bias_correction else momentum
        matrix = 0.3 * torch.eye(18, dtype=torch.float64) + torch.outer(m, m)
        step = torch.linalg.solve(matrix, g if direction == "gradient" else m) * (t > 1)
        assert float((before - vector(server.parameters) - 0.7 * step).abs().max()) < 1e-12


def test_server_momentum_is_that_of_torch():
    plan = plan_of(0.0, privacy=TrustedServer(), rule=FedAvgM(0.2, momentum=0.9))
    run = federate(plan, head(), loss_fn, datasets())
    theta = torch.nn.Parameter(vector(dict(head().named_parameters())))
    optimizer = torch.optim.SGD([theta], lr=0.2, momentum=0.9)
    for _ in range(3):
        model = set_weights(head(), theta.detach())
        theta.grad = plain_clipped_sum(model, records(), 0.5) / RECORDS
        optimizer.step()
    check_end(run, theta)


@pytest.mark.parametrize(
    "options",
    [
        {"privacy": TrustedServer(), "noise": "rounded"},
        {"privacy": TrustedServer("clients"), "noise": "rounded", "postprocess": EMA(0.5)},
        {"privacy": PerUpload(), "example_rate": 0.5, "postprocess": (LowPass(), AdamBC())},
        {"privacy": TrustedServer(), "adjacency": "replace_one", "max_physical_batch_size": 3},
    ],
)
def test_other_settings_run_to_their_end(options):
    plan = replace(plan_of().config, **options).with_noise(1.0, 1e-3)
    run = federate(plan, head(), loss_fn, datasets())
    assert run.server.ledger.count == 3 and torch.isfinite(vector(run.server.parameters)).all()


def test_sampled_examples_are_those_of_a_poisson_sampler():
    plan = plan_of(0.0, privacy=TrustedServer(), example_rate=0.5, rule=FedGD(1.0), rounds=3)
    run = federate(plan, head(), loss_fn, datasets())
    theta = vector(dict(head().named_parameters()))
    for number in range(3):
        model, total = set_weights(head(), theta), torch.zeros(18).double()
        for client, (x, y) in enumerate(datasets()):
            stream = SamplingStream.repeatable(stream_seed(plan, client + 1))
            drawn = Poisson(0.5, len(x)).indices(number, stream.generator(number))
            if len(drawn):
                total += plain_clipped_sum(model, (x[drawn], y[drawn]), 0.5)
        theta = theta - total / (RECORDS // 2)
    assert plan.config.divisor == RECORDS // 2
    check_end(run, theta)


def test_all_records_at_once_are_those_looked_up_one_by_one_and_stay_the_clients_own():
    plan, data = plan_of(privacy=TrustedServer("clients")), records()

    def spoil(model, batch):  # a loss function may write into its batch
        return loss_fn(model, (batch[0].mul_(2.0), batch[1]))

    own = tuple(x.clone() for x in data)
    local, held = LocalModel(plan, head(), spoil), ClientRecords(own)
    quick = [local.clipped_sum(held, held.all) for _ in range(2)]
    looked_up = local.clipped_sum(held, held.all.copy())
    assert all(torch.equal(sums[name], looked_up[name]) for sums in quick for name in looked_up)
    assert torch.equal(own[0], data[0])


@pytest.mark.parametrize("bound", [None, 4])
def test_a_client_with_one_record_takes_the_path_of_several(bound):
    """Its bound on the norm would otherwise change when a second record joins."""
    own = ClientRecords(tuple(x[:1] for x in records()))
    (_, part), *others = own.micro_batches(own.all, bound)
    assert not others and part.units == 1
    assert part.records.tolist() == [0, 0] and part.weights.tolist() == [1.0, 0.0]


def set_weights(model, values):
    nn.utils.vector_to_parameters(values, model.parameters())
    return model
