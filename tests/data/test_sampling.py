"""Samplers draw what their event assumes: a battery that accepts the sampler and catches its
impostors.
"""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
import torch

from dpkfc import PrivacyConfig, Session
from dpkfc.audit.sampler_tests import SizeDistribution, compute_p_values
from dpkfc.data import poisson_gaps
from dpkfc.data.poisson_gaps import draw_by_gaps
from dpkfc.data.sampling import FixedSize, Poisson, Shuffle, TruncatedPoisson
from dpkfc.privacy.rng import SamplingStream

STEPS, ALPHA = 2000, 1e-4


def draws(sampler, stream=None, steps=STEPS):
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


RATES = [0.02, 0.3, 0.45, 0.7, 0.97]


def judge_gaps(rate, steps=2000, n=400):
    """Return the p-values of the audit for batches that are drawn by gaps."""
    generator = SamplingStream.repeatable(5).generator(3)
    batches = [draw_by_gaps(n, rate, generator) for _ in range(steps)]
    return compute_p_values(batches, SizeDistribution.from_event(Poisson(rate, n).event(1.0), n))


@pytest.mark.parametrize("rate", RATES)
def test_batches_by_gaps_are_poisson_batches(rate):
    values = judge_gaps(rate)
    assert min(values.values()) > ALPHA, values


@pytest.mark.parametrize(
    ("off", "rate"), [("gaps", 0.02), ("gaps", 0.3), ("blocks", 0.3), ("ends", 0.02)]
)
def test_a_gap_that_is_off_by_one_is_seen(off, rate, monkeypatch):
    honest = poisson_gaps._gaps

    def plant(bits, decay, block):
        gaps, is_sampled = honest(bits, decay, block)
        if off == "gaps":
            return gaps + is_sampled, is_sampled
        if off == "blocks":
            return gaps + ~is_sampled, is_sampled
        # The end of a block is counted as an example.
        return gaps, is_sampled | (gaps == block)

    monkeypatch.setattr(poisson_gaps, "_gaps", plant)
    assert min(judge_gaps(rate).values()) < ALPHA


def test_the_cost_of_a_batch_does_not_depend_on_the_examples(monkeypatch):
    """Of 10¹² examples it draws about as many numbers as of 10⁴, and holds no more."""
    made = []
    honest = poisson_gaps._gaps
    monkeypatch.setattr(
        poisson_gaps, "_gaps", lambda bits, *a: made.append(bits.size) or honest(bits, *a)
    )
    generator = np.random.default_rng(1)
    for n in (10**4, 10**9, 10**12):
        made.clear()
        batch = Poisson(100 / n, n).indices(0, generator)
        assert sum(made) < 400
        assert 40 < batch.size < 180
        assert 0 <= batch.min() <= batch.max() < n
        assert np.all(np.diff(batch) > 0)
        cut = TruncatedPoisson(100 / n, n, 60).indices(0, generator)
        assert cut.size <= 60
    with pytest.raises(ValueError, match="batches can be drawn for 1e-12 or more"):
        Poisson(1e-13, 10).indices(0, generator)


class Made(torch.utils.data.Dataset):
    """A thousand million records that are made when they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        self.read += 1
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator), torch.randn(1, generator=generator)


def test_a_session_reads_its_batches_of_a_thousand_million_records():
    data = Made()
    config = PrivacyConfig(expected_batch_size=40, steps=3)
    plan = config.with_noise(1.0, 1e-10, len(data))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [(torch.randn(3), torch.randn(1)) for _ in range(4)]
    with Session(plan, model, optimizer, data, public_records=rows) as session:
        for batch in session.batches():
            session.step(batch, lambda m, b: ((m(b[0]) - b[1]) ** 2).sum(1))
    assert data.read < 3 * 40 * 2


def test_at_rate_one_no_random_number_leaves_an_example_out():
    class Largest:
        def integers(self, low, high, count, dtype):
            return np.full(count, high - 1, dtype)

    assert np.array_equal(draw_by_gaps(5, 1.0, Largest()), np.arange(5))


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
