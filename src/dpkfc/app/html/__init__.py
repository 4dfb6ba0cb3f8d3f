"""What a page shows, read from run folders and results files.

Each file or folder that cannot be read has a line that says why.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpkfc.app import plots
from dpkfc.app.datasets.unpacking import UnpackedSizeError
from dpkfc.app.plots import Figures, SensitivityMap, evenly_spaced, read_map
from dpkfc.app.run_folder import Metrics, RunFolder
from dpkfc.app.settings import MACHINE, ensure_text, known_settings, tomllib
from dpkfc.report.card import failed_checks
from dpkfc.report.text import ensure_mapping, is_visible, number, plain, rounded_up

# --------------------------------------------------------------------------------------------------
# Texts and numbers of a page. What a run folder says stays text in a plot and in a shell.

_MOST_ITEMS = 50
_MOST_NESTED = 4
_SETTING_NAME = re.compile(r"[a-z][a-z0-9_]*")


def plot_text(value: Any, most: int = 80) -> str:
    """Return text for a plot. The plotting library reads a few tags and entities."""
    return html.escape(plain(value, most), quote=False)


def count_text(number: int, noun: str) -> str:
    """Return a number of things in words."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def score_text(value: float | None, score: str = "accuracy") -> str:
    """Return an accuracy in per cent, and any other score as a number."""
    if value is None:
        return "–"
    if "accuracy" in score:
        return f"{100 * value:.2f} %"
    return f"{value:.3f}"


def epsilon_text(value: Any, decimals: int = 3) -> str:
    """Return ε rounded up: ∞ where a card says "inf", a dash where ε is unknown."""
    if value == "inf":
        return "∞"
    known = number(value)
    return "–" if known is None else rounded_up(known, decimals)


def delta_text(delta: float | None) -> str:
    """Return δ with a hyphen at which no line breaks."""
    return "–" if delta is None else f"{delta:g}".replace("-", "\u2011")


def show(value: Any, depth: int = 0) -> str:
    """Return a setting of any shape as one line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) < 10**15:
        return f"{value:,}"
    if isinstance(value, (list, tuple, Mapping)):
        return _show_items(value, depth + 1) if depth < _MOST_NESTED else "…"
    return plain(value)


def _show_items(values: Mapping[Any, Any] | Sequence[Any], depth: int) -> str:
    if not isinstance(values, Mapping):
        return ", ".join(show(item, depth) for item in values[:_MOST_ITEMS])
    texts = []
    for name, item in list(values.items())[:_MOST_ITEMS]:
        caption = plain(name, 60).replace("_", " ")
        texts.append(f"{caption} {show(item, depth)}")
    return ", ".join(texts)


def command_of(settings: Mapping[str, Any]) -> str:
    """Return `dpkfc train` with settings as flags, each value quoted for a shell.

    Returns:
        An empty text where a value cannot stand in a command.
    """
    words = ["dpkfc", "train"]
    for name, value in settings.items():
        is_plain = isinstance(value, (str, int, float, bool))
        if not _SETTING_NAME.fullmatch(str(name)) or not is_plain:
            return ""
        flag = name.replace("_", "-")
        text = str(value)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif not all(is_visible(character) for character in text):
            return ""
        elif text.startswith("-"):
            words.append(f"--{flag}={shlex.quote(text)}")
        else:
            words.append(f"--{flag} {shlex.quote(text)}")
    return " ".join(words)


# --------------------------------------------------------------------------------------------------
# Run folders and results files.


Item = TypeVar("Item")
# From `recipe`, `method` and `settings` (of a study's row also `seed`, `evaluate_on` and `hash`)
# to the settings that recipe and method do not say by themselves.
Departures = Callable[[Mapping[str, Any]], Mapping[str, Any]]
CARD_FORMAT = 1
_MOST_BYTES = 64 * 2**20
_MOST_PICTURE_BYTES = 2 * 2**20
_MOST_CONFIG = 200_000
_MOST_POINTS = 240
_MOST_REASONS = 12
_SMOKE = " (smoke run)"
# Settings that do not decide what a run comes to, or are shown in a place of their own.
_NOT_DECIDING = {
    "recipe",
    "method",
    "seed",
    "epsilon",
    "delta",
    "eval_on",
    "out",
    "data_dir",
    *MACHINE,
    "budget",
    "data",
    "schema",
    "label_file",
    "task",
    "smoke",
    "chosen_by",
    "evaluate_every",
    "test_mode",
}
_PICTURES = {
    "signal_to_noise.png": "Signal-to-noise ratio of each layer",
    "spectra.png": "Spectra of the curvature factors",
}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run as a page shows it. Text is as it was read: the templates escape it.

    Attributes:
        source: the file or folder it was read from.
        task: what was learned, as a rule the recipe. A smoke run says so here, so that it shares
            nothing with other runs.
        method: its name in figures and tables.
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
        warnings: why the run has no certified guarantee; empty where it has one.
        against: whom the guarantee holds against, if not everyone who sees the weights.
        curve: (step, score).
        spending: (step, ε).
        command: that trains it again; empty where none is known.
        config: settings as TOML, for a command that reads them.
        card: the privacy card; empty for a run of a study.
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
    warnings: Sequence[str] = ()
    against: str = ""
    curve: Sequence[tuple[float, float]] = ()
    spending: Sequence[tuple[float, float]] = ()
    command: str = ""
    config: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)
    figures: Figures = Figures()
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """The task without the words of a smoke run."""
        return self.task.removesuffix(_SMOKE) if self.smoke else self.task


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A table that a study has made: a tuning study, or a published table next to ours."""

    title: str
    notes: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    commands: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of `dpkfc reproduce` that a page draws by itself: accuracy over settings."""

    title: str
    notes: Sequence[str]
    maps: Sequence[SensitivityMap]

    @property
    def shows_validation(self) -> bool:
        """Whether a map shows scores of private examples that no ε protects."""
        return any(one.measured_on != "test" for one in self.maps)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that was read.

    Attributes:
        runs: in the order given.
        tables: in the same order.
        charts: in the same order.
        broken: (file or folder, why it is not shown).
        notes: what was left out on purpose, in words.
    """

    runs: Sequence[RunSummary] = ()
    tables: Sequence[StudyTable] = ()
    charts: Sequence[Chart] = ()
    broken: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


