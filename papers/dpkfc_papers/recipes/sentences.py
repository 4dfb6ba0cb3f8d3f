"""Recipes on a pretrained encoder of sentences: AG News and titles of StackOverflow."""

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
from dpkfc.app.datasets.text import Labelled, checked_texts, load_texts, open_text, read_csv
from dpkfc.app.recipes.images import LinearHead
from dpkfc.app.recipes.text import sentence_recipe, token_noise, whitened_recipe
from dpkfc.curvature.probes import Probe, Sample
from dpkfc.curvature.token_noise import TokenNoise
from dpkfc_papers.sentence_vectors import SENTENCE_WIDTH, encode_tokens, minilm_vectors


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
