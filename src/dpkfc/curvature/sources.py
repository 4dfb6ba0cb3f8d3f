"""Factors put together from several sources: hybrids of two probes, and a control without directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dpkfc.curvature.factors import DiagonalFactor, Factor
from dpkfc.curvature.layers import LayerFactors
from dpkfc.curvature.linalg import Eigen
from dpkfc.curvature.probing import public_generator

__all__ = ["combined", "randomised"]


def combined(
    inputs: Mapping[str, LayerFactors], outputs: Mapping[str, LayerFactors] | None = None
) -> Mapping[str, LayerFactors]:
    """Input factors A of one probe beside output factors G of another, on the same model; without another, both of the one.

    Parameters without the two sides (norm layers, raw parameters) and tied tables, whose one factor is of gradients, take
    those of the probe for outputs. A layer that only one of the probes reaches has the factors of that one.
    """
    if outputs is None:
        return inputs
    found = {**outputs, **inputs}
    for name, first in inputs.items():
        other = outputs.get(name)
        if other is None:
            continue
        if first.kind in ("outer", "lookup"):
            sides = {"input": first.sides["input"], "output": other.sides["output"]}
            notes = {side: of.notes[side] for side, of in (("input", first), ("output", other)) if side in of.notes}
            found[name] = replace(other, sides=sides, notes=notes)
        else:
            found[name] = other
    return found


def randomised(layers: Mapping[str, LayerFactors], seed: int) -> dict[str, LayerFactors]:
    """The same spectra along random orthogonal directions; diagonal factors have their entries in a random order.

    The control that tells directions of curvature from a mere per-example normalisation by a metric of such a spectrum.
    The directions are those of the seed at every refresh.
    """
    generator = public_generator(seed, 0, "control")
    return {
        name: replace(of, sides={side: _randomised(factor, generator) for side, factor in of.sides.items()})
        for name, of in layers.items()
    }


def _randomised(factor: Factor, generator: torch.Generator) -> Factor:
    match factor:
        case Eigen():
            drawn = torch.randn(factor.vectors.shape, generator=generator, dtype=torch.float64)
            return replace(factor, vectors=torch.linalg.qr(drawn).Q.to(factor.vectors).contiguous())
        case DiagonalFactor():
            order = torch.randperm(factor.dim, generator=generator).to(factor.values.device)
            return DiagonalFactor(factor.values[order])
        case _:
            return factor
