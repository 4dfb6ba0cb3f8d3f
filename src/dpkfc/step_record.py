"""What a step takes, a sampled batch, and the report of what it did."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dpkfc.privacy.mechanism import Released

# The fields of a StepRecord that ε does not protect. The time of a step follows its batch size.
PRIVATE_FIGURES = (
    "batch_size",
    "clipped_fraction",
    "nonfinite_fraction",
    "median_norm",
    "seconds",
)


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: the index of the step, from 0.
        release: the number of releases so far, this one included.
        seconds: the wall time of the step.
        batch_size: the size of the logical batch, in examples or units. PRIVATE, for the operator's
            eyes only.
        clipped_fraction: the fraction of examples (units) that were clipped. PRIVATE.
        nonfinite_fraction: the fraction of examples (units) with a non-finite gradient. PRIVATE.
            These examples contribute zero.
        median_norm: the median upper bound of the norms of examples (units). PRIVATE. Norms are
            those in the preconditioned space.
        notes: public numbers of post-processing, such as `adam_bc/floor_fraction`.
    """

    step: int
    release: int
    seconds: float
    batch_size: int
    clipped_fraction: float
    nonfinite_fraction: float
    median_norm: float
    notes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A sampled logical batch, to be passed to `Session.step` once.

    Attributes:
        step: the number of the step.
        indices: the sampled examples, or units if the plan protects more than a record `[n]`.
        records: for units, the records that count in this step `[n, k]`, -1 where a unit has fewer.
            None for examples.

    Arrays in `indices` and `records` become read-only.
    """

    step: int
    indices: Any
    records: Any = None

    def __post_init__(self) -> None:
        # The session must load what the sampler drew.
        for rows in (self.indices, self.records):
            if isinstance(rows, np.ndarray):
                rows.flags.writeable = False

    @property
    def rows(self) -> Any:
        """The records to load; one row for each unit if units are more than a record."""
        return self.indices if self.records is None else self.records

    def __iter__(self) -> NoReturn:
        """Refuse by a TypeError to be read as data: the session loads it."""
        raise TypeError(
            "a batch of session.batches() holds indices, no data; call session.step(batch,"
            " loss_fn), where loss_fn(model, data) gets the tensors"
        )


def step_record(
    batch: Batch, update: Released, norms: Tensor, max_grad_norm: float, started: float
) -> StepRecord:
    """Return the report of a step.

    Args:
        batch: the logical batch.
        update: what the optimizer was handed.
        norms: the private norms of this process's examples.
        max_grad_norm: C.
        started: `time.perf_counter()` when the step began.
    """
    fractions = [0.0, 0.0, math.nan]
    if norms.numel():
        clipped = (norms > max_grad_norm).double().mean()
        nonfinite = (~torch.isfinite(norms)).double().mean()
        fractions = torch.stack([clipped, nonfinite, norms.median().double()]).tolist()
    return StepRecord(
        step=batch.step,
        release=update.release,
        seconds=time.perf_counter() - started,
        batch_size=len(batch.indices),
        clipped_fraction=fractions[0],
        nonfinite_fraction=fractions[1],
        median_norm=fractions[2],
        notes=dict(update.notes),
    )
