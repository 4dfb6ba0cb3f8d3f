"""Checks of single settings refuse what lies outside and name setting, value and range."""

import math

import numpy as np
import pytest

from dpkfc import KFAC, NGD, DeadLeaves, FeatureNoise, PinkNoise, PrivacyConfig
from dpkfc._checks import (
    check_in_range,
    check_integer,
    check_not_negative,
    check_one_of,
    check_optional_integer,
    check_positive,
)
from dpkfc.federated import FederatedConfig, PerUpload
from dpkfc.postprocess import EMA, AdamBC, LowPass

COUNTS = (
    "expected_batch_size",
    "steps",
    "max_grad_norm",
    "augmentations",
    "max_physical_batch_size",
    "test_mode_seed",
)
FEDERATED = ("clients", "rounds", "expected_records", "max_grad_norm", "max_physical_batch_size")


def make(**settings):
    return PrivacyConfig(**{"expected_batch_size": 8, "steps": 2, **settings})


def federated(**settings):
    sizes = {"clients": 4, "rounds": 2, "expected_records": 100, "privacy": PerUpload()}
    return FederatedConfig(**{**sizes, **settings})


def test_values_inside_are_accepted():
    check_positive("rate", np.float32(0.5))
    check_not_negative("rate", 0)
    check_in_range("rate", 0.0, "[0, 1)")
    check_in_range("rate", 1, "(0, 1]")
    check_one_of("kind", "a", ("a", "b"))
    check_integer("count", 1, 1)
    check_optional_integer("count", None, 1)


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_positive, (0.0,), "x must be positive and finite, got 0.0"),
        (check_positive, (math.nan,), "x must be positive and finite, got nan"),
        (check_positive, ("1",), "x must be positive and finite, got '1'"),
        (check_positive, (True,), "x must be positive and finite, got True"),
        (check_positive, (10**400,), "x must be positive and finite, got 10000"),
        (check_not_negative, (-1,), "x must be finite and >= 0, got -1"),
        (check_not_negative, (math.inf,), "x must be finite and >= 0, got inf"),
        (check_in_range, (0, "(0, 1]"), r"x must lie in \(0, 1\], got 0"),
        (check_in_range, (1, "[0, 1)"), r"x must lie in \[0, 1\), got 1"),
        (check_in_range, (math.nan, "[0, 1]"), r"x must lie in \[0, 1\], got nan"),
        (check_in_range, (None, "[0, 1]"), r"x must lie in \[0, 1\], got None"),
        (check_one_of, ("c", ("a", "b")), "x must be one of a, b; got 'c'"),
        (check_integer, (True, 1), "x must be an integer >= 1, got True"),
        (check_integer, (1.0, 1), "x must be an integer >= 1, got 1.0"),
        (check_integer, (10**400, 1), "x must be an integer below 2\\*\\*63, got 10000"),
        (check_integer, (10**5000, 1), "got an integer of more than 4,300 digits"),
        (check_optional_integer, (0, 1), "x must be an integer >= 1, got 0"),
    ],
)
def test_values_outside_are_refused(check, arguments, message):
    with pytest.raises(ValueError, match=message):
        check("x", *arguments)


def test_long_values_are_shortened():
    with pytest.raises(ValueError):
        check_positive("x", "a" * 1000)


HUGE = 10**400
NUMBERS = [
    *((f"PrivacyConfig.{name}", lambda name=name: make(**{name: HUGE})) for name in COUNTS),
    ("noise_multiplier", lambda: make().with_noise(HUGE, 1e-5, 100)),
    ("noise_multiplier", lambda: make().with_noise(1e200, 1e-5, 100)),
    ("dataset_size", lambda: make().with_noise(1.0, 1e-5, HUGE)),
    ("number of releases", lambda: make().with_noise(1.0, 1e-5, 100).epsilon(HUGE)),
    *((name, lambda name=name: federated(**{name: HUGE})) for name in FEDERATED),
    ("noise_multiplier", lambda: federated().with_noise(1e200, 1e-5)),
    ("seed", lambda: KFAC(probe=PinkNoise((1, 8, 8)), seed=HUGE)),
    ("lambda_base", lambda: NGD(probe=FeatureNoise(4), steps=2, lambda_safe=1.0, lambda_base=HUGE)),
    ("shape", lambda: PinkNoise((1, HUGE, 8))),
    ("shape", lambda: DeadLeaves((1, HUGE, 8))),
    ("betas", lambda: AdamBC(betas=(0.9, HUGE))),
    ("b and a", lambda: LowPass(b=(1.0, HUGE), a=(1.0, 0.5))),
    ("kappa", lambda: EMA(kappa=10**5000)),
]


@pytest.mark.parametrize(("name", "build"), NUMBERS)
def test_numbers_that_no_machine_holds_are_refused_by_their_field(name, build):
    with pytest.raises(ValueError, match=name.partition(".")[2] or name) as refusal:
        build()
    assert len(str(refusal.value)) <= 160
