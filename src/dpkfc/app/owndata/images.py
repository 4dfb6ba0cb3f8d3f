"""Folders of images: one folder a class, or a table of file names and labels."""

from __future__ import annotations

import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpkfc.app.datasets.errors import DatasetError, unreadable_error
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata.csv_lines import is_unicode
from dpkfc.app.owndata.records import UNKNOWN, Figures, Records
from dpkfc.app.owndata.schema import ImageForm, Schema
from dpkfc.app.owndata.tables import read_header, read_table
from dpkfc.app.toml import shorten

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
_FORMATS = ("PNG", "JPEG", "TIFF", "BMP")

# --------------------------------------------------------------------------------------------------
# Names of folders, which are public: classes, and folders that are not classes.

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
            f"{folder}: {shorten(names, 60)} look like parts or persons, not classes; give"
            " --label-file, or list classes in a schema"
        )
    forms: dict[str, str] = {}
    for name in names:
        other = forms.setdefault(_fold(name), name)
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
            if _fold(known) == _fold(name):
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


def _check_folders(folder: Path, left_out: Sequence[str]) -> None:
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


def _fold(name: str) -> str:
    """Return a name without differences of case and Unicode form, and blanks around it."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return unicodedata.normalize("NFKC", folded).strip()


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


# --------------------------------------------------------------------------------------------------
# Files of images and their labels.

# Why a file contributes nothing, or differs from what a person sees. PRIVATE shares of the files.
BROKEN = "broken"
ABSENT = "no such file"
OUTSIDE = "no file of the folder (a link, pipe or device)"
DEEP_COLOURS = "unread, since colours have 16 bits a channel (bit depth)"
FLOATS = "unread, since pixels are floating-point numbers (bit depth)"
CLAMPED = "with pixels outside of 0 to white"
PAGES = "with several pages, of which the first is read"
REPEATED = "named by several rows"
COPIED = "equal to another file in pixels and class"
# A column of a label file whose cells name files, where the cells of its first or stated column do
# not.
BETTER_COLUMN = "rows whose file is named by"
OTHERS = "left out, since their suffix is not of a known image"


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
        DatasetError: a folder that does not hold images of a class, or there are no images; a file
            cannot be read and `broken` is "error". In training, a folder without a readable file
            does not stop the run.
    """
    import torch

    from dpkfc.app.owndata.files import unit_names
    from dpkfc.app.owndata.targets import target_of

    if labels is None:
        labelled = _label_by_folder(folder, schema)
    else:
        labelled = _read_labels(folder, schema, labels)
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
        pixels, remarks = _read_image(path, root, form)
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


# Files of images, their labels and units (none where each file is one), and private shares.
_Labelled = tuple[list[Path], list[float], list[str | None], Figures]


