"""Does the loss of a script have the reduction it was declared with?

`loss.backward()` shows nothing of the loss but its gradient at the model's output. Were the reduction not the declared
one, the gradient of one example would depend on the number, the labels or the lengths of the others, and the sensitivity
would not be the one that the noise is made for. For classification losses, of whole examples or of the positions of a
sequence, the gradient itself gives the reduction away: what stands before the loss of a position, times the number of
examples, is a weight of the user's own and stays what it is from batch to batch; a divisor of the batch moves it.

One batch proves nothing for the next, which may be the first with a rare label. So every batch is looked at.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkfc.integrations._loss_form import TOLERANCE, Factors, measured

__all__ = ["LossScale"]

# Relative differences that rounding explains: of the weight of a label in two batches, and of the sum of all factors.
_OF_LABELS = {torch.float32: 2e-4, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 4e-3}
_OF_SUMS = {torch.float32: 3e-5, torch.float64: 1e-8, torch.bfloat16: 2e-3, torch.float16: 1e-3}
_EXACT = (torch.float32, torch.float64)
_EARLY = 2e-2  # of labels where no label is predicted yet
_SMALLEST_SCALE = 2.0**8  # of a GradScaler; a weight of one's own is hardly a power of two as large
_LARGE = 8  # examples whose weights hardly add up to one number twice by chance
_SPREADS = 10  # times as far as positions of one label are apart, a label may move between two batches
_CHANCE = 20  # a sum of factors that varies by so many times less than this by chance says nothing where it stays
_PATIENCE = 16  # batches that may be too small, or too alike, for a verdict before the user is told

_WAYS_OUT = (
    "divide by the number of examples alone, with class weights w: F.cross_entropy(..., weight=w, reduction='none').mean() "
    "(of sequences: averaged over each example's own positions first). Or use reduction='sum' with "
    "make_private(loss_reduction='sum') and a learning rate divided by the batch size, or a Session with a loss for each example"
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


@dataclass
class _Seen:
    """What the batches so far have shown of one output of the model; for an honest loss constants of its own, no more.

    Attributes:
        table: weight of each label `[classes]`, NaN where it was not seen; None before a verdict.
        varied: whether its newest entries are exact for losses of any form.
        spread: how far positions of one label were apart in the batch of these entries.
        example: weight of an example, where examples were averaged over their own positions.
        even: the last batch of sequences that told neither.
        sums: of the factors of the first batches whose examples had weights of their own; None once two have differed.
        judged: whether any batch was.
        confirmed: whether the last verdict was that weights are constants.
    """

    table: Tensor | None = None
    varied: bool = False
    spread: float = 0.0
    example: float | None = None
    even: _Even | None = None
    sums: list[float] | None = field(default_factory=list)
    judged: bool = False
    confirmed: bool = False


class LossScale:
    """Compares the reduction of a classification loss with the declared one, in every batch.

    Args:
        reduction: the declared one, "mean" or "sum".
    """

    def __init__(self, reduction: str) -> None:
        self._reduction = reduction
        self._seen: dict[int, _Seen] = {}
        self._warned = False
        self._recognised, self._thin = False, 0  # in this batch a loss of a known form; how often it was not enough

    def check(self, output: Tensor, gradient: Tensor, size: int, place: int = 0) -> None:
        """Look at one backward pass.

        Nothing follows from a loss that is no cross-entropy or negative log-likelihood, nor from fewer than two examples
        with a gradient.

        Args:
            output: logits or log-probabilities `[N, classes]`, `[N, ..., classes]`, `[N, classes, ...]` or
                `[N * positions, classes]`; of a binary cross-entropy `[N]` or `[N, k]`.
            gradient: of the user's loss with respect to the output.
            size: examples N in the batch.
            place: which of the model's outputs it is; each may have a weight of its own.

        Raises:
            ValueError: a sum declared as a mean or the reverse; a mean whose divisor depends on the labels or lengths; a loss
                that a GradScaler has multiplied.
        """
        seen = self._seen.setdefault(place, _Seen())
        if size < 2 or _as_before(seen, output, gradient, size):
            return
        form = measured(output, gradient, size)
        if form is None:
            return
        self._judge(seen, form, output.dtype)

    def _judge(self, seen: _Seen, form: Factors, dtype: torch.dtype) -> None:
        factors, tolerance = form.factors, TOLERANCE[dtype]
        n, positions = factors.shape
        counts, own = (factors != 0).sum(1), factors.sum(1)
        if not bool((counts > 0).any()):
            return
        scale = float(n) if self._reduction == "mean" else 1.0
        self._recognised |= form.by_rule
        if form.equal and form.evidence > 0:
            _check_loss_scale(_weight(form) * (n if self._reduction == "mean" else 1), tolerance)
        if not seen.judged:
            self._check_declared(form, own, tolerance)
            _check_normalised(form, own, dtype)
        seen.judged = True
        active = own[counts > 0]
        level = bool(active.max() - active.min() <= tolerance * active.max())  # false where one of them is unknown
        alike = bool((counts == counts[0]).all())
        scale = float(n) if self._reduction == "mean" else 1.0
        averaged = positions > 1 and level and not alike and not form.by_rule
        if averaged or (positions > 1 and level and form.rule and seen.example is not None):
            seen.example = _unchanged(seen.example, _rounded(active.mean() * scale), dtype)
        elif positions > 1 and level and form.rule and seen.table is None:
            even = _Even(_weight(form) * scale, positions, int(counts[0]) if alike else None)
            seen.even = _compared(seen.even, even, tolerance)
        elif form.rule:
            exact = _OF_LABELS[dtype] if form.varied and seen.varied else _EARLY
            loose = max(exact, _SPREADS * max(form.spread, seen.spread))  # another loss that looks like one of these
            seen.table = _merged(seen.table, _rounded(form.by_label * scale), loose, renew=loose > _OF_LABELS[dtype])
            seen.varied, seen.spread = form.varied, form.spread
        elif not level and dtype in _EXACT:
            _check_sums(seen, own, _OF_SUMS[dtype])
        seen.confirmed = averaged or form.rule or (seen.confirmed and (form.by_rule or level))
        if not seen.confirmed:
            seen.table = None

    def _check_declared(self, form: Factors, own: Tensor, tolerance: float) -> None:
        """Raise where the first batch shows the other reduction; in a later one a weight of one's own may be its size."""
        both = int((~form.by_label.isnan()).sum()) > 1
        summed = form.equal and form.evidence > 0 and both and abs(_weight(form) - 1) < tolerance
        averaged = not summed and _averaged(own, tolerance)
        if (self._reduction == "mean" and summed) or (self._reduction == "sum" and averaged):
            actual = "sum" if summed else "mean"
            raise ValueError(
                f"the loss is a {actual} over the examples but loss_reduction='{self._reduction}' was declared; the size of "
                f"the batch would leak into every gradient. Use make_private(loss_reduction='{actual}') or a loss with "
                f"reduction='{self._reduction}'"
            )

    @property
    def confirmed(self) -> bool:
        """Whether a loss was seen whose weights are constants, as far as batches have shown."""
        return any(seen.confirmed for seen in self._seen.values())

    def warn_without_verdict(self) -> None:
        """Say, once, that a mean was taken on trust: nothing was learnt of its divisor from the gradients so far."""
        recognised, self._recognised = self._recognised, False
        if self.confirmed or self._warned or self._reduction == "sum":
            return
        self._thin += recognised
        if recognised and self._thin < _PATIENCE:
            return
        self._warned = True
        warnings.warn(
            "the gradients of this loss do not show by what it divides. It must be a mean over the examples of the batch; "
            "divided by anything that depends on their labels or lengths, ε would not hold. Nor do they show whether the loss of "
            "an example depends on the others (contrastive, Cox, AUC, batch statistics): then ε would not hold either. A Session "
            "checks that, and so does make_private(criterion=...) with the module that the script calls as criterion(output, "
            "target). If it is not such a mean, " + _WAYS_OUT,
            UserWarning,
            stacklevel=2,
        )


