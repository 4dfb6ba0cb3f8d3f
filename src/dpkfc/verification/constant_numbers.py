"""Constants in place of random numbers, so that two passes of one model can be compared.

Dropout and augmentation draw different numbers for a batch of another size. With constants, only
other examples, or their number, can cause a difference.

A pass may put the generators back after its draws (`torch.random.fork_rng`), or seed them, so that
they end as they began. `NotedDraws` looks at each operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkfc.rng_state import all_states, has_drawn
from dpkfc.tracking.modes import UncompiledMode


class ConstantNumbers(UncompiledMode):
    """Replaces the random numbers of torch by constants, except numbers of other generators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with constants in place of its random numbers."""
        kwargs = kwargs or {}
        name = str(func.overloadpacket.__name__)
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):
            return _run_rrelu(func, *args)
        output = func(*args, **kwargs)
        is_known = kwargs.get("generator") is not None
        if is_known or torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(output[1])
        if isinstance(output, Tensor):
            names = [argument.name for argument in func._schema.arguments]
            _fill_with_constant(name, output, dict(zip(names, args, strict=False)))
        return output


class NotedDraws(UncompiledMode):
    """Notes whether an operation of torch has drawn numbers of the global generators.

    Attributes:
        are_any: whether one has.
    """

    are_any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and look at the generators where it may draw."""
        kwargs = kwargs or {}
        if self.are_any or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        states = all_states()
        output = func(*args, **kwargs)
        self.are_any = has_drawn(states)
        return output


def _run_rrelu(
    func: Any, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any
) -> Tensor:
    """Call rrelu with the mean of its bounds as the slope, and show it to its backward pass."""
    output: Tensor = func(x, noise, lower, upper, False)
    noise.copy_(torch.where(output > 0, 1.0, (lower + upper) / 2))
    return output


def _fill_with_constant(name: str, x: Tensor, args: dict[str, Any]) -> None:
    """Overwrite the random numbers of an operation with one that it may draw."""
    if name.startswith("randperm"):
        x.copy_(torch.arange(len(x), device=x.device).flip(0))
    elif "bernoulli" in name:
        x.fill_(1)
    elif not x.is_floating_point():
        x.fill_(args.get("low") or args.get("from") or 0)
    elif "normal" in name or "randn" in name:
        x.fill_(0.25)
    elif name.startswith("uniform"):
        x.fill_((args.get("from", 0.0) + args.get("to", 1.0)) / 2)
    else:
        x.fill_(0.5)
