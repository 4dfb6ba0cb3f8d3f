"""The rules of CONTRIBUTING.md that a program can check: sizes, messages, dispatch, documents."""

import ast
import os
import re
import runpy

import pytest

from tests.documents import ROOT
from tests.test_dependency_rules import source_files

STATS = runpy.run_path(str(ROOT / "benchmarks" / "stats.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Budgets of code tokens, set by the owner: a part that grows past its budget needs a decision.
BUDGETS = {
    "core": 317_440,
    "app": 126_955,
    "papers": 93_088,
    "benchmarks": 52_120,
}
LINALG = {"Outer", "Lookup", "Tied", "PerExample", "ConvBlock", "Patched", "MaterializedGradients"}
LINALG |= {"Kronecker", "Eigenbasis", "Elementwise", "Identity", "Diagonal", "Dense", "LowRank"}


@pytest.fixture(scope="module")
def counts():
    return STATS["count_parts"]()


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_stays_within_its_budget(counts, part):
    assert counts[part].tokens <= BUDGETS[part]
    # An error has to be read at once: at most 160 characters.
    assert not counts[part].long_messages


def dispatches(file):
    """Yield the lines that ask for the class of a block or of a metric entry."""
    for node in ast.walk(file.tree):
        names = set()
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "isinstance"
            and len(node.args) == 2
        ):
            names = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
        elif isinstance(node, ast.MatchClass):
            names = {ast.unparse(node.cls)}
        if names & LINALG:
            yield f"{file.name}:{getattr(node, 'lineno', 0)}"


def test_dispatch_on_blocks_and_metric_entries_stays_in_linalg():
    found = [line for file in source_files() if file.top != "linalg" for line in dispatches(file)]
    assert not found


def test_the_readme_is_short():
    assert STATS["words_of"]([ROOT / "README.md"]) <= 700


def test_the_design_is_short():
    assert len((ROOT / "docs" / "design.md").read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_has_lines_of_at_most_100_columns(path):
    # Rows of tables are as wide as what they list, and addresses of links cannot be wrapped.
    text = re.sub(
        r"<!-- table: .*?<!-- end of table -->", "", path.read_text("utf-8"), flags=re.DOTALL
    )
    prose = [line for line in text.splitlines() if not line.startswith(("|", "[opinion]("))]
    assert max(map(len, prose)) <= 100


@pytest.mark.skipif(os.name == "nt", reason="Windows has no run bit")
def test_every_finding_can_be_run():
    scripts = list((ROOT / "findings").glob("*.sh"))
    assert scripts and not [path.name for path in scripts if not os.access(path, os.X_OK)]


def test_the_glossary_has_at_most_thirty_entries():
    rows = re.findall(
        r"^\| (?!term|---)", (ROOT / "docs" / "glossary.md").read_text("utf-8"), flags=re.MULTILINE
    )
    assert 20 <= len(rows) <= 30


def test_every_slug_in_a_message_is_a_heading_of_the_errors_page():
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    headings = set(re.findall(r"^## ([a-z-]+)$", page, flags=re.MULTILINE))
    named = set()
    for file in source_files():
        named |= set(re.findall(r"docs/errors\.md#([a-z-]+)", ast.unparse(file.tree)))
    assert named == headings
