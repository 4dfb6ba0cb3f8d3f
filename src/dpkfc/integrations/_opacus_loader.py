"""A torch DataLoader over the same dataset whose batches are drawn by the plan's sampler.

Batches are drawn in this process, even if workers load the examples. The size of each batch and the
end of each logical batch are therefore known when a batch is yielded, however far workers are
ahead.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dpkfc.config import Plan
from dpkfc.data.checks import check_once
from dpkfc.data.loading import Collate, split
from dpkfc.integrations._opacus_batch import Indices, PhysicalBatch
from dpkfc.privacy.rng import SamplingStream
from dpkfc.rng_state import fresh_seed, renew

if TYPE_CHECKING:
    from dpkfc.integrations._opacus_step import PrivateStep


class LogicalBatchSampler:
    """Draws the logical batches of a plan, in one sequence over all passes.

    Args:
        plan: sampler and streams.
        length: logical batches a pass.

    Attributes:
        pending: the indices of a logical batch that the next pass begins with and counts.
    """

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan = plan
        self.length = length
        self._stream: SamplingStream = plan.sampling_stream()
        self._next = 0
        self.pending: Indices | None = None

    def __iter__(self) -> Iterator[Indices]:
        """Yield the indices of one pass. A shuffled order begins anew."""
        period = self.plan.sampler.steps_per_draw
        self._next = -(-self._next // period) * period
        pending, self.pending = self.pending, None
        length = self.length
        if pending is not None:
            length -= 1
            yield pending
        for _ in range(length):
            self._next += 1
            yield self.plan.draw(self._next - 1, self._stream)


class _PhysicalBatchSampler:
    """Cuts logical batches into physical ones, and announces each of them in order."""

    def __init__(self, logical: LogicalBatchSampler, bound: int | None) -> None:
        self.logical = logical
        self.bound = bound
        self.announced: deque[PhysicalBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.announced.clear()
        for indices in self.logical:
            parts = split(indices, self.bound) or [indices]
            for i, part in enumerate(parts):
                is_last = i == len(parts) - 1
                self.announced.append(PhysicalBatch(len(part), i == 0, is_last, indices))
                yield part.tolist()

    def __len__(self) -> int:
        """Return the batches of a pass; the expected number where batches are cut."""
        size = self.logical.plan.expected_batch_size
        return self.logical.length * -(-size // (self.bound or size))


@dataclass(frozen=True)
class _EmptyAware:
    """A collate function that also makes the batch of no example.

    After each batch the global generators go on from numbers of the operating system, also in a
    worker process. Otherwise the numbers of one seed would last for the whole life of a worker, and
    a snapshot of memory would reveal them.
    """

    collate: Collate
    empty: Any
    repeatable: bool

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collate(examples) if examples else copy.deepcopy(self.empty)
        if not self.repeatable:
            renew()
        return batch


class PrivateLoader(DataLoader[Any]):
    """The private loader, made by `PrivacyEngine.make_private`.

    Args:
        source: the user's loader. Its dataset, collate function and workers are used, its order is
            not.
        sampler: draws the logical batches.
        step: gets a report of every batch.
        bound: the largest physical batch, None for whole logical batches.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        sampler: LogicalBatchSampler,
        step: PrivateStep,
        bound: int | None = None,
    ) -> None:
        self.source = source
        self.logical = sampler
        self.step = step
        self.physical = _PhysicalBatchSampler(sampler, bound)
        self._is_repeatable = sampler.plan.test_mode
        collate = source.collate_fn
        empty = _make_empty(collate([source.dataset[0]]))
        # The generator makes the seeds of worker processes.
        generator = source.generator if self._is_repeatable else torch.Generator()
        super().__init__(
            source.dataset,
            batch_sampler=self.physical,
            collate_fn=_EmptyAware(collate, empty, self._is_repeatable),
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=generator,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of one pass, first the pending one; a batch may be empty."""
        token = self.step.begin_pass()
        self.logical.pending = self.step.pending
        if not self._is_repeatable:
            self.generator.manual_seed(fresh_seed())
        for yielded, batch in enumerate(self._fetch(super().__iter__())):
            if self.step.should_end(yielded):
                break
            self.step.register_batch(self.physical.announced.popleft(), token, batch)
            yield batch
        self.step.finish_pass(token)

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each after a renewal of the global generators.

        Nobody can then learn what the dataset, the collate function and dropout draw for a batch.
        """
        while True:
            if not self._is_repeatable:
                renew()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @property
    def sample_rate(self) -> float:
        """q, the expected share of the examples in a batch."""
        plan = self.logical.plan
        return plan.expected_batch_size / plan.dataset_size

    def cut(self, bound: int) -> PrivateLoader:
        """Return the same loader with physical batches of at most `bound` examples."""
        return PrivateLoader(self.source, self.logical, self.step, bound)


def find_source(loader: Any) -> Any:
    """Return the loader that a private one was made from; any other loader as it is.

    A script that trains several models hands the private loader of one to the next.
    """
    if not isinstance(loader, PrivateLoader):
        return loader
    warnings.warn(
        "data_loader has served another private run; each engine counts its own releases, and the"
        " ε of runs on the same examples add up",
        UserWarning,
        stacklevel=4,
    )
    return loader.source


def check_loader(loader: Any) -> None:
    """Refuse a loader whose sampling or iteration cannot be replaced as its user would expect.

    Raises:
        ValueError: naming the part and the fix.
    """
    if type(loader).__name__ == "DPDataLoader":
        raise ValueError(
            "data_loader is a DPDataLoader of Opacus; pass the DataLoader that it was made from:"
            " make_private samples by itself"
        )
    if type(loader) is not DataLoader:
        raise ValueError(
            f"data_loader is a {type(loader).__name__}, whose own iteration would be lost; pass a "
            "torch DataLoader"
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} cannot be sampled at random; pass a map-style dataset with a"
            " length"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader has no batch_size or a batch sampler of its own, which would be replaced; "
            "pass DataLoader(dataset, batch_size=...)"
        )
    if not _takes_all(loader.sampler, len(dataset)):
        raise ValueError(
            f"the {type(loader.sampler).__name__} would be replaced by uniform sampling; pass"
            " shuffle=True, weight the losses or take a Subset (docs/errors.md#sampler)"
        )
    try:
        check_once(dataset)
    except ValueError as error:
        # The fix of a Session, units=, is not one of an engine.
        reason = str(error).split(":")[0]
        raise ValueError(f"{reason}; leave repeats out. Units need a Session") from None
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "data_loader has in_order=False, but batches must come in the order of the draws; leave"
            " in_order out"
        )


def _takes_all(sampler: Any, size: int) -> bool:
    """Return whether a sampler is torch's own, and takes every example once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == size
    return type(sampler) is SequentialSampler


def _make_empty(batch: Any) -> Any:
    """Return a batch of no example with the structure of a batch of one.

    Raises:
        ValueError: a part whose batch axis is unknown.
    """
    if batch is None:
        return None
    if isinstance(batch, (Tensor, np.ndarray)) and batch.ndim and batch.shape[0] == 1:
        return batch[:0].clone() if isinstance(batch, Tensor) else batch[:0].copy()
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        return kind({key: _make_empty(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if len(batch) == 1 and isinstance(batch[0], (str, bytes, int, float)):
            return kind()
        parts = [_make_empty(value) for value in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise ValueError(
        f"the collate function makes a {type(batch).__name__}{shape} of one example; every part of"
        " a batch must be a tensor with the batch as its leading axis"
    )
