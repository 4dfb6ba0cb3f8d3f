"""Diagnose what the library does with each layer of a model, on a probe, before ε is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.likelihood import logits_of
from dpkfc.curvature.model_inputs import call, move_to_model
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.gradients.clipped_sum import batch_tracker, capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock
from dpkfc.linalg.norm_methods import choose_norm_method
from dpkfc.tracking.states import Unknown

_EXAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """One factor of a layer.

    Attributes:
        side: A, G, or the role of a parameter that is whitened entry by entry.
        size: dimension.
        kind: dense, lowrank, diagonal or identity.
        condition_before: condition number on the probe.
        condition_after: condition number after damping.
        note: for example that the factor was too large.
    """

    side: str
    size: int
    kind: str
    condition_before: float
    condition_after: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer.

    Attributes:
        name: path in the model.
        module: class of the module.
        rule: of its per-example gradients; "followed" if a module reads its parameters itself.
        parameters: trainable numbers.
        method: how per-example norms are computed.
        sides: its factors.
        tied: other uses of the same parameters.
        frozen: parameters of the module that are not trained.
    """

    name: str
    module: str
    rule: str
    parameters: int
    method: str
    sides: tuple[SideFacts, ...] = ()
    tied: int = 0
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a model.

    Attributes:
        layers: one a covered layer.
        frozen: modules without trained parameters, to their number of parameters.
        trainable: number of trained parameters.
        problem: why the model cannot be trained privately, "" if it can.
        unproved: the operation that hides the batch axis, and why; "" if the axis is proved for
            whole micro-batches.
    """

    layers: tuple[LayerFacts, ...]
    frozen: Mapping[str, int]
    trainable: int
    problem: str = ""
    unproved: str = ""


def diagnose(model: nn.Module, kfac: KFAC) -> Diagnosis:
    """Diagnose every layer of a model on a few probe examples, without changing the model.

    Args:
        model: any module.
        kfac: whose probe and factors to use.

    Raises:
        ValueError: the model cannot read the probe's inputs.
    """
    frozen = _count_frozen(model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        layers = find_layers(model)
    except ValueError as error:
        return Diagnosis(layers=(), frozen=frozen, trainable=trainable, problem=str(error))
    built = _build(model, layers, kfac)
    inputs, _ = kfac.probe.sample(_EXAMPLES, public_generator(kfac.seed, 0))
    with preserve_model(model):
        blocks, failure = _capture_blocks(model, layers, move_to_model(inputs, model))
    unproved = "" if failure is None else f"{failure.operation}: {failure.reason}"
    facts = tuple(_layer_facts(layer, blocks.get(layer.name), built) for layer in layers)
    return Diagnosis(layers=facts, frozen=frozen, trainable=trainable, unproved=unproved)


def _count_frozen(model: nn.Module) -> dict[str, int]:
    """Return the modules without trained parameters, with their number of parameters."""
    frozen = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(p.requires_grad for p in parameters):
            frozen[name or "(root)"] = sum(p.numel() for p in parameters)
    return frozen


def _build(model: nn.Module, layers: Sequence[Layer], kfac: KFAC) -> PreconditionerState:
    """Return the preconditioner of a model at its present parameters."""
    rules = {layer.name: layer.rule for layer in layers}
    return kfac.build(model, lambda m, loss: capture(m, layers, loss), 0, rules=rules)


def _capture_blocks(
    model: nn.Module, layers: Sequence[Layer], inputs: Any
) -> tuple[dict[str, AnyBlock], Unknown | None]:
    """Return the per-example gradients of each layer as blocks, for inputs `[_EXAMPLES, ...]`.

    Returns:
        The blocks, and what hides the batch axis, None if the axis is proved.
    """
    tracker = batch_tracker(model, inputs, _EXAMPLES)
    tape = Tape(model, layers, _EXAMPLES, tracker=tracker, lenient=True)
    with torch.enable_grad(), tape, tracker.following():
        # A smooth number an example, whose gradient has the shapes of any other.
        losses = logits_of(call(model, inputs)).flatten(1).float().logsumexp(1)
    failure = tape.failure(losses)
    calls = tape.backward(losses)
    blocks = {}
    for layer in layers:
        if layer.name in calls:
            blocks[layer.name] = blocks_of(layer, calls[layer.name], _EXAMPLES)
    return blocks, failure


def _layer_facts(layer: Layer, block: AnyBlock | None, built: PreconditionerState) -> LayerFacts:
    method = "none: not reached by the probe"
    if block is not None:
        method = choose_norm_method(block)
    sides = []
    for row in built.report:
        if row["layer"] == layer.name:
            side = SideFacts(
                side={"input": "A", "output": "G"}.get(row["side"], row["side"]),
                size=row["dim"],
                kind=row["kind"],
                condition_before=row["condition_before"],
                condition_after=row["condition_after"],
                note=row["note"],
            )
            sides.append(side)
    return LayerFacts(
        name=layer.display_name,
        module=type(layer.module).__name__,
        rule=layer.rule if layer.is_hooked else "followed",
        parameters=sum(layer.tensor(role).numel() for role in layer.parameters),
        method=method,
        sides=tuple(sides),
        tied=len(layer.modules) - 1,
        frozen=layer.frozen,
    )


_CAPTION = (
    "size: trainable parameters; norms: how the length of each example's gradient is computed, the"
    " cheapest way for a layer of this size"
)


def layer_table(diagnosis: Diagnosis, title: str) -> Table:
    """Return the diagnosis as a table, with a column of notes if there are notes."""
    has_notes = bool(diagnosis.frozen) or any(_notes(layer) for layer in diagnosis.layers)
    caption = _CAPTION
    if diagnosis.unproved:
        caption += (
            f"\n{diagnosis.unproved}. Examples are differentiated one at a time: "
            "a micro-batch of n takes n passes"
        )
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        show_lines=True,
        caption=caption,
        caption_justify="left",
    )
    table.add_column("layer", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("norms", min_width=12)
    table.add_column("factor", no_wrap=True)
    table.add_column("condition", no_wrap=True)
    if has_notes:
        table.add_column("notes", min_width=10)

    def add(*cells: str) -> None:
        table.add_row(*cells[: len(table.columns)])

    for layer in diagnosis.layers:
        sides = []
        conditions = []
        for side in layer.sides:
            sides.append(f"{side.side} {side.size:,} {side.kind}")
            before = _condition(side.condition_before)
            after = _condition(side.condition_after)
            conditions.append(f"{before} → {after}")
        add(
            f"{layer.name}\n[dim]{layer.module}: {layer.rule}[/dim]",
            f"{layer.parameters:,}",
            layer.method,
            "\n".join(sides) or "–",
            "\n".join(conditions) or "–",
            "\n".join(_notes(layer)),
        )
    for name, count in diagnosis.frozen.items():
        add(name, f"{count:,}", "frozen", "–", "–", "not trained, costs nothing")
    return table


def _notes(layer: LayerFacts) -> list[str]:
    notes = []
    if layer.tied:
        notes.append(f"tied: {layer.tied + 1} uses, one norm of their sum")
    if layer.frozen:
        notes.append(f"frozen: {', '.join(layer.frozen)}")
    if layer.rule == "fallback":
        notes.append("no rule of its own: by torch.func, slower")
    return notes + [f"{side.side}: {side.note}" for side in layer.sides if side.note]


def _condition(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"
