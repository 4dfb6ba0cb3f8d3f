"""The noise in the averaged weights of a convex head, from which intervals of effects follow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.config import Plan
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.second_moments import MOMENTS, SecondMoments


def noise_covariance(
    plan: Plan, state: PreconditionerState, rate: float, curvature: float
) -> Tensor | None:
    """Return the covariance of the noise in the averaged weights of one output `[d, d]`.

    It is exact for a quadratic loss; the steps of the plan are replayed for its noise alone.

    Args:
        plan: of a run as `convex_config` plans it.
        state: the second moments of that run.
        rate: of the steps.
        curvature: mean second derivative of the loss in an output; 1 for a squared error.

    Returns:
        None for another plan.
    """
    config = plan.config
    average = config.weight_average
    if not isinstance(config.preconditioner, SecondMoments) or average is None or plan.bands > 1:
        return None
    # `SecondMoments` builds a dense root of the inputs.
    (entry,) = state.metric.values()
    side: Any = vars(entry)["input"]
    root = side.root.double().cpu()
    scales, basis = torch.linalg.eigh(root)
    values = scales.square().reciprocal()
    kind = plan.extra_release(MOMENTS)
    noise = kind.stddev / plan.dataset_size * math.sqrt(2 * len(values))
    values = values - config.preconditioner.damping * noise
    is_seen = values > noise
    rest = state.report[0]["trace"] - float(values[is_seen].sum())
    values[~is_seen] = max(rest, 0.0) / max(1, int((~is_seen).sum()))
    kept = 1 - rate * curvature * values * scales.square()
    # What a unit of noise in one step is in the average at the end, the last step first.
    weights = torch.zeros_like(values)
    averaged = torch.zeros_like(values)
    total = torch.zeros_like(values)
    for first in range(plan.steps):
        weights, averaged = torch.full_like(values, -rate), torch.zeros_like(values)
        for step in range(first, plan.steps):
            decay = average.decay_at(step)
            averaged = decay * averaged + (1 - decay) * weights
            weights = kept * weights
        total += averaged.square()
    variance = total * (plan.stddev / plan.expected_batch_size) ** 2
    return basis * (scales.square() * variance) @ basis.T


@torch.no_grad()
def mean_curvature(model: nn.Module, rows: Tensor) -> float:
    """Return the mean second derivative of the loss in an output, 1 for a number.

    Args:
        model: with one output a class, or one for a number.
        rows: public, encoded `[N, width]`.
    """
    outputs = model(rows)
    classes = outputs.shape[1]
    if classes == 1:
        return 1.0
    shares = outputs.softmax(1)
    return float((shares * (1 - shares)).mean()) * classes / (classes - 1)
