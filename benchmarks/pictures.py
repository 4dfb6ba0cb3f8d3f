"""Sheets for the pictures of the documentation, which all have one style and one width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# In inches. At 150 dots an inch letters are read on a page of 1400 pixels and on a telephone.
WIDTH = 5.4


def sheet(rows: int = 1, columns: int = 1, *, height: float, **options: Any) -> Any:
    """Return a figure in the style of all pictures, and its panels `[rows, columns]`.

    Args:
        rows: of panels.
        columns: of panels.
        height: in inches.
        options: of `matplotlib.pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dpkfc.app.plots import STYLE

    plt.style.use(STYLE)
    return plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)


def finish(figure: Any, path: Path, columns: int = 0) -> None:
    """Write a figure, with one legend of all panels below them.

    Args:
        figure: of `sheet`.
        path: of a PNG file.
        columns: of the legend; 0 for none.
    """
    import matplotlib.pyplot as plt

    if columns:
        handles = {}
        for panel in figure.axes:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"optimize": True})
    plt.close(figure)
