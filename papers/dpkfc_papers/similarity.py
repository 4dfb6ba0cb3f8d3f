"""How alike two sources of curvature are, layer by layer.

Measured are the similarity of A, G and A ⊗ G, and the map that one makes of the other.

With a reference F = A ⊗ G (here: of private examples, for research alone) and a probe's F̃ = Ã ⊗
G̃,

    cos(F, F̃) = cos(A, Ã) · cos(G, G̃)          ‖F − F̃‖² = ‖A‖²‖G‖² + ‖Ã‖²‖G̃‖² − 2 ⟨A, Ã⟩⟨G, G̃⟩

and the realised map F̃^(−1/2) F F̃^(−1/2) has the products of the eigenvalues of its two sides.
All of it is of UNDAMPED factors unless a shift is asked for: `AUTHORS` repeats the sums of the
DP-KFC authors' code, whose probe loss is a mean over the B examples of the probe (G is B² too
small) and which adds 1e-5 · I to both factors before they are compared. Then the added identity
is most of either G, and any two of them look alike.

Source: DP-KFC, appendices F.2 and G.1, theorem 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor
from dpkfc.curvature.layer_factors import LayerFactors

T = TypeVar("T")

SIDES = {"A": "input", "G": "output"}


@dataclass(frozen=True)
class Convention:
    """What is done to factors before they are compared.

    Attributes:
        added: multiple of the identity that is added to A and to G.
        mean_loss: whether G belongs to a loss averaged over the probe, B² times smaller.
    """

    added: float = 0.0
    mean_loss: bool = False

    def scale(self, side: str, probe_size: int) -> float:
        """Return what a factor is multiplied by."""
        return float(probe_size) ** -2 if self.mean_loss and side == "G" else 1.0


UNDAMPED = Convention()
AUTHORS = Convention(added=1e-5, mean_loss=True)


@dataclass(frozen=True)
class Similarity:
    """A matrix compared with a reference.

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

    def compare(self) -> Similarity:
        if self.own <= 0 or self.other <= 0:
            return Similarity(0.0, 1.0, 0.0)
        squared_error = max(0.0, self.own + self.other - 2 * self.both)
        norm = math.sqrt(self.own)
        other_norm = math.sqrt(self.other)
        cosine = self.both / norm / other_norm
        return Similarity(
            cosine=min(1.0, cosine),
            error=math.sqrt(squared_error / self.own),
            scale=self.other_trace / self.trace,
        )


def multiply(first: T, second: T) -> T:
    """Return what two factors have as a Kronecker product: the products of their figures."""
    products = {name: value * getattr(second, name) for name, value in vars(first).items()}
    return type(first)(**products)


