"""What a page shows, read from run folders and reports of `dpkfc tune`.

Each file or folder that cannot be read has a line that says why.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dpkfc.app.datasets.unpacking import UnpackedSizeError
from dpkfc.app.metrics import Metrics
from dpkfc.app.picture_data import ColumnEffect, RunFigures, evenly_spaced
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.objective import finite
from dpkfc.app.run_folder import RunFolder, RunFolderError, write_atomically
from dpkfc.app.settings_file import MACHINE, known_settings
from dpkfc.app.toml import ConfigError, ensure_text, tomllib
from dpkfc.app.tuning.tuned import Tuned
from dpkfc.report.audit_section import failed_checks
from dpkfc.report.text import ensure_mapping, number, plain

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
    "effects.png": "Effect of each column, with the band of the noise",
    "signal_to_noise.png": "Signal-to-noise ratio of each layer",
    "spectra.png": "Spectra of the curvature factors",
}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run as a page shows it. Text is as it was read: the templates escape it.

    Attributes:
        source: the folder it was read from.
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
        steps: releases that are steps, without those beside them.
        seconds: of training.
        seed: public seed.
        settings: what else decides the result, as far as recipe and method do not say it.
        smoke: a few steps on a slice of the data, whose score says nothing.
        warnings: why the run has no certified guarantee; empty where it has one.
        against: whom the guarantee holds against, if not everyone who sees the weights.
        curve: (step, score).
        spending: (step, ε).
        command: that trains it again; empty if unknown.
        config: settings as TOML, for a command that reads them.
        card: the privacy card.
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
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        """The task without the words of a smoke run."""
        return self.task.removesuffix(_SMOKE) if self.smoke else self.task


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that was read.

    Attributes:
        runs: in the order given.
        studies: tuning studies, in the same order.
        broken: (file or folder, why it is not shown).
    """

    runs: Sequence[RunSummary] = ()
    studies: Sequence[Tuned] = ()
    broken: Sequence[tuple[str, str]] = ()


def read_all(paths: Sequence[str | os.PathLike[str]]) -> Contents:
    """Read run folders, folders of run folders, and `tune.json` files.

    Args:
        paths: of any of them; a path that is named twice counts once.

    Raises:
        ValueError: nothing can be shown. Up to twelve reasons are named.
    """
    runs: list[RunSummary] = []
    studies: list[Tuned] = []
    broken: list[tuple[str, str]] = []
    for path in _unique(paths, broken):
        try:
            if path.is_dir():
                runs.append(_read_run_folder(path))
            else:
                studies.append(Tuned.read(read_json(path)))
        except ValueError as error:
            broken.append((str(path), plain(error)))
        except OSError as error:
            broken.append((str(path), plain(f"cannot be read ({error.strerror or error})")))
    if not (runs or studies):
        raise ValueError(f"nothing to report: {_join_reasons(broken)}")
    return Contents(runs=runs, studies=studies, broken=broken)


def _join_reasons(broken: Sequence[tuple[str, str]]) -> str:
    if not broken:
        return "no run folder and no tune.json was given"
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
    """Yield a file or a run folder; of another folder, the run folders and `tune.json` in it."""
    if not path.exists():
        broken.append((str(path), "does not exist; name run folders"))
    elif path.suffix == ".json" or _has(path, "config.toml") or _has(path, "privacy_card.json"):
        yield path
    elif path.is_dir():
        inside = [child for child in sorted(path.iterdir()) if _has(child, "config.toml")]
        inside += [path / "tune.json"] if _has(path, "tune.json") else []
        if not inside:
            broken.append((str(path), "holds neither a run (config.toml) nor a tune.json"))
        yield from inside
    else:
        broken.append((str(path), "is neither a run folder nor a tune.json"))


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


# --------------------------------------------------------------------------------------------------
# Run folders.


def _read_run_folder(path: Path) -> RunSummary:
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
    guarantee = card["guarantee"]
    metrics = _read_metrics(folder.metrics)
    evaluated = [(float(row.step), finite(row.accuracy)) for row in metrics.select_evaluated()]
    curve = [(step, value) for step, value in evaluated if value is not None]
    seconds = [row.seconds for row in metrics.rows if row.seconds is not None]
    spending = [(row.step, row.epsilon) for row in metrics.rows if number(row.epsilon) is not None]
    method, _, task = str(card.get("title", path.name)).partition(" on ")
    recipe = str(settings.get("recipe") or task or "unknown")
    method = str(settings.get("method") or method)
    is_smoke = settings.get("smoke") is True
    # The name of own data or of an own task.
    task = Path(str(settings.get("data") or settings.get("task") or "")).name or recipe
    command = "dpkfc train --config config.toml" if config else ""
    seed = number(settings.get("seed"))
    departures = list_departures(recipe, method, settings)
    return RunSummary(
        source=str(path),
        task=task + _SMOKE if is_smoke else task,
        method=method,
        measured_on=metrics.measured_on,
        score=_score_name(ensure_mapping(card.get("results")), metrics.measured_on),
        accuracy=curve[-1][1] if curve else None,
        epsilon=number(guarantee.get("epsilon")),
        target=number(guarantee.get("target_epsilon")),
        delta=number(guarantee.get("delta")),
        sigma=number(ensure_mapping(card.get("mechanism")).get("noise_multiplier")),
        steps=_count_steps(card),
        seconds=sum(seconds) if seconds else None,
        seed=None if seed is None else int(seed),
        settings={name: v for name, v in departures.items() if name not in _NOT_DECIDING},
        smoke=is_smoke,
        warnings=_card_warnings(card),
        against=plain(guarantee.get("against") or "", 300),
        curve=curve,
        spending=evenly_spaced(spending, _MOST_POINTS),
        command=command + (" --test-mode" if settings.get("test_mode") is True else ""),
        config=config,
        card=card,
        pictures=_read_pictures(folder),
    )


