"""The answer of a page: which method is best at each ε, what it costs, and who may be as good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from dpkfc.app.html.groups import Panel, RunGroup, collect
from dpkfc.app.html.texts import count_text, epsilon_text, score_text

# Two methods differ significantly where an interval of their difference leaves out zero.
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method at one ε.

    Attributes:
        group: its runs; of several settings those with the best mean.
        settings: number of settings that were tried at this ε.
        half_width: of the 95 % interval of the mean score, None for a single run.
        verdict: how it compares with the best mean.
        is_tied: whether it has the best mean or does not differ significantly from it.
    """

    group: RunGroup
    settings: int
    half_width: float | None
    verdict: str
    is_tied: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The methods of one task at one ε, the best mean first.

    Attributes:
        title: task, score and ε.
        sentence: which method, and at what cost.
        standings: one for each method.
        score: what the numbers are.
        measured_on: the examples that the score was measured on.
    """

    title: str
    sentence: str
    standings: Sequence[Standing]
    score: str
    measured_on: str


def answer_panels(panels: Sequence[Panel]) -> list[Answer]:
    """Return an answer for each panel and ε, except for smoke runs."""
    answers = []
    for panel in panels:
        groups = [group for group in panel.groups if not group.first.smoke]
        for budget, members in group_by_budget(groups):
            answers.append(_answer(panel, budget, members))
    # Comparisons come before methods that nothing is compared with.
    return sorted(answers, key=lambda answer: len(answer.standings) == 1)


def group_by_budget(groups: Sequence[RunGroup]) -> list[tuple[float | None, list[RunGroup]]]:
    """Return groups by ε, those without one at the end."""
    members = collect(groups, lambda group: group.budget)
    return sorted(members.items(), key=lambda item: (item[0] is None, item[0] or 0.0))


def _answer(panel: Panel, budget: float | None, groups: Sequence[RunGroup]) -> Answer:
    by_method = collect(groups, lambda group: group.first.method)

    def rank(group: RunGroup) -> tuple[bool, float]:
        return bool(group.first.warnings), -group.sort_score

    chosen = sorted((min(members, key=rank) for members in by_method.values()), key=rank)
    best = chosen[0]
    standings = []
    for group in chosen:
        is_tied, verdict = _compare(best, group, len(chosen) - 1, panel.score)
        standings.append(
            Standing(
                group=group,
                settings=len(by_method[group.first.method]),
                half_width=interval(group.scores),
                verdict=verdict,
                is_tied=is_tied,
            )
        )
    return Answer(
        title=f"{panel.title}, ε = {epsilon_text(budget)}",
        sentence=_sentence(standings, panel.score),
        standings=standings,
        score=panel.score,
        measured_on=panel.measured_on,
    )


def interval(scores: Sequence[float]) -> float | None:
    """Return the half width of Student's interval of a mean, None of fewer than two scores."""
    if len(scores) < 2:
        return None
    quantile = stats.t.ppf((1 + LEVEL) / 2, len(scores) - 1)
    return float(quantile * stats.tstd(scores) / math.sqrt(len(scores)))


def difference(
    first: Sequence[float], second: Sequence[float], level: float
) -> tuple[float, float] | None:
    """Return Welch's interval of the mean of `first` less the mean of `second`.

    Returns:
        Lower and upper end, or None: fewer than two scores in one, or no deviation in both.
    """
    if min(len(first), len(second)) < 2:
        return None
    if len(set(first)) == len(set(second)) == 1:
        # Equal scores show no deviation.
        return None
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(level)
    return float(low), float(high)


def _compare(best: RunGroup, group: RunGroup, comparisons: int, score: str) -> tuple[bool, str]:
    """Return whether a method may be as good as the best, and the words for it."""
    if group.first.warnings:
        return False, "no certified guarantee, so it is not compared"
    if group is best:
        return True, "best mean" if comparisons else "the only method here"
    # Each of the comparisons with the best takes its share of the error (Bonferroni).
    level = 1 - (1 - LEVEL) / comparisons
    ends = difference(best.scores, group.scores, level)
    if ends is None:
        return True, "not significantly different from the best: too few runs"
    if ends[0] <= 0:
        return True, "not significantly different from the best"
    return False, f"behind the best by {_difference_text(*ends, score)}"


def _difference_text(low: float, high: float, score: str) -> str:
    """Return a range of differences: percentage points of an accuracy, numbers of other scores."""
    if "accuracy" in score:
        return f"{100 * low:.1f} to {100 * high:.1f} points"
    return f"{low:.2f} to {high:.2f}"


def _sentence(standings: Sequence[Standing], score: str) -> str:
    best = standings[0]
    if best.group.first.warnings:
        return "No run here has a certified guarantee, so none is recommended."
    name, runs = best.group.first.method, count_text(len(best.group.runs), "run")
    value = score_text(best.group.mean, score)
    if best.half_width is not None:
        value += f" ± {score_text(best.half_width, score)}"
    cost = ""
    if best.group.seconds is not None:
        cost = f" of {best.group.seconds:,.1f} s"
    tied = [standing.group.first.method for standing in standings[1:] if standing.is_tied]
    text = f"{name} has the best mean: {value} ({runs}{cost})."
    if len(standings) == 1:
        return f"{name} alone was run: {value} ({runs}{cost})."
    if not tied:
        return text + " Every other method is significantly behind."
    if len(tied) > 3:
        return text + f" {len(tied)} others do not differ significantly."
    return text + f" Not significantly different: {', '.join(tied)}."
