"""Attack a trained model: was an example among its training examples?

The attack guesses that examples with a small loss are members of the training set. A stronger
adversary may achieve more, so the attack may contradict a claim and never confirm one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import mannwhitneyu
from torch import Tensor, nn

from dpkfc.audit.epsilon_bounds import (
    Floats,
    best_threshold,
    check_scores,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower,
)
from dpkfc.audit.findings import Finding
from dpkfc.audit.planted_loss import LossFn
from dpkfc.gradients.evaluation_mode import evaluation_mode


def auc(scores_without: ArrayLike, scores_with: ArrayLike) -> float:
    """Return the area under the ROC curve.

    The area is the probability that a score "with" is larger than one "without", ties counted half.
    """
    without, with_ = check_scores(scores_without), check_scores(scores_with)
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
    without, with_ = np.sort(check_scores(scores_without)), check_scores(scores_with)
    allowed = math.floor(fpr * len(without) + 1e-9)
    threshold = -math.inf
    if allowed < len(without):
        threshold = float(without[len(without) - 1 - allowed])
    return float((with_ > threshold).mean()), threshold


FPRS = (0.01, 0.001)
CONFIDENCE = 0.95  # of the bounds and the intervals of an audit


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
    confidence: float = CONFIDENCE
    claimed_epsilon: float | None
    delta: float
    seconds: float
    passed: bool

    def describe(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)

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


def infer_membership(
    model: nn.Module,
    loss_fn: LossFn,
    members: Sequence[Tensor],
    non_members: Sequence[Tensor],
    *,
    delta: float,
    claimed_epsilon: float | None = None,
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
        compute_losses(model, loss_fn, members),
        compute_losses(model, loss_fn, non_members),
        delta=delta,
        claimed_epsilon=claimed_epsilon,
    )
    return replace(result, seconds=time.perf_counter() - started)


def infer_membership_from_losses(
    members: ArrayLike,
    non_members: ArrayLike,
    *,
    delta: float,
    claimed_epsilon: float | None = None,
) -> MembershipResult:
    """Attack a model by a threshold on given losses.

    Args:
        members: one loss each.
        non_members: one loss each.
        delta: δ of the bound.
        claimed_epsilon: ε of the plan.

    Guarantee:
        The intervals hold for this model, whose members and others are samples of two populations.
        The bound on ε assumes independent guesses, as is customary. Within one model they are only
        nearly independent. `audit_one_run` needs no such assumption: its canaries have own coins.

    Raises:
        ValueError: fewer than four losses of a kind, losses that are not finite, δ outside [0, 1).
    """
    started = time.perf_counter()
    # A small loss speaks for membership, so it gets a large score.
    member_scores = -np.asarray(members, float).ravel()
    other_scores = -np.asarray(non_members, float).ravel()
    if min(len(member_scores), len(other_scores)) < 4:
        raise ValueError(
            "at least four losses of a kind are needed, "
            f"got {len(member_scores)} and {len(other_scores)}"
        )
    alpha = 1 - CONFIDENCE
    _, errors = best_threshold(other_scores, member_scores, delta, alpha)
    bound = epsilon_lower(*errors, delta, alpha)
    return MembershipResult(
        members=len(member_scores),
        non_members=len(other_scores),
        auc=auc(other_scores, member_scores),
        rates=tuple(_detection_rate(other_scores, member_scores, fpr, alpha) for fpr in FPRS),
        epsilon_lower=bound,
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        seconds=time.perf_counter() - started,
        passed=claimed_epsilon is None or bound <= claimed_epsilon,
    )


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
