"""Labels of images: from the folder around each, or from a table of file names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.headers import read_header
from dpkfc.app.owndata.image_files import exists
from dpkfc.app.owndata.image_folders import IMAGE_SUFFIXES, check_folders, list_images
from dpkfc.app.owndata.records import UNKNOWN, Figures
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.owndata.targets import target_of

# What is counted of label files and folders. PRIVATE shares.
# A column of a label file whose cells name files, where the cells of its first or stated column do
# not.
BETTER_COLUMN = "rows whose file is named by"
OTHERS = "left out, since their suffix is not of a known image"
# Files of images, their labels and units (none where each file is one), and private shares.
Labelled = tuple[list[Path], list[float], list[str | None], Figures]


def label_by_folder(folder: Path, schema: Schema) -> Labelled:
    """Return the images of a folder, each with the class that the folder around it is named by."""
    left_out = schema.images.leave_out
    check_folders(folder, left_out)
    paths, others = list_images(folder, left_out)
    if not paths:
        raise DatasetError(
            f"{folder}: holds no PNG or JPEG file, and none of {', '.join(IMAGE_SUFFIXES[3:])};"
            " check --data"
        )
    paths.sort()
    number_of = {name: number for number, name in enumerate(schema.classes)}
    numbers: list[float] = []
    for path in paths:
        top, *_ = path.relative_to(folder).parts
        numbers.append(number_of.get(top, UNKNOWN))
    shares = dict[tuple[str, str], float]()
    if others:
        shares[OTHERS, "files"] = others / (others + len(paths))
    return paths, numbers, [], shares


def read_labels(folder: Path, schema: Schema, labels: Path) -> Labelled:
    """Return the images that a table names, each with its label there."""
    header = read_header(labels, schema)
    file_column = schema.images.file or header.names[0]
    read = [file_column, schema.target, schema.unit]
    table = read_table(labels, [name for name in read if name], schema)
    files = table.columns[file_column].texts
    paths = [_named_file(folder, name) for name in files]
    if not paths:
        raise DatasetError(f"{labels}: has a header and no rows; name the image files in it")
    numbers, counts = target_of(schema).encode(table.columns[schema.target].texts)
    people = table.columns[schema.unit].texts if schema.unit else []
    figures = dict(table.figures)
    for what, count in counts.items():
        figures[what] = count / len(paths)
    if not any(map(exists, paths)):
        others = [name for name in header.names if name != file_column]
        figures |= _find_column(folder, schema, labels, others)
    return paths, numbers.tolist(), people, figures


# Rows that are looked at for another column of names.
_MOST_ROWS = 200


def _find_column(folder: Path, schema: Schema, labels: Path, names: Sequence[str]) -> Figures:
    """Return the share of rows whose file each of some columns names, where it is not 0."""
    shares = {}
    for name in names:
        try:
            cells = read_table(labels, [name], schema).columns[name].texts[:_MOST_ROWS]
        # A column that is not text or number, or whose name stands twice.
        except DatasetError:
            continue
        found = [cell for cell in cells if cell and exists(_named_file(folder, cell))]
        if found:
            shares[BETTER_COLUMN, name] = len(found) / len(cells)
    return shares


def _named_file(folder: Path, name: str | None) -> Path:
    """Return the file that a row names, by itself; its suffix may lack, or be in other letters."""
    path = folder / (name or "").strip().replace("\\", "/")
    if not path.name:
        # The folder itself is not an image.
        return path
    if path.name.lower().endswith(IMAGE_SUFFIXES):
        stem, point, suffix = path.name.rpartition(".")
        names = [stem + point + other for other in (suffix, suffix.lower(), suffix.upper())]
    else:
        endings = (*IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
        names = [path.name + ending for ending in endings]
    for other in names:
        candidate = path.with_name(other)
        if exists(candidate):
            return candidate
    return path
