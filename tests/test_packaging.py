"""The frame of the project: one version, one pin, files that are packaged, syntax that the oldest
Python reads.
"""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dpkfc"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NEWER_THAN_3_10 = {
    "typing": {
        "Self",
        "Never",
        "LiteralString",
        "assert_never",
        "reveal_type",
        "override",
        "Unpack",
        "TypeVarTuple",
    },
    "enum": {"StrEnum"},
    "datetime": {"UTC"},
    "itertools": {"batched"},
    "contextlib": {"chdir"},
    "hashlib": {"file_digest"},
}


def test_the_version_is_the_same_everywhere():
    version = PROJECT["project"]["version"]
    assert (
        re.search(
            r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE
        ).group(1)
        == version
    )
    assert importlib.import_module("dpkfc").__version__ == version
    released = re.findall(
        r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert not released or released[0] == version


def test_only_torch_is_pinned():
    assert re.fullmatch(r"torch==[\d.]+\s*", (ROOT / "constraints.txt").read_text("utf-8"))
    extras = [
        line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra
    ]
    lines = [*PROJECT["project"]["dependencies"], *extras]
    assert not [line for line in lines if "==" in line.split(";")[0]]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_torch_is_installed_first_and_alone(tmp_path):
    call = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path / 'none'}", "install"]
    printed = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    installs = [
        line.split("install ", 1)[1] for line in printed.splitlines() if "-m pip --disable" in line
    ]
    assert installs[0].strip('"') == (ROOT / "constraints.txt").read_text("utf-8").strip()
    assert "-c constraints.txt" in installs[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_tables_and_pictures_are_refreshed_together():
    printed = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "results"], capture_output=True, text=True, check=True
    ).stdout
    assert "benchmarks/tables.py" in printed and "dpkfc_papers.studies.pages" in printed


def test_the_ci_script_is_executable_and_runs_all_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text("utf-8").splitlines()
    assert {"set -euo pipefail", "make test", "make test-slow"} <= set(lines)


def test_every_file_of_the_package_is_installed():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dpkfc"]
    files = [
        path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    ]
    others = [path.relative_to(SOURCE).as_posix() for path in files]
    assert "py.typed" in others
    assert not [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)]


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_the_entry_point_exists():
    module, _, name = PROJECT["project"]["scripts"]["dpkfc"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def too_new(path):
    """Return the lines of a file that Python 3.10 cannot read."""
    found = []
    tree = ast.parse(path.read_text("utf-8"), feature_version=(3, 10))
    for node in ast.walk(tree):
        names = set()
        if isinstance(node, ast.ImportFrom):
            names = NEWER_THAN_3_10.get(node.module, set()) & {x.name for x in node.names}
        elif isinstance(node, ast.Import):
            names = {"tomllib"} & {x.name for x in node.names}
        elif type(node).__name__ == "TryStar":
            found.append(f"{path}:{node.lineno}: except*")
        if names and not is_guarded(tree, node):
            found.append(f"{path}:{node.lineno}: {', '.join(names)}")
    return found


def is_guarded(tree, wanted):
    """Tell whether a node lies in a `try` or an `if`."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.If)]
    return any(wanted in ast.walk(guard) for guard in guards)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "papers"])
def test_python_3_10_can_read_it(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not [line for path in files for line in too_new(path)]


def test_the_licence_is_apache():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 11_000


def test_importing_the_package_loads_no_slow_library_before_it_is_used():
    slow = [
        "dp_accounting",
        "scipy.stats",
        "scipy.signal",
        "scipy.optimize",
        "matplotlib",
        "pyarrow",
        "rich",
        "cyclopts",
    ]
    code = f"import sys, dpkfc; print([name for name in {slow} if name in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"
