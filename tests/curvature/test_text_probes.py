"""Probes that are mappings of tensors: how a model is called with them, what padding does, tied
weights, HF models.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.curvature import Probe, TokenNoise
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.gradients import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.blocks import Lookup, MaterializedGradients, Outer, Tied
from tests.curvature.toys import dense_matrix, make_kfac
from tests.models import randn

F64 = torch.float64
PROBE = TokenNoise(11, 6, cls_id=1, sep_id=2, pad_id=0)


class Tagger(nn.Module):
    """Masked attention over embedded tokens; classes for each position, or for the text."""

    def __init__(self, width=5, classes=4, pooled=False, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=bias) for bias in (True, True, False)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11 if tied else classes, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.pooled = pooled

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        mask = attention_mask[:, None].bool()
        x = self.norm(
            x
            + F.scaled_dot_product_attention(
                self.query(x), self.key(x), self.value(x), attn_mask=mask
            )
        )
        return {"logits": self.head(x[:, 0] if self.pooled else x)}


def _capture(layers, model, loss):
    return capture(model, layers, loss)


def _build(model, kfac, factors=False):
    layers = find_layers(model)
    capture = partial(_capture, layers)
    rules = {layer.name: layer.rule for layer in layers}
    return (
        kfac.factors(model, capture, 0, rules) if factors else kfac.build(model, capture, 0, rules)
    )


_kfac = partial(make_kfac, probe=PROBE, probe_size=24, chunk=10, rows_per_dim=None, max_rank=None)


def _loop(model, kfac, name):
    """A and G of a linear layer by autograd over single, unpadded examples."""
    generator = public_generator(kfac.seed, 0)
    inputs, _ = kfac.probe.sample(kfac.probe_size, generator)
    uniform = torch.rand(
        kfac.probe_size, *([] if model.pooled else [6]), generator=generator, dtype=F64
    )
    a_sum, g_sum, positions = 0, 0, 0
    for n in range(kfac.probe_size):
        length = int(inputs["attention_mask"][n].sum())
        seen = {}
        layer = model.get_submodule(name)
        handle = layer.register_forward_hook(
            lambda m, args, out, seen=seen: seen.update(a=args[0].detach(), z=out)
        )
        logits = model(**{key: x[n : n + 1, :length] for key, x in inputs.items()})["logits"]
        handle.remove()
        u = uniform[n : n + 1] if model.pooled else uniform[n : n + 1, :length]
        target = (torch.softmax(logits.detach(), -1).cumsum(-1) < u.unsqueeze(-1)).sum(-1)
        # the mean over the example's own positions
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
        (b,) = torch.autograd.grad(loss, seen["z"])
        a = seen["a"].flatten(0, -2)
        a = torch.cat([a, a.new_ones(len(a), 1)], 1) if layer.bias is not None else a
        b = b.flatten(0, -2)
        if kfac.sharing == "reduce":
            a, b = a.mean(0, keepdim=True), b.sum(0, keepdim=True)
        a_sum, g_sum = a_sum + a.T @ a, g_sum + b.T @ b
        positions += len(a)
    return a_sum / kfac.probe_size, g_sum / positions


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_on_padded_texts_are_those_of_a_loop_over_unpadded_ones(pooled, sharing):
    model, kfac = Tagger(pooled=pooled).double(), _kfac(sharing=sharing)
    factors = _build(model, kfac, factors=True)
    for name in ("query", "key", "value", "head"):
        a, g = _loop(model, kfac, name)
        assert torch.allclose(dense_matrix(factors[name].sides["input"]), a, atol=1e-10), name
        assert torch.allclose(dense_matrix(factors[name].sides["output"]), g, atol=1e-10), name


def test_bare_ids_of_a_probe_with_padding_have_a_mask_too():
    class Ids(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids, (ids != 0).long())["logits"]

    model = Tagger().double()
    bare = TokenNoise(11, 6, cls_id=1, sep_id=2, pad_id=0, bare=True)
    plain, named = (
        _build(model, _kfac(), factors=True),
        _build(Ids(model), _kfac(probe=bare), factors=True),
    )
    for name, factors in plain.items():
        for side, factor in factors.sides.items():
            assert torch.allclose(factor.spectrum, named[f"inner.{name}"].sides[side].spectrum)


class Named(nn.Module):
    """Called as model(ids), or with two inputs."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, ids, more=None):
        return self.head(self.table(ids).mean(1) + (0 if more is None else more))


