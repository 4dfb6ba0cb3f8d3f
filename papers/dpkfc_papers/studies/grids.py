"""Searches whose every point runs to its end on a validation split; what wins is judged on the test
set, seed by seed.

    python -m dpkfc_papers.studies.grids --grid mlp --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.grids --grid mlp --table  # the Markdown table

The grids are in `grids.toml`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc.app.tuning.study_progress import Task
from dpkfc_papers.store import Listed
from dpkfc_papers.studies import harness

RESULTS = harness.RESULTS / "grids"
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Points by the name of an arm, each a method and settings over the common ones."""

    recipe: str
    arms: Mapping[str, tuple[str, Sequence[Settings]]]
    common: Settings
    keys: Mapping[str, str] = field(default_factory=dict)  # of arms that other pages show too
    seeds: tuple[int, ...] = (0, 1, 2)
    tuned_with: tuple[int, ...] = (100,)  # seeds of the points; tests have others
    validation: int = 5000  # training examples that judge the points
    measure: str = ""  # what makes a row, as of `Run`

    def run(self, arm: str, point: Settings, seed: int, test: bool, measure: str = "") -> Any:
        from dpkfc.app.tuning.runs import Run

        settings = {**self.common, **point}
        if not test:
            settings["validation_size"] = self.validation
        return Run.make(
            self.recipe,
            self.arms[arm][0],
            settings,
            seed=seed,
            evaluate_on="test" if test else "validation",
            measure=measure or self.measure,
        )

    def points(self, store: Any, arm: str) -> list[tuple[Settings, list[dict[str, Any]]]]:
        """Those that have been run, with a row for each of their seeds, the best in the mean
        first.
        """
        found = []
        for point in self.arms[arm][1]:
            rows = [store.get(self.run(arm, point, seed, False)) for seed in self.tuned_with]
            known = [row for row in rows if row is not None]
            if known:
                found.append((point, known))
        return sorted(found, key=lambda one: -_mean(one[1]))

    def cells(self, store: Any, test: bool) -> list[tuple[str, Any]]:
        """All points, or the tests of the arms whose every point has been run; seed by seed."""
        if not test:
            return [
                (arm, self.run(arm, point, seed, False))
                for seed in self.tuned_with
                for arm, (_, points) in self.arms.items()
                for point in points
            ]
        won = {arm: self.points(store, arm)[0][0] for arm in self.arms if self.is_done(store, arm)}
        return [
            (arm, self.run(arm, point, seed, True))
            for seed in self.seeds
            for arm, point in won.items()
        ]

    def tests(self, store: Any, arm: str) -> list[dict[str, Any]]:
        """Rows of an arm's best point on the test set; empty before its points are done."""
        if not self.is_done(store, arm):
            return []
        best = self.points(store, arm)[0][0]
        rows = (store.get(self.run(arm, best, seed, True)) for seed in self.seeds)
        return [row for row in rows if row is not None]

    def is_done(self, store: Any, arm: str) -> bool:
        """Whether every point of an arm has been run with every seed."""
        found = self.points(store, arm)
        return sum(len(rows) for _, rows in found) == len(self.arms[arm][1]) * len(self.tuned_with)


def _mean(rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.mean(100 * row["accuracy"] for row in rows)


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean accuracy, and of several runs its 95 % interval and their number."""
    more = f" ({len(rows)})" if len(rows) > 1 else ""
    return harness.interval([100 * row["accuracy"] for row in rows]) + more


def _combine(row: Mapping[str, Any]) -> Iterator[Settings]:
    """Yield all combinations of the lists of a row."""
    ranges = [value if isinstance(value, list) else [value] for value in row.values()]
    for values in itertools.product(*ranges):
        yield dict(zip(row, values, strict=True))


def _read_grid(content: Mapping[str, Any]) -> Grid:
    arms, keys = {}, {}
    for name, arm in content["arms"].items():
        arms[name] = arm["method"], [point for row in arm["points"] for point in _combine(row)]
        if "key" in arm:
            keys[name] = arm["key"]
    more = {name: tuple(content[name]) for name in ("seeds", "tuned_with") if name in content}
    return Grid(**{**content, **more, "arms": arms, "keys": keys})


CONTENT = harness.read_toml(Path(__file__).with_name("grids.toml"))
GRIDS = {name: _read_grid(content) for name, content in CONTENT.items()}


def table(name: str, store: Any) -> str:
    grid, lines = GRIDS[name], []
    for arm, (_, points) in grid.arms.items():
        found = grid.points(store, arm)
        if not found:
            continue
        best, rows = found[0]
        tests = grid.tests(store, arm)
        begun = f"{len(found)}" if len(found) == len(points) else f"{len(found)} of {len(points)}"
        lines.append(
            [arm, begun, _spread(rows), _spread(tests) if tests else "–", _describe_point(best)]
        )
    tested = f"test %, ε = {grid.common['epsilon']:g} (seeds)"
    return harness.markdown(["method", "points", "best validation %", tested, "settings"], lines)


def every_point(name: str, store: Any) -> str:
    """All points of a grid, the best of an arm first."""
    grid = GRIDS[name]
    lines = [
        [
            arm,
            _describe_point(point),
            _spread(rows),
            f"{rows[0]['noise_multiplier']:.2f}",
            str(rows[0]["steps"]),
        ]
        for arm in grid.arms
        for point, rows in grid.points(store, arm)
    ]
    return harness.markdown(["method", "settings", "validation %", "σ", "steps"], lines)


def _describe_point(point: Settings) -> str:
    return ", ".join(
        f"{name} = {value}" if isinstance(value, str) else f"{name} = {value:g}"
        for name, value in point.items()
    )


def make_runs(
    path: Path, stages: Callable[[Any], Iterable[Iterable[Any]]], folder: Path, data_dir: str
) -> None:
    """Make the runs that are missing; each is on the disk before the next starts.

    Args:
        path: of the results.
        stages: as of `make_missing`.
        folder: of ledgers.
        data_dir: of the data sets.
    """
    import torch

    from dpkfc_papers.public_examples import study_place
    from dpkfc_papers.store import make_missing

    torch.set_num_threads(1)

    def execute(run: Any) -> dict[str, Any]:
        started = time.process_time()
        row = run.find_measure()(run, study_place(folder, data_dir))
        return {**row, "cpu_seconds": round(time.process_time() - started, 1)}

    make_missing(path, stages, execute)


def main() -> int:
    from dpkfc_papers.store import Store

    parser = harness.cells_parser(__doc__)
    parser.add_argument("--grid", choices=list(GRIDS), required=True)
    parser.add_argument(
        "--points-only", action="store_true", help="the validation split alone, no tests yet"
    )
    arguments = parser.parse_args()
    name = arguments.grid
    grid, path = GRIDS[name], arguments.results or RESULTS / f"{name}.json"
    if not arguments.table:
        stages = (False,) if arguments.points_only else (False, True)

        def list_cells(store: Any) -> Iterator[Listed]:
            for tested in stages:
                cells = grid.cells(store, tested)
                yield Listed([Task(run, tag=None, label=label) for label, run in cells], store)

        out = arguments.out or Path(f"runs/grid-{name}")
        if code := harness.run_cells(list_cells, path, out, arguments):
            return code
    print(table(name, Store(path)))
    print(f"\n{every_point(name, Store(path))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