def _as_before(seen: _Seen, output: Tensor, gradient: Tensor, size: int) -> bool:
    """Whether an even batch of sequences is like the even batch before it, seen without looking at all classes."""
    if seen.even is None or seen.even.counted is None or output.dim() < 3 or gradient.shape[0] != size:
        return False
    counts = (gradient != 0).any(-1).reshape(size, -1).sum(1)
    return gradient[0, ..., 0].numel() == seen.even.positions and bool((counts == seen.even.counted).all())


def _averaged(own: Tensor, tolerance: float) -> bool:
    return bool((own * len(own) - 1).abs().max() < tolerance)


def _check_loss_scale(weight: float, tolerance: float) -> None:
    """Raise if the weight of every position is a large power of two."""
    power = 2.0 ** round(math.log2(weight))
    if power >= _SMALLEST_SCALE and abs(weight - power) < tolerance * power:
        raise ValueError(
            f"the loss is multiplied by {power:.0f}, as a GradScaler does: its scale, and which steps it skips, follow overflows "
            "of private gradients, which ε does not cover. Leave the GradScaler out and train in bfloat16, which needs none"
        )


def _check_normalised(form: Factors, own: Tensor, dtype: torch.dtype) -> None:
    """Raise if the first batch shows factors that differ between examples and yet add up to one.

    Weights that balance the labels, in an honest mean, do so in a batch that happens to have the labels in their very
    proportions. It looks the same under both means, and the next batch tells.
    """
    tolerance = TOLERANCE[dtype]
    rough = dtype not in _EXACT and not form.by_rule  # by the rounding of the loss alone
    if not form.equal and (rough or len(own) < _LARGE or _steady(own, _OF_SUMS[dtype])):
        return
    normalised = bool((own.sum() - 1).abs() < (tolerance if form.equal else _OF_SUMS[dtype]))
    by_chance = normalised and not form.equal and form.by_rule and form.balanced(tolerance)
    alike = bool(own.max() - own.min() <= 2 * tolerance * own.max())
    if normalised and not by_chance and not alike:
        raise ValueError(_of_the_batch("divides by a number that depends on the labels or lengths of the whole batch"))


