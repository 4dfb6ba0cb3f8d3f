"""Planted leaks: every one must be found by the checks that a sound federation passes."""

import logging
import math
from dataclasses import asdict

import pytest
import torch

from dpkfc.checkpoint import read
from dpkfc.federated import (
    Client,
    FederatedConfig,
    LocalModel,
    PerUpload,
    SecureAggregation,
    Server,
    TrustedServer,
)
from dpkfc.federated.messages import add_prefix, select_prefix
from dpkfc.federated.partition import iid, parts
from dpkfc.federated.party import stream_seed
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.simulation import run_round
from dpkfc.privacy.rng import NoiseStream
from tests.federated import outside_checks
from tests.federated.outside_checks import (
    check_client_noise,
    check_kept_messages,
    check_record_bound,
    round_message,
)
from tests.federated.worlds import (
    head,
    loss_fn,
    open_round,
    plan_of,
    records,
    world,
)

PAIRS = 20


@pytest.fixture(autouse=True)
def _rare_alarms(monkeypatch):
    """The noise is secret and another in every run: a sound client is to be suspected in one of a
    billion runs of a check.
    """
    monkeypatch.setattr(outside_checks, "ALARM", 1e-9)


def wide_head():
    """More numbers, so that the law of the noise is seen in few rounds."""
    return torch.nn.Linear(60, 10).double()


SHARED = TrustedServer("clients")


def audit_plan(privacy=SHARED, noise=2.0, seed=None, **options):
    config = {
        "clients": 6,
        "rounds": 2 * PAIRS,
        "expected_records": 24,
        "privacy": privacy,
        "test_mode_seed": seed,
    }
    return FederatedConfig(**{**config, **options}).with_noise(noise, 1e-3)


def clients_of(plan, kinds=None):
    local = LocalModel(plan, wide_head(), loss_fn)
    generator = torch.Generator().manual_seed(2)
    data = (
        torch.randn(24, 60, generator=generator).double(),
        torch.randint(0, 10, (24,), generator=generator),
    )
    cut = parts(data, iid(24, plan.config.clients))
    kinds = kinds or {}
    return [kinds.get(i, Client)(i, plan, local, data, verify=False) for i, data in enumerate(cut)]


def check_federation(plan, clients):
    theta = dict(wide_head().named_parameters())
    return {
        f.check: f
        for f in check_client_noise(plan, clients, clients[0].local.contract, theta, PAIRS)
    }


class Silent(Client):
    """Skips the noise."""

    def _released(self, sums, step):
        return sums


class Frozen(Client):
    """Repeats its noise in every round."""

    def _released(self, sums, step):
        self._pipeline.noise = NoiseStream.repeatable(1)
        clipped = super()._released(sums, 0)
        return clipped


@pytest.mark.quick("*0")
@pytest.mark.parametrize("privacy", [TrustedServer("clients"), PerUpload()])
def test_sound_clients_pass(privacy):
    plan = audit_plan(privacy)
    assert all(f.passed for f in check_federation(plan, clients_of(plan)).values())


def test_a_client_that_skips_noise_is_found():
    plan = audit_plan()
    finding = check_federation(plan, clients_of(plan, {4: Silent}))["variance of the noise"]
    assert not finding.passed and "wrong: [4]" in finding.detail


def test_a_client_that_repeats_its_noise_is_found():
    plan = audit_plan(seed=3)
    assert not check_federation(plan, clients_of(plan, {2: Frozen}))["variance of the noise"].passed


def test_streams_have_a_seed_in_test_mode_alone():
    assert stream_seed(audit_plan(), 1) is None
    assert stream_seed(audit_plan(seed=3), 1) == stream_seed(audit_plan(seed=3), 1) is not None


def test_one_seed_on_two_clients_is_found():
    plan = audit_plan(seed=3)
    clients = clients_of(plan)
    clients[5]._pipeline.noise = NoiseStream.repeatable(stream_seed(plan, 1 + 1))
    finding = check_federation(plan, clients)["independence of the noise"]
    assert not finding.passed and "(1, 5)" in finding.detail


