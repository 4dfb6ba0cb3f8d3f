"""Features of texts by hashing: nothing is fitted, so nothing about the private texts is in the map.

A vocabulary, document frequencies or a scale computed from the texts would be functions of all examples at once, outside the
clip and the noise. Here every word (and, by choice, every pair of neighbouring words) goes through one published hash to a column
and a sign (Weinberger et al. 2009), and each row is scaled by its own norm. So a row is a function of its own text alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["KEY", "hashed_rows", "hashed_texts", "word_hashes", "words_of"]

KEY = "dpkfc hashed words 1"
_WORD = re.compile(r"[a-z0-9']+")
_MARKUP = re.compile(r"<[^>]{0,80}>")


def words_of(text: str) -> list[str]:
    """Lower-case words; tags such as `<br />` are left out."""
    return _WORD.findall(_MARKUP.sub(" ", text.lower()))


def word_hashes(words: Iterable[str], key: str = KEY) -> np.ndarray:
    """One uint64 a word: BLAKE2b under a public key, the same on every machine."""
    secret = key.encode()
    made = (hashlib.blake2b(word.encode(), digest_size=8, key=secret).digest() for word in words)
    return np.frombuffer(b"".join(made), "<u8").astype(np.uint64)


def hashed_texts(texts: Sequence[str], size: int, key: str = KEY, *, pairs: bool = False) -> Tensor:
    """Features `[N, size]` of texts; see `hashed_rows`."""
    documents = [words_of(text) for text in texts]
    known = sorted({word for words in documents for word in words})
    table = dict(zip(known, word_hashes(known, key).tolist(), strict=True))
    return hashed_rows([np.array([table[word] for word in words], np.uint64) for words in documents], size, pairs=pairs)


def hashed_rows(documents: Sequence[np.ndarray], size: int, *, pairs: bool = False) -> Tensor:
    """Features of documents that are sequences of word hashes.

    Args:
        documents: uint64 `[length]` each, in the order of the text.
        size: number of columns, a power of two.
        pairs: count pairs of neighbouring words too.

    Returns:
        float32 `[N, size]`: each word (or pair) that occurs adds one sign to its column, once a document; rows have norm 1, or
        0 where a document is empty.

    Raises:
        ValueError: a size that is not a power of two.
    """
    if size < 2 or size & (size - 1):
        raise ValueError(f"the number of hashed features must be a power of two, got {size}")
    rows = np.zeros((len(documents), size), np.float32)
    for row, words in zip(rows, documents, strict=True):
        found = np.unique(np.concatenate([words, _pairs(words)]) if pairs else words)
        column = (found & np.uint64(size - 1)).astype(np.int64)
        sign = 1.0 - 2.0 * (found >> np.uint64(63)).astype(np.float64)
        total = np.bincount(column, weights=sign, minlength=size)
        row[:] = total / max(float(np.linalg.norm(total)), 1e-12)
    return torch.from_numpy(rows)


def _pairs(words: np.ndarray) -> np.ndarray:
    """Hashes of neighbouring words: both are mixed with odd constants, then stirred (the last steps of splitmix64)."""
    mixed: Any = words[:-1] * np.uint64(0x9E3779B97F4A7C15) + words[1:] * np.uint64(0xC2B2AE3D27D4EB4F)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ np.right_shift(mixed, np.uint64(shift))) * np.uint64(factor)
    return mixed ^ np.right_shift(mixed, np.uint64(31))
