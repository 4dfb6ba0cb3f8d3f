"""Files of images as pixels that a viewer shows, and why one is not read."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.unpacking import check_unpacked_size
from dpkfc.app.owndata.image_folders import list_images
from dpkfc.app.owndata.schema import ImageForm

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
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


def exists(path: Path) -> bool:
    """Return whether there is a file of this name, also where no file can have it."""
    try:
        return path.exists()
    # A name with a null character, or a longer one than the system takes.
    except (OSError, ValueError):
        return False


def read_image(
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
        if not exists(path) or place == root:
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
    paths, _ = list_images(folder)
    step = max(1, math.ceil(len(paths) / _MOST_HEADERS))
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
