"""The figures of one private step by what is whitened, against dense matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.sides import Dense


@pytest.fixture
def which_side(study_module):
    return study_module("which_side")


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _gradients(model, x, y):
    """One example after the other, each layer's weight and bias side by side."""
    found = []
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        F.cross_entropy(model(one[None]), label[None]).backward()
        found.append(
            {
                name: torch.cat(
                    [model[int(name)].weight.grad, model[int(name)].bias.grad[:, None]], 1
                )
                for name in "02"
            }
        )
    return found


def _flat(of):
    return torch.cat([of["0"].flatten(), of["2"].flatten()])


def _dense_metric():
    roots = {
        n: (lambda m: m @ m.mT + torch.eye(n))(torch.randn(n, n, dtype=torch.float64))
        for n in (3, 4, 5)
    }
    return {
        name: Kronecker(_side(roots[d_in]), _side(roots[d_out]))
        for name, d_in, d_out in (("0", 4, 4), ("2", 5, 3))
    }


def _side(root):
    return Dense(root, float(torch.linalg.matrix_norm(root, 2)))


@pytest.mark.parametrize("whitened", [False, True])
def test_a_step_is_that_of_dense_matrices(which_side, whitened):
    model, x, y = _model(), torch.randn(7, 3, dtype=torch.float64), torch.randint(3, (7,))
    seen = which_side.Measured(model, x, y)
    metric = _dense_metric() if whitened else None
    mapped = [
        which_side.apply_metric({n: g[None] for n, g in one.items()}, metric)
        for one in _gradients(model, x, y)
    ]
    z = torch.stack([_flat({name: g[0] for name, g in one.items()}) for one in mapped])
    clip = z.norm(dim=1).median()
    step = (z * (1 / z.norm(dim=1)).clamp(max=1 / clip)[:, None]).mean(0)
    gradient = torch.stack([_flat(one) for one in _gradients(model, x, y)]).mean(0)
    p = model(x).softmax(1).detach()
    fisher = torch.zeros(len(step), len(step), dtype=torch.float64)
    for c in range(3):
        rows = torch.stack([_flat(one) for one in _gradients(model, x, torch.full((7,), c))])
        fisher += (p[:, c, None] * rows).T @ rows / 7
    drawn = torch.stack([_flat(one) for one in _gradients(model, x, seen.drawn)])
    noise = (which_side.SIGMA / which_side.BATCH) ** 2 * drawn.square().sum() / 7
    found = dict(seen.steps(metric))[""]
    expected = {"signal": step @ gradient, "curvature": step @ fisher @ step, "noise": noise}
    assert {name: found[name] for name in expected} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-9
    )
    uphill = {**found, "signal": -abs(found["signal"])}
    assert which_side.decrease(uphill) is None
    assert which_side.decrease({**found, "signal": abs(found["signal"])}) == pytest.approx(
        found["signal"] ** 2 / 2 / (found["curvature"] + found["noise"])
    )
    assert (which_side.BACK in dict(seen.steps(metric))) == whitened


def test_a_step_uphill_takes_nothing_off_the_loss(which_side):
    """Also in the table, whose earlier form squared the signal."""
    one = {"signal": -0.5, "curvature": 0.1, "noise": 0.1}
    back = {**one, "signal": 0.2}
    held = {"none": one, f"inputs{which_side.BACK}": back, "inputs": one}
    lines = which_side.table({"stages": {"start": held}}).splitlines()
    assert lines[3] == "| none | -500.0 | 100.0 | 100.0 | none |  |"
    assert lines[4] == "| inputs | -500.0 | 100.0 | 100.0 | none | 100.0 |"
