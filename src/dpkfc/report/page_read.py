"""What a page shows, read from run folders and results files; of each one that cannot be read, a line that says why."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc.report import figures
from dpkfc.report.audited import failed_checks
from dpkfc.report.figures import Figures, SensitivityMap
from dpkfc.report.metrics import Metrics
from dpkfc.report.numbers import number, plain
from dpkfc.report.page_text import command_of
from dpkfc.report.run_folder import RunFolder
from dpkfc.unpack_limit import UnpackedSizeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Chart", "Contents", "Departures", "Shown", "Sheet", "read_all"]

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
    from dpkfc.report.page_files import read_file

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
        figures=_figures(path / figures.FILE),
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
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= value if isinstance(value, dict) else {name: value}
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
