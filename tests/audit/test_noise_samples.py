"""Tests of noise samples: sound noise passes, and every fault fails the test that is written for
it.
"""

import numpy as np
import pytest

from dpkfc.audit.findings import select_failed
from dpkfc.audit.noise_samples import (
    check_granularity,
    check_repeats,
    check_tails,
    check_windows,
    collision_rate,
)
from dpkfc.audit.noise_tests import check_run_noise
from dpkfc.privacy.rng import NoiseStream
from tests.audit.sizes import size
from tests.injected_bugs.subjects import STEPS, vectors

RELEASES, WIDTH = 120, 2_500
SINGLE = float(np.finfo(np.float32).eps)


def sample(dtype="float32"):
    stream = NoiseStream.secure()
    return np.stack(
        [stream.normal(WIDTH, step, dtype).astype(np.float64) for step in range(RELEASES)]
    )


def judge(z, rate=None):
    rate = rate or collision_rate(SINGLE)
    return [check_tails(z), check_granularity(z, rate), check_repeats(z), check_windows(z)]


@pytest.mark.parametrize("seed", range(size(3, 40)))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sound_noise_raises_no_alarm(dtype, seed):
    assert not select_failed(judge(sample(dtype), collision_rate(float(np.finfo(dtype).eps))))


@pytest.mark.parametrize("power", [12, 20])
def test_a_declared_grid_passes_and_a_grid_sixteen_times_coarser_fails(power):
    z, grid = sample("float64"), 2.0**-power
    rate = collision_rate(2.0**-52, grid)
    assert check_granularity(np.rint(z / grid) * grid, rate).passed
    assert not check_granularity(np.rint(z / grid / 16) * grid * 16, rate).passed


def cut_one_side(z):
    return np.minimum(z, 3.5)


def lengthen_the_tails(z):
    return np.where(np.abs(z) > 3.5, 1.4 * z, z)


def repeat_at_an_offset(z):
    z[110, 700:900] = z[3, 50:250]
    return z


def repeat_with_the_other_sign(z):
    z[110] = -z[9]
    return z


def weaken_late(z):
    z[110:] *= 0.95
    return z


def weaken_slowly(z):
    return z * np.linspace(1.05, 0.95, len(z))[:, None]


FAULTS = [
    (cut_one_side, "noise tails"),
    (lengthen_the_tails, "noise tails"),
    (lambda z: z.astype(np.float16).astype(np.float64), "noise granularity"),
    (repeat_at_an_offset, "noise fingerprints"),
    (repeat_with_the_other_sign, "noise fingerprints"),
    (weaken_late, "noise over the steps"),
    (weaken_slowly, "noise over the steps"),
]


@pytest.mark.parametrize("change, check", FAULTS)
def test_a_fault_fails_its_own_test(change, check):
    assert check in {finding.check for finding in select_failed(judge(change(sample())))}


def test_a_repeat_is_reported_with_its_steps():
    assert "steps 3, 110" in check_repeats(repeat_at_an_offset(sample())).detail


def test_a_run_draws_the_noise_of_every_step_of_the_plan():
    steps = []
    findings = check_run_noise(
        vectors(), numbers=60_000, progress=lambda done, of: steps.append((done, of))
    )
    assert not select_failed(findings)
    assert steps == [(k, STEPS) for k in range(1, STEPS + 1)]
