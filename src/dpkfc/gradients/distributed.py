"""One logical batch over several processes of torch.distributed: sums are reduced once, one process decides and releases.

Every rank clips its share of the sampled batch, the clipped sums are added over all ranks, and the first rank alone
draws the batch, writes the ledger and adds the noise; what it decides is sent to the others. Without a process group all
of this is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that share a logical batch.

    Attributes:
        rank: of this process.
        world_size: number of processes; 1 without a process group.
    """

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The default process group, or a single process where none was initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process draws batches, writes the ledger and adds noise."""
        return self.rank == 0

    def share(self, indices: Any) -> Any:
        """This rank's part of a logical batch; the parts of all ranks are disjoint and complete."""
        return indices[self.rank :: self.world_size]

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors added over all ranks, in one reduction."""
        if self.world_size == 1:
            return dict(tensors)
        dtypes = {t.dtype for t in tensors.values()}
        widest = torch.float64 if torch.float64 in dtypes else torch.float32
        flat = torch.cat([t.detach().flatten().to(widest) for t in tensors.values()])
        dist.all_reduce(flat)
        pieces = flat.split([t.numel() for t in tensors.values()])
        return {n: piece.view(t.shape).to(t.dtype) for (n, t), piece in zip(tensors.items(), pieces, strict=True)}

    def together(self, work: Callable[[], T]) -> T:
        """Do a piece of work on every rank; if it fails anywhere, raise everywhere.

        Raises:
            RuntimeError: on the ranks where it did not fail, when it failed on another; there the error itself.
        """
        if self.world_size == 1:
            return work()
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(work())
        except Exception as failure:
            error = failure
        failures = torch.tensor([float(error is not None)])
        dist.all_reduce(failures)
        if error is not None:
            raise error
        if failures.item():
            raise RuntimeError("another process failed in this step; nothing was released")
        return result[0]

    def from_first(self, decide: Callable[[], T]) -> T:
        """The result of a piece of work done on the first rank alone, sent to all; its error is raised everywhere."""
        if self.world_size == 1:
            return decide()
        message: list[Any] = [None, None]
        if self.first:
            try:
                message[0] = decide()
            except Exception as failure:
                message[1] = failure
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            raise message[1]
        return message[0]
