"""What a probe hands to a model: one tensor, or a mapping of tensors whose first axis is the example.

A tensor is passed as `model(inputs)`, a mapping as `model(**inputs)`, as tokenised text is, and a tuple or list as
`model(*inputs)`. A model whose forward function has other arguments gets the mapping, or the list, as one argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "Sample", "call", "device_of", "examples", "named_inputs", "padding_mask", "placed", "select", "tensors"]

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Sample: TypeAlias = tuple[Inputs, Tensor | None]

# A decoder's own mask comes first: its positions are those of the logits.
_MASKS = ("decoder_attention_mask", "attention_mask")


def tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every input, in the order of the names; a lone tensor has the name ""."""
    if isinstance(inputs, Tensor):
        yield "", inputs
    else:
        yield from sorted(inputs.items())


def examples(inputs: Inputs) -> int:
    """Number of examples.

    Raises:
        ValueError: tensors that disagree about it, or none at all.
    """
    sizes = {name: x.shape[0] if x.dim() else 0 for name, x in tensors(inputs)}
    if not sizes:
        raise ValueError("inputs of a probe are an empty mapping; give for example input_ids and attention_mask")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"inputs of a probe must have the same number of examples along the first axis, got {sizes}")
    return next(iter(sizes.values()))


def select(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """The inputs of some examples."""
    if isinstance(inputs, Tensor):
        return inputs[rows]
    return {name: x[rows] for name, x in inputs.items()}


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def placed(inputs: Inputs, model: nn.Module) -> Inputs:
    """Inputs on the model's device, floating point ones in its dtype."""
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(inputs, Tensor):
        return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()}


def named_inputs(inputs: Any) -> Any:
    """Return several inputs by name: those of a tuple or list by their numbers."""
    if isinstance(inputs, (tuple, list)):
        return {str(i): x for i, x in enumerate(inputs)}
    return inputs


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output on inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if list(inputs) == [str(i) for i in range(len(inputs))]:
        values = list(inputs.values())
        return model(*values) if _takes(model, positional=len(values)) else model(values)
    return model(**inputs) if _takes(model, names=list(inputs)) else model(dict(inputs))


def _takes(model: nn.Module, *, names: Sequence[str] = (), positional: int = 0) -> bool:
    """Return whether the forward function of a model has arguments of these names, or so many in their order."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = {p.kind for p in parameters}
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional:
        return inspect.Parameter.VAR_POSITIONAL in kinds or len(ordered) >= positional
    known = {p.name for p in parameters}
    single = len(ordered) == 1 and inspect.Parameter.VAR_KEYWORD not in kinds
    return not single or set(names) <= known


def padding_mask(inputs: Inputs, padding: int | None = None) -> Tensor | None:
    """True `[N, T]` at the positions that are text, or None where the inputs do not say.

    Args:
        inputs: a mapping says so by its attention mask.
        padding: the id that fills bare token ids and stands nowhere else, if there is one.
    """
    if isinstance(inputs, Tensor):
        ids = padding is not None and inputs.dim() == 2 and not inputs.is_floating_point()
        return torch.ne(inputs, padding or 0) if ids else None
    held = next((inputs[name] for name in _MASKS if name in inputs), None)
    return torch.ne(held, 0) if held is not None and held.dim() == 2 else None
