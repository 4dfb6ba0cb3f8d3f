"""Layers whose weight is computed from parameters, by any `torch` parametrization.

Weight standardisation and weight norm are examples. The effective weight W = f(θ) depends on no
example, so the layer is an ordinary linear layer or convolution in W. The gradient of example n
is `g_n(θ) = Jᵀ g_n(W)` with J = ∂f/∂θ. The rows of a group are added before that product, which
is vectorised over examples. Curvature treats the result as an elementwise layer: whitening in W
is not whitening in θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode

from dpkfc.gradients.fallback import map_examples
from dpkfc.linalg.blocks import ConvBlock, Outer, PerExample, chunks
from dpkfc.rng_state import all_states, has_drawn
from dpkfc.tensors import Tensors

REGISTERING = {"ParamWrapper"}
"""Classes whose forward function registers a parametrization anew in every pass.

`ParamWrapper` is peft's adapter of experts that share one parameter.
"""
_PULLED_ELEMENTS = 1 << 23  # gradients pulled back at once
_TENSORS = ("weight", "bias")


@dataclass(frozen=True)
class Pull:
    """Maps gradients with respect to an effective tensor to gradients of what it is computed from.

    Attributes:
        shape: of the effective tensor.
        apply: `[n, *shape]` to role and `[n, *parameter.shape]`.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor], Tensors]


@dataclass(frozen=True)
class ParametrizedBlock:
    """The gradients of one layer before they are pulled back.

    Attributes:
        parts: blocks in the effective tensors, each with the pull of `weight` and `bias` where they
            train. There is one part, or several where the gradients were taken at several values of
            the parameters. Their gradients are added.
    """

    parts: tuple[tuple[Outer | ConvBlock, Mapping[str, Pull]], ...]

    @property
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return self.parts[0][0].batch_size

    def merge_rows(self, count: int, size: int) -> PerExample:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        parts = [(block.merge_rows(count, size), pulls) for block, pulls in self.parts]
        return ParametrizedBlock(tuple(parts)).per_example()

    def per_example(self) -> PerExample:
        """Return materialised gradients, formed and pulled back a few examples at a time."""
        n = self.batch_size
        gradients: Tensors = {}
        for block, pulls in self.parts:
            sizes = [math.prod(pull.shape) for pull in pulls.values()]
            for rows in chunks(n, sum(sizes), _PULLED_ELEMENTS):
                pulled = _pull_back(block.select(rows), pulls)
                for role, g in pulled.items():
                    if role not in gradients:
                        gradients[role] = g.new_zeros(n, *g.shape[1:])
                    gradients[role][rows] += g
        return PerExample(gradients)


def _pull_back(block: Outer | ConvBlock, pulls: Mapping[str, Pull]) -> Tensors:
    # `[n * groups, d_out, d_in]`, the bias in the last column.
    matrices = block.per_example()
    columns = {"weight": matrices, "bias": matrices[..., -1]}
    if len(pulls) == 2:
        columns["weight"] = matrices[..., :-1]
    gradients: Tensors = {}
    for name, pull in pulls.items():
        rows = columns[name].reshape(block.batch_size, *pull.shape)
        gradients.update(pull.apply(rows))
    return gradients


def has_computed_weight(module: nn.Module, roles: list[str]) -> bool:
    """Return whether all trainable parameters of a module make up its weight or bias.

    They do so through torch parametrizations or directly.

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    if not is_parametrized(module):
        return False
    prefixes = tuple(f"parametrizations.{name}." for name in _TENSORS)
    others = [role for role in roles if not role.startswith(prefixes)]
    return set(others) <= set(_TENSORS)


def pulls_of(module: nn.Module, roles: list[str]) -> dict[str, Pull]:
    """Return the pulls of a layer's weight and bias at the present values of its parameters.

    The values are copied.

    Args:
        module: for which `has_computed_weight` holds.
        roles: its trainable parameters.

    Raises:
        ValueError: a parametrization that draws random numbers.
    """
    pulls: dict[str, Pull] = {}
    for name in _TENSORS:
        prefix = f"parametrizations.{name}."
        paths = [role.removeprefix(prefix) for role in roles if role.startswith(prefix)]
        if paths:
            pulls[name] = _make_pull(module, name, paths)
        elif name in roles:
            # The tensor is a parameter itself.
            shape = module.get_parameter(name).shape
            pulls[name] = Pull(tuple(shape), partial(_name_gradient, name))
    return pulls


def _name_gradient(name: str, g: Tensor) -> Tensors:
    return {name: g}


def _make_pull(module: nn.Module, name: str, paths: list[str]) -> Pull:
    path = f"parametrizations.{name}"
    parametrization = module.get_submodule(path)
    parameters = {x: parametrization.get_parameter(x).detach().clone() for x in paths}
    before = all_states()

    def effective(values: Tensors) -> Tensor:
        return functional_call(parametrization, values, ())

    value, pull = vjp(effective, parameters)[:2]
    if has_drawn(before):
        raise ValueError(
            f"the parametrization of '{name}' of a {type(module).__name__} draws random numbers, "
            "so its weight cannot be recomputed; put it in eval mode"
        )

    def apply(g: Tensor) -> Tensors:
        with torch.no_grad():
            rows = g.to(value.dtype)
            pulled = map_examples(lambda one: pull(one)[0], rows)
        return {f"{path}.{x}": gradient.to(g.dtype) for x, gradient in pulled.items()}

    return Pull(tuple(value.shape), apply)


def watch_registrations(
    model: nn.Module, note_self_set: Callable[[Tensor], None]
) -> AbstractContextManager[Any]:
    """Return a context that notes each `x.set_(x)`, by which torch registers a parametrization.

    It counts as a write, and changes nothing.
    """
    if REGISTERING.isdisjoint(type(m).__name__ for m in model.modules()):
        return nullcontext()
    return _SelfSets(note_self_set)


class _SelfSets(TorchDispatchMode):
    def __init__(self, note_self_set: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note_self_set = note_self_set

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            self._note_self_set(args[0])
        return func(*args, **(kwargs or {}))
