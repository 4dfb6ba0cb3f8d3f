"""Rounded noise: its grid, its law, its sensitivity, the low bits that give floating-point noise
away, and whole runs.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.privacy.accounting import epsilon
from dpkfc.privacy.grid import grid_of, widen_sensitivity
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.mechanism import (
    MOST_STEPS,
    ClippedSum,
    gaussian_release,
    release,
    rounded_release,
)
from dpkfc.privacy.rng import NoiseStream
from tests.audit.sizes import size
from tests.mutation_cases import WIDTH, B, N, kfac, net, session
from tests.sessions import cross_entropy as loss_fn

FLOATS = [torch.float32, torch.float64]


def normal_of(seed, step=0):
    stream = NoiseStream.repeatable(seed)
    return lambda size, dtype: torch.from_numpy(
        stream.normal(size, step, str(dtype).removeprefix("torch."))
    )


def lies_on_grid(x, grid):
    steps = x.double() / grid
    return bool((steps == steps.round()).all())


# -- the grid --------------------------------------------------------------------------------------


@given(st.floats(1e-30, 1e30), st.integers(1, 10**12))
def test_the_grid_is_the_largest_power_of_two_that_keeps_the_sensitivity(c, numbers):
    """In exact numbers: C + s √d is at most the sensitivity of the plan, and twice that grid would
    be too wide.
    """
    stated = widen_sensitivity(c)
    grid = Fraction(grid_of(stated, numbers))
    assert math.frexp(float(grid))[0] == 0.5
    assert grid**2 * numbers <= (Fraction(stated) - Fraction(c)) ** 2
    assert (2 * grid) ** 2 * numbers > (Fraction(c) / 2**20) ** 2
    assert stated <= c * (1 + 2.0**-20) * (1 + 1e-15)


@pytest.mark.parametrize("sensitivity, numbers", [(0.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)])
def test_there_is_no_grid_for_nonsense(sensitivity, numbers):
    with pytest.raises(ValueError, match="need a positive finite sensitivity"):
        grid_of(sensitivity, numbers)


def test_noise_that_float64_cannot_hold_is_refused_before_it_is_charged():
    p = plan_rounded_noise(1e6)
    ledger = Ledger.open(None, p.hash)
    sums = {"w": torch.zeros(1).expand(10**8)}  # the more numbers, the finer the grid
    with pytest.raises(ValueError, match="too large for noise='rounded' with sensitivity"):
        release(ClippedSum(sums, p.max_grad_norm), p, p.noise_stream(), ledger, 0)
    assert ledger.count == 0
    with pytest.raises(ValueError, match="too small for noise='rounded'"):
        grid_of(1e-300, 10)


# -- what is added ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_released_lies_on_the_grid_and_is_a_translate(dtype):
    """y(x) = x̂ + y(0) to the last bit for every x: the law of the output is one fixed law, moved
    by a grid point.

    So is no law of floating-point noise: the same identity fails there for most numbers.
    """
    numbers, grid = 6_000, grid_of(widen_sensitivity(1.0), 6_000)
    normal = normal_of(1)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1e-12, 1e-3, 1.0, 37.0, 1e4):
        x = (torch.randn(numbers, generator=generator, dtype=torch.float64) * scale).to(dtype)
        wide = x.double()
        moved = rounded_release({"w": wide.clone()}, 1.3, 1.0, normal, grid)["w"]
        alone = rounded_release({"w": 0 * wide}, 1.3, 1.0, normal, grid)["w"]
        assert lies_on_grid(moved, grid) and lies_on_grid(alone, grid)
        nearest = moved - alone  # exact: both are integers of 52 bits in steps of the grid
        assert lies_on_grid(nearest, grid) and float((nearest - wide).abs().max()) <= grid / 2
        assert torch.equal(nearest, (wide / grid).round() * grid)
        assert rounded_release({"w": x}, 1.3, 1.0, normal, grid)["w"].dtype == dtype
    third = torch.full((numbers,), 0.3)
    floats = [
        gaussian_release({"w": x}, 1.3, 1.0, normal)["w"].double() for x in (third, 0 * third)
    ]
    assert float((floats[0] - floats[1] == third.double()).double().mean()) < 0.5


def test_rounding_keeps_to_the_widened_sensitivity_and_needs_it():
    """Pairs at distance C exactly whose entries are rounded apart, from below one half of a step to
    above one.
    """
    worst = 0.0
    for numbers in (1, 10, 1000, 100_000):
        c, stated = 1.0, widen_sensitivity(1.0)
        grid = grid_of(stated, numbers)
        generator = np.random.default_rng(numbers)
        for _ in range(size(20, 200)):
            direction = generator.choice([-1.0, 1.0], numbers) * (c / math.sqrt(numbers))
            steps = generator.integers(-1000, 1000, numbers)
            # rounds away from its twin
            lower = torch.from_numpy((steps + 0.5) * grid - np.sign(direction) * grid * 2.0**-20)
            upper = lower + torch.from_numpy(direction * (1 - 2.0**-40))
            distance = float((upper - lower).norm())
            ends = [
                rounded_release({"w": x}, 0.0, 1.0, normal_of(0), grid)["w"] for x in (lower, upper)
            ]
            found = float((ends[1] - ends[0]).norm())
            assert found <= stated * (1 + 1e-12) and distance <= c * (1 + 1e-12)
            worst = max(worst, (found - distance) / (grid * math.sqrt(numbers)))
    assert 0.2 < worst <= 1


def test_entries_beyond_all_steps_stay_finite_and_no_farther_apart():
    grid = grid_of(widen_sensitivity(1.0), 3)
    x = torch.tensor([1e300, -1e300, 2 * MOST_STEPS * grid], dtype=torch.float64)
    y = rounded_release({"w": x}, 1.0, 1.0, normal_of(0), grid)["w"]
    assert bool(torch.isfinite(y).all()) and lies_on_grid(y, grid)
    assert float(y.abs().max()) <= 2 * MOST_STEPS * grid


def test_zero_has_one_sign_whatever_the_sum_was():
    """Otherwise −0, which only −0 and −0 add up to, would say that a sum was slightly below
    zero.
    """
    grid = grid_of(widen_sensitivity(1.0), 4)
    x = torch.tensor([-1e-12, 1e-12, -0.0, 0.0], dtype=torch.float64)
    for z in (-1e-12, 1e-12, -0.0):
        y = rounded_release(
            {"w": x}, 1.0, 8.0, lambda size, dtype, z=z: torch.full((size,), z, dtype=dtype), grid
        )["w"]
        assert not bool(torch.signbit(y).any()) and not bool(y.any())


# -- its law ---------------------------------------------------------------------------------------


def two_sided(z, stddev):
    law, total = stats.chi2(z.numel()), float((z.double() / stddev).square().sum())
    return 2 * min(law.cdf(total), law.sf(total))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_law_is_the_gaussian_of_the_plan(dtype, evidence):
    """More than a million secure numbers: 2 % of the standard deviation are 28 standard errors."""
    numbers = size(1_100_000, 5_000_000)
    p = plan_rounded_noise(1.3, max_grad_norm=2.0)
    assert p.stddev == pytest.approx(2.6, rel=1e-5) and p.stddev > 2.6
    clipped = ClippedSum({"w": torch.zeros(numbers, dtype=dtype)}, 2.0)
    z = (
        release(clipped, p, p.noise_stream(), Ledger.open(None, p.hash), 0).gradients["w"].double()
        * p.expected_batch_size
    )
    assert two_sided(z, p.stddev) > 1e-9
    for wrong in (0.98, 1.02):
        assert two_sided(z, p.stddev * wrong) < 1e-9
    ks = stats.kstest((z[:: size(10, 100)] / p.stddev).numpy(), "norm").pvalue
    assert ks > 1e-9
    for bound in (4.0, 4.5):
        found = int((z.abs() > bound * p.stddev).sum())
        assert stats.binomtest(found, numbers, 2 * stats.norm.sf(bound)).pvalue > 1e-9
    # the last bits in steps of the grid are fair, each value as likely as the next
    if dtype == torch.float64:
        grid = grid_of(p.sensitivity, numbers, p.stddev)
        last = torch.remainder((z / grid).round(), 16).long()
        fair = stats.chisquare(torch.bincount(last, minlength=16).numpy()).pvalue
        assert fair > 1e-9 and lies_on_grid(z, grid)
        evidence(
            "floating point",
            "law of rounded noise",
            numbers=numbers,
            ks_p=ks,
            last_four_bits_p=fair,
            variance_p=two_sided(z, p.stddev),
            step_over_stddev=grid / p.stddev,
        )


# -- the attack on low bits ------------------------------------------------------------------------


def outputs(kind, dtype, x, trials, numbers=1):
    """Secure releases of `numbers` equal entries x, times the divisor `[trials, numbers]`; C = 1, σ
    = 1.
    """
    stream = NoiseStream.secure()
    tensors = {"w": torch.full((trials, numbers), x, dtype=dtype)}

    def normal(count, wanted):
        return torch.from_numpy(stream.normal(count, 0, str(wanted).removeprefix("torch.")))

    if kind == "gaussian":
        return gaussian_release(tensors, 1.0, 8.0, normal)["w"].double() * 8
    stated = widen_sensitivity(1.0)
    return rounded_release(tensors, stated, 8.0, normal, grid_of(stated, numbers))["w"].double() * 8


@pytest.mark.parametrize("dtype", FLOATS)
def test_low_bits_of_floating_point_noise_tell_two_sums_apart_and_those_of_rounded_noise_do_not(
    dtype, evidence
):
    """Around 0, 1 + z has the coarse spacing of floats near 1, and z alone has a finer one (Mironov
    2012).

    An output near 0 that no float near 1 can make is a proof that the sum was 0: an event of
    probability a fifth or more in one world and zero in the other, for a mechanism whose δ is 1e-5.
    On the grid the same outputs are as likely in both.
    """
    spacing = 2.0**-24 if dtype == torch.float32 else 2.0**-53  # of floats between 1/2 and 1
    trials = size(20_000, 500_000)

    def proof(y):
        """No number w with 1/2 <= |w| gives w + 1 = y."""
        steps = y / spacing
        return (y.abs() < 0.5) & (steps != steps.round())

    found = {
        (kind, x): float(proof(outputs(kind, dtype, x, trials)).double().mean())
        for kind in ("gaussian", "rounded")
        for x in (0.0, 1.0)
    }
    assert found["gaussian", 0.0] > 0.15 and found["gaussian", 1.0] == 0
    assert found["rounded", 0.0] == found["rounded", 1.0] == 0
    # the same question asked of every low bit of rounded numbers: multiples of 2, 4, ... steps near
    # 0 in both worlds
    grid, tested = grid_of(widen_sensitivity(1.0), 1), []
    near = {
        x: y[y.abs() < 0.25] for x in (0.0, 1.0) for y in [outputs("rounded", dtype, x, trials)]
    }
    for bit in range(1, 10):
        even = [(y / grid / 2**bit) == (y / grid / 2**bit).round() for y in near.values()]
        tested.append(stats.fisher_exact([[int(x.sum()), int((~x).sum())] for x in even]).pvalue)
    assert min(tested) > 1e-8
    evidence(
        "floating point",
        f"low bits, {dtype}",
        outputs=trials,
        gaussian_proofs_share=found["gaussian", 0.0],
        gaussian_false_proofs_share=found["gaussian", 1.0],
        rounded_proofs_share=found["rounded", 0.0],
        rounded_bits_least_p=min(tested),
    )


def test_a_release_of_a_few_thousand_numbers_is_told_apart_with_certainty(evidence):
    """At σ = 1 the ideal mechanism leaves the best attacker an advantage of 0.38; floats give away
    nearly all of it.
    """
    numbers, trials = 4096, size(100, 1000)
    spacing = 2.0**-30  # of floats between 1/128 and 1/64, where z lies if 1/64 + z is near 0

    def advantage(kind):
        shown = []
        for x in (0.0, 1 / math.sqrt(numbers)):
            y = outputs(kind, torch.float32, x, trials, numbers)
            shown.append(
                ((y.abs() < 2.0**-9) & (y / spacing != (y / spacing).round()))
                .any(1)
                .double()
                .mean()
            )
        return float(shown[0] - shown[1])

    found = {kind: advantage(kind) for kind in ("gaussian", "rounded")}
    ideal = 2 * stats.norm.cdf(0.5) - 1
    assert found["gaussian"] > 0.9 > 2 * ideal and found["rounded"] == 0
    evidence(
        "floating point",
        "advantage of a low-bit attacker at sigma 1",
        numbers=numbers,
        trials=trials,
        ideal=ideal,
        **found,
    )


# -- plans -----------------------------------------------------------------------------------------


def plan_rounded_noise(noise=1.0, **settings):
    return PrivacyConfig(
        **{"expected_batch_size": 8, "steps": 4, "noise": "rounded", **settings}
    ).with_noise(noise, 1e-5, 1000)


@pytest.mark.parametrize(
    "settings", [{}, {"sampler": "fixed"}, {"clipping": "normalised"}, {"max_grad_norm": 0.03}]
)
def test_a_plan_accounts_for_the_rounding_and_keeps_its_event(settings):
    p = plan_rounded_noise(**settings)
    q = PrivacyConfig(**{"expected_batch_size": 8, "steps": 4, **settings}).with_noise(
        1.0, 1e-5, 1000
    )
    assert q.sensitivity < p.sensitivity <= q.sensitivity * (1 + 2.0**-20) * (1 + 1e-15)
    assert p.stddev == p.noise_multiplier * p.sensitivity
    assert p.event == q.event and p.epsilon() == q.epsilon() == epsilon(
        p.event, 4, 1e-5, p.accountant, p.neighbouring_relation
    )
    assert p.hash != q.hash and (p.noise, q.noise) == ("rounded", "gaussian")
    assert "noise" not in q.config.describe_mechanism(), "plans of earlier versions keep their hash"


def test_unknown_noise_is_refused():
    with pytest.raises(
        ValueError, match="noise must be one of gaussian, rounded, correlated, auto; got 'discrete'"
    ):
        PrivacyConfig(expected_batch_size=8, steps=4, noise="discrete")


# -- whole runs ------------------------------------------------------------------------------------

GEP_SETTINGS = {
    "preconditioner": GEP(probe=FeatureNoise(WIDTH), rank=3, probe_size=32),
    "clipping": "embedding_residual",
}


def small(kind="rounded", **settings):
    values = {"expected_batch_size": B, "steps": 6, "test_mode_seed": 5, "noise": kind, **settings}
    return PrivacyConfig(**values).with_noise(1.0, 1e-3, N)


RUNS = {
    "identity": {},
    "kfac": {"preconditioner": kfac()},
    "per layer": {"clipping": "per_layer"},
    "fixed size": {"sampler": "fixed"},
    "gep": GEP_SETTINGS,
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_releases_grid_points_and_charges_what_it_adds(settings, monkeypatch, tmp_path):
    """The divisor is a power of two and the model float64, so that what is released is on the grid
    over the divisor.
    """
    seen = []

    def release_and_note(clipped, p, *rest):
        found = release(clipped, p, *rest)
        numbers = sum(x.numel() for x in clipped.tensors.values())
        seen.append((found, grid_of(p.sensitivity, numbers, p.stddev)))
        return found

    monkeypatch.setattr("dpkfc.release_pipeline.release", release_and_note)
    p, model = small(**settings), net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
    assert len(seen) == p.steps
    assert all(
        lies_on_grid(x, grid / p.expected_batch_size)
        for found, grid in seen
        for x in found.gradients.values()
    )
    lines = verify(tmp_path / "ledger.jsonl").releases
    assert {(line["stddev"], line["sensitivity"]) for line in lines} == {(p.stddev, p.sensitivity)}
