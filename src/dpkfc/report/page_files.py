"""Results files of studies as a page reads them: plain JSON of the formats that docs/report.md lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.report.figures import read_map
from dpkfc.report.numbers import number, plain
from dpkfc.report.page_read import Chart, Contents, Departures, Sheet, Shown, deciding, marks_of, task_of, train_command
from dpkfc.report.page_text import percent, show
from dpkfc.report.winners import winners_tests

__all__ = ["read_file"]

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
        raise ValueError(f"is a figure of dpkfc reproduce, which has a picture of its own: {_pictures(path)}")
    raise ValueError("is no results file of dpkfc (study, tuning, table or benchmark); leave it out")


def _check_version(content: Mapping[str, Any]) -> None:
    if content.get("version") != VERSION:
        found = plain(content.get("version"), 20)
        raise ValueError(f"is of version {found}, this dpkfc reads {VERSION}; use the version that wrote it")


def _pictures(path: Path) -> str:
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


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


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
