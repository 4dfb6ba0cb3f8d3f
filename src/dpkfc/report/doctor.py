"""Diagnose what the library does with each layer of a model, before any budget is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.probe_pass import preserve_model
from dpkfc.curvature.probes import call
from dpkfc.gradients.clipped_sum import batch_tracker, capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock
from dpkfc.linalg.norms import Choice, choice_for
from dpkfc.report.costs import probe_inputs, smooth_loss

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
        why: reason for that method.
        sides: its factors.
        tied: other uses of the same parameters.
        frozen: parameters of the module that are not trained.
    """

    name: str
    module: str
    rule: str
    parameters: int
    method: str
    why: str
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
    frozen = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(p.requires_grad for p in parameters):
            frozen[name or "(root)"] = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        layers = find_layers(model)
    except ValueError as error:
        return Diagnosis(layers=(), frozen=frozen, trainable=trainable, problem=str(error))
    rules = {layer.name: layer.rule for layer in layers}
    built = kfac.build(model, lambda m, loss: capture(m, layers, loss), 0, rules=rules)
    blocks, unproved = _capture_blocks(model, layers, kfac)
    facts = tuple(_layer_facts(layer, blocks.get(layer.name), built) for layer in layers)
    return Diagnosis(layers=facts, frozen=frozen, trainable=trainable, unproved=unproved)


def _capture_blocks(
    model: nn.Module, layers: Sequence[Layer], kfac: KFAC
) -> tuple[dict[str, AnyBlock], str]:
    """Return each layer's contribution on a few probe examples, and what hides the batch axis."""
    inputs = probe_inputs(model, kfac, _EXAMPLES)
    with preserve_model(model):
        tracker = batch_tracker(model, inputs, _EXAMPLES)
        tape = Tape(model, layers, _EXAMPLES, tracker=tracker, lenient=True)
        with torch.enable_grad(), tape, tracker.following():
            losses = smooth_loss(call(model, inputs))
        failure = tape.failure(losses)
        calls = tape.backward(losses)
        blocks = {}
        for layer in layers:
            if layer.name in calls:
                blocks[layer.name] = blocks_of(layer, calls[layer.name], _EXAMPLES)
    return blocks, "" if failure is None else f"{failure.operation}: {failure.reason}"


def _layer_facts(layer: Layer, block: AnyBlock | None, built: PreconditionerState) -> LayerFacts:
    choice = Choice("none", only="not reached by the probe")
    if block is not None:
        choice = choice_for(block, built.metric.get(layer.name))
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
        method=choice.method,
        why=choice.reason,
        sides=tuple(sides),
        tied=len(layer.modules) - 1,
        frozen=layer.frozen,
    )


_CAPTION = (
    "size: trainable parameters; norms: the method its widths choose, multiplications an example "
    "(else: the other's)"
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
        sides, conditions = [], []
        for side in layer.sides:
            sides.append(f"{side.side} {side.size:,} {side.kind}")
            before, after = _condition(side.condition_before), _condition(side.condition_after)
            conditions.append(f"{before} → {after}")
        add(
            f"{layer.name}\n[dim]{layer.module}: {layer.rule}[/dim]",
            f"{layer.parameters:,}",
            f"{layer.method}\n[dim]{layer.why}[/dim]",
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
