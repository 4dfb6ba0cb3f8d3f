"""Blocks of every rule and metric of every kind, with numbers of any size, for the checks of norms
in floating point.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpkfc.gradients.clip import clip_factors
from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Lookup, Outer, PerExample, Tied
from dpkfc.linalg.magnitudes import bound_magnitudes
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Kronecker
from dpkfc.linalg.norm_bounds import LayerNorms
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank

N = 5

# -- numbers ---------------------------------------------------------------------------------------

PATTERNS = (
    "one",
    "all",
    "example",
    "position",
    "feature",
    "entry",
    "cancel",
    "sparse",
    "denormal",
    "broken",
)


def numbers(shape, pattern, generator, dtype):
    """Random numbers `[N, positions, features...]` of sizes 1e-30 … 1e30, in one of the
    patterns.
    """

    def exponents(*axes):
        held = [n if i in axes else 1 for i, n in enumerate(shape)]
        return torch.rand(held, generator=generator, dtype=torch.float64) * 60 - 30

    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    every = tuple(range(len(shape)))
    axes = {
        "all": (),
        "example": (0,),
        "position": (0, 1),
        "feature": every[2:],
        "entry": every,
        "broken": (0,),
    }
    if pattern in axes:
        x = x * 10 ** exponents(*axes[pattern])
    if pattern == "cancel" and shape[1] > 1:  # pairs of large positions that cancel, but for a rest
        half = shape[1] // 2
        large = 10 ** (
            6
            * torch.rand(
                (shape[0], *[1] * (len(shape) - 1)), generator=generator, dtype=torch.float64
            )
        )
        x[:, half : 2 * half] = (
            -x[:, :half]
            + 10.0 ** float(-9 * torch.rand((), generator=generator)) * x[:, half : 2 * half]
        )
        x = x * large
    if pattern == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.3)
        x[0] = 0
    if pattern == "denormal":
        x = x * 1e-42
    x = x.clamp(-3e38, 3e38).to(dtype)
    if pattern == "broken":
        for row, value in ((1, math.inf), (2, math.nan), (3, 3e38)):
            x[row].view(-1)[int(torch.randint(x[row].numel(), (1,), generator=generator))] = value
    return x


def partner(pattern, generator):
    """A pattern for the other side of a block: alike, ordinary, or another of its own."""
    choices = (pattern, "one", "position", "example")
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


# -- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A rule and a shape.

    Attributes:
        make: pattern, generator and type to a block of N examples.
        methods: norm methods that may be forced, None for the one that the widths choose.
    """

    make: Callable[[str, torch.Generator, torch.dtype], AnyBlock]
    methods: tuple[str | None, ...] = (None,)


