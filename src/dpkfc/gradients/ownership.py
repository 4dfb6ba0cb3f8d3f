"""Which module answers for a parameter: the one whose forward function uses it.

That is the module that holds it, except where children are read instead of called: attention with a projection that it
applies itself, parametrized weights, and containers without a forward function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = ["is_called", "owned_parameters", "refuse_power_iteration", "weights_are_computed"]

_OPAQUE = (nn.MultiheadAttention,)
_PLAIN = {"weight", "bias"}
_CELL = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward function at all; ParameterList, ModuleDict and other containers have none."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def owned_parameters(module: nn.Module) -> tuple[dict[str, Tensor], set[nn.Module]]:
    """Parameters that a module answers for.

    Args:
        module: any module.

    Returns:
        Path below the module to parameter, and the modules below it that need no answer of their own.
    """
    if isinstance(module, _OPAQUE) or is_parametrized(module):
        return dict[str, Tensor](module.named_parameters()), set(module.modules()) - {module}
    parameters: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    below: set[nn.Module] = set()
    for path, child in _uncalled(module, "") if is_called(module) else ():
        parameters.update({f"{path}.{role}": p for role, p in child.named_parameters(recurse=False)})
        below.add(child)
    return parameters, below


def _uncalled(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not is_called(child):
            yield prefix + name, child
            yield from _uncalled(child, f"{prefix}{name}.")


def weights_are_computed(module: nn.Module, roles: Iterable[str]) -> bool:
    """Whether a module of a known kind computes its weights from other parameters (weight norm, pruning, parametrizations).

    Args:
        module: any module.
        roles: the trainable parameters that it answers for.
    """
    plain = _PLAIN
    if isinstance(module, nn.RNNBase):
        plain = set(module._flat_weights_names)
    elif isinstance(module, nn.RNNCellBase):
        plain = _CELL
    return is_parametrized(module) or not set(roles) <= plain


def refuse_power_iteration(name: str, module: nn.Module) -> None:
    """Refuse a spectral norm that moves its estimate in every forward pass.

    How many passes a step makes depends on how many examples were sampled, and gradients of single examples would be taken
    of other weights than the batch has seen.

    Raises:
        ValueError: naming the module and the fix.
    """
    hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    if module.training and (hooked or isinstance(module, parametrizations._SpectralNorm) and hasattr(module, "_u")):
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) takes a step of its power iteration in every forward pass, and the "
            "number of passes depends on the sampled batch. Put it in eval mode before training (for example "
            "layer.parametrizations.weight.eval()) and, if the estimate is to follow the weights, run it once between steps: "
            "layer.parametrizations.weight.train(); layer.weight; layer.parametrizations.weight.eval()"
        )
