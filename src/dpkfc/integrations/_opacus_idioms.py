"""What scripts read of the models, optimizers and accountants that Opacus wraps.

Here nothing is wrapped: a private model is the model itself. Names of the wrappers that mean
something here work, and each of the others is one error that names the line to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn


class Refusal:
    """Stands for a part that Opacus has and this library has not; using it is one error.

    Args:
        message: what to write in its place.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError with the message."""
        raise RuntimeError(self.message)

    __call__ = __iter__ = __len__ = __getitem__ = refuse


class WrapperMethod:
    """A method of Opacus's wrapper, on the model itself. Copies and pickles of it do no action.

    Args:
        model: the model, which every call returns.
        action: called first; None where there is nothing to do.
    """

    def __init__(self, model: nn.Module, action: Callable[[], None] | None = None) -> None:
        self._model = model
        self._action = action

    def __call__(self) -> nn.Module:
        if self._action is not None:
            self._action()
        return self._model

    def __reduce__(self) -> tuple[type[WrapperMethod], tuple[nn.Module]]:
        return WrapperMethod, (self._model,)


_ONE_STEP = (
    "is a part of optimizer.step() here; leave it out and call optimizer.step() once a batch"
)
_NO_HOOKS = "is absent: evaluate in model.eval(), and end privacy with engine.close()"


def wrapper_attributes(model: nn.Module, close: Callable[[], None]) -> dict[str, Any]:
    """Return what scripts read of Opacus's `GradSampleModule`, for a model.

    Args:
        model: the model.
        close: removes the hooks of the engine.
    """
    closing, harmless = WrapperMethod(model, close), WrapperMethod(model)
    return {
        "_module": model,
        **dict.fromkeys(("to_standard_module", "cleanup", "remove_hooks"), closing),
        **dict.fromkeys(
            ("forbid_grad_accumulation", "set_grad_sample_to_none", "del_grad_sample"), harmless
        ),
        "allow_grad_accumulation": Refusal(
            "model.allow_grad_accumulation is absent: every batch is stepped; split large ones"
            " with BatchMemoryManager"
        ),
        "enable_hooks": Refusal(f"model.enable_hooks {_NO_HOOKS}"),
        "disable_hooks": Refusal(f"model.disable_hooks {_NO_HOOKS}"),
    }


def optimizer_attributes(
    optimizer: torch.optim.Optimizer,
    reduction: str,
    attach_step_hook: Callable[[Callable[[torch.optim.Optimizer], None] | None], None],
) -> dict[str, Any]:
    """Return what scripts read of Opacus's `DPOptimizer`, beside the numbers of the plan.

    Args:
        optimizer: the script's own.
        reduction: of the loss, "mean" or "sum".
        attach_step_hook: takes a function that sees each release before the optimizer steps on it.
    """
    return {
        "original_optimizer": optimizer,
        "loss_reduction": reduction,
        "accumulated_iterations": 1,
        "secure_mode": False,
        "params": [p for group in optimizer.param_groups for p in group["params"]],
        "attach_step_hook": attach_step_hook,
        "signal_skip_step": Refusal(
            "the BatchMemoryManager of Opacus cannot split this loader; write: from"
            " dpkfc.integrations.opacus import BatchMemoryManager"
        ),
        "virtual_step": Refusal(
            "optimizer.virtual_step is absent; write: with BatchMemoryManager(data_loader=...,"
            " max_physical_batch_size=..., optimizer=optimizer) as batches"
        ),
        "grad_samples": Refusal(
            "optimizer.grad_samples is absent: gradients of single examples are private; read"
            " p.grad, the release, after optimizer.step()"
        ),
        **{
            name: Refusal(f"optimizer.{name} {_ONE_STEP}")
            for name in ("clip_and_accumulate", "add_noise", "scale_grad", "pre_step")
        },
    }


def add_attributes(owner: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Put attributes on an object, except where it has its own; return the names of those added."""
    added = []
    for name in attributes:
        present = vars(owner).get(name)
        is_ours = present is owner or isinstance(present, (Refusal, WrapperMethod))
        if is_ours or not hasattr(owner, name):
            added.append(name)
    # torch would take a module for a part of its owner, so the dictionary is written.
    vars(owner).update({name: attributes[name] for name in added})
    return added


def remove_attributes(owner: Any, names: list[str]) -> None:
    """Remove what `add_attributes` has added."""
    for name in names:
        vars(owner).pop(name, None)


# --------------------------------------------------------------------------------------------------
# Objects that Opacus itself has wrapped, handed to this library's engine.


def refuse_wrapped(module: Any, optimizer: Any) -> None:
    """Refuse a model or an optimizer that Opacus has wrapped.

    Raises:
        ValueError: naming the object inside, which is to be passed.
    """
    if isinstance(module, nn.Module) and "_module" in module._modules:
        if hasattr(module, "to_standard_module"):
            raise ValueError(
                f"module is a {type(module).__name__} of Opacus; pass the model inside:"
                " module=model.to_standard_module()"
            )
    inner = getattr(optimizer, "original_optimizer", optimizer)
    if inner is not optimizer:
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} of Opacus; pass the one inside:"
            " optimizer=optimizer.original_optimizer"
        )


# --------------------------------------------------------------------------------------------------
# Names that scripts import from Opacus beside its engine.

_PLAIN_MODEL = "pass the plain model to make_private, which returns it"
_TORCH = "write: from torch.nn import {} as {}"
_FIXED = "leave it out: noise and clip are fixed for the whole run; schedule the learning rate"
_OWN = "leave it out: engine.accountant counts every release, engine.get_epsilon(delta) is its ε"
_SAMPLED = "leave it out: make_private takes a plain DataLoader and samples by itself"

IMPORTS: dict[str, str] = {
    **dict.fromkeys(("GradSampleModule", "GradSampleModuleFastGradientClipping"), _PLAIN_MODEL),
    "register_grad_sampler": "leave it out: a layer without a rule goes through torch.func",
    "DPOptimizer": "leave it out: make_private returns the optimizer that it was given",
    **dict.fromkeys(("DPDataLoader", "UniformWithReplacementSampler"), _SAMPLED),
    **dict.fromkeys(
        ("DPDDP", "DifferentiallyPrivateDistributedDataParallel"),
        "run one process, or take a dpkfc.Session, which shares each batch",
    ),
    "DPLSTM": _TORCH.format("LSTM", "DPLSTM"),
    "DPGRU": _TORCH.format("GRU", "DPGRU"),
    "DPRNN": _TORCH.format("RNN", "DPRNN"),
    "DPMultiheadAttention": _TORCH.format("MultiheadAttention", "DPMultiheadAttention"),
    **dict.fromkeys(
        ("RDPAccountant", "PRVAccountant", "GaussianAccountant", "create_accountant"), _OWN
    ),
    "get_noise_multiplier": "write: make_private_with_epsilon(...); optimizer.noise_multiplier",
    **dict.fromkeys(("ExponentialNoise", "LambdaNoise", "StepNoise"), _FIXED),
    **dict.fromkeys(("ExponentialGradClip", "LambdaGradClip", "StepGradClip"), _FIXED),
    "PrivacyEngineAdaptiveClipping": "write: make_private(..., clipping='automatic')",
    "wrap_data_loader": "write: with BatchMemoryManager(data_loader=..., optimizer=...) as batches",
    "DPLightningDataModule": "see dpkfc.integrations.lightning: PrivateModule, PrivateTraining",
}
"""A name of Opacus to what a script writes in its place."""
