"""The samplers draw what is accounted for: the battery that `dpkfc audit` runs accepts them and
rejects every impostor.

An impostor is judged by the law of the event that it claims. Seeds are fixed; secret streams are
judged at 1e-9 a test, and all batteries of a run on secret streams together have fewer than 200
tests.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.audit.p_values import ALPHA
from dpkfc.audit.sampler_tests import (
    SizeDistribution,
    check_sampler,
    compute_p_values,
    draw_batches,
)
from dpkfc.data.sampling import FixedSize, Poisson, Shuffle, TruncatedPoisson
from dpkfc.data.units import Units
from dpkfc.distributed.context import DistributedContext
from dpkfc.privacy.rng import SamplingStream
from tests.audit.sizes import size

N, B = 1000, 20
STEPS = size(3000, 20_000)
SHIPPED = {
    "poisson": {},
    "truncated_poisson": {"sampler": "truncated_poisson", "max_batch_size": 24},
    "fixed": {"sampler": "fixed"},
}


def plan(n=N, b=B, **settings):
    return PrivacyConfig(expected_batch_size=b, steps=10, **settings).with_noise(1.0, 1e-5, n)


def law(n=N, b=B, **settings):
    return SizeDistribution.from_event(plan(n, b, **settings).event, n)


def sample_batches(draw, steps=3000, seed=3):
    generator = np.random.default_rng(seed)
    return [draw(step, generator) for step in range(steps)]


def alarms(values):
    return {name for name, p in values.items() if p < ALPHA}


def worst(values):
    name = min(values, key=values.__getitem__)
    return {"least_p": values[name], "at": name, "tests": len(values)}


# -- the samplers that ship ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("seed", range(size(1, 10)))
def test_a_shipped_sampler_passes(name, seed, evidence):
    p = plan(**SHIPPED[name])
    batches = draw_batches(p, STEPS, SamplingStream.repeatable(seed))
    others = draw_batches(p, STEPS, SamplingStream.repeatable(seed + 1000))
    values = compute_p_values(batches, SizeDistribution.from_event(p.event, N), others)
    assert min(values.values()) > 1e-6, values
    evidence("samplers", f"{name}, seed {seed}", batches=2 * STEPS, examples=N, **worst(values))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_sampler_passes_on_its_secret_stream(name, evidence):
    found = check_sampler(plan(**SHIPPED[name]), steps=STEPS)
    assert len(found) > 8
    assert all(finding.passed for finding in found), found
    evidence("samplers", f"{name}, secret stream", batches=2 * STEPS, examples=N, tests=len(found))


def test_a_session_draws_by_the_law_of_its_plan(evidence):
    """`session.batches()`, with every step taken: nothing of the loop changes which examples
    come.
    """
    n, b, steps = 40, 4, size(150, 4000)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    p = PrivacyConfig(expected_batch_size=b, steps=steps).with_noise(9.0, 1e-5, n)
    batches = []
    with Session(
        p, model, optimizer, (torch.randn(n, 2), torch.randn(n, 1)), verify=False
    ) as session:
        for batch in session.batches():
            batches.append(batch.rows)
            session.step(batch, lambda m, x: ((m(x[0]) - x[1]) ** 2).sum(1))
    values = compute_p_values(batches, SizeDistribution.from_event(p.event, n))
    assert not alarms(values), values
    evidence("samplers", "batches of a session", batches=steps, examples=n, **worst(values))


def test_ranks_divide_a_batch_without_overlap():
    for batch in sample_batches(Poisson(0.1, 50).indices, 30):
        shares = [DistributedContext(rank, 3).shard(batch) for rank in range(3)]
        assert np.array_equal(np.sort(np.concatenate(shares)), batch)


def test_units_are_drawn_and_their_records_uniformly(evidence):
    """Patients with 1, 2, 3, 4 and 9 records, of whom at most 3 count: the unit's law is the
    sampler's, its records are even.
    """
    units = Units.from_ids(np.repeat(np.arange(5), [1, 2, 3, 4, 9]), limit=3)
    stream, sampler, steps = SamplingStream.repeatable(5), Poisson(0.4, 5), size(4000, 20_000)
    batches, records, per_unit = [], np.zeros(19, dtype=int), np.zeros(5, dtype=int)
    for step in range(steps):
        generator = stream.generator(step)
        batches.append(sampler.indices(step, generator))
        table = units.draw(batches[-1], generator)
        assert table.shape[0] == len(batches[-1])
        chosen = table[table >= 0]
        assert len(np.unique(chosen)) == len(chosen)
        np.add.at(records, chosen, 1)
        np.add.at(per_unit, batches[-1], 1)
    values = compute_p_values(batches, SizeDistribution.from_event(sampler.event(1.0), 5))
    assert min(values.values()) > 1e-6, values
    for unit, (begin, end) in enumerate(zip(units.starts[:-1], units.starts[1:], strict=True)):
        counts, many = records[begin:end], end - begin
        if many <= 3:
            assert np.all(counts == per_unit[unit])
        else:  # each draw is a uniform subset of 3
            share = 3 / many
            spread = np.square(counts - per_unit[unit] * share).sum() / (
                per_unit[unit] * share * (1 - share)
            )
            p = stats.chi2.sf(spread * (many - 1) / many, many - 1)
            assert 1e-6 < p < 1 - 1e-6
    evidence("samplers", "units and their records", batches=steps, **worst(values))


# -- impostors -------------------------------------------------------------------------------------


def shuffled(step, generator):
    stream = SamplingStream.repeatable(1)
    return Shuffle(B, N).indices(step, stream.generator(step, N // B))


def leave_out(banned):
    return lambda step, g: (lambda b: b[b != banned])(Poisson(B / N, N).indices(step, g))


def sample_twice_as_often(step, g):
    return np.flatnonzero(g.random(N) < np.where(np.arange(N) == 7, 2, 1) * B / N)


def never_empty(step, g):
    batch = Poisson(0.1, 20).indices(step, g)
    return batch if batch.size else g.choice(20, 1)


def redraw_when_empty(step, g):
    while not (batch := Poisson(0.1, 20).indices(step, g)).size:
        pass
    return batch


def blocks(step, g):
    return np.flatnonzero(np.repeat(g.random(N // 4) < B / N, 4))


def partners(step, g):
    """Pairs (i, i + 500) come together or not at all, in as many batches as they should."""
    half = np.flatnonzero(g.random(N // 2) < B / N)
    return np.concatenate([half, half + N // 2])


def exclusive(step, g):
    """Of the neighbours 2i and 2i + 1 never both; the size has nearly the right law."""
    which = g.random(N // 2) / (B / N)
    return np.sort(
        np.concatenate(
            [2 * np.flatnonzero(which < 1), 2 * np.flatnonzero((which >= 1) & (which < 2)) + 1]
        )
    )


def same_parity(step, g):
    """The size of a Poisson batch, all of it from the even or all of it from the odd examples."""
    count = g.binomial(N, B / N)
    return np.sort(2 * g.choice(N // 2, count, replace=False) + g.integers(2))


def sample_with_replacement(step, g):
    return np.sort(g.integers(N, size=g.binomial(N, B / N)))


def drift(step, g):
    return Poisson(B / N * (1 + 0.3 * np.sin(step / 300)), N).indices(step, g)


def first_ones_kept(step, g):
    return Poisson(B / N, N).indices(step, g)[:21]


def repeated_now_and_then(batches):
    """One batch in forty is an earlier one, a thousand steps later."""
    return [batches[i - 1000] if i >= 1000 and i % 40 == 0 else b for i, b in enumerate(batches)]


POISSON, TRUNCATED, FIXED = (
    law(),
    law(sampler="truncated_poisson", max_batch_size=21),
    law(sampler="fixed"),
)
TINY = law(20, 2)
IMPOSTORS = {
    "fixed size posing as Poisson": (
        POISSON,
        lambda: sample_batches(FixedSize(B, N).indices),
        "variance of sizes",
    ),
    "shuffle posing as Poisson": (POISSON, lambda: sample_batches(shuffled), "following batches"),
    "shuffle posing as fixed size": (FIXED, lambda: sample_batches(shuffled), "inclusion"),
    "truncated posing as Poisson": (
        POISSON,
        lambda: sample_batches(TruncatedPoisson(B / N, N, 22).indices),
        "largest batch",
    ),
    "Poisson posing as truncated": (
        TRUNCATED,
        lambda: sample_batches(Poisson(B / N, N).indices),
        "possible batches",
    ),
    "Poisson posing as fixed size": (
        FIXED,
        lambda: sample_batches(Poisson(B / N, N).indices),
        "possible batches",
    ),
    "cut at another maximum": (
        TRUNCATED,
        lambda: sample_batches(TruncatedPoisson(B / N, N, 20).indices),
        "largest batch",
    ),
    "the first ones kept in a full batch": (
        TRUNCATED,
        lambda: sample_batches(first_ones_kept),
        "inclusion",
    ),
    "an empty batch replaced": (TINY, lambda: sample_batches(never_empty), "empty batches"),
    "drawn again when empty": (TINY, lambda: sample_batches(redraw_when_empty), "empty batches"),
    "one example never drawn": (
        POISSON,
        lambda: sample_batches(leave_out(417)),
        "example drawn least",
    ),
    "one example drawn twice as often": (
        POISSON,
        lambda: sample_batches(sample_twice_as_often, 5000),
        "example drawn most",
    ),
    "each batch used twice": (
        POISSON,
        lambda: [b for b in sample_batches(Poisson(B / N, N).indices) for _ in "ab"],
        "equal batches",
    ),
    "one batch in forty comes again": (
        POISSON,
        lambda: repeated_now_and_then(sample_batches(Poisson(B / N, N).indices)),
        "equal batches",
    ),
    "a rate of 105 %": (POISSON, lambda: sample_batches(Poisson(1.05 * B / N, N).indices), "total"),
    "a rate of 95 %": (POISSON, lambda: sample_batches(Poisson(0.95 * B / N, N).indices), "total"),
    "blocks of four": (POISSON, lambda: sample_batches(blocks), "neighbouring examples"),
    "partners that come together": (POISSON, lambda: sample_batches(partners), "variance of sizes"),
    "neighbours that exclude each other": (
        POISSON,
        lambda: sample_batches(exclusive),
        "neighbouring examples",
    ),
    "batches of one half of the data": (
        POISSON,
        lambda: sample_batches(same_parity),
        "halves of the data set",
    ),
    "drawn with replacement": (
        POISSON,
        lambda: sample_batches(sample_with_replacement),
        "possible batches",
    ),
    "a rate that drifts": (POISSON, lambda: sample_batches(drift), "sizes of following batches"),
    "an index beyond the data": (
        POISSON,
        lambda: sample_batches(Poisson(B / N, N + 1).indices),
        "possible batches",
    ),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_an_impostor_is_caught(name, evidence):
    claimed, batches, test = IMPOSTORS[name]
    values = compute_p_values(batches(), claimed)
    assert test in alarms(values), values
    evidence("samplers", f"impostor: {name}", rejected_by=sorted(alarms(values)), p=values[test])


def test_two_ranks_with_one_seed_are_caught(evidence):
    one = sample_batches(Poisson(B / N, N).indices)
    values = compute_p_values(one, POISSON, one)
    assert {"another stream", "equal batches in another stream"} <= alarms(values)
    other = sample_batches(Poisson(B / N, N).indices, seed=4)
    now_and_then = [
        a if i % 50 == 0 else b for i, (a, b) in enumerate(zip(one, other, strict=True))
    ]
    values = compute_p_values(one, POISSON, now_and_then)
    assert "equal batches in another stream" in alarms(values)
    evidence("samplers", "impostor: two ranks with one seed", rejected_by=sorted(alarms(values)))


def test_shuffled_batches_of_an_uncertified_plan_do_not_pass_the_audit():
    found = check_sampler(plan(sampler="shuffle", uncertified=True), steps=2000)
    assert {"sampler: inclusion", "sampler: variance of sizes"} <= {
        f.check for f in found if not f.passed
    }


def test_the_values_are_spread_as_p_values_are(evidence):
    """Over many seeds: what is exact is uniform, what is a bound is not too small, and nothing is
    small too often.
    """
    seeds, p = size(20, 600), plan()
    rows = [
        compute_p_values(draw_batches(p, 500, SamplingStream.repeatable(s)), POISSON)
        for s in range(seeds)
    ]
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        for level in (0.01, 0.1, 0.5):
            most = stats.binom.isf(1e-6, seeds, level) + 1
            assert (values <= level).sum() <= most, (name, level)
    for name in (
        "total",
        "following batches",
        "halves of the data set",
        "inclusion",
        "neighbouring examples",
    ):
        assert stats.kstest([row[name] for row in rows], "uniform").pvalue > 1e-6, name
    evidence("samplers", "p-values over seeds", seeds=seeds, batches=500)


def test_an_event_of_another_data_set_is_refused():
    with pytest.raises(ValueError, match="describes no batches of 11 examples"):
        SizeDistribution.from_event(FixedSize(2, 10).event(1.0), 11)
