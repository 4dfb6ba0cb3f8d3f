"""`privacy.json`: what a run of another library's loop has cost, beside its weights or its ledger."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from dpkfc.session import Session

__all__ = ["write_summary"]


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
