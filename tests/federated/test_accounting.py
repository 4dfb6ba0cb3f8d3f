"""The accounting of a federated run against closed forms and the figures of the papers'
settings.
"""

import math

import pytest

from dpkfc import NGD, DiSK, WhiteNoise
from dpkfc.federated import (
    ClientLevel,
    FedAvg,
    FederatedConfig,
    LocalSteps,
    PerUpload,
    SecureAggregation,
    TrustedServer,
)
from dpkfc.federated.party import PartyMechanism
from dpkfc.federated.plan import default_survivors
from dpkfc.postprocess import AdamBC

N, T, DELTA = 20, 70, 1e-5
# ε → (total μ, noise over C of each client's upload, and under secure aggregation), replace-one:
# the setting of DP-FedSOFIM.
REPLACE_ONE = {
    0.5: (0.1422, 526, 118),
    1.0: (0.2681, 279, 62.4),
    2.0: (0.5016, 149, 33.4),
    5.0: (1.1212, 66.7, 14.9),
    10.0: (2.0004, 37.4, 8.4),
}
# ε → (noise over C under add-or-remove-one; ε at 10 %, 25 %, 50 % fewer clients; ε of single
# messages; ε under replace-one).
ADD_OR_REMOVE = {
    0.5: (58.8, 0.53, 0.59, 0.73, 2.61, 1.07),
    1.0: (31.2, 1.06, 1.17, 1.47, 5.41, 2.15),
    2.0: (16.7, 2.12, 2.35, 2.95, 11.5, 4.39),
    5.0: (7.46, 5.32, 5.92, 7.54, 33.2, 11.5),
    10.0: (4.18, 10.7, 12.0, 15.5, 77.4, 24.4),
}


def config(**options):
    """All survive and nobody uses its own noise, as the papers count."""
    sizes = {
        "clients": N,
        "rounds": T,
        "expected_records": 50_000,
        "min_survivors": N,
        "colluding": 0,
    }
    return FederatedConfig(**{**sizes, **options})


@pytest.mark.parametrize("epsilon", REPLACE_ONE)
def test_noise_of_the_papers_setting(epsilon):
    mu, upload, secure = REPLACE_ONE[epsilon]
    plan = config(adjacency="replace_one", max_grad_norm=10.0).calibrate(epsilon, DELTA)
    over_c = plan.stddev / 10.0
    assert over_c == pytest.approx(secure, rel=6e-3)
    assert 2 * math.sqrt(T) / over_c == pytest.approx(mu, rel=1e-3)  # μ₁ = 2 / σ
    # The mean of n messages that each carry √n · share: what the papers' code adds to protect
    # single uploads.
    assert math.sqrt(N) * over_c == pytest.approx(upload, rel=6e-3)
    alone = config(adjacency="replace_one", max_grad_norm=10.0, privacy=PerUpload()).calibrate(
        epsilon, DELTA
    )
    assert alone.sum_stddev(N) / 10.0 == pytest.approx(upload, rel=6e-3)


@pytest.mark.parametrize("epsilon", ADD_OR_REMOVE)
def test_what_other_noise_would_be_worth(epsilon):
    sigma, *dropped, single, replaced = ADD_OR_REMOVE[epsilon]
    plan = config().calibrate(epsilon, DELTA)
    assert plan.stddev == pytest.approx(sigma, rel=4e-3) and plan.epsilon() <= epsilon
    near = {"rel": 6e-3, "abs": 6e-3}
    for share, expected in zip((0.1, 0.25, 0.5), dropped, strict=True):
        left = plan.hiding_stddev(round(N * (1 - share)))
        assert plan.epsilon_at(left) == pytest.approx(expected, **near)
    seen = plan.views()["a server that sees every message"]
    assert seen == pytest.approx(single, **near)
    assert plan.epsilon_at(plan.stddev / 2) == pytest.approx(replaced, **near)


def test_colluding_clients_are_made_up_for():
    plan = config(min_survivors=None, colluding=4).with_noise(3.0, DELTA)
    assert plan.config.survivors == default_survivors(N) == 16
    assert plan.hiding_stddev(16, colluding=4) == pytest.approx(plan.stddev)
    alone = config(min_survivors=16).with_noise(3.0, DELTA)
    assert alone.hiding_stddev(16, colluding=4) < plan.stddev


SHARED = [
    SecureAggregation(),
    TrustedServer("clients"),
    ClientLevel(SecureAggregation()),
    ClientLevel(TrustedServer("clients")),
]
ANOTHER = "another client, which knows its own noise"


@pytest.mark.parametrize("privacy", SHARED, ids=lambda p: p.name)
@pytest.mark.parametrize("clients", [2, 5])
def test_shared_noise_hides_from_any_other_client_too(privacy, clients):
    common = {"clients": clients, "rounds": 30, "expected_records": 600, "privacy": privacy}
    plan = FederatedConfig(**common).calibrate(3.0, 1e-4)
    t = plan.config.survivors
    # Of t − 1 shares: a client knows its own.
    assert plan.hiding_stddev(t, 1) == pytest.approx(plan.stddev, rel=1e-12)
    assert ANOTHER not in plan.views()
    assert "any single other client" in plan.config.adversaries
    bare = FederatedConfig(**common, colluding=0).calibrate(3.0, 1e-4)
    assert bare.stddev == plan.stddev
    assert bare.client_stddev == pytest.approx(plan.client_stddev * math.sqrt((t - 1) / t))
    known = bare.epsilon_at(bare.client_stddev * math.sqrt(t - 1))
    assert 3.0 < bare.views()[ANOTHER] == pytest.approx(known)
    assert "except for the other clients" in bare.config.adversaries
    assert "the released models alone" not in bare.views()


