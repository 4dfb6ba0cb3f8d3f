"""The statistics of audits: bounds fail as rarely as they say and are not much looser, and known
values are met.
"""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpkfc.audit.epsilon_bounds import (
    best_threshold,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower,
    gaussian_mu_lower,
)
from dpkfc.audit.membership import auc, tpr_at_fpr
from dpkfc.audit.one_run import choose_quiet
from dpkfc.audit.one_run_bounds import (
    gaussian_run_mu,
    most_run_mu,
    one_run_epsilon,
    one_run_p_value,
)
from tests.audit.sizes import size

ALPHA, DELTA = 0.05, 1e-5
RUNS = size(600, 5000)
# The μ of the Gaussian mechanism that spends exactly (ε, 1e-5), the inverse of `gaussian_epsilon`.
GAUSSIAN_MU = {
    1: 0.26805112321128655,
    2: 0.5015516891696512,
    4: 0.9249308976669359,
    8: 1.6660305978457184,
}


def best_epsilon(without, with_):
    """A lower bound on ε: one half of the scores chooses the threshold, the other half gives the
    bound.
    """
    return epsilon_lower(*best_threshold(without, with_, DELTA, ALPHA)[1], DELTA, ALPHA)


def most_misses(runs, alpha):
    """Misses that a bound of level alpha exceeds with a probability of 1e-9 at most."""
    return int(binom.isf(1e-9, runs, alpha))


# -- rates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 60, 1000])
@pytest.mark.parametrize("p", [0.003, 0.2, 0.5, 0.97])
@pytest.mark.parametrize("alpha", [0.05, 1e-4])
def test_clopper_pearson_covers_every_rate(n, p, alpha):
    k = np.arange(n + 1)
    weight = binom.pmf(k, n, p)
    assert weight[clopper_pearson_upper(k, n, alpha) < p].sum() <= alpha * (1 + 1e-9)
    assert weight[clopper_pearson_lower(k, n, alpha) > p].sum() <= alpha * (1 + 1e-9)


def test_clopper_pearson_is_not_loose(evidence):
    k, rates = np.arange(10_001), np.linspace(0.05, 0.95, 37)
    upper = clopper_pearson_upper(k, 10_000, ALPHA)
    misses = [binom.pmf(k, 10_000, p)[upper < p].sum() for p in rates]
    assert min(misses) > 0.8 * ALPHA
    evidence(
        "bounds",
        "Clopper-Pearson, 10000 trials",
        alpha=ALPHA,
        least_miss=min(misses),
        most_miss=max(misses),
    )


@pytest.mark.parametrize(
    "k, n, alpha", [(3, 2, 0.1), (-1, 2, 0.1), (0, 0, 0.1), (1, 2, 0.0), (1, 2, 1.0)]
)
def test_counts_that_are_none_are_refused(k, n, alpha):
    for bound in (clopper_pearson_upper, clopper_pearson_lower):
        with pytest.raises(ValueError, match="must"):
            bound(k, n, alpha)


# -- two worlds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_the_bound_on_mu_covers_and_is_close(mu, evidence):
    rng, n = np.random.default_rng(1), 1000
    threshold = mu / 2
    fp, fn = (
        rng.binomial(n, norm.sf(threshold), RUNS),
        rng.binomial(n, norm.cdf(threshold - mu), RUNS),
    )
    bounds = np.array(
        [gaussian_mu_lower(int(a), n, int(b), n, ALPHA) for a, b in zip(fp, fn, strict=True)]
    )
    misses = int((bounds > mu).sum())
    assert misses <= most_misses(RUNS, ALPHA)
    assert bounds.mean() > mu - 5 / math.sqrt(n) / 0.6
    assert (bounds > max(0.0, mu - 0.45)).mean() > 0.95  # a claim that is too small is refuted
    evidence(
        "bounds",
        f"mu = {mu}, 1000 a world",
        runs=RUNS,
        alpha=ALPHA,
        misses=misses,
        mean_bound=bounds.mean(),
    )


def test_the_bound_on_epsilon_covers_when_the_threshold_is_chosen(evidence):
    """Randomised response, with noise that gives each score a place of its own."""
    rng, epsilon, n, runs = np.random.default_rng(2), 2.0, 600, size(200, 1000)
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))

    def respond(share):
        return (rng.random(n) < share) + 0.1 * rng.normal(size=n)

    bounds = np.array([best_epsilon(respond(1 - truth), respond(truth)) for _ in range(runs)])
    misses = int((bounds > epsilon).sum())
    assert misses <= most_misses(runs, ALPHA)
    assert bounds.mean() > 0.55 * epsilon
    evidence(
        "bounds",
        "epsilon = 2, threshold chosen",
        runs=runs,
        alpha=ALPHA,
        misses=misses,
        mean_bound=bounds.mean(),
    )


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_on_epsilon_covers_the_worst_mechanism(epsilon, evidence):
    rng, n, delta = np.random.default_rng(3), 1000, 0.01
    q = 1 / (1 + math.exp(epsilon))  # randomised response, and the truth with probability δ
    fp, fn = rng.binomial(n, (1 - delta) * q, RUNS), rng.binomial(n, (1 - delta) * q, RUNS)
    bounds = np.array(
        [epsilon_lower(int(a), n, int(b), n, delta, ALPHA) for a, b in zip(fp, fn, strict=True)]
    )
    misses = int((bounds > epsilon).sum())
    assert misses <= most_misses(RUNS, ALPHA)
    assert bounds.mean() > 0.75 * epsilon - 0.05
    evidence(
        "bounds",
        f"epsilon = {epsilon}, 1000 a world",
        runs=RUNS,
        alpha=ALPHA,
        misses=misses,
        mean=bounds.mean(),
    )


