"""Local steps of clients against plain loops, and secure aggregation."""

import math

import pytest
import torch

from dpkfc.federated import (
    ClientLevel,
    FedAvg,
    LocalSteps,
    PerUpload,
    federate,
)
from dpkfc.federated.secure_aggregation import encode
from dpkfc.federated.simulation import run_round
from dpkfc.postprocess.protocol import PostProcess
from tests.federated.test_equality import plain_clipped_sum, set_weights
from tests.federated.worlds import (
    CLIENTS,
    RECORDS,
    check_end,
    datasets,
    head,
    loss_fn,
    plan_of,
    vector,
    world,
)


def gradient(model, data):
    found = torch.autograd.grad(loss_fn(model, data).mean(), list(model.parameters()))
    return torch.cat([x.flatten() for x in found])


def set_head(values):
    return set_weights(head(), values)


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
                own = own - 0.2 * gradient(set_head(own), data)
            change = theta - own
            changes.append(change * min(1.0, 0.02 / float(change.norm())))
        theta = theta - sum(changes) / CLIENTS
    check_end(run, theta, 1e-7)


def test_local_steps_leave_the_weights_of_the_round_in_the_model():
    """What a client has walked to holds no noise, and a user may save the model."""
    plan = plan_of(privacy=ClientLevel(), local=LocalSteps(3, 0.2), rule=FedAvg())
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
                own = own - 0.2 * plain_clipped_sum(set_head(own), data, 0.5) / (RECORDS // CLIENTS)
            changes.append(theta - own)
        theta = theta - sum(changes) / CLIENTS
    check_end(run, theta)
    assert run.server.ledger.count == 6 == plan.releases


class Listening(PostProcess):
    """A filter that changes nothing and notes the mean square of what it is given, and the variance
    that it is told.
    """

    def __init__(self):
        self.heard = []

    def describe(self):
        return {"name": "listening"}

    def apply(self, released, state):
        self.heard.append(
            (float(vector(released.gradients).square().mean()), released.noise_variance)
        )
        return released, dict(state)


@pytest.mark.parametrize(
    "options, known",
    [
        ({"privacy": PerUpload()}, True),
        (
            {"privacy": ClientLevel(PerUpload()), "local": LocalSteps(3, 0.2), "rule": FedAvg()},
            True,
        ),
        ({"privacy": PerUpload(), "local": LocalSteps(3, 0.2), "rule": FedAvg()}, False),
    ],
)
def test_filters_are_told_the_variance_of_the_noise_where_it_is_known(options, known):
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


def test_a_number_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="not on the grid"):
        encode({"w": torch.tensor([math.pi]).double()}, 2.0**-10)


def test_secret_cohorts_go_on_when_nobody_was_drawn():
    plan = plan_of(1.0, privacy=ClientLevel(), client_rate=0.05, rounds=4, test_mode_seed=1)
    run = federate(plan, head(), loss_fn, datasets())
    assert len(run.records) == 4 and not any(r.dropped for r in run.records)
    assert all(r.cohort is None and r.survivors is None for r in run.records)
