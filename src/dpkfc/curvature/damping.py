"""Damping and matrix roots: from an undamped factor to one side of a metric.

Relative damping (default) gives each factor its own multiple of the identity,

    A + ρ · tr(A)/d_A · I        and        G + ρ · tr(G)/d_G · I.

This is the split of Martens and Grosse of one damping λ over the two factors. They add π√λ to A and
√λ/π to G with π² = (tr(A)/d_A) / (tr(G)/d_G), which balances the two error terms. For
λ = ρ² · (tr(A)/d_A) · (tr(G)/d_G):

    π √λ = ρ √( (tr A/d_A)² )    = ρ · tr(A)/d_A
    √λ/π = ρ √( (tr G/d_G)² )    = ρ · tr(G)/d_G.

So ρ has no unit: it means the same for every layer, loss scale and input scale.

Absolute damping is that of the DP-KFC paper (Algorithm 1): π added to the factors and γ inside the
root. The sides are (A + πI + γI)^(−p) and (G + πI + γI)^(−p).

Source: Martens and Grosse (2015), section 6.3; DP-KFC, Algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import (
    check_in_range,
    check_not_negative,
    check_one_of,
    check_optional_integer,
    check_positive,
)
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor, IsotropicFactor, is_empty
from dpkfc.curvature.layer_factors import LayerFactors
from dpkfc.linalg.metric import (
    Dense,
    Diagonal,
    Elementwise,
    Entry,
    Identity,
    Kronecker,
    LowRank,
    Metric,
    Side,
)


@dataclass(frozen=True, kw_only=True)
class Damping:
    """The number added to a factor, and the root taken of the sum.

    Attributes:
        value: ρ (relative) or π (absolute), positive.
        mode: relative or absolute.
        gamma: γ of the absolute mode, not negative.
        exponent: p in (0, 1/2]; a side is (factor + damping)^(−p). 1/2 is full whitening.
        rank_tolerance: eigenvalues below this fraction of the damping are not kept in a low-rank
            side.
        max_rank: eigenpairs k kept of a side at least 4k wide. Narrower sides keep all that matter,
            and so do all sides with None.
        tail_mass: fraction of the trace that may be dropped, 0 for none. A side keeps the fewest
            eigenpairs that hold the rest.
    """

    value: float = 0.1
    mode: str = "relative"
    gamma: float = 0.0
    exponent: float = 0.5
    rank_tolerance: float = 1e-2
    max_rank: int | None = 32
    tail_mass: float = 0.0

    def __post_init__(self) -> None:
        check_positive("damping", self.value)
        check_one_of("damping_mode", self.mode, ("relative", "absolute"))
        check_not_negative("gamma", self.gamma)
        if self.gamma > 0 and self.mode == "relative":
            raise ValueError(
                f"gamma={self.gamma} is read only with damping_mode='absolute'; set gamma=0"
            )
        check_in_range("exponent", self.exponent, "(0, 0.5]")
        check_in_range("rank_tolerance", self.rank_tolerance, "[0, 1)")
        check_in_range("tail_mass", self.tail_mass, "[0, 1)")
        check_optional_integer("max_rank", self.max_rank, 1)

    def shift(self, factor: Factor) -> float:
        """Return the number added to every eigenvalue.

        The number is 0 only for an empty factor under relative damping.
        """
        if self.mode == "absolute":
            return self.value + self.gamma
        return 0.0 if is_empty(factor) else self.value * factor.mean

    def root(self, values: Tensor, shift: float) -> Tensor:
        """Return (values + shift)^(−p), float64."""
        return (values.double() + shift).pow(-self.exponent)


def damp_side(
    factor: Factor,
    damping: Damping,
    dtype: torch.dtype,
    *,
    widest_dense: int = 4096,
    rank: int | None = None,
) -> Side:
    """Return the side (factor + damping)^(−p) of a metric.

    A factor with few eigenvalues that matter (kept ones ≤ d/2, or d > widest_dense) becomes
    `LowRank`. Eigenvalues below `rank_tolerance` times the damping, and those beyond the first
    `max_rank` of a wide side, are replaced by their mean, which keeps the trace. The metric IS then
    that map: norms, sums and noise all use the same one, so no guarantee rests on the
    approximation. Otherwise the side is `Dense` and exact. An empty factor under relative damping
    (a LoRA adapter at its start, a dead layer) gives the identity of unit scale.

    Args:
        factor: undamped.
        damping: the number to add and the root to take.
        dtype: of the resulting side.
        widest_dense: no d×d matrix is formed for a wider side.
        rank: eigenpairs kept of this side, 0 for all, whatever its width and `max_rank`; None for
            the rule of `max_rank`.
    """
    shift = damping.shift(factor)
    if shift == 0.0:
        return Identity()
    match factor:
        case IsotropicFactor():
            return Identity((factor.mean + shift) ** -damping.exponent)
        case DiagonalFactor():
            return Diagonal(damping.root(factor.values, shift).to(dtype))
        case Eigen():
            kept = _count_kept_pairs(factor, damping, shift, rank)
            return _eigen_side(factor, damping, kept, dtype, widest_dense)


def _count_kept_pairs(factor: Eigen, damping: Damping, shift: float, rank: int | None) -> int:
    """Return the number of eigenpairs that a side keeps."""
    kept = factor.rank
    if damping.rank_tolerance:
        kept = int((factor.values >= damping.rank_tolerance * shift).sum())
    if rank is None and damping.max_rank is not None and factor.dim >= 4 * damping.max_rank:
        kept = min(kept, damping.max_rank)
    elif rank:
        kept = min(kept, rank)
    if damping.tail_mass:
        left = factor.trace - factor.values.double().cumsum(0)
        kept = min(kept, 1 + int((left > damping.tail_mass * factor.trace).sum()))
    return kept


def _eigen_side(
    factor: Eigen, damping: Damping, kept: int, dtype: torch.dtype, widest_dense: int
) -> Side:
    shift = damping.shift(factor)
    dropped = (float(factor.values[kept:].sum()) + factor.rest) / max(1, factor.dim - kept)
    tail = (dropped + shift) ** -damping.exponent
    if kept == 0:
        return Identity(tail)
    if 2 * kept <= factor.dim or factor.dim > widest_dense:
        scale = damping.root(factor.values[:kept], shift).to(dtype)
        return LowRank(factor.vectors[:, :kept].to(dtype).contiguous(), scale, tail)
    # A dense side uses all stored pairs.
    tail = (factor.floor + shift) ** -damping.exponent
    scale = damping.root(factor.values, shift)
    vectors = factor.vectors
    root = (vectors * (scale - tail).to(vectors.dtype)) @ vectors.T
    root.diagonal().add_(tail)
    root = (root + root.T) / 2
    norm = float(scale.max())
    if scale.numel() < factor.dim:
        norm = max(tail, norm)
    return Dense(root.to(dtype), norm)


def elementwise_scale(
    factor: Factor, damping: Damping, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return (v + damping)^(−p) in a parameter's shape, for the second moment v of its gradient.

    An empty v gives ones.
    """
    shift = damping.shift(factor)
    if shift == 0.0:
        return torch.ones(shape, dtype=dtype, device=factor.values.device)
    scale = damping.root(factor.values, shift).to(dtype)
    return scale.expand(math.prod(shape)).reshape(shape).contiguous()


