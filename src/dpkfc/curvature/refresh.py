"""One refresh: the probe through the model once, and the one number that gives the metric its scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.blocks import Block
from dpkfc.curvature.inputs import Inputs, device_of
from dpkfc.curvature.layers import LayerAccumulator, LayerFactors, Structure, is_known
from dpkfc.curvature.norms import probe_norms
from dpkfc.curvature.positions import Positions
from dpkfc.curvature.probing import Capture, Piece, ProbeRun, blocks_on_probe, public_generator
from dpkfc.curvature.running import Running, running_of, with_past
from dpkfc.curvature.shared import Shared
from dpkfc.curvature.shares import Team, agreed, handed_over, moved_to, own_rows, probe_digest, told_to_all
from dpkfc.metric import Metric

__all__ = ["SCALE_SIZE", "Measured", "added", "decomposed", "gathered", "kept_for_scale", "measure", "probe_scale"]

SCALE_SIZE = 64  # probe examples, the last ones, over which the two medians are taken


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one pass over the probe has shown.

    Attributes:
        layers: layer name to its factors, not decomposed yet.
        unknown: layer name to the kind of block that has no factors; such a layer keeps the identity.
        last: the last micro-batch where the scale can be measured on it without a second pass; None where it has too few examples
            for that, which would stay in memory for nothing, and where several processes each ran a part of the probe.
        note: what became of labels that do not fit the model's output.
    """

    layers: Mapping[str, LayerAccumulator]
    unknown: Mapping[str, str]
    last: Piece | None
    note: str = ""


def measure(
    model: nn.Module, capture: Capture, run: ProbeRun, structure: Structure, team: Team | None = None
) -> Measured:
    """Run the probe and add up factors; of several processes, each those of its own examples.

    Where inputs alone are wanted, only the last examples, on which the scale is measured too, are differentiated: the size of
    output gradients, and the factors of layers that have no input factor (norms, recurrent layers, ties), come from these.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block.
        run: what to run.
        structure: how factors are formed.
        team: the processes that share the refresh, None for this one alone.

    Raises:
        ValueError: a layer's contribution on the probe is not finite or does not fit.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        return _measured(model, capture, run, structure)[0]
    own, digest = team.together(lambda: _measured(model, capture, run, structure, team))
    told = team.everyone((digest, dict(own.unknown), own.note))
    agreed("probe", [of for of, _, _ in told])
    unknown = {name: kind for _, of, _ in told for name, kind in of.items()}
    return Measured(layers=own.layers, unknown=unknown, last=None, note=next((note for _, _, note in told if note), ""))


def _measured(
    model: nn.Module, capture: Capture, run: ProbeRun, structure: Structure, team: Team | None = None
) -> tuple[Measured, str]:
    """What this process's examples of the probe show, and a hash of the whole probe where others have run the rest."""
    positions = Positions(public_generator(run.seed, run.step, "positions"), run.size, structure.rows_per_dim)
    shared = Shared()
    layers: dict[str, LayerAccumulator] = {}
    unknown: dict[str, str] = {}
    last, note = None, ""
    rows, seen = own_rows(team, run.size), [""]

    def drawn(inputs: Inputs, labels: Tensor | None) -> None:
        seen[0] = "" if team is None else probe_digest(inputs, labels)

    pieces = blocks_on_probe(
        model, capture, run, rows.start, stop=rows.stop, drawn=drawn,
        gradients_from=_scale_from(run) if structure.sides == "input" else 0,
    )  # fmt: skip
    for piece in pieces:
        positions.start(piece.rows, piece.mask)
        for name in piece.blocks:
            block = piece.blocks[name]
            if not is_known(block):
                unknown[name] = type(block).__name__
                continue
            if name not in layers:
                layers[name] = LayerAccumulator(block, structure, structure.kinds.get(name), positions, shared)
            _add_named(layers[name], name, block, piece)
            del block
        shared.forget()
        note, last = piece.note, kept_for_scale(piece, run)
        del piece  # or it stays in memory beside the next one
    return Measured(layers=layers, unknown=unknown, last=last, note=note), seen[0]


def gathered(
    layers: Mapping[str, LayerAccumulator], model: nn.Module, team: Team | None = None
) -> Mapping[str, LayerAccumulator]:
    """What all processes have seen of the layers that this one owns, on the model's device; every layer where it is alone."""
    if team is None:
        return layers
    own = {name: layer.apart() for name, layer in layers.items()}
    parts = handed_over(team, own, lambda layer: layer.cost(team.world_size))
    return team.together(lambda: added(moved_to(parts, device_of(model))))


