"""Factors that are changed before they are damped: of two probes, or along random directions."""

from __future__ import annotations

from dataclasses import replace

import torch

from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import DiagonalFactor, Factor
from dpkfc.curvature.layer_factors import Factors, LayerFactors
from dpkfc.curvature.probe_pass import public_generator


def combine_factors(inputs: Factors, outputs: Factors | None = None) -> Factors:
    """Combine input factors A of one probe with output factors G of another, on the same model.

    Layers without these two sides (norm layers, raw parameters, tied tables) take the factors of
    the probe for outputs. A layer that only one probe reaches takes the factors of that probe.
    """
    if outputs is None:
        return inputs
    combined = {**outputs, **inputs}
    for name, first in inputs.items():
        second = outputs.get(name)
        if second is None:
            continue
        combined[name] = second
        if first.kind not in ("outer", "lookup"):
            continue
        sources = {"input": first, "output": second}
        sides = {side: x.sides[side] for side, x in sources.items()}
        notes = {side: x.notes[side] for side, x in sources.items() if side in x.notes}
        combined[name] = replace(second, sides=sides, notes=notes)
    return combined


def randomize_directions(layers: Factors, seed: int) -> dict[str, LayerFactors]:
    """Return the same spectra along random orthogonal directions, with diagonals in random order.

    This control tells directions of curvature from a mere per-example normalisation by a metric of
    the same spectrum. The seed gives the same directions at every refresh.
    """
    generator = public_generator(seed, 0, "control")
    randomized = {}
    for name, factors in layers.items():
        sides = {side: _randomize_factor(x, generator) for side, x in factors.sides.items()}
        randomized[name] = replace(factors, sides=sides)
    return randomized


def _randomize_factor(factor: Factor, generator: torch.Generator) -> Factor:
    match factor:
        case Eigen():
            vectors = factor.vectors
            normal = torch.randn(vectors.shape, generator=generator, dtype=torch.float64)
            basis, _ = torch.linalg.qr(normal)
            basis = basis.to(vectors)
            return replace(factor, vectors=basis.contiguous())
        case DiagonalFactor():
            order = torch.randperm(factor.dim, generator=generator)
            order = order.to(factor.values.device)
            return DiagonalFactor(factor.values[order])
        case _:
            return factor
