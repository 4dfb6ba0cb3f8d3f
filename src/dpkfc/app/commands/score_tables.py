"""Tables of the scores of a model, for its owner."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from dpkfc.app.scores import MOST_SHOWN, Score, Scores, digits, name_of
from dpkfc.terminal import make_table, print_line


def print_scores(console: Console, scores: Scores, names: Sequence[str]) -> None:
    """Print scores with their intervals, recall and precision of classes, and their confusion.

    Args:
        console: of the owner.
        scores: of a model.
        names: of the classes; empty for classes without names.
    """
    if not scores.scores:
        return
    numbers = ("value", "95 % interval", "constant guess")
    table = make_table("score", *numbers, right=numbers)
    for score in scores.scores:
        table.add_row(score.name, digits(score.value), score.interval, digits(score.guess))
    console.print(table)
    answers = [name_of(label, names) for label in range(len(scores.confusion))]
    if scores.classes:
        columns = ("records", "recall", "precision")
        table = make_table("class", *columns, right=columns)
        for name, found in zip(answers, scores.classes, strict=True):
            cells = (f"{found.examples:,}", _share(found.recall), _share(found.precision))
            table.add_row(name, *cells)
        console.print(table)
    if 0 < len(answers) <= MOST_SHOWN:
        given = [f"→ {name}" for name in answers]
        table = make_table("class", *given, right=given)
        for name, counts in zip(answers, scores.confusion, strict=True):
            table.add_row(name, *(f"{count:,}" for count in counts))
        console.print(table)
    print_line(f"{scores.intervals}. The constant guess is the best one for these records.")


def _share(score: Score) -> str:
    """Return a share with its interval, in per cent."""
    if score.value is None or score.low is None or score.high is None:
        return "–"
    return f"{score.value:.1%} ({100 * score.low:.0f}–{100 * score.high:.0f})"
