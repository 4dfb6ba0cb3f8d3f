"""Samplers draw what their event assumes: a battery that accepts the sampler and catches its
impostors.
"""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dpkfc.data.sampling import FixedSize, Poisson, Shuffle
from dpkfc.privacy.rng import SamplingStream

N, RATE, STEPS, ALPHA = 200, 0.05, 2000, 1e-4
B = round(N * RATE)


def two_sided(distribution, value) -> float:
    return min(1.0, 2 * min(distribution.cdf(value), distribution.sf(value)))


def draws(sampler, stream=None, steps=STEPS) -> np.ndarray:
    """Membership of every example in every batch, `[steps, N]`."""
    stream = stream or SamplingStream.repeatable(11)
    member = np.zeros((steps, sampler.dataset_size), dtype=bool)
    for step in range(steps):
        member[step, sampler.indices(step, stream.generator(step, sampler.steps_per_draw))] = True
    return member


def poisson_battery(member: np.ndarray, rate: float) -> dict[str, float]:
    """p-values, each two-sided, of what independent inclusion at this rate implies."""
    steps, n = member.shape
    sizes, counts = member.sum(1), member.sum(0)
    variance = rate * (1 - rate)
    together = (member[1:] & member[:-1]).sum()
    spread = n * ((steps - 1) * (rate**2 - rate**4) + 2 * (steps - 2) * (rate**3 - rate**4))
    return {
        "rate": two_sided(stats.binom(steps * n, rate), member.sum()),
        "inclusion": two_sided(
            stats.chi2(n), (np.square(counts - steps * rate) / (steps * variance)).sum()
        ),
        "size variance": two_sided(
            stats.chi2(steps), (np.square(sizes - n * rate) / (n * variance)).sum()
        ),
        "empty batches": stats.binomtest(int((sizes == 0).sum()), steps, (1 - rate) ** n).pvalue,
        "lag 1": two_sided(stats.norm((steps - 1) * n * rate**2, math.sqrt(spread)), together),
    }


def alarms(member, rate=RATE) -> set[str]:
    return {name for name, p in poisson_battery(member, rate).items() if p < ALPHA}


@pytest.mark.parametrize("seed", range(5))
def test_poisson_passes(seed):
    assert alarms(draws(Poisson(RATE, N), SamplingStream.repeatable(seed))) == set()


def test_poisson_passes_with_secure_streams():
    values = poisson_battery(draws(Poisson(RATE, N), SamplingStream.secure()), RATE)
    assert min(values.values()) > 1e-7, "not seeded: one false alarm in two million runs"


def test_fixed_size_batches_do_not_pass_for_poisson():
    assert "size variance" in alarms(draws(FixedSize(B, N)))


def test_shuffled_batches_do_not_pass_for_poisson():
    assert {"inclusion", "size variance", "lag 1"} <= alarms(draws(Shuffle(B, N)))


def test_truncated_batches_do_not_pass_for_poisson():
    member = draws(Poisson(RATE, N))
    for row in member:
        row[np.flatnonzero(row)[round(1.1 * B) :]] = False
    assert "size variance" in alarms(member)


def test_a_repeated_stream_does_not_pass():
    member = draws(Poisson(RATE, N))
    assert "lag 1" in alarms(np.repeat(member[::2], 2, axis=0))


def test_replaced_empty_batches_do_not_pass():
    member = draws(Poisson(0.1, 20))
    assert alarms(member, 0.1) == set()
    member[member.sum(1) == 0, 0] = True
    assert "empty batches" in alarms(member, 0.1)


def test_a_rate_five_per_cent_off_does_not_pass():
    assert "rate" in alarms(draws(Poisson(1.05 * RATE, N)))


