"""The tables of `dpkfc methods`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dpkfc.recipes.methods import METHODS, Method

__all__ = ["method_sheet", "methods_table"]


def methods_table() -> Table:
    """Every method, one a row."""
    table = Table(header_style="bold", show_lines=True)
    for column in ("method", "acts on", "side data", "extra privacy cost", "state", "cost of a step", "source"):
        table.add_column(column, overflow="fold")
    for row in METHODS.values():
        table.add_row(f"[bold]{row.name}[/bold]", row.acts, row.side_data, row.privacy, row.state, row.cost, row.source)
    return table


def method_sheet(method: Method) -> Table:
    """One method in full."""
    table = Table(show_header=False)
    settings = ", ".join(f"{name} = {value!r}" for name, value in method.settings.items()) or "the defaults"
    for what, text in (
        ("method", f"{method.name} ({method.label})"),
        ("equation", method.equation),
        ("acts on", method.acts),
        ("side data", method.side_data),
        ("extra privacy cost", method.privacy),
        ("state", method.state),
        ("cost of a step", method.cost),
        ("source", method.source),
        ("settings", settings),
        ("page", f"docs/methods/{method.page}"),
    ):
        table.add_row(what, Text(text))
    return table
