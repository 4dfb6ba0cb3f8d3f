"""Smoke runs: a few steps on a slice of the data, to see that all parts go together.

The slice is drawn by a public seed and the plan is calibrated for it, so the ε of a smoke run is
valid for the examples in it. Its accuracy says nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.run_config import RunConfig

_MOST = {
    "steps": 3,
    "expected_batch_size": 16,
    "probe_size": 16,
    "every": 2,
    "augmentations": 2,
    "validation_size": 64,
    "gep_rank": 8,
    "pretrain_epochs": 1,
    "schedule_steps": 3,
    "warmup_steps": 1,
}
_MOST_HEAVY = {**_MOST, "expected_batch_size": 4, "probe_size": 4, "validation_size": 16}
# Examples of a training and of a test split.
_EXAMPLES = (320, 128)
_EXAMPLES_HEAVY = (80, 16)


def cap_for_smoke(config: RunConfig, *, heavy: bool = False) -> RunConfig:
    """Return the settings with no number larger than a smoke run needs.

    Args:
        config: settings of a run of the usual size.
        heavy: whether the model is slow, so that the smoke run takes fewer examples.
    """
    capped: dict[str, Any] = {}
    for name, most in (_MOST_HEAVY if heavy else _MOST).items():
        capped[name] = min(config.values[name], most)
    capped["steps"] = capped["steps"] or _MOST["steps"]
    if not config.privacy.accountant and config.privacy.sampler != "shuffle":
        # PLD takes longer.
        capped["accountant"] = "rdp"
    return config.change(**capped)


def slice_for_smoke(data: ExampleSet, seed: int, *, heavy: bool = False) -> ExampleSet:
    """Return a few hundred examples of each split, or a few dozen, by a public permutation."""
    train_count, test_count = _EXAMPLES_HEAVY if heavy else _EXAMPLES

    def cut(split: str, examples: Examples) -> Examples:
        rows = _rows(examples, train_count if split == "training" else test_count, seed)
        return examples[0][rows], examples[1][rows]

    rows = _rows(data.train, train_count, seed)
    units = None if data.units is None else data.units[rows]
    return data.map_splits(cut, units=units, source=f"{data.source}, a slice of {len(rows)}")


def _rows(examples: Examples, count: int, seed: int) -> Tensor:
    generator = np.random.Generator(np.random.PCG64(seed))
    order = generator.permutation(len(examples[1]))
    return torch.from_numpy(np.sort(order[:count]))
