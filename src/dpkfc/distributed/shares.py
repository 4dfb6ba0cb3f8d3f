"""Shares: each process holds a part of the records, and samples from it alone.

Poisson sampling decides for each record alone, so a batch of all records is the union of batches of
their parts. Nothing but clipped sums is exchanged, and no process knows the size of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

from dpkfc.distributed.context import DistributedContext

_RANGE = re.compile(r"(.*):(\d+)-(\d+)")
Part = tuple[str, int, int]  # digest of a name, first row and the row after the last; -1 for all


def check_shares(
    ranks: DistributedContext,
    records: int,
    total: int,
    facts: bool | str | Sequence[str],
    data: Any,
) -> None:
    """Refuse shares that are empty, do not add up, or are known to overlap.

    Args:
        ranks: the processes.
        records: of this process.
        total: records of the plan.
        facts: public names of what this process holds: files, or rows such as "a.csv:0-500". True
            names nothing but the rows of a torch `Subset`.
        data: the dataset of this process.

    Raises:
        ValueError: on every process, naming the process and the fix.
    """
    names = []
    if isinstance(facts, str):
        names = [facts]
    elif not isinstance(facts, bool):
        names = list(facts)
    parts = [_part(name) for name in names or _name_rows(data)]
    shares = ranks.all_gather((records, parts))
    for rank, (count, _) in enumerate(shares):
        if not count:
            raise ValueError(
                f"process {rank} holds no record; give each process a part, or start fewer"
            )
    held = sum(count for count, _ in shares)
    if held != total:
        raise ValueError(
            f"the shares hold {held} records together, the plan is for {total}; calibrate with"
            " dataset_size= the sum of all shares"
        )
    for rank, other in itertools.combinations(range(len(shares)), 2):
        pairs = itertools.product(shares[rank][1], shares[other][1])
        if any(_overlaps(one, two) for one, two in pairs):
            raise ValueError(
                f"processes {rank} and {other} hold the same records, which would count twice; give"
                " each its own part, or name its files in share="
            )


def _name_rows(data: Any) -> list[str]:
    """Return the rows of a view of consecutive rows; nothing for other data."""
    if not isinstance(data, Subset) or not len(data.indices):
        return []
    first, end = int(data.indices[0]), int(data.indices[-1]) + 1
    return [f":{first}-{end}"] if end - first == len(data.indices) else []


def _part(name: str) -> Part:
    found = _RANGE.fullmatch(name)
    start, end = -1, -1
    if found:
        name, start, end = found[1], int(found[2]), int(found[3])
    return hashlib.sha256(name.encode()).hexdigest(), start, end


def _overlaps(one: Part, other: Part) -> bool:
    if one[0] != other[0]:
        return False
    is_whole = one[1] < 0 or other[1] < 0
    return is_whole or max(one[1], other[1]) < min(one[2], other[2])
