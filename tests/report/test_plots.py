"""Pictures: they are drawn for every kind of run, texts do not overlap, nothing global is
touched.
"""

import itertools
import warnings
from datetime import datetime

import matplotlib
import numpy as np
import pytest

from dpkfc.app.html.figures import _Canvas, _set_scores, _set_steps
from dpkfc.app.picture_data import ColumnEffect, Curve, LayerSignal, LayerSpectra, spectrum_points
from dpkfc.app.picture_style import save
from dpkfc.app.run_pictures import comparison, effects, signal_to_noise, spectra


def _curve(label="DP-KFC on digits", count=6, **changed):
    steps = list(range(0, 10 * count, 10))
    values = {
        "label": label,
        "steps": steps,
        "accuracy": [0.1 + 0.8 * (1 - np.exp(-s / 20)) for s in steps],
        "caption": "ε = 2, δ = 1e-05",
    }
    return Curve(**{**values, **changed})


def _spectra(count):
    values = {"A": np.exp(-np.linspace(0, 9, 50)), "G": [1.0, 0.1, 0.0, 0.0]}
    points = {side: spectrum_points(known) for side, known in values.items()}
    return [
        LayerSpectra(name=f"layer{i} · Linear", points=points, damping={"A": 0.1, "G": 0.01})
        for i in range(count)
    ]


def _signals(count):
    return [
        LayerSignal(name=f"blocks.{i} · Conv2d", plain=10.0**-i, preconditioned=0.5)
        for i in range(count)
    ]


def _effect(column, values, outputs, *, is_curve=True):
    reach = np.linspace(-1, 1, len(values))[:, None] * np.arange(1.0, len(outputs) + 1)
    noise = np.full_like(reach, 0.1)
    return ColumnEffect(column, is_curve, values, outputs, reach, noise, reach[0])


DAYS = [datetime(2024, month, 1, 8) for month in range(1, 13)]


# As long as a recipe makes it.
LONG = (
    "DP-Adam on Fashion-MNIST, at the released weights, on the probe; preconditioner not used;"
    " 1,024 examples"
)

FIGURES = {
    "effects of fifty classes": lambda: effects(
        [_effect("age", [0.0, 1.0], [f"class {number}" for number in range(50)])]
    ),
    "effects of a bank": lambda: effects(
        [
            _effect("time_since_last_payment_in_days", [0.0, 5e4, 1e5], ["a", "b" * 60]),
            _effect("income", [1.0, 46.4, 2154.4347, 100_000.0], ["a", "b" * 60]),
            _effect("opened", DAYS, ["a", "b" * 60]),
            _effect("sector", ["agriculture and fishing", "other"], ["a", "b"], is_curve=False),
        ]
    ),
    "comparison of one point": lambda: comparison([_curve(count=1)], "Alone"),
    "comparison of nothing known": lambda: comparison([_curve(steps=[], accuracy=[])], "Alone"),
    "comparison, stamped": lambda: comparison([_curve(stamp="NOT PRIVATE: test mode")], "Alone"),
    "comparison": lambda: comparison([_curve("DP-SGD"), _curve("DP-KFC")], "Side by side", "ε = 2"),
    "comparison of many": lambda: comparison(
        [_curve(f"method {i}") for i in range(6)], "Side by side"
    ),
    "signal": lambda: signal_to_noise(_signals(4), LONG),
    "signal of none": lambda: signal_to_noise([]),
    "signal, stamped": lambda: signal_to_noise(
        _signals(4), "on the probe", "NOT PRIVATE: test mode"
    ),
    "spectra": lambda: spectra(_spectra(4), LONG),
    "spectra of one": lambda: spectra(_spectra(1)),
    "spectra of many": lambda: spectra(_spectra(21)),
    "spectra of none": lambda: spectra([]),
    "spectra, stamped": lambda: spectra(_spectra(4), "on the probe", "UNCERTIFIED"),
}


@pytest.mark.quick("comparison of one point", "comparison of nothing known", "spectra of one")
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(FIGURES[name](), tmp_path / "plots" / "x.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 5_000


def _boxes(figure):
    """The rectangles of all visible texts, stamps left out."""
    renderer = figure.canvas.get_renderer()
    # Ticks beyond the limits of an axis are kept by matplotlib but not drawn.
    outside = set()
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low <= tick.get_loc() <= high:
                outside |= {tick.label1, tick.label2}
    texts = [
        t
        for t in figure.findobj(matplotlib.text.Text)
        if t.get_visible() and t.get_text().strip() and t not in outside
    ]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if not t.get_rotation()]


