"""Names of folders of images, which are public: classes, and folders that are not classes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.owndata.cells import fold_text, is_unicode
from dpkfc.app.owndata.schema import Schema
from dpkfc.app.toml import shorten

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
_SPLITS = {
    "train": {"train", "training", "trainset"},
    "validation": {"val", "valid", "validation", "valset", "dev"},
    "test": {"test", "testing", "testset", "holdout", "eval", "evaluation"},
}
# Words of folders that differ only in their numbers, and so are not classes.
_PARTS = set("fold part split batch shard chunk train training test patient subject case".split())
_IMAGES = {"image", "images", "img", "imgs"}
_MASKS = set(
    "mask masks segmentation segmentations annotation annotations labels groundtruth gt overlay"
    " overlays heatmap heatmaps thumbnail thumbnails thumbs augmented augmentation augmentations"
    " copy copies backup backups".split()
)
_SYSTEM = {"lost+found", "system volume information"}


def folder_classes(folder: Path, left_out: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted: the public classes.

    Args:
        folder: of images.
        left_out: names of folders that are not classes.

    Raises:
        DatasetError: fewer than two folders; folders that are splits, parts or masks; or two names
            that differ in case or Unicode form alone.
    """
    names = _folder_names(folder, left_out)
    _check_splits(folder, names)
    if len(names) < 2:
        inner = f" ({names[0]!r:.40})" if names else ""
        raise DatasetError(
            f"{folder}: holds {len(names)} folders{inner}; give --data with the one that holds a"
            " folder a class, or --label-file with a column of file names"
        )
    for name in names:
        if not is_unicode(name):
            raise DatasetError(f"{folder}: the name of folder {name!a:.60} is not UTF-8; rename it")
        what = _suspicion(folder / name, names)
        if what or name.lower() in _MASKS - {"mask"}:
            raise DatasetError(_suspect_text(folder, folder / name, what or "is not of a class"))
    stems = {re.sub(r"\d+", "", name) for name in names}
    if len(stems) == 1 and _words(*stems) & _PARTS:
        raise DatasetError(
            f"{folder}: its folders look like parts or persons, not classes; give --label-file, or"
            " list classes in a schema"
        )
    forms: dict[str, str] = {}
    for name in names:
        other = forms.setdefault(fold_text(name).strip(), name)
        if other != name:
            raise DatasetError(
                f"{folder}: folders {other!a:.40} and {name!a:.40} differ in case or Unicode form"
                " alone; rename one, or list both in classes of a schema"
            )
    return tuple(names)


def check_classes(folder: Path, schema: Schema) -> None:
    """Refuse a folder with a folder that is not a class. Names of folders are public.

    Raises:
        DatasetError: naming the folders, the classes and the fix.
    """
    names = _folder_names(folder, schema.images.leave_out)
    others = [name for name in names if name not in schema.classes]
    if others == names:
        _check_splits(folder, names)
    for name in others:
        for known in schema.classes:
            if fold_text(known).strip() == fold_text(name).strip():
                raise DatasetError(
                    f"{folder}: folder {name!a:.40} and class {known!a:.40} differ in case or"
                    " Unicode form alone; rename one"
                )
    if others == names:
        raise DatasetError(
            f"{folder}: no folder is named as a class: it holds {shorten(names, 60) or 'none'}, and"
            f" the schema lists {shorten(schema.classes, 60)}; write classes as the folders are"
            " named"
        )
    if others:
        raise DatasetError(_suspect_text(folder, folder / others[0], "is not a class"))


def suspect_folders(
    folder: Path, left_out: Sequence[str] = (), *, with_classes: bool = False
) -> Iterator[tuple[Path, str]]:
    """Yield folders inside of the folders of a folder that do not hold their images, and why.

    Args:
        folder: of images.
        left_out: names of folders that are not looked at.
        with_classes: whether the folders of classes are looked at too.
    """
    for place, names, _ in _walk(folder, left_out):
        for name in names:
            what = _suspicion(place / name, names)
            if not what and place != folder and _words(name) & _MASKS:
                what = "is named like masks or copies"
            if what and (place != folder or with_classes or (place / name).is_symlink()):
                yield place / name, what


def check_folders(folder: Path, left_out: Sequence[str]) -> None:
    """Refuse folders inside of the folders of a folder that do not hold their images.

    Raises:
        DatasetError: naming the first, and the fix.
    """
    for path, what in suspect_folders(folder, left_out):
        raise DatasetError(_suspect_text(folder, path, what))
    for place, names, _ in _walk(folder, left_out):
        if place != folder:
            _check_splits(place, names)


def _suspicion(path: Path, siblings: Sequence[str]) -> str:
    """Return why a folder does not hold images of its own, or an empty text."""
    name = path.name
    if path.is_symlink():
        return "is a link, which is not followed"
    if name[0] in "$@#~" or name.startswith("__") or name.lower() in _SYSTEM:
        return "is of a program or system"
    if not _holds_images(name) and any(map(_holds_images, siblings)):
        return "stands beside a folder of images"
    return ""


def _suspect_text(folder: Path, path: Path, what: str) -> str:
    return (
        f"{folder}: folder {path.relative_to(folder)} {what}; remove it, or set leave_out ="
        f' ["{path.name}"] under [images] of the schema'
    )


def _check_splits(folder: Path, names: Sequence[str]) -> None:
    """Refuse folders that are splits of a data set.

    Raises:
        DatasetError: naming them, and the fix.
    """
    found: dict[str, str] = {}
    for split, words in _SPLITS.items():
        for name in names:
            if _words(name) & words:
                found.setdefault(split, name)
    splits = list(dict.fromkeys(found.values()))
    if len(splits) > 1:
        raise DatasetError(
            f"{folder}: {shorten(splits, 40)} are splits, not classes; give --data"
            f" {folder / splits[0]}, and the others to dpkfc evaluate --data"
        )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))


def _holds_images(name: str) -> bool:
    """Return whether a folder is named by the word images alone."""
    words = _words(name)
    return bool(words) and words <= _IMAGES


def _folder_names(folder: Path, left_out: Sequence[str]) -> list[str]:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise unreadable_error(folder, error) from None
    return [name for name in names if not (name.startswith(".") or name in left_out)]


def _walk(folder: Path, left_out: Sequence[str]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder with the names of its folders and files, without hidden ones."""

    def stop(error: OSError) -> None:
        raise unreadable_error(Path(error.filename), error) from None

    for place, folders, files in os.walk(folder, onerror=stop):
        folders[:] = sorted(
            name for name in folders if not (name.startswith(".") or name in left_out)
        )
        yield Path(place), folders, sorted(name for name in files if not name.startswith("."))


def list_images(folder: Path, left_out: Sequence[str] = ()) -> tuple[list[Path], int]:
    """Return the files below a folder that have the suffix of an image, and a count of others."""
    images = []
    others = 0
    for place, _, names in _walk(folder, left_out):
        found = [place / name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
        others += len(names) - len(found)
        images += found
    return images, others
