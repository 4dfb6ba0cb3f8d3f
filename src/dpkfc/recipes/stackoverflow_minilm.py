"""StackOverflow: 20,000 titles of questions, 20 tags; a pretrained sentence encoder, whose last block and head are trained.

This is the repaired task of the DP-KFC experiments: there, pairs of a title and a LIST of titles written out as text were
classified, and the form of the list gave the label away. Here one title has one tag. The set has no official split; every fifth
title of a public permutation is a test example.
"""

from __future__ import annotations

from dpkfc.recipes.datasets.texts import STACKOVERFLOW
from dpkfc.recipes.sentences import sentence_recipe

__all__ = ["RECIPE"]

RECIPE = sentence_recipe(
    "stackoverflow-minilm",
    STACKOVERFLOW,
    num_classes=20,
    length=32,
    constants={"split": ("16,000 to 4,000 by a fixed permutation", "of the row numbers alone")},
)