def test_a_model_that_is_called_otherwise_is_told_how_its_probe_hands_things_on():
    settings = {"vocab_size": 11, "length": 6, "min_length": 6}
    with pytest.raises(ValueError, match=r"TokenNoise\(..., bare=True\)"):
        _build(Named(), _kfac(probe=TokenNoise(**settings)))
    assert _build(Named(), _kfac(probe=TokenNoise(**settings, bare=True))).metric

    class Both(Named):
        def forward(self, ids, more):
            return super().forward(ids, more)

    with pytest.raises(ValueError, match=r"sample\(\) returns \{name of the argument: tensor\}"):
        _build(Both(), _kfac(probe=TokenNoise(**settings, bare=True)))


def test_inputs_that_do_not_belong_together_are_named():
    class Broken(Probe):
        def sample(self, n, generator):
            return {
                "input_ids": torch.zeros(n, 3).long(),
                "attention_mask": torch.zeros(n - 1, 3),
            }, None

        def describe(self):
            return {"source": "synthetic"}

    with pytest.raises(ValueError, match="same number of examples.*attention_mask"):
        _build(Tagger(), _kfac(probe=Broken()))


# -- embeddings and tied weights


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_tied_weight_has_one_factor_of_both_uses(sharing):
    n, s, t, v, d = 5, 3, 4, 7, 3
    lookup = Lookup(torch.randint(v, (n, s)), randn(n, s, d), v)
    outer = Outer(randn(n, t, d), randn(n, t, v))
    layer = LayerAccumulator(Tied(lookup, outer), FactorOptions(sharing=sharing))
    for rows in (slice(0, 2), slice(2, n)):
        layer.add(
            Tied(Lookup(lookup.ids[rows], lookup.b[rows], v), Outer(outer.a[rows], outer.b[rows]))
        )
    exact = torch.zeros(d, d, dtype=F64)
    for i in range(n):
        if sharing == "expand":
            for j in range(s):
                exact += torch.outer(lookup.b[i, j], lookup.b[i, j]) / n
            for j in range(t):
                exact += (
                    outer.b[i, j].square().sum() * torch.outer(outer.a[i, j], outer.a[i, j]) / n
                )
        else:
            total, mean = lookup.b[i].sum(0), outer.a[i].mean(0)
            exact += (
                torch.outer(total, total)
                + outer.b[i].sum(0).square().sum() * torch.outer(mean, mean)
            ) / n
    factors = layer.result()
    assert factors.kind == "tied" and factors.shapes == {"input": (d,), "output": (v,)}
    assert torch.allclose(dense_matrix(factors.sides["input"]), exact, atol=1e-10)
    # so that both traces multiply to E‖g‖²
    assert factors.sides["output"].trace == pytest.approx(1.0)


@pytest.mark.parametrize("missing", ["lookup", "head"])
def test_a_tied_weight_may_lack_one_use(missing):
    s, t = (0, 4) if missing == "lookup" else (3, 0)
    block = Tied(
        Lookup(torch.zeros(2, s).long(), torch.randn(2, s, 3), 5),
        Outer(torch.randn(2, t, 3), torch.randn(2, t, 5)),
    )
    layer = LayerAccumulator(block, FactorOptions())
    layer.add(block)
    assert layer.result().sides["input"].trace > 0


def test_a_block_of_an_unknown_kind_keeps_the_identity_and_is_reported(caplog):
    odd = MaterializedGradients(torch.randn(10, 2, 3))
    model = Tagger()
    layers = find_layers(model)

    def capture(m, loss):
        return {**_capture(layers, m, loss), "value": odd}

    rules = {layer.name: layer.rule for layer in layers}
    built = _kfac().build(model, capture, 0, rules)
    known = [layer for layer in layers if layer.name != "value"]
    assert built.scale == _kfac().build(model, partial(_capture, known), 0, rules).scale
    assert "value" not in built.metric and "value" in caplog.text
    assert [r["note"] for r in built.report if r["layer"] == "value"] == [
        "no factors are known for a MaterializedGradients"
    ]