@pytest.mark.quick("comparison of many", "signal", "spectra")
@pytest.mark.parametrize(
    "name",
    [
        "comparison",
        "comparison of many",
        "effects of fifty classes",
        "effects of a bank",
        "signal",
        "spectra",
    ],
)
def test_no_text_overlaps_another_or_leaves_the_picture(tmp_path, name):
    figure = FIGURES[name]()
    save(figure, tmp_path / "x.png")
    boxes = [(text, box) for text, box in _boxes(figure) if box.width > 1]
    # Ticks beyond the limits of an axis are kept by matplotlib but not drawn.
    inside = [(text, b) for text, b in boxes if 0 < b.x1 and b.x0 < figure.bbox.x1 and 0 < b.y1]
    for (first, a), (second, b) in itertools.combinations(inside, 2):
        both = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert both[0] <= 1 or both[1] <= 1, f"{first!r} overlaps {second!r}"
    for text, box in inside:
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, (
            f"{text!r} leaves the picture"
        )


@pytest.mark.parametrize("name", ["comparison, stamped", "signal, stamped", "spectra, stamped"])
def test_a_run_without_a_guarantee_is_stamped_across_its_pictures(name):
    assert any(
        t.get_text() in {"NOT PRIVATE: test mode", "UNCERTIFIED"} for t in FIGURES[name]().texts
    )


def test_eigenvalues_that_are_rounding_are_not_drawn():
    points = {"A": spectrum_points([0.5, 1.0, 1e-8], 3), "G": spectrum_points([1.0])}
    figure = spectra([LayerSpectra(name="0", points=points)])
    drawn = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata()) > 1]
    assert [list(y) for y in drawn] == [[1.0, 0.5]]


def test_sixteen_panels_at_most_and_said_so():
    figure = spectra(_spectra(21), "on the probe")
    assert sum(axes.get_visible() for axes in figure.axes) == 16
    assert any("16 of 21 layers shown" in t.get_text() for t in figure.texts)


def test_of_forty_classes_those_are_drawn_that_reach_farthest():
    figure = FIGURES["effects of fifty classes"]()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"class {number}" for number in range(43, 50)
    ]
    assert any("7 of 50 classes shown" in text.get_text() for text in figure.texts)


def test_names_amounts_and_dates_of_columns_can_be_read():
    figure = FIGURES["effects of a bank"]()
    panels = {axes.get_title("left"): axes for axes in figure.axes}
    income, opened = panels["income"], panels["opened"]
    assert any(name.startswith("time_since_last_payment") for name in panels)
    shown = [label.get_text() for label in income.get_xticklabels()]
    assert shown == ["1", "46.4", "2150", "100000"]
    assert opened.get_xticklabels()[0].get_text() == "2024-01-01"


def test_an_axis_of_one_day_is_marked_by_hours():
    came = _effect("came", [datetime(2024, 1, 1, hour) for hour in (8, 12)], ["odds"])
    figure = effects([came])
    assert figure.axes[0].get_xticklabels()[0].get_text() == "2024-01-01 08:00"


def test_an_axis_of_steps_is_marked_at_whole_steps():
    """Marks at 2.5 and 7.5 would read 2 and 8."""
    axes = matplotlib.figure.Figure(figsize=(8, 5)).subplots()
    axes.plot([0, 20], [0, 1])
    _set_steps(axes)
    assert all(float(mark).is_integer() for mark in axes.get_xticks())


@pytest.mark.parametrize("accuracy", [0.07, 0.3945, 0.5, 0.8454, 0.995])
def test_marks_below_a_row_of_scores_stand_apart(accuracy):
    """The axis of 39.45 % had marks every half percent, with two decimals each."""
    canvas = _Canvas()
    canvas.axes.errorbar(accuracy, 0)
    _set_scores(canvas.axes, "accuracy on the test set", "x")
    canvas.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in canvas.axes.get_xticklabels()]
    low, high = canvas.axes.bbox.intervalx
    shown = [box for box in boxes if low <= box.x0 + box.width / 2 <= high]
    gaps = [right.x0 - left.x1 for left, right in itertools.pairwise(shown)]
    assert len(shown) > 2 and min(gaps) > 4
