"""Where a data set comes from: a folder given by hand, the folder in DPKFC_DATA, or Hugging Face `datasets`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpkfc.app.datasets.formats import DatasetError, Pixels, read_cifar, read_idx

VARIABLE = "DPKFC_DATA"
_OR = " or "
_LOG = logging.getLogger(__name__)
Split = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set in its two homes.

    Attributes:
        name: what people call it.
        folder: its folder below a data directory; the directory itself is looked into as well.
        files: file names that all must be there, of "a or b" the first that is; a `.gz` or `.bz2` may be missing from a name on
            disk.
        read: files in that order to (training split, test split), or with the set's own validation split behind them.
        hub: repository on the Hugging Face hub; empty where it has none.
        hub_config: which of the sets of that repository; empty where it has one.
        image_column: column of the images there.
        label_column: column of the labels of images there.
        text_column: column of the texts there.
        hub_splits: names of the training and the test split there.
        whole: training images of the whole set, where files may hold a part of it; 0 where they do not.
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
    def by_hand(self) -> str:
        """Where to put the files."""
        return f"put {', '.join(self.files)} into DIR/{self.folder} and give --data-dir DIR (or set {VARIABLE}=DIR)"

    @property
    def how_to_get(self) -> str:
        """The end of an error about a set that is not there."""
        hub = f", or pip install datasets to load {self.hub} from Hugging Face" if self.hub else ""
        return f"{self.by_hand}{hub}"


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
MNIST = Source(name="MNIST", folder="mnist", files=_IDX_FILES, read=_read_idx_files, hub="ylecun/mnist")
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

# Without a hub: as public images of other tasks the files decide, on every machine alike.
CIFAR100 = Source(name="CIFAR-100", folder="cifar100", files=("train.npz", "test.npz"), read=_read_cifar_files)
CIFAR100_TASK = replace(CIFAR100, hub="uoft-cs/cifar100", image_column="img", label_column="fine_label", whole=50_000)


def load_pixels(source: Source, data_dir: str | Path | None = None) -> Pixels:
    """Read a data set from the first home that has it.

    A folder given by hand must hold the files. The folder named by the environment variable DPKFC_DATA may lack the
    whole set; then, and without a folder, the set is loaded through Hugging Face `datasets`.

    Args:
        source: which set.
        data_dir: a folder with `source.folder` in it, or with the files themselves.

    Returns:
        Raw pixels; their `source` names the home, and says where files hold a part of the set only.

    Raises:
        DatasetError: no home has the set, files are missing or damaged. The message says how to get them.
    """
    paths = local_files(source, data_dir)
    if paths:
        train, test, *own = source.read(paths)
        part = f"{len(train[1]):,} of {source.whole:,} training images" if len(train[1]) < source.whole else ""
        where = f"files in {paths[0].parent.name}/" + (f", {part}" if part else "")
        return Pixels(train, test, source=where, validation=own[0] if own else None, part=part)
    return Pixels(*from_hub(source, lambda part: _columns(part, source)), source=f"Hugging Face {source.hub}")


def local_files(source: Source, data_dir: str | Path | None = None) -> list[Path]:
    """Paths of the files of a set in the first folder that has them all; none where no folder is said to.

    Raises:
        DatasetError: a folder given by hand lacks them, or a folder holds some of them only.
    """
    for root, given in ((data_dir, True), (os.environ.get(VARIABLE), False)):
        if root:
            paths = _find(source, Path(root).expanduser(), must=given)
            if paths:
                return paths
    return []


def _find(source: Source, root: Path, *, must: bool) -> list[Path]:
    """Paths of all files, or none of them.

    Raises:
        DatasetError: some files are missing, or all of them although they must be there.
    """
    if must and not root.is_dir():
        raise DatasetError(f"data_dir {root} is not a folder; {source.how_to_get}")
    best: list[Path | None] = []
    for folder in (root / source.folder, root):
        found = [_existing(folder, name) for name in source.files]
        present = [path for path in found if path is not None]
        if len(present) == len(found):
            return present
        if len(present) > sum(path is not None for path in best):
            best = found
    found = best or [None] * len(source.files)
    missing = [name for name, path in zip(source.files, found, strict=True) if path is None]
    if must or best:
        raise DatasetError(f"{source.name}: {root} lacks {', '.join(missing)}; {source.how_to_get}")
    return []


def _existing(folder: Path, names: str) -> Path | None:
    paths = [folder / name for name in names.split(_OR)]
    plain = ((path, path.with_suffix("")) if path.suffix in (".gz", ".bz2") else (path,) for path in paths)
    return next((candidate for pair in plain for candidate in pair if candidate.is_file()), None)


def from_hub(source: Source, convert: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Both splits of a set through Hugging Face `datasets`, each converted.

    Raises:
        DatasetError: the package is missing, or the set cannot be loaded; the message says how to get it.
    """
    if not source.hub:
        raise DatasetError(f"{source.name} is not on this machine: {source.how_to_get}")
    try:
        from datasets import load_dataset
    except ImportError:
        raise DatasetError(f"{source.name} is not on this machine: {source.how_to_get}") from None
    _LOG.info("loading %s through Hugging Face datasets", source.hub)
    try:
        stored = load_dataset(source.hub, *filter(None, [source.hub_config]))
        train, test = (convert(stored[part]) for part in source.hub_splits)
    except Exception as error:  # whatever the hub, its cache or the network raise becomes one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        failed = f"{source.name} could not be loaded from Hugging Face as {source.hub} ({reason})"
        raise DatasetError(f"{failed}: {source.by_hand}") from error
    return train, test


def _columns(part: object, source: Source) -> Split:
    images, labels = [], []
    for row in part:  # type: ignore[attr-defined]
        images.append(np.asarray(row[source.image_column], dtype=np.uint8))
        labels.append(int(row[source.label_column]))
    stacked = np.stack(images)
    return (stacked[..., None] if stacked.ndim == 3 else stacked), np.asarray(labels, np.int64)
