"""An audit of a whole training in one run (Steinke, Nasr and Jagielski 2023): m canaries, each in or out by a coin of its own.

The run is the user's: plan, model, optimizer, loss and the session that ships. Afterwards the canaries are ranked by a
score, the top called "in" and the bottom "out", and the number of right guesses bounds ε from below. Two kinds:

    planted      chosen gradients in one layer, scored by what the releases hold of them: the strongest that one run allows
    mislabelled  examples with a random label, scored by how far their loss fell: the weakest, for an outsider's view

The model that comes out has been trained with canaries in it: audit with a copy, not with the model that is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr, logit
from scipy.stats import beta, binom, norm, rankdata
from torch import Tensor, nn

from dpkfc.audit.canaries import Impulses
from dpkfc.audit.harness import NOBODY, Finding, PlantedLoss, on_examples
from dpkfc.config import Plan
from dpkfc.linalg.metric import Metric
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session

# --------------------------------------------------------------------------------------------------
# Statistics of audits: how much ε a mechanism must have, given how well its outcomes tell two
# worlds apart.
#
# Every bound holds with probability 1 − α over the audit's own randomness and needs no model of the
# scores. All are one-sided from below: a value above the claimed ε contradicts the claim, a value
# below it proves nothing.

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


# --------------------------------------------------------------------------------------------------
# Membership inference by a threshold on the loss: the weakest line of an audit, and the one that
# needs a trained model only.
#
# Members of the training set are called so where their loss is small. What such a guess achieves is
# what an outsider can do with losses alone; it says little about what a stronger adversary could,
# so it may contradict a claim and never confirm one.

FPRS = (0.01, 0.001)
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Share of members that are found where few others are taken for one.

    Attributes:
        fpr: most false positives that were allowed.
        tpr: share of members found.
        low, high: two-sided interval of it at the confidence of the audit (Clopper and Pearson).
        fpr_high: upper end of the interval of the false positive rate itself, one-sided at the same confidence.
    """

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What the losses of a model tell about membership.

    Attributes:
        members, non_members: examples of each kind.
        auc: area under the ROC curve; 0.5 is guessing.
        rates: at small false positive rates.
        epsilon_lower: lower bound on ε at δ; the threshold was chosen on one half of the losses and judged on the other.
        confidence: of the bound and the intervals.
        claimed_epsilon: ε of the plan, None where nothing is claimed.
        delta: δ of the bound.
        seconds: time taken.
        passed: whether the bound does not exceed the claim.
    """

    members: int
    non_members: int
    auc: float
    rates: tuple[Rate, ...]
    epsilon_lower: float
    confidence: float
    claimed_epsilon: float | None
    delta: float
    seconds: float
    passed: bool

    def describe(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self) | {"rates": [asdict(rate) for rate in self.rates]}

    def finding(self) -> Finding:
        """One line for the table of an audit."""
        claim = "nothing is claimed" if self.claimed_epsilon is None else f"at most {self.claimed_epsilon:.3g}"
        found = ", ".join(f"{100 * r.tpr:.2g} % at {100 * r.fpr:g} % FPR" for r in self.rates)
        return Finding(
            check="membership by loss",
            measured=f"ε >= {self.epsilon_lower:.3g} ({100 * self.confidence:g} %)",
            bound=claim,
            passed=self.passed,
            detail=f"{self.members} members, {self.non_members} others; AUC {self.auc:.3f}; found {found}",
        )


def membership(  # noqa: PLR0913 - the last three are options
    model: nn.Module,
    loss_fn: LossFn,
    members: Sequence[Tensor],
    non_members: Sequence[Tensor],
    *,
    delta: float,
    claimed_epsilon: float | None = None,
    confidence: float = 0.95,
    batch_size: int = 256,
) -> Membership:
    """Loss-threshold membership inference (Yeom et al. 2018) on a trained model.

    Args:
        model: trained; looked at in evaluation mode, and left in the mode it was in.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        members: the training set, or an equally distributed part of it: tensors with a common first axis.
        non_members: held-out examples of the same distribution that no decision about the training looked at.
        delta: δ of the bound.
        claimed_epsilon: ε of the plan.
        confidence: of the bound and the intervals.
        batch_size: examples that are evaluated at once.

    Guarantee:
        As `membership_of_losses`. The result is computed from private examples without noise: it is for whoever may see
        them, and not for publication beside the model.

    Raises:
        ValueError: as `membership_of_losses`.
    """
    started = time.perf_counter()
    of_members = losses_of(model, loss_fn, members, batch_size)
    of_others = losses_of(model, loss_fn, non_members, batch_size)
    return membership_of_losses(
        of_members, of_others, delta=delta, claimed_epsilon=claimed_epsilon, confidence=confidence, started=started
    )


def membership_of_losses(
    members: ArrayLike,
    non_members: ArrayLike,
    *,
    delta: float,
    claimed_epsilon: float | None = None,
    confidence: float = 0.95,
    started: float | None = None,
) -> Membership:
    """The same from losses that are at hand.

    Args:
        members: one loss each.
        non_members: one loss each.
        delta: δ of the bound.
        claimed_epsilon: ε of the plan.
        confidence: of the bound and the intervals.
        started: of the clock, where the losses were computed as part of the audit.

    Guarantee:
        The intervals hold for this model, whose members and others are samples of two populations. As a bound on ε it takes
        the guesses for independent, as is customary; within one model they are so only nearly. The bound without that
        assumption is that of `one_run`, whose canaries have coins of their own.

    Raises:
        ValueError: fewer than four losses of a kind, losses that are not finite, δ outside [0, 1), a confidence outside
            (0, 1).
    """
    started = time.perf_counter() if started is None else started
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    within, without = (-np.asarray(losses, float).ravel() for losses in (members, non_members))
    if min(len(within), len(without)) < 4:
        raise ValueError(f"at least four losses of a kind are needed, got {len(within)} and {len(without)}")
    alpha = 1 - confidence
    _, errors = best_threshold(without, within, alpha, delta)
    bound = epsilon_lower(*errors, delta, alpha)
    return Membership(
        members=len(within),
        non_members=len(without),
        auc=auc(without, within),
        rates=tuple(_rate(without, within, fpr, alpha) for fpr in FPRS),
        epsilon_lower=bound,
        confidence=confidence,
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        seconds=time.perf_counter() - started,
        passed=claimed_epsilon is None or bound <= claimed_epsilon,
    )


def _rate(without: NDArray[np.float64], within: NDArray[np.float64], fpr: float, alpha: float) -> Rate:
    tpr, threshold = tpr_at_fpr(without, within, fpr)
    found, n = int((within > threshold).sum()), len(within)
    return Rate(
        fpr=fpr,
        tpr=tpr,
        low=float(clopper_pearson_lower(found, n, alpha / 2)),
        high=float(clopper_pearson_upper(found, n, alpha / 2)),
        fpr_high=float(clopper_pearson_upper(int((without > threshold).sum()), len(without), alpha)),
    )


@torch.no_grad()
def losses_of(model: nn.Module, loss_fn: LossFn, examples: Sequence[Tensor], batch_size: int = 256) -> NDArray[np.float64]:
    """One loss an example, in evaluation mode `[n]`; the modes of all modules are put back.

    Args:
        model: on the device where it is to run.
        loss_fn: as for a session.
        examples: tensors with a common first axis; moved to the model's device batch by batch.
        batch_size: examples at once.
    """
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    try:
        parts = [
            loss_fn(model, tuple(x[i : i + batch_size].to(device) for x in examples)).double().cpu()
            for i in range(0, len(examples[0]), batch_size)
        ]
    finally:
        for module, training in modes.items():
            module.training = training
    return torch.cat(parts).numpy()


# --------------------------------------------------------------------------------------------------

KINDS = ("planted", "mislabelled")
SHARES = (0.1, 0.4, 0.8)  # of the canaries that are guessed: fixed in advance, α divided among them
FEWEST = 20


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """What one audited run showed.

    Attributes:
        kind: of canaries.
        canaries: m, all that had a coin.
        included: how many of them were in.
        guesses: number of guesses, of those tried, that gave the largest bound.
        correct: right ones among them.
        epsilon_lower: lower bound on ε at δ.
        confidence: of the bound, all numbers of guesses that were tried taken together.
        claimed_epsilon: ε that the run promises.
        delta: δ of both.
        steps: releases.
        seconds: time of the audit, the training in it included and the calibration of the plan left out.
        passed: whether the bound does not exceed the claim.
        layer: where gradients were planted, "" for the other kind.
    """

    kind: str
    canaries: int
    included: int
    guesses: int
    correct: int
    epsilon_lower: float
    confidence: float
    claimed_epsilon: float
    delta: float
    steps: int
    seconds: float
    passed: bool
    layer: str = ""

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def finding(self) -> Finding:
        """One line for the table of an audit."""
        where = f" in '{self.layer}'" if self.layer else ""
        return Finding(
            check=f"one run, {self.kind} canaries",
            measured=f"ε >= {self.epsilon_lower:.3g} ({100 * self.confidence:g} %)",
            bound=f"at most {self.claimed_epsilon:.3g}",
            passed=self.passed,
            detail=f"{self.canaries} canaries{where}, {self.included} of them in; {self.correct} of {self.guesses} guesses "
            f"right after {self.steps} releases, in {self.seconds:.0f} s",
        )


class _Canaries(Protocol):
    """What the run needs of either kind."""

    loss: PlantedLoss
    dataset: tuple[Tensor, ...]

    @property
    def layer(self) -> str: ...
    def before_step(self, step: int) -> None: ...
    def hear(self, released: Released, metric: Metric) -> None: ...
    def scores(self) -> NDArray[np.float64]: ...


def one_run(  # noqa: PLR0913 - what a session takes, and options
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Sequence[Tensor],
    loss_fn: LossFn,
    *,
    canaries: int = 1000,
    kind: str = "planted",
    layer: str | None = None,
    labels: int = -1,
    confidence: float = 0.95,
    claimed_epsilon: float | None = None,
    augment: Callable[[Any], Any] | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OneRun:
    """Train once with canaries and bound ε from below.

    Args:
        plan: of the run on `dataset`. For planted canaries one row a canary is added: see `audited_plan`, which is applied.
        model: trained by this call.
        optimizer: over its parameters.
        dataset: tensors with a common first axis.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        canaries: m; a thousand certify about half of a small ε.
        kind: "planted" or "mislabelled".
        layer: path of the layer in which gradients are planted; None takes the largest that allows it.
        labels: which tensor of the dataset holds the labels, for mislabelled canaries.
        confidence: of the bound.
        claimed_epsilon: what is promised; None takes ε of the plan.
        augment: of the session.
        seed: of coins and canaries; None takes them from the operating system, as an audit that counts must.
        progress: told the steps done and their number.

    Guarantee:
        If the training is (ε, δ)-DP for examples added or removed (or replaced), the bound exceeds ε with a probability of
        at most 1 − confidence, whatever the model and the scores are.

    Raises:
        ValueError: an unknown kind, too few canaries, a plan that does not fit the dataset or protects a larger unit than
            an example, labels that are none, no layer in which a gradient can be planted.
    """
    _check(plan, kind, canaries, confidence)
    tensors, rng = tuple(dataset), np.random.default_rng(seed)
    plan = audited_plan(plan, len(tensors[0]), canaries) if kind == "planted" else plan
    started, coins = time.perf_counter(), rng.random(canaries) < 0.5
    chosen: _Canaries = (
        Impulses(plan, model, tensors, loss_fn, coins, rng, layer)
        if kind == "planted"
        else _Mislabelled(model, tensors, loss_fn, coins, rng, labels)
    )
    _train(_Heard(plan, model, optimizer, chosen, augment=on_examples(augment)), chosen, progress)
    bound, guesses, correct = _guess(chosen.scores(), coins, plan.delta, 1 - confidence)
    seconds = time.perf_counter() - started
    claimed = plan.curve.at(plan.steps) if claimed_epsilon is None else claimed_epsilon
    return OneRun(
        kind=kind,
        canaries=canaries,
        included=int(coins.sum()),
        guesses=guesses,
        correct=correct,
        epsilon_lower=bound,
        confidence=confidence,
        claimed_epsilon=claimed,
        delta=plan.delta,
        steps=plan.steps,
        seconds=seconds,
        passed=bound <= claimed,
        layer=chosen.layer,
    )


def audited_plan(plan: Plan, size: int, canaries: int) -> Plan:
    """The plan of the same settings for a dataset with canaries added: calibrated anew for the same ε, or of the same noise.

    Args:
        plan: of the run on `size` examples; one for `size + canaries` is returned as it is.
        size: examples N.
        canaries: m.

    Raises:
        ValueError: a plan for another number of examples.
    """
    whole = size + canaries
    if plan.dataset_size == whole:
        return plan
    if plan.dataset_size != size:
        raise ValueError(
            f"the plan is for {plan.dataset_size} examples, the dataset has {size}; make it for {size}, or for {whole} with "
            "the canaries counted"
        )
    if plan.target_epsilon is None:
        return plan.config.with_noise(plan.noise_multiplier, plan.delta, whole)
    return plan.config.calibrate(plan.target_epsilon, plan.delta, whole)


def _check(plan: Plan, kind: str, canaries: int, confidence: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if canaries < FEWEST:
        raise ValueError(f"an audit in one run needs at least {FEWEST} canaries, a thousand to say much; got {canaries}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    if plan.config.max_records_per_unit is not None:
        raise ValueError(
            f"this plan protects one {plan.config.unit}; canaries of one run are single examples. Audit its step with replay, "
            "or the same settings with unit='example'"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError("audit in one process: each process would throw coins of its own")


def _guess(scores: NDArray[np.float64], coins: NDArray[np.bool_], delta: float, alpha: float) -> tuple[float, int, int]:
    """The best bound over the numbers of guesses fixed in advance: (ε, guesses, right ones)."""
    order, m = np.argsort(scores, kind="stable"), len(coins)
    found = []
    for share in SHARES:
        k = int(share * m) // 2
        correct = int(coins[order[m - k :]].sum() + (~coins[order[:k]]).sum())
        found.append((one_run_epsilon(correct, 2 * k, m, delta, alpha / len(SHARES)), 2 * k, correct))
    return max(found)


class _Heard(Session):
    """The session that ships, whose releases are heard."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Any, heard_by: _Canaries, **options: Any) -> None:
        super().__init__(plan, model, optimizer, heard_by.dataset, **options)
        self._hear = heard_by.hear

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        self._hear(released, self._pipeline.metric)
        return released


