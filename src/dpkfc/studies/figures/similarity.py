"""How alike two sources of curvature are, layer by layer: similarity of A, G and A ⊗ G, and the map that one makes of the other.

With a reference F = A ⊗ G (here: of private examples, for research alone) and a probe's F̃ = Ã ⊗ G̃,

    cos(F, F̃) = cos(A, Ã) · cos(G, G̃)          ‖F − F̃‖² = ‖A‖²‖G‖² + ‖Ã‖²‖G̃‖² − 2 ⟨A, Ã⟩⟨G, G̃⟩

and the realised map F̃^(−1/2) F F̃^(−1/2) has the products of the eigenvalues of its two sides. All of it is of UNDAMPED
factors unless a shift is asked for: `AUTHORS` repeats the sums of the DP-KFC authors' code, whose probe loss is a mean over
the B examples of the probe (G is B² too small) and which adds 1e-5 · I to both factors before they are compared. Then the
added identity is most of either G, and any two of them look alike.

Source: DP-KFC, appendices F.2 and G.1, theorem 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc.curvature.diagnostics import inner_product
from dpkfc.curvature.factors import DiagonalFactor, Factor
from dpkfc.curvature.layers import LayerFactors
from dpkfc.curvature.linalg import Eigen

__all__ = ["AUTHORS", "UNDAMPED", "Alike", "Convention", "Realised", "alike", "kronecker_layers", "realised", "tracked"]

SIDES = {"A": "input", "G": "output"}


@dataclass(frozen=True)
class Convention:
    """What is done to factors before they are compared.

    Attributes:
        added: multiple of the identity that is added to A and to G.
        mean_loss: whether G is that of a loss averaged over the probe, B² times smaller.
    """

    added: float = 0.0
    mean_loss: bool = False

    def scale(self, side: str, probe_size: int) -> float:
        """What a factor is multiplied by."""
        return float(probe_size) ** -2 if self.mean_loss and side == "G" else 1.0


UNDAMPED = Convention()
AUTHORS = Convention(added=1e-5, mean_loss=True)


@dataclass(frozen=True)
class Alike:
    """A matrix beside a reference.

    Attributes:
        cosine: ⟨F, F̃⟩ / (‖F‖ ‖F̃‖), blind to scale.
        error: ‖F − F̃‖ / ‖F‖, of direction and scale.
        scale: tr F̃ / tr F.
    """

    cosine: float
    error: float
    scale: float


@dataclass(frozen=True)
class _Products:
    own: float
    other: float
    both: float
    trace: float
    other_trace: float

    def times(self, second: _Products) -> _Products:
        """Those of the Kronecker products."""
        pairs = zip(vars(self).values(), vars(second).values(), strict=True)
        return _Products(*(a * b for a, b in pairs))

    def alike(self) -> Alike:
        if self.own <= 0 or self.other <= 0:
            return Alike(0.0, 1.0, 0.0)
        error = max(0.0, self.own + self.other - 2 * self.both)
        cosine = min(1.0, self.both / math.sqrt(self.own) / math.sqrt(self.other))
        return Alike(cosine, math.sqrt(error / self.own), self.other_trace / self.trace)


def kronecker_layers(layers: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """The layers that have two sides, A and G."""
    return {name: of for name, of in layers.items() if of.kind == "outer"}


def tracked(reference: LayerFactors, other: LayerFactors, convention: Convention, probe_size: int) -> dict[str, Alike]:
    """A, G and F = A ⊗ G of one layer beside those of a reference.

    Args:
        reference: undamped factors.
        other: undamped factors of another source, on the same model.
        convention: what is done to both before they are compared.
        probe_size: examples B of either probe.
    """
    products = {
        name: _products(reference.sides[side], other.sides[side], convention.added, convention.scale(name, probe_size))
        for name, side in SIDES.items()
    }
    products["F"] = products["A"].times(products["G"])
    return {name: one.alike() for name, one in products.items()}


def alike(reference: Factor, other: Factor, added: float = 0.0) -> Alike:
    """One factor beside another of its size, after a multiple of the identity is added to both."""
    return _products(reference, other, added, 1.0).alike()


def _products(reference: Factor, other: Factor, added: float, scale: float) -> _Products:
    first, second = reference.scaled(scale), other.scaled(scale)
    dim = first.dim

    def product(a: Factor, b: Factor) -> float:
        return inner_product(a, b) + added * (a.trace + b.trace) + added * added * dim

    return _Products(
        own=product(first, first), other=product(second, second), both=product(first, second),
        trace=first.trace + added * dim, other_trace=second.trace + added * dim,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Realised:
    """Spectrum of F̃^(−p) F F̃^(−p), or of F itself where nothing is applied.

    Attributes:
        largest, smallest: λ_max and λ_min; λ_min is 0 where F is singular, as with fewer examples than columns.
        condition: their ratio, `inf` for a singular F.
        held: the condition number over the directions of F that hold 99 % of its trace on each side.
        flatness: tr / (√d ‖·‖), the cosine to the identity: 1 where the map is a multiple of it, which is all that clipping
            norm and learning rate can absorb.
    """

    largest: float
    smallest: float
    condition: float
    held: float
    flatness: float

    def times(self, second: Realised) -> Realised:
        """That of the Kronecker product of both."""
        return Realised(
            largest=self.largest * second.largest, smallest=self.smallest * second.smallest,
            condition=self.condition * second.condition, held=self.held * second.held,
            flatness=self.flatness * second.flatness,
        )  # fmt: skip


def realised(reference: Factor, other: Factor | None, *, damping: float = 0.1, exponent: float = 0.5) -> Realised:
    """What a damped root of one factor makes of another.

    Args:
        reference: A (or G) of the examples that gradients come from.
        other: Ã of the probe; None applies nothing.
        damping: ρ, in units of the mean eigenvalue of Ã; 0 takes the root on the support of Ã alone.
        exponent: p of the root on each side.
    """
    values, vectors = _pairs(reference)
    gram = values.diag() if other is None else _mapped(values, vectors, other, damping, exponent)
    found = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0)
    full = values.numel() == reference.dim
    largest, smallest = float(found[0]), float(found[-1]) if full else 0.0
    most = int((values.cumsum(0) < 0.99 * values.sum()).sum()) + 1
    held = torch.linalg.eigvalsh(gram[:most, :most]).clamp(min=0)
    norm = float(found.square().sum().sqrt())
    return Realised(
        largest=largest, smallest=smallest, condition=_ratio(largest, smallest), held=_ratio(float(held[-1]), float(held[0])),
        flatness=float(found.sum()) / (math.sqrt(reference.dim) * norm) if norm > 0 else 0.0,
    )  # fmt: skip


def _ratio(largest: float, smallest: float) -> float:
    return largest / smallest if smallest > 1e-14 * largest else math.inf


def _mapped(values: Tensor, vectors: Tensor, other: Factor, damping: float, exponent: float) -> Tensor:
    """√λ Vᵀ R² V √λ, which has the eigenvalues of R V λ Vᵀ R that are not zero, R the damped root of the other factor."""
    theirs, directions = _pairs(other)
    shift = damping * other.mean
    kept = theirs > (0.0 if shift > 0 else 1e-13 * float(theirs[0]))
    floor = getattr(other, "floor", 0.0)
    tail = (floor + shift) ** (-2 * exponent) if floor + shift > 0 else 0.0
    scale = (theirs[kept] + shift).pow(-2 * exponent) - tail
    overlap = directions[:, kept].T @ vectors
    inside = overlap.T @ (scale[:, None] * overlap) + tail * torch.eye(values.numel(), dtype=torch.float64)
    root = values.sqrt()
    return root[:, None] * inside * root


def _pairs(factor: Factor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and their vectors, float64."""
    match factor:
        case Eigen():
            return factor.values.double().cpu(), factor.vectors.double().cpu()
        case DiagonalFactor():
            order = factor.values.argsort(descending=True).cpu()
            return factor.values.double().cpu()[order], torch.eye(factor.dim, dtype=torch.float64)[:, order]
        case _:
            return torch.full((factor.dim,), factor.mean, dtype=torch.float64), torch.eye(factor.dim, dtype=torch.float64)
