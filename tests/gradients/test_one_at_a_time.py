"""Rows that are differentiated one at a time: their weights, their random numbers, and passes that
do not count.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.data.loading import Part
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_sum import GradientMode, clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint
from dpkfc.tracking.states import Unknown
from tests.gradients.cases import sum_examples
from tests.models import randn

N = 4
ALONE = Unknown("test", "as if nothing were proved")


def loss_fn(model, batch):
    return model(batch[0]).sin().sum(1)


def part_of(weights, group):
    values = None if weights is None else np.array(weights)
    return Part(records=np.arange(N), weights=values, units=N // group, group=group)


def check_sum(model, found, expected):
    total = torch.cat([found[name].flatten() for name, _ in model.named_parameters()])
    assert_close(total, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.0, 2.0]])
def test_the_weighted_sum_equals_a_loop(weights, group, alone):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), randn(N, 3)
    mode = GradientMode(unproved_operation=ALONE if alone else None)
    parts = [part_of(weights, group)]
    found, norms = sum_examples(model, (x,), 0.8, loss_fn, parts=parts, mode=mode)
    rows = []
    for i, weight in enumerate(weights or [1.0] * N):
        grads = torch.autograd.grad(
            loss_fn(model, (x[i : i + 1],)).sum() * weight, list(model.parameters())
        )
        rows.append(torch.cat([g.flatten() for g in grads]))
    units = torch.stack(rows).view(N // group, group, -1).sum(1)
    lengths = units.norm(dim=1)
    expected = (units * (0.8 / lengths).clamp(max=1).unsqueeze(1)).sum(0)
    assert_close(norms, lengths, rtol=1e-10, atol=1e-12)
    check_sum(model, found, expected)


def test_a_scripted_part_of_a_model_is_differentiated_by_example():
    torch.manual_seed(0)
    part = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval()))
    model, x = nn.Sequential(part, nn.Linear(2, 2)).double(), randn(N, 3)
    found, _ = sum_examples(model, (x,), 0.8, loss_fn)
    expected = []
    for i in range(N):
        gradients = torch.autograd.grad(loss_fn(model, (x[i : i + 1],)).sum(), model.parameters())
        row = torch.cat([g.flatten() for g in gradients])
        expected.append(row * (0.8 / row.norm()).clamp(max=1))
    check_sum(model, found, torch.stack(expected).sum(0))


def test_a_parameter_made_of_the_outputs_of_a_batch_mixes_no_examples():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), randn(N, 3)

    def loss(model, batch):
        out = model(batch[0])
        return (out * nn.Parameter(out.detach().mean(0))).sum(1)

    found, _ = sum_examples(model, (x,), 0.8, loss)
    expected = torch.zeros(8).double()
    for i in range(N):
        gradients = torch.autograd.grad(loss(model, (x[i : i + 1],)), list(model.parameters()))
        row = torch.cat([g.flatten() for g in gradients])
        expected += row * (0.8 / row.norm()).clamp(max=1)
    check_sum(model, found, expected)


def test_no_sum_is_taken_in_inference_mode():
    model, x = nn.Linear(3, 2), torch.ones(N, 3)
    words = {"loss_fn": loss_fn, "one_record": lambda i: (x[i : i + 1],)}
    batches = [((x,), part_of(None, 1))]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="nothing was released"):
        clipped_sum(model, find_layers(model), {}, Clip(1.0), micro_batches=batches, **words)


@pytest.mark.parametrize("operation", [None, ALONE])
def test_no_point_sees_what_a_pass_at_another_wrote_into_the_batch(operation):
    model, x = nn.Linear(3, 2).double(), randn(N, 3)

    def batch_of(rows):
        return {"x": rows.clone()}

    def loss_that_writes(model, batch):
        return loss_fn(model, (batch.pop("x").mul_(2),))

    found, _ = clipped_sum(
        model,
        find_layers(model),
        {},
        Clip(1e9),
        loss_fn=loss_that_writes,
        micro_batches=[(batch_of(x), part_of(None, 1))],
        one_record=lambda i: batch_of(x[i : i + 1]),
        mode=GradientMode(unproved_operation=operation),
        points=[AT_MODEL_PARAMETERS, EvaluationPoint(weight=0.5), EvaluationPoint(weight=0.25)],
    )
    losses = 1.75 * loss_fn(model, (2 * x,))
    expected = torch.autograd.grad(losses.sum(), list(model.parameters()))
    assert_close(list(found.values()), list(expected), rtol=1e-10, atol=1e-12)


def test_micro_batches_after_the_counted_ones_are_not_summed():
    model, x = nn.Linear(3, 2).double(), randn(N, 3)
    one = part_of(None, 1)
    expected, norms = sum_examples(model, (x,), 1.0, loss_fn, parts=[one])
    found, counted = sum_examples(model, (x,), 1.0, loss_fn, parts=[one, one], num_summed=1)
    assert torch.equal(counted, norms)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
