"""Canaries: examples whose gradient is chosen, put among a user's own examples by a loss function.

A row that carries a canary keeps its place in the batch. What it counts is changed in two ways, of which it may have both:

    factor   its loss is multiplied by a number; 0 takes it out, NaN makes it a broken example
    plant    one module sees a chosen input a instead of its own, and the loss is ⟨u, output⟩ for a chosen u, so that the
             gradient is u aᵀ (and u for the bias) in that module and zero everywhere else

The loss stays one number an example, so the step that is audited is the step that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NOBODY", "Plant", "PlantedLoss", "on_examples", "plantable", "together"]

LossFn = Callable[[nn.Module, Any], Tensor]
NOBODY = -1  # the id of a row without a canary


@dataclass(frozen=True, eq=False)
class Plant:
    """Chosen gradients in one module.

    Attributes:
        layer: path of the module.
        ids: which canaries `[k]`.
        inputs: what the module sees for each of them `[k, ...]`.
        outputs: u for each of them, in the shape of an output `[k, ...]`.
    """

    layer: str
    ids: Tensor
    inputs: Tensor
    outputs: Tensor


class PlantedLoss:
    """The user's loss function with canaries in it; a batch is the user's own with the ids of canaries `[n]` behind it.

    Args:
        loss_fn: of the user: maps model and batch to one loss an example.
        factors: what the loss of every canary is multiplied by `[m]`.
        plants: chosen gradients; a canary is in at most one of them.
    """

    def __init__(self, loss_fn: LossFn, factors: Tensor, plants: Sequence[Plant] = ()) -> None:
        self._loss_fn, self._factors, self._plants = loss_fn, factors, tuple(plants)
        self._rows = [_row_of(plant.ids, len(factors)) for plant in plants]

    def __call__(self, model: nn.Module, batch: Sequence[Any]) -> Tensor:
        """One loss a row `[n]`."""
        *own, ids = batch
        found: dict[int, Tensor] = {}
        # No value of the batch is read: a pass whose values Python reads is not proved, and another one would be audited.
        rows = [torch.where(ids >= 0, row_of.to(ids.device)[ids.clamp(min=0)], NOBODY) for row_of in self._rows]
        with ExitStack() as hooks:
            for i, plant in enumerate(self._plants):
                hooks.enter_context(_planted(model.get_submodule(plant.layer), plant.inputs, rows[i], found, i))
            losses = self._loss_fn(model, tuple(own))
        for i, plant in enumerate(self._plants):
            directions = plant.outputs.to(found[i].device)[rows[i].clamp(min=0)]
            value = (found[i].to(directions.dtype) * directions).flatten(1).sum(1)
            losses = torch.where(rows[i] >= 0, value.to(losses.dtype), losses)
        factors = self._factors.to(losses)[ids.clamp(min=0)].where(ids >= 0, 1.0)
        return torch.where(factors == 0, torch.zeros_like(losses), losses * factors)


def _row_of(ids: Tensor, count: int) -> Tensor:
    rows = torch.full((max(1, count),), NOBODY)
    rows[ids] = torch.arange(len(ids))
    return rows


@contextmanager
def _planted(module: nn.Module, inputs: Tensor, rows: Tensor, found: dict[int, Tensor], key: int) -> Iterator[None]:
    """The chosen rows of the module's first argument replaced, and its output noted."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        there = (rows >= 0).view(-1, *[1] * (x.ndim - 1))
        return (torch.where(there, inputs.to(x)[rows.clamp(min=0)], x), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        found[key] = output

    # In front of the hooks of a tape, which then notes the input that the module sees.
    handles = [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def on_examples(augment: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """A user's augmentation for batches that carry ids."""
    if augment is None:
        return None

    def both(batch: Sequence[Any]) -> tuple[Any, ...]:
        *own, ids = batch
        return (*augment(tuple(own)), ids)

    return both


def together(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    """A user's `collate_fn` for examples that carry ids."""
    if collate_fn is None:
        return None

    def both(examples: list[Any]) -> tuple[Any, ...]:
        return (*collate_fn([example[:-1] for example in examples]), torch.stack([example[-1] for example in examples]))

    return both


@torch.no_grad()
def plantable(model: nn.Module, loss_fn: LossFn, batch: tuple[Any, ...]) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Modules with trainable parameters of their own in which gradients can be planted, with the shapes of one input and output.

    A module is left out that is called more or less than once, or with anything but one tensor of floating point numbers
    with the batch in front.

    Args:
        model: of the user.
        loss_fn: of the user.
        batch: the user's own batch of at least two examples.
    """
    seen: dict[str, list[tuple[torch.Size, torch.Size] | None]] = {}
    count = len(batch[-1])

    def note(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            fits = len(args) == 1 and all(
                isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x) == count for x in (args[0], output)
            )
            seen.setdefault(name, []).append((args[0].shape[1:], output.shape[1:]) if fits else None)

        return after

    handles = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False)) and not list(module.children())
    ]
    try:
        loss_fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1 and calls[0] is not None}
