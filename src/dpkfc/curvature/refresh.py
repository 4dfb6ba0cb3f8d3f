"""One refresh: the probe through the model once, and the one number that gives the metric its scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkfc.blocks import Block
from dpkfc.curvature.layers import LayerAccumulator, Structure, is_known
from dpkfc.curvature.norms import probe_norms
from dpkfc.curvature.positions import Positions
from dpkfc.curvature.probing import Capture, Piece, ProbeRun, blocks_on_probe, public_generator
from dpkfc.curvature.shared import Shared
from dpkfc.metric import Metric

__all__ = ["Measured", "measure", "probe_scale"]

_SCALE_SIZE = 64  # probe examples, the last ones, over which the two medians are taken


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one pass over the probe has shown.

    Attributes:
        layers: layer name to its factors, not decomposed yet.
        unknown: layer name to the kind of block that has no factors; such a layer keeps the identity.
        last: the last micro-batch, which the scale is measured on without a second pass.
    """

    layers: Mapping[str, LayerAccumulator]
    unknown: Mapping[str, str]
    last: Piece


def measure(
    model: nn.Module,
    capture: Capture,
    run: ProbeRun,
    structure: Structure,
    *,
    rules: Mapping[str, str],
    rows_per_dim: float | None,
) -> Measured:
    """Run the probe and add up factors.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block.
        run: what to run.
        structure: how factors are formed.
        rules: layer name to kind, as far as known.
        rows_per_dim: see `Positions`.

    Raises:
        ValueError: a layer's contribution on the probe is not finite or does not fit.
    """
    positions = Positions(public_generator(run.seed, run.step, "positions"), run.size, rows_per_dim)
    shared = Shared()
    layers: dict[str, LayerAccumulator] = {}
    unknown: dict[str, str] = {}
    piece: Piece | None = None
    for piece in blocks_on_probe(model, capture, run):
        positions.start(piece.rows, piece.mask)
        for name in piece.blocks:
            block = piece.blocks[name]
            if not is_known(block):
                unknown[name] = type(block).__name__
                continue
            if name not in layers:
                layers[name] = LayerAccumulator(block, structure, rules.get(name), positions, shared)
            _add_named(layers[name], name, block, piece.size)
        shared.forget()
    assert piece is not None
    return Measured(layers=layers, unknown=unknown, last=piece)


def _add_named(layer: LayerAccumulator, name: str, block: Block, size: int) -> None:
    if block.batch_size != size:
        raise ValueError(f"layer '{name}': capture returned {block.batch_size} examples instead of {size}")
    try:
        layer.add(block)
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from error


def probe_scale(model: nn.Module, capture: Capture, run: ProbeRun, metric: Metric, measured: Measured) -> float:
    """Median ‖g‖ ÷ median ‖P g‖ over the last examples of the probe; 1 where a median is zero.

    They are those of the last micro-batch where it has enough of them; otherwise these few run through the model again.
    """
    first = max(0, run.size - _SCALE_SIZE)
    last = measured.last
    pieces = [last] if last.rows.start <= first else blocks_on_probe(model, capture, run, first)
    plain: list[Tensor] = []
    mapped: list[Tensor] = []
    for piece in pieces:
        count = piece.rows.stop - max(first, piece.rows.start)
        norms = probe_norms(piece.blocks, {}, metric, last=None if count == piece.size else count)
        plain.append(norms[0])
        mapped.append(norms[1])
    ratio = _median(plain) / max(_median(mapped), 1e-300)
    return ratio if ratio > 0 and math.isfinite(ratio) else 1.0


def _median(pieces: list[Tensor]) -> float:
    return float(torch.quantile(torch.cat(pieces), 0.5))
