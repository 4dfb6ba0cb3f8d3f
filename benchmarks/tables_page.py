"""Tables of docs/results/tables.md: this library (`tables_ours*.json`) and others
(`tables_peers.json`). A file that is missing leaves its rows out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tables_peers
import tables_tried
from common import RESULTS, markdown, read_json, write_json  # noqa: F401
from dpkfc_papers.studies.harness import half_interval, machine_of_rows

TWO_CLASSES = ("adult", "credit", "cardio", "telco", "compas")
NOT_PRIVATE = "none"
# Name of a score, factor, digits; how it is found among the scores of a row.
SCORES: dict[str, tuple[str, float, int]] = {
    "auroc": ("AUROC", 100, 1),
    "log-loss": ("log loss", 1, 3),
    "calibration": ("calibration error", 100, 1),
}


def load(*more: str) -> list[dict[str, Any]]:
    """Return all rows with their table, model, ε and seed, which their keys say.

    Args:
        more: names of further files of results.
    """
    rows = []
    ours = sorted(RESULTS.glob("tables_ours*.json"))
    for path in [*ours, RESULTS / "tables_peers.json", *(RESULTS / name for name in more)]:
        for key, row in read_json(path).get("rows", {}).items():
            table, model, epsilon, seed = key.split("/")
            place = {"table": table, "model": model, "epsilon": epsilon, "seed": int(seed)}
            rows.append({**row, **place, "title": _title(model, row)})
    return rows


def _title(model: str, row: dict[str, Any]) -> str:
    peer = tables_peers.PEERS.get(model)
    return peer.title if peer else str(row.get("title", model))


def table(part: str) -> str:
    """Return a score of `SCORES`, or `more`, `adult`, `epsilons`, `seconds`, `curvature`, `tried`,
    `choice`.
    """
    if part == "choice":
        return _choice()
    rows = load("tables_tried.json") if part == "tried" else load()
    if not rows:
        return "*Not measured yet: `python benchmarks/tables_peers.py`.*"
    makers: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "more": _more,
        "adult": _adult,
        "epsilons": _epsilons,
        "seconds": _seconds,
        "curvature": _curvature,
        "tried": _tabulate_tried,
    }
    text = makers[part](rows) if part in makers else _one_score(rows, *SCORES[part])
    return f"{text}\n\n{machine_of_rows(rows)}"


def _one_score(rows: list[dict[str, Any]], score: str, factor: float, digits: int) -> str:
    """Return one score at ε = 1 of the tables with two classes."""
    lines = []
    for title, chosen in _models(rows):
        cells = [
            _cell([row for row in chosen if row["table"] == name], score, factor, digits)
            for name in TWO_CLASSES
        ]
        lines.append([title, *cells])
    guesses = [_guess(rows, name, score, factor, digits) for name in TWO_CLASSES]
    return markdown(["at ε = 1", *TWO_CLASSES], [["constant guess", *guesses], *lines])


def _adult(rows: list[dict[str, Any]]) -> str:
    """Return all scores of Adult at ε = 1, for the page of own data."""
    scores = {"accuracy": ("accuracy", 100, 1), **SCORES}
    of_adult = [row for row in rows if row["table"] == "adult"]
    lines = [["constant guess", *(_guess(rows, "adult", *score) for score in scores.values())]]
    for title, chosen in _models(of_adult):
        lines.append([title, *(_cell(chosen, *score) for score in scores.values())])
    head = ["Adult at ε = 1", "accuracy %", "AUROC %", "log loss", "calibration error %"]
    return markdown(head, lines)


def _more(rows: list[dict[str, Any]]) -> str:
    lines = []
    for title, chosen in _models(rows):
        bean = [row for row in chosen if row["table"] == "bean"]
        diamonds = [row for row in chosen if row["table"] == "diamonds"]
        cells = [
            _cell(bean, "log loss", 1, 3),
            _cell(bean, "accuracy", 100, 1),
            _cell(diamonds, "mean absolute error", 1, 0),
            _cell(diamonds, "R²", 100, 1),
        ]
        lines.append([title, *cells])
    guess = [
        _guess(rows, "bean", "log loss", 1, 3),
        _guess(rows, "bean", "accuracy", 100, 1),
        _guess(rows, "diamonds", "mean absolute error", 1, 0),
        _guess(rows, "diamonds", "R²", 100, 1),
    ]
    head = ["bean: log loss", "bean: accuracy %", "diamonds: mean absolute error", "diamonds: R² %"]
    return markdown(["at ε = 1", *head], [["constant guess", *guess], *lines])


def _epsilons(rows: list[dict[str, Any]]) -> str:
    """Return AUROC and log loss at other ε."""
    lines = []
    others = {row["epsilon"] for row in rows} - {NOT_PRIVATE, "1"}
    for epsilon in sorted(others, key=float):
        for title, chosen in _models(rows, epsilon):
            cells = []
            for name in TWO_CLASSES:
                of_table = [row for row in chosen if row["table"] == name]
                cells.append(
                    f"{_cell(of_table, 'AUROC', 100, 1, half=False)}"
                    f" / {_cell(of_table, 'log loss', 1, 3, half=False)}"
                )
            if chosen and all(row["epsilon"] == epsilon for row in chosen):
                lines.append([epsilon, title, *cells])
    return markdown(["ε", "AUROC % / log loss, means", *TWO_CLASSES], lines)


def _curvature(rows: list[dict[str, Any]]) -> str:
    """Return what curvature adds to the same model without it, at ε = 1, split by split."""
    arms = {"additive": "private moments", "additive-schema": "rows drawn from the schema"}
    names = (*TWO_CLASSES, "bean", "diamonds")
    head = ["difference to no curvature", "curvature of", *names]
    return markdown(head, _differences(rows, arms, "additive-none", names))


def _tabulate_tried(rows: list[dict[str, Any]]) -> str:
    """Return what other models add to the additive model, at ε = 1, split by split."""
    arms = {row["model"]: row["title"] for row in rows if row["model"] in tables_tried.MODELS}
    names = tables_tried.TABLES
    head = ["difference to the additive model", "", *names]
    return markdown(head, _differences(rows, arms, "additive", names))


def _differences(
    rows: list[dict[str, Any]], arms: Mapping[str, str], without: str, names: Sequence[str]
) -> list[list[str]]:
    """Return a line for each score and model: the mean difference on each table, and its interval.

    Args:
        rows: of all models.
        arms: models and their titles.
        without: the model that they are compared with.
        names: of tables.
    """
    lines = []
    scores = (("AUROC", 100, 2), ("log loss", 1, 4), ("mean absolute error", 1, 0))
    for score, factor, digits in scores:
        for model, title in arms.items():
            cells = []
            for name in names:
                pairs = _pairs(rows, name, model, without, score)
                changes = [factor * (value - before) for value, before in pairs]
                text = f"{statistics.mean(changes):+.{digits}f}" if changes else "–"
                if len(changes) > 1:
                    text += f"\u00a0±\u00a0{half_interval(changes):.{digits}f}"
                cells.append(text)
            if any(cell != "–" for cell in cells):
                lines.append([score, title, *cells])
    return lines


def _pairs(
    rows: list[dict[str, Any]], name: str, model: str, without: str, score: str
) -> list[tuple[float, float]]:
    """Return a score of a model, and of the one it is compared with, on equal splits."""
    values: dict[str, dict[int, float]] = {model: {}, without: {}}
    for row in rows:
        if row["table"] == name and row["epsilon"] == "1" and row["model"] in values:
            for value in _values([row], score):
                values[row["model"]][row["seed"]] = value
    known, before = values[model], values[without]
    return [(known[seed], before[seed]) for seed in sorted(known.keys() & before)]


def _choice() -> str:
    """Return the scores of settings that were tried on a validation part."""
    rows = read_json(RESULTS / "tables_choice.json").get("rows", {})
    lines = []
    for key, row in rows.items():
        name, _, _, seed, tried = key.split("/")
        cells = [
            _cell([row], score, factor, digits, half=False)
            for score, factor, digits in (SCORES["auroc"], SCORES["log-loss"])
        ]
        lines.append([tried.replace("=", " "), row["title"], f"{name}, {seed}", *cells])
    head = ["setting", "on a validation part, at ε = 1", "table, split", "AUROC %", "log loss"]
    return f"{markdown(head, lines)}\n\n{machine_of_rows(list(rows.values()))}"


def _seconds(rows: list[dict[str, Any]]) -> str:
    names = tables_peers.FILES
    lines = []
    for title, chosen in _models(rows):
        cells = []
        for name in names:
            seconds = [
                row["seconds"] for row in chosen if row["table"] == name and "seconds" in row
            ]
            cells.append(f"{statistics.median(seconds):.1f}" if seconds else "–")
        lines.append([title, *cells])
    return markdown(["processor seconds of a fit, at ε = 1", *names], lines)


def _models(
    rows: list[dict[str, Any]], epsilon: str = "1"
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of each model at an ε, ours first and those without privacy last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["epsilon"] in (epsilon, NOT_PRIVATE):
            found.setdefault(row["title"], []).append(row)
    return sorted(found.items(), key=lambda item: item[1][0]["epsilon"] == NOT_PRIVATE)


def _values(rows: Sequence[dict[str, Any]], score: str, part: str = "scores") -> list[float]:
    values = []
    for row in rows:
        for name, value in row.get(part, {}).items():
            if name.startswith(score) and value is not None:
                values.append(value)
    return values


def _cell(
    rows: Sequence[dict[str, Any]], score: str, factor: float, digits: int, half: bool = True
) -> str:
    """Return mean and 95 % interval over seeds, `refuses` for an error, a dash for no row."""
    values = [factor * value for value in _values(rows, score)]
    if not values:
        return "refuses" if any("error" in row for row in rows) else "–"
    text = f"{statistics.mean(values):,.{digits}f}"
    if half and len(values) > 1:
        text += f"\u00a0±\u00a0{half_interval(values):,.{digits}f}"
    return text + (f" ({len(values)})" if half and len(values) != tables_peers.SEEDS else "")


def _guess(rows: list[dict[str, Any]], name: str, score: str, factor: float, digits: int) -> str:
    of_table = [row for row in rows if row["table"] == name]
    values = [factor * value for value in _values(of_table, score, "guess")]
    return f"{statistics.mean(values):,.{digits}f}" if values else "–"
