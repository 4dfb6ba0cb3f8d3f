"""Layers whose weight is computed from parameters, by any `torch` parametrization.

Weight standardisation and weight norm are examples. The effective weight W = f(θ) depends on no
example, so the layer is an ordinary linear layer or convolution in W. The gradient of example n is
`g_n(θ) = Jᵀ g_n(W)` with J = ∂f/∂θ. The rows of a group are added before that product, which is
vectorised over examples. Curvature treats the result as an elementwise layer: whitening in W is not
whitening in θ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils.parametrize import is_parametrized

from dpkfc.linalg.blocks import ConvBlock, Outer, PerExample, chunks
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import are_states_equal, random_states

_log = logging.getLogger(__name__)
_CHUNK_ELEMENTS = 1 << 23  # gradients pulled back at once
_TENSORS = ("weight", "bias")


@dataclass(frozen=True)
class Pull:
    """Maps gradients with respect to an effective tensor to those of what it is computed from.

    Attributes:
        shape: of the effective tensor.
        apply: `[n, *shape]` to role and `[n, *parameter.shape]`.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor], dict[str, Tensor]]


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
        gradients: dict[str, Tensor] = {}
        for block, pulls in self.parts:
            entries = sum(math.prod(pull.shape) for pull in pulls.values())
            for rows in chunks(n, entries, _CHUNK_ELEMENTS):
                for role, g in _pull_back(block.select(rows), pulls).items():
                    if role not in gradients:
                        gradients[role] = g.new_zeros(n, *g.shape[1:])
                    gradients[role][rows] += g
        return PerExample(gradients)


def _pull_back(block: Outer | ConvBlock, pulls: Mapping[str, Pull]) -> dict[str, Tensor]:
    # `[n * groups, d_out, d_in]`, the bias in the last column.
    matrices = block.per_example()
    columns = {"weight": matrices, "bias": matrices[..., -1]}
    if len(pulls) == 2:
        columns["weight"] = matrices[..., :-1]
    gradients: dict[str, Tensor] = {}
    for name, pull in pulls.items():
        gradients.update(pull.apply(columns[name].reshape(block.batch_size, *pull.shape)))
    return gradients


def has_computed_weight(module: nn.Module, roles: list[str]) -> bool:
    """Return whether all trainable parameters of a module make up its weight or bias.

    They do so through torch parametrizations or directly.

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    prefixes = tuple(f"parametrizations.{name}." for name in _TENSORS)
    is_part = [role in _TENSORS or role.startswith(prefixes) for role in roles]
    return is_parametrized(module) and all(is_part)


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
            pulls[name] = _pull_of(module, name, paths, prefix)
        elif name in roles:
            pulls[name] = _identity_pull(name, tuple(module.get_parameter(name).shape))
    return pulls


def _identity_pull(name: str, shape: tuple[int, ...]) -> Pull:
    return Pull(shape, lambda g: {name: g})


def _pull_of(module: nn.Module, name: str, paths: list[str], prefix: str) -> Pull:
    parametrization = module.get_submodule(prefix[:-1])
    parameters = {}
    for path in paths:
        parameters[path] = parametrization.get_parameter(path).detach().clone()
    device = next(iter(parameters.values())).device
    before = random_states(device)

    def effective(values: dict[str, Tensor]) -> Tensor:
        return functional_call(parametrization, values, ())

    value, pull = vjp(effective, parameters)[:2]
    if not are_states_equal(before, random_states(device)):
        raise ValueError(
            f"the parametrization of '{name}' of a {type(module).__name__} draws random numbers, "
            "so its weight cannot be recomputed; put it in eval mode"
        )

    def pull_one(g: Tensor) -> dict[str, Tensor]:
        return pull(g)[0]

    def apply(g: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            gradients = vectorised(pull_one, g.to(value.dtype))
        return {prefix + path: x.to(g.dtype) for path, x in gradients.items()}

    return Pull(tuple(value.shape), apply)


def vectorised(function: Callable[[Tensor], dict[str, Tensor]], g: Tensor) -> dict[str, Tensor]:
    """Return a function of every example, vectorised where every operation has a batching rule.

    Otherwise examples are processed one after the other.
    """
    try:
        return vmap(function)(g)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        kind = type(error).__name__
        _log.debug("a parametrization cannot be vectorised over examples: %s", kind)
    rows = [function(x) for x in g]
    return {path: torch.stack([row[path] for row in rows]) for path in rows[0]}
