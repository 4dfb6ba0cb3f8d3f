"""The loss on a probe: a likelihood of the model's output, with labels from a public random stream.

With labels drawn from the model's own predictive distribution the output gradients estimate the
Fisher information (one Monte-Carlo draw). No label of a private example is used.

Outputs `[N, K]` and `[N, T, K]` have the classes on the last axis, `[N, K, *spatial]` with two or
more spatial axes on the second. The loss of an example is the mean over its positions, as a
training loss should be. With a padding mask the mean is over its text positions, and the others
have no gradient.

Logits of a language model are large, `[N, T, 50 000]`. Labels and cross-entropy are computed a
few rows at a time, and the only copy of the logits' size is their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.curvature.eigen import largest_entry
from dpkfc.tensors import Tensors

LABELS = ("model", "uniform", "given")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
_IGNORED = -100
_PIECE = 1 << 20  # logits in one piece


class ProbeRandomness:
    """Random numbers of a whole probe, by rows: they do not depend on the micro-batch size.

    Args:
        generator: the probe's stream.
        total: examples in the probe.
    """

    def __init__(self, generator: torch.Generator, total: int) -> None:
        self.generator = generator
        self.total = total
        self._numbers: Tensors = {}

    def rows(self, kind: str, shape: tuple[int, ...], rows: slice, device: torch.device) -> Tensor:
        """Return uniform or normal numbers `[len(rows), *shape]` of these examples; float64."""
        if kind not in self._numbers:
            draw = torch.rand if kind == "uniform" else torch.randn
            size = (self.total, *shape)
            self._numbers[kind] = draw(size, generator=self.generator, dtype=torch.float64)
        numbers = self._numbers[kind]
        if numbers.shape[1:] != shape:
            raise ValueError(
                "the model's output changed its shape between probe micro-batches, "
                f"{tuple(numbers.shape[1:])} to {shape}"
            )
        return numbers[rows].to(device)


@dataclass(frozen=True)
class _Labels:
    """The source of labels: `model` or `uniform` with random numbers of these rows, or given."""

    kind: str
    given: Tensor | None
    draws: ProbeRandomness
    rows: slice

    def numbers(self, distribution: str, like: Tensor) -> Tensor:
        """Return random numbers of these rows in the shape `[N, ...]` of a tensor."""
        shape = tuple(like.shape[1:])
        return self.draws.rows(distribution, shape, self.rows, like.device)


def logits_of(output: Any) -> Tensor:
    """Return the tensor in a model's output: itself, its `.logits` or its item `logits`.

    Raises:
        ValueError: no such tensor.
    """
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif not isinstance(output, Tensor):
        logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model's output on the probe is a {type(output).__name__} without `.logits`; "
            "give KFAC a loss(output, generator) that returns one loss an example"
        )
    return logits


def _finite_logits(output: Any) -> Tensor:
    """Return the tensor in a model's output on a probe, whose values are read.

    Raises:
        ValueError: no such tensor, or one that is not finite.
    """
    logits = logits_of(output)
    if not math.isfinite(largest_entry(logits.detach())):
        raise ValueError(
            f"the model's output on the probe (shape {tuple(logits.shape)}) contains NaN or "
            "infinity; check the probe's scale and the model's parameters"
        )
    return logits


def likelihood_loss(
    likelihood: str,
    output: Any,
    *,
    labels: str,
    given: Tensor | None,
    draws: ProbeRandomness,
    rows: slice,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the negative log-likelihood of each probe example.

    Args:
        likelihood: categorical, gaussian (unit variance) or bernoulli.
        output: what the model returned.
        labels: model, uniform or given.
        given: the probe's own labels of these rows, or None.
        draws: random numbers of the whole probe.
        rows: the numbers of these examples.
        mask: True `[N, T]` at the positions that are text; read only for outputs `[N, T, K]`.

    Returns:
        Losses `[N]`.

    Raises:
        ValueError: labels that are missing or out of range, or an output that does not fit the
            likelihood or the mask.
    """
    logits = _finite_logits(output)
    if labels != "given":
        given = None
    elif given is None:
        raise ValueError(
            "labels='given' needs a probe with labels, such as PublicData(inputs, labels, ...)"
        )
    if logits.dim() < 1 or logits.shape[0] != rows.stop - rows.start:
        raise ValueError(
            f"the model returned shape {tuple(logits.shape)} for {rows.stop - rows.start} probe "
            "examples; the leading axis must be the batch"
        )
    if logits.dim() != 3:
        mask = None
    elif mask is not None and mask.shape != logits.shape[:2]:
        raise ValueError(
            f"the model returned shape {tuple(logits.shape)} for an attention mask of shape "
            f"{tuple(mask.shape)}, so positions differ; give KFAC your own loss(output, generator)"
        )
    source = _Labels(labels, given, draws, rows)
    return _LOSSES[likelihood](logits, source, mask)


def labels_fit(likelihood: str, output: Any, given: Tensor) -> bool:
    """Return whether labels `[n, ...]` have the shape and the classes of an output `[N, ...]`."""
    logits = _finite_logits(output)
    if likelihood != "categorical":
        return given[0].numel() == logits[0].numel()
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    if given.is_floating_point() or given.shape[1:] != logits.shape[1:-1]:
        return False
    counted = given[given != _IGNORED]
    is_class = (counted >= 0) & (counted < logits.shape[-1])
    return bool(is_class.all())