def read_all(
    paths: Sequence[str | os.PathLike[str]],
    departures: Departures = lambda run: run["settings"],
) -> Contents:
    """Read run folders, folders of run folders, and results files.

    Args:
        paths: of any of them; a path that is named twice counts once.
        departures: returns the settings that a run's recipe and method do not say; by default all.

    Raises:
        ValueError: nothing can be shown. Up to twelve reasons are named.
    """
    runs: list[RunSummary] = []
    tables: list[StudyTable] = []
    charts: list[Chart] = []
    broken: list[tuple[str, str]] = []
    notes: list[str] = []
    for path in _unique(paths, broken):
        try:
            if path.is_dir():
                part = Contents(runs=[_read_run_folder(path, departures)])
            else:
                part = read_file(path, read_json(path), departures)
        except ValueError as error:
            broken.append((str(path), plain(error)))
            continue
        except OSError as error:
            broken.append((str(path), plain(f"cannot be read ({error.strerror or error})")))
            continue
        runs += part.runs
        tables += part.tables
        charts += part.charts
        notes += part.notes
    if not (runs or tables or charts):
        raise ValueError(f"nothing to report: {_join_reasons(broken)}")
    return Contents(runs=runs, tables=tables, charts=charts, broken=broken, notes=notes)


def _join_reasons(broken: Sequence[tuple[str, str]]) -> str:
    if not broken:
        return "no run folder and no results file was given"
    reasons = [f"{path}: {reason}" for path, reason in broken[:_MOST_REASONS]]
    if len(broken) > _MOST_REASONS:
        reasons.append(f"and {len(broken) - _MOST_REASONS} more")
    return "; ".join(reasons)


def _unique(paths: Sequence[str | os.PathLike[str]], broken: list[tuple[str, str]]) -> list[Path]:
    unique: dict[str, Path] = {}
    for given in paths:
        try:
            for path in _expand(Path(given), broken):
                unique.setdefault(os.path.realpath(path), path)
        except (OSError, ValueError) as error:
            broken.append((plain(given), plain(f"cannot be read ({error})")))
    return list(unique.values())


