"""Text sets: labelled sentences, and the token ids that a run trains on."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.datasets.pixels import Splits
from dpkfc.app.datasets.sources import Source, read_splits
from dpkfc.app.datasets.unpacking import BoundedStream, UnpackedSizeError
from dpkfc.data.sparse import SparseRows

Labelled = tuple[list[str], list[int]]
Tokenise = Callable[[Sequence[str]], Tensor]


class Texts(Splits):
    """Splits of sentences and labels."""

    def check(self, name: str, num_classes: int) -> Texts:
        """Return these texts, or refuse labels outside `0 … num_classes − 1`.

        Raises:
            DatasetError: a label outside, with the name of the split.
        """
        for part, (_, labels) in (("training", self.train), ("test", self.test)):
            if not all(0 <= label < num_classes for label in labels):
                raise DatasetError(
                    f"{name}, {part} split from {self.source}: labels are not all 0 to"
                    f" {num_classes - 1}; replace the file"
                )
        return self

    def tensors(self, tokenise: Tokenise) -> ExampleSet:
        """Return token ids `[N, T]` and int64 labels `[N]`.

        Args:
            tokenise: maps sentences to ids, by a public vocabulary that is never fitted on the
                private text.
        """

        def convert(part: Labelled) -> Examples:
            texts, labels = part
            return tokenise(texts), torch.tensor(labels)

        return self.convert(convert)


def _read_tsv(path: Path) -> Labelled:
    """Read rows `sentence<TAB>label` under a header, gzipped or not.

    Raises:
        DatasetError: damaged, or a label that is not a number.
    """
    with open_text(path) as file:
        _, *rows = [line.rstrip("\n").split("\t") for line in file]
        labels = [int(row[1]) for row in rows]
        return checked_texts(path, [row[0] for row in rows], labels)


def read_csv(path: Path, text: str, first: int = 0) -> Labelled:
    """Read a column and `label` of a comma-separated file; labels count from `first`.

    Raises:
        DatasetError: damaged, without these columns, or a label that is not a number.
    """
    with open_text(path) as file:
        rows = list(csv.DictReader(file))
        labels = [int(row["label"]) - first for row in rows]
        return checked_texts(path, [row[text] for row in rows], labels)


@contextmanager
def open_text(path: Path) -> Iterator[Any]:
    """Open a text file, unpacked by its ending; errors while it is read become one line.

    Raises:
        DatasetError: the file is damaged or not such a table.
        UnpackedSizeError: the file unpacks to more than the limit of `check_unpacked_size`.
    """
    unpack: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    try:
        with unpack(path, "rb") as stream:
            reader = io.BufferedReader(BoundedStream(stream, path))
            yield io.TextIOWrapper(reader, encoding="utf-8", newline="")
    except KeyError as error:
        raise DatasetError(
            f"{path} is not a table of sentence and label (no column {error}); replace the file"
        ) from None
    except (DatasetError, UnpackedSizeError):
        raise
    except (OSError, EOFError, zlib.error, ValueError, IndexError, TypeError, csv.Error) as error:
        raise DatasetError(
            f"{path} is not a table of sentence and label ({error}); replace the file"
        ) from None


def checked_texts(path: Path, texts: list[str], labels: list[int]) -> Labelled:
    """Return texts and labels, or refuse a file without any.

    Raises:
        DatasetError: there are none.
    """
    if not texts:
        raise DatasetError(f"{path} holds no sentences; replace the file")
    if any(not isinstance(text, str) for text in texts):
        raise DatasetError(f"{path} holds a row without a text; replace the file")
    return texts, labels


SST2 = Source(
    name="SST-2",
    folder="sst2",
    files=("train.tsv.gz", "dev.tsv.gz"),
    read=lambda paths: (_read_tsv(paths[0]), _read_tsv(paths[1])),
    hub="stanfordnlp/sst2",
    # The labels of the test split are not public.
    hub_splits=("train", "validation"),
)
IMDB = Source(
    name="IMDB reviews",
    folder="imdb",
    files=("train.csv.bz2", "test.csv.bz2"),
    read=lambda paths: (read_csv(paths[0], "text"), read_csv(paths[1], "text")),
    hub="stanfordnlp/imdb",
    text_column="text",
)


def load_texts(source: Source, data_dir: str | Path | None = None) -> Texts:
    """Read a text set from the first home that has it, as `load_pixels` does for images.

    Raises:
        DatasetError: no home has the set, files are missing or damaged. The message says how to get
            them.
    """

    def convert(part: Any) -> Labelled:
        labels = [int(label) for label in part["label"]]
        return list(part[source.text_column]), labels

    (train, test), where = read_splits(source, data_dir, convert)
    return Texts(train, test, source=where)


# --------------------------------------------------------------------------------------------------
# Features of texts by hashing: nothing is fitted, so nothing about the private texts is in the map.
#
# A vocabulary, document frequencies or a scale computed from the texts would be functions of all
# examples at once, outside the clip and the noise. Here every word goes through one published hash
# to a column and a sign (Weinberger et al. 2009), and each row is scaled by its own norm. So a row
# is a function of its own text alone.

KEY = "dpkfc hashed words 1"
_WORD = re.compile(r"[a-z0-9']+")
_MARKUP = re.compile(r"<[^>]{0,80}>")


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without tags such as `<br />`."""
    return _WORD.findall(_MARKUP.sub(" ", text.lower()))


