"""Recipes of texts: hashed words, or means of layers of a pretrained encoder, with a linear model.

No vocabulary and no document frequencies are fitted. On private text both are functions of all
examples without clip and noise, so that a stated ε would not hold. `vocabulary = "private"` and
`"tf-idf"` are refused for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
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
    Texts,
    WordWeights,
    hashed_rows,
    load_texts,
    sparse_texts,
    word_hashes,
)
from dpkfc.app.models import linear_from_zero
from dpkfc.app.pretrained import layer_features, public_means, sentence_encoder
from dpkfc.app.recipes.images import LinearHead
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.convex import AVERAGE, STEPS
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.curvature.probes import Probe
from dpkfc.data.sparse import SparseRows
from dpkfc.features.zipf_words import COMMON_WORDS, ZipfWords

# Words of a document for which frequencies of documents are computed, and the rank from which on
# words count as rare.
_LENGTH = 200
_RARE = 1000


@cache
def english_weights() -> WordWeights:
    """Return inverse document frequencies of English by Zipf's law: no text is counted.

    The word of rank r is in a document of 200 words with probability 1 − (1 − p_r)^200. Its weight
    is minus the logarithm. All words that are not in `COMMON_WORDS` have the weight of rank 1,000.
    """
    weights = -np.log(1 - (1 - ZipfWords().frequencies) ** _LENGTH)
    hashes = word_hashes(COMMON_WORDS)
    order = np.argsort(hashes)
    return WordWeights(hashes[order], weights[: len(hashes)][order], float(weights[_RARE]))


@dataclass(frozen=True)
class HashedZipf(Probe):
    """A probe for hashed texts: Zipf documents through the map that prepares the private texts.

    Attributes:
        size: number of features.
        text: distribution of the documents.
        weighted: whether words have the weights of `english_weights`, and rows the norm 4.
    """

    size: int
    text: ZipfWords = ZipfWords()
    weighted: bool = False

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return features `[n, size]`, no labels."""
        documents = [self._hashes[ranks] for ranks in self.text.ranks(n, generator)]
        weights = english_weights() if self.weighted else None
        rows = hashed_rows(documents, self.size, weights=weights)
        return (NORM * rows if self.weighted else rows), None

    @cached_property
    def _hashes(self) -> np.ndarray:
        return word_hashes(self.text.words)

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        facts = {"kind": "HashedZipf", "source": "synthetic", "size": self.size}
        if self.weighted:
            facts["weights"] = "Zipf"
        return {**facts, **asdict(self.text)}


def load_rows(
    source: Source,
    num_classes: int,
    encode: Callable[[Sequence[str]], Tensor],
    config: RunConfig,
    *,
    unseen: bool = False,
) -> ExampleSet:
    """Return the texts of a source as tensors; `unseen` leaves out texts of the test split."""
    texts = load_texts(source, config.data.data_dir or None).check(source.name, num_classes)
    return (remove_test_texts(texts) if unseen else texts).tensors(encode)


def text_recipe(
    name: str,
    source: Source,
    num_classes: int,
    encode: Callable[[Sequence[str]], Tensor],
    width: int,
    *,
    unseen: bool = False,
    **more: Any,
) -> Recipe:
    """Return a recipe of labelled texts.

    Args:
        name: of the recipe.
        source: of the texts.
        num_classes: number of labels.
        encode: maps texts to the inputs of the model `[N, width]`.
        width: of one input.
        unseen: leave out training texts that also occur in the test split.
        more: of `Recipe`.
    """
    return Recipe(
        name=name,
        title=source.name,
        load=partial(load_rows, source, num_classes, encode, unseen=unseen),
        input_shape=(width,),
        num_classes=num_classes,
        **more,
    )


def remove_test_texts(texts: Texts) -> Texts:
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
# IMDB: 25,000 film reviews, two classes. Words are weighted by how rare they are in English, by
# Zipf's law.

WIDE = 32_768
# Norm of rows of weighted words. The input of the bias is 1: at norm 1 it takes half of the clipped
# norm, and the words have less signal at the same noise.
NORM = 4.0


def weighted_words(texts: Sequence[str], size: int) -> SparseRows:
    """Return hashed words `[N, size]` with the weights of `english_weights`, rows of norm 4."""
    rows = sparse_texts(texts, size, weights=english_weights())
    return SparseRows(rows.matrix * np.float32(NORM))


# Weighted words take 3.3 GB in half precision.
IMDB_WORDS = text_recipe(
    "imdb",
    IMDB,
    2,
    lambda lines: weighted_words(lines, WIDE)[:].half(),
    WIDE,
    build=partial(LinearHead, WIDE, 2),
    constants={
        "features": (
            f"{WIDE:,} signed hashes of words, key {KEY!r}, weighted by Zipf's law",
            "published; nothing is fitted",
        )
    },
    probe=lambda config: HashedZipf(
        WIDE, ZipfWords(exponent=config.preconditioner.zipf_exponent), weighted=True
    ),
)


# --------------------------------------------------------------------------------------------------
# Texts as means of all layers of a frozen encoder, whitened by Zipf texts; a linear head.

# Features of a text: seven layers of 384 numbers, and a constant.
LAYERS_WIDTH = 7 * 384 + 1
REASON_OF_TEXTS = "the default: C and rate of whitened rows by rule; docs/results/language.md"
# Settings of such a head beside its rate. A norm of 0 takes C by the rule.
WHITENED: dict[str, Any] = {
    "method": "dp-sgd",
    "steps": STEPS,
    "expected_batch_size": 0,
    "max_grad_norm": 0.0,
    "weight_average": AVERAGE.decay,
    "average_from_start": True,
    "max_physical_batch_size": 4096,
}


def whitened_recipe(
    name: str, source: Source, *, num_classes: int, length: int, unseen: bool = False
) -> Recipe:
    """Return a recipe of a linear head on layer means of a public set of texts.

    Args:
        name: of the recipe.
        source: of the texts.
        num_classes: number of labels.
        length: tokens a text is cut at.
        unseen: leave out training texts that also occur in the test split.
    """

    def rows(lines: Sequence[str]) -> Tensor:
        encoder = sentence_encoder(length)
        means = public_means(encoder, lines, source.name)
        features = layer_features(encoder)
        return torch.cat([features.whiten(part.float()) for part in means.split(4096)])

    return text_recipe(
        name,
        source,
        num_classes,
        rows,
        LAYERS_WIDTH,
        unseen=unseen,
        build=partial(linear_from_zero, LAYERS_WIDTH, num_classes, bias=False),
        constants={
            "features": (
                f"means of all layers of all-MiniLM-L6-v2, {length} tokens",
                "published; trained on public web text",
            ),
            "whitening": ("4,000 texts by Zipf's law", "no data"),
        },
        probe=lambda config: FeatureNoise(LAYERS_WIDTH, std=LAYERS_WIDTH**-0.5),
        is_whitened=True,
        reason=REASON_OF_TEXTS,
    )


SST2_HEAD = whitened_recipe("sst2", SST2, num_classes=2, length=64)
IMDB_HEAD = whitened_recipe("imdb-encoder", IMDB, num_classes=2, length=128)
