"""The probe's loss: a likelihood of the model's output, with labels drawn from a public random stream.

With labels drawn from the model's own predictive distribution the output gradients are those of the Fisher information
(one Monte-Carlo draw); no label of a private example is involved.

Outputs `[N, K]` and `[N, T, K]` carry the classes on the last axis, `[N, K, *spatial]` with two spatial axes or more on
the second one. The loss of an example is the mean over its positions, as a training loss should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LABELS", "LIKELIHOODS", "Draws", "likelihood_loss", "logits_of"]

LABELS = ("model", "uniform", "given")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
_IGNORED = -100


class Draws:
    """Random numbers for a whole probe, handed out by rows, so that they do not depend on the micro-batch size.

    Args:
        generator: the probe's stream.
        total: examples in the probe.
    """

    def __init__(self, generator: torch.Generator, total: int) -> None:
        self.generator = generator
        self.total = total
        self._drawn: dict[str, Tensor] = {}

    def rows(self, kind: str, shape: tuple[int, ...], rows: slice, device: torch.device) -> Tensor:
        """Uniform or normal numbers `[len(rows), *shape]` that belong to those examples; float64."""
        if kind not in self._drawn:
            draw = torch.rand if kind == "uniform" else torch.randn
            self._drawn[kind] = draw(self.total, *shape, generator=self.generator, dtype=torch.float64)
        drawn = self._drawn[kind]
        if drawn.shape[1:] != shape:
            raise ValueError(
                f"the model's output changed its shape between probe micro-batches, {tuple(drawn.shape[1:])} to {shape}"
            )
        return drawn[rows].to(device)


def logits_of(output: Any) -> Tensor:
    """The tensor in a model's output: itself, its `.logits` or its item `logits`.

    Raises:
        ValueError: there is none, or it is not finite.
    """
    if not isinstance(output, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if not isinstance(found, Tensor):
            raise ValueError(
                f"the model's output on the probe is a {type(output).__name__} without `.logits`; give KFAC a "
                "loss(output, generator) that returns one loss an example"
            )
        output = found
    if not torch.isfinite(output).all():
        raise ValueError(
            f"the model's output on the probe (shape {tuple(output.shape)}) contains NaN or infinity; "
            "check the probe's scale and the model's parameters"
        )
    return output


def likelihood_loss(
    likelihood: str, output: Any, *, labels: str, given: Tensor | None, draws: Draws, rows: slice
) -> Tensor:
    """Negative log-likelihood of each probe example.

    Args:
        likelihood: categorical, gaussian (unit variance) or bernoulli.
        output: what the model returned.
        labels: model, uniform or given.
        given: the probe's own labels of these rows, or None.
        draws: random numbers of the whole probe.
        rows: which examples these are.

    Returns:
        Losses `[N]`.

    Raises:
        ValueError: labels that are missing or out of range, or an output that does not fit the likelihood.
    """
    logits = logits_of(output)
    if labels == "given" and given is None:
        raise ValueError("labels='given' needs a probe with labels, such as PublicData(inputs, labels, ...)")
    if labels != "given":
        given = None
    if logits.dim() < 1 or logits.shape[0] != rows.stop - rows.start:
        raise ValueError(
            f"the model returned shape {tuple(logits.shape)} for {rows.stop - rows.start} probe examples; "
            "the leading axis must be the batch"
        )
    return _LOSSES[likelihood](logits, labels, given, draws, rows)


def _categorical(logits: Tensor, labels: str, given: Tensor | None, draws: Draws, rows: slice) -> Tensor:
    if logits.dim() < 2 or (logits.dim() < 4 and logits.shape[-1] < 2):
        raise ValueError(
            f"a categorical likelihood needs logits [batch, ..., classes], got {tuple(logits.shape)}; "
            "use likelihood='bernoulli' or 'gaussian'"
        )
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    classes = logits.shape[-1]
    if given is not None:
        target = _checked_labels(given.to(logits.device), logits, classes)
    else:
        uniform = draws.rows("uniform", tuple(logits.shape[1:-1]), rows, logits.device)
        target = _drawn_classes(logits.detach(), uniform, labels)
    losses = F.cross_entropy(
        logits.reshape(-1, classes), target.reshape(-1), reduction="none", ignore_index=_IGNORED
    ).view(target.shape)
    counted = (target != _IGNORED).flatten(1).sum(1) if target.dim() > 1 else torch.ones_like(target)
    return losses.flatten(1).sum(1) / counted.clamp(min=1) if target.dim() > 1 else losses


def _drawn_classes(logits: Tensor, uniform: Tensor, labels: str) -> Tensor:
    """Classes by inverse transform of one uniform number a position."""
    classes = logits.shape[-1]
    if labels == "uniform":
        return (uniform * classes).long().clamp(max=classes - 1)
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform.unsqueeze(-1)).squeeze(-1).clamp(max=classes - 1)


def _checked_labels(given: Tensor, logits: Tensor, classes: int) -> Tensor:
    if given.shape != logits.shape[:-1] or given.is_floating_point():
        raise ValueError(
            f"the probe's labels have shape {tuple(given.shape)} and dtype {given.dtype}, but the logits need integer "
            f"labels of shape {tuple(logits.shape[:-1])}"
        )
    counted = given[given != _IGNORED]
    if counted.numel() and not (0 <= int(counted.min()) and int(counted.max()) < classes):
        raise ValueError(
            f"the probe's labels run from {int(counted.min())} to {int(counted.max())}, but the model has {classes} "
            "classes; relabel the public data or use labels='model'"
        )
    return given.long()


def _gaussian(logits: Tensor, labels: str, given: Tensor | None, draws: Draws, rows: slice) -> Tensor:
    if given is not None:
        target = _matching(given, logits)
    else:
        noise = draws.rows("normal", tuple(logits.shape[1:]), rows, logits.device).to(logits.dtype)
        target = logits.detach() + noise
    return _mean_over_outputs(0.5 * (logits - target).square())


def _bernoulli(logits: Tensor, labels: str, given: Tensor | None, draws: Draws, rows: slice) -> Tensor:
    if given is not None:
        target = _matching(given, logits)
    else:
        uniform = draws.rows("uniform", tuple(logits.shape[1:]), rows, logits.device)
        one = torch.sigmoid(logits.detach().double()) if labels == "model" else 0.5
        target = (uniform < one).to(logits.dtype)
    return _mean_over_outputs(F.binary_cross_entropy_with_logits(logits, target, reduction="none"))


def _matching(given: Tensor, logits: Tensor) -> Tensor:
    if given.numel() != logits.numel():
        shapes = f"{tuple(given.shape)}, the model's output {tuple(logits.shape)}"
        raise ValueError(f"the probe's labels have shape {shapes}; they must match")
    return given.to(logits).view_as(logits)


def _mean_over_outputs(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


_LOSSES: dict[str, Callable[[Tensor, str, Tensor | None, Draws, slice], Tensor]] = {
    "categorical": _categorical,
    "gaussian": _gaussian,
    "bernoulli": _bernoulli,
}
