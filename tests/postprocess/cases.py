"""What the tests of post-processing share: releases made by hand, and chains driven by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Metric
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.privacy.mechanism import Released


def make_released(gradients: dict[str, Tensor], variance: object = 0.25, step: int = 0) -> Released:
    return Released(gradients=gradients, noise_variance=variance, step=step, release=step + 1)  # type: ignore[arg-type]


def run(step: PostProcess, inputs: Iterable[Tensor], variance: object = 0.25) -> list[Released]:
    """What a step makes of a sequence of releases of one parameter 'w'."""
    state: dict[str, Tensor] = {}
    results = []
    for t, g in enumerate(inputs):
        value, state = step.apply(make_released({"w": g}, variance, t), state)
        results.append(value)
    return results


def noise_gain(step: PostProcess, t: int) -> float:
    """The variance of the noise after step t (from 0), over that of a release."""
    last = run(step, [torch.zeros(1)] * (t + 1), 1.0)[-1].noise_variance
    assert isinstance(last, float)
    return last


def chain_steps(
    steps: Sequence[PostProcess],
    readout: str,
    metrics: Sequence[Metric],
    layers: Sequence[Layer],
    inputs: Sequence[dict],
) -> Released:
    """The last value of a chain fed with one release a metric."""
    chain = PostprocessPipeline(steps, readout)
    for t, (metric, gradients) in enumerate(zip(metrics, inputs, strict=True)):
        value = chain.apply(make_released(gradients, 0.25, t), metric, layers)
    return value


def several_layers() -> tuple[nn.Module, list[Layer]]:
    """A model with a layer of every kind of map: rows, patches with groups, a table, a norm
    layer.
    """
    torch.default_generator.manual_seed(0)
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 3),
            "bare": nn.Linear(2, 2, bias=False),
            "conv": nn.Conv1d(2, 2, 2, groups=2),
            "table": nn.Embedding(3, 2),
            "norm": nn.LayerNorm(3),
        }
    ).double()
    return model, find_layers(model)