def condition_numbers(factor: Factor, damping: Damping) -> tuple[float, float]:
    """Return largest ÷ smallest eigenvalue before and after damping; infinite if singular.

    The mean of the dropped eigenvalues counts as the smallest, as in the side.
    """
    values = factor.values
    largest = float(values.max()) if values.numel() else 0.0
    smallest = float(values.min()) if values.numel() else 0.0
    if isinstance(factor, Eigen) and values.numel() < factor.dim:
        smallest = factor.floor
    shift = damping.shift(factor)
    before = largest / smallest if smallest > 0 else math.inf
    after = (largest + shift) / (smallest + shift) if shift > 0 else 1.0
    return before, after


# --------------------------------------------------------------------------------------------------
# Eigenpairs that single sides keep, whatever their width: `{"conv1.A": 32, "head.G": 0}`, 0 for
# all.
#
# They change the map that the metric is, as `max_rank` does, and never the guarantee under it.

SHORT = {"input": "A", "output": "G"}


def side_name(layer: str, side: str) -> str:
    """Return for example `conv1.A` for the input factor of conv1."""
    return f"{layer}.{SHORT.get(side, side)}"


def rank_of(ranks: Mapping[str, int], layer: str, side: str) -> int | None:
    """Return the eigenpairs that this side keeps, 0 for all; None if `ranks` does not name it."""
    return ranks.get(side_name(layer, side))


