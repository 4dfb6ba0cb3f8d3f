"""The capture of `gradients` and the one of these tests give the same preconditioner (float64,
every kind of layer).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkfc.curvature import KFAC, FeatureNoise, PinkNoise, PublicData
from dpkfc.gradients import clipped_sum
from dpkfc.gradients.discovery import find_layers
from tests.curvature.toys import CNN_SHAPE, Text, capture, cnn, mlp


@pytest.mark.parametrize("kind", ["mlp", "cnn", "text", "sequence"])
def test_both_captures_agree(kind):
    model = {"mlp": mlp, "cnn": cnn, "text": Text, "sequence": lambda: Text(pooled=False)}[
        kind
    ]().double()
    tokens = PublicData(torch.randint(11, (20, 5)), provenance="random ids")
    probe = {"mlp": FeatureNoise(12), "cnn": PinkNoise(CNN_SHAPE)}.get(kind, tokens)
    kfac = KFAC(sides="both", probe=probe, probe_size=24, chunk=10, damping=0.5)
    layers = find_layers(model)
    rules = {layer.name: layer.rule for layer in layers}
    own = kfac.build(model, capture, 0, rules)
    taped = kfac.build(model, lambda m, loss: clipped_sum.capture(m, layers, loss), 0, rules)
    assert taped.scale == pytest.approx(own.scale, rel=1e-9) and set(taped.spectra) == set(
        own.spectra
    )
    for name, sides in own.spectra.items():
        for side, values in sides.items():
            largest = float(values.max())
            assert torch.allclose(taped.spectra[name][side], values, rtol=1e-7, atol=1e-9 * largest)
    taped.check(
        {x.name: {role: tuple(x.tensor(role).shape) for role in x.parameters} for x in layers}
    )


def test_every_module_of_a_mixed_model_gets_a_block():
    """Vector 8.14: LayerNorm, embedding, adapters, attention and a grouped, dilated, bias-free
    convolution.
    """

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = nn.LayerNorm(8)
            self.conv = nn.Conv1d(8, 4, 2, groups=2, dilation=2, bias=False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
            self.head = nn.Linear(4, 3)
            nn.init.zeros_(self.up.weight)

        def forward(self, ids):
            x = self.norm(self.embedding(ids))
            x = x + self.attention(x, x, x, need_weights=False)[0]
            x = self.conv(x.mT).mean(-1)
            return self.head(x + self.up(self.down(x)))

    model = Mixed()
    layers = find_layers(model)
    probe = PublicData(torch.randint(9, (40, 6)), provenance="random ids")
    kfac = KFAC(sides="both", probe=probe, probe_size=32, chunk=16)
    built = kfac.build(
        model,
        lambda m, loss: clipped_sum.capture(m, layers, loss),
        0,
        {x.name: x.rule for x in layers},
    )
    assert set(built.metric) == {layer.name for layer in layers}
    assert {r["kind"] for r in built.report} <= {"dense", "lowrank", "diagonal", "identity"}
    dead = [(r["layer"], r["side"]) for r in built.report if "no signal" in r["note"]]
    assert dead == [("down", "output")]
    assert all(
        torch.isfinite(t).all() for t in built.state_dict().values() if t.is_floating_point()
    )
    built.check(
        {x.name: {role: tuple(x.tensor(role).shape) for role in x.parameters} for x in layers}
    )
