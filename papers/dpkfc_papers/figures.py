"""The figures by name: which cells each is made of, and how it is drawn and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.app.html.groups import collect
from dpkfc.app.picture_style import save
from dpkfc.app.run_folder import write_text
from dpkfc.app.toml import nearest
from dpkfc.app.tuning.runs import Plain, Run, StudyError
from dpkfc.app.tuning.study_progress import Task
from dpkfc_papers import draw, measurements, noise_sweep, sensitivity
from dpkfc_papers.public_examples import study_place
from dpkfc_papers.store import Listed, Store
from dpkfc_papers.tables import run_cells

COURSE = "dpkfc_papers.measurements:measure_course"
MEAN_FIELD = "dpkfc_papers.measurements:measure_mean_field"
# The training that is measured; a checkpoint at every evaluation.
MODELS: Mapping[str, Mapping[str, Plain]] = {
    "mnist-mlp": {"max_rank": 64, "steps": 200, "evaluate_every": 100, "expected_batch_size": 256},
    "mnist-cnn": {"max_rank": 64, "steps": 100, "evaluate_every": 50, "expected_batch_size": 256},
    "mnist-vit": {"max_rank": 64, "steps": 200, "evaluate_every": 100, "expected_batch_size": 256},
}
_SMOKE: Mapping[str, Plain] = {"smoke": True, "steps": 3, "evaluate_every": 3, "accountant": "rdp"}
Row = Mapping[str, Any]
# What a checkpoint holds beside its scores, and these.
_MEASURED = ("layers", "signal", "density")
_SCORES = ("step", "accuracy", "epsilon")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a paper.

    Attributes:
        name: as of `dpkfc reproduce NAME`.
        also: other names it has: the paper shows some things several times.
        title: paper, number and subject.
        runs: its cells; given whether they are to be small.
        privacy: what is said of it; empty where oracles are in it.
        drawn: from finished rows to a picture.
        together: whether one picture is made of all rows, or one of each.
        kept: of a row, what the JSON file holds.
    """

    name: str
    also: tuple[str, ...] = ()
    title: str
    runs: Callable[[bool], list[Run]]
    privacy: str = ""
    drawn: Callable[[Any], Any]
    together: bool = False
    kept: Callable[[Row], Any]


@dataclass(frozen=True)
class Made:
    """What became of a figure: the files that were written, and what is missing."""

    files: tuple[Path, ...]
    missing: tuple[str, ...]


def _courses(small: bool) -> list[Run]:
    if small:
        return [Run.make("digits", "dp-kfc", _SMOKE, measure=COURSE)]
    return [
        Run.make(recipe, "dp-kfc", training, measure=COURSE) for recipe, training in MODELS.items()
    ]


def _grid(small: bool) -> list[Run]:
    if small:
        return sensitivity.landscape_cells("digits", _SMOKE, small=True)
    digits = sensitivity.landscape_cells("digits", {"epsilon": 2.0, "accountant": "rdp"})
    mnist = sensitivity.landscape_cells("mnist-cnn", {"epsilon": 2.0, "epochs": 1.0})
    return [*digits, *mnist]


def _theory(small: bool) -> list[Run]:
    return [Run.make("digits", "dp-sgd", {"smoke": True} if small else {}, measure=MEAN_FIELD)]


def _select_layers(*names: str) -> Callable[[Row], Any]:
    def select(row: Row) -> Any:
        selected = []
        for checkpoint in row["checkpoints"]:
            layers = {}
            for name, layer in checkpoint["layers"].items():
                layers[name] = {k: layer[k] for k in ("module", "sizes", *names)}
            others = {k: v for k, v in checkpoint.items() if k not in _MEASURED}
            selected.append({**others, "layers": layers})
        return selected

    return select


def _select_checkpoints(name: str) -> Callable[[Row], Any]:
    def select(row: Row) -> Any:
        selected = []
        for checkpoint in row["checkpoints"]:
            wanted = (*_SCORES, name)
            selected.append({k: v for k, v in checkpoint.items() if k in wanted})
        return selected

    return select