def _count_steps(card: Mapping[str, Any]) -> int:
    """Return how many of the releases of a card are steps."""
    releases = number(ensure_mapping(card.get("guarantee")).get("releases")) or 0
    beside = ensure_mapping(card.get("mechanism")).get("extra_releases") or []
    return int(releases - sum(number(ensure_mapping(x).get("releases")) or 0 for x in beside))


def list_departures(recipe: str, method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that recipe and method do not give by themselves.

    Where those are not known, return all.
    """
    has_public_data = bool(settings.get("public_data"))
    try:
        usual = _usual(recipe, method, settings.get("smoke") is True, has_public_data)
    except (ConfigError, TypeError):
        return dict(settings)
    missing = object()
    return {name: v for name, v in settings.items() if usual.get(name, missing) != v}


@functools.cache
def _usual(recipe: str, method: str, smoke: bool, public: bool) -> dict[str, Any]:
    """Return the settings of a recipe and a method, with a file of public data that no one has."""
    settings = {"recipe": recipe, "method": method, "smoke": smoke}
    return run_config({**settings, "public_data": "@" if public else ""}).values


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
    return shown, {n: v for n, v in settings.items() if isinstance(v, (str, int, float))}


def _read_card(path: Path) -> dict[str, Any]:
    card = read_json(path)
    if not isinstance(ensure_mapping(card).get("guarantee"), dict):
        raise ValueError(f"{path.name} is not a privacy card")
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


def _read_pictures(folder: RunFolder) -> dict[str, str]:
    """Return pictures as data URIs, because the page fetches nothing.

    They are drawn by the first page that shows them, and kept in a run folder that can be written.
    """
    content = {}
    for name in _PICTURES:
        path = folder.plots / name
        if path.is_file() and path.stat().st_size <= _MOST_PICTURE_BYTES:
            content[name] = path.read_bytes()
    if folder.figures.is_file() and not _is_drawn(folder):
        content = _draw_pictures(folder)
        with contextlib.suppress(RunFolderError):
            for name, png in content.items():
                write_atomically(folder.plots / name, partial(Path.write_bytes, data=png))
    return {
        title: f"data:image/png;base64,{base64.b64encode(content[name]).decode()}"
        for name, title in _PICTURES.items()
        if content.get(name, b"").startswith(b"\x89PNG\r\n\x1a\n")
    }


def _is_drawn(folder: RunFolder) -> bool:
    """Return whether there are pictures, and none is older than the figures that it shows."""
    paths = [folder.plots / name for name in _PICTURES]
    written = [path.stat().st_mtime_ns for path in paths if path.is_file()]
    return bool(written) and min(written) >= folder.figures.stat().st_mtime_ns


def _draw_pictures(folder: RunFolder) -> dict[str, bytes]:
    from dpkfc.app.run_pictures import draw_run

    columns = []
    content = {}
    try:
        if folder.effects.is_file():
            found = read_json(folder.effects)["effects"]
            columns = [ColumnEffect.from_json(effect) for effect in found]
        figures = RunFigures.from_json(read_json(folder.figures))
        for name, figure in draw_run(figures, columns).items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            content[name] = buffer.getvalue()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = plain(error, 60)
        raise ValueError(
            f"{folder.figures.name} is damaged ({reason}); delete it to see the run without"
            " pictures"
        ) from None
    return content


def _card_warnings(card: Mapping[str, Any]) -> list[str]:
    """Return why a card has no certified guarantee: a failed audit, its stamp, every caveat."""
    caveats = card.get("caveats")
    warnings = [plain(card["stamp"])] if ensure_text(card.get("stamp")) else []
    warnings += [plain(caveat) for caveat in (caveats if isinstance(caveats, list) else [])]
    if not warnings and card["guarantee"].get("certified") is not True:
        warnings = ["UNCERTIFIED"]
    failed = failed_checks(card.get("audit"))
    if failed:
        return [f"AUDIT FAILED: {', '.join(failed)}"[:300], *warnings]
    return warnings
