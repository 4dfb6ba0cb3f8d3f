"""Attacks on a training, and the lower bounds on ε that follow from their success.

`audit_one_run` trains once with m canaries, each included by a coin (Steinke, Nasr and Jagielski
2023). A score ranks the canaries. The top is guessed "in", the bottom "out", and the number of
right guesses bounds ε from below. There are two kinds of canaries:

    planted      chosen gradients in one layer, scored by the releases: the strongest in one run
    mislabelled  examples with a random label, scored by how far their loss fell: the weakest

The run is the user's: plan, model, optimizer, loss and the session that ships. The resulting model
was trained with canaries: audit a copy, not the model that is kept.

`infer_membership` needs a trained model only. It guesses that examples with a small loss are
members of the training set. A stronger adversary may achieve more, so the attack may contradict a
claim and never confirm one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import beta, binom, mannwhitneyu, norm
from torch import Tensor, nn

from dpkfc.audit.canaries import PlantedCanaries, RunCanaries
from dpkfc.audit.harness import (
    NO_CANARY,
    Finding,
    LossFn,
    PlantedLoss,
    Progress,
    augment_with_ids,
)
from dpkfc.config import Plan
from dpkfc.distributed.context import DistributedContext
from dpkfc.gradients.state import evaluation_mode
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# -- bounds ----------------------------------------------------------------------------------------
#
# Every bound holds with probability 1 − α over the audit's own randomness, for every distribution
# of the scores. All are one-sided from below: a value above the claimed ε contradicts the claim, a
# value below it proves nothing.

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
    without = _check_scores(scores_without)
    with_ = _check_scores(scores_with)
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


def _check_scores(scores: ArrayLike) -> Floats:
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


def auc(scores_without: ArrayLike, scores_with: ArrayLike) -> float:
    """Return the area under the ROC curve.

    The area is the probability that a score "with" is larger than one "without", ties counted half.
    """
    without, with_ = _check_scores(scores_without), _check_scores(scores_with)
    above = mannwhitneyu(with_, without).statistic
    return float(above / (len(without) * len(with_)))


def tpr_at_fpr(
    scores_without: ArrayLike, scores_with: ArrayLike, fpr: float
) -> tuple[float, float]:
    """Return the true positive rate at a false positive rate of at most `fpr`.

    Returns:
        The rate, and the smallest threshold that allows it.

    Raises:
        ValueError: a rate outside [0, 1], scores as for `best_threshold`.
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must be in [0, 1], got {fpr}")
    without, with_ = np.sort(_check_scores(scores_without)), _check_scores(scores_with)
    allowed = math.floor(fpr * len(without) + 1e-9)
    threshold = -math.inf
    if allowed < len(without):
        threshold = float(without[len(without) - 1 - allowed])
    return float((with_ > threshold).mean()), threshold


# -- membership inference by a threshold on the loss -----------------------------------------------

FPRS = (0.01, 0.001)


@dataclass(frozen=True, kw_only=True)
class DetectionRate:
    """Fraction of members that are detected at a small false positive rate.

    Attributes:
        fpr: most false positives that were allowed.
        tpr: fraction of members detected.
        low, high: two-sided interval of `tpr` at the confidence of the audit (Clopper and Pearson).
        fpr_high: one-sided upper end of the false positive rate at the same confidence.
    """

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """The success of membership inference on the losses of a model.

    Attributes:
        members, non_members: examples of each kind.
        auc: area under the ROC curve; 0.5 is guessing.
        rates: at small false positive rates.
        epsilon_lower: lower bound on ε at δ. One half of the losses chose the threshold, the other
            half gave the bound.
        confidence: of the bound and the intervals.
        claimed_epsilon: ε of the plan, None without a claim.
        delta: δ of the bound.
        seconds: duration.
        passed: whether the bound does not exceed the claim.
    """

    members: int
    non_members: int
    auc: float
    rates: tuple[DetectionRate, ...]
    epsilon_lower: float
    confidence: float
    claimed_epsilon: float | None
    delta: float
    seconds: float
    passed: bool

    def describe(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self) | {"rates": [asdict(rate) for rate in self.rates]}

    def finding(self) -> Finding:
        """Return one line for the table of an audit."""
        claim = "nothing is claimed"
        if self.claimed_epsilon is not None:
            claim = f"at most {self.claimed_epsilon:.3g}"
        rates = [f"{100 * r.tpr:.2g} % at {100 * r.fpr:g} % FPR" for r in self.rates]
        return Finding(
            check="membership by loss",
            measured=f"ε >= {self.epsilon_lower:.3g} ({100 * self.confidence:g} %)",
            bound=claim,
            passed=self.passed,
            detail=f"{self.members} members, {self.non_members} others; AUC {self.auc:.3f}; "
            f"found {', '.join(rates)}",
        )


