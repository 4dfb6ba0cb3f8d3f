"""Questions that are put off and answered with yes: norms are taken again, and are those of asking
at once.
"""

import pytest
import torch

from dpkfc.linalg.blocks import Lookup, Outer, Tied
from dpkfc.linalg.deferred_flags import defer_flags
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import Diagonal
from tests.patching import patch_linalg

N, T, D, V = 3, 6, 160, 200


def draw_cancelling(width):
    """Rows each followed by all but its opposite."""
    x = torch.randn(N, T // 2, 1, width)
    return torch.cat([x, 1e-4 * torch.randn(x.shape) - x], 2).flatten(1, 2)


def blocks():
    torch.manual_seed(0)
    outer = Outer(draw_cancelling(D), torch.randn(N, 1, V).expand(-1, T, -1).contiguous())
    lookup = Lookup(torch.ones(N, T, dtype=torch.int64), draw_cancelling(D), V)
    return {"outer": outer, "lookup": lookup, "tied": Tied(lookup, outer)}


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("kind", ["outer", "lookup", "tied"])
def test_norms_taken_again_are_those_of_asking_at_once(kind, whitened, monkeypatch):
    inputs = {"outer": D, "lookup": V, "tied": D}[kind]
    outputs = {"outer": V, "lookup": D, "tied": V}[kind]
    metric = (
        Kronecker(Diagonal(torch.rand(inputs) + 0.5), Diagonal(torch.rand(outputs) + 0.5))
        if whitened
        else None
    )
    at_once = per_example_norms(blocks()[kind], metric, "gram" if kind == "tied" else None).norms
    patch_linalg(monkeypatch, "is_on_accelerator", lambda x: True)  # as if it lay on a card
    with defer_flags() as asked:
        found = per_example_norms(blocks()[kind], metric, "gram" if kind == "tied" else None)
    assert any(map(bool, asked)) and found.recompute is not None
    assert not torch.equal(found.norms, at_once)
    assert torch.equal(found.recompute(), at_once)
