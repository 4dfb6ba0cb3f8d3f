"""What a page shows, read from run folders and results files; of each one that cannot be read, a line that says why."""

from __future__ import annotations

import base64
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc.app import plots
from dpkfc.app.html.text import command_of, delta_text, percent, show
from dpkfc.app.plots import Figures, SensitivityMap, read_map
from dpkfc.app.run_folder import Metrics, RunFolder
from dpkfc.app.settings import known_settings
from dpkfc.app.unpack_limit import UnpackedSizeError
from dpkfc.report.card import failed_checks
from dpkfc.report.numbers import number, plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# From `recipe`, `method` and `settings` (of a study's row also `seed`, `evaluate_on` and `hash`) to the settings that these two
# do not say by themselves.
Departures = Callable[[Mapping[str, Any]], Mapping[str, Any]]
CARD_FORMAT = 1
_MOST_BYTES, _PICTURE_BYTES, _POINTS, _MOST_TOLD = 64 * 2**20, 2 * 2**20, 240, 12
# Settings that do not decide what a run comes to, or are shown in a place of their own.
_ASIDE = {"recipe", "method", "seed", "epsilon", "delta", "eval_on", "out", "data_dir", "threads", "device", "num_workers"}
_ASIDE |= {"smoke", "max_physical_batch_size", "pad_to_multiple", "chosen_by", "evaluate_every", "test_mode"}
_PICTURES = {"signal_to_noise.png": "Signal-to-noise ratio of each layer", "spectra.png": "Spectra of the curvature factors"}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One run as a page shows it. Text is as it was found: whoever writes a page escapes it.

    Attributes:
        source: the file or folder it was read from.
        task: what was learned, as a rule the recipe; of a smoke run with these words, so that it shares nothing with others.
        method: what it is called in figures and tables.
        measured_on: what the score was measured on.
        score: what `accuracy` is.
        accuracy: of the delivered weights; not protected by ε.
        epsilon: spent.
        target: ε of the budget.
        delta: δ.
        sigma: noise multiplier.
        steps: releases.
        seconds: of training.
        seed: public seed.
        settings: what else decides the result, as far as recipe and method do not say it.
        smoke: a few steps on a slice of the data, whose score says nothing.
        marks: what is said against its guarantee; empty where it has one.
        against: whom the guarantee holds against, where it does not hold against everyone who sees the weights.
        curve: (step, score).
        spending: (step, ε).
        command: that trains it again; empty where none is known.
        config: settings as TOML, for a command that reads them.
        card: the privacy card.
        figures: of the curvature.
        pictures: title to a data URI of a PNG file.
    """

    source: str
    task: str
    method: str
    measured_on: str
    score: str = "accuracy"
    accuracy: float | None
    epsilon: float | None
    target: float | None = None
    delta: float | None = None
    sigma: float | None = None
    steps: int | None = None
    seconds: float | None = None
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    smoke: bool = False
    marks: Sequence[str] = ()
    against: str = ""
    curve: Sequence[tuple[float, float]] = ()
    spending: Sequence[tuple[float, float]] = ()
    command: str = ""
    config: str = ""
    card: Mapping[str, Any] | None = None
    figures: Figures | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table that a study has made: a tuning study, or a published table beside ours."""

    source: str
    title: str
    notes: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    commands: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of `dpkfc reproduce` that a page draws by itself: accuracy over settings."""

    source: str
    title: str
    notes: Sequence[str]
    maps: Sequence[SensitivityMap]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that was found.

    Attributes:
        runs: in the order given.
        sheets: in the same order.
        charts: in the same order.
        broken: (file or folder, why it is not shown).
        notes: what was left out on purpose, in words.
    """

    runs: Sequence[Shown]
    sheets: Sequence[Sheet] = ()
    charts: Sequence[Chart] = ()
    broken: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


