"""Empty schemas to fill in, made from headers, folder names and flags."""

from __future__ import annotations

import json
from pathlib import Path

from dpkfc._errors import one_name
from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.owndata.headers import read_header
from dpkfc.app.owndata.image_files import propose_white
from dpkfc.app.owndata.image_folders import folder_classes, suspect_folders
from dpkfc.app.owndata.packages import SPREADSHEETS
from dpkfc.app.owndata.schema import TextForm
from dpkfc.app.owndata.schema_file import template
from dpkfc.app.owndata.stored import list_parts
from dpkfc.app.owndata.table_files import (
    DELIMITED,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    open_file,
    suffix_of,
)
from dpkfc.app.toml import ConfigError

_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".gz", ".bz2", ".xz", ".zst")


def _is_part(path: Path) -> bool:
    return suffix_of(path) in (*DELIMITED, *TEXT_SUFFIXES, ".json")


def kind_of_data(path: Path) -> str:
    """Return the kind of own data from the name of a file or folder.

    Raises:
        DatasetError: nothing is there, or a form that is not known.
    """
    suffix = suffix_of(path)
    try:
        if not path.exists():
            name = one_name(path)
            raise DatasetError(f"{name}: does not exist; --data takes a file or a folder of images")
        if path.is_dir():
            if not list_parts(path) and any(map(_is_part, path.glob("part-*"))):
                raise DatasetError(
                    f"{path}: holds parts of a table that are not .parquet; join them into one file"
                )
            return "own-table" if list_parts(path) else "own-images"
    except OSError as error:
        raise unreadable_error(path, error) from None
    if suffix in TABLE_SUFFIXES:
        return "own-table"
    if suffix in TEXT_SUFFIXES:
        return "own-text"
    if suffix in _ARCHIVES:
        raise DatasetError(f"{path}: is an archive; unpack it, and give the file or folder inside")
    if suffix == ".json":
        raise DatasetError(f"{path}: write one object a line (jq -c '.[]'), and name it .jsonl")
    raise DatasetError(
        f"{path}: is of no known form; save it as .csv, .parquet, .xlsx or .jsonl, or give a folder"
        " of images (docs/your-data.md#other-files)"
    )


_IMAGE_FORM = """\
[images]
size = 32  # pixels of each side
channels = 3  # 1 for grey
broken = "skip"  # or "error"
background = "white"  # or "black": behind transparent pixels
"""
_IMAGE_UNIT = """\
# unit = "patient"  # a column of the label file; ε then protects all images of one patient
# max_records = 4

"""
_TEXT = """\
# Of a table in JSON lines, name its keys as columns, such as [columns.age], in place of [text].
# unit = "patient"  # a key; ε then protects all texts of one patient
# max_records = 4

[text]
key = "{key}"
# encoder = "weighted-words"  # hashed words; without this line an encoder, where one is installed
"""


def empty_schema(  # noqa: PLR0913 - what may describe a file
    data: Path,
    target: str,
    text: str = "",
    label_file: Path | None = None,
    sheet: str = "",
    delimiter: str = "",
) -> str:
    """Return a schema to fill in. No row is read.

    Args:
        data: a table, a folder of images, or a file of texts.
        target: column (or key) that is learned.
        text: key of the text in a file of texts.
        label_file: of a folder of images.
        sheet: of a spreadsheet; empty for the first.
        delimiter: of a CSV file; empty for the one that the header shows.

    Raises:
        ConfigError: no target, where one is needed, or what does not describe such data.
        DatasetError: a file that cannot be read, or a target that is not in the header.
    """
    kind = kind_of_data(data)
    table = label_file or data
    described = {
        "--text": (text, kind == "own-text"),
        "--label-file": (label_file, kind == "own-images"),
        "--sheet": (sheet, suffix_of(table) in SPREADSHEETS),
        "--delimiter": (delimiter, suffix_of(table) in DELIMITED),
    }
    for flag, (value, applies) in described.items():
        if value and not applies:
            raise ConfigError(
                f"{flag} {value!s:.40} does not apply to {one_name(data)}; leave it out"
            )
    if kind == "own-images" and label_file is None:
        suspects = sorted({path.name for path, _ in suspect_folders(data, with_classes=True)})
        classes = json.dumps(folder_classes(data, suspects), ensure_ascii=False)
        form = _image_form(data)
        if suspects:
            names = json.dumps(suspects, ensure_ascii=False)
            form += f"leave_out = {names}  # folders that do not hold images of a class\n"
        return f"classes = {classes}  # the folders\n\n{form}"
    if not target:
        raise ConfigError("which column is learned? give --target NAME")
    if kind == "own-text":
        with open_file(data):
            pass
        return template({}, target, sections=_TEXT.format(key=text or TextForm.key))
    header = read_header(table, target=target, sheet=sheet, delimiter=delimiter)
    header.check(table, [target])
    if kind == "own-images":
        first = json.dumps(header.names[0], ensure_ascii=False)
        form = f"{_image_form(data)}file = {first}  # the column that names files\n"
        sections, encoding = _IMAGE_UNIT + form, header.encoding
        return template({}, target, header.delimiter, sections, encoding=encoding)
    return template(
        header.usable,
        target,
        header.delimiter,
        unusable=header.unusable,
        labels=header.labels,
        encoding=header.encoding,
        is_proposed=header.is_proposed,
        sheet=sheet,
    )


def _image_form(folder: Path) -> str:
    """Return the form of images, with white as most headers say it."""
    white = propose_white(folder)
    if white == 255:
        return f"{_IMAGE_FORM}# white = 4095  # of grey images with more than 8 bits\n"
    note = "as headers say" if white != 65535 else "16 bits; 4095 where a detector fills 12 of them"
    return f"{_IMAGE_FORM}white = {white}  # {note}\n"
