"""Lower bounds on μ and ε from the errors of a test that tells two worlds apart.

Every bound holds with probability 1 − α over the audit's own randomness, for every distribution
of the scores. All are one-sided from below: a value above the claimed ε contradicts the claim, a
value below it proves nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, norm

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_CANDIDATES = 400  # most thresholds to choose from


def clopper_pearson_upper(successes: ArrayLike, trials: ArrayLike, alpha: float) -> Floats:
    """Return the upper end of the one-sided exact interval of a binomial rate; broadcasts.

    Source:
        Clopper and Pearson (1934).

    Raises:
        ValueError: invalid counts, or α outside (0, 1).
    """
    k, n = _check_counts(successes, trials, alpha)
    return np.where(k >= n, 1.0, beta.ppf(1 - alpha, k + 1, np.maximum(n - k, 1)))


def clopper_pearson_lower(successes: ArrayLike, trials: ArrayLike, alpha: float) -> Floats:
    """Return the lower end of the one-sided exact interval of a binomial rate; broadcasts.

    Raises:
        ValueError: invalid counts, or α outside (0, 1).
    """
    k, n = _check_counts(successes, trials, alpha)
    return np.where(k <= 0, 0.0, beta.ppf(alpha, np.maximum(k, 1), n - k + 1))


def _check_counts(successes: ArrayLike, trials: ArrayLike, alpha: float) -> tuple[Floats, Floats]:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")
    k = np.asarray(successes, float)
    n = np.asarray(trials, float)
    if np.any(n < 1) or np.any(k < 0) or np.any(k > n):
        raise ValueError(
            "counts must satisfy 0 <= successes <= trials and trials >= 1, "
            f"got {successes!r} of {trials!r}"
        )
    return k, n


def gaussian_mu_lower(
    false_positives: int, n0: int, false_negatives: int, n1: int, alpha: float
) -> float:
    """Return a lower bound on μ of a mechanism that is claimed to be μ-GDP.

    Both error rates are bounded from above at α/2. A μ-GDP mechanism allows no test with
    Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) > μ.

    Args:
        false_positives: runs without the canary that were called "with".
        n0: runs without.
        false_negatives: runs with the canary that were called "without".
        n1: runs with.
        alpha: probability that the bound is wrong. The threshold must not depend on these runs.

    Returns:
        The bound, at least 0.

    Source:
        Nasr et al. (2023), section 5; Dong, Roth and Su (2022).
    """
    fpr = clopper_pearson_upper(false_positives, n0, alpha / 2)
    fnr = clopper_pearson_upper(false_negatives, n1, alpha / 2)
    return max(float(norm.isf(fpr) - norm.ppf(fnr)), 0.0)


def epsilon_lower(  # noqa: PLR0917 - four counts in the order of a confusion table
    false_positives: int, n0: int, false_negatives: int, n1: int, delta: float, alpha: float
) -> float:
    """Return a lower bound on ε at δ from the errors of a test between two worlds.

    (ε, δ)-DP demands TPR <= e^ε FPR + δ, and the same with the worlds exchanged. Both rates are
    bounded at α/2.

    Args:
        false_positives: runs without the canary that were called "with".
        n0: runs without.
        false_negatives: runs with the canary that were called "without".
        n1: runs with.
        delta: δ.
        alpha: probability that the bound is wrong. The threshold must not depend on these runs.

    Returns:
        The bound, at least 0.

    Raises:
        ValueError: invalid counts, δ outside [0, 1), α outside (0, 1).

    Source:
        Kairouz et al. (2015); Jagielski et al. (2020).

    Example:
        >>> round(epsilon_lower(3, 100, 4, 100, delta=1e-5, alpha=0.05), 2)
        2.36
    """
    return float(_bound_epsilon(false_positives, n0, false_negatives, n1, delta, alpha))


def _bound_epsilon(  # noqa: PLR0917
    fp: ArrayLike, n0: int, fn: ArrayLike, n1: int, delta: float, alpha: float
) -> Floats:
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta}")
    fpr = clopper_pearson_upper(fp, n0, alpha / 2)
    fnr = clopper_pearson_upper(fn, n1, alpha / 2)
    with_ratio = np.maximum(1 - fnr - delta, 0) / fpr
    without_ratio = np.maximum(1 - fpr - delta, 0) / fnr
    return np.log(np.maximum(np.maximum(with_ratio, without_ratio), 1.0))


def best_threshold(
    scores_without: ArrayLike, scores_with: ArrayLike, delta: float, alpha: float
) -> tuple[float, tuple[int, int, int, int]]:
    """Choose a threshold on every second score, and count its errors on the others.

    Args:
        scores_without: scores without the canary `[n0]`.
        scores_with: scores with the canary `[n1]`; larger ones speak for "with".
        delta: δ of `epsilon_lower`, which the choice maximises.
        alpha: level of that bound.

    Returns:
        The threshold, above which a score is called "with", and (false positives, n0, false
        negatives, n1) of the second half.

    Raises:
        ValueError: fewer than two scores of a world, or a score that is not finite.
    """
    without = check_scores(scores_without)
    with_ = check_scores(scores_with)
    chosen_without, judged_without = without[::2], without[1::2]
    chosen_with, judged_with = with_[::2], with_[1::2]
    values = np.unique(np.concatenate([chosen_without, chosen_with]))
    indices = np.linspace(0, len(values) - 1, _CANDIDATES).round().astype(int)
    candidates = values[np.unique(indices)]
    n0, n1 = len(chosen_without), len(chosen_with)
    fp, fn = _count_errors(chosen_without, chosen_with, candidates)
    bounds = _bound_epsilon(fp, n0, fn, n1, delta, alpha)
    threshold = float(candidates[int(np.argmax(bounds))])
    fp, fn = _count_errors(judged_without, judged_with, np.array([threshold]))
    return threshold, (int(fp[0]), len(judged_without), int(fn[0]), len(judged_with))


def check_scores(scores: ArrayLike) -> Floats:
    """Return scores as a vector of at least two numbers."""
    values = np.asarray(scores, float).ravel()
    if len(values) < 2:
        raise ValueError(f"at least two scores are needed, got {len(values)}")
    if not np.isfinite(values).all():
        raise ValueError(f"{(~np.isfinite(values)).sum()} of {len(values)} scores are not finite")
    return values


def _count_errors(without: Floats, with_: Floats, thresholds: Floats) -> tuple[Integers, Integers]:
    """Count false positives and false negatives, if scores above a threshold are called "with"."""
    below_without = np.searchsorted(np.sort(without), thresholds, side="right")
    below_with = np.searchsorted(np.sort(with_), thresholds, side="right")
    return len(without) - below_without, below_with
