"""Define `dpkfc methods`: what each method needs and costs."""

from __future__ import annotations

import re

from rich.table import Table
from rich.text import Text

from dpkfc.app.methods import METHODS, Method
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.terminal import open_console

# Columns, and the attributes of `Method` that they hold.
_COLUMNS = {
    "acts on": "acts",
    "side data": "side_data",
    "extra privacy cost": "privacy",
    "state": "state",
    "cost of a step": "cost",
    "source": "source",
}


def methods(
    name: str = "",
    /,
) -> None:
    """Show the methods that --method takes.

    Args:
        name: One method, with where it acts, what it keeps, its equation and its source.
    """
    if name:
        if name not in METHODS:
            raise ConfigError(f"unknown method {name!r}; {nearest(name, METHODS)}")
        open_console().print(method_sheet(METHODS[name]))
        return
    console = open_console()
    console.print(methods_table())
    console.print("Details of one: dpkfc methods NAME. --filter, --readout and --source combine.")


def methods_table() -> Table:
    """Return every method, one for each line of 80 columns: what it needs and what it costs."""
    table = Table(header_style="bold", show_edge=False)
    for column in ("method", "needs", "cost of a step (DP-SGD: 1)"):
        table.add_column(column, overflow="fold")
    for method in METHODS.values():
        # What follows the first clause is on the sheet of the method.
        cells = [re.split("[:;(]", text)[0] for text in (method.side_data, method.cost)]
        table.add_row(f"[bold]{method.name}[/bold]", *cells)
    return table


def method_sheet(method: Method) -> Table:
    """Return all that is known of one method."""
    table = Table(show_header=False)
    settings = [f"{name} = {value!r}" for name, value in method.settings.items()]
    rows = {
        "method": f"{method.name} ({method.label})",
        "equation": method.equation,
        **{column: getattr(method, name) for column, name in _COLUMNS.items()},
        "settings": ", ".join(settings) or "the defaults",
        "page": f"docs/methods/{method.page}",
    }
    for column, text in rows.items():
        table.add_row(column, Text(text))
    return table
