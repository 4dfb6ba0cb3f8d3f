"""Empty schemas to fill in, made from headers, folder names and flags."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.datasets.formats import DatasetError
from dpkfc.app.owndata.image_folders import folder_classes
from dpkfc.app.owndata.recipes import kind_of_data
from dpkfc.app.owndata.schema import template
from dpkfc.app.owndata.tables import check_file, read_header
from dpkfc.app.settings import ConfigError

_IMAGE_FORM = """\
[images]
size = 32  # pixels of each side
channels = 3  # 1 for grey
broken = "skip"  # or "error"
"""
_IMAGE_UNIT = """\
# unit = "patient"  # a column of the label file; ε then protects all images of one patient
# max_records = 4

"""
_TEXT = """\
# unit = "patient"  # a key; ε then protects all texts of one patient
# max_records = 4

[text]
key = "{key}"
encoder = "weighted-words"  # hashed; or "words", without weights, or "sentences", an encoder
"""


def empty_schema(data: Path, target: str, text: str, label_file: Path | None) -> str:
    """Return a schema to fill in. No row is read.

    Args:
        data: a table, a folder of images, or a file of texts.
        target: column (or key) that is learned.
        text: key of the text in a file of texts.
        label_file: of a folder of images.

    Raises:
        ConfigError: no target, where one is needed.
        DatasetError: a file that cannot be read, or a target that is not in the header.
    """
    kind = kind_of_data(data)
    if kind == "own-images" and label_file is None:
        names = ", ".join(f"{name!r}" for name in folder_classes(data))
        return f"# classes: the folders {names}\n\n{_IMAGE_FORM}"
    if not target:
        raise ConfigError("which column is learned? give --target NAME")
    if kind == "own-text":
        check_file(data)
        return template({}, target, sections=_TEXT.format(key=text))
    columns, delimiter = read_header(label_file or data)
    if target not in columns:
        names = ", ".join(columns)[:60]
        raise DatasetError(
            f"{label_file or data}: has no column {target!r}; its header has {names}"
        )
    if kind == "own-images":
        return template({}, target, delimiter, _IMAGE_UNIT + _IMAGE_FORM)
    return template(columns, target, delimiter)
