"""What the library would do with each layer of a model, before any budget is spent."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from dpkfc.curvature.kfac import KFAC, Preconditioner
from dpkfc.curvature.probe_loss import logits_of
from dpkfc.curvature.probe_pass import public_generator, undisturbed
from dpkfc.curvature.probes import call, placed
from dpkfc.gradients.clipped_sum import batch_tracker, capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock, Lookup, MaterializedGradients, PerExample
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.norms import choice_for

__all__ = ["Diagnosis", "LayerFacts", "SideFacts", "examine", "layer_table"]

_EXAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """One factor of a layer.

    Attributes:
        side: A, G, or the role of a parameter that is whitened entry by entry.
        size: its dimension.
        kind: dense, lowrank, diagonal or identity.
        condition_before: condition number on the probe.
        condition_after: the same after damping.
        note: what needs saying, for example that it was too large.
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
        rule: how its per-example gradients are obtained; "followed" where a module reads its parameters itself.
        parameters: trainable numbers.
        method: how per-example norms are computed.
        why: why that method.
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
    """What was found.

    Attributes:
        layers: one a covered layer.
        frozen: modules of which nothing is trained, to their number of parameters.
        trainable: numbers that train.
        problem: why the model cannot be trained privately; empty where it can.
        unproved: the operation that hides the batch axis, and why; empty where whole micro-batches are proved.
    """

    layers: tuple[LayerFacts, ...]
    frozen: Mapping[str, int]
    trainable: int
    problem: str = ""
    unproved: str = ""


def examine(model: nn.Module, kfac: KFAC) -> Diagnosis:
    """Look at every layer of a model on a few probe examples; the model is left as it is.

    Args:
        model: any module.
        kfac: whose probe and factors to use.

    Raises:
        ValueError: the model cannot read the probe's inputs.
    """
    frozen = {
        name or "(root)": sum(p.numel() for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not any(p.requires_grad for p in own)
    }
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        layers = find_layers(model)
    except ValueError as error:
        return Diagnosis(layers=(), frozen=frozen, trainable=trainable, problem=str(error))
    rules = {layer.name: layer.rule for layer in layers}
    built = kfac.build(model, functools.partial(_capture, layers), 0, rules=rules)
    blocks, unproved = _blocks(model, layers, kfac)
    facts = tuple(_layer_facts(layer, blocks.get(layer.name), built) for layer in layers)
    return Diagnosis(layers=facts, frozen=frozen, trainable=trainable, unproved=unproved)


def _capture(layers: Sequence[Layer], model: nn.Module, loss: Any) -> Any:
    return capture(model, layers, loss)


def _blocks(model: nn.Module, layers: Sequence[Layer], kfac: KFAC) -> tuple[dict[str, AnyBlock], str]:
    """Return each layer's contribution as the norm engine sees it, on a few probe examples, and what hides the batch axis."""
    inputs = placed(kfac.probe.sample(_EXAMPLES, public_generator(kfac.seed, 0))[0], model)
    with undisturbed(model):
        tracker = batch_tracker(model, inputs, _EXAMPLES)
        tape = Tape(model, layers, _EXAMPLES, tracker=tracker, lenient=True)
        with torch.enable_grad(), tape, tracker.following():
            losses = _any_loss(logits_of(call(model, inputs)))
        failure = tape.failure(losses)
        calls = tape.backward(losses)
        found = {layer.name: blocks_of(layer, calls[layer.name], _EXAMPLES) for layer in layers if layer.name in calls}
        return found, "" if failure is None else f"{failure.operation}: {failure.reason}"


def _any_loss(output: Tensor) -> Tensor:
    """A smooth number an example: enough to see the shapes that flow back."""
    return output.flatten(1).float().logsumexp(1)


def _layer_facts(layer: Layer, block: AnyBlock | None, built: Preconditioner) -> LayerFacts:
    choice = _choice(block, built.metric.get(layer.name))
    rows = [row for row in built.report if row["layer"] == layer.name]
    sides = tuple(
        SideFacts(
            side={"input": "A", "output": "G"}.get(row["side"], row["side"]),
            size=row["dim"],
            kind=row["kind"],
            condition_before=row["condition_before"],
            condition_after=row["condition_after"],
            note=row["note"],
        )
        for row in rows
    )
    return LayerFacts(
        name=layer.display_name,
        module=type(layer.module).__name__,
        rule=layer.rule if layer.is_hooked else "followed",
        parameters=sum(layer.tensor(role).numel() for role in layer.parameters),
        method=choice[0],
        why=choice[1],
        sides=sides,
        tied=len(layer.modules) - 1,
        frozen=layer.frozen,
    )


def _choice(block: AnyBlock | None, entry: Any) -> tuple[str, str]:
    match block:
        case None:
            return "none", "not reached by the probe"
        case PerExample():
            return "materialised", "small or irregular"
        case Lookup():
            return "lookup", "of rows that were read"
        case MaterializedGradients():
            return "materialised", "used outside its layer too"

    metric = entry if isinstance(entry, Kronecker) else Kronecker()
    choice = choice_for(block, metric)
    return choice.method, choice.reason


_CAPTION = "size: trainable parameters; norms: the method its widths choose, multiplications an example (else: the other's)"


def layer_table(diagnosis: Diagnosis, title: str) -> Table:
    """The diagnosis for people."""
    noted = bool(diagnosis.frozen) or any(_notes(layer) for layer in diagnosis.layers)
    caption = _CAPTION
    if diagnosis.unproved:
        caption += f"\n{diagnosis.unproved}. Examples are differentiated one at a time: a micro-batch of n takes n passes"
    table = Table(
        title=title, title_justify="left", header_style="bold", show_lines=True, caption=caption,
        caption_justify="left",
    )  # fmt: skip
    table.add_column("layer", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("norms", min_width=12)
    table.add_column("factor", no_wrap=True)
    table.add_column("condition", no_wrap=True)
    if noted:
        table.add_column("notes", min_width=10)

    def add(*cells: str) -> None:
        table.add_row(*cells[: 6 if noted else 5])

    for layer in diagnosis.layers:
        sides = [f"{s.side} {s.size:,} {s.kind}" for s in layer.sides]
        conditions = [f"{_condition(s.condition_before)} → {_condition(s.condition_after)}" for s in layer.sides]
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
    notes = [f"tied: {layer.tied + 1} uses, one norm of their sum"] if layer.tied else []
    notes += [f"frozen: {', '.join(layer.frozen)}"] if layer.frozen else []
    notes += ["no rule of its own: by torch.func, slower"] if layer.rule == "fallback" else []
    return notes + [f"{side.side}: {side.note}" for side in layer.sides if side.note]


def _condition(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"