def word_hashes(words: Iterable[str]) -> np.ndarray:
    """Return one uint64 for each word: BLAKE2b under a public key, equal on every machine."""
    key = KEY.encode()
    digests = []
    for word in words:
        hashed = hashlib.blake2b(word.encode(), digest_size=8, key=key)
        digests.append(hashed.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


@dataclass(frozen=True, eq=False)
class WordWeights:
    """Public weights of words, found by their hashes.

    Attributes:
        hashes: uint64 `[n]`, ascending.
        values: float64 `[n]`, the weight of each.
        rare: the weight of every other word.
    """

    hashes: np.ndarray
    values: np.ndarray
    rare: float

    def weigh(self, hashes: np.ndarray) -> np.ndarray:
        """Return the weights of word hashes, float64 of the same shape."""
        last = len(self.hashes) - 1
        places = np.searchsorted(self.hashes, hashes).clip(max=last)
        is_known = self.hashes[places] == hashes
        weights: np.ndarray = np.where(is_known, self.values[places], self.rare)
        return weights


def hashed_texts(texts: Sequence[str], size: int, *, weights: WordWeights | None = None) -> Tensor:
    """Return features float32 `[N, size]` of texts; see `sparse_texts`."""
    return sparse_texts(texts, size, weights=weights)[:]


def sparse_texts(
    texts: Sequence[str], size: int, *, weights: WordWeights | None = None
) -> SparseRows:
    """Return features `[N, size]` of texts, as sparse rows; see `sparse_hashes`."""
    documents = [words_of(text) for text in texts]
    known = sorted(set().union(*documents))
    table = dict(zip(known, word_hashes(known).tolist(), strict=True))
    hashes = np.fromiter((table[word] for words in documents for word in words), np.uint64)
    return sparse_hashes(hashes, [*map(len, documents)], size, weights=weights)


def hashed_rows(
    documents: Sequence[np.ndarray], size: int, *, weights: WordWeights | None = None
) -> Tensor:
    """Return features float32 `[N, size]` of documents as word hashes; see `sparse_hashes`."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *documents])
    return sparse_hashes(hashes, [*map(len, documents)], size, weights=weights)[:]


def sparse_hashes(
    hashes: np.ndarray,
    lengths: Sequence[int],
    size: int,
    *,
    weights: WordWeights | None = None,
) -> SparseRows:
    """Return features of documents that are sequences of word hashes.

    Args:
        hashes: uint64, of all documents behind one another.
        lengths: words of each document `[N]`.
        size: number of columns, a power of two.
        weights: public weights of words; without them every word has weight one.

    Returns:
        Sparse rows `[N, size]`. Each word that occurs adds its signed weight to its column, once a
        document. Rows have norm 1, or 0 where a document is empty.

    Raises:
        ValueError: a size that is not a power of two.
    """
    if size < 2 or size & (size - 1):
        raise ValueError(f"the number of hashed features must be a power of two, got {size}")
    count = len(lengths)
    rows = np.repeat(np.arange(count), lengths)
    order = np.lexsort((hashes, rows))
    hashes, rows = hashes[order], rows[order]
    # A word counts once a document.
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (hashes[1:] != hashes[:-1]) | (rows[1:] != rows[:-1])
    hashes, rows = hashes[is_new], rows[is_new]
    signs = 1.0 - 2.0 * (hashes >> np.uint64(63)).astype(np.float64)
    if weights is not None:
        signs *= weights.weigh(hashes)
    columns = (hashes & np.uint64(size - 1)).astype(np.int64)
    places, entries = np.unique(rows * size + columns, return_inverse=True)
    values = np.bincount(entries, signs, len(places))
    rows = places // size
    norms = np.sqrt(np.bincount(rows, np.square(values), count))
    values = (values / np.maximum(norms, 1e-12)[rows]).astype(np.float32)
    matrix = scipy.sparse.csr_array((values, (rows, places % size)), shape=(count, size))
    return SparseRows(matrix)
