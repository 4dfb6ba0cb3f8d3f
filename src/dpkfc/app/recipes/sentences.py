"""Define recipes of sentences: a pretrained encoder, its vocabulary, and token noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dpkfc.app.datasets.formats import ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import AG_NEWS, SST2, STACKOVERFLOW, Texts, load_texts
from dpkfc.app.pretrained import (
    SENTENCE_WIDTH,
    encode_tokens,
    minilm_classifier,
    minilm_tokens,
    minilm_vectors,
)
from dpkfc.app.recipes.features import LinearHead
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.probes import Probe, Sample, TokenNoise

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
        zipf_exponent=config.zipf_exponent or None,
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

    def load(config: RunConfig) -> ExampleSet:
        texts = load_texts(source, config.data_dir or None).check(source.name, num_classes)
        if unseen:
            texts = _remove_test_texts(texts)
        return texts.tensors(tokens)

    def tokens(lines: Sequence[str]) -> Tensor:
        return minilm_tokens(lines, length)

    def probe(config: RunConfig) -> TokenNoise:
        return token_noise(config, length)

    return Recipe(
        name=name,
        title=source.name,
        load=load,
        build=partial(minilm_classifier, num_classes),
        input_shape=(length,),
        num_classes=num_classes,
        constants={
            "vocabulary": (
                f"WordPiece, {VOCABULARY:,} tokens, cut at {length}",
                "published with the encoder",
            ),
            "pretrained weights": ("all-MiniLM-L6-v2", "published; trained on public web text"),
            **(constants or {}),
        },
        probe=probe,
    )


def _remove_test_texts(texts: Texts) -> Texts:
    """Return the texts without training texts of the public test split.

    Each text is compared alone, so one more example changes one row.
    """
    seen = set(texts.test[0])
    lines, labels = [], []
    for line, label in zip(*texts.train, strict=True):
        if line not in seen:
            lines.append(line)
            labels.append(label)
    return Texts((lines, labels), texts.test, texts.source)


# --------------------------------------------------------------------------------------------------
# SST-2: 67,349 phrases of film reviews, two classes; a pretrained sentence encoder, whose last
# block and head are trained.

SST2_MINILM = sentence_recipe("sst2-minilm", SST2, num_classes=2, length=48)


# --------------------------------------------------------------------------------------------------
# AG News: descriptions of news, four classes; a pretrained sentence encoder, whose last block and
# head are trained.
#
# Descriptions alone, without titles, on both sides. The stored training file is a part of the
# official 120,000; those of its descriptions that also occur in the test file are left out.

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
    load=lambda config: _title_vectors(config.data_dir),
    build=partial(LinearHead, SENTENCE_WIDTH, 20),
    input_shape=(SENTENCE_WIDTH,),
    probe=lambda config: SentenceNoise(token_noise(config, HEAD_LENGTH)),
)
