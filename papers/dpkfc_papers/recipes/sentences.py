"""Recipes of texts that a table of a paper needs.

They are film reviews as hashed words, and sentences by a pretrained encoder: SST-2, AG News, and
titles of StackOverflow.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import (
    IMDB,
    KEY,
    SST2,
    Labelled,
    checked_texts,
    hashed_texts,
    load_texts,
    open_text,
    read_csv,
)
from dpkfc.app.models import linear_from_zero
from dpkfc.app.recipes.images import LinearHead
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.recipes.text import (
    IMDB_WORDS,
    HashedZipf,
    load_rows,
    text_recipe,
    whitened_recipe,
)
from dpkfc.app.run_config import RunConfig
from dpkfc.curvature.probes import Probe, Sample
from dpkfc.curvature.token_noise import TokenNoise
from dpkfc.features.zipf_words import ZipfWords
from dpkfc_papers.minilm import minilm_classifier, minilm_tokens
from dpkfc_papers.sentence_vectors import SENTENCE_WIDTH, encode_tokens, minilm_vectors

# --------------------------------------------------------------------------------------------------
# IMDB: 25,000 film reviews on 4,096 hashed words, without weights.

SIZE = 4096
# Logistic regression as two scores whose difference the softmax takes.
IMDB_LOGISTIC = replace(
    IMDB_WORDS,
    name="imdb-logistic",
    load=partial(load_rows, IMDB, 2, lambda lines: hashed_texts(lines, SIZE)),
    build=partial(linear_from_zero, SIZE, 2),
    input_shape=(SIZE,),
    constants={
        "features": (
            f"{SIZE:,} signed hashes of words, key {KEY!r}",
            "published; nothing is fitted",
        )
    },
    probe=lambda config: HashedZipf(SIZE, ZipfWords(exponent=config.preconditioner.zipf_exponent)),
)


# --------------------------------------------------------------------------------------------------
# A pretrained encoder, its vocabulary, and token noise.

VOCABULARY = 30522


def token_noise(config: RunConfig, length: int) -> TokenNoise:
    """Return random WordPiece tokens between [CLS] and [SEP].

    Words begin at id 1996 of this public vocabulary.

    Args:
        config: has the exponent of Zipf's law.
        length: columns of the inputs.
    """
    return TokenNoise(
        vocab_size=VOCABULARY,
        length=length,
        min_length=4,
        zipf_exponent=config.preconditioner.zipf_exponent or None,
        cls_id=101,
        sep_id=102,
        pad_id=0,
        first_id=1996,
        bare=True,
    )


def sentence_recipe(
    name: str,
    source: Source,
    *,
    num_classes: int,
    length: int,
    unseen: bool = False,
    constants: dict[str, tuple[str, str]] | None = None,
) -> Recipe:
    """Return a recipe that trains the head and the last block of MiniLM-L6 on labelled texts.

    Args:
        name: of the recipe.
        source: of the texts.
        num_classes: number of labels.
        length: tokens a text is cut at.
        unseen: leave out training texts that also occur in the test split.
        constants: more that is taken as public.
    """
    return text_recipe(
        name,
        source,
        num_classes,
        lambda lines: minilm_tokens(lines, length),
        length,
        unseen=unseen,
        build=partial(minilm_classifier, num_classes),
        constants={
            "vocabulary": (
                f"WordPiece, {VOCABULARY:,} tokens, cut at {length}",
                "published with the encoder",
            ),
            "pretrained weights": ("all-MiniLM-L6-v2", "published; trained on public web text"),
            **(constants or {}),
        },
        probe=partial(token_noise, length=length),
    )


# --------------------------------------------------------------------------------------------------
# SST-2: 67,349 phrases of film reviews, two classes; a pretrained sentence encoder, whose last
# block and head are trained.

SST2_MINILM = sentence_recipe("sst2-minilm", SST2, num_classes=2, length=48)


# --------------------------------------------------------------------------------------------------
# Files of news and of titles.


def _read_ag_test(path: Path) -> Labelled:
    """Read the official test file: class from 1, title, description, without a header."""
    with open_text(path) as file:
        rows = list(csv.reader(file))
        labels = [int(row[0]) - 1 for row in rows]
        return checked_texts(path, [row[2] for row in rows], labels)


AG_NEWS = Source(
    name="AG News",
    folder="ag_news",
    files=("train_subset.csv.gz", "test.csv.gz"),
    read=lambda paths: (read_csv(paths[0], "description", first=1), _read_ag_test(paths[1])),
    hub="fancyzhx/ag_news",
    text_column="text",
)


def _read_stackoverflow(path: Path) -> tuple[Labelled, Labelled]:
    """Read both splits: every fifth row of a fixed permutation is a test example."""
    titles, tags = read_csv(path, "title", first=1)
    generator = np.random.Generator(np.random.PCG64(0))
    order = generator.permutation(len(tags)).tolist()
    test_rows = set(order[::5])
    train: Labelled = ([], [])
    test: Labelled = ([], [])
    for row, (title, tag) in enumerate(zip(titles, tags, strict=True)):
        texts, labels = test if row in test_rows else train
        texts.append(title)
        labels.append(tag)
    return train, test


STACKOVERFLOW = Source(
    name="StackOverflow titles",
    folder="stackoverflow",
    files=("titles.csv.gz",),
    read=lambda paths: _read_stackoverflow(paths[0]),
)


# --------------------------------------------------------------------------------------------------
# AG News: descriptions of news, four classes; a pretrained sentence encoder, whose last block and
# head are trained.
#
# Descriptions alone, without titles, on both sides. The stored training file is a part of the
# official 120,000; descriptions that also occur in the test file are left out.

AG_NEWS_MINILM = sentence_recipe(
    "ag-news-minilm",
    AG_NEWS,
    num_classes=4,
    length=64,
    unseen=True,
    constants={
        "test split": (
            "training texts that occur in it are left out",
            "it is public, and each is looked at alone",
        )
    },
)


# --------------------------------------------------------------------------------------------------
# StackOverflow: 20,000 titles of questions, 20 tags; a pretrained sentence encoder, whose last
# block and head are trained.
#
# This is the repaired task of the DP-KFC experiments: there, pairs of a title and a LIST of titles
# written out as text were classified, and the form of the list gave the label away. Here one title
# has one tag. The set has no official split; every fifth title of a public permutation is a test
# example.

STACKOVERFLOW_MINILM = sentence_recipe(
    "stackoverflow-minilm",
    STACKOVERFLOW,
    num_classes=20,
    length=32,
    constants={"split": ("16,000 to 4,000 by a fixed permutation", "of the row numbers alone")},
)


AG_NEWS_HEAD = whitened_recipe("ag-news", AG_NEWS, num_classes=4, length=64, unseen=True)
STACKOVERFLOW_LAYERS = whitened_recipe("stackoverflow", STACKOVERFLOW, num_classes=20, length=64)


# --------------------------------------------------------------------------------------------------
# The same titles, as vectors of the frozen encoder; the head alone is trained, as in the DP-KFC
# paper.

# Tokens that are read of a text.
HEAD_LENGTH = 32


@dataclass(frozen=True)
class SentenceNoise(Probe):
    """Vectors of random tokens by the frozen public encoder.

    Attributes:
        tokens: makes the tokens.
    """

    tokens: TokenNoise

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return vectors `[n, 384]` of norm 1, no labels."""
        ids, _ = self.tokens.sample(n, generator)
        assert isinstance(ids, Tensor)
        return encode_tokens(ids), None

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        return {**self.tokens.describe(), "kind": "SentenceNoise", "encoder": "all-MiniLM-L6-v2"}


@lru_cache(maxsize=1)
def _title_vectors(data_dir: str) -> ExampleSet:
    """Return vectors of all titles; a study asks for them many times, and they take minutes."""
    texts = load_texts(STACKOVERFLOW, data_dir or None).check(STACKOVERFLOW.name, 20)
    return texts.tensors(lambda lines: minilm_vectors(lines, HEAD_LENGTH))


STACKOVERFLOW_HEAD = replace(
    STACKOVERFLOW_MINILM,
    name="stackoverflow-head",
    load=lambda config: _title_vectors(config.data.data_dir),
    build=partial(LinearHead, SENTENCE_WIDTH, 20),
    input_shape=(SENTENCE_WIDTH,),
    probe=lambda config: SentenceNoise(token_noise(config, HEAD_LENGTH)),
)
