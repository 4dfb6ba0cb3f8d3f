"""Text sets: labelled sentences, and the token ids that a run trains on."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.examples import ExampleSet
from dpkfc.recipes.datasets.sources import Source, from_hub, local_files
from dpkfc.unpack_limit import BoundedStream, UnpackedSizeError

__all__ = ["AG_NEWS", "IMDB", "SST2", "STACKOVERFLOW", "Texts", "load_texts", "opened"]

Labelled = tuple[list[str], list[int]]
Tokenise = Callable[[Sequence[str]], Tensor]


@dataclass(frozen=True)
class Texts:
    """Sentences and labels of a training and a test split.

    Attributes:
        train: sentences and labels.
        test: the same for the test split.
        source: where they were read from, for the privacy card.
    """

    train: Labelled
    test: Labelled
    source: str

    def check(self, name: str, num_classes: int) -> Texts:
        """These texts, if their labels lie in `0 … num_classes − 1`.

        Raises:
            DatasetError: a label outside; names the split.
        """
        for part, (_, labels) in (("training", self.train), ("test", self.test)):
            if outside := [label for label in labels if not 0 <= label < num_classes]:
                where = f"{name}, {part} split from {self.source}"
                raise DatasetError(f"{where}: a label is {outside[0]!s:.40}, expected 0 to {num_classes - 1}; replace the file")
        return self

    def tensors(self, tokenise: Tokenise) -> ExampleSet:
        """Token ids `[N, T]` and int64 labels `[N]`.

        Args:
            tokenise: maps sentences to ids; its vocabulary must be public, never fitted on the private text.
        """
        train, test = ((tokenise(texts), torch.tensor(labels)) for texts, labels in (self.train, self.test))
        return ExampleSet(train=train, test=test, source=self.source)


def _read_tsv(path: Path) -> Labelled:
    """Rows `sentence<TAB>label` under a header, gzipped or not.

    Raises:
        DatasetError: damaged, or a label that is not a number.
    """
    with opened(path) as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
        return _some(path, [row[0] for row in rows], [int(row[1]) for row in rows])


def _read_csv(path: Path, text: str, label: str = "label", first: int = 0) -> Labelled:
    """Columns of a comma-separated file with a header; labels count from `first`.

    Raises:
        DatasetError: damaged, without these columns, or a label that is not a number.
    """
    with opened(path) as file:
        rows = list(csv.DictReader(file))
        return _some(path, [row[text] for row in rows], [int(row[label]) - first for row in rows])


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A text file, unpacked by its ending; what goes wrong while it is read becomes one line.

    Raises:
        DatasetError: the file is damaged or no such table.
        UnpackedSizeError: the file unpacks to more than the limit of `unpack_limit`.
    """
    unpack: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    try:
        with unpack(path, "rb") as stream:
            yield io.TextIOWrapper(io.BufferedReader(BoundedStream(stream, path)), encoding="utf-8", newline="")
    except KeyError as error:
        raise DatasetError(f"{path} is not a table of sentence and label (no column {error}); replace the file") from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError, TypeError, csv.Error) as error:
        if isinstance(error, DatasetError | UnpackedSizeError):
            raise
        raise DatasetError(f"{path} is not a table of sentence and label ({error}); replace the file") from None


def _some(path: Path, texts: list[str], labels: list[int]) -> Labelled:
    if not texts or any(not isinstance(text, str) for text in texts):
        raise DatasetError(f"{path} holds {'a row without a text' if texts else 'no sentences'}; replace the file")
    return texts, labels


SST2 = Source(
    name="SST-2",
    folder="sst2",
    files=("train.tsv.gz", "dev.tsv.gz"),
    read=lambda paths: (_read_tsv(paths[0]), _read_tsv(paths[1])),
    hub="stanfordnlp/sst2",
    hub_splits=("train", "validation"),  # the labels of the test split are not public
)

IMDB = Source(
    name="IMDB reviews",
    folder="imdb",
    files=("train.csv.bz2", "test.csv.bz2"),
    read=lambda paths: (_read_csv(paths[0], "text"), _read_csv(paths[1], "text")),
    hub="stanfordnlp/imdb",
    text_column="text",
)


def _read_ag_test(path: Path) -> Labelled:
    """The official test file: class from 1, title, description, without a header."""
    with opened(path) as file:
        rows = list(csv.reader(file))
        return _some(path, [row[2] for row in rows], [int(row[0]) - 1 for row in rows])


AG_NEWS = Source(
    name="AG News",
    folder="ag_news",
    files=("train_subset.csv.gz", "test.csv.gz"),
    read=lambda paths: (_read_csv(paths[0], "description", first=1), _read_ag_test(paths[1])),
    hub="fancyzhx/ag_news",
    text_column="text",
)


def _read_stackoverflow(path: Path) -> tuple[Labelled, Labelled]:
    """Training and test split: every fifth row of a fixed permutation is a test example."""
    titles, tags = _read_csv(path, "title", first=1)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(tags)).tolist()
    test = set(order[::5])
    parts = [[i for i in range(len(tags)) if (i in test) == held_out] for held_out in (False, True)]
    train, held = (([titles[i] for i in rows], [tags[i] for i in rows]) for rows in parts)
    return train, held


STACKOVERFLOW = Source(
    name="StackOverflow titles",
    folder="stackoverflow",
    files=("titles.csv.gz",),
    read=lambda paths: _read_stackoverflow(paths[0]),
)


def load_texts(source: Source, data_dir: str | Path | None = None) -> Texts:
    """Read a text set from the first home that has it, as `load_pixels` does for images.

    Raises:
        DatasetError: no home has the set, files are missing or damaged. The message says how to get them.
    """
    paths = local_files(source, data_dir)
    if paths:
        train, test = source.read(paths)
        return Texts(train, test, source=f"files in {paths[0].parent.name}/")
    train, test = from_hub(source, lambda part: (list(part[source.text_column]), [int(label) for label in part["label"]]))
    return Texts(train, test, source=f"Hugging Face {source.hub}")
