"""Diagnose what the library does with each layer of a model, on a probe, before ε is spent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from rich.table import Table
from torch import nn

from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.likelihood import logits_of
from dpkfc.curvature.model_inputs import call, move_to_model
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.curvature.report import factor_letter
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.one_pass import batch_tracker
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock
from dpkfc.linalg.norm_methods import choose_norm_method
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import Unknown

_EXAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer.

    Attributes:
        name: path in the model.
        module: class of the module.
        rule: of its per-example gradients; "followed" if a module reads its parameters itself.
        parameters: trainable numbers.
        method: how per-example norms are computed.
        sides: the rows of its factors in the report of the preconditioner.
        tied: other uses of the same parameters.
        frozen: parameters of the module that are not trained.
    """

    name: str
    module: str
    rule: str
    parameters: int
    method: str
    sides: tuple[Mapping[str, Any], ...] = ()
    tied: int = 0
    frozen: tuple[str, ...] = ()


@runtime_checkable
class Adapter(Protocol):
    """A module of peft that adds matrices of low rank to a weight: a rank for each adapter."""

    r: Mapping[str, int]


@runtime_checkable
class ParameterAdapter(Adapter, Protocol):
    """An adapter of a parameter that is not a layer, such as the weights of all experts."""

    parameter_name: str
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """The same parameters of all blocks of a model, trained or frozen.

    Attributes:
        name: path in the model, with * for the number of a block.
        state: "trained", "frozen", or the rank of an adapter.
        tensors: number of parameters.
        numbers: their numbers.
    """

    name: str
    state: str
    tensors: int
    numbers: int


def list_parts(model: nn.Module) -> tuple[Part, ...]:
    """Return what trains and what does not, in the order of the model.

    Adapters choose weights by name. The fused weights of experts have names of their own, so that
    one list of names adapts them, adapts them with another rank, or leaves them out.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for name, p in model.named_parameters():
        state = "trained" if p.requires_grad else "frozen"
        base, is_adapter, rest = name.partition(".lora_")
        owner = model.get_submodule(base) if is_adapter else None
        part = name
        if isinstance(owner, Adapter) and p.requires_grad:
            part = base
            state = f"adapter of rank {owner.r[rest.split('.')[1]]}"
            if isinstance(owner, ParameterAdapter):
                state += f" for each of {owner.num_experts} experts"
                part += f".{owner.parameter_name}"
        part = part.removeprefix("base_model.model.").replace(".base_layer", "")
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", part)
        count = counts.setdefault((pattern, state), [0, 0])
        count[0] += 1
        count[1] += p.numel()
    return tuple(
        Part(name=name, state=state, tensors=tensors, numbers=numbers)
        for (name, state), (tensors, numbers) in counts.items()
    )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a model.

    Attributes:
        parts: what trains and what does not.
        layers: one a covered layer.
        frozen: modules without trained parameters, to their number of parameters.
        trainable: number of trained parameters.
        problem: why the model cannot be trained privately, "" if it can.
        unproved: the operation that hides the batch axis, and why; "" if the axis is proved for
            whole micro-batches.
    """

    parts: tuple[Part, ...]
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
    frozen, parts = _count_frozen(model), list_parts(model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        layers = find_layers(model)
    except ValueError as error:
        return Diagnosis(
            parts=parts, layers=(), frozen=frozen, trainable=trainable, problem=str(error)
        )
    built = _build(model, layers, kfac)
    inputs, _ = kfac.probe.sample(_EXAMPLES, public_generator(kfac.seed, 0))
    with preserve_model(model):
        blocks, used, failure = _capture_blocks(model, layers, move_to_model(inputs, model))
    unproved = "" if failure is None else f"{failure.operation}: {failure.reason}"
    facts = tuple(_layer_facts(layer, blocks.get(layer.name), used, built) for layer in layers)
    return Diagnosis(
        parts=parts, layers=facts, frozen=frozen, trainable=trainable, unproved=unproved
    )


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
) -> tuple[dict[str, AnyBlock], set[str], Unknown | None]:
    """Return the per-example gradients of each layer as blocks, for inputs `[_EXAMPLES, ...]`.

    Returns:
        The blocks, the layers that the losses depend on, and what hides the batch axis, None if
        the axis is proved.
    """
    tracker = batch_tracker(model, inputs, _EXAMPLES)
    tape = Tape(model, layers, tracker=tracker, lenient=True)
    with torch.enable_grad(), tape, follow(tracker):
        # A smooth number an example, whose gradient has the shapes of any other.
        losses = logits_of(call(model, inputs)).flatten(1).float().logsumexp(1)
    failure = tape.failure(losses)
    used = set()
    for layer in layers:
        own = [layer.tensor(role) for role in layer.parameters]
        found = torch.autograd.grad(losses.sum(), own, retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in found):
            used.add(layer.name)
    calls = tape.backward(losses)
    blocks = {}
    for layer in layers:
        if layer.name in calls:
            blocks[layer.name] = blocks_of(layer, calls[layer.name], _EXAMPLES)
    return blocks, used, failure


def _layer_facts(
    layer: Layer, block: AnyBlock | None, used: set[str], built: PreconditionerState
) -> LayerFacts:
    method = "none: not reached by the probe"
    if block is not None:
        method = choose_norm_method(block)
    elif layer.name in used:
        method = "one example at a time: another module reads its parameters"
    return LayerFacts(
        name=layer.display_name,
        module=type(layer.module).__name__,
        rule=layer.rule if layer.is_hooked else "followed",
        parameters=sum(layer.tensor(role).numel() for role in layer.parameters),
        method=method,
        sides=tuple(row for row in built.report if row["layer"] == layer.name),
        tied=len(layer.modules) - 1,
        frozen=layer.frozen,
    )


def part_table(diagnosis: Diagnosis) -> Table:
    """Return what trains and what does not as a table: names, counts and shares."""
    table = Table(title="what trains", title_justify="left", header_style="bold")
    table.add_column("part", overflow="fold")
    table.add_column("state")
    for name in ("tensors", "numbers", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    total = sum(part.numbers for part in diagnosis.parts)
    for part in diagnosis.parts:
        share = f"{part.numbers / total:.1%}"
        table.add_row(part.name, part.state, f"{part.tensors:,}", f"{part.numbers:,}", share)
    return table


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
            sides.append(f"{factor_letter(side['side'])} {side['dim']:,} {side['kind']}")
            before = _condition(side["condition_before"])
            after = _condition(side["condition_after"])
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
    for side in layer.sides:
        if side["note"]:
            notes.append(f"{factor_letter(side['side'])}: {side['note']}")
    return notes


def _condition(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"
