"""The Fisher information of every layer by eigenvalues of its product: what a floor on the product is applied to.

A matrix-shaped layer has F = A ⊗ G = (Q_A ⊗ Q_G)(λ_A ⊗ λ_G)(Q_A ⊗ Q_G)ᵀ with both bases complete, so that every product
λ_G,o λ_A,i has a direction. Other parameters (norm layers, embeddings, tied tables, raw parameters) have the diagonal of
their Fisher information. Both are in the scale of one example: tr(F) is E‖g‖² if inputs and output gradients were independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.blocks import Outer, formed
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor
from dpkfc.curvature.inputs import Inputs, device_of
from dpkfc.curvature.layers import LayerAccumulator, Structure, is_known
from dpkfc.curvature.linalg import Eigen
from dpkfc.curvature.moments import Moments, squared_gradients
from dpkfc.curvature.positions import Positions
from dpkfc.curvature.probing import Capture, ProbeRun, blocks_on_probe, public_generator
from dpkfc.curvature.refresh import added
from dpkfc.curvature.shares import Team, agreed, joined, own_rows, probe_digest
from dpkfc.metric import Eigenbasis, Elementwise, Entry, Identity, Kronecker

__all__ = ["LayerFisher", "clamped", "condition", "eigenvalues", "fisher_of_layers", "parted"]


@dataclass(frozen=True)
class LayerFisher:
    """The Fisher information of one layer.

    Attributes:
        entry: the bases, with scales of one; a floor and a root give it its scales.
        spectrum: `A` and `G`, eigenvalues in the order of the bases, or role to the entries of a diagonal; float64.
        shapes: kind and sizes of the sides, for `Preconditioner.check`.
        note: what became of a side that was too wide.
    """

    entry: Eigenbasis | Elementwise
    spectrum: Mapping[str, Tensor]
    shapes: Mapping[str, Any]
    note: str = ""


def fisher_of_layers(
    model: nn.Module, capture: Capture, run: ProbeRun, max_factor_size: int, team: Team | None = None
) -> tuple[dict[str, LayerFisher], str]:
    """Run the probe once; of several processes, each runs its own examples and decomposes its own layers.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block.
        run: what to run.
        max_factor_size: wider sides keep the diagonal of their factor.
        team: the processes that share the refresh, None for this one alone.

    Returns:
        The layers by name, and a note on the probe's labels.

    Raises:
        ValueError: a layer's contribution on the probe is not finite, or of a kind without curvature.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        parts, note, _ = _parts(model, capture, run, max_factor_size)
        return _finished({name: [part] for name, part in parts.items()}), note
    parts, note, digest = team.together(lambda: _parts(model, capture, run, max_factor_size, team))
    told = team.everyone((digest, note))
    agreed("probe", [of for of, _ in told])
    found = joined(team, parts, _cost, _finished, device_of(model))
    return found, next((text for _, text in told if text), "")


_Part = LayerAccumulator | Moments


def _cost(part: _Part) -> float:
    """That of two complete bases; a diagonal is nothing beside them."""
    return part.full_cost if isinstance(part, LayerAccumulator) else 1.0


def _parts(
    model: nn.Module, capture: Capture, run: ProbeRun, max_factor_size: int, team: Team | None = None
) -> tuple[dict[str, _Part], str, str]:
    """What this process's examples add up to, a note on the probe's labels, and a hash of the probe where others run the rest."""
    structure = Structure(max_factor_size=max_factor_size)
    positions = Positions(public_generator(run.seed, run.step, "positions"), run.size, None)
    factors: dict[str, LayerAccumulator] = {}
    moments: dict[str, Moments] = {}
    note, rows, seen = "", own_rows(team, run.size), [""]

    def drawn(inputs: Inputs, labels: Tensor | None) -> None:
        seen[0] = "" if team is None else probe_digest(inputs, labels)

    for piece in blocks_on_probe(model, capture, run, rows.start, stop=rows.stop, drawn=drawn):
        positions.start(piece.rows, piece.mask)
        note = piece.note
        for name in piece.blocks:
            block = formed(piece.blocks[name])
            if not is_known(block):
                raise ValueError(f"layer '{name}': no curvature is known for a {type(block).__name__}; freeze it")
            try:
                if isinstance(block, Outer):
                    factors.setdefault(name, LayerAccumulator(block, structure, None, positions)).add(block)
                else:
                    new = squared_gradients(block, "example")
                    moments[name] = moments[name].plus(new) if name in moments else new
            except ValueError as error:
                raise ValueError(f"layer '{name}': {error}") from error
            del block
        del piece  # or it stays in memory beside the next one
    return {**{name: of.apart() for name, of in factors.items()}, **moments}, note, seen[0]


