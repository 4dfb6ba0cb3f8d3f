"""The line that a person watches."""

import io

from rich.console import Console

from dpkfc.app.progress import TrainingProgress, track


def _draw_bar(done=0):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=140, color_system=None)
    with TrainingProgress(10, done=done, console=console, label="DP-KFC") as progress:
        progress.accuracy(0.123, "test")
        progress.advance(epsilon=0.43216, clipped_fraction=0.25, batch_size=17)
    return text.getvalue()


def test_it_shows_step_epsilon_clipping_speed_and_accuracy():
    text = _draw_bar()
    for part in ("DP-KFC", "1/10", "ε ≤ 0.433", "clipped  25 %", "examples/s", "test 12.3 %"):
        assert part in text, part
    assert "0.432" not in text  # rounded up


def test_a_resumed_run_begins_where_it_was():
    assert "5/10" in _draw_bar(done=4)


def test_parts_are_counted_on_a_terminal_alone(capsys, monkeypatch):
    """Output that another program reads began with an empty line."""
    assert list(track([1, 2], "features")) == [1, 2]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert list(track([1, 2], "features")) == [1, 2]
    shown = capsys.readouterr()
    assert not shown.out and "features" in shown.err


def test_without_a_console_nothing_is_drawn(capsys):
    with TrainingProgress(3) as progress:
        progress.advance(epsilon=0.1, clipped_fraction=0.0, batch_size=0)
        progress.accuracy(0.5, "test")
    assert capsys.readouterr().out == ""
