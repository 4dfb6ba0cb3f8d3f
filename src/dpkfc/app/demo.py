"""DP-SGD and DP-KFC side by side on the digits, under the same budget."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dpkfc.app import plots
from dpkfc.app.preparation import LABELS, Result
from dpkfc.app.progress import Console
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.train import run

METHODS = ("dp-sgd", "dp-kfc")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the demo came to.

    Attributes:
        folder: with one run folder a method and the comparison below it.
        results: method to result.
    """

    folder: Path
    results: dict[str, Result]

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped."""
        return any(result.interrupted for result in self.results.values())


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
    folder = RunFolder.create(out) if out else RunFolder.fresh("runs", f"demo-{datetime.now():%Y%m%d-%H%M%S}")
    results: dict[str, Result] = {}
    for method in METHODS:
        settings = {"recipe": "digits", **chosen, "method": method, "out": str(folder.path / method)}
        results[method] = run(run_config(settings), console)
        if results[method].interrupted:
            return Demo(folder=folder.path, results=results)
    curves = [_named(LABELS[method], result) for method, result in results.items()]
    first = curves[0]
    figure = plots.comparison(curves, "The same privacy budget, with and without the preconditioner", first.caption)
    plots.save(figure, folder.path / "comparison.png")
    return Demo(folder=folder.path, results=results)


def _named(label: str, result: Result) -> plots.Curve:
    curve = result.curve
    return plots.Curve(
        label=label,
        steps=curve.steps,
        accuracy=curve.accuracy,
        caption=f"digits: {curve.caption}",
        measured_on=curve.measured_on,
        stamp=curve.stamp,
    )
