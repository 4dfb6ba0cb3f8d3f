"""What is checked of a script's model and optimizer before anything is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.beside import check_draws
from dpkfc.gradients.broadcast import leading_size
from dpkfc.gradients.finer import check_alone
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.model_state import check_memory, checked_state
from dpkfc.gradients.random_state import kept_numbers
from dpkfc.gradients.verify import check_mode, check_whole_batch
from dpkfc.integrations._rows import Inputs, picker, row_outputs

__all__ = ["SHOWN", "Hook", "check_model", "check_optimizer", "check_untouched"]

# Settings of the plan that scripts read from a private optimizer; a change of them is refused at the next step.
SHOWN = ("noise_multiplier", "max_grad_norm", "expected_batch_size")


class Hook:
    """A hook of the model that its copies and pickles do not carry on."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function
        self.__name__ = "dpkfc_hook"

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None:
            self._function(*arguments)

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


def _projected(whole: Inputs, model: nn.Module, inputs: Inputs) -> Tensor:
    """A number for every example `[N]` that all outputs of the model enter, not linearly: a batch mean must show."""
    size = leading_size(inputs)
    rows = row_outputs(model, inputs, whole, size or 0)
    if not rows:
        raise ValueError("no output of the model leads with the batch; per-example gradients need one row per example")
    row = torch.cat(rows, 1)
    return (row + 0.5 * row.square()) @ torch.cos(torch.arange(row.shape[1], dtype=row.dtype, device=row.device))


def check_model(model: nn.Module, layers: Sequence[Layer], inputs: Inputs, size: int) -> None:
    """Compare the tape with plain autograd on the first examples of a batch, in eval mode and in the model's own.

    Where the model draws random numbers, that is looked at under several of them. The global generators go on where they were.

    Args:
        model: in the mode it is trained in, which is kept.
        layers: of the model.
        inputs: (args, kwargs) of a call of the model.
        size: examples in them, at least 1; one alone cannot show whether examples are mixed.

    Raises:
        ValueError: naming the parameter whose per-example gradient differs or that the model never uses; inputs that cannot be
            cut into examples.
    """
    rows, losses = picker(inputs, size, model), partial(_projected, inputs)
    few = range(min(2, size))
    several = range(min(6, size))  # what a pair cannot show: groups of four
    device = layers[0].tensor(next(iter(layers[0].parameters))).device
    with checked_state(model) as before, kept_numbers(), torch.autocast(device.type, enabled=False):
        check_alone(model, layers, losses, rows(*few), [rows(i) for i in few])
        if len(few) < 2:
            return
        drawn = check_mode(model, layers, losses, rows(0, 1), rows(0, 0))
        pairs = (rows(*chosen) for chosen in ((0, 1), *((i, i) for i in several)))
        check_memory(model, before, lambda x: losses(model, x), pairs, device)
        _check_finite_alone(model, losses, rows(*several), [rows(i) for i in several])
        if len(several) > 2:
            check_whole_batch(model, layers, losses, rows(*several), len(several))
        if drawn:
            check_draws(model, device, losses, rows, len(several))


def _check_finite_alone(
    model: nn.Module, losses: Callable[[nn.Module, Inputs], Tensor], together: Inputs, singles: Sequence[Inputs]
) -> None:
    """Raise where the model needs company: divided by a standard deviation over the batch, one example alone is NaN.

    In a comparison of gradients NaN is as good as anything.
    """
    with torch.no_grad():
        finite = losses(model, together).isfinite()
        for i, single in enumerate(singles):
            if bool(finite[i]) and not bool(losses(model, single).isfinite().all()):
                raise ValueError(
                    "the model's output for an example alone is NaN or infinite, and finite beside others: it divides by a "
                    "statistic of the batch (a standard deviation, say), so that one example changes the gradients of the "
                    "others. Use statistics of public data, or of each example alone (LayerNorm, GroupNorm)"
                )
