"""Layers whose weight is computed from parameters: weight standardisation, weight norm, any `torch` parametrization.

The effective weight W = f(θ) depends on no example, so the layer is an ordinary linear layer or convolution in W, and the
gradient of example n is `g_n(θ) = Jᵀ g_n(W)` with J = ∂f/∂θ. The rows of a group are added up before that product, which
is vectorised over examples. The curvature sees the result as an elementwise layer: whitening in W is not whitening in θ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils.parametrize import is_parametrized

from dpkfc.linalg.blocks import ConvBlock, Outer, PerExample
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import are_states_equal, random_states

_log = logging.getLogger(__name__)
_CHUNK_ELEMENTS = 1 << 23  # of effective gradients that are formed and pulled back at once
_TENSORS = ("weight", "bias")


@dataclass(frozen=True)
class Pull:
    """From gradients with respect to one effective tensor to those with respect to what it is computed from.

    Attributes:
        shape: of the effective tensor.
        apply: `[n, *shape]` to role and `[n, *parameter.shape]`.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Computed:
    """The gradients of one layer before they are pulled back.

    Attributes:
        parts: blocks in the effective tensors, each with the pull of `weight` and `bias` where they train. One part, or
            several where the gradients were taken at several values of the parameters; they are added up.
    """

    parts: tuple[tuple[Outer | ConvBlock, Mapping[str, Pull]], ...]

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.parts[0][0].batch_size

    def mapped(self, work: Callable[[Any], Any]) -> Computed:
        """The same with every block replaced by `work(block)`."""
        return Computed(tuple((work(block), pulls) for block, pulls in self.parts))

    def per_example(self) -> PerExample:
        """Materialised gradients, formed and pulled back a few examples at a time."""
        n, grads = self.batch_size, dict[str, Tensor]()
        for block, pulls in self.parts:
            each = sum(math.prod(pull.shape) for pull in pulls.values())
            size = max(1, _CHUNK_ELEMENTS // max(1, each))
            for start in range(0, n, size):
                rows = slice(start, min(n, start + size))
                for role, g in _pulled(_examples(block, rows), pulls).items():
                    if role not in grads:
                        grads[role] = g.new_zeros(n, *g.shape[1:])
                    grads[role][rows] += g
        return PerExample(grads)


def _examples(block: Outer | ConvBlock, rows: slice) -> Outer | ConvBlock:
    if isinstance(block, ConvBlock):
        return block.examples(rows)
    return Outer(block.a[rows], block.b[rows], homogeneous=block.homogeneous)


def _pulled(block: Outer | ConvBlock, pulls: Mapping[str, Pull]) -> dict[str, Tensor]:
    matrices = block.per_example()  # [n * groups, d_out, d_in], the bias in the last column
    columns = {"weight": matrices, "bias": matrices[..., -1]}
    if len(pulls) == 2:
        columns["weight"] = matrices[..., :-1]
    found: dict[str, Tensor] = {}
    for name, pull in pulls.items():
        found.update(pull.apply(columns[name].reshape(block.batch_size, *pull.shape)))
    return found


def has_computed_weight(module: nn.Module, roles: list[str]) -> bool:
    """Whether all of a module's trainable parameters make up its weight or bias, through torch parametrizations or plainly.

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    made = tuple(f"parametrizations.{name}." for name in _TENSORS)
    return is_parametrized(module) and all(role in _TENSORS or role.startswith(made) for role in roles)


def pulls_of(module: nn.Module, roles: list[str]) -> dict[str, Pull]:
    """The pulls of a layer's weight and bias at the present values of its parameters, which are copied.

    Args:
        module: for which `has_computed_weight` holds.
        roles: its trainable parameters.

    Raises:
        ValueError: a parametrization that draws random numbers.
    """
    pulls: dict[str, Pull] = {}
    for name in _TENSORS:
        prefix = f"parametrizations.{name}."
        own = [role.removeprefix(prefix) for role in roles if role.startswith(prefix)]
        if own:
            pulls[name] = _pull_of(module, name, own, prefix)
        elif name in roles:
            pulls[name] = Pull(tuple(module.get_parameter(name).shape), lambda g, name=name: {name: g})  # type: ignore[misc]
    return pulls


def _pull_of(module: nn.Module, name: str, paths: list[str], prefix: str) -> Pull:
    parametrization = module.get_submodule(prefix[:-1])
    held = {path: parametrization.get_parameter(path).detach().clone() for path in paths}
    device = next(iter(held.values())).device
    before = random_states(device)
    value, pull = vjp(lambda own: functional_call(parametrization, own, ()), held)[:2]
    if not are_states_equal(before, random_states(device)):
        raise ValueError(
            f"the parametrization of '{name}' of a {type(module).__name__} draws random numbers, so that the weight of the "
            "forward pass cannot be computed again; put it in eval mode or take the randomness out"
        )

    def one(g: Tensor) -> dict[str, Tensor]:
        return pull(g)[0]

    def apply(g: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            found = vectorised(one, g.to(value.dtype))
        return {prefix + path: x.to(g.dtype) for path, x in found.items()}

    return Pull(tuple(value.shape), apply)


def vectorised(one: Callable[[Tensor], dict[str, Tensor]], g: Tensor) -> dict[str, Tensor]:
    """`one` of every example, one after the other where some operation of the parametrization has no batching rule."""
    try:
        return vmap(one)(g)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        _log.debug("a parametrization cannot be vectorised over examples: %s", type(error).__name__)
    rows = [one(x) for x in g]
    return {path: torch.stack([row[path] for row in rows]) for path in rows[0]}
