"""Print what `make stats` shows: files, tokens and packed lines of each part of the source.

python benchmarks/stats.py
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "core": ROOT / "src" / "dpkfc",
    "app": ROOT / "src" / "dpkfc" / "app",
    "papers": ROOT / "papers" / "dpkfc_papers",
    "benchmarks": ROOT / "benchmarks",
}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
}
NOT_CODE |= {tokenize.ENDMARKER}
CLOSING = {")", "]", "}"}


@dataclass
class Counts:
    """Figures of some files."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    long_messages: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one file."""
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        documents = docstring_lines(tree)
        self.files += 1
        rows = set()
        earlier = ""
        depth = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in NOT_CODE:
                continue
            # From Python 3.12 on a formatted text is many tokens. It counts as one, as before.
            kind = tokenize.tok_name[token.type]
            depth -= kind == "FSTRING_END"
            is_inside = depth > 0 or kind == "FSTRING_END"
            depth += kind == "FSTRING_START"
            if is_inside:
                continue
            is_text = kind in ("STRING", "FSTRING_START")
            if is_text and token.start[0] in documents:
                continue
            rows.add(token.start[0])
            # The formatter decides about a comma before a bracket and about pieces of one text.
            self.tokens -= earlier == "," and token.string in CLOSING
            self.tokens += not (is_text and earlier == "text")
            earlier = "text" if is_text else token.string
        self.lines += len(rows)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise | ast.Tuple):
                length = sum(map(message_length, messages_of(node)))
                if length > 160:
                    self.long_messages.append(f"{path.relative_to(ROOT)}:{node.lineno} {length}")


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the first lines of all docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return {
        node.body[0].lineno for node in owners if ast.get_docstring(node, clean=False) is not None
    }


def messages_of(node: ast.Raise | ast.Tuple) -> list[ast.expr]:
    """Return the texts of an error, or of a check: a pair of a condition and a message."""
    if isinstance(node, ast.Raise):
        return node.exc.args if isinstance(node.exc, ast.Call) else []
    if len(node.elts) == 2 and not isinstance(node.elts[0], ast.Constant):
        return node.elts[1:]
    return []


def message_length(node: ast.expr) -> int:
    """Return the characters of a message, with twelve for each value in it."""
    if isinstance(node, ast.Constant):
        return len(node.value) if isinstance(node.value, str) else 0
    if isinstance(node, ast.JoinedStr):
        return sum(
            12 if isinstance(value, ast.FormattedValue) else message_length(value)
            for value in node.values
        )
    if isinstance(node, ast.BinOp):
        return message_length(node.left) + message_length(node.right)
    return 0


def files_of(part: str) -> Iterator[Path]:
    """Yield the files of a part; the application is not part of the core."""
    for path in sorted(PARTS[part].rglob("*.py")):
        if part != "core" or PARTS["app"] not in path.parents:
            yield path


def words_of(paths: list[Path]) -> int:
    """Return the number of words without tables and code blocks."""
    total = 0
    for path in paths:
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        text = re.sub(r"<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL)
        total += sum(
            len(line.split()) for line in text.splitlines() if not line.lstrip().startswith("|")
        )
    return total


def count_parts() -> dict[str, Counts]:
    """Return the figures of each part."""
    counts = {}
    for part in PARTS:
        counts[part] = Counts()
        for path in files_of(part):
            counts[part].add(path)
    return counts


def main() -> None:
    counts = count_parts()
    print(f"{'':10} {'files':>6} {'tokens':>8} {'a line':>7}")
    for part, found in counts.items():
        print(f"{part:10} {found.files:6} {found.tokens:8,} {found.tokens / found.lines:7.2f}")
    docs = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    print(
        f"words of README and docs without tables: {words_of(docs):,}; README:"
        f" {words_of([ROOT / 'README.md']):,}"
    )


if __name__ == "__main__":
    main()