def kronecker_layers(layers: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """Return the layers that have two sides, A and G."""
    return {name: factors for name, factors in layers.items() if factors.kind == "outer"}


def track_factors(
    reference: LayerFactors, other: LayerFactors, convention: Convention, probe_size: int
) -> dict[str, Similarity]:
    """Compare A, G and F = A ⊗ G of one layer with the factors of a reference.

    Args:
        reference: undamped factors.
        other: undamped factors of another source, on the same model.
        convention: what is done to both before they are compared.
        probe_size: examples B of either probe.
    """
    products = {}
    for name, side in SIDES.items():
        scale = convention.scale(name, probe_size)
        pair = (reference.sides[side], other.sides[side])
        products[name] = _products(*pair, convention.added, scale)
    products["F"] = multiply(products["A"], products["G"])
    return {name: product.compare() for name, product in products.items()}


def inner_product(first: Factor, second: Factor) -> float:
    """Return tr(F S) of two factors of the same size, without forming either."""
    match first, second:
        case IsotropicFactor(), _:
            return first.mean * second.trace
        case _, IsotropicFactor():
            return second.mean * first.trace
        case DiagonalFactor(), DiagonalFactor():
            return float(first.values @ second.values)
        case Eigen(), Eigen():
            cosines = first.vectors.double().T @ second.vectors.double()
            overlap = cosines.square()
            f = first.floor
            s = second.floor
            above = (first.values - f) @ overlap @ (second.values - s)
            # tr(F S) is tr(F' S') and this, for F = F' + f I and S = S' + s I.
            rest = f * (second.trace - s * first.dim)
            rest += s * (first.trace - f * first.dim)
            rest += f * s * first.dim
            return float(above) + rest
        case Eigen(), DiagonalFactor():
            squares = first.vectors.double().square()
            above = second.values @ squares @ (first.values - first.floor)
            return float(above) + first.floor * second.trace
        case _:
            return inner_product(second, first)


def _products(reference: Factor, other: Factor, added: float, scale: float) -> _Products:
    """Multiply two factors and add a multiple of the identity to both, then compare them."""
    first = reference.scale_by(scale)
    second = other.scale_by(scale)
    dim = first.dim

    def product(a: Factor, b: Factor) -> float:
        traces = a.trace + b.trace
        return inner_product(a, b) + added * traces + added * added * dim

    return _Products(
        own=product(first, first),
        other=product(second, second),
        both=product(first, second),
        trace=first.trace + added * dim,
        other_trace=second.trace + added * dim,
    )


@dataclass(frozen=True, kw_only=True)
class Realised:
    """Spectrum of F̃^(−p) F F̃^(−p), or of F itself where nothing is applied.

    Attributes:
        largest, smallest: λ_max and λ_min; λ_min is 0 where F is singular, as with fewer
            examples than columns.
        condition: their ratio, `inf` for a singular F.
        held: the condition number over the directions of F that hold 99 % of its trace on each
            side.
        flatness: tr / (√d ‖·‖), the cosine to the identity. It is 1 where the map is a multiple of
            the identity, which clipping norm and learning rate can absorb.
    """

    largest: float
    smallest: float
    condition: float
    held: float
    flatness: float


def realised(
    reference: Factor, other: Factor | None, *, damping: float = 0.1, exponent: float = 0.5
) -> Realised:
    """Return what a damped root of one factor makes of another.

    Args:
        reference: A (or G) of the examples that gradients come from.
        other: Ã of the probe; None applies nothing.
        damping: ρ, in units of the mean eigenvalue of Ã; 0 takes the root on the support of Ã.
        exponent: p of the root on each side.
    """
    values, vectors = _eigenpairs(reference)
    if other is None:
        gram = values.diag()
    else:
        gram = _precondition(values, vectors, other, damping, exponent)
    ascending = torch.linalg.eigvalsh(gram).clamp(min=0)
    spectrum = ascending.flip(0)
    is_full_rank = values.numel() == reference.dim
    largest = float(spectrum[0])
    smallest = float(spectrum[-1]) if is_full_rank else 0.0
    is_below = values.cumsum(0) < 0.99 * values.sum()
    most = int(is_below.sum()) + 1
    block = gram[:most, :most]
    main = torch.linalg.eigvalsh(block).clamp(min=0)
    norm = float(spectrum.square().sum().sqrt())
    flatness = 0.0
    if norm > 0:
        trace = float(spectrum.sum())
        flatness = trace / (math.sqrt(reference.dim) * norm)
    return Realised(
        largest=largest,
        smallest=smallest,
        condition=_ratio(largest, smallest),
        held=_ratio(float(main[-1]), float(main[0])),
        flatness=flatness,
    )


def _ratio(largest: float, smallest: float) -> float:
    return largest / smallest if smallest > 1e-14 * largest else math.inf


def _precondition(
    values: Tensor, vectors: Tensor, other: Factor, damping: float, exponent: float
) -> Tensor:
    """Return √λ Vᵀ R² V √λ, with R the damped root of the other factor.

    It has the non-zero eigenvalues of R V λ Vᵀ R.
    """
    theirs, directions = _eigenpairs(other)
    shift = damping * other.mean
    least = 0.0 if shift > 0 else 1e-13 * float(theirs[0])
    kept = theirs > least
    floor = getattr(other, "floor", 0.0) + shift
    power = -2 * exponent
    # R² is `tail` in all directions that have no eigenpair.
    tail = floor**power if floor > 0 else 0.0
    scale = (theirs[kept] + shift).pow(power) - tail
    overlap = directions[:, kept].T @ vectors
    identity = torch.eye(values.numel(), dtype=torch.float64)
    squared_root = overlap.T @ (scale[:, None] * overlap) + tail * identity
    root = values.sqrt()
    return root[:, None] * squared_root * root


def _eigenpairs(factor: Factor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, largest first, and their vectors, float64."""
    if isinstance(factor, Eigen):
        return factor.values.double().cpu(), factor.vectors.double().cpu()
    identity = torch.eye(factor.dim, dtype=torch.float64)
    if isinstance(factor, DiagonalFactor):
        order = factor.values.argsort(descending=True).cpu()
        values = factor.values.double().cpu()
        return values[order], identity[:, order]
    values = torch.full((factor.dim,), factor.mean, dtype=torch.float64)
    return values, identity
