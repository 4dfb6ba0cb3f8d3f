"""What a gradient at the model's output says of a classification loss: the label and the factor of every position.

With probabilities p and label y the gradient of a cross-entropy at the logits is p - e_y, that of a negative log-likelihood
at the log-probabilities is -e_y, and that of a binary cross-entropy at its one logit is p - y. Whatever stands before the
loss of a position, a weight and one over the divisor, is a factor of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Factors", "measured"]

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# The smallest p - e_y that still shows its factor.
_CLEAR = {torch.float32: 2e-3, torch.float64: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.05}
_CHUNK = 2**22  # numbers looked at together, so that a check needs little memory beside the logits
_NONE = float("nan")
_VARIED = 20.0  # tolerances by which 1 - p must vary, so that a loss of another form would show
_ALIKE = 0.9  # the 1 - p from which all forms are nearly alike


@dataclass(frozen=True)
class Factors:
    """Of one backward pass.

    Attributes:
        factors: of each position's own loss `[N, positions]`; 0 where it has no gradient, NaN where that is too small to tell.
        labels: `[N, positions]`.
        by_label: factor of each label `[classes]`; NaN where none of its positions shows it.
        by_rule: whether the factor is a function of the label: no two clear positions of one label differ.
        equal: whether all clear positions have one factor.
        evidence: how many more positions than necessary agree on that.
        spread: how far the clear positions of one label are apart, relative: rounding of a cross-entropy, more of other losses.
        varied: whether they agree at different predictions; at one, every loss would look like this.
        early: whether they agree because no label is predicted yet, out of three or more; other losses nearly look like this.
    """

    factors: Tensor
    labels: Tensor
    by_label: Tensor
    by_rule: bool
    equal: bool
    evidence: int
    spread: float
    varied: bool
    early: bool

    @property
    def rule(self) -> bool:
        """Whether it is beyond chance that the factor is a function of the label."""
        return self.by_rule and self.evidence > 0 and (self.varied or self.early)

    @classmethod
    def of(
        cls, factors: Tensor, labels: Tensor, *, weight: Tensor, miss: Tensor, clear: Tensor, classes: int,
        tolerance: float,
    ) -> Factors:
        """Factors whose unclear ones are filled in from their label, where there is a rule.

        Args:
            factors: `[N, positions]`, 0 where there is no gradient.
            labels: `[N, positions]`.
            weight: of each in the mean of its label: how well it is measured.
            miss: 1 - p of its label.
            clear: whether it can be measured at all.
            classes: number of labels.
            tolerance: relative difference of equal factors.
        """
        zeros = factors.new_zeros(classes)
        at, values, weights = labels[clear], factors[clear], weight[clear]
        total = zeros.scatter_add(0, at, weights)
        by_label = zeros.scatter_add(0, at, values * weights) / total.where(total > 0, torch.full_like(total, _NONE))
        apart = (values - by_label[at]).abs() / by_label[at]
        by_rule = bool((apart <= tolerance).all())
        equal = bool(values.numel() and values.max() - values.min() <= tolerance * values.max())
        own = by_label[labels]
        if equal:
            own = torch.where(own.isnan(), (values * weights).sum() / weights.sum(), own)
        hidden = ~clear & (factors != 0)
        filled = torch.where(hidden, own if by_rule else torch.full_like(own, _NONE), factors)
        evidence = int(values.numel()) - (1 if equal else int((total > 0).sum())) - (2 if classes == 2 else 0)
        group, misses = torch.zeros_like(at) if equal else at, miss[clear]
        most = zeros.scatter_reduce(0, group, misses, "amax", include_self=False)
        least = zeros.scatter_reduce(0, group, misses, "amin", include_self=False)
        varied = bool((most > (1 + _VARIED * tolerance) * least).any())
        early = classes > 2 and bool((misses > _ALIKE).all())
        spread = float(apart.max()) if apart.numel() else 0.0
        return cls(filled, labels, by_label, by_rule, equal, max(0, evidence), spread, varied, early)

    def balanced(self, tolerance: float) -> bool:
        """Whether labels of one factor make up about their part of all factors, as labels balanced by weights do.

        Exactly so where there are two factors: with weights of mean one, a batch whose factors add up to one leaves no choice.
        """
        one = (self.factors > 0).to(self.factors).flatten()
        counts = torch.zeros_like(self.by_label).scatter_add(0, self.labels.flatten(), one)
        seen = counts > 0
        own, counts = self.by_label[seen], counts[seen]
        alike = ((own.unsqueeze(1) - own).abs() <= tolerance * own.unsqueeze(1)).to(own)
        number = alike @ counts
        share = own * number / (own * counts).sum()
        groups = round(float((1 / alike.sum(1)).sum()))
        allowed = tolerance if groups == 2 else 2 * share / number.sqrt()
        return bool(((share - alike.sum(1) / len(own)).abs() <= allowed).all())


def measured(output: Tensor, gradient: Tensor, size: int) -> Factors | None:
    """The factors; None where the gradient is of no form known here.

    Args:
        output: logits or log-probabilities `[N, classes]`, `[N, ..., classes]`, `[N, classes, ...]`, `[N * positions, classes]`,
            or logits or probabilities of a binary cross-entropy `[N]` or `[N, k]`.
        gradient: of the user's loss with respect to it.
        size: examples N.
    """
    if output.dtype not in TOLERANCE or output.shape != gradient.shape or not bool(torch.isfinite(gradient).all()):
        return None
    for axis in () if output.dim() < 2 else (-1, 1) if output.dim() > 2 else (-1,):
        rows = [x.detach().movedim(axis, -1) for x in (output, gradient)]
        classes = rows[0].shape[-1]
        if classes < 2 or rows[0].numel() % (size * classes) or (output.dim() > 2 and output.shape[0] != size):
            continue
        logits, slopes = (x.reshape(size, -1, classes) for x in rows)
        found = _of_classes(logits, slopes)
        if found is not None:
            return found
    if output.dim() in (1, 2) and output.shape[0] == size:
        return _of_binary(output.detach().reshape(size, -1), gradient.detach().reshape(size, -1))
    return None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _of_classes(output: Tensor, gradient: Tensor) -> Factors | None:
    """As `measured`, of `[N, positions, classes]`."""
    n, positions, classes = output.shape
    parts = []
    for rows in _chunks(n, positions * classes):
        part = _cross_entropy(output[rows], gradient[rows])
        if part is None:
            return None
        parts.append(part)
    factors, labels, weight, miss, clear = (torch.cat(x) for x in zip(*parts, strict=True))
    if int(clear.any(1).sum()) < 2:
        return None
    return Factors.of(
        factors, labels, weight=weight, miss=miss, clear=clear, classes=classes, tolerance=TOLERANCE[output.dtype]
    )


def _chunks(n: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, width))
    return (slice(i, i + step) for i in range(0, n, step))


def _cross_entropy(output: Tensor, gradient: Tensor) -> tuple[Tensor, ...] | None:
    """Factors, labels, weights, 1 - p and which are clear, each `[n, positions]`; None for another loss."""
    tolerance, threshold = TOLERANCE[output.dtype], _CLEAR[output.dtype]
    output, gradient = _wide(output), _wide(gradient)
    labels = gradient.argmin(-1)
    own = torch.nn.functional.one_hot(labels, output.shape[-1]).to(gradient)
    likelihood = bool((gradient * (1 - own) == 0).all() and (output.logsumexp(-1).abs() < 10 * tolerance).all())
    p = output.exp() if likelihood else output.softmax(-1)
    pattern = -own if likelihood else p - own
    weight = pattern.square().sum(-1)
    clear = (gradient != 0).any(-1) & (pattern.abs().amax(-1) > threshold)
    factors = (gradient * pattern).sum(-1) / weight.clamp_min(1e-30)
    off = (gradient - factors.unsqueeze(-1) * pattern).abs().amax(-1)
    if not bool(((off <= tolerance * gradient.abs().amax(-1)) | ~clear).all()):
        return None
    return factors, labels, weight, 1 - (p * own).sum(-1), clear


def _of_binary(output: Tensor, gradient: Tensor) -> Factors | None:
    """As `measured`, of a binary cross-entropy `[N, positions]`, whose label is 1 where the slope falls.

    One number an example fits any loss: that it is this one is seen from factors that are equal for each of the two labels.
    """
    tolerance, threshold = TOLERANCE[output.dtype], _CLEAR[output.dtype]
    output, gradient = _wide(output), _wide(gradient)
    labels = (gradient < 0).long()
    for probabilities in (False, True) if bool(((output > 0) & (output < 1)).all()) else (False,):
        q = output if probabilities else output.sigmoid()
        miss = torch.where(labels == 1, 1 - q, q)
        pattern = 1 / (1 - miss) if probabilities else miss
        clear = (gradient != 0) & (miss > threshold)
        factors = gradient.abs() / pattern.clamp_min(1e-30)
        found = Factors.of(
            factors, labels, weight=pattern.square(), miss=miss, clear=clear, classes=2, tolerance=tolerance
        )
        if found.by_rule:
            return found
    return None
