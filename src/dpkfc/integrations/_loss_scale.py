"""Does the loss of a script have the reduction it was declared with?

`loss.backward()` shows nothing of the loss but its gradient at the model's output. Were the reduction not the declared
one, the gradient of one example would depend on the number, the labels or the lengths of the others, and the sensitivity
would not be the one that the noise is made for. For classification losses, of whole examples or of the positions of a
sequence, the gradient itself gives the reduction away.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LossScale"]

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_WAYS_OUT = (
    "use reduction='sum' with make_private(loss_reduction='sum'), or a Session with a loss for each example that averages "
    "over the example's own positions"
)


@dataclass(frozen=True)
class _Even:
    """A batch whose examples all had one weight: no verdict yet on what that weight depends on.

    Attributes:
        weight: of a position, times the number of examples.
        positions: of an example, those without a gradient included.
        counted: positions with a gradient, of every example; None where examples differ in it.
    """

    weight: float
    positions: int
    counted: int | None


class LossScale:
    """Compares the reduction of a classification loss with the declared one, until there is a verdict.

    Args:
        reduction: the declared one, "mean" or "sum".
    """

    def __init__(self, reduction: str) -> None:
        self._reduction = reduction
        self._even: _Even | None = None
        self._warned = False
        self.settled = False

    def check(self, output: Tensor, gradient: Tensor, size: int) -> None:
        """Look at one backward pass.

        Nothing follows from a loss that is no cross-entropy or negative log-likelihood, nor from fewer than two examples
        with a gradient.

        Args:
            output: logits or log-probabilities `[N, classes]`, `[N, ..., classes]`, `[N, classes, ...]` or
                `[N * positions, classes]`.
            gradient: of the user's loss with respect to the output.
            size: examples N in the batch.

        Raises:
            ValueError: a sum declared as a mean or the reverse; a mean whose divisor depends on the labels or lengths.
        """
        if self.settled or size < 2 or self._as_before(output, gradient, size):
            return
        factors = _factors(output, gradient, size)
        if factors is not None:
            self._judge(factors, _TOLERANCE[output.dtype])

    def _as_before(self, output: Tensor, gradient: Tensor, size: int) -> bool:
        """Whether an even batch is like the even batch before it, seen without looking at all classes."""
        if self._even is None or self._even.counted is None or output.dim() < 3 or gradient.shape[0] != size:
            return False
        counts = (gradient != 0).any(-1).reshape(size, -1).sum(1)
        return gradient[0, ..., 0].numel() == self._even.positions and bool((counts == self._even.counted).all())

    def _judge(self, factors: Tensor, tolerance: float) -> None:
        n, positions = factors.shape
        counts, own = (factors > 0).sum(1), factors.sum(1)
        active = factors[factors > 0]
        equal = bool(active.max() - active.min() < tolerance * active.max())
        summed = equal and bool((active - 1).abs().max() < tolerance)
        normalised = bool((own.sum() - 1).abs() < tolerance)
        averaged = normalised and bool((own * n - 1).abs().max() < tolerance)
        if normalised and not averaged and not summed:
            raise ValueError(
                "the loss divides by a number that depends on the labels or lengths of the whole batch (class weights, "
                "ignore_index or padding with reduction='mean'), so one example changes the gradients of the others and "
                f"clipping does not bound it; {_WAYS_OUT}"
            )
        if (self._reduction == "mean" and summed) or (self._reduction == "sum" and averaged):
            actual = "sum" if summed else "mean"
            raise ValueError(
                f"the loss is a {actual} over the examples but loss_reduction='{self._reduction}' was declared; the size of "
                f"the batch would leak into every gradient. Use make_private(loss_reduction='{actual}') or a loss with "
                f"reduction='{self._reduction}'"
            )
        alike = bool((counts == counts[0]).all())
        if positions == 1 or summed or not equal or (averaged and not alike):
            self.settled = True
        else:
            self._compare(_Even(float(active.mean()) * n, positions, int(counts[0]) if alike else None), tolerance)

    def _compare(self, even: _Even, tolerance: float) -> None:
        """Raise if the weight of a position went with the length of the batch."""
        before, self._even = self._even, even
        if before is None or abs(even.weight - before.weight) < tolerance * before.weight:
            return
        by_positions = even.weight * even.positions - before.weight * before.positions
        by_count = even.weight * (even.counted or 0) - before.weight * (before.counted or 0)
        counted = even.counted is not None and before.counted is not None
        if abs(by_positions) < tolerance or (counted and abs(by_count) < tolerance):
            raise ValueError(
                "the loss divides by the number of positions of a batch, which depends on its longest example: one example "
                f"changes the gradients of the others. Pad to one fixed length, or {_WAYS_OUT}"
            )

    def warn_without_verdict(self) -> None:
        """Say, once, that a mean was taken on trust: nothing was learnt of its divisor from the gradients so far."""
        if self.settled or self._even is not None or self._warned or self._reduction == "sum":
            return
        self._warned = True
        warnings.warn(
            "the gradients of this loss do not show by what it divides. It must be a mean over the examples of the batch; "
            "divided by anything that depends on their labels or lengths, ε would not hold. If it is not such a mean, "
            + _WAYS_OUT,
            UserWarning,
            stacklevel=2,
        )


def _factors(output: Tensor, gradient: Tensor, size: int) -> Tensor | None:
    """Factor of each position's own loss in the whole `[N, positions]`; None where the gradient is of no form known here."""
    if output.dtype not in _TOLERANCE or output.shape != gradient.shape or not bool(torch.isfinite(gradient).all()):
        return None
    for axis in (-1, 1) if output.dim() > 2 else (-1,):
        rows = [x.detach().movedim(axis, -1) for x in (output, gradient)]
        classes = rows[0].shape[-1]
        if classes < 2 or rows[0].numel() % (size * classes) or (output.dim() > 2 and output.shape[0] != size):
            continue
        logits, slopes = (x.reshape(size, -1, classes) for x in rows)
        factors = _of_positions(logits, slopes, _TOLERANCE[output.dtype])
        if factors is not None:
            return factors
    return None


