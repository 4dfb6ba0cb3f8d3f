"""Folders of images: one folder a class, or a table of file names and labels."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import torch

from dpkfc.app.datasets.formats import DatasetError, check_unpacked_size, unreadable_error
from dpkfc.app.owndata.records import UNKNOWN, Figures, Records
from dpkfc.app.owndata.schema import ImageForm, Schema
from dpkfc.app.owndata.tables import (
    column_texts,
    read_header,
    read_table,
    unit_names,
)
from dpkfc.app.owndata.targets import target_of

SUFFIXES = (".png", ".jpg", ".jpeg")


def folder_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted: the public classes.

    Raises:
        DatasetError: fewer than two folders, or no folder at all.
    """
    try:
        folders = [path for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise unreadable_error(folder, error) from None
    names = sorted(path.name for path in folders)
    names = [name for name in names if not name.startswith(".")]
    if len(names) < 2:
        raise DatasetError(
            f"{folder}: holds {len(names)} folders; give one folder a class, or --label-file with"
            " a column of file names"
        )
    return tuple(names)


def encode_folder(
    folder: Path, schema: Schema, labels: Path | None = None, *, with_broken: bool = True
) -> Records:
    """Read the images of a folder.

    Args:
        folder: with one folder a class, or with the files that `labels` names.
        schema: public size, channels and classes.
        labels: a table whose first column names files.
        with_broken: whether files that cannot be read count, as they must in training.

    Returns:
        Images float32 `[N, C, size, size]`, pixels from −1 to 1. Files outside of a folder of a
        class have no label, and neither has a file that cannot be read, whose pixels are 0.

    Raises:
        DatasetError: a file cannot be read and `broken` is "error", or there are no images.
    """
    people: list[str | None] = []
    figures: Figures = {}
    if labels is not None:
        paths, numbers, people, figures = _read_labels(folder, schema, labels)
    else:
        paths = _find_images(folder)
        number_of = {name: number for number, name in enumerate(schema.classes)}
        numbers = []
        for path in paths:
            parts = path.relative_to(folder).parts
            numbers.append(number_of.get(parts[0], UNKNOWN))
    images = []
    kept = []
    broken = 0
    form = schema.images
    nothing = np.zeros((form.channels, form.size, form.size), np.float32)
    bytes_each = 4 * form.channels * form.size**2
    check_unpacked_size(folder, len(paths) * bytes_each)
    for row, path in enumerate(paths):
        pixels = _read_image(path, form)
        if pixels is None:
            broken += 1
            numbers[row] = UNKNOWN
        if pixels is not None or with_broken:
            images.append(nothing if pixels is None else pixels)
            kept.append(row)
    if broken == len(paths):
        raise DatasetError(f"{folder}: holds no PNG or JPEG image that can be read; check --data")
    labels_kept = []
    names = []
    contents = []
    people_kept = []
    for row, image in zip(kept, images, strict=True):
        labels_kept.append(numbers[row])
        names.append(os.path.relpath(paths[row], folder))
        contents.append(image.tobytes() + str(numbers[row]).encode())
        if people:
            people_kept.append(people[row])
    return Records(
        inputs=torch.from_numpy(np.stack(images)),
        labels=torch.tensor(labels_kept),
        names=names,
        contents=contents,
        units=unit_names(people_kept, contents) if people else (),
        figures={**figures, ("broken", "files"): broken / len(paths)},
    )


def _find_images(folder: Path) -> list[Path]:
    try:
        found = sorted(folder.rglob("*"))
    except OSError as error:
        raise unreadable_error(folder, error) from None
    paths = [path for path in found if path.suffix.lower() in SUFFIXES]
    if not paths:
        raise DatasetError(f"{folder}: holds no PNG or JPEG file; check --data")
    return paths


def _read_labels(
    folder: Path, schema: Schema, labels: Path
) -> tuple[list[Path], list[float], list[str | None], Figures]:
    kinds, _ = read_header(labels, schema.delimiter)
    first = next(iter(kinds))
    names = [first, schema.target]
    if schema.unit:
        names.append(schema.unit)
    table, figures = read_table(labels, names, schema.delimiter)
    columns = [column_texts(labels, table, name) for name in names]
    # The folder itself is no image.
    paths = [folder / (name or "") for name in columns[0]]
    if not paths:
        raise DatasetError(f"{labels}: has a header and no rows; name the image files in it")
    numbers, shares = target_of(schema).encode(columns[1])
    people = columns[2] if schema.unit else []
    return paths, numbers.tolist(), people, {**figures, **shares}


def _read_image(path: Path, form: ImageForm) -> np.ndarray | None:
    """Return pixels float32 `[C, size, size]`, None for a file that cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        raise DatasetError("images are read by Pillow: pip install 'dpkfc[data]'") from None
    mode = "RGB" if form.channels == 3 else "L"
    shape = form.size, form.size
    try:
        # A warning would tell of one image.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=("PNG", "JPEG")) as image:
                check_unpacked_size(path, image.width * image.height * 4)
                scaled = image.convert(mode).resize(shape)
    # Whatever a decoder says about a damaged file.
    except Exception as error:
        if form.broken == "skip":
            return None
        raise DatasetError(
            f"{path}: is no whole PNG or JPEG ({type(error).__name__}); replace it, or set broken ="
            " 'skip' under [images] of the schema"
        ) from None
    pixels = np.asarray(scaled, np.float32) / 127.5 - 1
    pixels = pixels.reshape(*shape, form.channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