def infer_membership(  # noqa: PLR0913 - the last three are options
    model: nn.Module,
    loss_fn: LossFn,
    members: Sequence[Tensor],
    non_members: Sequence[Tensor],
    *,
    delta: float,
    claimed_epsilon: float | None = None,
    confidence: float = 0.95,
    batch_size: int = 256,
) -> MembershipResult:
    """Attack a trained model by a threshold on the loss (Yeom et al. 2018).

    Args:
        model: trained; it is used in evaluation mode, and its modes are restored.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        members: the training set, or an equally distributed part of it: tensors with a common first
            axis.
        non_members: held-out examples of the same distribution, which no decision about the
            training has used.
        delta: δ of the bound.
        claimed_epsilon: ε of the plan.
        confidence: of the bound and the intervals.
        batch_size: examples that are evaluated at once.

    Guarantee:
        As `infer_membership_from_losses`. The result is computed from private examples without
        noise: do not publish it next to the model.

    Raises:
        ValueError: as `infer_membership_from_losses`.

    Example:
        >>> result = infer_membership(model, loss_fn, train, held_out, delta=1e-5)
        >>> print(result.auc, result.epsilon_lower)
    """
    started = time.perf_counter()
    result = infer_membership_from_losses(
        compute_losses(model, loss_fn, members, batch_size),
        compute_losses(model, loss_fn, non_members, batch_size),
        delta=delta,
        claimed_epsilon=claimed_epsilon,
        confidence=confidence,
    )
    return replace(result, seconds=time.perf_counter() - started)


def infer_membership_from_losses(
    members: ArrayLike,
    non_members: ArrayLike,
    *,
    delta: float,
    claimed_epsilon: float | None = None,
    confidence: float = 0.95,
) -> MembershipResult:
    """Attack a model by a threshold on given losses.

    Args:
        members: one loss each.
        non_members: one loss each.
        delta: δ of the bound.
        claimed_epsilon: ε of the plan.
        confidence: of the bound and the intervals.

    Guarantee:
        The intervals hold for this model, whose members and others are samples of two populations.
        The bound on ε assumes independent guesses, as is customary. Within one model they are only
        nearly independent. `audit_one_run` needs no such assumption: its canaries have own coins.

    Raises:
        ValueError: fewer than four losses of a kind, losses that are not finite, δ outside [0, 1),
            a confidence outside (0, 1).
    """
    started = time.perf_counter()
    _check_confidence(confidence)
    # A small loss speaks for membership, so it gets a large score.
    member_scores = -np.asarray(members, float).ravel()
    other_scores = -np.asarray(non_members, float).ravel()
    if min(len(member_scores), len(other_scores)) < 4:
        raise ValueError(
            "at least four losses of a kind are needed, "
            f"got {len(member_scores)} and {len(other_scores)}"
        )
    alpha = 1 - confidence
    _, errors = best_threshold(other_scores, member_scores, alpha, delta)
    bound = epsilon_lower(*errors, delta, alpha)
    return MembershipResult(
        members=len(member_scores),
        non_members=len(other_scores),
        auc=auc(other_scores, member_scores),
        rates=tuple(_detection_rate(other_scores, member_scores, fpr, alpha) for fpr in FPRS),
        epsilon_lower=bound,
        confidence=confidence,
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        seconds=time.perf_counter() - started,
        passed=claimed_epsilon is None or bound <= claimed_epsilon,
    )


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")


def _detection_rate(
    other_scores: Floats, member_scores: Floats, fpr: float, alpha: float
) -> DetectionRate:
    tpr, threshold = tpr_at_fpr(other_scores, member_scores, fpr)
    detected, members = int((member_scores > threshold).sum()), len(member_scores)
    false_positives = int((other_scores > threshold).sum())
    return DetectionRate(
        fpr=fpr,
        tpr=tpr,
        low=float(clopper_pearson_lower(detected, members, alpha / 2)),
        high=float(clopper_pearson_upper(detected, members, alpha / 2)),
        fpr_high=float(clopper_pearson_upper(false_positives, len(other_scores), alpha)),
    )


