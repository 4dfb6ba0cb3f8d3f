"""The law of the noise: the right one passes, every wrong one is rejected by the test that is made
for it.
"""

import numpy as np
import pytest
import torch

from dpkfc.audit import noise_tests as law
from dpkfc.audit.findings import select_failed
from dpkfc.audit.noise_samples import judge_noise
from dpkfc.audit.noise_tests import LOST_STEPS, check_noise, standardize
from dpkfc.privacy.mechanism import Released
from tests.audit.sizes import size
from tests.injected_bugs.subjects import vectors

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