def _train(session: Session, chosen: _Canaries, progress: Callable[[int, int], None] | None) -> None:
    with session:
        for batch in session.batches():
            chosen.before_step(batch.step)
            session.step(batch, chosen.loss)
            if progress is not None:
                progress(session.steps_done, session.plan.steps)


class _Mislabelled:
    """Examples of the dataset whose label is drawn anew, uniformly; each counts or not by its coin.

    Args:
        model: before its first step.
        dataset: the examples `[N]`; m of them, chosen at random, become canaries in place.
        loss_fn: of the user.
        coins: which canaries are in `[m]`.
        rng: chooses canaries and labels.
        labels: which tensor holds the labels.

    Raises:
        ValueError: labels that are no class numbers, or fewer examples than canaries.
    """

    layer = ""

    def __init__(  # noqa: PLR0917
        self,
        model: nn.Module,
        dataset: tuple[Tensor, ...],
        loss_fn: LossFn,
        coins: NDArray[np.bool_],
        rng: np.random.Generator,
        labels: int,
    ) -> None:
        size, m = len(dataset[0]), len(coins)
        truth = dataset[labels]
        if truth.ndim != 1 or truth.is_floating_point() or truth.dtype == torch.bool:
            raise ValueError(
                f"mislabelled canaries need one class number an example; tensor {labels} of the dataset has the shape "
                f"{tuple(truth.shape)} and the type {truth.dtype}. Say which with `labels`, or use kind='planted'"
            )
        if m > size:
            raise ValueError(f"{m} canaries are more than the {size} examples; choose fewer, or kind='planted'")
        rows = torch.from_numpy(rng.choice(size, m, replace=False)).to(truth.device)
        classes = truth.unique()
        drawn = classes[torch.from_numpy(rng.integers(0, len(classes), m)).to(truth.device)]
        columns = list(dataset)
        columns[labels] = truth.index_put((rows,), drawn)
        ids = torch.full((size,), NOBODY, device=truth.device).index_put((rows,), torch.arange(m, device=truth.device))
        self.dataset = (*columns, ids)
        self.loss = PlantedLoss(loss_fn, torch.from_numpy(coins.astype(np.float64)))
        self._model, self._loss_fn = model, loss_fn
        self._examples = tuple(x[rows.to(x.device)] for x in columns)
        self._before = losses_of(model, loss_fn, self._examples)

    def before_step(self, step: int) -> None:
        """Nothing changes from step to step."""

    def hear(self, released: Released, metric: Metric) -> None:
        """Releases are not looked at: an outsider sees the model alone."""

    def scores(self) -> NDArray[np.float64]:
        """How far each canary's loss fell `[m]`."""
        return np.nan_to_num(self._before - losses_of(self._model, self._loss_fn, self._examples))
