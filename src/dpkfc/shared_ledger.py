"""One ledger for all processes of a run: the first writes it, and none may know of releases that it does not hold."""

from __future__ import annotations

import os
from pathlib import Path

from dpkfc.gradients.distributed import Ranks
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import Ledger, LedgerError, verify

__all__ = ["count_along", "open_shared"]


def open_shared(plan: Plan, path: str | os.PathLike[str] | None, ranks: Ranks) -> Ledger:
    """The ledger on the first process, one in memory on the others.

    After a restart another host may be the first, and find nothing under a path where its predecessor had written: the budget
    would be spent once more. So what any process finds there must be a part of the ledger in force.

    Raises:
        LedgerError: another process finds releases under this path that the first does not; before anything is spent.
        ValueError: as `Plan.open_ledger`.
    """
    ledger = ranks.together(lambda: plan.open_ledger(path if ranks.first else None))
    if ranks.world_size == 1 or ranks.everyone(path) == [None] * ranks.world_size:
        return ledger

    def found() -> tuple[int, str]:
        if path is None or ranks.first or not Path(path).is_file() or not Path(path).stat().st_size:
            return 0, ""
        own = verify(path)
        return len(own.releases), own.heads[len(own.releases)]

    def check() -> None:
        for rank, (count, head) in enumerate(known):
            if count and not ledger.contains(count, head):
                raise LedgerError(
                    f"process {rank} finds {count} releases in {path} that the ledger of process 0 does not hold: another host "
                    "was the first before. Put the ledger on a disk that all hosts share, or copy it to the host of process 0"
                )

    try:
        known = ranks.everyone(ranks.together(found))
        ranks.from_first(check, "ledger")
    except BaseException:
        ledger.close()
        raise
    return ledger


def count_along(ledger: Ledger, plan: Plan, step: int, releases: int) -> None:
    """Bring the count of a process that writes no ledger to that of the first.

    Args:
        ledger: in memory.
        plan: of the run.
        step: in which the first process made its last release.
        releases: that the ledger of the first process holds.
    """
    for _ in range(releases - ledger.count):
        ledger.charge(step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity)
