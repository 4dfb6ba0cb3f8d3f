"""SOFIM against a dense solve."""

import pytest
import torch

from dpkfc.postprocess import SOFIM
from tests.postprocess.cases import make_released

SHAPES = {"a": (3, 2), "b": (4,)}


def inputs(steps=5):
    return [{n: torch.randn(*shape).double() for n, shape in SHAPES.items()} for _ in range(steps)]


def flat(tensors):
    return torch.cat([tensors[n].flatten() for n in SHAPES])


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("direction", ["gradient", "momentum"])
def test_the_step_equals_a_dense_solve_over_all_parameters(direction, bias_correction):
    sofim = SOFIM(rho=0.7, beta=0.8, direction=direction, bias_correction=bias_correction)
    state = {}
    m = torch.zeros(10).double()
    for t, g in enumerate(inputs(), 1):
        value, state = sofim.apply(make_released(g, step=t), state)
        m = 0.8 * m + 0.2 * flat(g)
        momentum = m / (1 - 0.8**t) if bias_correction else m
        matrix = 0.7 * torch.eye(10).double() + torch.outer(momentum, momentum)
        expected = torch.linalg.solve(matrix, flat(g) if direction == "gradient" else momentum)
        torch.testing.assert_close(flat(value.gradients), expected, rtol=0, atol=5e-15)
        assert value.noise_variance is None


def test_the_warm_up_forms_momentum_and_moves_nothing():
    given = inputs(4)
    states = []
    for sofim in (SOFIM(warmup=3), SOFIM()):
        state = {}
        for t, g in enumerate(given):
            value, state = sofim.apply(make_released(g, step=t), state)
            assert sofim.warmup <= t or not flat(value.gradients).any()
        states.append((value, state))
    assert torch.equal(flat(states[0][0].gradients), flat(states[1][0].gradients))
    assert all(torch.equal(states[0][1][key], states[1][1][key]) for key in states[1][1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rho": 0.0}, "rho of SOFIM"),
        ({"beta": 1.0}, "beta of SOFIM"),
        ({"direction": "newton"}, "direction of SOFIM must be one of gradient, momentum"),
        ({"warmup": -1}, "warmup of SOFIM"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        SOFIM(**settings)


@pytest.mark.parametrize("direction", ["gradient", "momentum"])
def test_spare_memory_changes_no_result(direction):
    sofim, plain, reused = (
        SOFIM(rho=0.3, beta=0.8, direction=direction, bias_correction=True),
        {},
        {},
    )
    for t, g in enumerate(inputs(), 1):
        given = {name: x.clone() for name, x in g.items()}
        value, plain = sofim.apply(make_released(g, step=t), plain)
        # `apply` writes to no argument
        assert all(torch.equal(g[name], x) for name, x in given.items())
        quick, reused = sofim.apply_in_place(make_released(given, step=t), reused)
        assert torch.equal(flat(value.gradients), flat(quick.gradients))
        assert all(torch.equal(plain[name], reused[name]) for name in plain)
