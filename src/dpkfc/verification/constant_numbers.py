"""Constants in the place of random numbers, so that two passes of one model can be compared.

Dropout and augmentation draw other numbers for a batch of another size. With constants, whatever still differs was changed by
other examples, or by how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ConstantNumbers"]


class ConstantNumbers(TorchDispatchMode):
    """Replace the random numbers of torch by constants inside the body."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with constants for what it draws."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        name = str(func.overloadpacket.__name__)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(output[1])
        if isinstance(output, Tensor):
            _fill(name, output, args)
        return output


def _fill(name: str, x: Tensor, args: Any) -> None:
    """Overwrite what an operation has drawn."""
    if name.startswith("randperm"):
        x.copy_(torch.arange(len(x), device=x.device).flip(0))
    elif "bernoulli" in name:
        x.fill_(1)
    elif not x.is_floating_point():
        x.fill_(0)
    elif "normal" in name or "randn" in name:
        x.fill_(0.25)
    elif name in ("uniform_", "uniform") and len(args) > 2:
        x.fill_((float(args[1]) + float(args[2])) / 2)
    else:
        x.fill_(0.5)
