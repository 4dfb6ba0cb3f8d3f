"""Config to plan: one place where sampler, sensitivity, noise and event meet; bad settings fail
first.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import Preconditioner
from dpkfc.data.sampling import FixedSize, Poisson
from dpkfc.postprocess import EMA
from dpkfc.privacy.events import event_from_dict

DELTA = 1e-5


def make(noise=2.0, n=1000, delta=DELTA, **settings):
    return PrivacyConfig(**({"expected_batch_size": 50, "steps": 10} | settings)).with_noise(
        noise, delta, n
    )


@dataclasses.dataclass(frozen=True)
class Described(Preconditioner):
    """A preconditioner as far as a plan is concerned."""

    damping: object = 0.1

    def describe(self):
        return {"name": "kfac", "damping": self.damping}

    def is_due(self, step):
        return True

    def build(self, model, capture, step, rules=None):
        raise AssertionError


def test_poisson_plan():
    plan = make(max_grad_norm=1.5)
    assert plan.sampler == Poisson(0.05, 1000)
    assert (plan.sensitivity, plan.stddev, plan.max_grad_norm) == (1.5, 3.0, 1.5)
    assert (plan.expected_batch_size, plan.steps, plan.accountant) == (50, 10, "pld")
    assert plan.neighbouring_relation == "add_or_remove_one"
    assert (
        plan.certified and not plan.test_mode and plan.target_epsilon is None and plan.caveats == ()
    )
    assert plan.event == plan.sampler.event(2.0)


def test_fixed_size_plan_doubles_the_sensitivity_and_takes_rdp():
    plan = make(sampler="fixed", max_grad_norm=1.5)
    assert plan.sampler == FixedSize(50, 1000)
    assert (plan.sensitivity, plan.stddev, plan.accountant) == (3.0, 6.0, "rdp")
    assert plan.neighbouring_relation == "replace_one"
    assert plan.certified
    assert plan.cross_check() == {"pld": None, "rdp": plan.epsilon()}


@pytest.mark.parametrize(
    ("clipping", "bound"),
    [("flat", 4.0), ("automatic", 4.0), ("per_layer", 4.0), ("normalised", 1.0)],
)
def test_the_sensitivity_follows_the_clipping(clipping, bound):
    assert make(clipping=clipping, max_grad_norm=4.0).sensitivity == bound


@pytest.mark.parametrize(
    ("epochs", "batch", "n", "steps"),
    [(5, 256, 60000, 1172), (0.001, 50, 1000, 1), (1.5, 1000, 1000, 2), (2, 3, 10, 7)],
)
def test_steps_of_epochs(epochs, batch, n, steps):
    assert (
        make(epochs=epochs, steps=None, expected_batch_size=batch, n=n, delta=1e-9).steps == steps
    )


def test_test_mode_is_stamped_and_repeatable():
    plan = make(test_mode_seed=5)
    assert plan.test_mode and not plan.certified
    assert plan.caveats == ("NOT PRIVATE: test mode, the noise can be repeated from a seed",)
    assert not plan.noise_stream().is_secure and not plan.sampling_stream().is_secure
    assert np.array_equal(
        plan.draw(3, plan.sampling_stream()), plan.draw(3, plan.sampling_stream())
    )
    assert np.array_equal(plan.noise_stream().normal(5, 1), plan.noise_stream().normal(5, 1))
    secure = make()
    assert secure.noise_stream().is_secure and secure.sampling_stream().is_secure


SAME = [
    {},
    {"max_physical_batch_size": 8},
    {"accountant": "pld"},
    {"automatic_gamma": 0.5},
    {"uncertified": True},
]
OTHER = [
    {"max_grad_norm": 2.0},
    {"clipping": "automatic"},
    {"sampler": "fixed"},
    {"noise": 2.5},
    {"n": 1001},
    {"delta": 1e-6},
    {"steps": 11},
    {"expected_batch_size": 51},
    {"test_mode_seed": 0},
    {"preconditioner": Described()},
    {"preconditioner": Described(0.2)},
    {"accountant": "rdp"},
    {"postprocess": EMA(0.5)},
    {"postprocess": EMA(0.6)},
]


@pytest.mark.parametrize("changes", SAME)
def test_the_hash_does_not_depend_on_what_changes_no_release(changes):
    assert make(**changes).hash == make().hash


def test_the_hash_tells_mechanisms_apart():
    hashes = [make(**changes).hash for changes in OTHER]
    assert len({make().hash, *hashes}) == len(OTHER) + 1
    assert all(len(h) == 64 for h in hashes)


def test_the_description_is_plain_and_complete():
    plan = make(preconditioner=Described(), sampler="fixed")
    description = json.loads(json.dumps(plan.describe(), allow_nan=False))
    assert description["plan_hash"] == plan.hash
    assert description["preconditioner"] == {"name": "kfac", "damping": 0.1}
    assert description["sampler"]["name"] == "fixed"
    assert event_from_dict(description["event"]) == plan.event
    assert description["certified"] is True
    assert {
        "noise_multiplier",
        "stddev",
        "sensitivity",
        "delta",
        "steps",
        "accountant",
    } <= description.keys()
    assert {"dataset_size", "expected_batch_size"} <= set(description["assumed_public"])


def test_a_preconditioner_must_describe_itself_plainly():
    with pytest.raises(
        ValueError,
        match="preconditioner must derive from dpkfc.curvature.Preconditioner, got str; .*KFAC",
    ):
        make(preconditioner="kfac")
    old = type("Old", (), {name: lambda *_: {} for name in ("describe", "due", "build")})
    with pytest.raises(
        ValueError, match="must derive from dpkfc.curvature.Preconditioner, got Old; .*extending.md"
    ):
        make(preconditioner=old())
    with pytest.raises(ValueError, match="must return plain values that JSON can hold"):
        _ = make(preconditioner=Described(damping=object())).hash


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive and finite, got 0.0"),
        ({"expected_batch_size": 0}, "expected_batch_size must be an integer >= 1, got 0"),
        ({"epochs": 2}, "exactly one of epochs and steps, got epochs=2 and steps=10"),
        ({"steps": None}, "exactly one of epochs and steps, got epochs=None and steps=None"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 10**9}, "1000000000 steps are planned, more than 1,000,000; choose fewer"),
        ({"steps": None, "epochs": 0.0}, "epochs must be positive and finite, got 0.0"),
        ({"clipping": "soft"}, "clipping must be one of"),
        ({"automatic_gamma": 0.0}, "automatic_gamma must be positive and finite, got 0.0"),
        (
            {"sampler": "cyclic"},
            "sampler must be one of poisson, truncated_poisson, fixed, shuffle; got 'cyclic'",
        ),
        ({"sampler": "shuffle"}, "'shuffle' has no certified guarantee; .* set uncertified=True"),
        ({"accountant": "prv"}, "accountant must be one of pld, rdp; got 'prv'"),
        (
            {"sampler": "fixed", "accountant": "pld"},
            "PLD cannot account for sampler='fixed'; use accountant='rdp'",
        ),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must be an integer >= 1, got 0"),
        ({"test_mode_seed": -1}, "test_mode_seed must be an integer >= 0, got -1"),
        *[
            ({"augmentations": views}, "augmentations must be an integer >= 1")
            for views in (0, -1, 1.5, True)
        ],
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, DELTA, 1000), "epsilon must be positive and finite, got 0.0"),
        ((1.0, 0.0, 1000), r"delta must be in \(0, 1\), got 0.0"),
        (
            (1.0, DELTA, 49),
            "expected_batch_size is 50, more than dataset_size = 49; choose at most 49",
        ),
        ((1.0, DELTA, 0), "dataset_size must be an integer >= 1, got 0"),
    ],
)
def test_bad_targets(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(expected_batch_size=50, steps=10).calibrate(*arguments)


@pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf])
def test_bad_noise(noise):
    with pytest.raises(ValueError, match="noise_multiplier must be finite and >= 0, got"):
        make(noise=noise)


def test_a_useless_delta_is_refused_or_uncertified_and_warned_of_once():
    with pytest.raises(ValueError, match="is not below 1 / N.*or uncertified=True"):
        make(delta=0.01)
    with pytest.warns(UserWarning, match="is not below 1 / N") as caught:
        assert not make(delta=0.01, uncertified=True).certified
    assert len(caught) == 1
    config = PrivacyConfig(expected_batch_size=50, steps=1, accountant="rdp", uncertified=True)
    with pytest.warns(UserWarning, match="is not below 1 / N") as caught:
        config.calibrate(3.0, 0.01, 100)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:.*is not below 1 / N")
def test_every_reason_against_a_guarantee_is_a_caveat():
    assert make().caveats == () and make().certified
    reasons = {
        "no noise is added": make(noise=0.0),
        "the noise is below a thousandth": make(noise=1e-4),
        "the noise can be repeated from a seed": make(test_mode_seed=1),
        "UNCERTIFIED: delta": make(delta=0.01, uncertified=True),
        "UNCERTIFIED: shuffled batches": make(sampler="shuffle", uncertified=True),
    }
    for reason, plan in reasons.items():
        assert len(plan.caveats) == 1 and reason in plan.caveats[0], (reason, plan.caveats)
        assert not plan.certified and not plan.ledger_header["certified"]
        assert plan.ledger_header["rng"] == (
            "repeatable" if reason.startswith("the noise can") else "secure"
        )


def test_a_plan_refuses_parts_that_disagree():
    plan = make()
    with pytest.raises(
        ValueError, match="the sampler draws from 999 examples, the plan is for 1000"
    ):
        dataclasses.replace(plan, sampler=Poisson(0.05, 999))
    with pytest.raises(ValueError, match="a plan needs at least one step, got 0"):
        dataclasses.replace(plan, steps=0)


def test_plans_are_copied_sent_to_processes_and_compared_as_values():
    plan = make(max_grad_norm=0.5)
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(make(max_grad_norm=0.5)) and plan != make()
