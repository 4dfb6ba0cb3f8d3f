"""The image sets of the recipes, and where any data set is found.

That is a given folder, the folder DPKFC_DATA, or Hugging Face `datasets`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpkfc._errors import first_line
from dpkfc.app.datasets.cifar import read_cifar
from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.datasets.examples import Split
from dpkfc.app.datasets.idx import read_idx
from dpkfc.app.datasets.npz import read_npz
from dpkfc.app.datasets.pixels import Pixels

VARIABLE = "DPKFC_DATA"
_OR = " or "
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set, in a folder and on the Hugging Face hub.

    Attributes:
        name: what people call it.
        folder: its folder below a data directory; the directory itself is searched as well.
        files: names of files that all must exist, of "a or b" the first that does. On disk the
            ending `.gz` or `.bz2` may be missing.
        read: maps files in that order to (training split, test split), with the set's own
            validation split as a third where it has one.
        hub: repository on the Hugging Face hub; empty for a set that is not on it.
        hub_config: which of the sets of that repository; empty where it has one.
        image_column: column of the images there.
        label_column: column of the labels of images there.
        text_column: column of the texts there.
        hub_splits: names of the training and the test split there.
        whole: training images of the whole set, where files may hold a part of it; 0 where they do
            not.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    read: Callable[[list[Path]], tuple[Any, ...]]
    hub: str = ""
    hub_config: str = ""
    image_column: str = "image"
    label_column: str = "label"
    text_column: str = "sentence"
    hub_splits: tuple[str, str] = ("train", "test")
    whole: int = 0

    @property
    def manual_steps(self) -> str:
        """A sentence that says where to put the files."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"put {self.files[0]}{more} into DIR/{self.folder} and give --data-dir DIR"

    @property
    def how_to_get(self) -> str:
        """The end of an error about a missing set."""
        if not self.hub:
            return self.manual_steps
        return f"{self.manual_steps}, or pip install datasets to load {self.hub}"


def _read_idx_files(paths: list[Path]) -> tuple[Split, Split]:
    train_images, train_labels, test_images, test_labels = paths
    return (
        (read_idx(train_images, 3)[..., None], read_idx(train_labels, 1)),
        (read_idx(test_images, 3)[..., None], read_idx(test_labels, 1)),
    )


def _read_cifar_files(paths: list[Path]) -> tuple[Split, Split]:
    train, test = paths
    return read_cifar(train), read_cifar(test)


_IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
MNIST = Source(
    name="MNIST",
    folder="mnist",
    files=_IDX_FILES,
    read=_read_idx_files,
    hub="ylecun/mnist",
)
FASHION_MNIST = Source(
    name="Fashion-MNIST",
    folder="fashion-mnist",
    files=_IDX_FILES,
    read=_read_idx_files,
    hub="zalandoresearch/fashion_mnist",
)
CIFAR10 = Source(
    name="CIFAR-10",
    folder="cifar10",
    files=("train.npz", "test.npz"),
    read=_read_cifar_files,
    hub="uoft-cs/cifar10",
    image_column="img",
)

# Without a hub: public images of other tasks come from the same files on every machine.
CIFAR100 = Source(
    name="CIFAR-100",
    folder="cifar100",
    files=("train.npz", "test.npz"),
    read=_read_cifar_files,
)


def load_pixels(source: Source, data_dir: str | Path | None = None) -> Pixels:
    """Read a data set from the first home that has it.

    A folder given by hand must hold the files. The folder named by the environment variable
    DPKFC_DATA may lack the whole set; then, and without a folder, the set is loaded through Hugging
    Face `datasets`.

    Args:
        source: which set.
        data_dir: a folder with `source.folder` in it, or with the files themselves.

    Returns:
        Raw pixels; their `source` names the home, and says where files hold a part of the set only.

    Raises:
        DatasetError: no home has the set, files are missing or damaged. The message says how to get
            them.
    """
    (train, test, *validation), where = read_splits(
        source, data_dir, lambda part: _read_columns(part, source)
    )
    part = ""
    if len(train[1]) < source.whole:
        part = f"{len(train[1]):,} of {source.whole:,} training images"
        where += f", {part}"
    return replace(Pixels(train, test, where, *validation), part=part)


def read_splits(
    source: Source, data_dir: str | Path | None, convert: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], str]:
    """Return the splits of a set from the first home that has it, and the name of that home.

    Args:
        source: which set.
        data_dir: as of `load_pixels`.
        convert: of a split of Hugging Face `datasets`.

    Raises:
        DatasetError: no home has the set, files are missing or damaged.
    """
    paths = local_files(source, data_dir)
    if paths:
        return source.read(paths), f"files in {paths[0].parent.name}/"
    return read_hub(source, convert), f"Hugging Face {source.hub}"


def local_files(source: Source, data_dir: str | Path | None = None) -> list[Path]:
    """Return the paths of the files of a set in the first folder that has them all.

    Without a folder the list is empty.

    Raises:
        DatasetError: a folder given by hand lacks them, or a folder holds some of them only.
    """
    if data_dir:
        return _find_files(source, Path(data_dir).expanduser(), must=True)
    root = os.environ.get(VARIABLE)
    return _find_files(source, Path(root).expanduser(), must=False) if root else []