def _expand(path: Path, broken: list[tuple[str, str]]) -> Iterator[Path]:
    """Yield a file or a run folder; of another folder, the run folders and results files in it."""
    if not path.exists():
        broken.append((str(path), "there is no such file or folder; name run folders"))
    elif path.is_file() or _has(path, "config.toml") or _has(path, "privacy_card.json"):
        yield path
    elif path.is_dir():
        children = sorted(path.iterdir())
        inside = [child for child in children if _has(child, "config.toml")]
        inside += [child for child in children if child.suffix == ".json" and child.is_file()]
        if not inside:
            broken.append((str(path), "holds neither a run (config.toml) nor results (*.json)"))
        yield from inside
    else:
        broken.append((str(path), "is neither a file nor a folder"))


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: too large, or damaged.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_BYTES // 2**20} MiB")
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise _damaged(path, "nested too deeply") from None
    except ValueError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, reason: Any) -> ValueError:
    return ValueError(f"{path.name} is damaged ({plain(reason, 120)}); put an earlier copy back")


def _read_run_folder(path: Path, departures: Departures) -> RunSummary:
    """Return one run folder.

    Raises:
        ValueError: half-written, damaged or of another version.
    """
    folder = RunFolder(path)
    config, settings = _read_config(folder.config)
    if not folder.card.is_file():
        raise ValueError(
            f"no {folder.card.name}: the run has not ended; go on with dpkfc train --resume {path}"
        )
    card = _read_card(folder.card)
    metrics = _read_metrics(folder.metrics)
    method, _, task = str(card.get("title", path.name)).partition(" on ")
    recipe = str(settings.get("recipe") or task or "unknown")
    method = str(settings.get("method") or method)
    is_smoke = settings.get("smoke") is True
    seed = number(settings.get("seed"))
    command = "dpkfc train --config config.toml" if config else ""
    if settings.get("test_mode") is True:
        command += " --test-mode"
    run = {"recipe": recipe, "method": method, "settings": settings}
    figures = path / plots.FILE
    return RunSummary(
        source=str(path),
        task=name_task(_own_name(settings) or recipe, is_smoke),
        method=method,
        measured_on=metrics.measured_on,
        score=_score_name(ensure_mapping(card.get("results")), metrics.measured_on),
        **_read_course(metrics),
        **_read_promise(card),
        seed=None if seed is None else int(seed),
        settings=select_deciding(departures(run)),
        smoke=is_smoke,
        command=command,
        config=config,
        card=card,
        figures=Figures.read(read_json(figures)) if figures.is_file() else Figures(),
        pictures=_read_pictures(folder.plots),
    )


def _read_course(metrics: Metrics) -> dict[str, Any]:
    """Return what the metrics of a run say of its score, its time and its spending."""
    curve = [(float(row.step), row.accuracy) for row in metrics.evaluated()]
    seconds = [row.seconds for row in metrics.rows if row.seconds is not None]
    finite = [row for row in metrics.rows if number(row.epsilon) is not None]
    spending = [(float(row.step), row.epsilon) for row in finite]
    return {
        "accuracy": curve[-1][1] if curve else None,
        "seconds": sum(seconds) if seconds else None,
        "curve": curve,
        "spending": evenly_spaced(spending, _MOST_POINTS),
    }


