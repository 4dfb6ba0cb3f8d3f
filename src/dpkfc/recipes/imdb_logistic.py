"""IMDB: 25,000 film reviews, two classes; logistic regression on 4,096 hashed words.

No vocabulary and no document frequencies are fitted: on private text both are functions of all examples that no clip bounds
and no noise covers, so that a stated ε would not hold. `vocabulary = "private"` and `"tf-idf"` are refused for that reason.
"""

from __future__ import annotations

from torch import nn

from dpkfc.recipes.base import Recipe
from dpkfc.recipes.config import RunConfig
from dpkfc.recipes.datasets import ExampleSet, load_texts
from dpkfc.recipes.datasets.hashing import KEY, hashed_texts
from dpkfc.recipes.datasets.texts import IMDB
from dpkfc.recipes.zipf import HashedZipf, ZipfWords

__all__ = ["RECIPE", "SIZE"]

SIZE = 4096


def _load(config: RunConfig) -> ExampleSet:
    texts = load_texts(IMDB, config.data_dir or None).check(IMDB.name, num_classes=2)
    return texts.tensors(lambda lines: hashed_texts(lines, SIZE))


def _probe(config: RunConfig) -> HashedZipf:
    return HashedZipf(SIZE, ZipfWords(exponent=config.zipf_exponent))


def _model() -> nn.Linear:
    """Two scores, of which the softmax takes the difference: logistic regression, from zero."""
    model = nn.Linear(SIZE, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


RECIPE = Recipe(
    name="imdb-logistic",
    title=IMDB.name,
    load=_load,
    build=_model,
    input_shape=(SIZE,),
    num_classes=2,
    constants={
        "features": (f"{SIZE:,} signed hashes of words, key {KEY!r}", "published; nothing is fitted"),
    },
    probe=_probe,
)
