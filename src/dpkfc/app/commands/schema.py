"""Define `dpkfc schema`: a schema to fill in. It starts without torch."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.owndata.proposals import empty_schema
from dpkfc.app.owndata.schema import check_delimiter
from dpkfc.app.run_folder import RunFolderError, write_text
from dpkfc.terminal import open_console, print_line


def write_schema(
    data: Path,
    /,
    *,
    target: str = "",
    text: str = "",
    label_file: Path | None = None,
    sheet: str = "",
    delimiter: str = "",
    out: Path | None = None,
) -> None:
    """Write a schema to fill in, from the header of a file alone.

    Args:
        data: A table, a folder of images, or a JSONL file.
        target: Column (or key) that is learned.
        text: Key of the text in a JSONL file; left out: "text".
        label_file: Table of image files and labels.
        sheet: Of a spreadsheet; left out: the first.
        delimiter: Of a CSV file; left out: as its header shows.
        out: The file; left out: the terminal.
    """
    check_delimiter(delimiter, "--delimiter")
    content = empty_schema(data, target, text, label_file, sheet, delimiter)
    if out is None:
        open_console().out(content, end="", highlight=False)
        return
    if out.exists():
        raise RunFolderError(f"{out} exists and may be filled in; choose another name with --out")
    write_text(out, content)
    print_line(f"schema to fill in: {out}")
