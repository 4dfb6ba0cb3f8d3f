"""Tables of ε: of a plan by every accountant, of several ledgers together, and of a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dpkfc.config import Plan, PrivacyConfig
from dpkfc.data.sampling import Poisson
from dpkfc.privacy.accounting import cross_check, total_epsilon
from dpkfc.privacy.budget import Budget, unit_of
from dpkfc.privacy.ledger import Verified
from dpkfc.report.numbers import json_number, rounded_up
from dpkfc.report.verify import charges_of, doubt_of, relation_of_releases, verify_history

_UNKNOWN = "not stated"
_SHOWN = 12  # characters of a hash


class TotalError(ValueError):
    """Ledgers that cannot be composed."""


@dataclass(frozen=True, kw_only=True)
class LedgerCost:
    """One ledger of a total.

    Attributes:
        path: the file.
        ledger: what it says.
        unit: whom it protects.
        neighbouring_relation: of its plan.
        doubt: why its ε is no guarantee, "" if it is one.
        epsilon: of its releases alone, at the δ of the total.
    """

    path: Path
    ledger: Verified
    unit: str
    neighbouring_relation: str
    doubt: str
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Total:
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
        """Why the total is no guarantee; empty if it is one."""
        return [f"{row.path}: {row.doubt}" for row in self.rows if row.doubt]


def total_of_ledgers(paths: Sequence[Path], delta: float | None = None) -> Total:
    """Verify ledgers and compose all their releases.

    Args:
        paths: ledgers, run folders, or folders of run folders.
        delta: δ of the total; None takes the one that all ledgers state.

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
    charges = [charge for row in rows for charge in charges_of(row.ledger.releases)]
    return Total(rows=rows, delta=delta, epsilon=total_epsilon(charges, delta))


def _find_ledgers(path: Path) -> list[Path]:
    """Return the ledger that a path names, or those of the runs in a folder."""
    if path.is_file():
        return [path]
    if (path / "ledger.jsonl").is_file():
        return [path / "ledger.jsonl"]
    found = sorted(path.glob("*/ledger.jsonl"))
    if not found:
        raise TotalError(f"{path} is no ledger and holds none; name run folders or ledger files")
    return found


def _check_copies(ledgers: dict[Path, Verified]) -> None:
    """Refuse a ledger whose whole history is in another one; copies that went apart both count."""
    known = list(ledgers.items())
    for file, ledger in known:
        for other, longer in known:
            count = len(ledger.releases)
            if other == file or ledger.id != longer.id or count >= len(longer.heads):
                continue
            if longer.heads[count] == ledger.heads[-1]:
                raise TotalError(f"{file} is a copy of {other}; leave it out")


def _common_delta(ledgers: dict[Path, Verified]) -> float:
    stated = {ledger.header.get("delta") for ledger in ledgers.values()}
    delta = stated.pop() if len(stated) == 1 else None
    if not isinstance(delta, float):
        raise TotalError("the ledgers do not state one δ; give that of the total with --delta")
    return delta


def _cost(file: Path, ledger: Verified, delta: float) -> LedgerCost:
    header = ledger.header
    relation = header.get("neighbouring_relation", relation_of_releases(ledger.releases))
    return LedgerCost(
        path=file,
        ledger=ledger,
        unit=unit_of(str(header.get("unit", _UNKNOWN))),
        neighbouring_relation=str(relation),
        doubt=doubt_of(ledger),
        epsilon=total_epsilon(charges_of(ledger.releases), delta),
    )


def _check_same(rows: Sequence[LedgerCost]) -> None:
    for row in rows[1:]:
        first = rows[0]
        pairs = [(first.neighbouring_relation, row.neighbouring_relation)]
        if _UNKNOWN not in (first.unit, row.unit):
            pairs.append((first.unit, row.unit))
        for known, other in pairs:
            if known != other:
                raise TotalError(
                    f"{first.path} counts {known}, {row.path} counts {other}: their ε do not add"
                    " up; total each kind alone"
                )


def to_json(total: Total) -> dict[str, Any]:
    """Return a total as plain values that JSON can hold."""
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
        "unit": total.rows[0].unit,
        "neighbouring_relation": total.rows[0].neighbouring_relation,
        "runs": runs,
    }


