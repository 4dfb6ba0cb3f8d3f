"""The loss on a probe: a likelihood of the model's output, with labels from a public random stream.

With labels drawn from the model's own predictive distribution the output gradients are those of the
Fisher information (one Monte-Carlo draw). No label of a private example is used.

Outputs `[N, K]` and `[N, T, K]` have the classes on the last axis, `[N, K, *spatial]` with two or
more spatial axes on the second. The loss of an example is the mean over its positions, as a
training loss should be. With a padding mask the mean is over its text positions, and the others
have no gradient.

Logits of a language model are large, `[N, T, 50 000]`. Labels and cross-entropy are computed a few
rows at a time, and the only copy of the logits' size is their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
        self._numbers: dict[str, Tensor] = {}

    def rows(self, kind: str, shape: tuple[int, ...], rows: slice, device: torch.device) -> Tensor:
        """Return uniform or normal numbers `[len(rows), *shape]` of these examples; float64."""
        if kind not in self._numbers:
            draw = torch.rand if kind == "uniform" else torch.randn
            self._numbers[kind] = draw(
                self.total, *shape, generator=self.generator, dtype=torch.float64
            )
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
        return self.draws.rows(distribution, tuple(like.shape[1:]), self.rows, like.device)


def logits_of(output: Any) -> Tensor:
    """Return the tensor in a model's output: itself, its `.logits` or its item `logits`.

    Raises:
        ValueError: no such tensor, or one that is not finite.
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
    if logits.numel() and not all(torch.isfinite(x) for x in torch.aminmax(logits)):
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
    logits = logits_of(output)
    if labels == "given" and given is None:
        raise ValueError(
            "labels='given' needs a probe with labels, such as PublicData(inputs, labels, ...)"
        )
    if labels != "given":
        given = None
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
    return _LOSSES[likelihood](logits, _Labels(labels, given, draws, rows), mask)


def labels_fit(likelihood: str, output: Any, given: Tensor) -> bool:
    """Return whether labels `[n, ...]` have the shape and the classes of an output `[N, ...]`."""
    logits = logits_of(output)
    if likelihood != "categorical":
        return given[0].numel() == logits[0].numel()
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    if given.is_floating_point() or given.shape[1:] != logits.shape[1:-1]:
        return False
    counted = given[given != _IGNORED]
    if not counted.numel():
        return True
    return 0 <= int(counted.min()) and int(counted.max()) < logits.shape[-1]


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
    flat = logits.reshape(-1, classes)
    losses: Tensor = _CrossEntropy.apply(flat, target.reshape(-1), counted.reshape(-1))
    losses = losses.view(target.shape)
    if target.dim() == 1:
        return losses
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    """−log softmax(logits) at the target `[M]`, zero for a row that does not count.

    The backward pass needs only the logits and writes one tensor of their size. Torch's own
    cross-entropy takes three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        target = target.clamp(min=0).unsqueeze(1)
        total = [torch.logsumexp(x.to(_wide(x)), 1) for x in _pieces(logits)]
        normaliser = torch.cat(total) if total else logits.new_zeros(0)
        ctx.save_for_backward(logits, target, counted, normaliser)
        losses = normaliser - logits.gather(1, target).squeeze(1)
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, counted, normaliser = ctx.saved_tensors
        weight = gradient.masked_fill(~counted, 0.0).unsqueeze(1)
        out = torch.empty_like(logits)
        start = 0
        for x in _pieces(logits):
            rows = slice(start, start + x.shape[0])
            p = torch.exp(x.to(normaliser.dtype) - normaliser[rows].unsqueeze(1))
            p.scatter_add_(1, target[rows], p.new_full(target[rows].shape, -1.0))
            out[rows] = p.mul_(weight[rows])
            start = rows.stop
        return out, None, None


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


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
    step = max(1, _PIECE // classes)
    numbers = uniform.reshape(-1, 1).split(step)
    drawn = []
    for x, u in zip(_pieces(logits.reshape(-1, classes)), numbers, strict=True):
        drawn.append(torch.searchsorted(torch.softmax(x.double(), -1).cumsum(-1), u))
    if not drawn:
        return uniform.long()
    return torch.cat(drawn).view(uniform.shape).clamp(max=classes - 1)


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
    return _mean_over_outputs(0.5 * (logits - target).square(), mask)


def _bernoulli(logits: Tensor, source: _Labels, mask: Tensor | None) -> Tensor:
    if source.given is not None:
        target = _match_shape(source.given, logits)
    else:
        uniform = source.numbers("uniform", logits)
        one = torch.sigmoid(logits.detach().double()) if source.kind == "model" else 0.5
        target = (uniform < one).to(logits.dtype)
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
        return (losses.mean(2) * counted).sum(1) / counted.sum(1).clamp(min=1)
    if losses.dim() == 1:
        return losses
    return losses.flatten(1).mean(1)


_LOSSES: dict[str, Callable[[Tensor, _Labels, Tensor | None], Tensor]] = {
    "categorical": _categorical,
    "gaussian": _gaussian,
    "bernoulli": _bernoulli,
}