def _outer(t, d_in, d_out, groups=1, homogeneous=False):
    def make(pattern, generator, dtype):
        other = pattern if pattern in ("cancel", "broken") else partner(pattern, generator)
        a = numbers((N * groups, t, d_in), pattern, generator, dtype)
        b = numbers((N * groups, t, d_out), "one" if other == "broken" else other, generator, dtype)
        if pattern == "cancel" and t > 1:  # a and −a with the same b: the products cancel
            b[:, t // 2 : 2 * (t // 2)] = b[:, : t // 2]
        return Outer(a, b, groups, homogeneous)

    return make


def _conv(
    image,
    kernel,
    c_in,
    c_out,
    groups=1,
    dilation=1,
    views=1,
    bias=True,
):
    def make(pattern, generator, dtype):
        each = tuple(dilation for _ in kernel)
        positions = tuple(n - dilation * (k - 1) for n, k in zip(image, kernel, strict=True))
        pattern = "example" if pattern == "feature" else pattern
        x = numbers((N * views, c_in, *image), pattern, generator, dtype)
        other = "one" if pattern == "broken" else partner(pattern, generator)
        b = numbers((N * views, c_out, *positions), other, generator, dtype)
        if pattern == "cancel" and views > 1:
            x.view(N, views, -1)[:, 1], b.view(N, views, -1)[:, 1] = (
                -x.view(N, views, -1)[:, 0],
                b.view(N, views, -1)[:, 0],
            )
        ones, none = tuple(1 for _ in kernel), tuple(0 for _ in kernel)
        return ConvBlock(x, b, kernel, ones, none, each, groups, True, bias, views)

    return make


def _lookup(t, rows, d):
    def make(pattern, generator, dtype):
        ids = torch.randint(rows, (N, t), generator=generator)
        ids[:, t // 2 : 2 * (t // 2)] = ids[:, : t // 2]
        return Lookup(ids, numbers((N, t, d), pattern, generator, dtype), rows)

    return make


def _tied(s, t, rows, d):
    def make(pattern, generator, dtype):
        return Tied(
            _lookup(s, rows, d)(pattern, generator, dtype),
            _outer(t, d, rows)(pattern, generator, dtype),
        )

    return make


def _materialised(pattern, generator, dtype):
    other = partner(pattern, generator)
    grads = {
        "weight": numbers((N, 4, 3), pattern, generator, dtype),
        "bias": numbers((N, 1, 4), other, generator, dtype)[:, 0],
    }
    return PerExample(grads)


EITHER = (None, "gram", "materialised")
KINDS = {
    "linear": Kind(_outer(1, 7, 5, homogeneous=True)),
    "linear wide": Kind(_outer(1, 90, 40)),
    "sequence": Kind(_outer(6, 9, 5, homogeneous=True), EITHER),
    "sequence wide": Kind(_outer(8, 40, 36), EITHER),
    "sequence of one": Kind(_outer(1, 40, 36, homogeneous=True), (None, "rank-one")),
    "groups": Kind(_outer(4, 6, 3, groups=2), EITHER),
    "convolution": Kind(_conv((5, 4), (3, 2), 2, 3), EITHER),
    "convolution in one dimension": Kind(_conv((9,), (3,), 3, 4, dilation=2, bias=False), EITHER),
    "convolution in groups": Kind(_conv((5, 5), (2, 2), 4, 6, groups=2), EITHER),
    "depthwise convolution": Kind(_conv((5, 5), (3, 3), 4, 4, groups=4, bias=False), EITHER),
    "convolution of views": Kind(_conv((4, 4), (3, 3), 2, 4, views=2), EITHER),
    "convolution formed twice": Kind(_conv((3, 3), (2, 2), 12, 40), EITHER),
    "table": Kind(_lookup(8, 11, 5)),
    "tied table": Kind(_tied(6, 4, 13, 5), EITHER),
    "materialised": Kind(_materialised),
}

# -- metrics ---------------------------------------------------------------------------------------


def _side(kind, d, generator, dtype):
    values = 10 ** (torch.rand(d, generator=generator, dtype=torch.float64) * 6 - 3)
    if kind == "identity":
        return Identity(float(values[0]))
    if kind == "diagonal":
        return Diagonal(values.to(dtype))
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    if kind == "low rank":
        k = max(1, d // 3)
        return LowRank(q[:, :k].to(dtype), values[:k].to(dtype), float(values.min()))
    root = ((q * values) @ q.T).to(dtype)
    return Dense(root, float(torch.linalg.matrix_norm(root.double(), 2)))


METRICS = ("none", "identity", "diagonal", "dense", "low rank", "eigenbasis", "diagonal eigenbasis")


def metric_for(block, kind, generator):
    """A metric of condition up to 1e6 a side for a block; tables take a diagonal one over their
    rows.
    """
    if kind == "none":
        return None
    if isinstance(block, PerExample):
        dtype = block.grads["weight"].dtype
        shapes = {role: g.shape[1:] for role, g in block.grads.items()}
        return Elementwise(
            {
                r: (10 ** (torch.rand(n, generator=generator) * 6 - 3)).to(dtype)
                for r, n in shapes.items()
            }
        )
    d_in, d_out, dtype = _widths(block)
    table, row_wise = (
        isinstance(block, Lookup),
        isinstance(block, Lookup | Tied) and kind not in ("identity", "diagonal"),
    )
    if "eigenbasis" not in kind:
        into = _side("diagonal" if table and row_wise else kind, d_in, generator, dtype)
        out = _side(
            "diagonal" if isinstance(block, Tied) and row_wise else kind, d_out, generator, dtype
        )
        return Kronecker(into, out)
    scale = 10 ** (torch.rand(d_out, d_in, generator=generator, dtype=torch.float64) * 6 - 3)
    turned = kind == "eigenbasis"
    bases = [
        torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0].to(dtype)
        for d in (d_in, d_out)
    ]
    into = bases[0] if turned and not table else None
    return Eigenbasis(
        scale.to(dtype), into, bases[1] if turned and not isinstance(block, Tied) else None
    )


def _widths(block):
    match block:
        case Lookup():
            return block.num_rows, block.b.shape[-1], block.b.dtype
        case Tied():
            return block.outer.d_in, block.lookup.num_rows, block.outer.b.dtype
        case ConvBlock():
            return block.d_in, block.d_out, block.b.dtype
        case _:
            return block.d_in, block.b.shape[-1], block.b.dtype


# -- in float64, exactly enough --------------------------------------------------------------------


def to_float64(value):
    """A block or metric with every tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: to_float64(v) for k, v in value.items()}
    fields = {
        k: to_float64(v)
        for k, v in vars(value).items()
        if isinstance(v, Tensor | dict) or hasattr(v, "__dataclass_fields__")
    }
    return replace(value, **fields) if fields else value


def exact_norms(block, metric):
    """‖U_G g_n U_A‖ `[N]` of gradients formed and mapped in float64."""
    block, metric = to_float64(block), metric if metric is None else to_float64(metric)
    if isinstance(block, PerExample):
        scale = metric.scale if isinstance(metric, Elementwise) else {}
        return torch.stack(
            [(g * scale.get(r, 1.0)).flatten(1).norm(dim=1) for r, g in block.grads.items()]
        ).norm(dim=0)
    g = block.per_example()
    g = g.transpose(1, 2) if isinstance(block, Lookup) else g
    z = g if metric is None else metric.apply(g)
    return z.reshape(N, -1).norm(dim=1)


@dataclass(frozen=True)
class Sizes:
    """Sizes from which the slack of a norm is stated, in float64 `[N]`.

    Attributes:
        cancelling: Σ_t ‖a_t‖ ‖b_t‖ (of a convolution √Σ‖x‖² √Σ‖b‖² over its patches): what may
            cancel.
        sides: Σ_t ‖a_t‖ + ‖b_t‖ + 1, which what is lost below the least normal number comes times.
        width: the roundings that a norm may be off by: terms and features.
    """

    cancelling: Tensor
    sides: Tensor
    width: float


def sizes(block):
    """Of a block, without its metric."""
    block = to_float64(block)
    match block:
        case PerExample():
            own = torch.stack([g.flatten(1).norm(dim=1) for g in block.grads.values()]).sum(0)
            return Sizes(own, own + 1, sum(g[0].numel() for g in block.grads.values()))
        case Lookup():
            own = block.b.norm(dim=-1).sum(1)
            return Sizes(own, own + 1, block.b[0].numel())
        case Tied():
            parts = sizes(block.lookup), sizes(block.outer)
            return Sizes(
                *(
                    sum(getattr(part, name) for part in parts)
                    for name in ("cancelling", "sides", "width")
                )
            )
        case ConvBlock():
            rows = sizes(block.outer())
            return replace(
                rows, cancelling=torch.maximum(rows.cancelling, bound_magnitudes(block)[0])
            )
    a = (block.a.norm(dim=-1).square() + block.homogeneous).sqrt()
    b = block.b.norm(dim=-1)
    terms = block.a.shape[1] * block.groups
    return Sizes(
        (a * b).sum(1).view(N, -1).sum(1),
        (a + b + 1).sum(1).view(N, -1).sum(1),
        terms + block.d_in + b.shape[-1],
    )


def bounds_of(metric):
    """(operator norm of the metric, and a bound of what its sides make of any number on the
    way).
    """
    match metric:
        case None:
            return 1.0, 1.0
        case Elementwise():
            gain = max(float(s.abs().max()) for s in metric.scale.values())
            return gain, gain
        case Eigenbasis():
            return metric.operator_norm, metric.operator_norm
    return metric.input.operator_norm * metric.output.operator_norm, (
        1 + metric.input.operator_norm
    ) * (1 + metric.output.operator_norm)


def whiten_sum(block, metric, value):
    """A sum of this layer in the coordinates of the metric, flat, as the library computes it."""
    if isinstance(value, dict):
        scale = metric.scale if isinstance(metric, Elementwise) else {}
        return torch.cat([(v * scale[r] if r in scale else v).flatten() for r, v in value.items()])
    if metric is None:
        return value.flatten()
    if isinstance(block, Lookup):
        return metric.apply(value.T).flatten()
    groups = getattr(block, "groups", 1)
    return metric.apply(value.view(groups, -1, value.shape[-1])).flatten()


@dataclass(frozen=True)
class Clipped:
    """What clipping made of a block.

    Attributes:
        found: norms and what the sum is taken of.
        factors: of the clip `[N]`.
        shares: length in float64 of what each example puts into the sum `[N]`.
        total: the clipped sum.
    """

    found: LayerNorms
    factors: Tensor
    shares: Tensor
    total: Tensor


def clip_block(block, metric, method, bound, clipping):
    """Norms, clip and sum as the summer does them, and each example's own share of the sum."""
    found = per_example_norms(block, metric, method)
    norms = found.norms.double()
    factors = clip_factors(norms, bound, clipping)
    finite = torch.isfinite(norms)
    broken = None if bool(finite.all()) else ~finite

    def sum_rows(weights):
        value = found.block.weighted_sum(weights, broken)
        if found.whitened:
            return (
                torch.cat([v.flatten() for v in value.values()])
                if isinstance(value, dict)
                else value.flatten()
            )
        return whiten_sum(block, metric, value)

    rows = [sum_rows(factors * one) for one in torch.eye(N, dtype=torch.float64)]
    return Clipped(
        found, factors, torch.stack([row.double().norm() for row in rows]), sum_rows(factors)
    )