def _read_promise(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a card says of the guarantee of its run."""
    guarantee = card["guarantee"]
    return {
        "epsilon": number(guarantee.get("epsilon")),
        "target": number(guarantee.get("target_epsilon")),
        "delta": number(guarantee.get("delta")),
        "sigma": number(ensure_mapping(card.get("mechanism")).get("noise_multiplier")),
        "steps": _integer(guarantee.get("releases")),
        "warnings": _card_warnings(card),
        "against": plain(guarantee.get("against") or "", 300),
    }


def _own_name(settings: Mapping[str, Any]) -> str:
    """Return the name of own data or of an own task, or an empty text for a recipe."""
    return Path(str(settings.get("data") or settings.get("task") or "")).name


def name_task(recipe: str, is_smoke: bool) -> str:
    """Return what a page calls the task of a recipe."""
    return recipe + _SMOKE if is_smoke else recipe


def select_deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that decide the result and have no place of their own."""
    return {str(name): value for name, value in settings.items() if name not in _NOT_DECIDING}


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of the settings without the data folder, and the settings as one mapping."""
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text)
    except FileNotFoundError:
        return "", {}
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    settings = known_settings(content)
    shown = re.sub(r"(?m)^data_dir.*$", 'data_dir = ""', text[:_MOST_CONFIG])
    scalars = {}
    for name, value in settings.items():
        if isinstance(value, (str, int, float)):
            scalars[name] = value
    return shown, scalars


def _read_card(path: Path) -> dict[str, Any]:
    card = read_json(path)
    if not isinstance(ensure_mapping(card).get("guarantee"), dict):
        raise ValueError(f"{path.name} is no privacy card")
    if card.get("format") != CARD_FORMAT:
        version = plain(card.get("format"), 20)
        raise ValueError(
            f"{path.name} is of format {version}, this dpkfc reads {CARD_FORMAT}; "
            "use the version that wrote it"
        )
    epsilon = card["guarantee"].get("epsilon")
    if number(epsilon) is None and epsilon != "inf":
        raise ValueError(f"{path.name} states no ε")
    return card


def _read_metrics(path: Path) -> Metrics:
    if not path.is_file():
        return Metrics()
    try:
        return Metrics.read(path)
    except UnpackedSizeError:
        raise
    except ValueError:
        raise ValueError(
            f"{path.name} is damaged; delete it to see the run without its curves"
        ) from None


def _score_name(results: Mapping[str, Any], measured_on: str) -> str:
    """Return what the score of a card is called: its first result is "SCORE on the SET set"."""
    end = f" on the {measured_on} set"
    first = str(next(iter(results), ""))
    return first.removesuffix(end) if first.endswith(end) else "accuracy"


def _read_pictures(folder: Path) -> dict[str, str]:
    """Return PNG files as data URIs, because the page fetches nothing."""
    pictures = {}
    for name, title in _PICTURES.items():
        path = folder / name
        if path.is_file() and path.stat().st_size <= _MOST_PICTURE_BYTES:
            content = path.read_bytes()
            if content.startswith(b"\x89PNG\r\n\x1a\n"):
                encoded = base64.b64encode(content).decode()
                pictures[title] = f"data:image/png;base64,{encoded}"
    return pictures


def _card_warnings(card: Mapping[str, Any]) -> list[str]:
    """Return why a card has no certified guarantee, a failed audit first."""
    warnings = collect_warnings(card.get("stamp"), card.get("caveats"))
    if not warnings and ensure_mapping(card.get("guarantee")).get("certified") is not True:
        warnings = ["UNCERTIFIED"]
    failed = failed_checks(card.get("audit"))
    if failed:
        return [f"AUDIT FAILED: {', '.join(failed)}"[:300], *warnings]
    return warnings


def collect_warnings(stamp: Any, caveats: Any) -> list[str]:
    """Return why there is no certified guarantee: the stamp, then every caveat."""
    warnings = [plain(stamp)] if ensure_text(stamp) else []
    return warnings + [plain(caveat) for caveat in ensure_list(caveats)]


def ensure_list(value: Any) -> list[Any]:
    """Return a list itself, an empty one for anything else."""
    return value if isinstance(value, list) else []


def _integer(value: Any) -> int:
    return int(number(value) or 0)


def train_command(
    recipe: Any, method: Any, seed: Any, evaluate_on: Any, settings: Mapping[str, Any]
) -> str:
    """Return the command of a run of a study; empty where the run cannot be written as one."""
    for value in settings.values():
        # Public data that only a study cuts from another recipe.
        if ensure_text(value).startswith("@"):
            return ""
    chosen = {"recipe": recipe, "method": method, **settings}
    for name in ("data_dir", "out"):
        chosen.pop(name, None)
    chosen["seed"] = seed
    if evaluate_on != "test":
        chosen["eval_on"] = evaluate_on
    return command_of(chosen)


# --------------------------------------------------------------------------------------------------
# The best trial of a method, and the tests of that trial's settings alone. A search that goes on
# may come to another best trial. Tests of the earlier one stay in the results and are not shown.

Row = Mapping[str, Any]
# Recipe and name of the method in the study.
Key = tuple[str, str]


def best_trials(rows: Iterable[Row]) -> dict[Key, Row]:
    """Return the full trial with the highest validation accuracy, by recipe and method.

    Among equals, return the trial with most tests.
    """
    tested = []
    trials: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        tag = row.get("tag", {})
        if _is_test(row):
            tested.append((_key(row), tag.get("tuned")))
        is_trial = row["measured_on"] == "validation" and "params" in tag
        if is_trial and not tag.get("pruned"):
            trials[_key(row)].append(row)

    def rank(row: Row) -> tuple[float, int]:
        return row["accuracy"], tested.count((_key(row), row["tag"]["params"]))

    return {key: max(members, key=rank) for key, members in trials.items()}


def winners_tests(rows: Iterable[Row]) -> list[Row]:
    """Return runs on the test set with the settings of their method's best trial.

    Tests of a method without trials are returned as they are.
    """
    rows = list(rows)
    won = {key: trial["tag"]["params"] for key, trial in best_trials(rows).items()}
    tests = []
    for row in filter(_is_test, rows):
        settings = won.get(_key(row))
        if settings is None or row["tag"].get("tuned", settings) == settings:
            tests.append(row)
    return tests


def _is_test(row: Row) -> bool:
    return bool(row["measured_on"] == "test" and "arm" in row.get("tag", {}))


def _key(row: Row) -> Key:
    return row["run"]["recipe"], row["tag"].get("arm", "")


# --------------------------------------------------------------------------------------------------
# Results files of studies: plain JSON of the formats that docs/report.md lists.

VERSION = 1


def read_file(path: Path, content: Any, departures: Departures) -> Contents:
    """Return runs and tables of one results file.

    Args:
        path: its name, for messages.
        content: its JSON.
        departures: returns the settings that a run's recipe and method do not say.

    Raises:
        ValueError: a figure that is a picture alone; of no known format, of another version, or
            without a single entry that can be read.
    """
    if not isinstance(content, dict):
        raise ValueError("is no results file of dpkfc")
    match content.get("kind"), content:
        case "dpkfc study", {"rows": dict(rows)}:
            _check_version(content)
            return _read_study(path, rows, departures)
        case "dpkfc table", {"cells": list()}:
            _check_version(content)
            return Contents(tables=[_read_published_table(content)])
        case None, {"arms": list()}:
            _check_version(content)
            return Contents(tables=[_read_tuning(content)])
        case "dpkfc figure", {"sensitivity_maps": maps} if maps:
            _check_version(content)
            return Contents(charts=[_read_chart(path, content)])
        case "dpkfc figure", _:
            pictures = _name_pictures(path)
            raise ValueError(
                f"is a figure of dpkfc reproduce, which has its own picture: {pictures}"
            )
    raise ValueError(
        "is no results file of dpkfc (study, tuning, table or benchmark); leave it out"
    )


def _check_version(content: Mapping[str, Any]) -> None:
    if content.get("version") != VERSION:
        version = plain(content.get("version"), 20)
        raise ValueError(
            f"is of version {version}, this dpkfc reads {VERSION}; use the version that wrote it"
        )


def _name_pictures(path: Path) -> str:
    """Return which files to open for a figure: NAME.png, or NAME-RECIPE.png for each recipe."""
    names = []
    for file in path.parent.iterdir():
        is_ours = file.stem == path.stem or file.name.startswith(f"{path.stem}-")
        if file.suffix == ".png" and is_ours:
            names.append(file.name)
    if names:
        return f"open {', '.join(sorted(names)[:6])}"
    return f"there is no picture; dpkfc reproduce {path.stem} draws it"


_LEFT_OUT = {
    "incomplete": "incomplete entries are not shown",
    "pruned": "trials that were pruned, so not trained to the end, are not shown",
    "withdrawn": (
        "tests of settings that are no longer the best trial of their method are not shown"
    ),
    "measurements": "entries that hold no run but measurements are not shown",
}


def _add_notes(
    path: Path, rows: Mapping[str, Any], runs: list[RunSummary], left_out: Mapping[str, int]
) -> Contents:
    """Return runs of a file, with notes on the entries that are not shown."""
    incomplete = len(rows) - len(runs) - sum(left_out.values())
    if not runs and incomplete:
        raise ValueError("none of its entries can be read")
    counts = {**left_out, "incomplete": incomplete}
    notes = [f"{path}: {count} {_LEFT_OUT[reason]}" for reason, count in counts.items() if count]
    return Contents(runs=runs, notes=notes)


def _read_study(path: Path, rows: Mapping[str, Any], departures: Departures) -> Contents:
    """Return finished runs; of a method that was tuned, only the tests of the best trial."""
    left_out = dict.fromkeys(_LEFT_OUT, 0)
    complete = []
    for row in rows.values():
        if not isinstance(ensure_mapping(row).get("run"), dict):
            continue
        has_accuracy = number(row.get("accuracy")) is not None
        if row["run"].get("measure") and not has_accuracy:
            left_out["measurements"] += 1
        elif ensure_mapping(row.get("tag")).get("pruned") is True:
            left_out["pruned"] += 1
        elif has_accuracy and number(row.get("epsilon")) is not None:
            complete.append(row)
    withdrawn = _find_withdrawn(complete)
    left_out["withdrawn"] = len(withdrawn)
    runs = [_read_row(path, row, departures) for row in complete if id(row) not in withdrawn]
    return _add_notes(path, rows, runs, left_out)


def _find_withdrawn(rows: list[dict[str, Any]]) -> set[int]:
    """Return identities of tests of settings that a search has left behind since."""
    tuned = []
    for row in rows:
        has_name = isinstance(ensure_mapping(row.get("tag")).get("arm"), str)
        if has_name and isinstance(row["run"].get("recipe"), str) and "measured_on" in row:
            tuned.append(row)
    tests = {id(row) for row in tuned if row["measured_on"] == "test"}
    return tests - {id(row) for row in winners_tests(tuned)}


def _read_row(path: Path, row: Mapping[str, Any], departures: Departures) -> RunSummary:
    run = row["run"]
    settings = ensure_mapping(run.get("settings"))
    seed = run.get("seed")
    evaluate_on = run.get("evaluate_on")
    has_hash = isinstance(row.get("hash"), str)
    deciding = settings
    if has_hash and {"recipe", "method", "seed", "evaluate_on"} <= run.keys():
        deciding = departures({**run, "settings": settings, "hash": row["hash"]})
    is_smoke = settings.get("smoke") is True
    return RunSummary(
        source=str(path),
        task=name_task(str(run.get("recipe", "unknown")), is_smoke),
        method=str(ensure_mapping(row.get("tag")).get("arm") or run.get("method", "unknown")),
        measured_on=str(row.get("measured_on", run.get("evaluate_on", "test"))),
        score=str(row.get("score") or "accuracy"),
        **_figures(row),
        epsilon=number(row["epsilon"]),
        target=number(row.get("target_epsilon")),
        seed=_integer(seed),
        settings=select_deciding(deciding),
        smoke=is_smoke,
        warnings=collect_warnings(None, row.get("caveats")),
        curve=_read_curve(row.get("curve")),
        command=train_command(run.get("recipe"), run.get("method"), seed, evaluate_on, settings),
    )


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a study and a benchmark say of a run by the same names."""
    return {
        "accuracy": number(row["accuracy"]),
        "delta": number(row.get("delta")),
        "sigma": number(row.get("noise_multiplier")),
        "steps": _integer(row.get("steps")),
        "seconds": number(row.get("seconds")),
    }


def _read_curve(pairs: Any) -> list[tuple[float, float]]:
    curve = []
    for pair in ensure_list(pairs):
        if len(ensure_list(pair)) == 2:
            step, score = number(pair[0]), number(pair[1])
            if step is not None and score is not None:
                curve.append((step, score))
    return curve


def _read_tuning(content: Mapping[str, Any]) -> StudyTable:
    """Return the table of a `tune.json`, whose accuracies are of private examples.

    A page may be handed on. So it does not tell the number of trials of a random search, which
    has to stay secret.
    """
    is_secret = content.get("search") == "random"
    rows = []
    commands = []
    for method in content["arms"]:
        if not isinstance(method, dict):
            continue
        label = plain(method.get("label", method.get("name", "")), 80)
        if method.get("control") is True:
            label += " (control)"
        counts = [show(method.get("trials")), show(method.get("pruned"))]
        if is_secret:
            counts = ["secret", "secret"]
        accuracy = score_text(number(method.get("accuracy")))
        rows.append((label, accuracy, *counts, show(method.get("params"))))
        command = ensure_text(method.get("command"))
        if command:
            commands.append(plain(command, 2000))
    notes = [plain(content.get("statement", ""), 2000).replace("**", "")]
    if content.get("complete") is False:
        notes.append("Not finished: some methods have had fewer trials than others.")
    return StudyTable(
        title=f"Tuning of {plain(content.get('recipe', 'unknown'), 80)}",
        notes=[note for note in notes if note],
        header=(
            "method",
            "validation accuracy, NOT PRIVATE",
            "trials",
            "pruned",
            "settings that won",
        ),
        rows=rows,
        commands=commands,
    )


def _read_published_table(content: Mapping[str, Any]) -> StudyTable:
    """Return `NAME.json` of `dpkfc reproduce`: published cells next to ours."""
    rows = []
    for cell in content["cells"]:
        if isinstance(cell, dict):
            columns = ("row", "column", "published", "ours", "verdict")
            rows.append(tuple(show(cell.get(column)) for column in columns))
    notes = []
    for before, key in (("Published: ", "accounting"), ("", "note"), ("", "rule")):
        text = ensure_text(content.get(key))
        if text:
            notes.append(f"{before}{plain(text, 1200)}")
    name = content.get("name")
    unit = plain(content.get("unit", "%"), 20)
    is_command = ensure_text(name).replace("-", "").isalnum()
    return StudyTable(
        title=plain(content.get("title", name), 160),
        notes=notes,
        header=(
            "method",
            "setting",
            f"published {unit}".strip(),
            f"ours {unit}".strip(),
            "verdict",
        ),
        rows=rows,
        commands=[f"dpkfc reproduce {name}"] if is_command else (),
    )


def _read_chart(path: Path, content: Mapping[str, Any]) -> Chart:
    """Return `kfc-fig10.json` of `dpkfc reproduce`: accuracy over settings, and its caveats.

    Raises:
        ValueError: damaged.
    """
    try:
        maps = [read_map(one) for one in content["sensitivity_maps"]]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path.name} is damaged; dpkfc reproduce {path.stem} writes it again"
        ) from None
    private = content.get("private")
    notes = [plain(private, 400)] if isinstance(private, str) else []
    for cell in ensure_list(content.get("missing")):
        notes.append(plain(f"Missing: {cell}", 400))
    title = plain(content.get("title", content.get("name", path.stem)), 160)
    return Chart(title=title, notes=notes, maps=maps)


