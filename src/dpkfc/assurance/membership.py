"""Membership inference by a threshold on the loss: the weakest line of an audit, and the one that needs a trained model only.

Members of the training set are called so where their loss is small. What such a guess achieves is what an outsider can do
with losses alone; it says little about what a stronger adversary could, so it may contradict a claim and never confirm one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from dpkfc.assurance.bounds import (
    auc,
    best_threshold,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower,
    tpr_at_fpr,
)
from dpkfc.assurance.verdict import Finding

__all__ = ["Membership", "Rate", "losses_of", "membership", "membership_of_losses"]

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
