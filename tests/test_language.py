"""Read the project's prose for turns of phrase that a stranger has to read twice.

Each pattern says what to write instead. Python files are read in comments and texts, pages whole;
code between backticks is left out.
"""

import io
import re
import tokenize
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = {
    r"(?<![Tt]here )\b(?:is|are|was|were|be|been) no (?!longer|more|less|better|worse)\w+": (
        'a negated noun reads like a riddle: write "is not a name", not "is no name"'
    ),
    r"\b[Tt]h(?:at|ose) of\b": "the pronoun hides its noun: name the thing again",
    r"(?<![Tt]here )\b(?:is|are|was|were|be) none\b": 'name the noun: "is not a name"',
    r"\b[Nn]one of (?:a|it|them|which|whose)\b": 'name what is missing: "no row of the file"',
    r"\bwhere none (?:is|are|does|has)\b": 'name what is missing: "where no row is given"',
    r"(?<!says )\b[Nn]othing of\b": 'name what is missing: "no value of an unfinished step"',
    r"\bWorry:": "say what holds, not what was feared",
}
CODE = re.compile(r"```.*?```|``[^`]+``|`[^`]+`|\{[{%].*?[}%]\}", re.S)


def read_python(text):
    """Return line and words of comments and literals; those that touch are one text."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = (token for token in tokens if token.type != tokenize.NL)
    for kind, group in groupby(kept, key=lambda token: token.type):
        if kind in (tokenize.COMMENT, tokenize.STRING):
            parts = list(group)
            yield parts[0].start[0], "\n".join(part.string.strip("#fr\"'") for part in parts)


def read_prose():
    """Return the place and the words of everything that a person reads, without code."""
    folders = ("src", "papers", "benchmarks", "docs", "examples")
    paths = [path for name in folders for path in sorted((ROOT / name).rglob("*"))]
    for path in [*paths, *ROOT.glob("*.md")]:
        if path.suffix in (".py", ".md"):
            text = path.read_text("utf-8")
            for line, words in read_python(text) if path.suffix == ".py" else [(1, text)]:
                yield f"{path.relative_to(ROOT)}:{line}", " ".join(CODE.sub("_", words).split())


@pytest.fixture(scope="module")
def prose():
    return list(read_prose())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prose_is_plain(prose, pattern):
    found = [
        f"{place}: …{words[max(0, match.start() - 40) : match.end() + 20]}…"
        for place, words in prose
        for match in re.finditer(pattern, words)
    ]
    assert not found, f"{PATTERNS[pattern]}:\n" + "\n".join(found)
