"""Add up the cost of several ledgers on the data of the same people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.budget import unit_of
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.report.card_files import LEDGER
from dpkfc.report.spent import charges_of, doubt_of, relation_of_releases
from dpkfc.report.text import json_number
from dpkfc.report.verify import verify_history

_UNKNOWN = "not stated"


class TotalError(ValueError):
    """Ledgers that cannot be composed."""


@dataclass(frozen=True, kw_only=True)
class LedgerCost:
    """One ledger of a total.

    Attributes:
        path: the file.
        ledger: the verified content of the file.
        unit: whom the run protects.
        neighbouring_relation: of the plan.
        doubt: why ε of this ledger is not a guarantee, "" if it is one.
        epsilon: of the releases of this ledger alone, at the δ of the total.
    """

    path: Path
    ledger: Verified
    unit: str
    neighbouring_relation: str
    doubt: str
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class TotalCost:
    """The cost of several ledgers together.

    Attributes:
        rows: the ledgers, in order.
        delta: δ of every ε here.
        epsilon: of all releases together.
    """

    rows: tuple[LedgerCost, ...]
    delta: float
    epsilon: float

    @property
    def doubts(self) -> list[str]:
        """Why the total is not a guarantee; empty if it is one."""
        return [f"{row.path}: {row.doubt}" for row in self.rows if row.doubt]


def total_of_ledgers(paths: Sequence[Path], delta: float | None = None) -> TotalCost:
    """Verify ledgers and compose all their releases.

    Args:
        paths: ledgers, run folders, or folders of run folders.
        delta: δ of the total; None takes the one that all ledgers state.

    Returns:
        The total, with the ε of each ledger alone.

    Raises:
        TotalError: no ledger, a ledger that is given twice, ledgers of different units or
            neighbouring relations, or no common δ.
        LedgerError, CardError, CheckpointError: a ledger that cannot be trusted.
        ValueError: δ outside (0, 1), or releases that no accountant can treat.
    """
    files = [file for path in paths for file in _find_ledgers(path)]
    ledgers = {file: verify_history(file) for file in dict.fromkeys(files)}
    if len(ledgers) < len(files):
        raise TotalError("a ledger is given twice; leave one out")
    _check_copies(ledgers)
    if delta is None:
        delta = _common_delta(ledgers)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    rows = tuple(_cost(file, ledger, delta) for file, ledger in ledgers.items())
    _check_same(rows)
    charges = []
    for row in rows:
        charges += charges_of(row.ledger.releases, row.ledger.groups)
    return TotalCost(rows=rows, delta=delta, epsilon=total_epsilon(charges, delta))


def _find_ledgers(path: Path) -> list[Path]:
    """Return the ledger that a path names, or the ledgers of the runs in a folder."""
    if path.is_file():
        return [path]
    ledger = path / LEDGER
    if ledger.is_file():
        return [ledger]
    files = sorted(path.glob("*/ledger.jsonl"))
    if not path.exists():
        raise TotalError(f"{path} does not exist; name run folders or ledger files")
    if not files:
        raise TotalError(f"{path} is not a ledger and holds none; name run folders or ledger files")
    return files


def _check_copies(ledgers: dict[Path, Verified]) -> None:
    """Refuse a ledger whose whole history is in another one.

    Two copies that have each had further releases are two ledgers, and both count.

    Raises:
        TotalError: naming the copy and the longer ledger.
    """
    for (file, ledger), (other, longer) in itertools.permutations(ledgers.items(), 2):
        whole = len(ledger.releases), ledger.heads[-1]
        if ledger.id == longer.id and longer.contains(*whole):
            raise TotalError(f"{file} is a copy of {other}; leave it out")


def _common_delta(ledgers: dict[Path, Verified]) -> float:
    """Return the δ that all ledgers state.

    Raises:
        TotalError: the ledgers state several, or a ledger states none.
    """
    stated = {ledger.header.get("delta") for ledger in ledgers.values()}
    delta = stated.pop() if len(stated) == 1 else None
    if not isinstance(delta, float):
        raise TotalError("the ledgers do not state one δ; give one for the total with --delta")
    return delta


def _cost(file: Path, ledger: Verified, delta: float) -> LedgerCost:
    """Return one ledger of a total, with ε of its releases alone."""
    header = ledger.header
    relation = header.get("neighbouring_relation", relation_of_releases(ledger.releases))
    return LedgerCost(
        path=file,
        ledger=ledger,
        unit=unit_of(str(header.get("unit", _UNKNOWN))),
        neighbouring_relation=str(relation),
        doubt=doubt_of(ledger),
        epsilon=total_epsilon(charges_of(ledger.releases, ledger.groups), delta),
    )


def _check_same(rows: Sequence[LedgerCost]) -> None:
    """Refuse ledgers of different units or neighbouring relations.

    Raises:
        TotalError: naming two ledgers that differ.
    """
    first = rows[0]
    for row in rows[1:]:
        pairs = [(first.neighbouring_relation, row.neighbouring_relation)]
        if _UNKNOWN not in (first.unit, row.unit):
            pairs.append((first.unit, row.unit))
        for known, other in pairs:
            if known != other:
                raise TotalError(
                    f"{first.path} counts {known}, {row.path} counts {other}: their ε do not add"
                    " up; total each kind alone"
                )


def describe_total(total: TotalCost) -> dict[str, Any]:
    """Return a total as plain values that JSON can hold."""
    first = total.rows[0]
    runs = []
    for row in total.rows:
        run = {
            "ledger": str(row.path),
            "plan": row.ledger.header["plan_hash"],
            "releases": len(row.ledger.releases),
            "epsilon": json_number(row.epsilon),
            "certified": not row.doubt,
        }
        runs.append(run)
    return {
        "epsilon": json_number(total.epsilon),
        "delta": total.delta,
        "certified": not total.doubts,
        "unit": first.unit,
        "neighbouring_relation": first.neighbouring_relation,
        "runs": runs,
    }
