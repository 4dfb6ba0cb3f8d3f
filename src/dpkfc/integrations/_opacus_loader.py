"""A torch DataLoader over the same dataset whose batches are drawn by the plan's sampler.

Batches are drawn in this process, also where workers load the examples: how large each is and where a logical batch ends
is therefore known when it is handed out, however far the workers are ahead.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dpkfc.config import Plan
from dpkfc.data.checks import check_once
from dpkfc.data.loading import split
from dpkfc.privacy.rng import SamplingStream
from dpkfc.rng_state import fresh_seed, renew


@dataclass(frozen=True, eq=False)
class Drawn:
    """A physical batch that the loader hands out.

    Attributes:
        size: examples in it. PRIVATE.
        first, last: whether a logical batch begins or ends with it.
        logical: the indices of its logical batch, the same object in all of its parts. PRIVATE.
    """

    size: int
    first: bool
    last: bool
    logical: np.ndarray[Any, np.dtype[np.int64]]


class Listener(Protocol):
    """Who is told of the batches."""

    def begin(self) -> object:
        """A pass over the loader begins: the work on an unfinished batch is dropped. Returns a token of this pass."""
        ...

    @property
    def missing(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Indices of the logical batch that must come first, since it was handed out and never released."""
        ...

    def draw(self, drawn: Drawn, token: object, batch: Any) -> None:
        """A batch of that pass is about to be handed out."""
        ...

    def ends(self, handed: int) -> bool:
        """Whether the pass ends before its next batch, after so many."""
        ...

    def finish(self, token: object) -> None:
        """That pass has come to its end."""
        ...


class Draws:
    """Draws the logical batches of a plan, in one sequence over all passes.

    Args:
        plan: sampler and streams.
        length: logical batches a pass.

    Attributes:
        missing: indices of a logical batch with which the next pass begins, and which counts as one of it.
    """

    def __init__(self, plan: Plan, length: int) -> None:
        self.plan, self.length = plan, length
        self._stream: SamplingStream = plan.sampling_stream()
        self._next = 0
        self.missing: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        """Indices of one pass; a shuffled order begins anew."""
        period = self.plan.sampler.steps_per_draw
        self._next = -(-self._next // period) * period
        missing, self.missing = self.missing, None
        if missing is not None:
            yield missing
        for _ in range(self.length - (missing is not None)):
            self._next += 1
            yield self.plan.draw(self._next - 1, self._stream)


class _Physical:
    """The batch sampler: logical batches cut into physical ones, each announced in order."""

    def __init__(self, draws: Draws, bound: int | None) -> None:
        self.draws, self.bound = draws, bound
        self.announced: deque[Drawn] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.announced.clear()
        for indices in self.draws:
            parts = split(indices, self.bound) or [indices]
            for i, part in enumerate(parts):
                self.announced.append(Drawn(len(part), i == 0, i == len(parts) - 1, indices))
                yield part.tolist()

    def __len__(self) -> int:
        """Batches a pass, in expectation where they are cut."""
        size = self.draws.plan.expected_batch_size
        return self.draws.length * -(-size // (self.bound or size))


@dataclass(frozen=True)
class _EmptyAware:
    """A collate function that knows what a batch of no example looks like.

    After each batch the global generators go on from numbers of the operating system, also in a worker process. Otherwise
    the numbers of one seed would last for the whole life of a worker, and a snapshot of memory would repeat them.
    """

    collate: Callable[[list[Any]], Any]
    empty: Any
    repeatable: bool

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collate(examples) if examples else copy.deepcopy(self.empty)
        if not self.repeatable:
            renew()
        return batch


class PrivateLoader(DataLoader[Any]):
    """The private loader; made by `PrivacyEngine.make_private`.

    Args:
        source: the user's loader: dataset, collate function and workers are taken over, its order is not.
        draws: what is drawn.
        listener: told of every batch.
        bound: largest physical batch, None for whole logical batches.
    """

    def __init__(self, source: DataLoader[Any], draws: Draws, listener: Listener, bound: int | None = None) -> None:
        self.source, self.draws, self.listener = source, draws, listener
        self.physical = _Physical(draws, bound)
        collate = source.collate_fn
        super().__init__(
            source.dataset,
            batch_sampler=self.physical,
            collate_fn=_EmptyAware(collate, _empty(collate([source.dataset[0]])), draws.plan.test_mode),
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=source.generator if draws.plan.test_mode else torch.Generator(),  # of the seeds of worker processes
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of one pass, an empty one where no example was drawn; first the one that the last pass has left."""
        token = self.listener.begin()
        self.draws.missing = self.listener.missing
        if not self.draws.plan.test_mode:
            self.generator.manual_seed(fresh_seed())
        for handed, batch in enumerate(self._fetched(super().__iter__())):
            if self.listener.ends(handed):
                break
            self.listener.draw(self.physical.announced.popleft(), token, batch)
            yield batch
        self.listener.finish(token)

    def _fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; what the dataset, a collate function and the model's dropout draw for each is nobody's to know."""
        while True:
            if not self.draws.plan.test_mode:
                renew()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def cut(self, bound: int) -> PrivateLoader:
        """The same loader with physical batches of at most `bound` examples."""
        return PrivateLoader(self.source, self.draws, self.listener, bound)


def check_loader(loader: Any) -> None:
    """Refuse a loader whose sampling or iteration cannot be replaced without changing what the user meant.

    Raises:
        ValueError: naming the part and the fix.
    """
    if type(loader) is not DataLoader:
        private = isinstance(loader, PrivateLoader)
        raise ValueError(
            "data_loader is private already; pass the ordinary DataLoader that it was made from"
            if private
            else f"data_loader is a {type(loader).__name__}, whose own iteration would be lost; pass a torch DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError(
            f"{type(loader.dataset).__name__} cannot be sampled at random; private sampling needs a map-style dataset with a "
            "length"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "data_loader has no batch_size or a batch sampler of its own, which would be replaced; pass "
            "DataLoader(dataset, batch_size=...)"
        )
    sampler: Any = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    if not plain:
        raise ValueError(
            f"the {type(sampler).__name__} of data_loader would silently be replaced by uniform sampling, and no other "
            "distribution is accounted for; pass shuffle=True, weight the losses instead of the draws, and choose examples in "
            "the dataset itself (for example torch.utils.data.Subset, each at most once)"
        )
    try:
        check_once(loader.dataset)
    except ValueError as error:
        raise ValueError(f"{error}. Units need a Session: an engine protects single examples") from None
    if not getattr(loader, "in_order", True):
        raise ValueError("data_loader has in_order=False; batches must come in the order in which they were drawn")


def _empty(batch: Any) -> Any:
    """A batch of no example with the structure of a batch of one.

    Raises:
        ValueError: a part whose batch axis is unknown.
    """
    if isinstance(batch, (Tensor, np.ndarray)) and batch.ndim and batch.shape[0] == 1:
        return batch[:0].clone() if isinstance(batch, Tensor) else batch[:0].copy()
    kind: Any = type(batch)
    if batch is None:
        return None
    if isinstance(batch, Mapping):
        return kind({key: _empty(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if len(batch) == 1 and isinstance(batch[0], (str, bytes, int, float)):
            return kind()
        parts = [_empty(value) for value in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, torch.Tensor) else ""
    raise ValueError(
        f"the collate function makes a {type(batch).__name__}{shape} of one example, so it is unknown how an empty batch "
        "looks; every part of a batch must be a tensor with the batch as its leading axis (use collate_fn=...)"
    )
