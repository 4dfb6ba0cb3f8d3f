"""What the adapters share: a guard of the optimizer, the card, and `privacy.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan
from dpkfc.distributed.fsdp import list_group_members
from dpkfc.gradients.optimizer_step import is_nested_step
from dpkfc.report.text import json_number
from dpkfc.session import Session


def refuse_unreleased_steps(session: Session, guarded: Optimizer | None = None) -> RemovableHandle:
    """Make every `optimizer.step()` that is not the session's own an error.

    A session charges its ledger first and steps the optimizer once for each release. A step without
    a new release in the ledger therefore uses gradients without noise.

    Args:
        session: makes the releases.
        guarded: the guarded torch optimizer; default: the session's.

    Returns:
        A handle; `remove()` ends the guard.

    Raises:
        RuntimeError: from the optimizer's step, not from here.
    """
    steps_before = session.steps_done

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal steps_before
        if is_nested_step(optimizer):
            return
        if session.steps_done <= steps_before:
            for p in list_group_members(optimizer.param_groups):
                p.grad = None
            raise RuntimeError(
                "optimizer.step() was called without a release of the session, so its gradients"
                " have no noise; leave backward() and step() to session.step(batch, loss_fn)"
            )
        steps_before = session.steps_done

    return (guarded or session.optimizer).register_step_pre_hook(check)


def steps_per_epoch(plan: Plan) -> int:
    """Return the expected number of releases in one pass over the dataset, a public number."""
    return max(1, round(plan.dataset_size / plan.expected_batch_size))


class CardWriter:
    """What holds the session of another library's loop, and writes its card.

    Attributes:
        session: of the run, None before it.
    """

    session: Session | None = None

    def write_card(self, folder: StrPath, **statements: Any) -> dict[str, Any]:
        """Write weights, a copy of the ledger and the privacy card, as `Session.write_card` does.

        Raises:
            RuntimeError: as there, or nothing was trained.
        """
        if self.session is None:
            raise RuntimeError("there is no session yet; train before a card is written")
        return self.session.write_card(folder, **statements)


# --------------------------------------------------------------------------------------------------
# `privacy.json`: the privacy cost of a run in another library's loop.


def write_summary(
    folder: StrPath,
    session: Session,
    ledger_path: StrPath,
    not_private: Sequence[str],
) -> None:
    """Write `privacy.json`: the spent budget, the plan and the ledger.

    Args:
        folder: made if it is missing.
        session: open or closed.
        ledger_path: the path of its ledger. Only the file name is written.
        not_private: logged or saved values that ε does not cover.
    """
    plan = session.plan
    epsilon = plan.epsilon(session.ledger.steps, session.ledger.extra)
    summary = {
        "spent": {"epsilon": json_number(epsilon), "delta": plan.delta},
        "ledger": {
            "file": Path(ledger_path).name,
            "releases": session.steps_done,
            "head": session.ledger.head,
        },
        "not_private": list(not_private),
        "plan": plan.describe(),
    }
    path = Path(folder) / "privacy.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
