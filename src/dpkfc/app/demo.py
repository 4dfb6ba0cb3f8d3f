"""Demonstrate DP-SGD and DP-KFC side by side on the digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpkfc.app import picture_style, run_pictures
from dpkfc.app.methods import METHOD_LABELS
from dpkfc.app.run_folder import RunFolder

if TYPE_CHECKING:
    from dpkfc.app.results import Result

COMPARED = ("dp-sgd", "dp-kfc")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Result of the demo.

    Attributes:
        folder: holds one run folder for each method, and the comparison.
        results: method to result.
    """

    folder: Path
    results: dict[str, Result]


def demo(chosen: dict[str, Any], out: str = "", console: Console | None = None) -> Demo:
    """Train both methods on the digits that come with scikit-learn.

    Args:
        chosen: settings that replace the recipe's defaults for both methods.
        out: folder; empty for a new one below runs/.
        console: where progress is drawn.

    Raises:
        DatasetError: scikit-learn is not installed.
        RunFolderError: the folder cannot be written.
    """
    from dpkfc.app.recipes.catalogue import run_config
    from dpkfc.app.train import run

    folder = RunFolder.make(out, "demo")
    results: dict[str, Result] = {}
    curves = []
    for method in COMPARED:
        run_folder = str(folder.path / method)
        settings = {"recipe": "digits", **chosen, "method": method, "out": run_folder}
        result = run(run_config(settings), console)
        results[method] = result
        if result.interrupted:
            return Demo(folder=folder.path, results=results)
        caption = f"digits: {result.curve.caption}"
        curves.append(replace(result.curve, label=METHOD_LABELS[method], caption=caption))
    title = "The same privacy budget, with and without the preconditioner"
    figure = run_pictures.comparison(curves, title, curves[0].caption)
    picture_style.save(figure, folder.path / "comparison.png")
    return Demo(folder=folder.path, results=results)
