"""What may not be hooked to a private run: steps without a release, and whoever is shown gradients before they are noised."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dpkfc.gradients.update import refuse_gradient_hooks
from dpkfc.session import Session

__all__ = ["refuse_gradient_hooks", "refuse_unreleased_steps"]


def refuse_unreleased_steps(session: Session, held: torch.optim.Optimizer | None = None) -> RemovableHandle:
    """Make every `optimizer.step()` that is not the session's own an error, before it changes a parameter.

    A session charges its ledger first and steps the optimizer once for each release: a step without a new release in the
    ledger is one on gradients without noise.

    Args:
        session: whose releases are waited for.
        held: the torch optimizer that is guarded; default: the session's.

    Returns:
        A handle; `remove()` ends the guard.

    Raises:
        RuntimeError: from the optimizer's step, not from here.
    """
    seen = session.steps_done

    def check(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal seen
        if session.steps_done <= seen:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
            raise RuntimeError(
                "optimizer.step() was called without a release of the session: its gradients would hold private data without "
                "noise. Leave backward() and step() to session.step(batch, loss_fn)"
            )
        seen = session.steps_done

    return (held or session.optimizer).register_step_pre_hook(check)
