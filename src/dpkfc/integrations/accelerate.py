"""Check what `Accelerator.prepare` did against a session, in a script written with Accelerate.

A private script keeps the Accelerator for devices, evaluation and logging. What it changes: the
training loader is not prepared, since the session draws the batches, nor is the optimizer.
`accelerator.backward(loss)` and `optimizer.step()` become `session.step(batch, loss_fn)`. The
session clips and accumulates, and losses are not scaled. docs/integrations.md has such a script.
"""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from dpkfc.integrations._shared import refuse_unreleased_steps
from dpkfc.session import Session

__all__ = ["guard"]


def guard(accelerator: Any, session: Session) -> RemovableHandle:
    """Check an Accelerator against a session.

    From then on an optimizer step without a release is an error.

    Call it once, after `prepare` and after the session was built.

    Args:
        accelerator: an `accelerate.Accelerator`.
        session: of the same model.

    Returns:
        A handle; `remove()` lets the optimizer step freely again, when training is over.

    Raises:
        ValueError: loss scaling, accumulation, several processes, a wrapped model or a prepared
            optimizer, naming the fix.
    """
    _check_settings(accelerator, session)
    return refuse_unreleased_steps(session)


def _check_settings(accelerator: Any, session: Session) -> None:
    scaled = (
        accelerator.mixed_precision == "fp16" or getattr(accelerator, "scaler", None) is not None
    )
    if scaled:
        raise ValueError(
            "mixed_precision='fp16' scales losses by a factor that follows overflows of"
            " private gradients; use mixed_precision='bf16' or 'no'"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, but a"
            " logical batch is drawn and clipped as one; set max_physical_batch_size of the"
            " plan"
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind != "NO":
        raise ValueError(
            f"the Accelerator runs {accelerator.num_processes} processes ({kind}) and would"
            " wrap the model; run one process: a Session shares batches by itself"
        )
    plain = accelerator.unwrap_model(session.model, keep_torch_compile=False)
    if plain is not session.model:
        raise ValueError(
            f"the session holds the model inside a {type(session.model).__name__}; build optimizer"
            " and session from the plain model, accelerator.unwrap_model(model)"
        )
    prepared = [
        accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models
    ]
    if prepared and all(model is not session.model for model in prepared):
        raise ValueError(
            "accelerator.prepare was given another model than the session's; build optimizer and"
            " session from the model that prepare returned"
        )
    stepped = getattr(session.optimizer, "optimizer", session.optimizer)
    optimizers = (session.optimizer, *accelerator._optimizers)
    if any(getattr(x, "optimizer", None) is stepped for x in optimizers):
        raise ValueError(
            "the optimizer went through accelerator.prepare, which may skip its steps; leave it"
            " out of prepare and give the plain torch optimizer to the session"
        )
