"""The tables of `dpkfc calibrate` and `dpkfc epsilon`: what a plan is, and its ε by every accountant."""

from __future__ import annotations

from rich.table import Table

from dpkfc.config import Plan, PrivacyConfig
from dpkfc.data.sampling import Poisson
from dpkfc.privacy import accounting
from dpkfc.report.numbers import rounded_up

__all__ = ["plan_table", "rate_table"]


def plan_table(plan: Plan) -> Table:
    """A plan and its ε."""
    rows = {
        "noise multiplier σ": f"{plan.noise_multiplier:.5f}",
        "steps": f"{plan.steps:,}",
        "expected batch size B": f"{plan.expected_batch_size:,}",
        "dataset size N": f"{plan.dataset_size:,}",
        "sampler": plan.sampler.describe()["name"],
        "δ": f"{plan.delta:g}",
        "standard deviation of the noise": f"{plan.stddev:.5g} on a sum clipped to {plan.max_grad_norm:g}",
    }
    return _table(rows, plan.cross_check(), plan.neighbouring_relation)


def rate_table(sigma: float, rate: float, *, epochs: float | None, steps: int | None, delta: float) -> Table:
    """ε of Poisson sampling at a rate, where neither N nor B is given.

    Args:
        sigma: noise multiplier.
        rate: q in (0, 1].
        epochs: expected passes over the data, or None.
        steps: number of steps, or None; exactly one of the two is given.
        delta: δ.

    Raises:
        ValueError: a value outside its range; both or neither of `epochs` and `steps`.
    """
    PrivacyConfig(expected_batch_size=1, epochs=epochs, steps=steps)  # refuses both, neither, and what is not positive
    sampler = Poisson(rate, max(1, round(1 / rate)) if rate > 0 else 1)
    count = steps if steps is not None else max(1, round((epochs or 0.0) / rate))
    checked = accounting.cross_check(sampler.event(sigma), count, delta, sampler.neighbouring_relation)
    rows = {"sampling rate q": f"{rate:g}", "steps": f"{count:,}", "σ": f"{sigma:g}", "δ": f"{delta:g}"}
    return _table(rows, checked, sampler.neighbouring_relation)


def _table(rows: dict[str, str], checked: dict[str, float | None], relation: str) -> Table:
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    for name, value_by in checked.items():
        text = "does not apply to this sampler" if value_by is None else f"[bold]{rounded_up(value_by)}[/bold]"
        table.add_row(f"ε by {name.upper()}", text)
    table.add_row("neighbouring relation", relation)
    return table