def decomposed(
    layers: Mapping[str, LayerAccumulator],
    keep: Callable[[str, str], int | None],
    model: nn.Module,
    team: Team | None = None,
    *,
    past: Running,
    share: float,
    remember: bool = False,
) -> tuple[dict[str, LayerFactors], Running]:
    """The factors of every layer and what is kept of them; of several processes, each decomposes its own and sends them to all.

    Args:
        layers: what the probe has shown; of several processes, the layers that this one owns.
        keep: maps layer and side to the eigenpairs wanted of it where it is wide, and the trace of the rest; None for all.
        model: on whose device the factors are wanted.
        team: the processes that share the refresh.
        past: what is kept of earlier refreshes, of all layers.
        share: of the past that counts.
        remember: whether anything is kept for the next refresh.
    """

    def finished() -> dict[str, tuple[LayerFactors, Any]]:
        total = with_past(layers, past, share)
        made = {name: layer.result(partial(keep, name)) for name, layer in total.items()}
        kept = running_of(total, made) if remember else {}
        return {name: (made[name], kept.get(name)) for name in made}

    found = finished() if team is None else told_to_all(team, team.together(finished), device_of(model))
    running = {name: kept for name, (_, kept) in found.items() if kept is not None}
    return {name: factors for name, (factors, _) in found.items()}, running


def added(parts: Mapping[str, list[LayerAccumulator]]) -> dict[str, LayerAccumulator]:
    """Layer name to the sum of its parts."""
    shared, found = Shared(), {}
    for name, (first, *others) in parts.items():
        found[name] = first.apart(shared)
        for other in others:
            found[name].take_in(other)
    return found


def _add_named(layer: LayerAccumulator, name: str, block: Block, piece: Piece) -> None:
    if block.batch_size != piece.size:
        raise ValueError(f"layer '{name}': capture returned {block.batch_size} examples instead of {piece.size}")
    try:
        if piece.differentiated:
            layer.add(block)
        else:
            layer.add_inputs(block)
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from error


def probe_scale(
    model: nn.Module, capture: Capture, run: ProbeRun, metric: Metric, *, last: Piece | None, team: Team | None = None
) -> float:
    """Median ‖g‖ ÷ median ‖P g‖ over the last examples of the probe; 1 where a median is zero.

    They are those of the last micro-batch where it has enough of them; otherwise these few run through the model again, in
    parts where several processes share the refresh. That pass costs what it costs: to spare it, inputs and output gradients of
    all 64 would have to stay in memory until the factors are known, which is what small micro-batches are there to avoid.
    """
    first = _scale_from(run)
    if last is not None and last.rows.start <= first:
        norms = _norms([last], first, metric)
    elif team is None:
        norms = _norms(blocks_on_probe(model, capture, run, first), first, metric)
    else:
        rows = own_rows(team, run.size, first)
        pieces = blocks_on_probe(model, capture, run, rows.start, stop=rows.stop)
        own = team.together(lambda: _norms(pieces, rows.start, metric))
        found = team.everyone([x.cpu() for x in own])
        norms = [torch.cat(x) for x in zip(*found, strict=True)]
    if not norms[0].numel():
        return 1.0
    ratio = _median(norms[0]) / max(_median(norms[1]), 1e-300)
    return ratio if ratio > 0 and math.isfinite(ratio) else 1.0


def kept_for_scale(piece: Piece, run: ProbeRun) -> Piece | None:
    """The micro-batch where it holds all examples that the scale is measured on; others are not worth their memory."""
    return piece if piece.rows.start <= _scale_from(run) and piece.rows.stop == run.size else None


def _scale_from(run: ProbeRun) -> int:
    """The first of the examples that the scale is measured on."""
    return max(0, run.size - SCALE_SIZE)


def _norms(pieces: Iterable[Piece], first: int, metric: Metric) -> list[Tensor]:
    """Norms of the examples from `first` on, without the metric and with it."""
    plain: list[Tensor] = [torch.zeros(0)]
    mapped: list[Tensor] = [torch.zeros(0)]
    for piece in pieces:
        if not piece.blocks:
            continue  # every parameter is used outside of layers and keeps the identity
        count = piece.rows.stop - max(first, piece.rows.start)
        norms = probe_norms(piece.blocks, {}, metric, last=None if count == piece.size else count)
        plain.append(norms[0])
        mapped.append(norms[1])
        del piece
    return [torch.cat([x.to(found[-1]) for x in found]) for found in (plain, mapped)]


def _median(norms: Tensor) -> float:
    return float(torch.quantile(norms, 0.5))
