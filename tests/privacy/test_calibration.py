"""Calibration returns the safe end of a narrow bracket, or one clear error."""

import math
import re
import warnings

import pytest

from dpkfc.data.sampling import FixedSize, Poisson
from dpkfc.privacy.accounting import epsilon
from dpkfc.privacy.calibration import CalibrationError, calibrate_noise_multiplier, check_target

DELTA = 1e-5
FIXED = FixedSize(20, 1000)


@pytest.mark.quick("2.0-sampler1-*", "0.05-*", "1.0-sampler3-*")
@pytest.mark.parametrize(
    ("target", "sampler", "count", "accountant"),
    [
        (1.0, Poisson(0.02, 1000), 50, "pld"),
        (2.0, Poisson(1.0, 100), 10, "pld"),
        (0.05, Poisson(0.05, 100), 10, "pld"),
        (1.0, Poisson(256 / 60000, 60000), 1172, "rdp"),
        (8.0, Poisson(0.05, 1000), 100, "rdp"),
        (2.0, FIXED, 100, "rdp"),
    ],
)
def test_the_safe_end_of_a_narrow_bracket(target, sampler, count, accountant):
    relation = sampler.neighbouring_relation
    noise = calibrate_noise_multiplier(
        target, DELTA, sampler.event, count, accountant, relation=relation
    )
    assert epsilon(sampler.event(noise), count, DELTA, accountant, relation) <= target
    assert epsilon(sampler.event(0.999 * noise), count, DELTA, accountant, relation) > target * (
        1 - 1e-2
    )
    assert epsilon(sampler.event(noise / 1.0006), count, DELTA, accountant, relation) > target


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_that_is_none(bad):
    with pytest.raises(CalibrationError, match="epsilon must be positive and finite, got"):
        calibrate_noise_multiplier(bad, DELTA, FIXED.event, 1)


@pytest.mark.parametrize("bad", [0.0, -1e-5, 1.0, 2.0, math.nan, "1e-5", None])
def test_a_delta_that_is_none(bad):
    with pytest.raises(CalibrationError, match=r"delta must be in \(0, 1\), got"):
        calibrate_noise_multiplier(1.0, bad, FIXED.event, 1)


@pytest.mark.quick("*-rdp-*", "*-pld-smaller*")
@pytest.mark.parametrize(
    ("target", "sampler", "count", "accountant", "direction"),
    [
        # RDP spends 140 at the least noise, PLD 116: targets between the two were told "more".
        (127.0, Poisson(0.01, 1000), 3, "pld", "smaller epsilon, up to"),
        (1e6, Poisson(0.01, 1000), 3, "rdp", "smaller epsilon, up to"),
        (1e-4, Poisson(1.0, 100), 10**6, "pld", "larger epsilon, from"),
        (1e-4, Poisson(1.0, 100), 10**6, "rdp", "larger epsilon, from"),
    ],
)
def test_the_way_out_of_an_unreachable_target_works(target, sampler, count, accountant, direction):
    arguments = (sampler.event, count, accountant)
    relation = sampler.neighbouring_relation
    with pytest.raises(CalibrationError, match=f"choose a {direction}") as caught:
        calibrate_noise_multiplier(target, DELTA, *arguments, relation=relation)
    text = str(caught.value)
    assert len(text) <= 160
    named = float(re.search(rf"{direction} ([^, ]+)", text)[1])
    assert calibrate_noise_multiplier(named, DELTA, *arguments, relation=relation) > 0


def test_targets_that_no_epsilon_reaches():
    event = Poisson(1.0, 100).event
    with pytest.raises(CalibrationError, match="all spend about 0; choose a smaller delta"):
        calibrate_noise_multiplier(1.0, 1 - 1e-12, event, 1)
    event = Poisson(0.01, 1000).event
    with pytest.raises(ValueError, match=r"cannot resolve delta = 1e-30 .* a delta above 1.2e-13"):
        calibrate_noise_multiplier(1.0, 1e-30, event, 1)
    assert calibrate_noise_multiplier(1.0, 1.2e-13, event, 1) > 0
    with pytest.raises(CalibrationError, match="number of releases must be >= 1, got 0"):
        calibrate_noise_multiplier(1.0, DELTA, event, 0)


def test_a_delta_that_says_nothing_is_refused_or_warned_of():
    text = r"delta = 0.01 is not below 1 / N = 0.01.*for example delta = 6.3e-03"
    with pytest.raises(CalibrationError, match=text):
        check_target(1.0, 0.01, 100)
    with pytest.warns(UserWarning, match=text):
        check_target(1.0, 0.01, 100, uncertified=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_target(1.0, 0.009, 100)
        check_target(None, 0.5)