def test_dropout_without_a_top_up_is_found():
    """The paper's share, stddev / √n, while a round with t < n survivors is kept."""

    class PaperShare(FederatedPlan):
        @property
        def client_stddev(self):
            return self.stddev / math.sqrt(6)

    plan = PaperShare(**vars(audit_plan()))
    assert plan.config.survivors == 5
    findings = check_federation(plan, clients_of(plan))
    assert findings["variance of the noise"].passed and findings["independence of the noise"].passed
    assert not findings["noise of the survivors"].passed


class Unclipped(Client):
    """Sums gradients as they are."""

    def _make_noisy_sum(self, number):
        means = self.local.mean_gradient(self.records)
        return self._released({name: len(self.records) * x for name, x in means.items()}, number)


def neighbours(kind, scale=100.0):
    plan = plan_of(privacy=TrustedServer("clients"), noise=0.1)
    x, y = records(6, seed=4)
    x, y = torch.cat([x, scale * x[:1]]), torch.cat([y, (y[:1] + 1) % 3])
    theta = dict(head(3).named_parameters())
    answers = []
    for data in ((x, y), (x[:-1], y[:-1])):
        client = kind(0, plan, LocalModel(plan, head(), loss_fn), data, verify=False)
        answers.append(client.answer(round_message(client.local.contract, 0, theta)))
        assert answers[-1]["kind"] == "sum"
    return check_record_bound(plan, *answers)


def test_one_record_moves_a_sum_by_its_clipped_gradient():
    assert neighbours(Client).passed
    assert not neighbours(Unclipped).passed


class Hoarder(Server):
    """Keeps what single clients sent."""

    def receive(self, message):
        if not hasattr(self, "kept"):
            self.kept = []
        accepted = super().receive(message)
        if accepted:
            self.kept.append(select_prefix(message, "sum"))
        return accepted


class Talker(Server):
    """Logs it."""

    def receive(self, message):
        logging.getLogger("dpkfc.federated.test").warning("received %s", message)
        return super().receive(message)


@pytest.mark.parametrize(
    "privacy", [TrustedServer(), TrustedServer("clients"), PerUpload(), SecureAggregation()]
)
def test_a_server_keeps_nothing_of_single_clients(privacy, caplog, tmp_path):
    finding = {}
    for kind in (Server, Hoarder, Talker):
        caplog.clear()
        plan = plan_of(privacy=privacy)
        server = kind(plan, head())
        clients = {c.number: c for c in world(plan)[1].values()}
        for client in clients.values():
            server.enroll(client.hello())
        sent, messages = open_round(server, clients), []
        for i, client in clients.items():
            messages.append(client.answer(sent[i]))
            server.receive(messages[-1])
        record = server.close_round()
        server.save(tmp_path / "checkpoint")
        finding[kind] = check_kept_messages(
            [server, record, read(tmp_path / "checkpoint"), list(caplog.records)], messages
        )
    assert finding[Server].passed and not finding[Hoarder].passed and not finding[Talker].passed


def test_a_record_of_a_round_holds_no_time_which_would_follow_the_numbers_of_records():
    server, clients = world(plan_of(rounds=1))
    record = asdict(run_round(server, clients))
    assert set(record) == {"round", "cohort", "survivors", "dropped", "rejected", "notes"}


def test_nothing_of_a_client_but_its_noisy_sum_is_in_its_message():
    plan = plan_of(privacy=PerUpload(), noise=5.0)
    server, clients = world(plan)
    sent = server.open_round()
    message = clients[0].answer(sent[0])
    private = clients[0].local.clipped_sum(
        clients[0].records, torch.arange(len(clients[0].records)).numpy()
    )
    for name, x in private.items():
        assert not torch.equal(message[f"sum/{name}"], x)
    assert set(message) == {"kind", "round", "contract", "client", *add_prefix("sum", private)}