def fixed_battery(member: np.ndarray, size: int) -> dict[str, float]:
    """p-values of what a uniform subset of fixed size, drawn anew at every step, implies."""
    steps, n = member.shape
    q = size / n
    shared = (member[1:] & member[:-1]).sum(1)
    overlap = stats.hypergeom(n, size, size)
    inclusion = (np.square(member.sum(0) - steps * q) / (steps * q * (1 - q))).sum() * (n - 1) / n
    return {
        "size": float(np.all(member.sum(1) == size)),
        "inclusion": two_sided(stats.chi2(n - 1), inclusion),
        "lag 1": two_sided(
            stats.norm(overlap.mean() * (steps - 1), overlap.std() * math.sqrt(steps - 1)),
            shared.sum(),
        ),
    }


@pytest.mark.parametrize("seed", range(3))
def test_fixed_size_passes(seed):
    assert (
        min(fixed_battery(draws(FixedSize(B, N), SamplingStream.repeatable(seed)), B).values())
        > ALPHA
    )


def test_impostors_of_fixed_size_do_not_pass():
    shuffled = fixed_battery(draws(Shuffle(B, N)), B)
    assert shuffled["lag 1"] < ALPHA
    assert shuffled["inclusion"] < ALPHA
    assert fixed_battery(draws(Poisson(RATE, N)), B)["size"] == 0


def test_shuffle_is_a_partition_of_each_epoch():
    sampler = Shuffle(7, 30)
    member = draws(sampler, SamplingStream.secure(), steps=8).reshape(2, 4, 30)
    assert sampler.steps_per_draw == 4
    assert np.all(member.sum(2) == 7)
    assert np.all(member.sum(1) <= 1)
    assert not np.array_equal(member[0], member[1])


def test_empty_and_full_batches():
    generator = np.random.default_rng(0)
    sizes = {Poisson(0.01, 3).indices(0, generator).size for _ in range(300)}
    assert 0 in sizes
    empty = Poisson(1e-12, 3).indices(0, generator)
    assert empty.shape == (0,)
    assert empty.dtype == np.int64
    assert np.array_equal(Poisson(1.0, 5).indices(0, generator), np.arange(5))
    assert np.array_equal(FixedSize(5, 5).indices(0, generator), np.arange(5))


@pytest.mark.parametrize("sampler", [Poisson(0.05, 200), FixedSize(10, 200), Shuffle(10, 200)])
def test_values(sampler):
    assert sampler.expected_batch_size == 10
    assert sampler.describe()["dataset_size"] == 200
    assert (
        sampler.describe()["certified"] is sampler.certified is (not isinstance(sampler, Shuffle))
    )
    fixed = isinstance(sampler, FixedSize)
    assert sampler.neighbouring_relation == ("replace_one" if fixed else "add_or_remove_one")
    assert sampler.sensitivity(1.5) == (3.0 if fixed else 1.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.dataset_size = 3


def test_events():
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    assert Poisson(0.1, 20).event(1.5) == dp_accounting.PoissonSampledDpEvent(0.1, gaussian)
    assert Poisson(1.0, 20).event(1.5) == gaussian
    assert FixedSize(2, 20).event(1.5) == dp_accounting.SampledWithoutReplacementDpEvent(
        20, 2, gaussian
    )
    assert Shuffle(2, 20).event(1.5) == Poisson(0.1, 20).event(1.5)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier must be finite and >= 0, got"):
            Poisson(0.1, 20).event(bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0, 5), r"sample_rate must be in \(0, 1\], got 0.0"),
        (lambda: Poisson(1.01, 5), r"sample_rate must be in \(0, 1\], got 1.01"),
        (lambda: Poisson(math.nan, 5), r"sample_rate must be in \(0, 1\], got nan"),
        (lambda: Poisson(0.1, 0), "dataset_size must be an integer >= 1, got 0"),
        (lambda: FixedSize(6, 5), "batch_size is 6, more than the 5 examples"),
        (lambda: Shuffle(0, 5), "batch_size must be an integer >= 1, got 0"),
        (lambda: Shuffle(1.5, 5), "batch_size must be an integer >= 1, got 1.5"),
    ],
)
def test_bad_samplers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
