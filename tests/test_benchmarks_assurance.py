"""A verdict of docs/assurance.md is marked when the source that it is about has changed since."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def assurance(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("assurance")


def test_the_core_is_covered_and_nothing_else_is_named(assurance):
    assert set(assurance.COVERED) == set(assurance.SECTIONS)
    files = {file for section in assurance.SECTIONS for file in assurance.covered_files(section)}
    assert all(file.exists() for file in files)
    for part in (
        "privacy",
        "gradients",
        "graph",
        "linalg",
        "curvature",
        "postprocess",
        "data",
        "audit",
    ):
        assert set((assurance.SOURCE / part).rglob("*.py")) <= files


@pytest.mark.parametrize(
    ("old", "new", "is_current"),
    [
        ("", "", True),
        ('"""', '"""Another word. ', True),
        ("from __future__", "# a comment\n\nfrom __future__", True),
        ("return ", "return 0 or ", False),
        ("self.", "self._", False),
    ],
    ids=["unchanged", "docstring", "comment", "code", "name"],
)
def test_a_row_says_whether_its_source_has_changed(
    assurance,
    monkeypatch,
    tmp_path,
    old,
    new,
    is_current,
):
    source = tmp_path / "dpkfc"
    shutil.copytree(assurance.SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    section = {"passed": True, "summary": "1 passed", "seconds": 1.0, "date": "2026", "commit": "a"}
    section["source"] = assurance.source_digest("noise", source)
    file = source / "privacy" / "mechanism.py"
    file.write_text(file.read_text("utf-8").replace(old, new, 1), "utf-8")
    now = assurance.source_digest("noise", source)
    monkeypatch.setattr(assurance, "source_digest", lambda name: now)
    table = assurance.summary_table({"sections": {"noise": section}})
    assert ("as tested" in table, "changed since" in table) == (is_current, not is_current)


def test_a_row_without_a_digest_is_marked(assurance):
    section = {"passed": True, "summary": "1 passed", "seconds": 1.0, "date": "2026", "commit": "a"}
    assert "**changed since**" in assurance.summary_table({"sections": {"fuzz": section}})