def _find_files(source: Source, root: Path, *, must: bool) -> list[Path]:
    """Return the paths of all files, or an empty list.

    Raises:
        DatasetError: some files are missing, or all of them although they must be there.
    """
    if must and not root.is_dir():
        raise DatasetError(f"data_dir {root} is not a folder; {source.how_to_get}")
    # Of two folders that lack files, the error is about the one that lacks fewer.
    found = max(
        _existing_files(source, root / source.folder), _existing_files(source, root), key=len
    )
    missing = ", ".join(name for name in source.files if name not in found)
    if missing and (must or found):
        raise DatasetError(
            f"{source.name}: {root} lacks {missing}; put them there, or give another --data-dir"
        )
    return list(found.values())


def _existing_files(source: Source, folder: Path) -> dict[str, Path]:
    """Return the files of a set that a folder holds, packed or not, by their names."""
    found: dict[str, Path] = {}
    for names in source.files:
        for name in names.split(_OR):
            path = folder / name
            unpacked = path.with_suffix("") if path.suffix in (".gz", ".bz2") else path
            for candidate in (path, unpacked):
                if candidate.is_file():
                    found.setdefault(names, candidate)
    return found


def read_hub(source: Source, convert: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return both splits of a set through Hugging Face `datasets`, each converted.

    Raises:
        DatasetError: the package is missing, or the set cannot be loaded; the message says how to
            get it.
    """
    if not source.hub:
        raise DatasetError(f"{source.name} is not on this machine: {source.how_to_get}")
    if "datasets" not in sys.modules and not (_is_cached(source.hub) or _is_reachable()):
        raise DatasetError(
            f"{source.name} is not on this machine, and huggingface.co cannot be reached:"
            f" {source.manual_steps}"
        )
    try:
        from datasets import load_dataset
    except ImportError:
        raise DatasetError(f"{source.name} is not on this machine: {source.how_to_get}") from None
    _LOG.info("loading %s through Hugging Face datasets", source.hub)
    try:
        stored = load_dataset(source.hub, *filter(None, [source.hub_config]))
        train, test = [convert(stored[part]) for part in source.hub_splits]
    # The hub, its cache and the network raise many kinds of errors.
    except Exception as error:
        raise DatasetError(
            f"{source.name} could not be loaded from Hugging Face as {source.hub}"
            f" ({first_line(error)}): "
            f"{source.manual_steps}"
        ) from error
    return train, test


def _is_cached(name: str) -> bool:
    """Return whether Hugging Face's cache may hold a set."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    places = (hub / f"datasets--{name.replace('/', '--')}", prepared / name.replace("/", "___"))
    return any(place.exists() for place in places)


def _is_reachable(seconds: float = 1.5) -> bool:
    """Return whether the hub answers; its own client tries for minutes. A proxy is not asked."""
    if {"HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"} & os.environ.keys():
        return True
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection(("huggingface.co", 443), seconds).close()
            answers.append(True)

    # Looking up a name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


def _read_columns(part: object, source: Source) -> Split:
    images, labels = [], []
    for row in part:  # type: ignore[attr-defined]
        images.append(np.asarray(row[source.image_column], dtype=np.uint8))
        labels.append(int(row[source.label_column]))
    stacked = np.stack(images)
    if stacked.ndim == 3:
        stacked = stacked[..., None]
    return stacked, np.asarray(labels, np.int64)


# --------------------------------------------------------------------------------------------------
# MedMNIST (Yang et al. 2023): one `.npz` with images and labels of a training, a validation and a
# test split.

_SPLITS = ("train", "test", "val")


def read_medmnist(path: Path) -> tuple[Split, ...]:
    """Return training, test and validation split of a file of MedMNIST.

    Returns:
        Images uint8 `[N, H, W, C]` (C is 1 for grey ones) and labels `[N]` of each.

    Raises:
        DatasetError: the file cannot be read, lacks an array, or an array has another shape or
            type.
    """
    names = []
    for split in _SPLITS:
        names += [f"{split}_images", f"{split}_labels"]
    arrays = read_arrays(path, names)
    return tuple(_check_split(path, split, arrays) for split in _SPLITS)


def read_arrays(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Return arrays of an `.npz` file, all of which must be there."""
    arrays = read_npz(path, names)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise damaged_error(path, f"lacks the arrays {', '.join(missing)}")
    return arrays


def _check_split(path: Path, split: str, arrays: dict[str, np.ndarray]) -> Split:
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    count = images.shape[:1]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise damaged_error(
            path,
            f"`{split}_images` is {images.dtype} {images.shape} where uint8 images were expected",
        )
    if labels.dtype.kind not in "iu" or labels.shape not in (count, (*count, 1)):
        raise damaged_error(
            path,
            f"`{split}_labels` is {labels.dtype} {labels.shape} where one whole number an image"
            " was expected",
        )
    if images.ndim == 3:
        images = images[..., None]
    return images, labels.reshape(-1)


def medmnist_source(name: str) -> Source:
    """Return a set of MedMNIST."""
    return Source(
        name=name,
        folder="medmnist",
        files=(f"{name.lower()}.npz",),
        read=lambda paths: read_medmnist(paths[0]),
    )


PNEUMONIA = medmnist_source("PneumoniaMNIST")
BREAST = medmnist_source("BreastMNIST")