def _check_sums(seen: _Seen, own: Tensor, tolerance: float) -> None:
    """Raise if the factors of the first four batches, all uneven, add up to one number."""
    total = float(own.sum())
    if seen.sums is None or math.isnan(total) or len(own) < _LARGE:
        return
    if _steady(own, tolerance):
        return
    if any(abs(total - x) >= tolerance * abs(total) for x in seen.sums):
        seen.sums = None
        return
    seen.sums.append(total)
    if len(seen.sums) == 4:
        raise ValueError(_of_the_batch("divides by the sum of the weights that are in the batch"))


def _steady(own: Tensor, tolerance: float) -> bool:
    """Whether the factors of any batch as large add up to nearly one number, as those of smoothed labels do."""
    return float(own.std()) * math.sqrt(len(own)) < _CHANCE * tolerance * abs(float(own.sum()))


def _weight(form: Factors) -> float:
    return float(form.factors[form.factors > 0].nanmean())


def _of_the_batch(what: str) -> str:
    return (
        f"the loss {what} (class weights, ignore_index or padding with reduction='mean'), so one example changes the gradients "
        f"of the others and clipping does not bound it; {_WAYS_OUT}"
    )


def _changed() -> ValueError:
    return ValueError(
        "examples of one label had one weight in an earlier batch and have another in this one: "
        + _of_the_batch("divides by a number that depends on the labels or lengths of the whole batch")
        + ". A factor of your own that changes from step to step belongs into the learning rate. What was released before this "
        "batch had no such bound either: begin anew"
    )


def _unchanged(before: float | None, now: Tensor, dtype: torch.dtype) -> float:
    """The weight of an example, the same as before."""
    if before is not None and abs(float(now) - before) > _OF_LABELS[dtype] * before:
        raise _changed()
    return float(now) if before is None else before


def _merged(table: Tensor | None, now: Tensor, tolerance: float, *, renew: bool) -> Tensor:
    """The weights of all labels seen, each the same as before; the newer ones where they are no exact constants."""
    if table is None or table.shape != now.shape:
        return now
    if bool(((now - table).abs() > tolerance * table).any()):  # NaN, of an unseen label, compares false
        raise _changed()
    return torch.where(table.isnan() | renew, torch.where(now.isnan(), table, now), table)


def _rounded(x: Tensor) -> Tensor:
    """To about six digits: what is kept of an honest loss is its constants, not the rounding of private numbers."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**20).round() / 2**20, exponent)


def _compared(before: _Even | None, even: _Even, tolerance: float) -> _Even:
    """Raise if the weight of a position went with the length of the batch; otherwise the newer one."""
    if before is None or abs(even.weight - before.weight) < tolerance * before.weight:
        return even
    by_positions = even.weight * even.positions - before.weight * before.positions
    by_count = even.weight * (even.counted or 0) - before.weight * (before.counted or 0)
    counted = even.counted is not None and before.counted is not None
    if abs(by_positions) < tolerance or (counted and abs(by_count) < tolerance):
        raise ValueError(
            "the loss divides by the number of positions of a batch, which depends on its longest example: one example "
            f"changes the gradients of the others. Pad to one fixed length, or {_WAYS_OUT}"
        )
    return even
