"""Text sets: labelled sentences, and the token ids that a run trains on."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.examples import ExampleSet
from dpkfc.recipes.datasets.sources import Source, from_hub, local_files

__all__ = ["SST2", "Texts", "load_texts"]

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
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file][1:]
        texts, labels = [row[0] for row in rows], [int(row[1]) for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise DatasetError(f"{path} is not a table of sentence and label ({error}); replace the file") from None
    if not texts:
        raise DatasetError(f"{path} holds no sentences; replace the file")
    return texts, labels


SST2 = Source(
    name="SST-2",
    folder="sst2",
    files=("train.tsv.gz", "dev.tsv.gz"),
    read=lambda paths: (_read_tsv(paths[0]), _read_tsv(paths[1])),
    hub="stanfordnlp/sst2",
    hub_splits=("train", "validation"),  # the labels of the test split are not public
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
    train, test = from_hub(source, lambda part: (list(part["sentence"]), [int(label) for label in part["label"]]))
    return Texts(train, test, source=f"Hugging Face {source.hub}")
