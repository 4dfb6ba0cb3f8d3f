"""Norms in floating point: no example, of any size and in any layer, puts more into the clipped sum
than the clip allows.

What is checked for every rule, type, metric and method, on numbers from 1e-30 to 1e30 in every
mixture, on positions that cancel, on denormal numbers, zeros, infinities and NaN:

* the share of every example in the sum, measured in float64, is at most C (1 + 1e-5), and at most
  its factor times its norm;
* the norm is at least the exact one (formed and mapped in float64), less the rounding of what is
  summed where gradients are kept, and at most the exact one by a stated slack;
* an example that overflows counts nothing, and the sum of the others is finite.
"""

import math
import zlib
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.clipping import contribution_bound
from dpkfc.curvature import KFAC, FeatureNoise
from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, Tied
from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.norms import per_example_norms
from tests.audit.blocks import (
    KINDS,
    METRICS,
    PATTERNS,
    N,
    bounds_of,
    clip_block,
    exact_norms,
    metric_for,
    sizes,
)
from tests.audit.sizes import size
from tests.gradients import cases
from tests.gradients.whitened import matrix, metric_of, side

SHARE = 1 + 1e-5  # what an example may put into the sum, over the clip
UNDER, OVER = (
    8.0,
    24.0,
    # stated slack of a norm, in units of width · u · L (below) and √(width u) L (above); L may
    # cancel
)
FLOATS = {"float32": torch.float32, "float64": torch.float64}


def generator_of(*what):
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


def choose(choices, generator):
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


# -- blocks of every rule --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_share_exceeds_the_clip_and_no_norm_its_slack(kind, dtype, evidence):
    worst = defaultdict(float)
    rounds, finite_norms = size(20, 1000), 0
    for i in range(rounds):
        generator = generator_of(kind, dtype, i)
        pattern, metric_kind = PATTERNS[i % len(PATTERNS)], choose(METRICS, generator)
        block = KINDS[kind].make(pattern, generator, FLOATS[dtype])
        metric = metric_for(block, metric_kind, generator)
        method = None if "eigen" in metric_kind else choose(KINDS[kind].methods, generator)
        clipping = choose(("flat", "flat", "normalised", "automatic"), generator)
        c = 10.0 ** int(torch.randint(-3, 4, (1,), generator=generator))
        got = clip_block(block, metric, method, c, clipping)
        where = (kind, dtype, i, pattern, metric_kind, method, clipping, c)
        norms, finite = got.found.norms, torch.isfinite(got.found.norms)
        finite_norms += int(finite.sum())
        assert norms.dtype == torch.float64 and bool(torch.isfinite(got.total).all()), where
        assert not bool(got.shares[~finite].any()), where
        share = float(got.shares.max()) / contribution_bound(clipping, c)
        worst["share"] = max(worst["share"], share)
        assert share <= SHARE, where
        # against exact norms, in units of what the block could cancel, and of what is lost below
        # the least normal number
        info, of, (gain, way) = torch.finfo(FLOATS[dtype]), sizes(block), bounds_of(metric)
        lost, u = info.tiny * of.width**2 * way * of.sides, info.eps / 2
        own = (got.shares - got.factors * (norms * SHARE + lost))[finite]
        assert not own.numel() or float(own.max()) <= 1e-7 * c, where
        exact = exact_norms(block, metric)
        held = finite & torch.isfinite(exact) & (of.cancelling > 0)
        if bool(held.any()):
            scale = (gain * of.cancelling)[held]
            under = (exact * (1 - 1e-6) - lost - norms)[held] / (of.width * u * scale)
            over = (norms - exact * (1 + 1e-3) - lost)[held] / (math.sqrt(of.width * u) * scale)
            worst["under"], worst["over"] = (
                max(worst["under"], float(under.max())),
                max(worst["over"], float(over.max())),
            )
            assert worst["under"] <= UNDER and worst["over"] <= OVER, (where, dict(worst))
        ordinary = (gain * of.cancelling + of.cancelling < 1e17) & (of.sides * way < 1e17)
        assert bool(finite[ordinary].all()), where
    assert finite_norms > rounds * N // 4
    evidence(
        "floating point",
        f"norms, {kind}, {dtype}",
        examples=rounds * N,
        clipped_or_kept=finite_norms,
        largest_share_over_clip=worst["share"],
        allowed=SHARE,
        below_exact_in_roundings=worst["under"],
        above_exact_in_root_roundings=worst["over"],
    )