def _finished(parts: Mapping[str, list[_Part]]) -> dict[str, LayerFisher]:
    """Layers from what every process has added up, in the order of the processes."""
    factors = {name: [x for x in held if isinstance(x, LayerAccumulator)] for name, held in parts.items()}
    moments = {name: [x for x in held if isinstance(x, Moments)] for name, held in parts.items()}
    found = {name: _product(layer) for name, layer in added({n: held for n, held in factors.items() if held}).items()}
    return found | {name: _diagonal(reduce(Moments.plus, held)) for name, held in moments.items() if held}


def _product(accumulator: LayerAccumulator) -> LayerFisher:
    layer = accumulator.result()
    (a, values_a), (g, values_g) = (_complete(layer.sides[side], layer.dtype) for side in ("input", "output"))
    ones = torch.ones(len(values_g), len(values_a), dtype=layer.dtype, device=layer.device)
    into, out = (None if q is None else q.to(layer.device) for q in (a, g))
    entry = Eigenbasis(ones, into, out)
    shapes = {"kind": "outer", **{side: list(shape) for side, shape in layer.shapes.items()}}
    note = "; ".join(f"{side}: {text}" for side, text in layer.notes.items())
    return LayerFisher(entry, {"A": values_a, "G": values_g}, shapes, note)


def _diagonal(moments: Moments) -> LayerFisher:
    mean = moments.mean
    entry = moments.entry({role: torch.ones_like(x) for role, x in mean.items()})
    assert isinstance(entry, Eigenbasis | Elementwise)
    return LayerFisher(entry, {role: x.flatten().cpu() for role, x in mean.items()}, moments.shapes)


def _complete(factor: Factor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """An orthonormal basis `[d, d]` (None: the coordinates) and the eigenvalues `[d]` in its order."""
    match factor:
        case DiagonalFactor():
            return None, factor.values.cpu()
        case IsotropicFactor():
            return None, torch.full((factor.dim,), factor.mean, dtype=torch.float64)
        case Eigen():
            held = factor.vectors.shape[1]
            values = torch.cat([factor.values.cpu(), torch.zeros(factor.dim - held, dtype=torch.float64)])
            if held == factor.dim:
                return factor.vectors.to(dtype), values
            return torch.linalg.qr(factor.vectors.double(), mode="complete").Q.to(dtype).contiguous(), values


def eigenvalues(entry: Entry, spectrum: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The eigenvalues of a layer's Fisher information in the layout of its scales, float64, role to tensor."""
    if isinstance(entry, Elementwise):
        return {role: spectrum[role].to(scale.device).view(scale.shape) for role, scale in entry.scale.items()}
    assert isinstance(entry, Eigenbasis)
    if "A" in spectrum:
        a, g = (spectrum[side].to(entry.scale.device) for side in ("A", "G"))
        return {"weight": torch.outer(g, a)}
    return {"weight": spectrum["weight"].to(entry.scale.device).view(entry.scale.shape)}


def clamped(entry: Entry, spectrum: Mapping[str, Tensor], floor: float, exponent: float) -> Eigenbasis | Elementwise:
    """The map max(F, floor · I)^(−exponent), each eigenvalue of the product on its own.

    Args:
        entry: with the bases; its scales are replaced.
        spectrum: as `LayerFisher.spectrum`.
        floor: λ, positive.
        exponent: 1/2 whitens, 1 gives the natural gradient.
    """
    values = eigenvalues(entry, spectrum)
    scale = {role: x.clamp(min=floor).pow(-exponent) for role, x in values.items()}
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale[role].to(own) for role, own in entry.scale.items()})
    assert isinstance(entry, Eigenbasis)
    return replace(entry, scale=scale["weight"].to(entry.scale))


def parted(entry: Entry) -> Entry:
    """The same map where few input directions stand out from one scale that all others share, which a floor gives them.

    With none it is a multiple of the identity; with up to a quarter of the directions they alone are turned to. The map is the
    one that was given, to the last bits; only its norms cost less.
    """
    if not isinstance(entry, Eigenbasis) or entry.input is None or entry.rest is not None:
        return entry
    most = float(entry.scale.max())
    active = torch.nonzero((entry.scale < most).any(0)).flatten()
    if not len(active):
        return Kronecker(Identity(most), Identity(1.0))
    if 4 * len(active) > entry.scale.shape[1]:
        return entry
    return Eigenbasis(entry.scale[:, active], entry.input[:, active].contiguous(), entry.output, most)


def condition(values: Mapping[str, Tensor], floor: float = 0.0) -> float:
    """Largest ÷ smallest eigenvalue with a floor; infinite where the smallest is zero."""
    largest = max(floor, *(float(x.max()) for x in values.values()))
    smallest = max(floor, min(float(x.min()) for x in values.values()))
    return largest / smallest if smallest > 0 else float("inf")
