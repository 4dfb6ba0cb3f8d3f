"""UTKFace, faces with age, gender and race, at 32×32: the authors' archive of JPEG files, or an `.npz` of reduced images.

The `.npz` holds `delta` as those of CIFAR-10 do, and `race`. The archive names each file `AGE_GENDER_RACE_DATE.jpg.chip.jpg`; a
few names lack the race and are left out. There is no official split: a tenth is held out by a public permutation.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from dpkfc.recipes.datasets.cifar import decode_delta
from dpkfc.recipes.datasets.errors import DatasetError, damaged, unreadable
from dpkfc.recipes.datasets.npz import read_npz
from dpkfc.recipes.datasets.sources import Source
from dpkfc.unpack_limit import BoundedStream, UnpackedSizeError

__all__ = ["UTKFACE", "read_utkface"]

SIDE = 32
_GZIP = b"\x1f\x8b"
_SPLIT_SEED = 0
_NAMED = re.compile(r"(?:.*/)?\d+_[01]_([0-4])_\d+\.jpg(?:\.chip\.jpg)?")


def read_utkface(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All faces with their race.

    Args:
        path: `subset.npz`, or the archive of JPEG files, in its packed form or unpacked by gzip alone.

    Returns:
        Images uint8 `[N, 32, 32, 3]`, and 0 White, 1 Black, 2 Asian, 3 Indian, 4 others `[N]`.

    Raises:
        DatasetError: the file cannot be read, is damaged, or holds no faces.
        UnpackedSizeError: the file unpacks to more than the limit of `unpack_limit`.
    """
    return _of_arrays(path) if path.suffix == ".npz" else _of_archive(path)


def _of_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = read_npz(path, ("delta", "race"))
    if missing := [name for name in ("delta", "race") if name not in arrays]:
        raise damaged(path, f"lacks the arrays {', '.join(missing)}")
    delta, labels = arrays["delta"], arrays["race"]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise damaged(path, f"`race` is {labels.dtype} {labels.shape} where whole numbers, one for each image, were expected")
    if delta.dtype != np.uint8 or delta.shape != (3, len(labels), SIDE, SIDE):
        raise damaged(path, f"`delta` is {delta.dtype} {delta.shape} where uint8 {(3, len(labels), SIDE, SIDE)} was expected")
    return decode_delta(delta), labels


def _of_archive(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """In the order of file names, which is that of every copy of the archive."""
    found, what = [], "is not a whole archive of JPEG files"
    try:
        with path.open("rb") as file, _unpacked(file) as stream:
            archive = tarfile.open(fileobj=io.BufferedReader(BoundedStream(stream, path)), mode="r|")
            for member in archive:
                named = _NAMED.fullmatch(member.name)
                image = archive.extractfile(member) if named and member.isfile() else None
                if named and image is not None:
                    found.append((Path(member.name).name, _reduced(io.BytesIO(image.read())), int(named[1])))
    except OSError as error:
        raise (unreadable(path, error) if error.errno else damaged(path, f"{what} ({error})")) from None
    except (DatasetError, UnpackedSizeError):
        raise
    except Exception as error:  # tarfile, zlib and Pillow raise what they happen to meet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise damaged(path, f"{what} ({reason})") from None
    if not found:
        raise damaged(path, "holds no file of the form AGE_GENDER_RACE_DATE.jpg")
    found.sort(key=lambda one: one[0])
    return np.stack([image for _, image, _ in found]), np.array([race for _, _, race in found], np.int64)


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the archive as a stream, unpacked where its first bytes are those of gzip."""
    packed = file.read(2) == _GZIP
    file.seek(0)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if packed else file


def _reduced(file: Any) -> np.ndarray:
    """One JPEG file as uint8 `[32, 32, 3]`, each pixel the mean of those it stands for."""
    try:
        from PIL import Image
    except ImportError:
        raise DatasetError("faces of UTKFace are JPEG files, and Pillow is not installed: pip install 'dpkfc[data]'") from None
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX))


def _split(paths: list[Path]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    images, labels = read_utkface(paths[0])
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(labels))
    test, train = order[: len(labels) // 10], order[len(labels) // 10 :]
    return (images[train], labels[train]), (images[test], labels[test])


UTKFACE = Source(name="UTKFace", folder="utkface", files=("UTKFace.tar.gz or subset.npz",), read=_split, whole=21_335)