def _of_positions(output: Tensor, gradient: Tensor, tolerance: float) -> Tensor | None:
    """As `_factors`, of outputs and gradients `[N, positions, classes]`.

    With probabilities p and label y the gradient of a cross-entropy at the logits is p - e_y, that of a negative
    log-likelihood at the log-probabilities is -e_y. An ignored position has the factor 0. A position that is predicted
    with confidence leaves too little to measure: it is taken to weigh as much as the others of its example, and an example
    of such positions alone as much as all others, where those agree.
    """
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    output, gradient = output.to(wide), gradient.to(wide)
    label = torch.nn.functional.one_hot(gradient.argmin(-1), output.shape[-1]).to(gradient)
    likelihood = bool((gradient * (1 - label) == 0).all() and (output.logsumexp(-1).abs() < 10 * tolerance).all())
    pattern = -label if likelihood else output.softmax(-1) - label
    ignored = (gradient == 0).all(-1)
    clear = ~ignored & (pattern.abs().amax(-1) > 0.05)
    factors = (gradient * pattern).sum(-1) / pattern.square().sum(-1).clamp_min(1e-30)
    off = (gradient - factors.unsqueeze(-1) * pattern).abs().amax(-1)
    fits = (off <= tolerance * gradient.abs().amax(-1)) | ~clear
    if not bool(fits.all()):
        return None
    if int(clear.any(1).sum()) < 2:
        return None
    hidden = ~clear.any(1) & ~ignored.all(1)
    measured = factors[clear]
    if bool(hidden.any()) and bool(measured.max() - measured.min() > tolerance * measured.max()):
        return None
    own = (factors * clear).sum(1) / clear.sum(1).clamp_min(1)
    own = torch.where(hidden, measured.mean(), own)
    return torch.where(clear, factors, own.unsqueeze(1) * ~ignored)
