"""Reading the documents of the project: fenced blocks, links, and whether a block is meant to be
run.

A block in the language `python` or `sh` is executed by the tests unless the line before its fence
is a comment `<!-- not executed: reason -->`. Blocks in other languages are shown, never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_EXECUTED = re.compile(r"<!-- not executed: (.+) -->")
FILE = re.compile(r"<!-- file: (\S+) -->")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, its text, why it is not executed, and the file
    that it is the content of (or None).
    """

    line: int
    language: str
    text: str
    not_executed: str | None
    file: str | None = None


def blocks(path: Path) -> Iterator[Block]:
    """Every fenced block of a Markdown file."""
    lines = path.read_text("utf-8").splitlines()
    start, language = None, ""
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start, language = number, line[3:].strip()
            continue
        before = next((text for text in reversed(lines[:start]) if text.strip()), "")
        reason = NOT_EXECUTED.fullmatch(before.strip())
        named = FILE.fullmatch(before.strip())
        yield Block(
            start + 1,
            language,
            "\n".join(lines[start + 1 : number]),
            reason.group(1) if reason else None,
            named.group(1) if named else None,
        )
        start = None
    if start is not None:
        raise ValueError(f"{path.name}: the block of line {start + 1} is never closed")


def write_files(path: Path, folder: Path) -> None:
    """Write the blocks below a comment `<!-- file: NAME -->` to files of that name."""
    for block in blocks(path):
        if block.file:
            (folder / block.file).write_text(block.text + "\n", "utf-8")


def executed(path: Path, language: str) -> list[Block]:
    """The blocks of one language that are meant to be run."""
    return [
        block for block in blocks(path) if block.language == language and block.not_executed is None
    ]


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of executed shell blocks without comments, with backslashes at line ends joined."""
    for block in executed(path, "sh"):
        for offset, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                yield block.line + 1 + offset, re.sub(r"\s+", " ", command)


def local_links(path: Path) -> Iterator[str]:
    """Targets of links into the repository, without anchors."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in LINK.findall(text):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target.split("#")[0]