def _label_by_folder(folder: Path, schema: Schema) -> _Labelled:
    """Return the images of a folder, each with the class that the folder around it is named by."""
    left_out = schema.images.leave_out
    _check_folders(folder, left_out)
    paths = []
    others = 0
    for place, _, names in _walk(folder, left_out):
        images = [place / name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
        others += len(names) - len(images)
        paths += images
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
    shares = {(OTHERS, "files"): others / (others + len(paths))} if others else {}
    return paths, numbers, [], shares


def _read_labels(folder: Path, schema: Schema, labels: Path) -> _Labelled:
    from dpkfc.app.owndata.targets import target_of

    header = read_header(labels, schema)
    names = [schema.images.file or header.names[0], schema.target]
    if schema.unit:
        names.append(schema.unit)
    table = read_table(labels, names, schema)
    columns = [table.columns[name].texts for name in names]
    paths = [_named_file(folder, name) for name in columns[0]]
    if not paths:
        raise DatasetError(f"{labels}: has a header and no rows; name the image files in it")
    numbers, counts = target_of(schema).encode(columns[1])
    shares = {what: count / len(paths) for what, count in counts.items()}
    people = columns[2] if schema.unit else []
    others = [name for name in header.names if name != names[0]]
    better = {} if any(map(_exists, paths)) else _find_column(folder, schema, labels, others)
    return paths, numbers.tolist(), people, {**table.figures, **shares, **better}


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
        count = sum(bool(cell) and _exists(_named_file(folder, cell)) for cell in cells)
        if count:
            shares[BETTER_COLUMN, name] = count / len(cells)
    return shares


def _named_file(folder: Path, name: str | None) -> Path:
    """Return the file that a row names, by itself: with a suffix of an image where it has none."""
    # The folder itself is not an image.
    path = folder / (name or "").strip().replace("\\", "/")
    if path.name and not path.name.lower().endswith(IMAGE_SUFFIXES):
        for suffix in IMAGE_SUFFIXES:
            longer = path.with_name(path.name + suffix)
            if _exists(longer):
                return longer
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    # A name with a null character, or a longer one than the system takes.
    except (OSError, ValueError):
        return False


def _read_image(
    path: Path, root: Path, form: ImageForm
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return pixels float32 `[C, size, size]`, None for a file that is not read; and remarks."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DatasetError("images are read by Pillow: pip install '.[data]'") from None
    reason = BROKEN
    try:
        place = path.resolve()
        if not _exists(path) or place == root:
            reason = ABSENT
        elif not (place.is_file() and place.is_relative_to(root)):
            reason = OUTSIDE
        else:
            # A warning would tell of one image.
            with warnings.catch_warnings(), place.open("rb") as file:
                warnings.simplefilter("ignore")
                pixels, remarks = _decode(file, path, form)
            if pixels is not None:
                return pixels, remarks
            (reason,) = remarks
        problem = reason
    # Whatever a decoder says about a damaged file.
    except Exception as error:
        problem = type(error).__name__
    if form.broken == "skip":
        return None, (reason,)
    raise DatasetError(
        f"{path}: is not a whole PNG, JPEG, TIFF or BMP ({problem}); replace it, or set broken ="
        " 'skip' under [images] of the schema"
    ) from None


def _decode(
    file: IO[bytes], path: Path, form: ImageForm
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the pixels of an open file as a viewer shows it; or None, and why."""
    from PIL import Image

    png_depth = file.read(25)[24:]
    file.seek(0)
    with Image.open(file, formats=_FORMATS) as image:
        check_unpacked_size(path, image.width * image.height * 4)
        tags = getattr(image, "tag_v2", {})
        depth = max(tags.get(_BITS, (8,)))
        if image.format == "PNG":
            depth = png_depth[0]
        is_grey = image.mode.startswith("I")
        if image.mode == "F":
            return None, (FLOATS,)
        if depth > 8 and not is_grey:
            return None, (DEEP_COLOURS,)
        remarks = []
        # Phones write previews behind a JPEG image.
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            remarks.append(PAGES)
        is_inverted = tags.get(_PHOTOMETRIC) == 0
        image.load()
        upright = _turn(image)
        if is_grey:
            scaled, is_clamped = _scale_grey(upright, form, is_inverted)
            remarks += [CLAMPED] * is_clamped
        else:
            scaled = _lay_over(upright, form.background).convert(form.mode)
        pixels = np.asarray(scaled.resize((form.size, form.size)), np.float32)
    pixels = np.clip(pixels, 0, 255).reshape(form.size, form.size, -1) / 127.5 - 1
    shape = (form.channels, form.size, form.size)
    return np.ascontiguousarray(np.broadcast_to(pixels.transpose(2, 0, 1), shape)), tuple(remarks)


# Tags of TIFF and EXIF.
_BITS, _PHOTOMETRIC, _ORIENTATION, _GREATEST = 258, 262, 274, 281


def _turn(image: Any) -> Any:
    """Return an image as its EXIF orientation says that it is shown."""
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    # Viewers show an image with damaged EXIF data too.
    except Exception:
        return image
    method = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)
    return image if method is None else image.transpose(method)


def _scale_grey(image: Any, form: ImageForm, is_inverted: bool) -> tuple[Any, bool]:
    """Return grey values of more than 8 bits as floating-point numbers from 0 to 255."""
    from PIL import Image

    values = np.asarray(image, np.float64)
    shares = values / form.white
    if is_inverted:
        # Pillow inverts such files of 8 bits, and none of 16.
        shares = 1 - shares
    clamped = shares.clip(0, 1)
    is_clamped = bool((clamped != shares).any())
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        clamped[values == hidden] = float(form.background == "white")
    return Image.fromarray((clamped * 255).astype(np.float32)), is_clamped


def _lay_over(image: Any, background: str) -> Any:
    """Return an image without transparency, laid over a background."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    top = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", top.size, background), top).convert("RGB")


# --------------------------------------------------------------------------------------------------
# The greatest grey value of images, as their headers say.

_MOST_HEADERS = 1000


def propose_white(folder: Path) -> int:
    """Return the value that most headers of images give to white; 255 for images of 8 bits.

    No pixel is decoded. Of a large folder a part is looked at.
    """
    paths = []
    for place, _, names in _walk(folder, ()):
        paths += [place / name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
    step = -(-len(paths) // _MOST_HEADERS) or 1
    found = Counter(_white_of_header(path) for path in paths[::step])
    del found[0]
    return found.most_common(1)[0][0] if found else 255


def _white_of_header(path: Path) -> int:
    """Return the value of white by the header of a file, 0 for a file without one."""
    from PIL import Image

    if path.is_symlink() or not path.is_file():
        return 0
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            start = file.read(4096)
            file.seek(0)
            with Image.open(file, formats=_FORMATS) as image:
                if not image.mode.startswith("I"):
                    return 255
                tags = getattr(image, "tag_v2", {})
                bits = min(tags.get(_BITS, (16,)))
                if image.format == "PNG":
                    bits = _significant_bits(start)
                return int(max(tags.get(_GREATEST, (0,))) or 2**bits - 1)
    except Exception:
        return 0


def _significant_bits(start: bytes) -> int:
    """Return the bits of a grey PNG of 16 that hold its values, as its chunk sBIT says."""
    place = 8
    while place + 8 < len(start):
        size = int.from_bytes(start[place : place + 4], "big")
        kind = start[place + 4 : place + 8]
        if kind == b"sBIT":
            return start[place + 8]
        if kind == b"IDAT":
            break
        place += size + 12
    return 16
