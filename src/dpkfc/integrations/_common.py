"""What may not be hooked to a private run: steps without a release, and whoever is shown gradients before they are noised."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dpkfc.session import Session


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


# --------------------------------------------------------------------------------------------------
# `privacy.json`: what a run of another library's loop has cost, beside its weights or its ledger.


def write_summary(
    folder: str | os.PathLike[str], session: Session, ledger_path: str | os.PathLike[str], not_private: Sequence[str]
) -> None:
    """Write `privacy.json`: what was spent, by which plan, recorded in which ledger.

    Args:
        folder: made where it is missing.
        session: open or closed.
        ledger_path: of its ledger; only the name is written.
        not_private: what was logged or saved that ε does not cover.
    """
    plan, epsilon = session.plan, session.epsilon
    summary = {
        "spent": {"epsilon": epsilon if math.isfinite(epsilon) else "inf", "delta": plan.delta},
        "ledger": {"file": Path(ledger_path).name, "releases": session.steps_done, "head": session.ledger.head},
        "not_private": list(not_private),
        "plan": plan.describe(),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "privacy.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