def test_noise_of_nobody_else_is_refused_with_its_fix():
    common = {"clients": 2, "rounds": 3, "expected_records": 600, "min_survivors": 1}
    with pytest.raises(
        ValueError,
        match=r"min_survivors=1 must exceed colluding=1: raise min_survivors, or give colluding=0",
    ):
        FederatedConfig(**common)
    bare = FederatedConfig(**common, colluding=0).with_noise(2.0, 1e-4)
    assert bare.views()[ANOTHER] == math.inf
    # there is no other
    assert ANOTHER not in FederatedConfig(**{**common, "clients": 1}).with_noise(2.0, 1e-4).views()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must be an integer >= 1, got 0"),
        ({"postprocess": DiSK(kappa=0.7, gamma=3 / 7)}, r"use EMA\(kappa=...\)"),
        ({"preconditioner": NGD(probe=WhiteNoise((4,)), lambda_safe=0.1, steps=9)}, "steps=3"),
        (
            {"preconditioner": NGD(probe=WhiteNoise((4,)), lambda_safe=0.1, steps=3)}
            | {"readout": "inverse"},
            "needs PrivacyConfig",
        ),
    ],
)
def test_settings_that_would_spend_the_budget_for_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FederatedConfig(clients=2, rounds=3, expected_records=60, **options)


def test_steps_on_single_examples_are_releases_each():
    one = config(privacy=PerUpload()).with_noise(50.0, DELTA)
    five = config(privacy=PerUpload(), local=LocalSteps(steps=5)).with_noise(
        50.0 * math.sqrt(5), DELTA
    )
    assert five.releases == 5 * T and five.epsilon() == pytest.approx(one.epsilon(), rel=1e-6)
    whole = config(privacy=ClientLevel(), local=LocalSteps(steps=5))
    assert whole.releases == T


@pytest.mark.parametrize("work", [LocalSteps(1), LocalSteps(2)])
def test_what_the_models_alone_are_worth_is_said_where_noise_of_a_step_moves_no_later_one(work):
    rule = FedAvg()
    plan = config(privacy=PerUpload(), local=work, rule=rule).with_noise(50.0, DELTA)
    assert ("the released models alone" in plan.views()) == (work == LocalSteps(1))
    whole = config(
        privacy=ClientLevel(PerUpload()), local=work, rule=rule, min_survivors=16
    ).with_noise(50.0, DELTA)
    assert whole.views()["the released models alone"] < whole.epsilon()


def test_sampled_examples_are_amplified_and_sampled_clients_only_where_it_is_proved():
    full = config().with_noise(2.0, DELTA)
    examples = config(example_rate=0.1).with_noise(2.0, DELTA)
    assert examples.epsilon() < 0.5 * full.epsilon()
    clients = config(client_rate=0.5, min_survivors=8).with_noise(2.0, DELTA)
    assert clients.epsilon() == full.epsilon()
    whole = config(privacy=ClientLevel(), client_rate=0.1, min_survivors=None).with_noise(
        2.0, DELTA
    )
    assert whole.epsilon() == pytest.approx(examples.epsilon())
    with pytest.raises(ValueError, match="hides no client from a server"):
        config(privacy=ClientLevel(SecureAggregation()), client_rate=0.5)
    with pytest.raises(ValueError, match="would let a dropped round reveal how many clients"):
        config(privacy=ClientLevel(), client_rate=0.5, min_survivors=3)


WALK = {"privacy": PerUpload(), "local": LocalSteps(3, 0.2), "rule": FedAvg()}


@pytest.mark.parametrize(
    "options, match",
    [
        ({"clients": 0}, "clients must be an integer"),
        ({"privacy": "user"}, "privacy must be a value"),
        ({"privacy": SecureAggregation}, "privacy must be a value"),
        ({"rule": "fedavg"}, "rule must be a value"),
        ({"local": None}, "local must be a value"),
        ({"min_survivors": 21}, "more than the 20 clients"),
        ({"min_survivors": 3, "colluding": 3}, "must exceed colluding"),
        ({**WALK, "postprocess": (AdamBC(),)}, "AdamBC needs the variance of the noise"),
        ({"local": LocalSteps()}, "no noise of other clients covers"),
        ({"example_rate": 0.5, "adjacency": "replace_one"}, "add_or_remove_one"),
        ({"example_rate": 0.0}, "example_rate must lie"),
        ({"noise": "laplace"}, "noise must be one of"),
        ({"max_grad_norm": math.inf}, "max_grad_norm must be positive"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        config(**{"min_survivors": None, **options})


@pytest.mark.parametrize("privacy", [TrustedServer(), SecureAggregation()])
def test_every_party_rounds_what_it_masks_and_knows_the_sensitivity_of_the_rounded_sum(privacy):
    config = FederatedConfig(
        clients=10, rounds=2, expected_records=1000, privacy=privacy, noise="rounded"
    )
    plan = config.with_noise(1.0, 1e-5)
    silent = PartyMechanism(plan, 0.0)
    assert silent.noise == ("rounded" if privacy.masked else "gaussian")
    assert PartyMechanism(plan, plan.stddev).noise == "rounded"
    assert silent.sensitivity == config.sensitivity > config.max_grad_norm
