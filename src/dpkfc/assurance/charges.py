"""The order of charge and release, and what the ledger says of a run while it is made."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from dpkfc.assurance.canaries import Canaries
from dpkfc.assurance.subject import Subject, Watched, scripted, watched
from dpkfc.assurance.verdict import Finding
from dpkfc.privacy.events import event_to_dict
from dpkfc.privacy.ledger import LedgerError, verify

__all__ = ["charges"]


def charges(subject: Subject) -> list[Finding]:
    """Run a few steps and read the ledger from the disk after each; then let a charge fail and see that nothing gets out."""
    canaries = Canaries()
    canaries.add("as it is", tuple(x[0] for x in subject.dataset))
    script = [[0, subject.size], [], [0], [0, subject.size]]
    plan = scripted(subject.plan, [*script, [0]], subject.size + 1)
    loss, data, units = canaries.loss(subject), canaries.dataset(subject), canaries.units(subject)
    behind: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        session, walk = watched(subject, plan, data, units=units, ledger_path=path, verify=False)
        with session:
            batches = session.batches()
            for step, _ in enumerate(script):
                session.step(next(batches), loss)
                behind += [] if _charged(path) == len(session.released) == step + 1 else [f"behind step {step}"]
            walk.handed = {}
            got_out = _step_without_a_ledger(session, next(batches), loss)
            got_out = got_out or ("the optimizer was handed something" if walk.handed else "")
        entries = verify(path).releases
    stated = all(
        math.isclose(entry["stddev"], plan.stddev)
        and math.isclose(entry["noise_multiplier"], plan.noise_multiplier)
        and entry["event"] == event_to_dict(plan.event)
        for entry in entries
    )
    late = f", not equal {behind[0]}" if behind else ""
    return [
        Finding(
            check="ledger",
            measured=f"{len(entries)} charges for {len(session.released)} releases{late}",
            bound="equal after every step, with the plan's event and noise",
            passed=len(entries) == len(session.released) == len(script) and not behind and stated,
            detail="read back from the file while it was written, hash chain verified",
        ),
        Finding(
            check="charge before release",
            measured=got_out or "nothing got out",
            bound="nothing gets out",
            passed=not got_out,
            detail="a step whose charge cannot be written",
        ),
    ]


def _charged(path: Path) -> int:
    """Releases in the file, as a process would find it that starts after a crash."""
    try:
        return len(verify(path).releases)
    except LedgerError:
        return 0


class _Broken:
    """Stands for a ledger whose disk is full; all but the charge is that of the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def charge(self, *args: Any, **kwargs: Any) -> int:
        raise LedgerError("the disk is full (audit)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _step_without_a_ledger(session: Watched, batch: Any, loss: Any) -> str:
    """What a step did although it could not be charged; "" where it did nothing."""
    before, drawn, real = len(session.released), session.noise_draws, session._ledger
    session._ledger = _Broken(real)  # type: ignore[assignment]
    try:
        session.step(batch, loss)
    except LedgerError:
        if len(session.released) > before:
            return "a release got out"
        return "noise was drawn" if session.noise_draws > drawn else ""
    finally:
        session._ledger = real
    return "a release got out"