def read_all(paths: Sequence[str | os.PathLike[str]], departures: Departures = lambda run: run["settings"]) -> Contents:
    """Read run folders, folders of run folders, and results files.

    Args:
        paths: of any of them; one that is named twice counts once.
        departures: leaves out of a run's settings what its recipe and method say; by default nothing.

    Raises:
        ValueError: nothing can be shown; why not is said of each, up to twelve.
    """
    held: list[Contents] = []
    broken: list[tuple[str, str]] = []
    for path in _unique(paths, broken):
        try:
            held.append(
                Contents(runs=[_run_folder(path, departures)]) if path.is_dir() else read_file(path, parsed(path), departures)
            )
        except ValueError as error:
            broken.append((str(path), plain(error)))
        except OSError as error:
            broken.append((str(path), plain(f"cannot be read ({error.strerror or error})")))
    found = Contents(
        runs=[run for one in held for run in one.runs], sheets=[sheet for one in held for sheet in one.sheets],
        charts=[chart for one in held for chart in one.charts], broken=broken, notes=[note for one in held for note in one.notes],
    )  # fmt: skip
    if not (found.runs or found.sheets or found.charts):
        told = [f"{where}: {why}" for where, why in broken[:_MOST_TOLD]] or ["no run folder and no results file was given"]
        told += [f"and {more} more"] if (more := len(broken) - _MOST_TOLD) > 0 else []
        raise ValueError(f"nothing to report: {'; '.join(told)}")
    return found


def _unique(paths: Sequence[str | os.PathLike[str]], broken: list[tuple[str, str]]) -> list[Path]:
    seen: dict[str, Path] = {}
    for given in paths:
        try:
            for path in _found(Path(given), broken):
                seen.setdefault(os.path.realpath(path), path)
        except (OSError, ValueError) as error:
            broken.append((plain(given), plain(f"cannot be read ({error})")))
    return list(seen.values())


def _found(path: Path, broken: list[tuple[str, str]]) -> Iterator[Path]:
    """A file or a run folder as it is; of another folder the run folders and results files that lie in it."""
    if not path.exists():
        broken.append((str(path), "there is no such file or folder"))
    elif path.is_file() or (path / "config.toml").is_file() or (path / "privacy_card.json").is_file():
        yield path
    elif path.is_dir():
        below = sorted(path.iterdir())
        inside = [child for child in below if (child / "config.toml").is_file()]
        inside += [child for child in below if child.suffix == ".json" and child.is_file()]
        if not inside:
            broken.append((str(path), "holds neither a run (config.toml) nor results (*.json)"))
        yield from inside
    else:
        broken.append((str(path), "is neither a file nor a folder"))


def parsed(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: too large, or damaged.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_BYTES // 2**20} MiB")
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path.name} is damaged ({plain(reason, 120)}); put an earlier copy back") from None


def _run_folder(path: Path, departures: Departures) -> Shown:
    """One run folder.

    Raises:
        ValueError: half-written, damaged or of another version.
    """
    folder = RunFolder(path)
    text, settings = _config(folder.config)
    if not folder.card.is_file():
        raise ValueError(f"no {folder.card.name}: the run has not ended; go on with dpkfc train --resume {path}")
    card = _card(folder.card)
    promise, mechanism = card["guarantee"], _mapping(card.get("mechanism"))
    metrics = _metrics(folder.metrics)
    judged = metrics.evaluated()
    spending = [(float(row.step), row.epsilon) for row in metrics.rows if number(row.epsilon) is not None]
    seconds = [row.seconds for row in metrics.rows if row.seconds is not None]
    method, _, task = str(card.get("title", path.name)).partition(" on ")
    recipe, known = str(settings.get("recipe") or task or "unknown"), str(settings.get("method") or method)
    smoke = settings.get("smoke") is True
    return Shown(
        source=str(path),
        task=task_of(recipe, smoke),
        method=known,
        measured_on=metrics.measured_on,
        score=_score(_mapping(card.get("results")), metrics.measured_on),
        accuracy=judged[-1].accuracy if judged else None,
        epsilon=number(promise.get("epsilon")),
        target=number(promise.get("target_epsilon")),
        delta=number(promise.get("delta")),
        sigma=number(mechanism.get("noise_multiplier")),
        steps=int(number(promise.get("releases")) or 0),
        seconds=sum(seconds) if seconds else None,
        seed=None if (seed := number(settings.get("seed"))) is None else int(seed),
        settings=deciding(departures({"recipe": recipe, "method": known, "settings": settings})),
        smoke=smoke,
        marks=_marks(card),
        against=plain(promise.get("against") or "", 300),
        curve=[(float(row.step), row.accuracy) for row in judged if row.accuracy is not None],
        spending=_thin(spending),
        command=f"dpkfc train --config config.toml{' --test-mode' if settings.get('test_mode') is True else ''}" if text else "",
        config=text,
        card=card,
        figures=_figures(path / plots.FILE),
        pictures=_pictures(folder.plots),
    )