FIGURES: dict[str, Figure] = {
    one.name: one
    for one in (
        Figure(
            name="kfc-fig1",
            title="DP-KFC, Fig. 1: signal-to-noise ratio of each layer",
            runs=_courses,
            drawn=draw.signal,
            kept=_select_checkpoints("signal"),
        ),
        Figure(
            name="kfc-fig2",
            also=("kfc-fig6",),
            title="DP-KFC, Figs 2 and 6: spectra of A and G, undamped",
            runs=_courses,
            drawn=draw.spectra,
            kept=_select_layers("spectra"),
        ),
        Figure(
            name="kfc-fig3",
            also=("kfc-fig8", "kfc-fig9"),
            runs=_courses,
            drawn=draw.tracking,
            kept=_select_layers("tracking"),
            title="DP-KFC, Figs 3, 8 and 9: similarity of A, G and A ⊗ G to the oracle, undamped"
            " and as in the authors' code",
        ),
        Figure(
            name="kfc-fig7",
            title="DP-KFC, Fig. 7: Lanczos spectrum of the whole Fisher matrix",
            runs=_courses,
            drawn=draw.densities,
            kept=_select_checkpoints("density"),
        ),
        Figure(
            name="kfc-fig10",
            also=("kfc-fig11",),
            title="DP-KFC, Figs 10 and 11: accuracy over settings, and their importance",
            runs=_grid,
            privacy=sensitivity.LANDSCAPE_NOT_PRIVATE,
            drawn=draw.landscape,
            together=True,
            kept=lambda row: {
                name: row[name] for name in ("accuracy", "measured_on", "epsilon", "delta", "steps")
            },
        ),
        Figure(
            name="kfc-mean-field",
            title="DP-KFC, section 3.3 and appendix F: mean-field theory next to random networks",
            runs=_theory,
            privacy="nothing here is of private examples",
            drawn=draw.mean_field,
            kept=lambda row: {
                name: row[name] for name in ("networks", "contraction", "seeds", "examples")
            },
        ),
        Figure(
            name="kfc-theorem-5.4",
            title="DP-KFC, theorem 5.4: the realised map of every layer",
            runs=_courses,
            drawn=draw.realised_map,
            kept=_select_layers("realised"),
        ),
        Figure(
            name="disk-fig6a",
            also=("disk-fig6",),
            title="DiSK, Fig. 6a: linear regression under more and more noise",
            runs=noise_sweep.sweep_cells,
            privacy="nothing here is of private examples beyond what ε covers",
            drawn=draw.noise_sweep,
            together=True,
            kept=lambda row: {
                name: row.get(name)
                for name in ("accuracy", "loss", "measured_on", "epsilon", "delta", "steps")
            },
        ),
    )
}


# The figures by each of their names.
FIGURE_OF = {name: figure for figure in FIGURES.values() for name in (figure.name, *figure.also)}


def find(name: str) -> Figure:
    """Return the figure of a name.

    Raises:
        StudyError: no figure has the name; the nearest one is named.
    """
    if name not in FIGURE_OF:
        raise StudyError(
            f"unknown figure {name!r}; {nearest(name, FIGURES)} (dpkfc reproduce --list shows all)"
        )
    return FIGURE_OF[name]


def reproduce_figures(
    names: Sequence[str],
    folder: Path,
    *,
    results: Path | None = None,
    data_dir: str = "",
    small: bool = False,
    **limits: Any,
) -> dict[str, Made]:
    """Measure the data of figures; write `NAME.json` and `NAME-RECIPE.png` for each.

    Args:
        names: of figures.
        folder: for results, ledgers and pictures; an earlier one is taken up again.
        results: file of the rows; None for `results.json` in the folder.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
        small: seconds instead of minutes, on the digits: to see that everything goes together.
        limits: `console`, `workers` and `end` of `run_cells`.

    Raises:
        StudyError: an unknown figure, a folder that cannot be used, or a full disk.
        KeyboardInterrupt: interrupted; figures of what has finished are written before.
    """
    figures = list({figure.name: figure for figure in map(find, names)}.values())
    runs = [run for figure in figures for run in figure.runs(small)]
    with Store(results or folder / "results.json") as store:
        source = Listed(map(Task, runs), store)
        made: dict[str, Made] = {}

        def report() -> None:
            for figure in figures:
                made[figure.name] = _make_figure(figure, folder, store, source.failures, small)

        run_cells(source, study_place(folder, data_dir), store, report, **limits)
    return made


def _make_figure(
    figure: Figure, folder: Path, store: Store, failures: Mapping[str, str], small: bool
) -> Made:
    rows: list[Row] = []
    reasons: dict[str, None] = {}
    for run in figure.runs(small):
        row = store.get(run)
        if row is None:
            reasons[f"{run.recipe}: {failures.get(run.hash, 'not yet run')}"] = None
        else:
            rows.append(row)
    missing = tuple(reasons)
    if not rows:
        return Made((), missing)
    files = [_json(figure, folder, rows, missing)]
    for recipe, group in collect(rows, lambda row: row["run"]["recipe"]).items():
        name = figure.name if figure.drawn is draw.mean_field else f"{figure.name}-{recipe}"
        picture = figure.drawn(group if figure.together else group[-1])
        files.append(save(picture, folder / f"{name}.png"))
    return Made(tuple(files), missing)


def _json(figure: Figure, folder: Path, rows: Sequence[Row], missing: Sequence[str]) -> Path:
    content: dict[str, Any] = {
        "kind": "dpkfc figure",
        "version": 1,
        "name": figure.name,
        "title": figure.title,
        "private": figure.privacy or measurements.NOT_PRIVATE,
        "missing": list(missing),
        "rows": [
            {
                "run": row["run"],
                "hash": row["hash"],
                "sizes": row.get("sizes"),
                "values": figure.kept(row),
            }
            for row in rows
        ],
    }
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    return write_text(folder / f"{figure.name}.json", text)