@torch.no_grad()
def compute_losses(
    model: nn.Module, loss_fn: LossFn, examples: Sequence[Tensor], batch_size: int = 256
) -> Floats:
    """Compute one loss an example in evaluation mode `[n]`, and restore the modes of all modules.

    Args:
        model: on the device where it is to run.
        loss_fn: as for a session.
        examples: tensors with a common first axis; each batch moves to the model's device.
        batch_size: examples at once.
    """
    device = next(model.parameters()).device
    losses = []
    with evaluation_mode(model):
        for start in range(0, len(examples[0]), batch_size):
            batch = tuple(x[start : start + batch_size].to(device) for x in examples)
            losses.append(loss_fn(model, batch).double().cpu())
    return torch.cat(losses).numpy()


# -- the audit in one run --------------------------------------------------------------------------

KINDS = ("planted", "mislabelled")
# Fractions of the canaries that are guessed. They are fixed in advance and share α.
FRACTIONS = (0.1, 0.4, 0.8)
FEWEST = 20  # canaries


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of one audited run.

    Attributes:
        kind: of canaries.
        canaries: m, all that had a coin.
        included: how many of them were in.
        guesses: number of guesses, of those tried, that gave the largest bound.
        correct: right guesses among them.
        epsilon_lower: lower bound on ε at δ.
        confidence: of the bound, over all numbers of guesses that were tried.
        claimed_epsilon: ε that the run promises.
        delta: δ of both.
        steps: releases.
        seconds: duration with the training, without the calibration of the plan.
        passed: whether the bound does not exceed the claim.
        layer: with the planted gradients, "" for the other kind.
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
        """Return plain values."""
        return asdict(self)

    def finding(self) -> Finding:
        """Return one line for the table of an audit."""
        where = f" in '{self.layer}'" if self.layer else ""
        return Finding(
            check=f"one run, {self.kind} canaries",
            measured=f"ε >= {self.epsilon_lower:.3g} ({100 * self.confidence:g} %)",
            bound=f"at most {self.claimed_epsilon:.3g}",
            passed=self.passed,
            detail=f"{self.canaries} canaries{where}, {self.included} of them in; "
            f"{self.correct} of {self.guesses} guesses right after {self.steps} releases, "
            f"in {self.seconds:.0f} s",
        )


def audit_one_run(  # noqa: PLR0913 - what a session takes, and options
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
    progress: Progress | None = None,
) -> OneRunResult:
    """Train once with canaries and bound ε from below.

    Args:
        plan: of the run on `dataset`. For planted canaries `plan_for_canaries` adds one row each.
        model: trained by this call.
        optimizer: over its parameters.
        dataset: tensors with a common first axis.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        canaries: m; a thousand certify about half of a small ε.
        kind: "planted" or "mislabelled".
        layer: path of the layer with planted gradients; None takes the largest that allows it.
        labels: which tensor of the dataset holds the labels, for mislabelled canaries.
        confidence: of the bound.
        claimed_epsilon: what is promised; None takes ε of the plan.
        augment: of the session.
        seed: of coins and canaries; None takes them from the operating system, as a valid audit
            must.
        progress: called with (steps done, of all).

    Guarantee:
        If the training is (ε, δ)-DP for examples added or removed (or replaced), the bound exceeds
        ε with a probability of at most 1 − confidence, for every model and every score.

    Raises:
        ValueError: an unknown kind, too few canaries, a plan that does not fit the dataset or
            protects a larger unit than an example, labels that are not class numbers, or no layer
            in which a gradient can be planted.

    Example:
        >>> copied = copy.deepcopy(model)
        >>> optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        >>> result = audit_one_run(plan, copied, optimizer, (x, y), loss_fn)
        >>> print(result.epsilon_lower, result.claimed_epsilon)
    """
    _check_settings(plan, kind, canaries, confidence)
    tensors = tuple(dataset)
    rng = np.random.default_rng(seed)
    if kind == "planted":
        plan = plan_for_canaries(plan, len(tensors[0]), canaries)
    started = time.perf_counter()
    coins = rng.random(canaries) < 0.5
    planted: RunCanaries
    if kind == "planted":
        planted = PlantedCanaries(plan, model, tensors, loss_fn, coins, rng, layer)
    else:
        planted = _MislabelledCanaries(model, tensors, loss_fn, coins, rng, labels)
    session = _ObservedSession(plan, model, optimizer, planted, augment=augment_with_ids(augment))
    with session:
        for batch in session.batches():
            planted.start_step(batch.step)
            session.step(batch, planted.loss)
            if progress is not None:
                progress(session.steps_done, plan.steps)
    bound, guesses, correct = _guess(planted.scores(), coins, plan.delta, 1 - confidence)
    seconds = time.perf_counter() - started
    claimed = plan.curve.epsilon(plan.steps) if claimed_epsilon is None else claimed_epsilon
    return OneRunResult(
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
        layer=planted.layer,
    )


