"""SST-2: 67,349 phrases of film reviews, two classes; a pretrained sentence encoder, whose last block and head are trained."""

from __future__ import annotations

from dpkfc.recipes.datasets.texts import SST2
from dpkfc.recipes.sentences import sentence_recipe

__all__ = ["RECIPE"]

RECIPE = sentence_recipe("sst2-minilm", SST2, num_classes=2, length=48)
