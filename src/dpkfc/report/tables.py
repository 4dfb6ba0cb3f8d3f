"""Tables of ε that commands print: of a plan, a sampling rate, several ledgers or a budget."""

from __future__ import annotations

import math
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from dpkfc.config import Plan, PrivacyConfig, count_steps
from dpkfc.data.sampling import Poisson
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.cross_check import cross_check
from dpkfc.report.text import round_up
from dpkfc.report.total import TotalCost


def total_table(total: TotalCost) -> Table:
    """Return each ledger with its ε, and the total."""
    first = total.rows[0]
    title = f"ε at δ = {total.delta:g} for {first.unit} ({first.neighbouring_relation})"
    table = Table(title=title, title_justify="left", show_footer=True)
    count = sum(len(row.ledger.releases) for row in total.rows)
    table.add_column("run", footer="total", overflow="fold")
    table.add_column("releases", footer=f"{count:,}", justify="right")
    table.add_column("ε", footer=round_up(total.epsilon), justify="right")
    table.add_column("certified", footer="NO" if total.doubts else "yes")
    for row in total.rows:
        table.add_row(
            escape(str(row.path)),
            f"{len(row.ledger.releases):,}",
            round_up(row.epsilon),
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
        path: the file of the budget. A missing file is created with the following values.
        epsilon: of all runs.
        delta: of all runs.
        people: whose data the budget protects.
        moved: the old and the new path of a ledger that was moved.

    Returns:
        The table, a row for each charge.

    Raises:
        BudgetError, ValueError: as `Budget`.
        LedgerError: as `Budget.move`.
    """
    budget = Budget(path, epsilon=epsilon, delta=delta, people=people)
    if moved is not None:
        budget.move(*moved)
    title = f"{escape(budget.people)}: ε = {budget.epsilon:g} at δ = {budget.delta:g}"
    table = Table(title=title, title_justify="left", show_footer=True)
    left = max(0.0, budget.epsilon - budget.spent)
    table.add_column("charged", footer="left")
    table.add_column("ledger", overflow="fold")
    table.add_column("ε alone", justify="right")
    # Rounded down: a printed rest is never above the true one.
    table.add_column("total ε", footer=f"{math.floor(left * 1000) / 1000:.3f}", justify="right")
    for charge in budget.charges:
        table.add_row(
            charge.when[:16].replace("T", " "),
            escape(charge.path or "in memory"),
            round_up(charge.epsilon),
            round_up(charge.after),
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
        "protected unit": plan.privacy_unit,
        "sampler": plan.sampler.describe()["name"],
        **({"bands of correlated noise": f"{plan.bands}"} if plan.bands > 1 else {}),
        **{
            f"releases for {kind.purpose}": f"{kind.count}, σ = {kind.noise_multiplier:.5f}; in ε"
            for kind in plan.extra_releases
        },
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
        steps: number of steps, or None. Give exactly one of `epochs` and `steps`.
        delta: δ.

    Returns:
        The table, with ε by each accountant.

    Raises:
        ValueError: a value outside its range; both or neither of `epochs` and `steps`.
    """
    # `PrivacyConfig` refuses both, neither, and values that are not positive.
    PrivacyConfig(expected_batch_size=1, epochs=epochs, steps=steps)
    sampler = Poisson(rate, max(1, round(1 / rate)) if rate > 0 else 1)
    steps = count_steps(steps, epochs, 1, rate)
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
        # RDP treats every sampler and δ, PLD neither replacement nor a δ below its rounding.
        text = "does not apply to this sampler" if relation == "replace_one" else "cannot resolve δ"
        if epsilon is not None:
            text = f"[bold]{round_up(epsilon)}[/bold]"
        table.add_row(f"ε by {accountant.upper()}", text)
    table.add_row("neighbouring relation", relation)
    return table
