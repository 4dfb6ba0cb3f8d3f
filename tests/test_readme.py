"""README, tutorial and the other documents are executed: Python blocks, cheap commands, names,
links, tables.
"""

import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.app.owndata.schema import read_schema
from tests import forked
from tests.documents import ROOT, blocks, commands, executed, local_links, write_files

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in (
            "index.md",
            "tutorial.md",
            "models.md",
            "integrations.md",
            "how-to-large-embeddings.md",
            "how-to-opacus.md",
            "extending.md",
            "sklearn.md",
            "your-data.md",
            "budget.md",
            "methods/features.md",
        )
    ),
]
CODE_NAME = re.compile(r"`(dpkfc(?:\.\w+)+)`")
# Pages whose commands read files that their Python blocks write.
WITH_FILES = {"your-data.md"}
LANGUAGES = {"python", "sh", "text", "toml", "json", ""}


def ids(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(path):
    broken = [
        target for target in local_links(path) if target and not (path.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_blocks_have_a_known_language(path):
    assert {block.language for block in blocks(path)} <= LANGUAGES


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_names_in_the_text_exist(path):
    for name in CODE_NAME.findall(path.read_text("utf-8")):
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError as error:
                if f"{error.name}.".startswith(f"{parts[0]}."):
                    continue
                break  # An extra that this Python cannot have.
            for attribute in parts[cut:]:
                found = getattr(found, attribute)
            break


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=ids)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """The blocks of one document share their names, from the top down, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    python = executed(path, "python")
    assert python
    for block in python:
        source = "\n" * block.line + block.text
        exec(compile(source, str(path), "exec"), namespace)


def _run_source(source):
    exec(compile(source, "blocks", "exec"), {"__name__": "__main__"})


def _driver(calls):
    from dpkfc.cli import main

    for line, words in calls:
        sys.argv = ["dpkfc", *words]
        try:
            main()
        except SystemExit as done:
            if done.code:
                sys.exit(f"line {line}: dpkfc {' '.join(words)} ended with {done.code}")


def write_adult(folder):
    """Write the real table where the data are, or rows of its form."""
    real = Path(os.environ.get("DPKFC_DATA", "missing"), "tables", "adult.data.gz")
    if real.is_file():
        shutil.copy(real, folder)
        return
    schema = read_schema(folder / "adult.toml")
    lines = [", ".join([*schema.columns, schema.target])]
    for row in range(500):
        cells = []
        for column in schema.columns.values():
            names = column.categories or [str(int(bound)) for bound in column.bounds]
            cells.append(names[row % len(names)])
        lines.append(", ".join([*cells, schema.classes[row % 3 // 2]]))
    with gzip.open(folder / "adult.data.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")


def test_the_page_has_the_schema_that_its_scores_were_measured_with(tmp_path):
    write_files(ROOT / "docs" / "your-data.md", tmp_path)
    measured = read_schema(ROOT / "benchmarks" / "schemas" / "adult.toml")
    assert read_schema(tmp_path / "adult.toml") == measured


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RUN if [*commands(path)]], ids=ids)
def test_commands_run(path, tmp_path):
    """In one empty folder, from the top down; training takes two steps, and of `make` the target
    has to exist.
    """
    calls = []
    for line, command in commands(path):
        words = shlex.split(command)
        assert words[0] in {"make", "dpkfc"}, (
            f"{path.name}:{line}: neither dpkfc nor make: {command}"
        )
        if words[0] == "dpkfc":
            calls.append((line, [*words[1:], "--steps", "2"] if words[1] == "train" else words[1:]))
        elif shutil.which("make") is not None:
            subprocess.run(
                ["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True
            )
    assert calls
    write_files(path, tmp_path)
    if path.name in WITH_FILES:
        write_adult(tmp_path)
        source = "\n".join(block.text for block in executed(path, "python") if not block.file)
        written = forked.call(_run_source, source, cwd=tmp_path)
        assert written.returncode == 0, written.stderr[-2000:]
    done = forked.call(_driver, calls, cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_tables_are_what_the_results_say():
    done = forked.script(ROOT / "benchmarks" / "tables.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_opens_with_what_it_does_a_picture_and_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    opening = text.split("\n## ", 1)[0]
    assert re.search(r"!\[[^\]]+\]\(docs/img/\w+\.png\)", opening)
    assert "make demo" in opening and "make test" in opening


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if " --out " in path.read_text("utf-8")], ids=ids
)
def test_what_a_command_writes_into_the_checkout_is_ignored_by_git(path):
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split()}
    written = {
        name.split("/")[0]
        for name in re.findall(r"dpkfc .* --out ([a-z][\w./-]*)", path.read_text("utf-8"))
    }
    assert written <= ignored


def test_every_module_for_other_libraries_is_in_the_reference():
    page = (ROOT / "docs" / "api" / "integrations.rst").read_text("utf-8")
    for path in (ROOT / "src" / "dpkfc" / "integrations").glob("[a-z]*.py"):
        assert f":: dpkfc.integrations.{path.stem}\n" in page, (
            f"write an entry for {path.stem} into docs/api/integrations.rst"
        )


def test_notebooks_hold_no_output():
    assert len(NOTEBOOKS) >= 8
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), f"clear the outputs of {path.name}"
