"""Per-layer clipping against a loop of autograd over single examples: C / √L for each of L
layers.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.gradients.clip import Clip
from dpkfc.gradients.discovery import find_layers
from tests.gradients.whitened import clip_in_library
from tests.sessions import cross_entropy as loss_fn

F64 = torch.float64


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(48, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).to(F64)


def data(n=6):
    g = torch.Generator().manual_seed(1)
    return 3 * torch.randn(n, 1, 6, 6, generator=g, dtype=F64), torch.randint(
        0, 3, (n,), generator=g
    )


def sum_by_layers(net, x, y, c):
    return clip_in_library(net, find_layers(net), (x, y), loss_fn, Clip(c, "per_layer"))[1]


@pytest.mark.parametrize("c", [1e-3, 0.3, 1e3])
def test_each_layer_is_clipped_to_its_share(c):
    net, (x, y) = model(), data()
    layers = find_layers(net)
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(len(x)):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        own = dict(zip(expected, torch.autograd.grad(loss, list(net.parameters())), strict=True))
        for layer in layers:
            norm = torch.cat([own[name].flatten() for name in layer.parameters.values()]).norm()
            for name in layer.parameters.values():
                expected[name] += own[name] * min(1.0, c / math.sqrt(len(layers)) / float(norm))
    found = sum_by_layers(net, x, y, c)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
