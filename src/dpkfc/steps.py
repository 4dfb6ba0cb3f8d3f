"""What a step takes and what it reports."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpkfc.privacy.mechanism import Released

__all__ = ["Batch", "GradientTally", "StepRecord", "check_dataset", "step_record", "warn_of_others"]

_LOG = logging.getLogger(__name__)
_ONLY_NOISE = (
    "private: do not share. Every record of every step had a non-finite gradient; the releases hold noise only. "
    "Look for missing values (NaN)."
)


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: index of the step, from 0.
        release: number of releases so far, this one included.
        seconds: wall time of the step.
        batch_size: realised logical batch, in examples or units. PRIVATE, for the operator's eyes only.
        clipped_fraction: share of examples (units) that were clipped. PRIVATE.
        nonfinite_fraction: fraction of examples (units) whose gradient is not finite; they contribute zero. PRIVATE.
        median_norm: median upper bound of the norm of an example (unit) in the coordinates of the noise. PRIVATE.
        notes: what post-processing noted, public: `adam_bc/floor_fraction`, say.
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
    """A sampled logical batch, to be handed to `Session.step` once.

    Attributes:
        step: number of the step.
        indices: sampled examples, or units where the plan protects more than a record `[n]`.
        records: of units, the records that count in this step `[n, k]`, -1 where a unit has fewer; None for examples.

    Arrays in `indices` and `records` become read-only.
    """

    step: int
    indices: Any
    records: Any = None

    def __post_init__(self) -> None:
        for drawn in (self.indices, self.records):
            if isinstance(drawn, np.ndarray):
                drawn.flags.writeable = False  # what is loaded is what the sampler drew

    @property
    def drawn(self) -> Any:
        """What is loaded: records, in rows of one unit where units are more than a record."""
        return self.indices if self.records is None else self.records

    def __iter__(self) -> NoReturn:
        """Refused by a TypeError: what is sampled is loaded by the session."""
        raise TypeError(
            "a batch of session.batches() holds indices, no data: `for batch in session.batches(): session.step(batch, loss_fn)` "
            "loads it, and loss_fn(model, data) gets its tensors"
        )


def step_record(batch: Batch, update: Released, norms: Tensor, max_grad_norm: float, started: float) -> StepRecord:
    """The report of a step.

    Args:
        batch: the logical batch.
        update: what the optimizer was handed.
        norms: private norms of this process's examples.
        max_grad_norm: C.
        started: `time.perf_counter()` when the step began.
    """
    fractions = [0.0, 0.0, math.nan]
    if norms.numel():
        clipped, nonfinite = (norms > max_grad_norm).double().mean(), (~torch.isfinite(norms)).double().mean()
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


class GradientTally:
    """Remember whether any record of a run had a finite gradient. PRIVATE: only a warning for the operator uses the answer.

    The tally decides neither what is released nor whether a run continues, and no file holds it.
    """

    def __init__(self) -> None:
        self._finite: Tensor | None = None  # stays on the device until the warning, so that no step waits for it

    def add(self, norms: Tensor) -> None:
        """Count records by their norms `[N]`, before noise."""
        if norms.numel():
            finite = torch.isfinite(norms).any()
            self._finite = finite if self._finite is None else self._finite | finite.to(self._finite.device)

    def warn(self) -> None:
        """Warn once if there were records and none of them had a finite gradient; never raise, whatever the filters say."""
        only_noise = self._finite is not None and not bool(self._finite)
        self._finite = None
        if not only_noise:
            return
        try:
            warnings.warn(_ONLY_NOISE, UserWarning, stacklevel=3)
        except UserWarning:  # a filter makes errors of warnings, but private data must not stop a run
            _LOG.warning(_ONLY_NOISE)


def warn_of_others(releases: int, left: int | None) -> None:
    """Say that a session begins at new weights on a ledger that was in use: a script that crashed and was started again.

    Args:
        releases: in the ledger from before, neither made nor restored by the session; 0 says nothing.
        left: releases that the plan still allows.
    """
    if releases:
        warnings.warn(
            f"the ledger holds {releases} releases from before; this session begins at new weights and has {left} "
            "left. Go on from a checkpoint with session.restore(), or take a new ledger: then both ε add up",
            stacklevel=3,
        )


def check_dataset(dataset: Any) -> None:
    """Refuse what holds data, but has no record i under the index i.

    Args:
        dataset: what a session was given.

    Raises:
        ValueError: a loader, a data frame or a mapping of columns; naming what to pass.
    """
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "a Session samples its batches itself; pass loader.dataset in the place of the DataLoader (and its collate_fn= and "
            "num_workers=)"
        )
    if hasattr(dataset, "iloc"):
        raise ValueError(
            f"a {type(dataset).__name__} is indexed by its columns, not by its records; pass tensors: "
            "(torch.as_tensor(frame[features].to_numpy(), dtype=torch.float32), torch.as_tensor(frame[label].to_numpy()))"
        )
    if isinstance(dataset, Mapping) and not all(isinstance(key, int) for key in dataset):
        raise ValueError(
            f"a {type(dataset).__name__} of columns is indexed by their names, not by records; pass a tuple of tensors, tuple("
            "columns.values()), or for batches that are dicts a list of them: [{k: x[i] for k, x in columns.items()} for i in "
            "range(n)]"
        )