def _categorical(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if logits.dim() < 2 or (logits.dim() < 4 and logits.shape[-1] < 2):
        raise ValueError(
            "a categorical likelihood needs logits [batch, ..., classes], got "
            f"{tuple(logits.shape)}; use likelihood='bernoulli' or 'gaussian'"
        )
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    classes = logits.shape[-1]
    if source.given is not None:
        target = _check_labels(source.given.to(logits.device), logits, classes)
    else:
        uniform = source.numbers("uniform", logits[..., 0])
        target = _draw_classes(logits.detach(), uniform, source.kind)
    counted = target != _IGNORED
    if mask is not None:
        counted = counted & mask.to(target.device)
    rows = (logits.reshape(-1, classes), target.reshape(-1), counted.reshape(-1))
    losses: Tensor = _CrossEntropy.apply(*rows)
    losses = losses.view(target.shape)
    if target.dim() == 1:
        return losses
    totals = losses.flatten(1).sum(1)
    counts = counted.flatten(1).sum(1)
    return totals / counts.clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    """−log softmax(logits) at the target `[M]`, zero for a row that does not count.

    The backward pass needs only the logits and writes one tensor of their size. Torch's own
    cross-entropy takes three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        target = target.clamp(min=0).unsqueeze(1)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # `cat` needs at least one piece, also without rows.
        totals = [logits.new_zeros(0, dtype=dtype)]
        for x in _pieces(logits):
            total = torch.logsumexp(x.to(dtype), 1)
            totals.append(total)
        normaliser = torch.cat(totals)
        ctx.save_for_backward(logits, target, counted, normaliser)
        chosen = logits.gather(1, target)
        losses = normaliser - chosen.squeeze(1)
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, counted, normaliser = ctx.saved_tensors
        weight = gradient.masked_fill(~counted, 0.0).unsqueeze(1)
        out = torch.empty_like(logits)
        start = 0
        for x in _pieces(logits):
            rows = slice(start, start + len(x))
            own_target = target[rows]
            logarithms = x.to(normaliser.dtype) - normaliser[rows].unsqueeze(1)
            p = torch.exp(logarithms)
            ones = p.new_ones(own_target.shape)
            p.scatter_add_(1, own_target, -ones)
            p.mul_(weight[rows])
            out[rows] = p
            start = rows.stop
        return out, None, None


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    """Yield rows `[M, K]` a few at a time."""
    step = max(1, _PIECE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step]


def _draw_classes(logits: Tensor, uniform: Tensor, labels: str) -> Tensor:
    """Return classes by inverse transform of one uniform number a position."""
    classes = logits.shape[-1]
    if labels == "uniform":
        return (uniform * classes).long().clamp(max=classes - 1)
    # `cat` needs at least one piece, also without rows.
    pieces = [torch.zeros(0, 1).to(uniform.device, torch.int64)]
    start = 0
    flat = uniform.reshape(-1, 1)
    for x in _pieces(logits.reshape(-1, classes)):
        stop = start + len(x)
        weights = torch.softmax(x.double(), -1)
        cumulative = weights.cumsum(-1)
        pieces.append(torch.searchsorted(cumulative, flat[start:stop]))
        start = stop
    numbers = torch.cat(pieces).view(uniform.shape)
    return numbers.clamp(max=classes - 1)


def _check_labels(given: Tensor, logits: Tensor, classes: int) -> Tensor:
    if given.shape != logits.shape[:-1] or given.is_floating_point():
        raise ValueError(
            f"the probe's labels have shape {tuple(given.shape)} and dtype {given.dtype}, but the "
            f"logits need integer labels of shape {tuple(logits.shape[:-1])}"
        )
    counted = given[given != _IGNORED]
    if counted.numel() and not (0 <= int(counted.min()) and int(counted.max()) < classes):
        raise ValueError(
            f"the probe's labels run from {int(counted.min())} to {int(counted.max())}, but the "
            f"model has {classes} classes; relabel the public data or use labels='model'"
        )
    return given.long()


def _gaussian(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        noise = source.numbers("normal", logits).to(logits.dtype)
        target = logits.detach() + noise
    squares = (logits - target).square()
    return _mean_over_outputs(0.5 * squares, mask)


def _bernoulli(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        uniform = source.numbers("uniform", logits)
        is_one = uniform < 0.5
        if source.kind == "model":
            probability = torch.sigmoid(logits.detach().double())
            is_one = uniform < probability
        target = is_one.to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return _mean_over_outputs(losses, mask)


def _match_shape(given: Tensor, logits: Tensor) -> Tensor:
    if given.numel() != logits.numel():
        shapes = f"{tuple(given.shape)}, the model's output {tuple(logits.shape)}"
        raise ValueError(f"the probe's labels have shape {shapes}; they must match")
    return given.to(logits).view_as(logits)


def _mean_over_outputs(losses: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        counted = mask.to(losses)
        totals = losses.mean(2) * counted
        counts = counted.sum(1)
        return totals.sum(1) / counts.clamp(min=1)
    if losses.dim() == 1:
        return losses
    return losses.flatten(1).mean(1)


_LOSSES: dict[str, Callable[[Tensor, _Labels, Tensor | None], Tensor]] = {
    "categorical": _categorical,
    "gaussian": _gaussian,
    "bernoulli": _bernoulli,
}