def task_of(recipe: str, smoke: bool) -> str:
    """What a page calls the task of a recipe."""
    return f"{recipe} (smoke run)" if smoke else recipe


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that do not decide the result, or are shown in a place of their own."""
    return {str(name): value for name, value in settings.items() if name not in _ASIDE}


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of the settings without the place of the data, and the settings without their sections."""
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text)
    except FileNotFoundError:
        return "", {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged ({plain(error, 120)}); put an earlier copy back") from None
    found = known_settings(content)
    lines = ['data_dir = ""' if line.startswith("data_dir") else line for line in text[:200_000].split("\n")]
    return "\n".join(lines), {str(name): value for name, value in found.items() if isinstance(value, (str, int, float, bool))}


def _card(path: Path) -> dict[str, Any]:
    card = parsed(path)
    if not isinstance(card, dict) or not isinstance(card.get("guarantee"), dict):
        raise ValueError(f"{path.name} is no privacy card")
    if card.get("format") != CARD_FORMAT:
        version = plain(card.get("format"), 20)
        raise ValueError(f"{path.name} is of format {version}, this dpkfc reads {CARD_FORMAT}; use the version that wrote it")
    promise = card["guarantee"]
    if number(promise.get("epsilon")) is None and promise.get("epsilon") != "inf":
        raise ValueError(f"{path.name} states no ε")
    return card


def _metrics(path: Path) -> Metrics:
    if not path.is_file():
        return Metrics()
    try:
        return Metrics.read(path)
    except UnpackedSizeError:
        raise
    except ValueError:
        raise ValueError(f"{path.name} is damaged; delete it to see the run without its curves") from None


def _score(results: Mapping[str, Any], measured_on: str) -> str:
    """What the score of a card is called: its first result is "SCORE on the SET set"."""
    end = f" on the {measured_on} set"
    first = str(next(iter(results), ""))
    return first.removesuffix(end) if first.endswith(end) else "accuracy"


def _figures(path: Path) -> Figures | None:
    return Figures.read(parsed(path)) if path.is_file() else None


def _pictures(folder: Path) -> dict[str, str]:
    """PNG files as data URIs: nothing is fetched when the page is looked at."""
    found = {}
    for name, title in _PICTURES.items():
        path = folder / name
        if path.is_file() and path.stat().st_size <= _PICTURE_BYTES:
            content = path.read_bytes()
            if content.startswith(b"\x89PNG\r\n\x1a\n"):
                found[title] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found


def _marks(card: Mapping[str, Any]) -> list[str]:
    """What is said against the guarantee of a card, a failed audit first."""
    failed, certified = failed_checks(card.get("audit")), _mapping(card.get("guarantee")).get("certified") is True
    said = marks_of(card.get("stamp"), card.get("caveats")) or ([] if certified else ["UNCERTIFIED"])
    return [f"AUDIT FAILED: {', '.join(failed)}"[:300], *said] if failed else said


def marks_of(stamp: Any, caveats: Any) -> list[str]:
    """What is said against a guarantee: the stamp, then every caveat."""
    said = [stamp] if isinstance(stamp, str) and stamp else []
    return [plain(text) for text in [*said, *(caveats if isinstance(caveats, list) else [])]]


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def train_command(recipe: Any, method: Any, seed: Any, evaluate_on: Any, settings: Mapping[str, Any]) -> str:
    """The command of a cell of a study; empty where it cannot be written as one."""
    if any(isinstance(value, str) and value.startswith("@") for value in settings.values()):
        return ""  # public data that only a study cuts from another recipe
    chosen = {name: value for name, value in settings.items() if name not in {"data_dir", "out"}}
    given = {"recipe": recipe, "method": method, **chosen, "seed": seed}
    return command_of(given | ({"eval_on": evaluate_on} if evaluate_on != "test" else {}))


# --------------------------------------------------------------------------------------------------
# What is told of an arm: its best trial, and the tests of that trial's settings alone.
#
# A search that goes on may come to another best trial; tests of the one before stay in the results
# and are told no more.

Row = Mapping[str, Any]
Key = tuple[str, str]  # recipe, arm


def best_trials(rows: Iterable[Row]) -> dict[Key, Row]:
    """The full trial with the highest validation accuracy, by recipe and arm; of equals the one with most tests."""
    rows = list(rows)
    tests = [(_key(row), row["tag"].get("tuned")) for row in rows if _is_test(row)]
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        tag = row.get("tag", {})
        if row["measured_on"] == "validation" and "params" in tag and not tag.get("pruned"):
            found[_key(row)].append(row)
    return {
        key: max(trials, key=lambda row: (row["accuracy"], tests.count((key, row["tag"]["params"]))))
        for key, trials in found.items()
    }


def winners_tests(rows: Iterable[Row]) -> list[Row]:
    """Runs on the test set with the settings of their arm's best trial; those of an arm without trials as they are."""
    rows = list(rows)
    best = best_trials(rows)

    def current(row: Row) -> bool:
        won = best.get(_key(row))
        return won is None or row["tag"].get("tuned", won["tag"]["params"]) == won["tag"]["params"]

    return [row for row in rows if _is_test(row) and current(row)]


def _is_test(row: Row) -> bool:
    return bool(row["measured_on"] == "test" and "arm" in row.get("tag", {}))


def _key(row: Row) -> Key:
    return row["run"]["recipe"], row["tag"].get("arm", "")


# --------------------------------------------------------------------------------------------------
# Results files of studies as a page reads them: plain JSON of the formats that docs/report.md
# lists.

VERSION = 1


def read_file(path: Path, content: Any, departures: Departures) -> Contents:
    """Runs and tables of one results file.

    Args:
        path: its name, for messages.
        content: its JSON.
        departures: leaves out of a run's settings what its recipe and method say.

    Raises:
        ValueError: a figure of which there is a picture alone; of no known format, of another version, or without a single entry
            that can be read.
    """
    if not isinstance(content, dict):
        raise ValueError("is no results file of dpkfc")
    kind = content.get("kind")
    if kind == "dpkfc study" and isinstance(content.get("rows"), dict):
        _check_version(content)
        return _study(path, content["rows"], departures)
    if kind == "dpkfc table" and isinstance(content.get("cells"), list):
        _check_version(content)
        return Contents(runs=(), sheets=[_published(path, content)])
    if kind is None and isinstance(content.get("arms"), list):
        _check_version(content)
        return Contents(runs=(), sheets=[_tuning(path, content)])
    if kind is None and isinstance(content.get("runs"), dict):
        return _benchmark(path, content["runs"])
    if kind == "dpkfc figure" and content.get("sensitivity_maps"):
        _check_version(content)
        return Contents(runs=(), charts=[_chart(path, content)])
    if kind == "dpkfc figure":
        raise ValueError(f"is a figure of dpkfc reproduce, which has a picture of its own: {_figure_pictures(path)}")
    raise ValueError("is no results file of dpkfc (study, tuning, table or benchmark); leave it out")


def _check_version(content: Mapping[str, Any]) -> None:
    if content.get("version") != VERSION:
        found = plain(content.get("version"), 20)
        raise ValueError(f"is of version {found}, this dpkfc reads {VERSION}; use the version that wrote it")


def _figure_pictures(path: Path) -> str:
    """Which files to open for a figure of `dpkfc reproduce`: NAME.png, or NAME-RECIPE.png for each recipe."""
    beside = sorted(one.name for one in path.parent.iterdir() if one.suffix == ".png")
    found = [name for name in beside if name == f"{path.stem}.png" or name.startswith(f"{path.stem}-")]
    return f"open {', '.join(found[:6])}" if found else f"none lies beside it; dpkfc reproduce {path.stem} draws it again"


_LEFT_OUT = {
    "pruned": "trials that were pruned, so not trained to the end, are not shown",
    "withdrawn": "tests of settings that are no longer the best trial of their method are not shown",
    "measurements": "entries that hold no run but measurements are not shown",
}


def _gathered(path: Path, rows: Mapping[str, Any], made: list[Shown], left_out: Mapping[str, int]) -> Contents:
    lost = len(rows) - len(made) - sum(left_out.values())
    if not made and lost:
        raise ValueError("none of its entries can be read")
    notes = [f"{path}: {lost} incomplete entries are not shown"] if lost else []
    notes += [f"{path}: {count} {_LEFT_OUT[what]}" for what, count in left_out.items() if count]
    return Contents(runs=made, notes=notes)


def _study(path: Path, rows: Mapping[str, Any], departures: Departures) -> Contents:
    """Rows of `dpkfc.studies`: one finished run each, and of a method that was tuned the tests of what won alone."""
    held = [row for row in rows.values() if isinstance(row, dict) and isinstance(row.get("run"), dict)]
    left_out = dict.fromkeys(_LEFT_OUT, 0)
    full = []
    for row in held:
        if row["run"].get("measure") and number(row.get("accuracy")) is None:
            left_out["measurements"] += 1
        elif _mapping(row.get("tag")).get("pruned") is True:
            left_out["pruned"] += 1
        elif number(row.get("accuracy")) is not None and number(row.get("epsilon")) is not None:
            full.append(row)
    withdrawn = _withdrawn(full)
    left_out["withdrawn"] = len(withdrawn)
    made = [_row(path, row, _mapping(row.get("tag")), departures) for row in full if id(row) not in withdrawn]
    return _gathered(path, rows, made, left_out)


def _withdrawn(rows: list[dict[str, Any]]) -> set[int]:
    """Identities of tests of settings that a search has left behind since."""
    named = [row for row in rows if isinstance(row["run"].get("recipe"), str) and "measured_on" in row]
    arms = [row for row in named if isinstance(_mapping(row.get("tag")).get("arm"), str)]
    current = {id(row) for row in winners_tests(arms)}
    return {id(row) for row in arms if row["measured_on"] == "test" and id(row) not in current}


def _row(path: Path, row: Mapping[str, Any], tag: Mapping[str, Any], departures: Departures) -> Shown:
    run = row["run"]
    settings = _mapping(run.get("settings"))
    seed, measured_on = run.get("seed"), row.get("measured_on", run.get("evaluate_on", "test"))
    stored = isinstance(row.get("hash"), str) and {"recipe", "method", "seed", "evaluate_on"} <= run.keys()
    told = departures({**run, "settings": settings, "hash": row["hash"]}) if stored else settings
    smoke = settings.get("smoke") is True
    pairs = row.get("curve")
    known = [(number(p[0]), number(p[1])) for p in (pairs if isinstance(pairs, list) else []) if _is_pair(p)]
    return Shown(
        source=str(path),
        task=task_of(str(run.get("recipe", "unknown")), smoke),
        method=str(tag.get("arm") or run.get("method", "unknown")),
        measured_on=str(measured_on),
        score=str(row.get("score") or "accuracy"),
        accuracy=number(row["accuracy"]),
        epsilon=number(row["epsilon"]),
        target=number(row.get("target_epsilon")),
        delta=number(row.get("delta")),
        sigma=number(row.get("noise_multiplier")),
        steps=int(number(row.get("steps")) or 0),
        seconds=number(row.get("seconds")),
        seed=int(number(seed) or 0),
        settings=deciding(told),
        smoke=smoke,
        marks=marks_of(None, row.get("caveats")),
        curve=[(step, score) for step, score in known if step is not None and score is not None],
        command=train_command(run.get("recipe"), run.get("method"), seed, run.get("evaluate_on"), settings),
    )


def _is_pair(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2


def _benchmark(path: Path, rows: Mapping[str, Any]) -> Contents:
    """Entries of `benchmarks/accuracy.py`, which come from a loop of their own and not from `dpkfc train`."""
    made = []
    aside = {"accuracy", "arm", "clipped_fraction", "dataset", "delta", "epsilon", "epsilon_spent", "evaluate_on"}
    aside |= {"noise_multiplier", "seconds", "seed", "steps"}
    for row in rows.values():
        if not isinstance(row, dict) or number(row.get("accuracy")) is None or "arm" not in row:
            continue
        optimizer = row.get("optimizer")
        made.append(
            Shown(
                source=str(path),
                task=str(row.get("dataset", "unknown")),
                method=f"{row['arm']} ({optimizer})" if optimizer else str(row["arm"]),
                measured_on=str(row.get("evaluate_on", "test")),
                accuracy=number(row["accuracy"]),
                epsilon=number(row.get("epsilon_spent", row.get("epsilon"))),
                target=number(row.get("epsilon")),
                delta=number(row.get("delta")),
                sigma=number(row.get("noise_multiplier")),
                steps=int(number(row.get("steps")) or 0),
                seconds=number(row.get("seconds")),
                seed=int(number(row.get("seed")) or 0),
                settings={str(name): value for name, value in row.items() if name not in aside},
                command="python benchmarks/accuracy.py --data-dir DIR",
            )
        )
    return _gathered(path, rows, made, {})


def _tuning(path: Path, content: Mapping[str, Any]) -> Sheet:
    """`tune.json`: what came of a search. Its accuracies are of private examples.

    A page may be handed on: it does not tell the number of trials of a random search, which has to stay secret.
    """
    secret = content.get("search") == "random"
    arms = [arm for arm in content["arms"] if isinstance(arm, dict)]
    rows = [
        (
            plain(arm.get("label", arm.get("name", "")), 80) + (" (control)" if arm.get("control") is True else ""),
            percent(number(arm.get("accuracy"))),
            "secret" if secret else show(arm.get("trials")),
            "secret" if secret else show(arm.get("pruned")),
            show(arm.get("params")),
        )
        for arm in arms
    ]
    notes = [plain(content.get("statement", ""), 2000).replace("**", "")]
    if content.get("complete") is False:
        notes.append("Not finished: some methods have had fewer trials than others.")
    return Sheet(
        source=str(path),
        title=f"Tuning of {plain(content.get('recipe', 'unknown'), 80)}",
        notes=[note for note in notes if note],
        header=("method", "validation accuracy, NOT PRIVATE", "trials", "pruned", "settings that won"),
        rows=rows,
        commands=[plain(arm["command"], 2000) for arm in arms if isinstance(arm.get("command"), str) and arm["command"]],
    )


def _published(path: Path, content: Mapping[str, Any]) -> Sheet:
    """`NAME.json` of `dpkfc reproduce`: published cells beside ours."""
    columns = ("row", "column", "published", "ours", "verdict")
    cells = [cell for cell in content["cells"] if isinstance(cell, dict)]
    notes = [("Published: ", content.get("accounting")), ("", content.get("note")), ("", content.get("rule"))]
    name, unit = content.get("name"), plain(content.get("unit", "%"), 20)
    return Sheet(
        source=str(path),
        title=plain(content.get("title", name), 160),
        notes=[f"{before}{plain(text, 1200)}" for before, text in notes if isinstance(text, str) and text],
        header=("method", "setting", f"published {unit}".strip(), f"ours {unit}".strip(), "verdict"),
        rows=[tuple(show(cell.get(column)) for column in columns) for cell in cells],
        commands=[f"dpkfc reproduce {name}"] if isinstance(name, str) and name.replace("-", "").isalnum() else (),
    )


def _chart(path: Path, content: Mapping[str, Any]) -> Chart:
    """`kfc-fig10.json` of `dpkfc reproduce`: accuracy over settings, and what is said against its privacy.

    Raises:
        ValueError: damaged.
    """
    try:
        maps = [read_map(one) for one in content["sensitivity_maps"]]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{path.name} is damaged; dpkfc reproduce {path.stem} writes it again") from None
    missing = content.get("missing")
    notes = [content.get("private"), *(f"Missing: {one}" for one in (missing if isinstance(missing, list) else []))]
    title = plain(content.get("title", content.get("name", path.stem)), 160)
    return Chart(source=str(path), title=title, notes=[plain(note, 400) for note in notes if isinstance(note, str)], maps=maps)


# --------------------------------------------------------------------------------------------------
# Runs that differ only in their seed as one group with mean and deviation, and one look for each
# method on the whole page.


# Okabe and Ito's colours, which the colour-blind can tell apart; without their black and yellow, which a page of either
# brightness would swallow. Symbols go round in another rhythm, so that 56 methods look different.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "pentagon")
GLYPHS = ("●", "■", "◆", "▲", "✖", "▼", "★", "⬟")
_FIRST = ("dp-sgd", "dp-kfc", "dp-adam", "dp-kfc-a", "dp-sgd-normalised", "dp-kfc-g", "dp-kfc-random")


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a method looks in every plot.

    Attributes:
        index: its number on the page; what the browser calls it.
        name: as found.
        colour: of lines and symbols.
        symbol: in plots.
        glyph: the same symbol as text.
    """

    index: int
    name: str
    colour: str
    symbol: str
    glyph: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of equal settings, one a seed.

    Attributes:
        runs: one or more.
        mean: of their scores, None where none is known.
        std: sample deviation, None of a single run.
        epsilon: the largest that one of them spent, None where there is no guarantee.
        differs: settings in which groups of the same method differ, in words.
    """

    runs: Sequence[Shown]
    mean: float | None
    std: float | None
    epsilon: float | None
    differs: str = ""

    @property
    def first(self) -> Shown:
        """Whose common settings stand for all."""
        return self.runs[0]

    @property
    def budget(self) -> float | None:
        """ε that was asked for, or else spent."""
        return self.epsilon if self.first.target is None else self.first.target


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Groups that may be compared: same task, same examples, same score, same δ."""

    task: str
    measured_on: str
    score: str
    delta: float | None
    groups: Sequence[Group]

    @property
    def title(self) -> str:
        """In words."""
        delta = "" if self.delta is None else f", δ = {delta_text(self.delta)}"
        return f"{plain(self.task, 60)}, {plain(self.score, 60)} on the {plain(self.measured_on, 20)} set{delta}"


def looks(runs: Iterable[Shown]) -> dict[str, Look]:
    """Method to its look; DP-SGD and DP-KFC have the same in every report."""
    names = sorted({run.method for run in runs}, key=str.casefold)
    fixed = [name for name in _FIRST if name in names]
    ordered = [*_FIRST[:2], *[name for name in [*fixed, *names] if name not in _FIRST[:2]]]
    found = {}
    for index, name in enumerate(dict.fromkeys(ordered)):
        place = index % len(SYMBOLS)
        colour = COLOURS[index % len(COLOURS)]
        found[name] = Look(index=index, name=name, colour=colour, symbol=SYMBOLS[place], glyph=GLYPHS[place])
    return {name: look for name, look in found.items() if name in names}


def grouped(runs: Sequence[Shown]) -> list[Group]:
    """Groups in the order in which they first come. A run is in the same one whether its folder or a study tells of it."""
    found: dict[str, list[Shown]] = {}
    for run in runs:
        settings = {str(name): str(value) for name, value in run.settings.items()}
        common = (run.task, run.method, run.measured_on, run.score, run.target, run.delta, run.steps, run.against)
        key = [*common, list(run.marks), settings]
        found.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    differing = _differing(members[0] for members in found.values())
    return [_group(members, differing[members[0].task, members[0].method]) for members in found.values()]


def _group(members: Sequence[Shown], differing: Sequence[str]) -> Group:
    scores = [run.accuracy for run in members if run.accuracy is not None]
    spent = [run.epsilon for run in members]
    known = [epsilon for epsilon in spent if epsilon is not None]
    settings = members[0].settings
    return Group(
        runs=members,
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        epsilon=max(known) if known and len(known) == len(spent) else None,
        differs=", ".join(f"{plain(name, 40)} {show(settings[name])}" for name in differing if name in settings)[:400],
    )


def _differing(firsts: Iterable[Shown]) -> dict[tuple[str, str], list[str]]:
    """Of each task and method the settings that its groups do not share."""
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in firsts:
        seen.setdefault((run.task, run.method), []).append(run.settings)
    return {
        key: [
            name
            for name in sorted({name for one in settings for name in one})
            if len({str(one.get(name, "")) for one in settings}) > 1
        ]
        for key, settings in seen.items()
    }


def panels(groups: Sequence[Group]) -> list[Panel]:
    """What can be drawn on common axes; test sets before validation sets."""
    found: dict[tuple[str, str, str, float | None], list[Group]] = {}
    for group in groups:
        first = group.first
        if number(group.mean) is not None:
            found.setdefault((first.task, first.measured_on, first.score, first.delta), []).append(group)
    made = [
        Panel(task=task, measured_on=on, score=score, delta=delta, groups=members)
        for (task, on, score, delta), members in found.items()
    ]
    return sorted(made, key=lambda panel: (panel.measured_on != "test", panel.task.casefold(), panel.score))
