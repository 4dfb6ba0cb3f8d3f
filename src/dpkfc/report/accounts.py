"""Tables of `dpkfc calibrate` and `dpkfc epsilon`: a plan, and its ε by every accountant."""

from __future__ import annotations

from rich.table import Table

from dpkfc.config import Plan, PrivacyConfig
from dpkfc.data.sampling import Poisson
from dpkfc.privacy import accounting
from dpkfc.report.numbers import rounded_up


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
    return _table(rows, plan.cross_check(), plan.neighbouring_relation)


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
    epsilons = accounting.cross_check(sampler.event(sigma), steps, delta, relation)
    rows = {
        "sampling rate q": f"{rate:g}",
        "steps": f"{steps:,}",
        "σ": f"{sigma:g}",
        "δ": f"{delta:g}",
    }
    return _table(rows, epsilons, relation)


def _table(rows: dict[str, str], epsilons: dict[str, float | None], relation: str) -> Table:
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
