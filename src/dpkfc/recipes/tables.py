"""The tables of `dpkfc methods`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dpkfc.recipes.methods import METHODS, Method

__all__ = ["method_sheet", "methods_table"]


_SHOWN = {
    "acts on": "acts", "side data": "side_data", "extra privacy cost": "privacy", "state": "state", "cost of a step": "cost",
    "source": "source",
}  # fmt: skip
_NARROW = 110  # columns of a terminal below which words of the whole table would be cut


def methods_table(width: int = 140) -> Table:
    """Every method, one a row; what each keeps and costs only where there is room.

    Args:
        width: of the console, in characters.
    """
    table = Table(header_style="bold", show_lines=True)
    names = ["acts on", "side data", "source"] if width < _NARROW else list(_SHOWN)
    for column in ("method", *names):
        table.add_column(column, overflow="fold", min_width=max(map(len, METHODS)) if column == "method" else None)
    for row in METHODS.values():
        table.add_row(f"[bold]{row.name}[/bold]", *(getattr(row, _SHOWN[name]) for name in names))
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
