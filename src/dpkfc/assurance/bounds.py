"""Statistics of audits: how much ε a mechanism must have, given how well its outcomes tell two worlds apart.

Every bound holds with probability 1 − α over the audit's own randomness and needs no model of the scores. All are one-sided
from below: a value above the claimed ε contradicts the claim, a value below it proves nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr, logit
from scipy.stats import beta, binom, norm, rankdata

__all__ = [
    "auc",
    "best_gaussian_mu",
    "best_threshold",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "epsilon_lower",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "gaussian_mu_lower",
    "one_run_epsilon",
    "one_run_p_value",
    "tpr_at_fpr",
]

_CANDIDATES = 400  # most thresholds that are tried on the first half of the scores
_SCAN = 64  # values of ε looked at before the crossing is narrowed down

# -- rates -------------------------------------------------------------------------------------------------------------


def clopper_pearson_upper(successes: ArrayLike, trials: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Upper end of the one-sided exact interval of a binomial rate (Clopper and Pearson 1934); broadcasts.

    Raises:
        ValueError: counts that are none, or α outside (0, 1).
    """
    k, n = _counts(successes, trials, alpha)
    return np.where(k >= n, 1.0, beta.ppf(1 - alpha, k + 1, np.maximum(n - k, 1)))


def clopper_pearson_lower(successes: ArrayLike, trials: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Lower end of the one-sided exact interval of a binomial rate; broadcasts.

    Raises:
        ValueError: counts that are none, or α outside (0, 1).
    """
    k, n = _counts(successes, trials, alpha)
    return np.where(k <= 0, 0.0, beta.ppf(alpha, np.maximum(k, 1), n - k + 1))


def _counts(successes: ArrayLike, trials: ArrayLike, alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")
    k, n = np.asarray(successes, float), np.asarray(trials, float)
    if np.any(n < 1) or np.any(k < 0) or np.any(k > n):
        raise ValueError(f"counts must satisfy 0 <= successes <= trials and trials >= 1, got {successes!r} of {trials!r}")
    return k, n


# -- the Gaussian mechanism ----------------------------------------------------------------------------------------------


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of a μ-GDP mechanism: Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018, theorem 8)."""
    if mu <= 0:
        return 0.0
    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(-np.exp(first) * np.expm1(min(second - first, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε at δ of a μ-GDP mechanism, such as one Gaussian release of noise multiplier 1 / μ; exact.

    Raises:
        ValueError: δ outside (0, 1), or μ that is not finite.
    """
    _check_delta(delta)
    if not math.isfinite(mu):
        raise ValueError(f"mu must be finite, got {mu}")
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    most = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, most, xtol=1e-12, rtol=1e-13))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The μ of the Gaussian mechanism that spends exactly (ε, δ): the inverse of `gaussian_epsilon`.

    Raises:
        ValueError: δ outside (0, 1), or a negative or infinite ε.
    """
    _check_delta(delta)
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be finite and >= 0, got {epsilon}")
    most = 1.0
    while gaussian_delta(most, epsilon) < delta:
        most *= 2
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 0.0, most, xtol=1e-13, rtol=1e-13))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")


# -- two worlds ----------------------------------------------------------------------------------------------------------


def gaussian_mu_lower(false_positives: int, n0: int, false_negatives: int, n1: int, alpha: float) -> float:
    """Lower bound on μ of a mechanism that is claimed to be μ-GDP (Nasr et al. 2023, section 5; Dong, Roth and Su 2022).

    Both error rates are bounded from above at α/2; a μ-GDP mechanism allows no test with Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) > μ.

    Args:
        false_positives: runs of the world without the canary that were called "with".
        n0: runs without.
        false_negatives: runs of the world with it that were called "without".
        n1: runs with.
        alpha: probability that the bound is wrong. The threshold must not have been chosen on these very runs.

    Returns:
        The bound, at least 0.
    """
    return float(_mu_of(np.asarray(false_positives), n0, np.asarray(false_negatives), n1, alpha))


def _mu_of(fp: NDArray[np.int64], n0: int, fn: NDArray[np.int64], n1: int, alpha: float) -> NDArray[np.float64]:
    fpr, fnr = clopper_pearson_upper(fp, n0, alpha / 2), clopper_pearson_upper(fn, n1, alpha / 2)
    return np.maximum(norm.isf(fpr) - norm.ppf(fnr), 0.0)


def epsilon_lower(  # noqa: PLR0917 - four counts in the order of a confusion table
    false_positives: int, n0: int, false_negatives: int, n1: int, delta: float, alpha: float
) -> float:
    """Lower bound on ε at δ from the errors of a test between two worlds (Kairouz et al. 2015; Jagielski et al. 2020).

    (ε, δ)-DP demands TPR <= e^ε FPR + δ and the same with the worlds exchanged; both rates are bounded at α/2.

    Returns:
        The bound, at least 0.

    Raises:
        ValueError: counts that are none, δ outside [0, 1), α outside (0, 1).
    """
    return float(_epsilon_of(np.asarray(false_positives), n0, np.asarray(false_negatives), n1, delta, alpha))


def _epsilon_of(  # noqa: PLR0917
    fp: NDArray[np.int64], n0: int, fn: NDArray[np.int64], n1: int, delta: float, alpha: float
) -> NDArray[np.float64]:
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta}")
    fpr, fnr = clopper_pearson_upper(fp, n0, alpha / 2), clopper_pearson_upper(fn, n1, alpha / 2)
    ratios = np.maximum(np.maximum(1 - fnr - delta, 0) / fpr, np.maximum(1 - fpr - delta, 0) / fnr)
    return np.log(np.maximum(ratios, 1.0))


def best_threshold(
    scores_without: ArrayLike, scores_with: ArrayLike, alpha: float, delta: float | None = None
) -> tuple[float, tuple[int, int, int, int]]:
    """A threshold chosen on one half of the scores (every second one), and the errors it makes on the other half.

    Args:
        scores_without: scores of the world without the canary `[n0]`.
        scores_with: scores of the world with it `[n1]`; larger ones speak for "with".
        alpha: level of the bound that the choice maximises.
        delta: None maximises the bound on μ, a number that on ε at δ.

    Returns:
        The threshold ("with" is said of scores above it) and (false positives, n0, false negatives, n1) of the other half.

    Raises:
        ValueError: fewer than two scores of a world, or a score that is not finite.
    """
    without, with_ = _scores(scores_without), _scores(scores_with)
    first = np.unique(np.concatenate([without[::2], with_[::2]]))
    tried = first[np.unique(np.linspace(0, len(first) - 1, _CANDIDATES).round().astype(int))]
    n0, n1 = len(without[::2]), len(with_[::2])
    fp, fn = _errors(without[::2], with_[::2], tried)
    bounds = _mu_of(fp, n0, fn, n1, alpha) if delta is None else _epsilon_of(fp, n0, fn, n1, delta, alpha)
    threshold = float(tried[int(np.argmax(bounds))])
    held_without, held_with = without[1::2], with_[1::2]
    errors = _errors(held_without, held_with, np.array([threshold]))
    return threshold, (int(errors[0][0]), len(held_without), int(errors[1][0]), len(held_with))


def best_gaussian_mu(scores_without: ArrayLike, scores_with: ArrayLike, alpha: float) -> float:
    """Lower bound on μ from scores of two worlds: the threshold from one half of them, the bound from the other half.

    Args and errors as for `best_threshold`; the scores of a world are independent runs.
    """
    return gaussian_mu_lower(*best_threshold(scores_without, scores_with, alpha)[1], alpha)


def _scores(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, float).ravel()
    if len(values) < 2:
        raise ValueError(f"at least two scores are needed, got {len(values)}")
    if not np.isfinite(values).all():
        raise ValueError(f"{(~np.isfinite(values)).sum()} of {len(values)} scores are not finite")
    return values


def _errors(without: NDArray[np.float64], with_: NDArray[np.float64], thresholds: NDArray[np.float64]) -> tuple:
    """False positives and false negatives where "with" is said of scores above the threshold."""
    positives = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    return positives, np.searchsorted(np.sort(with_), thresholds, side="right")


# -- one run -------------------------------------------------------------------------------------------------------------


def one_run_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Most probability that an (ε, δ)-DP mechanism gives to so many correct guesses (Steinke et al. 2023, theorem 5.2).

    Each of m canaries was included by a fair coin of its own; r coins were guessed, v of them rightly. With the tail
    f(v) = P[Binomial(r, e^ε / (1 + e^ε)) >= v] the p-value is f(v) + 2mδ · max_i (f(v − i) − f(v)) / i.

    Args:
        correct: v.
        guesses: r, chosen before the coins were seen.
        canaries: m.
        epsilon: ε >= 0 of the hypothesis.
        delta: δ of the hypothesis.

    Raises:
        ValueError: counts that do not go together, or ε or δ outside their ranges.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"need 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}")
    if not (epsilon >= 0 and 0 <= delta < 1):
        raise ValueError(f"need epsilon >= 0 and delta in [0, 1), got {epsilon} and {delta}")
    accuracy = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return tail
    below = np.arange(correct - 1, -1, -1)
    between = np.cumsum(binom.pmf(below, guesses, accuracy))  # P[v − i <= Binomial < v] for i = 1, 2, …
    return min(1.0, tail + 2 * canaries * delta * float(np.max(between / np.arange(1, correct + 1))))


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float, alpha: float) -> float:
    """Lower bound on ε at δ from one training run: the first ε that `one_run_p_value` does not reject at level α.

    Args:
        correct: v, right guesses.
        guesses: r, fixed in advance; where several are tried, divide α by their number.
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
    most = float(logit(clopper_pearson_lower(correct, guesses, alpha)))  # the bound for δ = 0, which is never smaller
    if delta == 0:
        return max(most, 0.0)

    def excess(epsilon: float) -> float:
        return one_run_p_value(correct, guesses, canaries, epsilon, delta) - alpha

    # The p-value grows with ε where 2mδ <= 1. Beyond that only what lies below the first crossing is rejected throughout.
    tried = np.linspace(0.0, most, 2 if 2 * canaries * delta <= 1 else _SCAN)
    first = next((i for i, epsilon in enumerate(tried) if excess(float(epsilon)) > 0), None)
    return most if first is None else float(brentq(excess, tried[first - 1], tried[first], xtol=1e-9))


# -- membership ----------------------------------------------------------------------------------------------------------


def auc(scores_without: ArrayLike, scores_with: ArrayLike) -> float:
    """Area under the ROC curve: probability that a score "with" is larger than one "without", ties counted half."""
    without, with_ = _scores(scores_without), _scores(scores_with)
    ranks = rankdata(np.concatenate([without, with_]))
    above = ranks[len(without) :].sum() - len(with_) * (len(with_) + 1) / 2
    return float(above / (len(without) * len(with_)))


def tpr_at_fpr(scores_without: ArrayLike, scores_with: ArrayLike, fpr: float) -> tuple[float, float]:
    """True positive rate at the smallest threshold whose false positive rate is at most `fpr`, and that threshold.

    Raises:
        ValueError: a rate outside [0, 1], scores as for `best_threshold`.
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must be in [0, 1], got {fpr}")
    without, with_ = np.sort(_scores(scores_without)), _scores(scores_with)
    allowed = math.floor(fpr * len(without) + 1e-9)
    threshold = -math.inf if allowed >= len(without) else float(without[len(without) - 1 - allowed])
    return float((with_ > threshold).mean()), threshold
