"""The look of all pictures: colours, fonts, an empty figure, and the file of a finished one."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from matplotlib import rc_context, rc_params_from_file
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpkfc.app.run_folder import write_atomically

INK = "#22303c"
MUTED = "#6b7886"
GRID = "#e4e8ec"
PAPER = "#ffffff"
WARNING = "#b3261e"
# The style of all pictures, and its colours.
STYLE = Path(__file__).with_name("pictures.mplstyle")
_RC = rc_params_from_file(STYLE, use_default_template=False)
PALETTE: tuple[str, ...] = tuple(_RC["axes.prop_cycle"].by_key()["color"])
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = PALETTE
PLAIN, WHITENED, SPENT = GREY, VERMILION, BLUE
COLOURS = (PLAIN, WHITENED, SPENT, GREEN, PURPLE, ORANGE)
_P = ParamSpec("_P")
Item = TypeVar("Item")


def apply_style(draw: Callable[_P, Item]) -> Callable[_P, Item]:
    """Let a function draw in the style of all pictures, and leave the global style as it is."""

    @functools.wraps(draw)
    def draw_styled(*args: _P.args, **kwargs: _P.kwargs) -> Item:
        with rc_context(_RC):
            return draw(*args, **kwargs)

    return draw_styled


def make_figure(
    width: float, height: float, title: str = "", caption: str = "", stamp: str = ""
) -> Figure:
    """Return an empty figure with title, caption, and a stamp of a run without a certified ε."""
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    lines = textwrap.wrap(title, round(9.5 * width)) + textwrap.wrap(caption, round(12 * width))
    if lines:
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10, color=INK)
    if stamp:
        figure.text(
            0.5,
            0.5,
            stamp,
            fontsize=24,
            color=WARNING,
            alpha=0.16,
            rotation=20,
            ha="center",
            va="center",
            weight="bold",
        )
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG.

    Raises:
        RunFolderError: the path cannot be written.
    """
    return write_atomically(path, lambda part: figure.savefig(part, format="png"))
