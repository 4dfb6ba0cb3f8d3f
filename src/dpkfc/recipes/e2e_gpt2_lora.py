"""E2E: 42,061 pairs of a description of a restaurant in fields and one in words; GPT-2 with LoRA writes the latter."""

from __future__ import annotations

from dpkfc.recipes.datasets.pairs import E2E
from dpkfc.recipes.generation import generation_recipe

__all__ = ["RECIPE"]

RECIPE = generation_recipe("e2e-gpt2-lora", E2E, length=320)
