"""Smoke runs: a few steps on a slice of the data, to see that files, model, method and report go together.

The slice is drawn by a public seed and the plan is calibrated for it, so the ε of a smoke run is true of the examples in it.
Its accuracy says nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpkfc.recipes.datasets import Examples, ExampleSet
from dpkfc.recipes.settings import RunConfig

__all__ = ["capped", "sliced"]

_MOST = {"steps": 3, "expected_batch_size": 16, "probe_size": 16, "every": 2, "augmentations": 2, "validation_size": 64}
_MOST |= {"gep_rank": 8, "dp2_phase": 1, "pretrain_epochs": 1, "schedule_steps": 3, "warmup_steps": 1}
_EXAMPLES = {"train": 320, "test": 128}
_MOST_HEAVY = {**_MOST, "expected_batch_size": 4, "probe_size": 4, "validation_size": 16}
_EXAMPLES_HEAVY = {"train": 80, "test": 16}


def capped(config: RunConfig, *, heavy: bool = False) -> RunConfig:
    """The settings with nothing larger than a smoke run needs; those of a smoke run are left as they are.

    Args:
        config: of a run of the usual size.
        heavy: whether the model is slow, so that the smoke run takes fewer examples.
    """
    most_of = _MOST_HEAVY if heavy else _MOST
    least: dict[str, Any] = {name: min(getattr(config, name), most) for name, most in most_of.items()}
    least["steps"] = least["steps"] or _MOST["steps"]
    if not config.accountant and config.sampler != "shuffle":
        least["accountant"] = "rdp"  # PLD takes longer
    return replace(config, **least)


def sliced(data: ExampleSet, seed: int, *, heavy: bool = False) -> ExampleSet:
    """A few hundred examples of each split, or a few dozen for a slow model, by a public permutation."""
    count = _EXAMPLES_HEAVY if heavy else _EXAMPLES
    train, test = _slice(data.train, count["train"], seed), _slice(data.test, count["test"], seed)
    validation = None if data.validation is None else _slice(data.validation, count["test"], seed)
    return replace(
        data, train=train, test=test, validation=validation, source=f"{data.source}, a slice of {len(train[1])}"
    )


def _slice(examples: Examples, count: int, seed: int) -> Examples:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(examples[1]))[:count]
    rows = torch.from_numpy(np.sort(order))
    return examples[0][rows], examples[1][rows]