def test_the_threshold_is_chosen_on_one_half_and_judged_on_the_other():
    without, with_ = np.zeros(100), np.zeros(100)
    with_[::2] = 1.0  # the first half tells the worlds apart, the second does not
    threshold, (fp, n0, fn, n1) = best_threshold(without, with_, DELTA, ALPHA)
    assert (threshold, fp, n0, fn, n1) == (0.0, 0, 50, 50, 50)
    assert best_epsilon(without, with_) == 0.0
    assert best_threshold(without, np.ones(100), DELTA, ALPHA)[1] == (0, 50, 0, 50)


@pytest.mark.parametrize("scores", [[1.0], [0.0, math.nan], [0.0, math.inf]])
def test_scores_that_cannot_be_judged_are_refused(scores):
    with pytest.raises(ValueError, match="scores"):
        best_epsilon([0.0, 1.0], scores)


# -- one run ---------------------------------------------------------------------------------------


def reference_p_value(m, r, v, epsilon, delta):
    """The theorem written down term by term, with exact binomial coefficients."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    tails = [math.fsum(pmf[k:]) for k in range(r + 1)]
    slope = max(((tails[v - i] - tails[v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, tails[v] + 2 * m * delta * slope)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_the_p_value_of_one_run_is_that_of_the_theorem(delta):
    for m, r in ((100, 10), (100, 100), (1000, 60)):
        for v in range(0, r + 1, max(1, r // 7)):
            for epsilon in (0.0, 0.3, 2.0, 6.0):
                expected = reference_p_value(m, r, v, epsilon, delta)
                assert one_run_p_value(v, r, m, epsilon, delta) == pytest.approx(
                    expected, rel=1e-9, abs=1e-12
                )


def guesses_of_response(rng, epsilon, delta, r, runs):
    """Right guesses against randomised response of every coin, where all is told with probability
    δ.
    """
    right = rng.binomial(r, 1 / (1 + math.exp(-epsilon)), runs)
    return np.where(rng.random(runs) < delta, r, right)


@pytest.mark.parametrize("epsilon", GAUSSIAN_MU)
@pytest.mark.parametrize("canaries", [40, 5000])
def test_the_gaussian_bound_of_one_run_is_as_often_wrong_as_it_says(canaries, epsilon, evidence):
    """A run of the Gaussian mechanism that spends (ε, 1e-5) on each canary."""
    rng, mu = np.random.default_rng(5), GAUSSIAN_MU[epsilon]
    bounds = []
    for _ in range(RUNS):
        coins = rng.random(canaries) < 0.5
        scores = 7 * (rng.normal(size=canaries) + mu * coins) + 3
        bounds.append(gaussian_run_mu(scores, coins, ALPHA))
    misses = int((np.array(bounds) > mu).sum())
    assert ALPHA / 3 * RUNS < misses <= most_misses(RUNS, ALPHA)
    most = most_run_mu(mu, coins, ALPHA)
    if canaries == 5000:
        assert np.mean(bounds) == pytest.approx(most, rel=0.02) and most > 0.8 * mu
    evidence(
        "bounds",
        f"one run, Gaussian, {canaries} canaries, epsilon = {epsilon}",
        runs=RUNS,
        alpha=ALPHA,
        misses=misses,
        mean=float(np.mean(bounds)),
        truth=mu,
    )


@pytest.mark.parametrize("kept", [1.0, 0.8])
def test_the_bound_of_pairs_of_steps_is_as_often_wrong_as_it_says(kept, evidence):
    """Half of the canaries are judged; real examples disturb the others in every step."""
    rng, mu, rate, pairs, canaries = np.random.default_rng(7), 0.5, 0.1, 16, 60
    disturbed = np.where(np.arange(canaries) % 2, 9.0, 0.0)
    bounds, floors = [], []
    for _ in range(RUNS):
        coins = rng.random(canaries) < 0.5
        taken = rng.binomial(2, rate, (pairs, canaries)) * coins
        noise = kept * rng.normal(size=taken.shape) + disturbed * rng.normal(size=taken.shape)
        heard, shares = choose_quiet((taken * mu + noise).astype(np.float32), taken)
        bounds.append(gaussian_run_mu(heard, shares, ALPHA))
        floors.append(heard[shares == 0].std(ddof=1))
    misses = int((np.array(bounds) > mu / kept).sum())
    assert ALPHA / 3 * RUNS < misses <= most_misses(RUNS, ALPHA)
    assert np.mean(floors) == pytest.approx(kept, rel=0.05)
    evidence("bounds", f"one run, pairs of steps, noise × {kept}", runs=RUNS, misses=misses)


def test_a_mechanism_that_is_not_gaussian_may_break_the_gaussian_bound():
    """It reveals more about everybody in one of ten runs, and nothing in the others.

    No canary is worse off than under Gaussian noise of μ = 0.27, and the bound for every mechanism
    holds: `gaussian_run_mu` says which assumption it makes.
    """
    rng, m, right = np.random.default_rng(6), 4000, 0.61
    assert 0.1 * right < norm.cdf(norm.ppf(0.1 * (1 - right)) + GAUSSIAN_MU[1])
    coins = rng.random(m) < 0.5
    scores = np.where(rng.random(m) < right, coins, ~coins) + 1e-3 * rng.normal(size=m)
    assert gaussian_run_mu(scores, coins, ALPHA) > GAUSSIAN_MU[1]
    correct = int(((scores > 0.5) == coins).sum())
    assert one_run_epsilon(correct, m, m, DELTA, ALPHA) < 1


@pytest.mark.parametrize("epsilon, delta", [(1.0, 0.0), (4.0, 0.0), (2.0, 1e-5), (2.0, 0.01)])
def test_the_bound_of_one_run_covers_the_worst_mechanism(epsilon, delta, evidence):
    rng, r = np.random.default_rng(4), 400
    correct = guesses_of_response(rng, epsilon, delta, r, RUNS)
    bounds = {int(v): one_run_epsilon(int(v), r, r, delta, ALPHA) for v in np.unique(correct)}
    found = np.array([bounds[int(v)] for v in correct])
    misses = int((found > epsilon).sum())
    assert misses <= most_misses(RUNS, ALPHA)
    if delta < 0.01:
        assert misses > ALPHA / 5 * RUNS * (1 if delta == 0 else 0.3)  # nor much rarer than it says
        assert found.mean() > 0.8 * epsilon
    row = f"one run, epsilon = {epsilon}, delta = {delta}"
    evidence(
        "bounds",
        row,
        runs=RUNS,
        alpha=ALPHA,
        misses=misses,
        mean_bound=found.mean(),
        canaries=r,
        guesses=r,
    )


# ε of the Gaussian mechanism: bound that ideal canaries gave, with the best of several numbers of
# guesses
IDEAL = {1000: {1: 0.67, 2: 0.92, 4: 1.39, 8: 2.76}, 10_000: {1: 0.56, 2: 0.96, 4: 2.35, 8: 4.48}}


@pytest.mark.parametrize("epsilon", [1, 2, 4, 8])
@pytest.mark.parametrize("canaries", size([1000], [1000, 10_000]))
def test_ideal_canaries_buy_what_is_published(canaries, epsilon, evidence):
    rng, mu, found = np.random.default_rng(5), GAUSSIAN_MU[epsilon], []
    for _ in range(size(6, 20)):
        coins = rng.random(canaries) < 0.5
        order = np.argsort(rng.normal(size=canaries) + mu * coins)
        best = 0.0
        for k in np.unique(np.geomspace(2, canaries / 2, 12).astype(int)).tolist():
            right = int(coins[order[-k:]].sum() + (~coins[order[:k]]).sum())
            best = max(best, one_run_epsilon(right, 2 * k, canaries, DELTA, ALPHA))
        found.append(best)
    assert np.mean(found) == pytest.approx(IDEAL[canaries][epsilon], abs=0.7)
    assert np.mean(found) < epsilon
    evidence(
        "bounds",
        f"ideal canaries {canaries}, epsilon {epsilon}",
        mean_bound=float(np.mean(found)),
        runs=len(found),
    )


# -- membership ------------------------------------------------------------------------------------


def test_area_and_rates_of_known_scores():
    assert auc([0.0, 1.0], [2.0, 3.0]) == 1.0
    assert auc([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert auc([0.0, 2.0], [1.0, 3.0]) == 0.75
    without, with_ = np.arange(100.0), np.arange(50.0, 150.0)
    assert tpr_at_fpr(without, with_, 0.1) == (0.6, 89.0)
    assert tpr_at_fpr(without, with_, 0.0) == (0.5, 99.0)
    assert tpr_at_fpr(without, with_, 1.0) == (1.0, -math.inf)
    with pytest.raises(ValueError, match="fpr"):
        tpr_at_fpr(without, with_, 1.5)


@pytest.mark.parametrize("wrong", [(3, 2, 4, 1.0, 0.0), (1, 5, 4, 1.0, 0.0), (1, 2, 4, -1.0, 0.0)])
def test_counts_of_one_run_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="need"):
        one_run_p_value(*wrong)
    with pytest.raises(ValueError, match="at least one guess"):
        one_run_epsilon(0, 0, 4, DELTA, ALPHA)
