"""One refresh: the probe through the model once, and the one number that gives the metric its scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.factors import FactorAccumulator, Shared
from dpkfc.curvature.layer_factors import LayerAccumulator, LayerFactors, Positions, Structure, is_known, probe_norms
from dpkfc.curvature.probe_pass import (
    Capture,
    Piece,
    ProbeRun,
    Team,
    agreed,
    blocks_on_probe,
    handed_over,
    moved_to,
    own_rows,
    probe_digest,
    public_generator,
    told_to_all,
)
from dpkfc.curvature.probes import Inputs, device_of
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric

# --------------------------------------------------------------------------------------------------
# What refreshes keep for the next one: sums of factors that decay, where the eigenvectors pointed,
# and how far they moved.
#
# With share β of the past, rows x of refresh t and n_t examples in it, the factor of a side is
#
#     S_t / N_t,     S_t = β S_{t−1} + Σ x xᵀ,     N_t = β N_{t−1} + n_t,
#
# a mean of the refreshes' factors with weights β^(age) that needs no correction at the start.
# Probes can then be small: about 1/(1 − β) of them stand behind every factor. Everything kept here
# is a function of probes and released parameters.
#
# Source: the running average is that of Martens and Grosse (2015), section 5, in the weights of
# Adam's corrected means.

Running = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""
_KEY = "running"


def with_past(layers: Mapping[str, LayerAccumulator], past: Running, share: float) -> dict[str, LayerAccumulator]:
    """What the probe has just shown on top of what is kept, of which `share` counts; layers without a past as they are."""
    return {name: layer.after(past[name], share) if name in past else layer for name, layer in layers.items()}


def running_of(layers: Mapping[str, LayerAccumulator], factors: Mapping[str, LayerFactors]) -> Running:
    """What is kept of a refresh: its sums, and the eigenvectors that the next decomposition of a wide side begins with."""
    kept: dict[str, dict[str, FactorAccumulator]] = {}
    for name, layer in layers.items():
        kept[name] = {side: sums.apart() for side, sums in layer.sides.items()}
        for side, sums in kept[name].items():
            sums.remember(factors[name].sides[side])
    return kept


def drift_of(layers: Mapping[str, LayerAccumulator], past: Running, team: Team | None = None) -> float:
    """How far the factors of a probe lie from those that are kept.

    Args:
        layers: what the probe shows; of several processes, the layers that this one owns.
        past: what is kept of all layers.
        team: the processes, None for this one alone.

    Returns:
        The mean over all sides of ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius), A kept and B new; infinite where a layer is new.
        Two probes of n examples each at the same parameters differ by their sampling noise, about √(1/n) times a number that
        grows with the effective rank.
    """

    def distances() -> list[float]:
        return [
            past[name][side].distance(sums) if name in past else float("inf")
            for name, layer in layers.items()
            for side, sums in layer.sides.items()
        ]

    parts = [distances()] if team is None else team.all_gather(team.run_on_all(distances))
    found = [distance for part in parts for distance in part]
    return sum(found) / len(found) if found else 0.0


def running_state(running: Sequence[Running]) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Tensors under names of their own and JSON-able values, for the state of a preconditioner; one entry a probe."""
    tensors: dict[str, Tensor] = {}
    values: list[list[Any]] = []
    for probe, layers in enumerate(running):
        for name, sides in layers.items():
            for side, sums in sides.items():
                held, more = sums.state()
                tensors |= {f"{_KEY}.{len(values)}.{what}": x for what, x in held.items()}
                values.append([probe, name, side, sorted(held), more])
    return tensors, values


def running_from(tensors: Mapping[str, Tensor], values: Sequence[Sequence[Any]]) -> tuple[Running, ...]:
    """What `running_state` was taken of.

    Raises:
        ValueError: a tensor is missing.
    """
    found: dict[int, dict[str, dict[str, FactorAccumulator]]] = {}
    for i, (probe, name, side, held, more) in enumerate(values):
        try:
            own = {what: tensors[f"{_KEY}.{i}.{what}"] for what in held}
        except KeyError as error:
            raise ValueError(f"not the state of a preconditioner, or a damaged one: {error!r}") from error
        found.setdefault(probe, {}).setdefault(name, {})[side] = FactorAccumulator.from_state(own, more)
    return tuple(found.values())


# --------------------------------------------------------------------------------------------------

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
    own, digest = team.run_on_all(lambda: _measured(model, capture, run, structure, team))
    told = team.all_gather((digest, dict(own.unknown), own.note))
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
    return team.run_on_all(lambda: added(moved_to(parts, device_of(model))))


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

    found = finished() if team is None else told_to_all(team, team.run_on_all(finished), device_of(model))
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
        own = team.run_on_all(lambda: _norms(pieces, rows.start, metric))
        found = team.all_gather([x.cpu() for x in own])
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
