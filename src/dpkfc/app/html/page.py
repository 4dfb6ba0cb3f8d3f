"""One HTML page of runs and tuning studies that holds all it needs. The page fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from dpkfc.app.html.answer import answer_panels
from dpkfc.app.html.contents import Contents, read_all
from dpkfc.app.html.figures import plot_accuracy, plot_learning, plot_spending
from dpkfc.app.html.groups import RunGroup, assign_styles, comparable_panels, group_runs
from dpkfc.app.html.texts import count_text, delta_text, epsilon_text, score_text
from dpkfc.app.run_folder import check_out, write_text
from dpkfc.privacy.ledger_lines import version
from dpkfc.report.card_files import to_markdown
from dpkfc.report.text import plain

# What every page begins with, so that an earlier one is known.
_START = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="dpkfc report"""
_MOST_ANSWERS = 24
_MOST_FOLDERS = 60
_MOST_WARNINGS = 40
_MOST_OF_LINE = 4000
# Markdown of a card is not trusted: markup in it stays text, and nothing is linked or shown.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_MARKDOWN.disable(["link", "image", "autolink", "html_block", "html_inline", "reference"])


def write_page(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str = "Report of private training runs",
) -> Contents:
    """Read runs and tuning studies and write the page.

    Args:
        paths: run folders, folders of them, and `tune.json` files.
        out: the HTML file. An earlier report is replaced; any other file is left alone.
        title: of the page.

    Returns:
        What was read; `broken` lists what is not shown, and why.

    Raises:
        ValueError: nothing can be shown.
        RunFolderError: the file cannot be written, or is not an earlier report.
    """
    out = Path(out)
    contents = read_all(paths)
    check_out(out, _START)
    write_text(out, build(contents, title))
    return contents


def build(contents: Contents, title: str) -> str:
    """Return the page as HTML.

    Args:
        contents: from `read_all`.
        title: of the page.
    """
    groups = group_runs(contents.runs)
    styles = assign_styles(contents.runs)
    panels = comparable_panels(groups)
    learning = []
    for panel in panels:
        learning += plot_learning(panel, styles) + plot_spending(panel, styles)
    shown = contents.runs[:_MOST_FOLDERS]
    uncertified = [run for run in contents.runs if run.warnings]
    warnings = dict.fromkeys((run.method, run.source, run.warnings[0]) for run in uncertified)
    environment = make_environment()
    script = _asset(environment, "page.js")
    return environment.get_template("page.html").render(
        title=title,
        version=version("dpkfc"),
        contents=contents,
        styles=styles,
        uncertified=len(uncertified),
        warnings=list(warnings)[:_MOST_WARNINGS],
        smoke_runs=sum(run.smoke for run in contents.runs),
        answers=answer_panels(panels),
        most_answers=_MOST_ANSWERS,
        accuracy=[plot_accuracy(panel, styles) for panel in panels],
        shows_validation=any(panel.measured_on != "test" for panel in panels),
        learning=learning,
        studies=[render_markdown(study.markdown(for_owner=False), 2) for study in contents.studies],
        groups=sorted(groups, key=_table_order),
        folders=[(run, render_card(run.card)) for run in shown],
        folders_left_out=len(contents.runs) - len(shown),
        style=_asset(environment, "page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def render_card(card: Mapping[str, Any]) -> str:
    """Return the pages of a privacy card as HTML; nothing in it is trusted."""
    try:
        return render_markdown(to_markdown(card))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return render_markdown("The card is damaged; write it anew with `dpkfc card`.")


def render_markdown(text: str, below: int = 3) -> str:
    """Return Markdown as HTML, its headings so many levels lower; nothing in it is trusted."""
    lines = [plain(line, _MOST_OF_LINE) for line in text.split("\n")]
    tokens = _MARKDOWN.parse("\n".join(lines))
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, int(token.tag[1]) + below)}"
        if token.type == "th_open":
            token.attrs["scope"] = "col"
    return _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})


def make_environment() -> Environment:
    """Return the templates. Every text they print is escaped and has no control characters."""
    environment = Environment(
        loader=PackageLoader("dpkfc.app.html"),
        autoescape=True,
        finalize=_remove_control_characters,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cut": plain,
        "counted": count_text,
        "delta": delta_text,
        "epsilon": epsilon_text,
        "percent": score_text,
    }
    return environment


def _remove_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value, len(value))
    return value


def _asset(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _table_order(group: RunGroup) -> tuple[bool, str, float, float]:
    """Return a key that sorts test sets first, then by task and ε, best score first."""
    run = group.first
    is_validation = run.measured_on != "test"
    return is_validation, run.task.casefold(), group.budget or 0.0, -group.sort_score