def total_table(total: Total) -> Table:
    """Return each ledger with its ε, and the total."""
    first = total.rows[0]
    title = f"ε at δ = {total.delta:g} for {first.unit} ({first.neighbouring_relation})"
    table = Table(title=title, header_style="bold", title_justify="left", show_footer=True)
    count = sum(len(row.ledger.releases) for row in total.rows)
    table.add_column("run", footer="total", overflow="fold")
    table.add_column("releases", footer=f"{count:,}", justify="right")
    epsilon = rounded_up(total.epsilon)
    table.add_column("ε", footer=epsilon, justify="right")
    table.add_column("certified", footer="NO" if total.doubts else "yes")
    for row in total.rows:
        table.add_row(
            escape(str(row.path)),
            f"{len(row.ledger.releases):,}",
            rounded_up(row.epsilon),
            "NO" if row.doubt else "yes",
        )
    return table


def budget_table(
    path: Path,
    epsilon: float | None = None,
    delta: float | None = None,
    people: str = "",
    moved: tuple[Path, Path] | None = None,
) -> Table:
    """Return the charges of a budget, and what is left of it.

    Args:
        path: of its file, begun with the following values where there is none.
        epsilon: of all runs.
        delta: of all runs.
        people: whose data it is.
        moved: the paths of a ledger that was moved, before and now.

    Raises:
        BudgetError, ValueError: as `Budget`.
        LedgerError: as `Budget.move`.
    """
    budget = Budget(path, epsilon=epsilon, delta=delta, people=people)
    if moved is not None:
        budget.move(*moved)
    charges = budget.charges
    spent = budget.spent
    title = f"{escape(budget.people)}: ε = {budget.epsilon:g} at δ = {budget.delta:g}"
    table = Table(title=title, header_style="bold", title_justify="left", show_footer=True)
    left = max(0.0, budget.epsilon - spent)
    table.add_column("charged", footer="left")
    table.add_column("ledger", overflow="fold")
    table.add_column("plan")
    table.add_column("releases", justify="right")
    table.add_column("ε alone", justify="right")
    # Rounded down: a printed rest is never above the true one.
    table.add_column("total ε", footer=f"{math.floor(left * 1000) / 1000:.3f}", justify="right")
    for charge in charges:
        table.add_row(
            charge.when[:16].replace("T", " "),
            escape(charge.path or "in memory"),
            charge.plan[:_SHOWN],
            f"{charge.releases:,}",
            rounded_up(charge.epsilon),
            rounded_up(charge.after),
        )
    return table


# -- one plan, by every accountant -----------------------------------------------------------------


def plan_table(plan: Plan) -> Table:
    """Return the table of a plan and its ε."""
    rows = {
        "noise multiplier σ": f"{plan.noise_multiplier:.5f}",
        "steps": f"{plan.steps:,}",
        "expected batch size B": f"{plan.expected_batch_size:,}",
        "dataset size N": f"{plan.dataset_size:,}",
        "sampler": plan.sampler.describe()["name"],
        "δ": f"{plan.delta:g}",
        "standard deviation of the noise": (
            f"{plan.stddev:.5g} on a sum clipped to {plan.max_grad_norm:g}"
        ),
    }
    return _accountants_table(rows, plan.cross_check(), plan.neighbouring_relation)


def rate_table(
    sigma: float, rate: float, *, epochs: float | None, steps: int | None, delta: float
) -> Table:
    """Return the table of Poisson sampling at a rate, without N and B.

    Args:
        sigma: noise multiplier.
        rate: q in (0, 1].
        epochs: expected passes over the data, or None.
        steps: number of steps, or None; exactly one of the two is given.
        delta: δ.

    Raises:
        ValueError: a value outside its range; both or neither of `epochs` and `steps`.
    """
    # The config refuses both, neither, and values that are not positive.
    PrivacyConfig(expected_batch_size=1, epochs=epochs, steps=steps)
    sampler = Poisson(rate, max(1, round(1 / rate)) if rate > 0 else 1)
    if steps is None:
        steps = max(1, round((epochs or 0.0) / rate))
    relation = sampler.neighbouring_relation
    epsilons = cross_check(sampler.event(sigma), steps, delta, relation)
    rows = {
        "sampling rate q": f"{rate:g}",
        "steps": f"{steps:,}",
        "σ": f"{sigma:g}",
        "δ": f"{delta:g}",
    }
    return _accountants_table(rows, epsilons, relation)


def _accountants_table(
    rows: dict[str, str], epsilons: dict[str, float | None], relation: str
) -> Table:
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    for accountant, epsilon in epsilons.items():
        text = "does not apply to this sampler"
        if epsilon is not None:
            text = f"[bold]{rounded_up(epsilon)}[/bold]"
        table.add_row(f"ε by {accountant.upper()}", text)
    table.add_row("neighbouring relation", relation)
    return table