# --------------------------------------------------------------------------------------------------
# Runs that differ only in their seed as one group with mean and deviation, and one style for each
# method on the whole page.


# Okabe and Ito's colours without black and yellow, which vanish on a dark or a bright page. Colours
# and symbols have different periods, so that 56 methods look different.
COLOURS = plots.PALETTE
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "x",
    "triangle-down",
    "star",
    "pentagon",
)
GLYPHS = ("●", "■", "◆", "▲", "✖", "▼", "★", "⬟")
# Both have the same style in every report.
_ALWAYS = ("dp-sgd", "dp-kfc")
_FIRST = ("dp-adam", "dp-kfc-a", "dp-sgd-normalised", "dp-kfc-g", "dp-kfc-random")


@dataclass(frozen=True, kw_only=True)
class MethodStyle:
    """How a method looks in every plot.

    Attributes:
        index: its number on the page, which the script uses.
        name: as read.
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
class RunGroup:
    """Runs of equal settings, one a seed.

    Attributes:
        runs: one or more.
        mean: of their scores, None where none is known.
        std: sample deviation, None of a single run.
        epsilon: the largest that a run spent, None where there is no guarantee.
        differs: settings in which groups of the same method differ, in words.
    """

    runs: Sequence[RunSummary]
    mean: float | None
    std: float | None
    epsilon: float | None
    differs: str = ""

    @property
    def first(self) -> RunSummary:
        """The run whose settings stand for all."""
        return self.runs[0]

    @property
    def sort_score(self) -> float:
        """The mean to sort by: 0 where none is known."""
        return self.mean or 0.0

    @property
    def budget(self) -> float | None:
        """The ε that was asked for, or else spent."""
        return self.epsilon if self.first.target is None else self.first.target

    @property
    def seconds(self) -> float | None:
        """Mean seconds of training."""
        known = [run.seconds for run in self.runs if run.seconds is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Panel:
    """Groups that may be compared: same task, same examples, same score, same δ."""

    groups: Sequence[RunGroup]
    task: str
    measured_on: str
    score: str
    delta: float | None

    @property
    def title(self) -> str:
        """The panel in words."""
        delta = "" if self.delta is None else f", δ = {delta_text(self.delta)}"
        measured_on = plain(self.measured_on, 20)
        return f"{plain(self.task, 60)}, {plain(self.score, 60)} on the {measured_on} set{delta}"


def assign_styles(runs: Iterable[RunSummary]) -> dict[str, MethodStyle]:
    """Return the style of each method; DP-SGD and DP-KFC have the same in every report."""
    names = sorted({run.method for run in runs}, key=str.casefold)
    known = [name for name in _FIRST if name in names]
    ordered = dict.fromkeys([*_ALWAYS, *known, *names])
    styles = {}
    for index, name in enumerate(ordered):
        if name not in names:
            continue
        place = index % len(SYMBOLS)
        styles[name] = MethodStyle(
            index=index,
            name=name,
            colour=COLOURS[index % len(COLOURS)],
            symbol=SYMBOLS[place],
            glyph=GLYPHS[place],
        )
    return styles


def group_runs(runs: Sequence[RunSummary]) -> list[RunGroup]:
    """Return groups in the order of their first run.

    A run is in the same group whether its folder or a study holds it.
    """
    members = collect(runs, _group_key)
    differing = _differing_settings(group[0] for group in members.values())
    return [_make_group(group, differing[_method_of(group[0])]) for group in members.values()]


def collect(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return items by their key, in order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _group_key(run: RunSummary) -> str:
    """Return all but the seed that decides a run, as one text."""
    settings = {str(name): str(value) for name, value in run.settings.items()}
    key = [
        run.task,
        run.method,
        run.measured_on,
        run.score,
        run.target,
        run.delta,
        run.steps,
        run.against,
        list(run.warnings),
        settings,
    ]
    return json.dumps(key, sort_keys=True)


def _make_group(runs: Sequence[RunSummary], differing: Sequence[str]) -> RunGroup:
    scores = [run.accuracy for run in runs if run.accuracy is not None]
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    settings = runs[0].settings
    known = [name for name in differing if name in settings]
    texts = [f"{plain(name, 40)} {show(settings[name])}" for name in known]
    return RunGroup(
        runs=runs,
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        epsilon=max(spent) if len(spent) == len(runs) else None,
        differs=", ".join(texts)[:400],
    )


def _method_of(run: RunSummary) -> tuple[str, str]:
    return run.task, run.method


def _differing_settings(runs: Iterable[RunSummary]) -> dict[tuple[str, str], list[str]]:
    """Return, by task and method, the settings in which runs differ."""
    differing = {}
    for method, members in collect(runs, _method_of).items():
        settings = [run.settings for run in members]
        names = []
        for name in sorted(set().union(*settings)):
            if len({str(one.get(name, "")) for one in settings}) > 1:
                names.append(name)
        differing[method] = names
    return differing


def comparable_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return groups that can be drawn on common axes; test sets before validation sets."""

    def axes(group: RunGroup) -> tuple[str, str, str, float | None]:
        run = group.first
        return run.task, run.measured_on, run.score, run.delta

    members = collect([group for group in groups if number(group.mean) is not None], axes)
    panels = [Panel(of_panel, *shared) for shared, of_panel in members.items()]

    def order(panel: Panel) -> tuple[bool, str, str]:
        return panel.measured_on != "test", panel.task.casefold(), panel.score

    return sorted(panels, key=order)
