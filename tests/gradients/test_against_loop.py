"""Every rule, every norm method and every metric against a loop of autograd over single examples,
in float64.
"""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.rules import blocks_of
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, PerExample
from dpkfc.linalg.norms import per_example_norms
from tests.gradients.cases import CASES, build, loss_fn
from tests.gradients.loop import record
from tests.gradients.whitened import check, loop_gradients, metric_of, whiten

SIDES = ("identity", "diagonal", "dense", "lowrank")


@pytest.mark.parametrize("kind", [None, *SIDES])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_clipped_sum_equals_a_loop(case, kind):
    check(*build(case), loss_fn, kind)


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_norm_method_agrees(case, kind):
    model, batch = build(case)
    layers = find_layers(model)
    metric = metric_of(layers, kind)
    calls = record(model, layers, lambda: loss_fn(model, batch))
    rows = loop_gradients(model, batch, loss_fn)
    for layer in layers:
        block = blocks_of(layer, calls[layer.name], 5)
        exact = torch.stack(
            [
                torch.stack(
                    [g.norm() for g in whiten(layer, metric[layer.name], row).values()]
                ).norm()
                for row in rows
            ]
        )
        methods = [None]
        if isinstance(block, (Outer, ConvBlock)):
            methods = ["gram", "materialised"]
            if isinstance(block, Outer) and block.a.shape[1] == 1:
                methods.append("rank-one")
        else:
            assert isinstance(block, (Lookup, PerExample))
        for method in methods:
            found = per_example_norms(block, metric[layer.name], method).norms
            assert_close(found, exact, rtol=1e-9, atol=1e-12)
