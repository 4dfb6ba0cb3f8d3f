"""The documentation site: every page, link and docstring builds without a warning, and every
notebook runs.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.documents import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("myst_nb")
pytest.importorskip("furo")
pytest.importorskip("sphinx_design")
pytest.importorskip("sphinx_copybutton")

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# A notebook calls the command line, which lies beside the interpreter.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _build(out):
    from sphinx.cmd.build import main

    # Everything is read and every reference is resolved; no page is written.
    sys.exit(main(["-q", "-W", "--keep-going", "-b", "dummy", str(DOCS), str(out)]))


def test_the_site_builds_without_a_warning(tmp_path):
    env = {**os.environ, "DPKFC_DOCS_NOTEBOOKS": "off"}
    done = forked.call(_build, tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _execute(path, folder):
    """Run the cells of a notebook in this process; a kernel would import everything again."""
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell

    os.chdir(folder)
    shell = InteractiveShell.instance()
    shell.system = _call_command
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()


def _call_command(line):
    """Run a line of the shell; the command `dpkfc` runs in a fork of this process."""
    words = shlex.split(line)
    if words[0] != "dpkfc" or set(line) & set("|;&<>"):
        subprocess.run(line, shell=True, check=False)
        return
    child = os.fork()
    if child == 0:
        from dpkfc.cli import main

        sys.argv[:] = words
        try:
            main()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    env = {**os.environ, "PATH": PATH, "MPLBACKEND": "agg"}
    done = forked.call(_execute, path, tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
