"""Lower bounds on ε that follow from the success of an attack.

Every bound holds with probability 1 − α over the audit's own randomness, for every distribution
of the scores. All are one-sided from below: a value above the claimed ε contradicts the claim, a
value below it proves nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import beta, binom, norm

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_CANDIDATES = 400  # most thresholds to choose from
_SCAN = 64  # values of ε before the crossing is refined


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
    return float(_bound_mu(false_positives, n0, false_negatives, n1, alpha))


def _bound_mu(fp: ArrayLike, n0: int, fn: ArrayLike, n1: int, alpha: float) -> Floats:
    fpr = clopper_pearson_upper(fp, n0, alpha / 2)
    fnr = clopper_pearson_upper(fn, n1, alpha / 2)
    return np.maximum(norm.isf(fpr) - norm.ppf(fnr), 0.0)


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
    scores_without: ArrayLike, scores_with: ArrayLike, alpha: float, delta: float | None = None
) -> tuple[float, tuple[int, int, int, int]]:
    """Choose a threshold on every second score, and count its errors on the others.

    Args:
        scores_without: scores without the canary `[n0]`.
        scores_with: scores with the canary `[n1]`; larger ones speak for "with".
        alpha: level of the bound that the choice maximises.
        delta: None maximises the bound on μ, a number maximises that on ε at δ.

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
    if delta is None:
        bounds = _bound_mu(fp, n0, fn, n1, alpha)
    else:
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


def one_run_p_value(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Return the most probability that (ε, δ)-DP allows for so many correct guesses.

    Each of m canaries was included by its own fair coin. An attack guessed r coins, v of them
    correctly. With the tail f(v) = P[Binomial(r, e^ε / (1 + e^ε)) >= v] the p-value is
    f(v) + 2mδ · max_i (f(v − i) − f(v)) / i.

    Args:
        correct: v.
        guesses: r, chosen before the coins were seen.
        canaries: m.
        epsilon: ε >= 0 of the hypothesis.
        delta: δ of the hypothesis.

    Raises:
        ValueError: inconsistent counts, or ε or δ outside their ranges.

    Source:
        Steinke et al. (2023), theorem 5.2.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"need 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}"
        )
    if not (epsilon >= 0 and 0 <= delta < 1):
        raise ValueError(f"need epsilon >= 0 and delta in [0, 1), got {epsilon} and {delta}")
    accuracy = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return tail
    below = np.arange(correct - 1, -1, -1)
    # P[v − i <= Binomial < v] for i = 1, 2, …
    between = np.cumsum(binom.pmf(below, guesses, accuracy))
    steepest = float(np.max(between / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * steepest)


def one_run_epsilon(
    correct: int,
    guesses: int,
    canaries: int,
    delta: float,
    alpha: float,
) -> float:
    """Return a lower bound on ε at δ from one training run.

    The bound is the first ε that `one_run_p_value` does not reject at level α.

    Args:
        correct: v, right guesses.
        guesses: r, fixed in advance; if several are tried, divide α by their number.
        canaries: m, all that had a coin.
        delta: δ.
        alpha: probability that the bound is wrong.

    Returns:
        The bound, at least 0.

    Raises:
        ValueError: as `one_run_p_value`; α outside (0, 1).
    """
    if guesses < 1:
        raise ValueError("at least one guess is needed")
    if one_run_p_value(correct, guesses, canaries, 0.0, delta) > alpha:
        return 0.0
    # The bound for δ = 0 is never smaller.
    most = float(logit(clopper_pearson_lower(correct, guesses, alpha)))
    if delta == 0:
        return max(most, 0.0)

    def excess(epsilon: float) -> float:
        return one_run_p_value(correct, guesses, canaries, epsilon, delta) - alpha

    # The p-value grows with ε if 2mδ <= 1. Otherwise only the values below the first crossing are
    # all rejected.
    candidates = np.linspace(0.0, most, 2 if 2 * canaries * delta <= 1 else _SCAN)
    for i, epsilon in enumerate(candidates):
        if excess(float(epsilon)) > 0:
            return float(brentq(excess, candidates[i - 1], epsilon, xtol=1e-9))
    return most


def gaussian_run_mu(scores: ArrayLike, shares: ArrayLike, alpha: float) -> float:
    """Return a lower bound on μ of Gaussian privacy from one training run.

    A score is its canary's share of what was released and Gaussian noise. The slope of the straight
    line through the scores, in standard deviations, has the law of Student's t about μ.

    Args:
        scores: of the canaries `[n]`; larger ones speak for "in".
        shares: how often each canary took part `[n]`: coins, or the numbers of a few steps.
        alpha: probability that the bound is wrong.

    Returns:
        The bound, at least 0; infinite if scores do not vary.

    Guarantee:
        It holds if the scores are independent Gaussians given the shares, as they are where the
        canaries' gradients are orthogonal and the releases have Gaussian noise. A mechanism whose
        releases depend on each other may break it; `one_run_epsilon` holds for every mechanism.

    Raises:
        ValueError: shares that are all equal, a score that is not finite, α outside (0, 1).

    Source:
        The limits of a noncentral t by the normal approximation of Johnson and Welch (1940).
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")
    values = check_scores(scores)
    size, freedom = _measure_design(shares)
    weights = np.asarray(shares, float)
    weights = weights - weights.mean()
    slope = float(weights @ values) / size**2
    squares = ((values - values.mean() - slope * weights) ** 2).sum()
    if squares == 0:
        return float("inf") if slope > 0 else 0.0
    t = size * slope / np.sqrt(squares / freedom)
    spread = np.sqrt(1 + t * t / (2 * freedom))
    bound = t * (1 - 1 / (4 * freedom)) + norm.ppf(alpha) * spread
    return float(max(bound / size, 0.0))


def most_run_mu(mu: float, shares: ArrayLike, alpha: float) -> float:
    """Return what `gaussian_run_mu` gives on average where every canary is heard as μ allows."""
    size, freedom = _measure_design(shares)
    spread = np.sqrt(1 + (size * mu) ** 2 / (2 * freedom))
    return float(max(mu + norm.ppf(alpha) * spread / size, 0.0))


def _measure_design(shares: ArrayLike) -> tuple[float, int]:
    """Return the root of the sum of squares of shares about their mean, and degrees of freedom."""
    values = np.asarray(shares, float)
    size = float(np.sqrt(((values - values.mean()) ** 2).sum())) if len(values) > 2 else 0.0
    if size == 0:
        raise ValueError("canaries must differ in how often they took part: use more of them")
    return size, len(values) - 2
