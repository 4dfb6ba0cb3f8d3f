"""Inputs of a model: one tensor, or a mapping of tensors whose first axis is the example.

A tensor is passed as `model(inputs)`, a mapping as `model(**inputs)`, as tokenised text is, and a
tuple or list as `model(*inputs)`. A model whose forward function has other arguments gets the
mapping, or the list, as one argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dpkfc.tensors import content_bytes

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Sample: TypeAlias = tuple[Inputs, Tensor | None]

# The decoder's own mask comes first: its positions match the logits'.
_MASKS = ("decoder_attention_mask", "attention_mask")


def tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every input, sorted by name; a lone tensor has the name ""."""
    if isinstance(inputs, Tensor):
        yield "", inputs
    else:
        yield from sorted(inputs.items())


def examples(inputs: Inputs) -> int:
    """Return the number of examples.

    Raises:
        ValueError: tensors that disagree about the number, or no tensor at all.
    """
    sizes = {name: len(x) if x.dim() else 0 for name, x in tensors(inputs)}
    if not sizes:
        raise ValueError(
            "inputs of a probe are an empty mapping; give for example input_ids and attention_mask"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "inputs of a probe must have the same number of examples along the first axis, "
            f"got {sizes}"
        )
    return next(iter(sizes.values()))


def map_inputs(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with a function of each tensor in its place."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(x) for name, x in inputs.items()}


def select(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Return the inputs of some examples."""
    return map_inputs(inputs, lambda x: x[rows])


def hash_tensor(digest: Any, name: str, x: Tensor) -> None:
    """Add name, dtype, shape and contents of a tensor to a hash of `hashlib`."""
    head = f"{name}{x.dtype}{tuple(x.shape)}"
    digest.update(head.encode())
    digest.update(content_bytes(x))


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def move_to_model(inputs: Inputs, model: nn.Module) -> Inputs:
    """Return inputs on the model's device, floating point ones in its dtype."""
    device = device_of_model(model)
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floating, torch.float32)

    def move(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.to(device, dtype)
        return x.to(device)

    return map_inputs(inputs, move)


def named_inputs(inputs: Any) -> Any:
    """Return several inputs by name: the items of a tuple or list by their numbers."""
    if isinstance(inputs, (tuple, list)):
        return {str(i): x for i, x in enumerate(inputs)}
    return inputs


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output on inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    names = list(inputs)
    values = list(inputs.values())
    if names == [str(i) for i in range(len(names))]:
        if _takes(model, positional=len(values)):
            return model(*values)
        return model(values)
    if _takes(model, names=names):
        return model(**inputs)
    return model(dict(inputs))


def _takes(model: nn.Module, *, names: Sequence[str] = (), positional: int = 0) -> bool:
    """Return whether the forward function has arguments of these names, or so many in order."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = [p.kind for p in parameters]
    ordered = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    ordered += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if positional:
        return inspect.Parameter.VAR_POSITIONAL in kinds or ordered >= positional
    if ordered != 1 or inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    known = {p.name for p in parameters}
    return set(names) <= known


def padding_mask(inputs: Inputs, padding: int | None) -> Tensor | None:
    """Return True `[N, T]` at the positions that are text, or None if the inputs do not say.

    Args:
        inputs: a mapping says so by its attention mask.
        padding: the id that fills bare token ids and occurs nowhere else, if there is one.
    """
    if isinstance(inputs, Tensor):
        if padding is None or inputs.dim() != 2 or inputs.is_floating_point():
            return None
        return torch.ne(inputs, padding)
    for name in _MASKS:
        if name in inputs:
            mask = inputs[name]
            return torch.ne(mask, 0) if mask.dim() == 2 else None
    return None
