"""One ledger for all processes of a run.

Rank 0 writes it. If another process finds a file with releases that the ledger lacks, the run is
refused: the budget would be spent twice.
"""

from __future__ import annotations

from pathlib import Path

from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan
from dpkfc.distributed.context import DistributedContext
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError


def open_shared_ledger(plan: Plan, path: StrPath | None, ranks: DistributedContext) -> Ledger:
    """Open the ledger on rank 0, and one in memory on the others.

    After a restart another host may be rank 0, and find no file where its predecessor had written.
    So every process looks for a file, and the ledger must hold all releases that any finds.

    Raises:
        LedgerError: another process finds releases under this path that rank 0 does not hold.
            Nothing has been spent then.
        ValueError: as `Plan.open_ledger`.
    """
    ledger = ranks.run_on_all(lambda: plan.open_ledger(path if ranks.is_rank0 else None))
    if ranks.world_size == 1 or ranks.all_gather(path) == [None] * ranks.world_size:
        return ledger

    def read_own_file() -> tuple[int, str]:
        if path is None or ranks.is_rank0:
            return 0, ""
        own_file = Path(path)
        if not own_file.is_file() or not own_file.stat().st_size:
            return 0, ""
        found = verify(path)
        return len(found.releases), found.heads[-1]

    def check() -> None:
        for rank, (count, head) in enumerate(known):
            if count and not ledger.contains(count, head):
                raise LedgerError(
                    f"process {rank} finds {count} releases in {path} that the ledger of process 0 "
                    "does not hold; put the ledger on a disk that all hosts share"
                )

    try:
        known = ranks.all_gather(ranks.run_on_all(read_own_file))
        ranks.broadcast_from_rank0(check, "ledger")
    except BaseException:
        ledger.close()
        raise
    return ledger
