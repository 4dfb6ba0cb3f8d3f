"""The variance that a release carries is that of its noise, through every read-out and filter,
across rebuilt metrics.
"""

from itertools import zip_longest

import pytest
import torch

from dpkfc.linalg.metric import Eigenbasis, Elementwise, Kronecker
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank
from dpkfc.postprocess import EMA, DiSK, LowPass
from dpkfc.postprocess.pipeline import PostprocessPipeline
from tests.models import randn
from tests.postprocess.cases import chain_steps, make_released, several_layers

FILTERS = [
    (),
    (EMA(0.4, "zero"),),
    (EMA(0.4, "bias_corrected"),),
    (DiSK(0.4),),
    (LowPass.butterworth(2, 0.4),),
    (LowPass.butterworth(3, 0.5),),
]


def dense(d):
    q, _ = torch.linalg.qr(randn(d, d))
    values = torch.rand(d, dtype=torch.float64) + 0.3
    return Dense((q * values) @ q.T, float(values.max()))


def some_metric(seed):
    """A map of every kind; another one after the metric was rebuilt."""
    torch.manual_seed(seed)
    q, _ = torch.linalg.qr(randn(2, 2))
    vectors, _ = torch.linalg.qr(randn(3, 1))
    return {
        "linear": Kronecker(LowRank(vectors, torch.tensor([0.4]).double(), 1.1), dense(3)),
        "bare": Eigenbasis(torch.rand(2, 2, dtype=torch.float64) + 0.3, input=q),
        "conv": Kronecker(dense(3), Diagonal(torch.tensor([0.7]).double())),
        "table": Kronecker(Diagonal(torch.rand(3, dtype=torch.float64) + 0.3), dense(2)),
        "norm": Elementwise(
            {r: torch.rand(3, dtype=torch.float64) + 0.3 for r in ("weight", "bias")}
        ),
    }


@pytest.mark.quick("*-whitened", "*DiSK*-natural", "*LowPass*-inverse")
@pytest.mark.parametrize("readout", ["whitened", "natural", "inverse"])
@pytest.mark.parametrize("steps", FILTERS, ids=str)
def test_the_variance_is_exact(steps, readout):
    """Everything here is linear in the noise: the squares of the answers to a unit in each entry of
    each release add up.
    """
    model, layers = several_layers()
    old, new = some_metric(1), some_metric(2)
    metrics = [{}, old, old, new]
    shapes = {n: p.shape for n, p in model.named_parameters()}
    zero = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    answers = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    entries = [
        [(n, j) for n in layer.parameters.values() for j in range(shapes[n].numel())]
        for layer in layers
    ]
    for t in range(len(metrics)):
        for units in zip_longest(*entries):  # layers do not touch: an entry of each at a time
            fed = [{n: x.clone() for n, x in zero.items()} for _ in metrics]
            for name, j in filter(None, units):
                fed[t][name].view(-1)[j] = 0.5  # the standard deviation of a release
            value = chain_steps(steps, readout, metrics, layers, fed)
            for n, x in value.gradients.items():
                answers[n] += x.square()
    for name, expected in answers.items():
        found = torch.as_tensor(value.variance_of(name), dtype=torch.float64).expand(shapes[name])
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_maps_are_formed_once_for_a_metric(monkeypatch):
    _, layers = several_layers()
    model, _ = several_layers()
    count = 0
    original = Dense.inverse

    def count_calls(side):
        nonlocal count
        count += 1
        return original(side)

    monkeypatch.setattr(Dense, "inverse", count_calls)
    chain, old, new = PostprocessPipeline((), "inverse"), some_metric(1), some_metric(2)
    zero = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    counts = []
    for t, metric in enumerate([old, old, old, new, new]):
        chain.apply(make_released(zero, 0.25, t), metric, layers)
        counts.append(count)
    assert counts == [3, 3, 3, 6, 6]


def test_behind_two_filters_the_variance_is_not_known():
    """The second filter's input is not independent between steps: nothing is said rather than
    something wrong.
    """
    _, layers = several_layers()
    inputs = [{"w": torch.zeros(2)}] * 2
    value = chain_steps((DiSK(0.5), LowPass()), "whitened", [{}, {}], layers, inputs)
    assert value.noise_variance is None
    with pytest.raises(ValueError, match="variance of the noise is not known"):
        value.variance_of("w")


def test_float32_tensors_keep_their_type_and_a_number_stays_a_number():
    g = {"w": torch.randn(3, 2)}
    state = {}
    for t in range(3):
        value, state = LowPass().apply(make_released(g, 0.25, t), state)
        assert (
            isinstance(value.noise_variance, float) and value.gradients["w"].dtype == torch.float32
        )
    state = {}
    for t in range(3):
        value, state = DiSK(0.5).apply(make_released(g, {"w": torch.rand(3, 2)}, t), state)
        assert (
            value.variance_of("w").shape == (3, 2) and value.variance_of("w").dtype == torch.float32
        )


def test_an_identity_side_goes_where_the_other_side_is():
    """The square of an identity is made on the CPU, whatever device the other side is on, and in
    whatever precision.
    """
    root = torch.eye(3, device="meta")
    for entry in (
        Kronecker(Identity(2.0), Dense(root, 1.0)),
        Kronecker(Dense(root, 1.0), Identity(2.0)),
    ):
        assert entry.variance().device.type == "meta"
    mixed = Kronecker(Identity(2.0), Diagonal(torch.ones(3)))
    assert torch.equal(mixed.variance().double(), torch.full((3, 1), 4.0).double())
