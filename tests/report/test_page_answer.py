"""The first screen of a page: which method is best, what it costs, which do not differ."""

import numpy as np
import pytest
from scipy import stats

from dpkfc.app.html.answer import answer_panels, difference, interval
from dpkfc.app.html.contents import Contents
from dpkfc.app.html.groups import comparable_panels, group_runs
from dpkfc.app.html.page import build
from tests.report.page_cases import summary


def answers_of(runs):
    return answer_panels(comparable_panels(group_runs(runs)))


def test_an_interval_is_students_and_a_difference_welchs():
    a, b = [0.70, 0.72, 0.71, 0.75, 0.69], [0.60, 0.66, 0.63]
    half = stats.t.ppf(0.975, 4) * np.std(a, ddof=1) / np.sqrt(5)
    assert interval(a) == pytest.approx(half)
    assert interval([0.5]) is None
    va, vb = np.var(a, ddof=1) / 5, np.var(b, ddof=1) / 3
    freedom = (va + vb) ** 2 / (va**2 / 4 + vb**2 / 2)
    middle = np.mean(a) - np.mean(b)
    radius = stats.t.ppf(0.995, freedom) * np.sqrt(va + vb)
    assert difference(a, b, 0.99) == pytest.approx((middle - radius, middle + radius))
    assert difference(a, [0.5], 0.95) is None
    assert difference([0.5, 0.5], [0.4, 0.4], 0.95) is None


def test_methods_without_a_significant_difference_are_named():
    scores = {
        "dp-sgd": (0.70, 0.71, 0.72),
        "dp-kfc": (0.80, 0.81, 0.82),
        "dp-ngd": (0.795, 0.81, 0.825),
        "disk": (0.9,),
    }
    rows = [
        summary(method, seed=seed, accuracy=score, seconds=10.0 + seed)
        for method, values in scores.items()
        for seed, score in enumerate(values)
        if method != "disk"
    ]
    (answer,) = answers_of(rows)
    verdicts = {s.group.first.method: (s.is_tied, s.verdict) for s in answer.standings}
    assert verdicts["dp-kfc"][0] and verdicts["dp-ngd"][0] and not verdicts["dp-sgd"][0]
    low, high = difference(scores["dp-kfc"], scores["dp-sgd"], 1 - 0.05 / 2)
    assert verdicts["dp-sgd"][1] == (
        f"behind the best by {100 * low:.1f} to {100 * high:.1f} points"
    )
    assert "Not significantly different: dp-" in answer.sentence
    assert "of 11.0 s" in answer.sentence
    assert answer.standings[0].half_width is not None
    rows.append(summary("disk", accuracy=0.9))
    (answer,) = answers_of(rows)
    assert answer.standings[0].group.first.method == "disk"
    assert all("too few runs" in s.verdict for s in answer.standings[1:])


def test_a_run_without_guarantee_is_never_the_answer():
    rows = [summary("disk", accuracy=0.99, warnings=["noise was read twice"]), summary("dp-sgd")]
    (answer,) = answers_of(rows)
    assert answer.standings[0].group.first.method == "dp-sgd"
    assert answer.sentence.startswith("dp-sgd has the best mean")
    (answer,) = answers_of(rows[:1])
    assert "none is recommended" in answer.sentence


def test_smoke_runs_answer_nothing_and_comparisons_come_first():
    rows = [
        summary("dp-sgd", epsilon=1.0),
        summary("dp-sgd", epsilon=8.0),
        summary("dp-kfc", epsilon=8.0),
    ]
    rows.append(summary("dp-kfc", smoke=True, accuracy=0.5))
    first, second = answers_of(rows)
    assert len(first.standings) == 2 and "ε = 8" in first.title
    assert second.standings[0].verdict == "the only method here"


def test_the_answer_stands_before_every_figure():
    page = build(Contents(runs=[summary("dp-sgd"), summary("dp-kfc")]), "title")
    assert 0 < page.index('id="answer"') < page.index('id="methods"') < page.index('id="accuracy"')