def check_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return a copy, after a check.

    Raises:
        ValueError: naming a key that is not a side, or a number that is negative or not whole.
    """
    for side, rank in dict(ranks).items():
        is_side = isinstance(side, str) and side.endswith((".A", ".G"))
        if not (is_side and type(rank) is int and rank >= 0):
            raise ValueError(
                "ranks maps sides, such as 'conv1.A', to the pairs they keep, 0 for all; "
                f"got {side!r}: {rank!r}"
            )
    return dict(ranks)


def check_sides(ranks: Mapping[str, int], layers: Mapping[str, Iterable[str]]) -> None:
    """Refuse ranks of sides that the model does not have.

    Args:
        ranks: by side.
        layers: layer name to the sides of its factors.

    Raises:
        ValueError: naming the sides.
    """
    known: set[str] = set()
    for layer, sides in layers.items():
        known |= {side_name(layer, side) for side in sides if side in SHORT}
    unknown = sorted(set(ranks) - known)
    if unknown:
        raise ValueError(
            f"ranks names sides that the model has not: {', '.join(unknown)}; "
            "`dpkfc doctor` lists its layers"
        )


# --------------------------------------------------------------------------------------------------
# Rows of the report: what became of each side of each layer.

UNREACHED = "not reached by the probe"


def layer_rows(
    name: str, factors: LayerFactors, used: LayerFactors, entry: Entry, damping: Damping
) -> list[dict[str, Any]]:
    """Return one row a side: its form, size, and condition number before and after damping.

    Args:
        name: the layer.
        factors: its factors as measured.
        used: its factors as they were damped.
        entry: its map.
        damping: the number that was added.
    """
    rows = []
    for side, factor in factors.sides.items():
        before, after = condition_numbers(used.sides[side], damping)
        notes = [factors.notes.get(side, "")]
        if is_empty(factor):
            notes.append("no signal on the probe")
        if isinstance(factor, Eigen) and factor.rest > 0:
            notes.append(f"first {factor.values.numel()} eigenpairs, the others by their mean")
        kind = "diagonal" if entry.is_elementwise else getattr(entry, side).kind
        rows.append(
            {
                "layer": name,
                "side": side,
                "dim": factor.dim,
                "kind": kind,
                "rank": factor.rank,
                "trace": factor.trace,
                "condition_before": before,
                "condition_after": after,
                "note": "; ".join(note for note in notes if note),
            }
        )
    return rows


def identity_row(name: str, why: str = UNREACHED) -> dict[str, Any]:
    """Return the row of a layer without factors, which keeps the identity."""
    return {
        "layer": name,
        "side": "",
        "dim": 0,
        "kind": "identity",
        "rank": 0,
        "trace": 0.0,
        "condition_before": 1.0,
        "condition_after": 1.0,
        "note": why,
    }


# --------------------------------------------------------------------------------------------------
# The metric of a refresh from its factors.

_log = logging.getLogger(__name__)


def form_metric(
    layers: Mapping[str, LayerFactors],
    damping: Damping,
    widest: int,
    rank: Callable[[str, str], int | None],
) -> Metric:
    """Return the damped roots of all layers; layers with the same eigenpairs share a side.

    Args:
        layers: factors.
        damping: the number that is added, and the root.
        widest: no matrix is formed for a wider side.
        rank: maps layer and side to the eigenpairs kept of the side, 0 for all; None for the rule
            of `damping`.
    """
    known: dict[tuple[int, float, int | None], Side] = {}

    def make_side(name: str, side: str, factors: LayerFactors) -> Side:
        factor = factors.sides[side]
        if not isinstance(factor, Eigen):
            return damp_side(factor, damping, factors.dtype, widest_dense=widest)
        own_rank = rank(name, side)
        key = (id(factor.vectors), factor.trace, own_rank)
        if key not in known:
            known[key] = damp_side(
                factor, damping, factors.dtype, widest_dense=widest, rank=own_rank
            )
        return known[key]

    metric: dict[str, Kronecker | Elementwise] = {}
    for name, factors in layers.items():
        if factors.kind == "elementwise":
            scales: dict[str, Tensor] = {}
            for role, factor in factors.sides.items():
                scale = elementwise_scale(factor, damping, factors.shapes[role], factors.dtype)
                scales[role] = scale.to(factors.device)
            metric[name] = Elementwise(scales)
        else:
            first = make_side(name, "input", factors)
            metric[name] = Kronecker(first, make_side(name, "output", factors))
    return metric


def report_identity_layers(
    metric: Metric, unknown: Mapping[str, str], rules: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the rows of layers that keep the identity, and log a warning.

    Args:
        metric: of the other layers.
        unknown: layer name to the kind of its block, for layers without factors.
        rules: layer name to kind, for all layers.
    """
    unreached = [name for name in rules if name not in metric and name not in unknown]
    if unreached:
        _log.warning(
            "the probe does not reach these layers, which keep the identity: %s",
            ", ".join(unreached),
        )
    if unknown:
        _log.warning(
            "no factors are known for these layers, which keep the identity: %s",
            ", ".join(unknown),
        )
    rows = []
    for name, kind in unknown.items():
        rows.append(identity_row(name, f"no factors are known for a {kind}"))
    return rows + [identity_row(name) for name in unreached]


def describe_shapes(model: nn.Module, name: str, factors: LayerFactors) -> dict[str, Any]:
    """Return the values that `PreconditionerState.check` compares.

    These are the kind, the sizes of the sides, and the weight's own shape if there is a weight.
    """
    shapes: dict[str, Any] = {"kind": factors.kind}
    for side, shape in factors.shapes.items():
        shapes[side] = list(shape)
    try:
        weight = getattr(model.get_submodule(name), "weight", None)
    except AttributeError:
        weight = None
    if isinstance(weight, Tensor):
        shapes["stored"] = list(weight.shape)
    return shapes
