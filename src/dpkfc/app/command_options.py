"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workers = Annotated[
    int | None, typer.Option(help="Cells at once, one core each; left out: every core.")
]
Budget = Annotated[
    float | None,
    typer.Option(help="Minutes; what would not end in time is not started, else stopped."),
]
DataDir = Annotated[
    str,
    typer.Option(
        help="Folder with the data sets; left out: $DPKFC_DATA, then Hugging Face datasets."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
SettingsFile = Annotated[Path | None, typer.Option(help="TOML file of settings; flags win.")]
DemoFolder = Annotated[
    str, typer.Option(help="Folder of the demo; a new one below runs/ when left out.")
]
