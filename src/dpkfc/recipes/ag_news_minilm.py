"""AG News: descriptions of news, four classes; a pretrained sentence encoder, whose last block and head are trained.

Descriptions alone, without titles, on both sides. The stored training file is a part of the official 120,000; those of its
descriptions that also occur in the test file are left out.
"""

from __future__ import annotations

from dpkfc.recipes.datasets.texts import AG_NEWS
from dpkfc.recipes.sentences import sentence_recipe

__all__ = ["RECIPE"]

RECIPE = sentence_recipe(
    "ag-news-minilm",
    AG_NEWS,
    num_classes=4,
    length=64,
    unseen=True,
    constants={"test split": ("training texts that occur in it are left out", "it is public, and each is looked at alone")},
)
