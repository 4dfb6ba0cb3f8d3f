"""DiSK clips the combination of both gradients of an example: the sensitivity is C for every rule
of the norm engine.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from dpkfc.data.loading import layout
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.evaluation_points import EvaluationPoint
from dpkfc.postprocess import DiSK
from tests.gradients.cases import CASES, Case, build, loss_fn, sum_examples
from tests.gradients.whitened import loop_gradients, metric_of, whiten


class LastState(nn.Module):
    """A recurrent layer whose last state is classified."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Queries(nn.Module):
    """A learnt query that is handed to a layer as it is: the input that the tape notes IS the
    parameter.
    """

    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 3, 4))

        def forward(self, x):
            return self.query.expand(x.shape[0], -1, -1)

    def __init__(self):
        super().__init__()
        self.query, self.mix, self.head = self.Query(), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.query(x)) * x).mean(1))


CHOSEN = {
    "linear",
    "linear on long sequences",
    "conv2d",
    "conv2d grouped with bias",
    "embedding",
    "layer norm",
    "fallback",
}
CHOSEN |= {"class token", "attention", "layer used twice", "layers that share parameters"}
ALL = [case for case in CASES if case.name in CHOSEN]
ALL += [
    Case("recurrent", LastState, lambda n: torch.randn(n, 3, 4)),
    Case("queries", Queries, lambda n: torch.randn(n, 3, 4)),
    Case(
        "weight norm",
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3)),
        lambda n: torch.randn(n, 5),
    ),
]
DISKS = [DiSK(0.7, 0.5), DiSK(0.1, mode="storm"), DiSK(0.4, mode="look_ahead")]


def names(case):
    return case.name


def points_of(disk, model, d):
    own = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    points = []
    for e in disk.evaluations:
        displaced = {n: p + e.lookahead * d[n] for n, p in own.items()} if e.lookahead else None
        points.append(EvaluationPoint(displaced, e.weight))
    return points


def change(model, size):
    return {n: size * torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}


def combine_by_loop(model, batch, points):
    """By plain autograd, example by example: Σ over points of weight · gradient there."""
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    total = []
    for point in points:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_((point.parameters or own).get(name, own[name]))
        rows = [
            {n: point.weight * g for n, g in row.items()}
            for row in loop_gradients(model, batch, loss_fn)
        ]
        total = (
            [{n: a[n] + b[n] for n in a} for a, b in zip(total, rows, strict=True)]
            if total
            else rows
        )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(own[name])
    return total


def length(row):
    return math.sqrt(sum(float(g.double().square().sum()) for g in row.values()))


@pytest.mark.quick("*-dense", "linear-None")
@pytest.mark.parametrize("metric_kind", [None, "dense"])
@pytest.mark.parametrize("case", ALL, ids=names)
def test_the_clipped_sum_is_that_of_a_loop_that_clips_the_combination(case, metric_kind):
    if metric_kind and case.name in ("conv2d grouped with bias", "weight norm"):
        pytest.skip("no explicit matrices for groups and computed weights")
    for disk in DISKS:
        model, batch = build(case, n=4)
        layers = find_layers(model)
        metric = metric_of(layers, metric_kind) if metric_kind else {}
        points = points_of(disk, model, change(model, 0.3))
        rows = combine_by_loop(model, batch, points)
        whitened = []
        for row in rows:
            whitened.append({})
            for layer in layers:
                whitened[-1].update(whiten(layer, metric.get(layer.name), row))
        bound = float(np.median([length(row) for row in whitened]))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        total, norms = sum_examples(
            model, batch, bound, metric=metric, points=points, parts=layout(np.arange(4), 3)
        )
        assert_close(
            norms,
            torch.tensor([length(r) for r in whitened], dtype=torch.float64),
            rtol=1e-8,
            atol=1e-10,
        )
        for name in total:
            expected = sum(min(1.0, bound / length(row)) * row[name] for row in whitened)
            assert_close(
                total[name], expected, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
