"""The law of the noise: the right one passes, every wrong one is rejected by the test that is made
for it.
"""

import numpy as np
import pytest
import torch

from dpkfc.audit import noise_tests as law
from dpkfc.audit.findings import select_failed
from dpkfc.audit.noise_samples import (
    check_granularity,
    check_repeats,
    check_tails,
    check_windows,
    collision_rate,
    judge_noise,
)
from dpkfc.audit.noise_tests import LOST_STEPS, check_noise, check_run_noise, standardize
from dpkfc.privacy.mechanism import Released
from dpkfc.privacy.rng import NoiseStream
from tests.audit.sizes import size
from tests.injected_bugs.subjects import STEPS, vectors

RELEASES, WIDTH = 60, size(4_000, 40_000)
PARTS = {"a.weight": WIDTH - 10, "a.bias": 7, "gain": 3}


def sample_noise(seed=0):
    return np.random.default_rng(seed).standard_normal((RELEASES, WIDTH))


@pytest.mark.parametrize("seed", range(size(3, 40)))
def test_normal_numbers_pass(seed):
    assert not select_failed(judge_noise(list(sample_noise(seed)), PARTS))


def block_repeated(z):
    z[:, 900:1200] = z[:, 100:400]
    return z


def release_repeated(z):
    z[41] = z[7]
    return z


def halves_alike(z):
    z[:, WIDTH // 2 :] = z[:, : WIDTH // 2]
    return z


def follow_previous(z):
    """Each release holds a twentieth of the one before: too little to show in a pair."""
    rho = 0.05
    for k in range(1, len(z)):
        z[k] = rho * z[k - 1] + (1 - rho**2) ** 0.5 * z[k]
    return z


def silent(where):
    def change(z):
        z[where] = 0.0
        return z

    return change


WRONG = {
    "97.5 % of the noise": (lambda z: 0.975 * z, "noise scale"),
    "102.5 % of the noise": (lambda z: 1.025 * z, "noise scale"),
    "a mean": (lambda z: z + 0.02, "noise mean"),
    "uniform numbers": (
        lambda z: (np.argsort(np.argsort(z.ravel())).reshape(z.shape) / z.size - 0.5) * 12**0.5,
        "noise shape",
    ),
    "heavy tails": (lambda z: np.sign(z) * np.abs(z) ** 1.3 / 1.31, "noise shape"),
    "a parameter without noise": (silent((slice(None), slice(-3, None))), "noise everywhere"),
    "a number without noise": (silent((slice(None), 17)), "noise everywhere"),
    "a release without noise": (silent((5, slice(None))), "noise everywhere"),
    "a block that comes twice": (block_repeated, "no repetition inside a release"),
    "two shards with one seed": (halves_alike, "no repetition inside a release"),
    "a release that comes twice": (release_repeated, "no repetition between releases"),
    "memory": (follow_previous, "independence of following releases"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_law_is_rejected_by_its_own_test(name):
    change, check = WRONG[name]
    assert check in {
        finding.check for finding in select_failed(judge_noise(list(change(sample_noise())), PARTS))
    }


def test_the_part_without_noise_is_named():
    found = select_failed(
        judge_noise(list(WRONG["a parameter without noise"][0](sample_noise())), PARTS)
    )
    assert any("'gain'" in finding.detail for finding in found)


def test_releases_are_drawn_across_a_crash_and_its_resume(monkeypatch):
    """A few releases behind the checkpoint are lost; those that follow it are compared with
    them.
    """
    seen = []
    real = judge_noise

    def judged(releases, parts, rate):
        seen.extend([len(releases), releases[0].size, sum(parts.values())])
        assert all(not np.array_equal(x, y) for i, x in enumerate(releases) for y in releases[:i])
        return real(releases, parts, rate)

    monkeypatch.setattr(law, "judge_noise", judged)
    progress = []
    assert not select_failed(
        check_noise(vectors(), steps=24, progress=lambda done, of: progress.append((done, of)))
    )
    assert progress == [(k, 24) for k in range(1, 25)] and LOST_STEPS < 12
    assert seen == [24, *[sum(p.numel() for p in vectors().model().parameters())] * 2]


def test_of_a_large_model_the_beginning_of_every_parameter_is_looked_at():
    released = Released(
        gradients={
            "a": torch.arange(90.0).view(9, 10),
            "b": torch.full((10,), 7.0),
            "c": torch.ones(()),
        },
        noise_variance=1.0,
        step=0,
        release=1,
    )
    parts = law.count_leading_entries(released, 11)
    assert parts == {"a": 10, "b": 2, "c": 1}
    assert standardize(released, 0.5, parts).tolist() == [
        *(2.0 * k for k in range(10)),
        14.0,
        14.0,
        2.0,
    ]
    assert standardize(released, 1.0).size == 101


# -- streams, which are looked at more closely -----------------------------------------------------

STREAM_RELEASES, STREAM_WIDTH = 120, 2_500
SINGLE = float(np.finfo(np.float32).eps)


def sample_stream(dtype="float32"):
    stream = NoiseStream.secure()
    return np.stack(
        [
            stream.normal(STREAM_WIDTH, step, dtype).astype(np.float64)
            for step in range(STREAM_RELEASES)
        ]
    )


def judge(z, rate=None):
    rate = rate or collision_rate(SINGLE)
    return [check_tails(z), check_granularity(z, rate), check_repeats(z), check_windows(z)]


@pytest.mark.parametrize("seed", range(size(3, 40)))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sound_noise_raises_no_alarm(dtype, seed):
    assert not select_failed(
        judge(sample_stream(dtype), collision_rate(float(np.finfo(dtype).eps)))
    )


@pytest.mark.parametrize("power", [12, 20])
def test_a_declared_grid_passes_and_a_grid_sixteen_times_coarser_fails(power):
    z, grid = sample_stream("float64"), 2.0**-power
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


STREAM_FAULTS = [
    (cut_one_side, "noise tails"),
    (lengthen_the_tails, "noise tails"),
    (lambda z: z.astype(np.float16).astype(np.float64), "noise granularity"),
    (repeat_at_an_offset, "noise fingerprints"),
    (repeat_with_the_other_sign, "noise fingerprints"),
    (weaken_late, "noise over the steps"),
    (weaken_slowly, "noise over the steps"),
]


@pytest.mark.parametrize("change, check", STREAM_FAULTS)
def test_a_fault_fails_its_own_test(change, check):
    assert check in {finding.check for finding in select_failed(judge(change(sample_stream())))}


def test_a_repeat_is_reported_with_its_steps():
    assert "steps 3, 110" in check_repeats(repeat_at_an_offset(sample_stream())).detail


def test_a_run_draws_the_noise_of_every_step_of_the_plan():
    steps = []
    findings = check_run_noise(
        vectors(), numbers=60_000, progress=lambda done, of: steps.append((done, of))
    )
    assert not select_failed(findings)
    assert steps == [(k, STEPS) for k in range(1, STEPS + 1)]
