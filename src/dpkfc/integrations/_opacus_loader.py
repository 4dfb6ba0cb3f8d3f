"""The loader of an Opacus script: torch's DataLoader on the same data, with batches of a plan.

Batches are drawn in this process, even if workers load the examples. The size of each batch and the
end of each logical batch are therefore known when a batch is yielded, however far workers are
ahead.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dpkfc._checks import check_integer
from dpkfc.config import Plan
from dpkfc.data.duplicates import check_once
from dpkfc.data.loading import Collate, is_map_style, records_of, split
from dpkfc.integrations._opacus_batch import Indices, PhysicalBatch
from dpkfc.integrations._opacus_step import PrivateStep
from dpkfc.privacy.rng import SamplingStream
from dpkfc.public_rows.template import find_template
from dpkfc.rng_state import fresh_seed, renew


class LogicalBatchSampler:
    """Draws the logical batches of a plan, in one sequence over all passes.

    Args:
        plan: sampler and streams.
        length: number of logical batches in one pass.

    Attributes:
        pending: the indices of an unfinished logical batch. The next pass begins with it,
            and counts it among its own.
    """

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan = plan
        self.length = length
        self._stream: SamplingStream = plan.sampling_stream()
        self._next = 0
        self.pending: Indices | None = None

    def __iter__(self) -> Iterator[Indices]:
        """Yield the indices of one pass. Shuffling starts a new order in each pass."""
        period = self.plan.sampler.steps_per_draw
        self._next = math.ceil(self._next / period) * period
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
        """Return the number of batches in one pass, an expected number if batches are cut."""
        size = self.logical.plan.expected_batch_size
        return self.logical.length * math.ceil(size / (self.bound or size))


@dataclass(frozen=True)
class _CollateWithEmpty:
    """A collate function that can also make an empty batch.

    After each batch the operating system seeds the global generators anew, also in a worker.
    Otherwise one seed would last for the whole life of a worker, and a snapshot of its memory would
    reveal all its numbers.
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
        empty = _make_empty(_collate_one(source))
        # The generator makes the seeds of worker processes.
        generator = source.generator if self._is_repeatable else torch.Generator()
        super().__init__(
            source.dataset,
            batch_sampler=self.physical,
            collate_fn=_CollateWithEmpty(collate, empty, self._is_repeatable),
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
        columns = _find_columns(self.source)
        batches = super().__iter__() if columns is None else self._index(columns)
        for yielded, batch in enumerate(self._fetch(batches)):
            if self.step.should_end(yielded):
                break
            self.step.register_batch(self.physical.announced.popleft(), token, batch)
            yield batch
        self.step.finish_pass(token)

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; seed the global generators anew before each.

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

    def _index(self, columns: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
        """Yield the batches that torch's loader would make of tensors row by row."""
        for indices in self.physical:
            rows = torch.tensor(indices, dtype=torch.long)
            # Rows of images whose channels lie last in memory would keep that order.
            yield [x[rows].contiguous() for x in columns]

    @property
    def sample_rate(self) -> float:
        """Return q, the expected share of the examples in a batch."""
        plan = self.logical.plan
        return plan.expected_batch_size / plan.dataset_size

    def cut(self, bound: int) -> PrivateLoader:
        """Return the same loader with physical batches of at most `bound` examples."""
        return PrivateLoader(self.source, self.logical, self.step, bound)


def _find_columns(source: DataLoader[Any]) -> tuple[Tensor, ...] | None:
    """Return tensors whose rows are stacked as they are, in this process; None without any."""
    is_plain = source.collate_fn is default_collate and not source.num_workers
    if not is_plain or source.pin_memory or type(source.dataset) is not TensorDataset:
        return None
    tensors: tuple[Tensor, ...] = source.dataset.tensors
    are_dense = all(type(x) is Tensor and x.layout == torch.strided for x in tensors)
    return tensors if are_dense else None


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
        stacklevel=3,
    )
    return loader.source


def check_loader(loader: Any) -> None:
    """Refuse a loader whose sampling or iteration cannot be replaced as its user would expect.

    Raises:
        ValueError: naming the part and the fix.
    """
    kind = type(loader).__name__
    if kind == "DPDataLoader":
        raise ValueError(
            "data_loader is a DPDataLoader of Opacus; pass the DataLoader that it was made from:"
            " make_private samples by itself"
        )
    if type(loader) is not DataLoader:
        raise ValueError(
            f"data_loader is a {kind}, whose own iteration would be lost; pass a torch DataLoader"
        )
    dataset: Any = loader.dataset
    if not is_map_style(dataset):
        raise ValueError(
            f"{type(dataset).__name__} cannot be sampled at random; pass a map-style dataset with a"
            " length"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader has no batch_size or a batch sampler of its own, which would be replaced; "
            "pass DataLoader(dataset, batch_size=...)"
        )
    sampler = loader.sampler
    is_plain = type(sampler) in (RandomSampler, SequentialSampler)
    takes_all = is_plain and len(cast(Sized, sampler)) == len(dataset)
    if not takes_all or getattr(sampler, "replacement", False):
        raise ValueError(
            f"the {type(sampler).__name__} would be replaced by uniform sampling; pass"
            " shuffle=True, weight the losses or take a Subset (docs/errors.md#sampler)"
        )
    if not loader.in_order:
        raise ValueError(
            "data_loader has in_order=False, but batches must come in the order of the draws; leave"
            " in_order out"
        )
    check_once(dataset, fix="leave repeats out. Units need a Session")


def _make_empty(batch: Any) -> Any:
    """Return an empty batch with the structure of a batch of one example.

    Raises:
        ValueError: the batch axis of a part is unknown.
    """
    if batch is None:
        return None
    if isinstance(batch, PackedSequence):
        raise ValueError(
            "collate_fn packs, which hides the examples: return padded x and lengths, and in"
            " forward write pack_padded_sequence(x, lengths, enforce_sorted=False, ...)"
        )
    if isinstance(batch, (Tensor, np.ndarray)) and batch.shape[:1] == (1,):
        # A slice alone would keep the memory of the example.
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


def _collate_one(source: DataLoader[Any]) -> Any:
    """Return a batch of one public record, or of a private one where the function refuses those."""
    template = find_template(records_of(source))
    for make_rows in template.attempts(source.collate_fn, torch.device("cpu")):
        with suppress(Exception):
            return make_rows(1).batch([0])
    for i in range(1, len(cast(Sized, source.dataset))):
        with suppress(Exception):
            return source.collate_fn([source.dataset[i]])
    return source.collate_fn([source.dataset[0]])


class BatchMemoryManager:
    """Splits logical batches as `opacus.utils.batch_memory_manager.BatchMemoryManager`.

    `optimizer.step()` after a physical batch that does not end its logical batch changes no
    parameter and no state.

    Args:
        data_loader: from `make_private`.
        max_physical_batch_size: largest physical batch.
        optimizer: from the same `make_private`.

    Raises:
        ValueError: a loader that is not private, another optimizer, a size below 1.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int,
        optimizer: Optimizer,
    ) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise ValueError("data_loader is not private; pass the one that make_private returned")
        if data_loader.step.optimizer is not optimizer:
            raise ValueError(
                "the optimizer belongs to another engine than data_loader; pass what make_private"
                " returned"
            )
        check_integer("max_physical_batch_size", max_physical_batch_size, 1)
        self._step = data_loader.step
        self._loader = data_loader.cut(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        """Return the loader of physical batches."""
        return self._loader

    def __exit__(self, *error: object) -> None:
        """Drop an unfinished logical batch."""
        self._step.forget()
