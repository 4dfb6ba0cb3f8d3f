"""Lower bounds on ε and μ from one training run with canaries, each included by a fair coin.

Every bound holds with probability 1 − α over coins and noise, and is one-sided: a value below the
claimed ε proves nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import binom, norm

from dpkfc.audit.epsilon_bounds import check_scores, clopper_pearson_lower

_SCAN = 64  # values of ε before the crossing is refined


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
    most = max(float(logit(clopper_pearson_lower(correct, guesses, alpha))), 0.0)
    if delta == 0:
        return most

    def excess(epsilon: float) -> float:
        return one_run_p_value(correct, guesses, canaries, epsilon, delta) - alpha

    # The p-value grows with ε if 2mδ <= 1. Otherwise only the values below the first crossing are
    # all rejected.
    grows = 2 * canaries * delta <= 1
    rejected = 0.0
    for candidate in np.linspace(0.0, most, 2 if grows else _SCAN).tolist():
        if excess(candidate) > 0:
            return float(brentq(excess, rejected, candidate, xtol=1e-9))
        rejected = candidate
    return most


def gaussian_run_mu(scores: ArrayLike, shares: ArrayLike, alpha: float) -> float:
    """Return a lower bound on μ of Gaussian privacy from one training run.

    A score is its canary's share of what was released and Gaussian noise:

        score_i = a + b · share_i + σ · noise_i,    μ = b / σ

    With S² = Σ (share_i − mean)², the estimate of b over its standard error has the noncentral t
    distribution with n − 2 degrees of freedom about S μ.

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
    deviations = np.asarray(shares, float)
    deviations = deviations - deviations.mean()
    slope = float(deviations @ values) / size**2
    residuals = values - values.mean() - slope * deviations
    squares = float((residuals**2).sum())
    if squares == 0:
        return float("inf") if slope > 0 else 0.0
    noise = np.sqrt(squares / freedom)
    t = size * slope / noise
    spread = _spread_of_t(t, freedom)
    bound = t * (1 - 1 / (4 * freedom)) + norm.ppf(alpha) * spread
    return float(max(bound / size, 0.0))


def _spread_of_t(t: float, freedom: int) -> float:
    """Return about the standard deviation of a noncentral t (Johnson and Welch 1940)."""
    return float(np.sqrt(1 + t * t / (2 * freedom)))


def most_run_mu(mu: float, shares: ArrayLike, alpha: float) -> float:
    """Return what `gaussian_run_mu` gives on average where every canary is heard as μ allows."""
    size, freedom = _measure_design(shares)
    spread = _spread_of_t(size * mu, freedom)
    return float(max(mu + norm.ppf(alpha) * spread / size, 0.0))


def _measure_design(shares: ArrayLike) -> tuple[float, int]:
    """Return S, the root of the squares of shares about their mean, and degrees of freedom."""
    values = np.asarray(shares, float)
    size = float(np.linalg.norm(values - values.mean()))
    if len(values) <= 2 or size == 0:
        raise ValueError("canaries must differ in how often they took part: use more of them")
    return size, len(values) - 2
