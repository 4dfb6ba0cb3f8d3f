"""Settings of the documentation site, which `make docs` builds without a network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import dpkfc

ROOT = Path(__file__).resolve().parents[1]

project = "dpkfc"
author = "the dpkfc contributors"
version = release = dpkfc.__version__
language = "en"

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Notebooks have no outputs in git. `make docs` executes them, and an error in one ends the build.
nb_execution_mode = os.environ.get("DPKFC_DOCS_NOTEBOOKS", "force")
nb_execution_in_temp = True
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_merge_streams = True
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

default_role = "code"  # docstrings write names in single backticks
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Guarantee", "Source"]
napoleon_use_ivar = True  # a field is a line of its class, not an entry
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"dpkfc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

# Only `make docs-links` looks at these.
linkcheck_timeout = 20
linkcheck_retries = 2

# Documents of the repository root stay where a forge looks for them; each has a page here.
ROOT_PAGES = {
    "README.md": "index",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
}
# An entry of a table of contents with a star may match nothing yet.
STARRED = re.compile(r"^([\w-]+\*)\n", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a document of the root on its page, and rewrite links that leave the folder of documents.

    A link to a document of the root becomes one to its page. Any other, to a test or a folder,
    becomes the path in the repository, which the site does not have. An entry with a star that
    matches no page is left out, where Sphinx would warn.
    """
    page = (app.srcdir / docname).parent
    folder = page
    for name, target in ROOT_PAGES.items():
        if target == docname and docname != "index":
            folder = ROOT
            source[0] = (ROOT / name).read_text("utf-8")
            app.env.note_dependency(ROOT / name)

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        found = (folder / target).resolve()
        if not found.is_relative_to(ROOT):
            return link[0]
        path = found.relative_to(ROOT).as_posix()
        if path in ROOT_PAGES:
            found = app.srcdir / f"{ROOT_PAGES[path]}.md"
        if found.is_relative_to(app.srcdir):
            return f"[{text}]({os.path.relpath(found, page)}{anchor})"
        return text if path in text else f"{text} (`{path}`)"

    source[0] = LINK.sub(rewrite, source[0])
    source[0] = STARRED.sub(lambda entry: entry[0] if [*page.glob(entry[1])] else "", source[0])


def mark_code(
    app: Sphinx, what: str, name: str, module: object, options: object, lines: list[str]
) -> None:
    """Mark the indented blocks of a module's docstring as code."""
    if what != "module":
        return
    for number in reversed(range(1, len(lines))):
        is_first = not lines[number - 1] and not lines[number - 2].startswith("    ")
        if lines[number].startswith("    ") and is_first:
            lines[number:number] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Register the reading of pages and docstrings."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", mark_code)
