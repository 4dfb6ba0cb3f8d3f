"""Samplers draw what their event assumes: a battery that accepts the sampler and catches its
impostors.
"""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from dpkfc.data.sampling import FixedSize, Poisson, Shuffle
from dpkfc.privacy.rng import SamplingStream

N, RATE, STEPS, ALPHA = 200, 0.05, 2000, 1e-4


def draws(sampler, stream=None, steps=STEPS) -> np.ndarray:
    """Membership of every example in every batch, `[steps, N]`."""
    stream = stream or SamplingStream.repeatable(11)
    member = np.zeros((steps, sampler.dataset_size), dtype=bool)
    for step in range(steps):
        member[step, sampler.indices(step, stream.generator(step, sampler.steps_per_draw))] = True
    return member


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