def test_the_check_sees_a_norm_that_is_too_small(monkeypatch):
    """Planted: Gram norms without slack and without the closer look, as elsewhere, and a clip with
    one per cent to spare.
    """

    def plain(block, metric, method=None):
        found = per_example_norms(block, metric, method)
        g = torch.bmm(block.a, block.a.mT).mul_(torch.bmm(block.b, block.b.mT)).sum((1, 2))
        return type(found)(g.clamp(min=0).sqrt().double(), found.block, found.whitened)

    def worst():
        found = 0.0
        for i in range(20):
            block = KINDS["sequence wide"].make("cancel", generator_of(i), torch.float32)
            found = max(
                found, float(clip_block(block, None, "gram", 1e-3, "flat").shares.max()) / 1e-3
            )
        return found

    assert worst() <= SHARE
    with monkeypatch.context() as patched:
        patched.setattr("tests.audit.blocks.per_example_norms", plain)
        assert worst() > 1.5
    with monkeypatch.context() as patched:
        patched.setattr("tests.audit.blocks.clip_factors", lambda *args: 1.01 * clip_factors(*args))
        assert worst() > 1.005


# -- directed: what once went wrong, or easily could -----------------------------------------------


def largest_share(block, bound, method=None):
    got = clip_block(block, None, method, bound, "flat")
    assert bool(torch.isfinite(got.total).all())
    return float(got.shares.max()) / bound


@pytest.mark.parametrize("magnitude", [1e2, 1e3, 1e4, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("method", ["gram", "materialised"])
def test_the_cancellation_attack(magnitude, method, evidence):
    """Pairs ± of long rows and a small rest: a plain float32 Gram norm comes out 61 times too
    small.
    """
    worst, understated = 0.0, 0.0
    for seed in range(size(4, 200)):
        g = generator_of("attack", seed)
        big_a, big_b = (torch.randn(N, 8, d, generator=g) * magnitude for d in (40, 36))
        a = torch.cat([big_a, -big_a], 1) + torch.randn(N, 16, 40, generator=g) * 1e-2
        b = torch.cat([big_b, big_b], 1) + torch.randn(N, 16, 36, generator=g) * 1e-6
        worst = max(worst, *(largest_share(Outer(a, b), c, method) for c in (1e-2, 1.0, 100.0)))
        plain = (
            torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT)).sum((1, 2)).clamp(min=1e-12).sqrt().double()
        )
        understated = max(understated, float((exact_norms(Outer(a, b), None) / plain).max()))
    assert worst <= SHARE
    evidence(
        "floating point",
        f"cancellation attack, {method}, rows of {magnitude:g}",
        largest_share_over_clip=worst,
        plain_float32_gram_too_small_by=understated,
    )


@pytest.mark.parametrize("kind", ["sequence", "tied"])
def test_products_that_vanish_beside_one_that_does_not(kind):
    """a·a' of tiny inputs is zero in float32 while b·b' of huge gradients is not, and one ordinary
    position hides it.
    """
    for exponent in (-26, -25, -24, -23, -22.5, -22):
        a, b = torch.full((N, 16, 40), 10.0**exponent), torch.full((N, 16, 36), 10.0**18.5)
        a[:, 0], b[:, 0] = 1e-3, 1e-4
        outer = Outer(a, b)
        block = (
            outer
            if kind == "sequence"
            else Tied(Lookup(torch.zeros(N, 2).long(), torch.full((N, 2, 40), 1e-7), 36), outer)
        )
        for bound in (1e-3, 1e-2, 1.0):
            assert largest_share(block, bound, "gram") <= SHARE, (exponent, bound)


@pytest.mark.parametrize("d_out", [1, 10, 1000])
def test_huge_inputs_with_tiny_gradients(d_out):
    """Gradients times a clip factor below the least normal number round by a share that huge inputs
    would make visible.
    """
    for exponent in range(-30, 1, size(5, 1)):
        for value in (1e28, 1e30, 1e34, 3e38):
            g = generator_of("huge", d_out, exponent)
            a = torch.zeros(N, 1, 3)
            a[:, 0, 0] = value
            block = Outer(a, (torch.rand(N, 1, d_out, generator=g) * 0.3 + 0.7) * 10.0**exponent)
            for bound in (1e-3, 1.0):
                assert largest_share(block, bound) <= SHARE, (value, exponent, bound)
    image = torch.zeros(N, 2, 3, 3)
    image[:, 0, 1, 1] = 3e38
    for method in ("gram", "materialised"):
        conv = ConvBlock(
            image, torch.full((N, 5, 2, 2), 7.7e-14), (2, 2), (1, 1), (0, 0), (1, 1), 1, True, True
        )
        assert largest_share(conv, 1e-3, method) <= SHARE


@pytest.mark.parametrize("value", [1e18, 2.66e22, 1e25, 1e30, 3e38])
def test_norms_beyond_float32_count_nothing_or_the_clip(value):
    """A factor near the least denormal number would round up to twice itself."""
    for other in (1.0, 1e-3, value):
        block = Outer(torch.full((N, 1, 1), value), torch.full((N, 1, 1), other))
        for bound in (1e-3, 1.0, 1e3):
            assert largest_share(block, bound) <= SHARE


