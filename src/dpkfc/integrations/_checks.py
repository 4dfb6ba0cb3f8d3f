"""What is checked of a script's model and optimizer before anything is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SHOWN", "Hook", "check_optimizer", "check_untouched"]

# Settings of the plan that scripts read from a private optimizer; a change of them is refused at the next step.
SHOWN = ("noise_multiplier", "max_grad_norm", "expected_batch_size")


class Hook:
    """A hook of the model that its copies and pickles do not carry on."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self.__name__ = "dpkfc_hook"

    def __call__(self, *arguments: Any) -> Any:
        return None if self._function is None else self._function(*arguments)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Asked for by torch.jit.script alone, which compiles the hooks of a module with it."""
        raise RuntimeError(
            "torch.jit.script would compile the hooks of the privacy engine with the model; call engine.close() first and script "
            "the model itself"
        )

    @property
    def alive(self) -> bool:
        """Whether it still does anything."""
        return self._function is not None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless the optimizer holds exactly the trainable parameters of the model.

    Raises:
        ValueError: naming the first parameter that only one of the two has.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items():
        if p not in held:
            raise ValueError(
                f"the optimizer does not hold trainable parameter '{name}'; pass it to the optimizer or freeze it with "
                "requires_grad_(False)"
            )
    own = set(parameters.values())
    for p in held:
        if p.requires_grad and p not in own:
            raise ValueError(
                f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not in the model, which would "
                "never get a private gradient; build the optimizer from model.parameters()"
            )


def check_untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if another engine has its hooks on the model or its settings on the optimizer.

    Raises:
        ValueError: naming the fix.
    """
    if any(isinstance(hook, Hook) and hook.alive for hook in model._forward_pre_hooks.values()):
        raise ValueError("the module is private already; close() the engine that made it so first")
    for name in SHOWN:
        if hasattr(optimizer, name):
            raise ValueError(
                f"the optimizer has an attribute '{name}' already: it belongs to another privacy engine; pass a new torch "
                "optimizer"
            )
