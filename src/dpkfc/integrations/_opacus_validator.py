"""Check models for private training, with the methods of Opacus's validator."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dpkfc.gradients.discovery import find_layers


class ModuleValidator:
    """Says whether a model can be trained privately, and replaces norms that mix examples."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[ValueError]:
        """Return the error that keeps a model from private training; an empty list without one.

        Raises:
            ValueError: this error, if `strict` is true.
        """
        try:
            find_layers(module)
        except ValueError as error:
            if strict:
                raise
            return [error]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether `validate` finds nothing."""
        return not cls.validate(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """Return a copy with GroupNorm for every BatchNorm, and instance norms without statistics.

        A model that needs neither is returned itself. Frozen BatchNorm in eval mode stays. New
        norms have new weights, so make the optimizer afterwards.
        """
        replaced = {}
        for name, part in module.named_modules():
            norm = _replacement(part)
            if norm is not None:
                replaced[name] = norm
        if not replaced:
            return module
        if "" in replaced:
            return replaced[""]
        fixed = copy.deepcopy(module)
        for name, norm in replaced.items():
            fixed.set_submodule(name, norm)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Return what `fix` returns, after `validate` has found nothing.

        Raises:
            ValueError: naming the module that cannot be trained privately, and the ways out.
        """
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


def _replacement(part: nn.Module) -> nn.Module | None:
    """Return the norm that replaces one that mixes examples; None for any other module."""
    if not isinstance(part, _NormBase):
        return None
    is_instance_norm = isinstance(part, nn.modules.instancenorm._InstanceNorm)
    is_separate = is_instance_norm and not part.track_running_stats
    is_trained = part.training or any(p.requires_grad for p in part.parameters())
    if is_separate or not is_trained:
        return None
    settings: dict[str, Any] = {"eps": part.eps, "affine": part.affine}
    if part.weight is not None:
        settings |= {"device": part.weight.device, "dtype": part.weight.dtype}
    count = part.num_features
    new: nn.Module = nn.GroupNorm(math.gcd(32, count), count, **settings)
    if is_instance_norm:
        new = type(part)(count, momentum=part.momentum, **settings)
    return new.train(part.training)
