"""DART: triples of facts and a sentence that says them; GPT-2 with LoRA writes the sentence.

The training split of DART is not read: training is on the development split (2,768 sets of triples, 6,980 pairs), evaluation on
the test split. A set of triples with several sentences stands in several pairs, and the privacy unit is one pair.
"""

from __future__ import annotations

from dpkfc.recipes.datasets.pairs import DART
from dpkfc.recipes.generation import generation_recipe

__all__ = ["RECIPE"]

RECIPE = generation_recipe(
    "dart-gpt2-lora",
    DART,
    length=384,
    constants={"split": ("trained on the development split, judged on the test split", "no published figure is comparable")},
)
