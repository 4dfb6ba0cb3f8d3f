"""The capture of `gradients` and the one of these tests give the same preconditioner (float64,
every kind of layer).
"""

from __future__ import annotations

import pytest
import torch

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
