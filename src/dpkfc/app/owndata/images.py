"""Folders of images: one folder a class, or a table of file names and labels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dpkfc.app.datasets import DatasetError, check_unpacked_size, unreadable_error
from dpkfc.app.owndata import UNKNOWN, Figures, Records
from dpkfc.app.owndata.files import column_texts, read_header, read_table, unit_names
from dpkfc.app.owndata.schema import ImageForm, Schema, target_of
from dpkfc.app.settings import shorten

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def folder_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted: the public classes.

    Raises:
        DatasetError: fewer than two folders, or no folder at all.
    """
    names = _folder_names(folder)
    if len(names) < 2:
        raise DatasetError(
            f"{folder}: holds {len(names)} folders; give one folder a class, or --label-file with"
            " a column of file names"
        )
    return tuple(names)


def check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Refuse a folder without a folder of any class. Names of folders are public.

    Raises:
        DatasetError: naming the folders, the classes and the fix.
    """
    names = _folder_names(folder)
    if not set(names).intersection(classes):
        raise DatasetError(
            f"{folder}: no folder is named as a class: it holds {shorten(names, 60) or 'none'}, and"
            f" the schema lists {shorten(classes, 60)}; write classes as the folders are named"
        )


def _folder_names(folder: Path) -> list[str]:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise unreadable_error(folder, error) from None
    return [name for name in names if not name.startswith(".")]


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
        DatasetError: a file cannot be read and `broken` is "error", or there are no images. In
            training it is no error that no file can be read.
    """
    if labels is None:
        labelled = _label_by_folder(folder, schema)
    else:
        labelled = _read_labels(folder, schema, labels)
    paths, numbers, people, figures = labelled
    unknown, _ = target_of(schema).encode([None])
    form = schema.images
    nothing = np.zeros((form.channels, form.size, form.size), np.float32)
    check_unpacked_size(folder, len(paths) * nothing.nbytes)
    images = []
    contents = []
    whole = []
    for row, path in enumerate(paths):
        pixels = _read_image(path, form)
        if pixels is None:
            numbers[row] = unknown[0].item()
            pixels = nothing
        else:
            whole.append(row)
        images.append(pixels)
        label = str(numbers[row])
        contents.append(pixels.tobytes() + label.encode())
    if not (whole or with_broken):
        raise DatasetError(f"{folder}: holds no PNG or JPEG image that can be read; check --data")
    broken = (len(paths) - len(whole)) / len(paths)
    records = Records(
        inputs=torch.from_numpy(np.stack(images)),
        labels=torch.tensor(numbers),
        names=[os.path.relpath(path, folder) for path in paths],
        contents=contents,
        units=unit_names(people, contents, schema) if people else (),
        figures={**figures, ("broken", "files"): broken},
    )
    return records if with_broken else records.select(whole)


# Files of images, their labels and units (none where each file is one), and private shares.
_Labelled = tuple[list[Path], list[float], list[str | None], Figures]


def _label_by_folder(folder: Path, schema: Schema) -> _Labelled:
    """Return the images of a folder, each with the class that the folder around it is named by."""
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES]
    if not paths:
        raise DatasetError(f"{folder}: holds no PNG or JPEG file; check --data")
    paths.sort()
    number_of = {name: number for number, name in enumerate(schema.classes)}
    numbers: list[float] = []
    for path in paths:
        top, *_ = path.relative_to(folder).parts
        numbers.append(number_of.get(top, UNKNOWN))
    return paths, numbers, [], {}


def _read_labels(folder: Path, schema: Schema, labels: Path) -> _Labelled:
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
                scaled: Image.Image = image
                if image.mode.startswith("I"):
                    # A conversion would cut 16 bits to 255 instead of scaling them.
                    scaled = image.point(lambda value: value / 257).convert("L")
                scaled = scaled.convert(mode).resize(shape)
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
