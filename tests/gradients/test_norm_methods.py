"""A norm method that is named for a layer changes neither the clipped sum nor the guarantee,
whatever the rule would take.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkfc import PrivacyConfig
from dpkfc.gradients.clipped_sum import Clip, ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import ConvBlock, MaterializedGradients, Outer
from dpkfc.linalg.metric import Kronecker, LowRank
from dpkfc.linalg.norms import per_example_norms
from tests.gradients.whitened import metric_of, side


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 36)).double()


def summed(model: nn.Module, metric, methods) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    layers = find_layers(model)
    torch.manual_seed(1)
    x, tape = torch.randn(6, 5, 40, dtype=torch.float64), Tape(model, layers)
    with tape:
        losses = model(x).square().sum((1, 2))
    summer = ClippedSummer(layers, metric, Clip(0.5, methods=methods))
    norms = summer.add(tape.backward(losses), 6)
    return summer.result(), norms


@pytest.mark.parametrize("kind", ["identity", "dense", "lowrank"])
def test_every_method_gives_the_same_clipped_sum(kind: str) -> None:
    model = network()
    metric = metric_of(find_layers(model), kind)
    expected, norms = summed(model, metric, {})
    for methods in ({"0": "gram", "2": "materialised"}, {"0": "materialised", "2": "gram"}):
        found, other = summed(model, metric, methods)
        torch.testing.assert_close(other, norms, rtol=1e-10, atol=0)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_wide_gradients_are_not_kept_and_their_bound_holds_for_a_second_pass() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(8, 7, 80), torch.randn(8, 7, 70)
    metric = Kronecker(
        *(type(s)(s.root.float(), s.operator_norm) for s in (side("dense", 80), side("dense", 70)))
    )
    found = per_example_norms(Outer(a, b), metric, "materialised")
    assert not found.whitened and not isinstance(found.block, MaterializedGradients)
    exact = torch.stack(
        [
            torch.linalg.matrix_norm(
                metric.output.root.double() @ (y.T @ x).double() @ metric.input.root.double()
            )
            for x, y in zip(a.double(), b.double(), strict=True)
        ]
    )
    assert bool((found.norms >= exact).all()) and bool((found.norms <= exact * 1.001).all())
    narrow = per_example_norms(Outer(a[..., :9], b[..., :9]), Kronecker(), "materialised")
    assert narrow.whitened and isinstance(narrow.block, MaterializedGradients)


@pytest.mark.parametrize("method", ["gram", "materialised"])
def test_the_bound_of_an_example_does_not_follow_the_length_of_its_neighbours(method: str) -> None:
    """A longer neighbour pads its rows with zeros, and the method stays the one that was named."""
    torch.manual_seed(3)
    a, b = torch.randn(1, 1, 60), torch.randn(1, 1, 50)
    alone = per_example_norms(Outer(a, b), None, method).norms[0]
    padded = torch.zeros(2, 9, 60), torch.zeros(2, 9, 50)
    padded[0][0, :1], padded[1][0, :1] = a[0], b[0]
    padded[0][1], padded[1][1] = torch.randn(9, 60), torch.randn(9, 50)
    padded_norms = per_example_norms(Outer(*padded), None, method).norms[0]
    assert float(abs(padded_norms - alone) / alone) < 1e-6


def test_names_and_methods_are_checked_before_anything_is_spent() -> None:
    with pytest.raises(ValueError, match="layer '0' can use gram or materialised, not 'fast'"):
        PrivacyConfig(expected_batch_size=4, steps=1, norm_methods={"0": "fast"})
    config = PrivacyConfig(expected_batch_size=4, steps=1, norm_methods={"7": "gram"})
    with pytest.raises(ValueError, match="layers that the model has not: 7"):
        config.clip(["0", "2"])
    assert config.clip(["7"]).methods == {"7": "gram"}


@pytest.mark.parametrize("method", [None, "gram"])
def test_what_a_metric_leaves_of_a_convolution_in_its_flattest_direction_stays_below_the_bound(
    method: str | None,
) -> None:
    """One position, so that no sum over positions hides it: the sum is whitened, and rounds
    relative to what it was before.
    """
    generator, n, width = torch.Generator().manual_seed(0), 4, (640, 512)
    flat = [
        torch.linalg.qr(torch.randn(d, 3, generator=generator, dtype=torch.float64)).Q.float()
        for d in width
    ]
    metric = Kronecker(*(LowRank(v, torch.full((3,), 1e-4), 1.0) for v in flat))
    x, b = ((torch.randn(n, 3, generator=generator) @ v.T)[..., None, None] for v in flat)
    block = ConvBlock(
        x=x,
        b=b,
        kernel=(1, 1),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
        weight=True,
        bias=False,
    )
    found = per_example_norms(block, metric, method)
    assert not found.whitened
    for i, bound in enumerate(found.norms):
        share = metric.apply(found.block.weighted_sum(torch.eye(n)[i]))
        assert torch.linalg.vector_norm(share, dtype=torch.float64) <= bound
