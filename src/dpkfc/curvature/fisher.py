"""The Fisher information of every layer by eigenvalues of its product, to which a floor applies.

A matrix-shaped layer has F = A ⊗ G = (Q_A ⊗ Q_G)(λ_A ⊗ λ_G)(Q_A ⊗ Q_G)ᵀ with both bases complete,
so that every product λ_G,o λ_A,i has a direction. Other parameters (norm layers, embeddings, tied
tables, raw parameters) have the diagonal of their Fisher information. Both have the scale of one
example: tr(F) is E‖g‖² if inputs and output gradients were independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_cache import FactorCache
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor
from dpkfc.curvature.gradient_moments import MATRIX_ROLE, Moments, squared_gradients
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator, LayerFactors
from dpkfc.curvature.probe_pass import Capture, ProbeSpec
from dpkfc.curvature.refresh import gather_layers, measure
from dpkfc.curvature.refresh_group import RefreshGroup, finish_on_owners
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry
from dpkfc.tensors import NamedTensors, Tensors


@dataclass(frozen=True)
class LayerFisher:
    """The Fisher information of one layer.

    Attributes:
        entry: the bases, with scales of one; a floor and a root give the scales.
        spectrum: `A` and `G`, eigenvalues in the order of the bases, or role to the entries of a
            diagonal; float64.
        note: what became of a side that was too wide.
    """

    entry: Eigenbasis | Elementwise
    spectrum: NamedTensors
    note: str = ""


def measure_fisher(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    max_factor_size: int,
    team: RefreshGroup | None,
) -> tuple[dict[str, LayerFisher], str]:
    """Run the probe once; of several processes, each runs its examples and decomposes its layers.

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block.
        spec: what to run.
        max_factor_size: wider sides keep the diagonal of their factor.
        team: the processes that share the refresh, None for this one alone.

    Returns:
        The layers by name, and a note on the probe's labels.

    Raises:
        ValueError: a layer's contribution on the probe is not finite, or of a kind without
            curvature.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    options = FactorOptions(max_factor_size=max_factor_size)
    statistics = measure(model, capture, spec, options, team, start=_start_layer)
    for name, kind in statistics.unknown.items():
        raise ValueError(f"layer '{name}': no curvature is known for a {kind}; freeze it")
    note = statistics.note
    sums = gather_layers(statistics.layers, model, team)
    # Otherwise the last micro-batch stays in memory.
    del statistics

    def finish() -> dict[str, LayerFisher]:
        return {name: make_fisher(layer.result()) for name, layer in sums.items()}

    return finish_on_owners(finish, model, team), note


class MomentAccumulator:
    """Squares of the gradients of one layer from blocks that arrive in pieces."""

    def __init__(self, total: Moments | None = None) -> None:
        self._total = total

    def add(self, block: Block) -> None:
        """Add one probe micro-batch; raises as `squared_gradients`."""
        self.merge(MomentAccumulator(squared_gradients(block)))

    def merge(self, other: MomentAccumulator) -> None:
        """Add the sums of another accumulator of the layer."""
        new = other.result()
        self._total = new if self._total is None else self._total + new

    def detached_copy(self, shared: FactorCache | None = None) -> MomentAccumulator:
        """Return a copy; there is nothing to share between layers."""
        return MomentAccumulator(self._total)

    def cost(self, parts: int) -> float:
        """Return the cost of finishing the layer, which is negligible."""
        return 1.0

    def result(self) -> Moments:
        """Return the moments."""
        assert self._total is not None
        return self._total


def _start_layer(block: Block, *options: Any) -> LayerAccumulator | MomentAccumulator:
    """Return empty sums for a layer: of factors if its curvature is a Kronecker product."""
    if block.kind == "outer":
        return LayerAccumulator(block, *options)
    return MomentAccumulator()


def make_fisher(layer: LayerFactors | Moments) -> LayerFisher:
    """Return the Fisher information of a layer from its factors, or from its moments."""
    if isinstance(layer, Moments):
        ones = {role: torch.ones_like(x) for role, x in layer.values.items()}
        return LayerFisher(layer.entry(ones), layer.spectrum)
    input_basis, input_values = _complete_basis(layer.sides["input"], layer)
    output_basis, output_values = _complete_basis(layer.sides["output"], layer)
    size = (len(output_values), len(input_values))
    scale = torch.ones(size, dtype=layer.dtype, device=layer.device)
    entry = Eigenbasis(scale, input_basis, output_basis)
    notes = [f"{side}: {text}" for side, text in layer.notes.items()]
    note = "; ".join(notes)
    spectrum = {"A": input_values, "G": output_values}
    return LayerFisher(entry, spectrum, note)


def _complete_basis(factor: Factor, layer: LayerFactors) -> tuple[Tensor | None, Tensor]:
    """Return an orthonormal basis `[d, d]` and its eigenvalues `[d]`; None for the coordinates."""
    match factor:
        case DiagonalFactor():
            return None, factor.values.cpu()
        case IsotropicFactor():
            values = factor.values
            return None, values.repeat(factor.dim)
        case Eigen():
            basis = factor.vectors
            values = torch.zeros(factor.dim, dtype=torch.float64)
            known = basis.shape[1]
            values[:known] = factor.values
            if known < factor.dim:
                basis, _ = torch.linalg.qr(basis.double(), mode="complete")
                basis = basis.contiguous()
            return basis.to(layer.device, layer.dtype), values


def eigenvalues(entry: Entry, spectrum: NamedTensors) -> Tensors:
    """Return a layer's Fisher eigenvalues in the layout of its scales, float64."""
    scales = entry.scales
    if "A" in spectrum:
        device = scales[MATRIX_ROLE].device
        a = spectrum["A"].to(device)
        g = spectrum["G"].to(device)
        return {MATRIX_ROLE: torch.outer(g, a)}
    values = {}
    for role, x in scales.items():
        own = spectrum[role].to(x.device)
        values[role] = own.view(x.shape)
    return values


def clamp_eigenvalues(
    entry: Eigenbasis | Elementwise, spectrum: NamedTensors, floor: float, exponent: float
) -> Eigenbasis | Elementwise:
    """Return the map max(F, floor · I)^(−exponent), with each eigenvalue of the product clamped.

    Args:
        entry: with the bases; its scales are replaced.
        spectrum: as `LayerFisher.spectrum`.
        floor: λ, positive.
        exponent: 1/2 whitens, 1 gives the natural gradient.
    """
    scales = {}
    for role, values in eigenvalues(entry, spectrum).items():
        clamped = values.clamp(min=floor)
        roots = clamped.pow(-exponent)
        scales[role] = roots.to(entry.scales[role])
    return entry.replace_scales(scales)


def condition(values: NamedTensors, floor: float = 0.0) -> float:
    """Return largest ÷ smallest eigenvalue with a floor; infinite if the smallest is zero."""
    smallest = math.inf
    largest = floor
    for x in values.values():
        smallest = min(smallest, float(x.min()))
        largest = max(largest, float(x.max()))
    smallest = max(floor, smallest)
    if not smallest > 0:
        return math.inf
    return largest / smallest