def plan_for_canaries(plan: Plan, size: int, canaries: int) -> Plan:
    """Return the plan of the same settings for a dataset with canaries added.

    The plan is calibrated anew for the same ε, or has the same noise.

    Args:
        plan: of the run on `size` examples; one for `size + canaries` is returned unchanged.
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
            f"the plan is for {plan.dataset_size} examples, the dataset has {size}: make the plan "
            f"for {size}, or for {whole} with the canaries"
        )
    if plan.target_epsilon is None:
        return plan.config.with_noise(plan.noise_multiplier, plan.delta, whole)
    return plan.config.calibrate(plan.target_epsilon, plan.delta, whole)


def _check_settings(plan: Plan, kind: str, canaries: int, confidence: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if canaries < FEWEST:
        raise ValueError(f"an audit in one run needs at least {FEWEST} canaries, got {canaries}")
    _check_confidence(confidence)
    if plan.config.max_records_per_unit is not None:
        raise ValueError(
            f"the plan protects one {plan.config.unit}, the canaries are single examples: use "
            "audit_step, or unit='example'"
        )
    if DistributedContext.current().world_size > 1:
        raise ValueError("each process would toss its own coins: audit in one process")


def _guess(
    scores: Floats, coins: NDArray[np.bool_], delta: float, alpha: float
) -> tuple[float, int, int]:
    """Return the best bound over the fixed numbers of guesses: (ε, guesses, right ones)."""
    order, m = np.argsort(scores, kind="stable"), len(coins)
    results = []
    for fraction in FRACTIONS:
        k = int(fraction * m) // 2
        correct = int(coins[order[m - k :]].sum() + (~coins[order[:k]]).sum())
        bound = one_run_epsilon(correct, 2 * k, m, delta, alpha / len(FRACTIONS))
        results.append((bound, 2 * k, correct))
    return max(results)


class _ObservedSession(Session):
    """The session that ships, with an observer of its releases."""

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: Any, observer: RunCanaries, **options: Any
    ) -> None:
        super().__init__(plan, model, optimizer, observer.dataset, **options)
        self._observe = observer.observe

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        self._observe(released, self._pipeline.preconditioning.metric)
        return released


class _MislabelledCanaries(RunCanaries):
    """Examples of the dataset with a new uniform label; each counts or not by its coin.

    Args:
        model: before its first step.
        dataset: the examples `[N]`; m of them, chosen at random, become canaries in place.
        loss_fn: of the user.
        coins: which canaries are in `[m]`.
        rng: chooses canaries and labels.
        labels: which tensor holds the labels.

    Raises:
        ValueError: labels that are not class numbers, or fewer examples than canaries.
    """

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
                f"tensor {labels} {tuple(truth.shape)} of {truth.dtype} is not one class number an "
                "example: set `labels`, or use kind='planted'"
            )
        if m > size:
            raise ValueError(
                f"{m} canaries are more than the {size} examples: use fewer, or kind='planted'"
            )
        device = truth.device
        rows = torch.from_numpy(rng.choice(size, m, replace=False)).to(device)
        classes = truth.unique()
        new_labels = classes[torch.from_numpy(rng.integers(0, len(classes), m)).to(device)]
        columns = list(dataset)
        columns[labels] = truth.index_put((rows,), new_labels)
        ids = torch.full((size,), NO_CANARY, device=device)
        ids = ids.index_put((rows,), torch.arange(m, device=device))
        self.dataset = (*columns, ids)
        self.loss = PlantedLoss(loss_fn, torch.from_numpy(coins.astype(np.float64)))
        self._model = model
        self._loss_fn = loss_fn
        self._examples = tuple(x[rows.to(x.device)] for x in columns)
        self._losses_before = self._losses()

    def _losses(self) -> Floats:
        return compute_losses(self._model, self._loss_fn, self._examples)

    def scores(self) -> Floats:
        """Return how far each canary's loss fell `[m]`."""
        return np.nan_to_num(self._losses_before - self._losses())
