"""Try to tell releases with a canary from releases without it, and bound μ from below.

The same batch is released many times under the secret noise stream, with a canary and without.
The score of a release is learned from its components along two sets of directions. The first is
the canary's own direction in every parameter group. The second is the same pattern, moved to
where the noise looks most like itself: noise that two places share cancels there. The inverse of
their covariance weighs the components. A quarter of the releases gives weights and threshold.
Errors on the others bound μ of the trade-off curve from below. A release without sampling may
have μ = 1 / noise_multiplier at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpkfc.audit.epsilon_bounds import gaussian_mu_lower
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress, Subject, ignore_progress
from dpkfc.audit.noise_samples import autocorrelate
from dpkfc.audit.noise_tests import standardize
from dpkfc.audit.replay import SEED, Units, first_units
from dpkfc.audit.step_canaries import Canaries
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.privacy.gaussian_pairs import gaussian_epsilon

ALPHA, RUNS, BATCH = 1e-3, 1500, 4
SCANNED = 24  # releases that are searched for repetition
LAGS = 2  # distances with most repetition
Samples = NDArray[np.float64]


@dataclass(frozen=True)
class DistinguishingTest:
    """The bound of the distinguishing test.

    Attributes:
        mu_lower: lower bound of μ, at confidence 1 − alpha.
        mu_claimed: 1 / noise_multiplier.
        delta: at which both are converted to ε.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
    """

    mu_lower: float
    mu_claimed: float
    delta: float
    runs: int
    alpha: float = ALPHA

    def finding(self) -> Finding:
        """Return one line for the table of an audit."""
        lower = 0.0
        if self.mu_lower:
            lower = gaussian_epsilon(1 / self.mu_lower, self.delta)
        claimed = gaussian_epsilon(1 / self.mu_claimed, self.delta)
        return Finding(
            check="two worlds",
            measured=f"μ ≥ {self.mu_lower:.3f} (ε ≥ {lower:.2f} of one release without sampling)",
            bound=f"μ ≤ {self.mu_claimed:.3f} (ε ≤ {claimed:.2f} of one release without sampling)",
            passed=self.mu_lower <= self.mu_claimed,
            detail=f"{self.runs:,} releases a world, learned score, "
            f"wrong with probability {self.alpha:g} at most",
        )


def distinguish_neighbors(
    subject: Subject,
    canaries: Canaries,
    *,
    runs: int,
    alpha: float = ALPHA,
    progress: Progress = ignore_progress,
) -> DistinguishingTest:
    """Release a batch with and without a canary, `runs` times each, and bound μ.

    The metric of one refresh is used throughout, and the weights are constant. The canary is the
    one that moves a release farthest. If neighbours differ by replacement, it replaces
    "loss × -1e4".

    Args:
        subject: what is audited.
        canaries: of `prepare_canaries`, or some of them.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
        progress: called with (releases done, of all).

    Raises:
        ValueError: no canary moves a release.
    """
    base = first_units(subject, BATCH)
    without = base
    if subject.plan.neighbouring_relation == REPLACE_ONE:
        without = [*base, subject.size + canaries.names.index("loss × -1e4")]
    number, pattern = _find_farthest(subject, canaries, base, without)
    with_it = [*base, subject.size + number]
    scanned = list(_release_samples(subject, canaries, [without] * SCANNED))
    lags = _find_lags(scanned)
    sizes = [p.numel() for p in subject.model().parameters() if p.requires_grad]
    directions = _make_directions(pattern, sizes, lags)
    scores = []
    for part, rows in enumerate((without, with_it)):
        components = []
        for sample in _release_samples(subject, canaries, [rows] * runs):
            components.append(directions @ sample)
            progress(part * runs + len(components), 2 * runs)
        scores.append(np.stack(components))
    one, other = scores
    first = runs // 4
    rest = runs - first
    weights, threshold = _learn_discriminant(one[:first], other[:first])
    false_positives = int(np.sum(one[first:] @ weights > threshold))
    false_negatives = int(np.sum(other[first:] @ weights <= threshold))
    mu = gaussian_mu_lower(false_positives, rest, false_negatives, rest, alpha)
    claimed = 1 / subject.plan.noise_multiplier
    return DistinguishingTest(mu, claimed, subject.plan.delta, runs, alpha)


def _find_farthest(
    subject: Subject, canaries: Canaries, base: Units, without: Units
) -> tuple[int, Samples]:
    """Return the canary that moves a release farthest under frozen noise, and the difference."""
    count = len(canaries.names)
    with_canary = [[*base, subject.size + number] for number in range(count)]
    ones = _release_samples(subject, canaries, [without] * count, seed=SEED)
    others = _release_samples(subject, canaries, with_canary, seed=SEED)
    best = 0
    pattern = np.zeros(0)
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        moved = np.nan_to_num(other - one)
        if np.linalg.norm(moved) > (1 + 1e-6) * np.linalg.norm(pattern):
            best = number
            pattern = moved
    if not pattern.any():
        raise ValueError(
            "no canary moves a release; check that the loss depends on the example, or give other"
            " canaries"
        )
    return best, pattern


def _release_samples(
    subject: Subject, canaries: Canaries, script: Sequence[Units], seed: int | None = None
) -> Iterator[Samples]:
    """Yield releases over the standard deviation of their noise, all at the same weights."""
    plan = subject.plan
    stddev = plan.stddev / plan.expected_batch_size
    for released in canaries.release_still(subject, script, seed):
        yield standardize(released, stddev)


def _find_lags(samples: Sequence[Samples]) -> Units:
    """Return the distances at which releases correlate with themselves most.

    Without a fault they are arbitrary.
    """
    centred = np.stack(samples) - np.mean(samples, 0)
    size = centred.shape[1]
    total = autocorrelate(centred)
    pairs = np.arange(size - 1, 0, -1)
    scores = np.abs(total[1:]) / np.sqrt(pairs)
    order = np.argsort(scores)[::-1]
    return [int(index) + 1 for index in order[:LAGS]]


def _make_directions(pattern: Samples, sizes: Units, lags: Sequence[int]) -> Samples:
    """Return unit vectors `[k, d]`.

    They hold the pattern in each group of parameters, and the pattern as far as it can be moved by
    a lag, in its place and moved.
    """
    d = pattern.size
    directions = []
    if sum(sizes) != d:
        sizes = [d]
    start = 0
    for size in sizes:
        directions.append(_restrict(pattern, slice(start, start + size)))
        start += size
    for lag in lags:
        beginning = _restrict(pattern, slice(0, d - lag))
        end = _restrict(pattern, slice(lag, d))
        directions += [beginning, np.roll(beginning, lag)]
        directions += [end, np.roll(end, -lag)]
    stacked = np.stack(directions)
    norms = np.linalg.norm(stacked, axis=1, keepdims=True)
    is_kept = norms[:, 0] > 1e-9 * norms.max()
    return stacked[is_kept] / norms[is_kept]


def _restrict(pattern: Samples, places: slice) -> Samples:
    """Return the pattern with zeros outside some places."""
    part = np.zeros(pattern.size)
    part[places] = pattern[places]
    return part


def _learn_discriminant(without: Samples, with_it: Samples) -> tuple[Samples, float]:
    """Return Fisher's linear discriminant `[k]`, and the middle between the two means."""
    covariances = np.cov(without.T) + np.cov(with_it.T)
    covariance = np.atleast_2d(covariances / 2)
    size = len(covariance)
    ridge = 1e-9 * np.trace(covariance) / size * np.eye(size)
    mean_without = without.mean(0)
    mean_with = with_it.mean(0)
    weights = np.linalg.solve(covariance + ridge, mean_with - mean_without)
    threshold = weights @ (mean_with + mean_without) / 2
    return weights, float(threshold)
