"""Folders of images as records: one folder a class, or a table of file names and labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path

import numpy as np
import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata.files import unit_names
from dpkfc.app.owndata.image_files import BROKEN, COPIED, REPEATED, read_image
from dpkfc.app.owndata.image_labels import label_by_folder, read_labels
from dpkfc.app.owndata.records import Records
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.owndata.targets import target_of


def encode_folder(
    folder: Path, schema: Schema, labels: Path | None = None, *, with_broken: bool = True
) -> Records:
    """Read the images of a folder.

    Args:
        folder: with one folder a class, or with the files that `labels` names.
        schema: public size, channels and classes.
        labels: a table with a column that names files.
        with_broken: whether files that cannot be read count, as they must in training.

    Returns:
        Images float32 `[N, C, size, size]`, pixels from −1 to 1, as a viewer shows them. Files
        outside of a folder of a class have no label, and neither has a file that cannot be read,
        whose pixels are 0.

    Raises:
        DatasetError: a folder that does not hold images of a class, or is empty; a file
            cannot be read and `broken` is "error". In training, a folder without a readable file
            does not stop the run.
    """
    if labels is None:
        labelled = label_by_folder(folder, schema)
    else:
        labelled = read_labels(folder, schema, labels)
    paths, numbers, people, figures = labelled
    unknown, _ = target_of(schema).encode([None])
    form = schema.images
    nothing = np.zeros((form.channels, form.size, form.size), np.float32)
    check_unpacked_size(folder, len(paths) * nothing.nbytes)
    root = folder.resolve()
    images = []
    contents = []
    whole = []
    seen: Counter[str] = Counter({BROKEN: 0})
    for row, path in enumerate(paths):
        pixels, remarks = read_image(path, root, form)
        seen.update(remarks)
        if pixels is None:
            numbers[row] = unknown[0].item()
            pixels = nothing
        else:
            whole.append(row)
        images.append(pixels)
        label = str(numbers[row])
        contents.append(pixels.tobytes() + label.encode())
    seen[REPEATED] = _count_equal(paths[row] for row in whole)
    seen[COPIED] = _count_equal({paths[row]: contents[row] for row in whole}.values())
    if not (whole or with_broken):
        raise DatasetError(f"{folder}: holds no PNG or JPEG image that can be read; check --data")
    shares = {}
    for remark, count in seen.items():
        if count or remark == BROKEN:
            shares[remark, "files"] = count / len(paths)
    records = Records(
        inputs=torch.from_numpy(np.stack(images)),
        labels=torch.tensor(numbers),
        names=[_plain_name(path, folder) for path in paths],
        contents=contents,
        units=unit_names(people, contents, schema) if people else (),
        figures={**figures, **shares},
    )
    return records if with_broken else records.select(whole)


def _count_equal(values: Iterable[Hashable]) -> int:
    """Return how many values are equal to another one."""
    return sum(count for count in Counter(values).values() if count > 1)


def _plain_name(path: Path, folder: Path) -> str:
    """Return a name that a CSV file can hold; other bytes are escaped."""
    name = os.path.relpath(path, folder)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
