"""Layers that read the same rows share what is made of them, and what they share is what each would
have made.
"""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg import linear_norms, norms
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import Diagonal, Identity, LowRank
from tests.models import randn

N, T, D = 3, 5, 40


class Attention(nn.Module):
    """Three maps of one tensor, the last of them without a bias, and one of another."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(D, D),
            nn.Linear(D, D),
            nn.Linear(D, D, bias=False),
        )
        self.out = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out(torch.softmax(q @ k.mT / D**0.5, -1) @ v)


def low_rank(d, k=3):
    vectors = torch.linalg.qr(randn(d, k))[0]
    return LowRank(vectors, 0.5 + torch.rand(k, dtype=torch.float64), 0.7)


def record_tape(model):
    layers, tape = find_layers(model), Tape(model, find_layers(model))
    x = randn(N, T, D)
    with tape:
        losses = model(x).square().sum((1, 2))
    return layers, tape.backward(losses)


METRICS = {
    "identity": lambda: {},
    "shared side": lambda: _share_side(low_rank(D + 1), 1.7),
    "other factors": lambda: {
        **_share_side(side := low_rank(D + 1), 1.7),
        "key": Kronecker(side, Identity(0.3)),
    },
    "other sides": lambda: {
        **_share_side(low_rank(D + 1), 1.7),
        "key": Kronecker(low_rank(D + 1), low_rank(D)),
    },
}


def _share_side(side, factor):
    return {name: Kronecker(side, Identity(factor)) for name in ("query", "key", "out")} | {
        "value": Kronecker(low_rank(D))
    }


@pytest.mark.parametrize("name", METRICS)
def test_sums_and_norms_are_those_of_layers_on_their_own(name, monkeypatch):
    torch.manual_seed(0)
    model, metric = Attention().double(), METRICS[name]()
    layers, calls = record_tape(model)
    alone = {}
    for layer in layers:
        block = blocks_of(layer, calls[layer.name], N)
        entry = metric.get(layer.name, Kronecker())
        g = entry.output.apply_left(entry.input.apply(block.per_example()))  # by brute force
        alone[layer.name] = per_example_norms(block, metric.get(layer.name), "gram").norms
        assert_close(alone[layer.name], g.flatten(1).norm(dim=1), rtol=1e-9, atol=0)
    monkeypatch.setattr(norms, "choose_norm_method", lambda block: "gram")
    made = list[int]()
    products = linear_norms._row_products
    monkeypatch.setattr(linear_norms, "_row_products", lambda x: made.append(1) or products(x))
    applied = list[int]()
    whiten = LowRank.apply_homogeneous
    monkeypatch.setattr(
        LowRank, "apply_homogeneous", lambda self, x: applied.append(1) or whiten(self, x)
    )
    summer = ClippedSummer(layers, metric, Clip(1e9))
    found = summer.add(calls, N)
    assert torch.equal(found, torch.stack([x.square() for x in alone.values()]).sum(0).sqrt())
    wanted = {
        "identity": (6, 0),
        "shared side": (7, 2),
        "other factors": (8, 3),
        "other sides": (8, 3),
    }
    # of eight products of inputs and outputs two are spared where query, key and value share; a
    # shared side leaves the value with no ones in its whitened inputs
    assert (len(made), len(applied)) == wanted[name]


def test_memory_that_was_given_to_another_tensor_is_not_taken_for_the_same():
    reread, made = InputCache(), list[float]()
    for value in (1.0, 2.0, 3.0):
        x = torch.full((1 << 16,), value)
        made.append(float(reread.get_or_compute(x, "sum", lambda x=x: x.sum())))
        del x
    assert made == [65536.0, 131072.0, 196608.0]


def test_nothing_is_kept_in_memory_and_large_things_are_not_remembered():
    reread, asked = InputCache(), list[int]()

    def ask(x):
        for _ in range(2):
            reread.get_or_compute(x, "large", lambda: asked.append(1) or torch.empty((1 << 21) + 1))
            assert torch.equal(reread.get_or_compute(x[:2], "part", lambda: x[:2] * 2), x[:2] * 2)
        return StorageWeakRef(x.untyped_storage())

    held = ask(torch.randn(4, 4))  # not in the assertion, which keeps what stands in it
    assert held.expired() and len(asked) == 2


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", ["low rank", "both", "diagonal", "basis"])
def test_folded_maps_are_the_map(name, contiguous):
    torch.manual_seed(0)
    metric = {
        "low rank": Kronecker(low_rank(D), Identity(1.7)),
        "both": Kronecker(low_rank(D), low_rank(6)),
        "diagonal": Kronecker(Diagonal(torch.rand(D, dtype=torch.float64)), Identity(0.2)),
        "basis": Eigenbasis(torch.rand(6, D, dtype=torch.float64)),
    }[name]
    g = randn(4, 6, D) if contiguous else randn(4, D, 6).mT
    expected = (
        g * metric.scale if name == "basis" else metric.output.apply_left(metric.input.apply(g))
    )
    assert_close(metric.apply(g), expected, rtol=1e-12, atol=1e-14)
    if name != "basis":
        assert metric.merge_scalar().operator_norm == pytest.approx(metric.operator_norm)
