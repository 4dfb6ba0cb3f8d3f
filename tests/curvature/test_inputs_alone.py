"""Whitening inputs alone: their factors come from every example, all that needs gradients from the
last ones.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.curvature import KFAC, FeatureNoise, PinkNoise, PublicData
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import DiagonalFactor
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from tests.curvature.toys import CNN_SHAPE, cnn, dense_matrix

SIZE, LAST = 100, 64


class Mixed(nn.Module):
    """Embeddings of tokens and of positions that all examples share, a norm layer, a shared linear
    layer, a head.
    """

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(5, 6)
        self.norm, self.twice, self.head = (
            nn.LayerNorm(6),
            nn.Linear(6, 6, bias=False),
            nn.Linear(6, 3),
        )

    def forward(self, ids):
        x = self.norm(self.tokens(ids) + self.places(torch.arange(ids.shape[1]).unsqueeze(0)))
        return self.head(self.twice(torch.tanh(self.twice(x))).mean(1))


class Rare(nn.Module):
    """A layer that is called by micro-batches with the right example alone."""

    def __init__(self):
        super().__init__()
        self.head, self.rare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        chosen = x[:, :1] > 0
        return self.head(x) + (chosen * self.rare(x) if bool(chosen.any()) else 0)


CASES = {
    "words": (Mixed, lambda: PublicData(torch.randint(11, (SIZE, 5)), provenance="random ids")),
    "image": (cnn, lambda: PinkNoise(CNN_SHAPE)),
    "grouped": (lambda: cnn(groups=2), lambda: PinkNoise(CNN_SHAPE)),
    "bias alone": (lambda: _bias_alone(), lambda: FeatureNoise(12)),
}


def _bias_alone():
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    return model


class Watched:
    """A capture that counts the examples it differentiates."""

    def __init__(self, model, *, always=False):
        self.layers, self.always = find_layers(model), always
        self.rules = {layer.name: layer.rule for layer in self.layers}
        self.seen = {True: 0, False: 0}

    def __call__(self, model, loss):
        with torch.set_grad_enabled(torch.is_grad_enabled() or self.always):
            blocks = capture(model, self.layers, loss)
            self.seen[torch.is_grad_enabled()] += next(iter(blocks.values())).batch_size
        return blocks


def dense(factor):
    return dense_matrix(factor) if isinstance(factor, Eigen) else factor.values


@pytest.mark.quick("*-7")
@pytest.mark.parametrize("chunk", [7, 64, 100])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_inputs_of_all_examples_and_gradients_of_the_last(name, sharing, chunk):
    make, probe = CASES[name]
    model = make().double()
    kfac = KFAC(probe=probe(), probe_size=SIZE, chunk=chunk, sharing=sharing, max_rank=None)
    watched, both = Watched(model), Watched(model, always=True)
    found = kfac.factors(model, watched, 3, watched.rules)
    whole = kfac.factors(model, both, 3, both.rules)
    assert watched.seen == {True: LAST, False: SIZE - LAST} and both.seen == {True: SIZE, False: 0}
    blocks = _collect_last(model, kfac)
    assert set(found) == set(whole) == set(blocks)
    for layer, factors in found.items():
        if factors.kind == "elementwise":
            for role, g in blocks[layer].grads.items():
                assert isinstance(factors.sides[role], DiagonalFactor)
                assert_close(factors.sides[role].values, g.square().mean(0).flatten())
            continue
        assert_close(dense(factors.sides["input"]), dense(whole[layer].sides["input"]))
        b = blocks[layer].b
        rows = b.sum(1) if sharing == "reduce" else b.flatten(0, 1)
        assert factors.sides["output"].mean == pytest.approx(float(rows.square().mean()))


def _collect_last(model, kfac):
    """The contributions of the last examples of the probe of step 3."""
    held = []
    layers = find_layers(model)

    def keep(m, loss):
        held.append(capture(m, layers, loss))
        return held[-1]

    KFAC(probe=kfac.probe, probe_size=SIZE, chunk=LAST, sides="both").factors(model, keep, 3)
    return dict(held[-1])


@pytest.mark.parametrize("size", [3, 64, 65])
def test_small_probes_are_differentiated_whole(size):
    model = cnn().double()
    watched = Watched(model)
    KFAC(probe=PinkNoise(CNN_SHAPE), probe_size=size).build(model, watched, 0, watched.rules)
    assert watched.seen == {True: min(size, LAST), False: max(0, size - LAST)}


def test_a_layer_that_no_differentiated_example_reaches_takes_the_scale_of_the_others():
    x = -torch.rand(SIZE, 4, dtype=torch.float64)
    x[3, 0] = 1.0
    model = Rare().double()
    watched = Watched(model)
    kfac = KFAC(probe=PublicData(x, provenance="made up"), probe_size=SIZE, chunk=9)
    step = next(s for s in range(200) if _place(kfac, s) < SIZE - LAST)
    built = kfac.build(model, watched, step, watched.rules)
    assert set(built.metric) == {"head", "rare"}
    assert torch.isfinite(
        built.metric["rare"].apply(torch.ones(1, 3, 5, dtype=torch.float64))
    ).all()
    assert built.metric["rare"].output.factor == pytest.approx(built.metric["head"].output.factor)


def _place(kfac, step):
    """Where in the probe of a step the one example lies that reaches every layer."""
    from dpkfc.curvature.probe_pass import public_generator

    return int(
        (kfac.probe.sample(SIZE, public_generator(kfac.seed, step))[0][:, 0] > 0).nonzero()[0]
    )


def test_losses_of_another_number_than_the_examples_are_refused():
    model = cnn().double()
    layers = find_layers(model)
    inputs = torch.randn(4, *CNN_SHAPE, dtype=torch.float64)
    with pytest.raises(ValueError, match="leading axis must be the batch"), torch.no_grad():
        dict(capture(model, layers, lambda m: m(inputs).sum(1).repeat(2)))
    assert all(not m._forward_hooks for m in model.modules())
