"""The noise: from the cipher and through the mechanism, forked and side by side.

The checks of the audit judge it, and are shown the wrong laws that they must reject. The streams of
test mode are fixed; streams of the operating system are judged at 1e-9 a check.
`tests/test_teeth_release.py` and `test_noise_law.py` look at the noise of whole sessions.
"""

import numpy as np
import pytest
import torch

from dpkfc.audit.findings import select_failed
from dpkfc.audit.noise_samples import check_repeats, collision_rate, judge_noise
from dpkfc.privacy.grid import grid_of
from dpkfc.privacy.mechanism import gaussian_release, rounded_release
from dpkfc.privacy.rng import NoiseStream
from tests.audit.sizes import size

STEPS, LAYERS = 40, (18_000, 6_000, 1_000)
D = sum(LAYERS)
NUMBERS = STEPS * D
GRANULARITY = "noise granularity"
BETWEEN, INSIDE = "no repetition between releases", "no repetition inside a release"
# A wrong law, and the check that must reject it; more of them are in test_noise_law.py.
PLANTED = {
    "98 % of the scale": ("noise scale", lambda g, z: 0.98 * z),
    "a mean of 1 %": ("noise mean", lambda g, z: z + 0.01),
    "20 degrees of freedom": ("noise tails", lambda g, z: g.standard_t(20, z.shape) * 0.9**0.5),
    "tails cut at 4": ("noise tails", lambda g, z: np.clip(z, -4, 4)),
    "a draw repeated with its sign turned": (BETWEEN, lambda g, z: np.vstack([z[:-1], -z[:1]])),
    "halves that go together": (INSIDE, lambda g, z: _mixed_halves(z)),
    "one part for two layers": (
        INSIDE,
        lambda g, z: np.hstack([z[:, : LAYERS[0]], z[:, : D - LAYERS[0]]]),
    ),
    "float16": (GRANULARITY, lambda g, z: z.astype(np.float16)),
    "twelve uniform numbers": (
        "noise tails",
        lambda g, z: g.uniform(-0.5, 0.5, (12, *z.shape)).sum(0),
    ),
}


def judge(z, layers=(), dtype="float64"):
    """Return the checks of the audit that these releases fail, each over its standard deviation.

    Args:
        z: `[steps, d]`.
        layers: sizes of the parts of a row.
        dtype: of which the numbers were drawn.
    """
    z = np.ascontiguousarray(z, dtype=np.float64)
    entries = {str(i): n for i, n in enumerate(layers)} or None
    rate = collision_rate(float(np.finfo(dtype).eps))
    findings = [*judge_noise(list(z), entries, rate), check_repeats(z)]
    return {finding.check for finding in select_failed(findings)}


def judge_streams(*streams):
    """Return the checks that streams fail as one long release: they correlate at no shift."""
    return judge(np.concatenate([stream.ravel() for stream in streams])[None])


def _mixed_halves(z):
    half = 4000  # the second 4000 numbers of a row carry 5 % of the first
    z = z.copy()
    z[:, half : 2 * half] = 0.05 * z[:, :half] + (1 - 0.05**2) ** 0.5 * z[:, half : 2 * half]
    return z


def stream_table(stream, dtype="float64", steps=STEPS):
    return np.stack([stream.normal(D, step, dtype) for step in range(steps)])


@pytest.fixture(scope="module")
def fixed():
    return stream_table(NoiseStream.repeatable(2026))


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_law_is_rejected(name, fixed, evidence):
    check, plant = PLANTED[name]
    found = judge(plant(np.random.default_rng(5), fixed), LAYERS)
    assert check in found
    evidence("noise", f"planted: {name}", rejected_by=sorted(found), numbers=NUMBERS)


@pytest.mark.parametrize("seed", range(size(2, 20)))
def test_the_stream_is_standard_normal_and_independent(seed, evidence):
    assert not judge(stream_table(NoiseStream.repeatable(seed)), LAYERS)
    evidence("noise", f"repeatable stream {seed}", numbers=NUMBERS)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_secret_stream_is_too(dtype, evidence):
    steps = size(STEPS, 400)
    assert not judge(stream_table(NoiseStream.secure(), dtype, steps), LAYERS, dtype)
    evidence("noise", f"secret stream, {dtype}", numbers=steps * D)


def test_streams_of_two_keys_and_of_steps_share_nothing(fixed, evidence):
    steps = size(10, STEPS)
    fixed, other = fixed[:steps], stream_table(NoiseStream.repeatable(2027), steps=steps)
    assert not judge_streams(fixed, other)
    secret = [stream_table(NoiseStream.secure(), steps=steps) for _ in range(2)]
    assert not judge_streams(*secret)
    assert {INSIDE, "noise fingerprints"} <= judge_streams(fixed, np.roll(fixed.ravel(), 12_345))
    assert INSIDE in judge_streams(fixed, (fixed + 3 * other) / 10**0.5)
    evidence("noise", "two keys", numbers=2 * steps * D)


@pytest.mark.parametrize("noise", ["gaussian", "rounded"])
def test_the_mechanism_adds_noise_of_the_planned_scale(noise, evidence):
    """On sums that are far from zero: what is added does not depend on them."""
    stddev, divisor, stream = 2.7, 64.0, NoiseStream.repeatable(7)
    rows = []
    for step in range(STEPS):
        sums = {
            str(i): torch.full((n,), 3.0 * i, dtype=torch.float64) for i, n in enumerate(LAYERS)
        }
        before = {k: x.clone() for k, x in sums.items()}
        draw = lambda n, dtype, step=step: torch.from_numpy(stream.normal(n, step, "float64"))  # noqa: E731
        if noise == "rounded":
            noisy = rounded_release(sums, stddev, divisor, draw, grid_of(1.0, D, stddev))
        else:
            noisy = gaussian_release(sums, stddev, divisor, draw)
        rows.append(
            np.concatenate([(noisy[k] * divisor - before[k]).numpy() / stddev for k in sums])
        )
    found = judge(np.stack(rows), LAYERS)
    if noise == "rounded":
        found -= {GRANULARITY}  # of a grid
    assert not found
    evidence("noise", f"mechanism, {noise}", numbers=NUMBERS)