# -- whole models ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0].mean(1))


class SharedTable(nn.Module):
    """An embedding table that is the output layer too, in one of the two sizes in which its norms
    are taken.
    """

    def __init__(self, rows):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 24), nn.Linear(24, rows, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids))).mean(1)


class Crosswise(nn.Module):
    """The linear layer of GPT-2, whose weight lies the other way."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.layer, self.head = Conv1D(6, 5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)).mean(1))


def only_the_bias():
    layer = nn.Linear(5, 4)
    layer.weight.requires_grad_(False)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


def build_weight_normed():
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)
    )


MORE = [
    cases.Case("lstm", lambda: Recurrent(nn.LSTM), lambda n: torch.randn(n, 4, 4)),
    cases.Case("gru", lambda: Recurrent(nn.GRU), lambda n: torch.randn(n, 4, 4)),
    cases.Case("shared table", lambda: SharedTable(12), lambda n: torch.randint(0, 12, (n, 6))),
    cases.Case(
        "large shared table", lambda: SharedTable(700), lambda n: torch.randint(0, 700, (n, 6))
    ),
    cases.Case("weight of GPT-2", Crosswise, lambda n: torch.randn(n, 3, 5)),
    cases.Case(
        "long rows",
        lambda: nn.Sequential(nn.Linear(40, 36), nn.Tanh(), nn.Flatten(), nn.Linear(216, 3)),
        lambda n: torch.randn(n, 6, 40),
    ),
    cases.Case("only the bias", only_the_bias, lambda n: torch.randn(n, 5)),
    cases.Case("computed weight", build_weight_normed, lambda n: torch.randn(n, 5)),
]
MODELS = {case.name: case for case in (*cases.CASES, *MORE)}
TYPES = ("float32", "float64", "bfloat16", "float16", "autocast bfloat16", "autocast float16")
CLIPS = (
    Clip(1e-2),
    Clip(3.0),
    Clip(1.0, "per_layer"),
    Clip(0.5, "normalised"),
    Clip(0.5, "automatic"),
)


def model_in(name, kind):
    """A model with weights of a type, six examples of sizes from 1e-30 to 1e30 (the last holds a
    NaN), and its loss.
    """
    if name == "weight of GPT-2":
        pytest.importorskip("transformers")
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(
        kind, torch.float32
    )
    model, (x, y) = cases.build(MODELS[name], n=6, dtype=dtype)
    if x.is_floating_point():
        spread = 10.0 ** torch.tensor([-30.0, -4, 0, 4, 30, 0], dtype=torch.float64)
        x = (x.double() * spread.view(-1, *[1] * (x.dim() - 1))).to(dtype)
        x[-1].view(-1)[0] = math.nan

    def loss(model, batch):
        with torch.autocast("cpu", getattr(torch, kind.split()[-1]), enabled="autocast" in kind):
            logits = model(batch[0]).to(torch.promote_types(dtype, torch.float32))
        return F.cross_entropy(logits, batch[1], reduction="none") * 10.0 ** (batch[1] * 8.0 - 4)

    return model, (x, y), loss


def cast_metric(metric, layers, metric_kind, dtype):
    """A metric in the type in which norms are taken; that of a grouped convolution is one for every
    group, that of a computed weight elementwise.
    """

    def cast(value):
        if isinstance(value, Tensor):
            return value.to(dtype)
        if isinstance(value, dict):
            return {k: cast(v) for k, v in value.items()}
        if not is_dataclass(value):
            return value
        return replace(
            value, **{field.name: cast(getattr(value, field.name)) for field in fields(value)}
        )

    found = dict(metric)
    for layer in layers:
        if (groups := getattr(layer.module, "groups", 1)) > 1:
            d_out, d_in = matrix(layer, {r: layer.tensor(r) for r in layer.parameters}).shape
            found[layer.name] = Kronecker(
                side(metric_kind, d_in), side(metric_kind, d_out // groups)
            )
        if layer.rule == "fallback":
            found[layer.name] = Elementwise(
                {r: torch.rand(layer.tensor(r).shape) + 0.2 for r in layer.parameters}
            )
    return {name: cast(entry) for name, entry in found.items()}


def shares_of(model, batch, loss, metric, clip):
    """Length of the sum of every example alone, in float64, and whether the sum of all is
    finite.
    """
    layers, found = find_layers(model), []
    for part in (
        *[(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(len(batch[0]))],
        batch,
    ):
        tape, summer = (
            Tape(model, layers),
            ClippedSummer(layers, metric, clip),
        )
        with tape:
            losses = loss(model, part)
        summer.add(tape.backward(losses), len(part[0]))
        found.append(torch.cat([x.double().flatten() for x in summer.result().values()]))
    return torch.stack([x.norm() for x in found[:-1]]), bool(torch.isfinite(found[-1]).all())


def _quick(name, kind):
    """One pair in six, in float32 one in two."""
    return zlib.crc32((name + kind).encode()) % 12 < (6 if kind == "float32" else 2)


@pytest.mark.quick("*-float32", "*-bfloat16")
@pytest.mark.parametrize(
    "name, kind", [(n, k) for n in MODELS for k in TYPES if size(_quick(n, k), True)]
)
def test_no_example_of_a_model_counts_more_than_the_clip(name, kind, evidence):
    model, batch, loss = model_in(name, kind)
    dtype, worst, refused = torch.float64 if kind == "float64" else torch.float32, 0.0, ""
    for metric_kind in ("none", *size(("dense",), ("identity", "diagonal", "dense", "low rank"))):
        torch.manual_seed(1)
        layers = find_layers(model)
        metric = (
            {}
            if metric_kind == "none"
            else cast_metric(metric_of(layers, metric_kind), layers, metric_kind, dtype)
        )
        for clip in CLIPS[: size(3, 5)]:
            try:
                shares, finite = shares_of(model, batch, loss, metric, clip)
            except (ValueError, RuntimeError) as error:
                refused = str(
                    error
                    # a module that cannot be repeated on such numbers, or an operation that torch
                    # lacks
                )
                assert any(
                    text in refused
                    for text in (
                        "do not add up",
                        "not implemented for",
                        "could not create a primitive",
                    )
                )
                break
            bound = contribution_bound(clip.clipping, clip.max_grad_norm)
            assert finite and float(shares.max()) <= bound * SHARE, (
                metric_kind,
                clip,
                shares / bound,
            )
            worst = max(worst, float(shares.max()) / bound)
    evidence(
        "floating point",
        f"model, {name}, {kind}",
        largest_share_over_clip=worst,
        refused=refused[:60],
    )


# -- sums of neighbours ----------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["none", *size((), ("kfac",))])
@pytest.mark.parametrize("others", ["equal", "tiny", "mixed signs", "huge before the clip"])
def test_neighbouring_sums_differ_by_the_clip_and_the_rounding_of_adding(others, metric, evidence):
    """Adding in float32 rounds: beside a long partial sum short contributions lose their end
    (Casacuberta et al. 2022).

    Not accounted for, and stated in docs/accounting.md: the excess over C is a few n u for n
    examples of at most C each, u = 2⁻²⁴. Measured in float64, one example added at either end, in
    one micro-batch and in many.
    """
    n, worst = size(100, 1000), 0.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))
    layers, built = find_layers(model), {}
    if metric == "kfac":
        settings = KFAC(sides="both", probe=FeatureNoise(30), probe_size=64)
        built = settings.build(
            model, lambda m, f: capture(m, layers, f), 0, rules={x.name: x.rule for x in layers}
        ).metric

    def weigh_loss(m, batch):
        return m(batch[0])[:, 0] * batch[1]

    def total(x, w, rows):
        summer = ClippedSummer(layers, built, Clip(1.0))
        for start in range(0, len(x), rows):
            part = x[start : start + rows], w[start : start + rows]
            tape = Tape(model, layers)
            with tape:
                losses = weigh_loss(model, part)
            summer.add(tape.backward(losses), len(part[0]))
        return torch.cat([v.double().flatten() for v in summer.result().values()])

    for seed in range(size(1, 3)):
        g = generator_of("neighbours", others, seed)
        one = torch.randn(1, 30, generator=g)
        x, w = one.repeat(n, 1), torch.ones(n)
        if others == "tiny":
            w = w * 1e-8
        elif others == "mixed signs":
            w = torch.randint(0, 2, (n,), generator=g) * 2.0 - 1
        elif others == "huge before the clip":
            x, w = torch.randn(n, 30, generator=g), 10 ** (torch.rand(n, generator=g) * 20 - 5)
        for sign in (1.0, -1.0):
            for rows in (n, 50):
                before = total(x, w, rows)
                after = [
                    total(torch.cat(pair), torch.cat(ends), rows)
                    for pair, ends in (
                        ((x, one), (w, torch.tensor([sign * 1e3]))),
                        ((one, x), (torch.tensor([sign * 1e3]), w)),
                    )
                ]
                worst = max(worst, *(float((y - before).norm()) - 1 for y in after))
    assert worst <= 4 * n * 2.0**-24
    evidence(
        "floating point",
        f"neighbouring sums, others {others}, metric {metric}",
        examples=n,
        excess_over_clip=max(0.0, worst),
        allowed=4 * n * 2.0**-24,
    )
