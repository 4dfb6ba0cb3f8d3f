"""The step written by hand, the yardstick of the speed benchmark, against single examples."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("models", "written_by_hand")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["cnn", "encoder-32", "mlp", "wrn"])
def test_a_step_written_by_hand_clips_the_gradient_of_each_example(benchmarks, name):
    models, by_hand = benchmarks
    case = models.cases(smoke=True)[f"smoke-{name}"]
    torch.manual_seed(0)
    model = case.build().double()
    x, y = case.data(case.batch_size)
    if x.is_floating_point():
        x = x.double()
    else:
        model.positions = model.positions.double()
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for i in range(len(y)):
        loss = case.losses(model, x[i : i + 1], y[i : i + 1]).sum()
        gradient = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        for total, g in zip(expected, gradient, strict=True):
            total += g * (0.5 / norm).clamp_max(1.0) / len(y)
    private = by_hand.HandWritten(model, 0.5, 0.0)
    private.backward(lambda model: case.losses(model, x, y))
    for p, total in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, total, rtol=1e-10, atol=1e-13)


def test_a_step_written_by_hand_names_a_module_that_it_does_not_know(benchmarks):
    _, by_hand = benchmarks
    with pytest.raises(ValueError, match="no rule for Bilinear"):
        by_hand.HandWritten(torch.nn.Bilinear(2, 2, 2), 1.0, 1.0)
