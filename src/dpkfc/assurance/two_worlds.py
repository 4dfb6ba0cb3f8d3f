"""Two worlds: how well does anything tell releases with one more example from releases without it?

The same batch is released many times under the secret noise stream, with a canary and without. The score of a release is
learned: its components along the canary's own direction in every parameter group, and along the same pattern moved to where
the noise looks most like itself (noise that is shared between places cancels there), weighed by the inverse of their
covariance. Weights and threshold are learned on a quarter of the releases; errors on the others bound μ of the trade-off
curve from below.
A release without sampling may have μ = 1 / noise_multiplier at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpkfc.assurance.bounds import gaussian_epsilon, gaussian_mu_lower
from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.noise_law import standardised
from dpkfc.assurance.replay import SEED, prepared_canaries
from dpkfc.assurance.subject import Subject, scripted, unmoved, watched
from dpkfc.assurance.verdict import Finding
from dpkfc.data.sampling import REPLACE_ONE

__all__ = ["ALPHA", "RUNS", "TwoWorlds", "two_worlds"]

ALPHA, RUNS, BATCH = 1e-3, 1500, 4
LOOKED, LAGS = 24, 2  # releases in which repetition is looked for; distances that are tried
Samples = NDArray[np.float64]


@dataclass(frozen=True)
class TwoWorlds:
    """What the scores say.

    Attributes:
        mu_lower: lower bound of μ, at confidence 1 − alpha.
        mu_claimed: 1 / noise_multiplier.
        delta: at which both are turned into ε.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
    """

    mu_lower: float
    mu_claimed: float
    delta: float
    runs: int
    alpha: float = ALPHA

    def finding(self) -> Finding:
        """As a line of the verdict."""
        lower, claimed = (gaussian_epsilon(mu, self.delta) for mu in (self.mu_lower, self.mu_claimed))
        return Finding(
            check="two worlds",
            measured=f"μ ≥ {self.mu_lower:.3f} (ε ≥ {lower:.2f} of one release without sampling)",
            bound=f"μ ≤ {self.mu_claimed:.3f} (ε ≤ {claimed:.2f} of one release without sampling)",
            passed=self.mu_lower <= self.mu_claimed,
            detail=f"{self.runs:,} releases a world, learned score, wrong with probability {self.alpha:g} at most",
        )


def two_worlds(
    subject: Subject,
    canaries: Canaries | None = None,
    *,
    runs: int = RUNS,
    alpha: float = ALPHA,
    progress: Callable[[int, int], None] | None = None,
) -> TwoWorlds:
    """Release a batch with and without a canary, `runs` times each, and bound μ.

    The metric of one refresh is used throughout, and the weights stay where they are.

    Args:
        subject: what is audited.
        canaries: by default all there are; the one that moves a release farthest is used, in the place of "loss × -1e4" where
            neighbours are examples replaced.
        runs: releases of each world.
        alpha: probability that the bound is wrong.
        progress: called with (releases done, of all).
    """
    canaries = canaries or prepared_canaries(subject)
    base = list(range(min(BATCH, max(1, subject.size // 2))))
    replaces = subject.plan.neighbouring_relation == REPLACE_ONE
    without = [*base, subject.size + canaries.names.index("loss × -1e4")] if replaces else base
    number, pattern = _farthest(subject, canaries, base, without)
    with_it = [*base, subject.size + number]
    views = _views(pattern, _groups(subject), _lags(list(_releases(subject, canaries, [without] * LOOKED))))
    scores = []
    for part, rows in enumerate((without, with_it)):
        found = []
        for k, z in enumerate(_releases(subject, canaries, [rows] * runs)):
            found.append(views @ z)
            if progress is not None:
                progress(part * runs + k + 1, 2 * runs)
        scores.append(np.stack(found))
    first = runs // 4
    direction, threshold = _learned(scores[0][:first], scores[1][:first])
    false_positives = int(np.sum(scores[0][first:] @ direction > threshold))
    false_negatives = int(np.sum(scores[1][first:] @ direction <= threshold))
    mu = gaussian_mu_lower(false_positives, runs - first, false_negatives, runs - first, alpha)
    return TwoWorlds(mu, 1 / subject.plan.noise_multiplier, subject.plan.delta, runs, alpha)


def _farthest(subject: Subject, canaries: Canaries, base: list[int], without: list[int]) -> tuple[int, Samples]:
    """The canary that moves a release farthest, and by what, under frozen noise."""
    others = [[*base, subject.size + number] for number in range(len(canaries.names))]
    worlds = [_releases(subject, canaries, script, seed=SEED) for script in ([without] * len(others), others)]
    best, pattern = 0, np.zeros(0)
    for number, (one, other) in enumerate(zip(*worlds, strict=True)):
        moved = np.nan_to_num(other - one)
        if not pattern.size or np.linalg.norm(moved) > (1 + 1e-6) * np.linalg.norm(pattern):
            best, pattern = number, moved
    return best, pattern


def _releases(
    subject: Subject, canaries: Canaries, script: Sequence[list[int]], seed: int | None = None
) -> Iterator[Samples]:
    """Releases over the standard deviation of their noise, all at the same weights."""
    plan = scripted(unmoved(subject.plan), script, subject.size + len(canaries.names), seed=seed)
    session, walk = watched(
        subject, plan, canaries.dataset(subject), units=canaries.units(subject), verify=False, still=True
    )
    loss = canaries.loss(subject)
    with session:
        for batch in session.batches():
            session.step(batch, loss)
            walk.handed.clear()
            yield standardised(session.take(), plan.stddev / plan.expected_batch_size)


def _groups(subject: Subject) -> list[int]:
    return [p.numel() for p in subject.model().parameters() if p.requires_grad]


def _lags(drawn: Sequence[Samples]) -> list[int]:
    """The distances at which releases correlate with themselves most; of honest noise any."""
    centred = np.stack(drawn) - np.mean(drawn, 0)
    size = centred.shape[1]
    length = 1 << (2 * size - 1).bit_length()
    total = np.fft.irfft(np.square(np.abs(np.fft.rfft(centred, length))).sum(0), length)[1:size]
    scores = np.abs(total) / np.sqrt(np.arange(size - 1, 0, -1))
    return [int(lag) + 1 for lag in np.argsort(scores)[::-1][:LAGS]]


def _views(pattern: Samples, sizes: list[int], lags: Sequence[int]) -> Samples:
    """Unit vectors `[k, d]`: the pattern in each group of parameters, and as far as it can be moved, in its place and moved."""
    d, found = pattern.size, []
    ends = np.cumsum(sizes) if sum(sizes) == d else np.array([d])
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = np.zeros(d)
        part[start:end] = pattern[start:end]
        found.append(part)
    for lag in lags:
        for kept, way in ((slice(0, d - lag), lag), (slice(lag, d), -lag)):
            part = np.zeros(d)
            part[kept] = pattern[kept]
            found += [part, np.roll(part, way)]
    lengths = [np.linalg.norm(x) for x in found]
    most = max(lengths)
    return np.stack([x / n for x, n in zip(found, lengths, strict=True) if n > 1e-9 * most])


def _learned(without: Samples, with_it: Samples) -> tuple[Samples, float]:
    """Fisher's linear discriminant `[k]` and the middle between the two means."""
    covariance = np.atleast_2d((np.cov(without.T) + np.cov(with_it.T)) / 2)
    ridge = 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    direction = np.linalg.solve(covariance + ridge, with_it.mean(0) - without.mean(0))
    return direction, float(direction @ (with_it.mean(0) + without.mean(0)) / 2)
