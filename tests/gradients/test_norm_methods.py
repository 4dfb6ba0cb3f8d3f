"""Each norm method keeps the guarantee, whichever the rule would take."""

import pytest
import torch

from dpkfc.linalg.blocks import ConvBlock, MaterializedGradients, Outer
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import LowRank
from tests.gradients.whitened import side


def test_wide_gradients_are_not_kept_and_their_bound_holds_for_a_second_pass():
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
    assert isinstance(narrow.block, MaterializedGradients)


@pytest.mark.parametrize("method", [None, "gram"])
def test_what_a_metric_leaves_of_a_convolution_in_its_flattest_direction_stays_below_the_bound(
    method,
):
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
