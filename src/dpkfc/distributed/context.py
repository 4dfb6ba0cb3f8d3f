"""Share one logical batch over several processes of torch.distributed.

Every process clips its part of the sampled batch. The clipped sums are added up on rank 0, which
alone draws the batch, writes the ledger and adds the noise. Rank 0 then sends the release to all.

Reduction and broadcast are the two halves of one all-reduce, with the noise between them. Another
process sees only what its part of the reduction passes on (gloo leaves it a segment) and keeps
nothing. Without a process group everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpkfc._errors import first_line
from dpkfc.tensors import NamedTensors, Tensors
from dpkfc.torchrun import read_number

if dist.is_available():
    # The functions of this module take the process group that exists when they are imported as a
    # default, and never let go of it. Building an optimizer imports them. If that happens later,
    # the threads of a destroyed group stay alive and may abort the process while the interpreter
    # ends.
    import torch.distributed.nn.functional
T = TypeVar("T")
R = TypeVar("R", bound=Any)
# A text that an error may show, and a hash or number that it may not.
Statement = tuple[str, Any]
# What one rank says of itself, by the name of the thing.
Description = dict[str, Statement]
_ABSENT: Statement = ("none", None)


class RankLost(RuntimeError):
    """Another process of the group is gone, or did not answer in time. The run cannot go on."""


@dataclass(frozen=True)
class DistributedContext:
    """The processes that share a logical batch.

    All processes call the same methods in the same order. Each method waits for all processes.

    Attributes:
        rank: the number of this process.
        world_size: the number of processes; 1 without a process group.

    Raises:
        RankLost: from every method that sends, when a process of the group died or stayed silent
            beyond its timeout.
    """

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> DistributedContext:
        """Return the default process group, or a single process without a group.

        Raises:
            RuntimeError: torchrun has started several processes, and no group was initialised.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        started = read_number("WORLD_SIZE", 1)
        if started > 1:
            raise RuntimeError(
                f"{started} processes would spend {started} times the budget; call "
                "torch.distributed.init_process_group() first (docs/errors.md#processes)"
            )
        return cls()

    @property
    def is_rank0(self) -> bool:
        """Whether this process draws batches, writes the ledger and adds noise."""
        return self.rank == 0

    def shard(self, indices: Any) -> Any:
        """Return this rank's part of a logical batch. The parts are disjoint and complete."""
        return indices[self.rank :: self.world_size]

    def shards(self, indices: Any) -> list[Any]:
        """Return the parts of all ranks."""
        return [indices[rank :: self.world_size] for rank in range(self.world_size)]

    # -- tensors ---------------------------------------------------------------------------------

    def sum(self, tensors: NamedTensors) -> Tensors:
        """Return the tensors added over all ranks on rank 0, and zeros on the others."""
        if self.world_size == 1:
            return dict(tensors)
        # A rank without examples holds zeros in the types of the parameters.
        is_wide = self.any(widest_dtype(tensors) == torch.float64)
        flat = flatten(tensors, torch.float64 if is_wide else torch.float32)
        _exchange(dist.reduce, flat, dst=0)
        if not self.is_rank0:
            flat.zero_()  # it holds a part of the sum
        return unflatten(flat, tensors)

    def broadcast_tensors(
        self, tensors: NamedTensors, like: NamedTensors, device: torch.device
    ) -> Tensors:
        """Return the tensors of rank 0 on every rank, after one broadcast.

        Args:
            tensors: read on rank 0 alone.
            like: names, shapes and types of the tensors. Tensors on the device "meta" will do.
            device: where the tensors arrive.
        """
        if self.world_size == 1:
            return dict(tensors)
        dtype = widest_dtype(like)
        if self.is_rank0:
            flat = flatten({name: tensors[name] for name in like}, dtype)
        else:
            size = sum(t.numel() for t in like.values())
            flat = torch.empty(size, dtype=dtype, device=device)
        _exchange(dist.broadcast, flat, src=0)
        return unflatten(flat, like)

    # -- values ----------------------------------------------------------------------------------

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run a function on every rank. If it fails on one rank, raise on every rank.

        Raises:
            RuntimeError: on the ranks where the function did not fail, with the message of a rank
                where it failed. That rank raises its own error.
        """
        if self.world_size == 1:
            return work()
        result: list[T] = []
        error: Exception | None = None
        own_text = ""
        try:
            result.append(work())
        except Exception as failure:
            error = failure
            own_text = f"{type(failure).__name__}: {failure}"
        if self.any(bool(own_text)):
            texts = self.all_gather(own_text)
            if error is not None:
                raise error
            rank, text = next(item for item in enumerate(texts) if item[1])
            raise RuntimeError(
                f"another process failed, rank {rank}, so nothing was released. It says: {text}"
            )
        return result[0]

    def run_collective(self, work: Callable[[], T]) -> T:
        """Run a function that is itself an exchange, such as passes through a sharded model.

        An error is raised where it arises. The other ranks wait in the middle of a pass and cannot
        be told.

        Raises:
            RankLost: on the other ranks, when the connection breaks or after the group's timeout.
        """
        try:
            return work()
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise _rank_lost(error) from error
            raise

    def broadcast_from_rank0(self, decide: Callable[[], T], what: str = "") -> T:
        """Run a function on rank 0 alone, and return its result or raise its error on all ranks.

        Args:
            decide: the function. Its result can be pickled.
            what: names the work, for the error where ranks are at different points of the program.
        """
        if self.world_size == 1:
            return decide()
        message: list[Any] = [what, None, None]
        failure: Exception | None = None
        if self.is_rank0:
            try:
                message[1] = decide()
            except Exception as error:
                failure = error
                message[2] = _portable_error(error)
        _exchange(dist.broadcast_object_list, message, src=0)
        if message[0] != what:
            raise RuntimeError(
                f"rank 0 is at '{message[0]}' and rank {self.rank} at '{what}': every process must "
                "call the same session methods in the same order (session.save() too)"
            )
        if message[2] is not None:
            raise failure or message[2]
        return message[1]

    def broadcast_release(self, make: Callable[[], R], device: torch.device) -> R:
        """Make a release on rank 0 and return it on all ranks.

        Args:
            make: makes a dataclass with tensors in its field `gradients`, which travel in one
                broadcast.
            device: where the tensors arrive.
        """
        if self.world_size == 1:
            return make()
        releases: list[R] = []

        def decide() -> R:
            releases.append(make())
            shapes = {name: x.to("meta") for name, x in releases[0].gradients.items()}
            return replace(releases[0], gradients=shapes)

        value = self.broadcast_from_rank0(decide, "release")
        tensors = releases[0].gradients if releases else {}
        gradients = self.broadcast_tensors(tensors, value.gradients, device)
        return replace(value, gradients=gradients)

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on at least one rank."""
        if self.world_size == 1:
            return flag
        largest = torch.tensor(float(flag), device=_device())
        _exchange(dist.all_reduce, largest, dist.ReduceOp.MAX)
        return bool(largest.item())

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        _exchange(dist.all_gather_object, values, value)
        return values

    def gather(self, value: T, to: int) -> list[T] | None:
        """Return the values of all ranks on rank `to`, and None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == to else None
        _exchange(dist.gather_object, value, values, dst=to)
        return values

    def check_consistent(
        self,
        describe: Callable[[], Description],
        advice: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Raise on every rank, with the same message, unless all ranks describe themselves alike.

        Args:
            describe: maps the name of a thing to a short text, which the error shows, and a hash or
                number, which it does not. Differences are looked for in the order of the names.
            advice: the fix where the thing of that name differs.

        Raises:
            RuntimeError: naming a rank and the first thing in which it differs from rank 0.
        """
        if self.world_size == 1:
            return
        first, *others = self.all_gather(dict(self.run_on_all(describe)))
        for rank, other in enumerate(others, 1):
            for name in dict.fromkeys([*first, *other]):
                expected = first.get(name, _ABSENT)
                actual = other.get(name, _ABSENT)
                if expected == actual:
                    continue
                shown = ""
                if expected[0] != actual[0]:
                    shown = f" ({actual[0]}, not {expected[0]})"
                raise RuntimeError(
                    f"rank {rank} has another {name} than rank 0{shown}{advice(name)}"
                )


SINGLE_PROCESS = DistributedContext()


def widest_dtype(tensors: NamedTensors) -> torch.dtype:
    """Return float64 where a tensor has it, float32 otherwise."""
    has_float64 = any(t.dtype == torch.float64 for t in tensors.values())
    return torch.float64 if has_float64 else torch.float32


def flatten(tensors: NamedTensors, dtype: torch.dtype) -> Tensor:
    """Return all entries of some tensors as one vector, in their order."""
    return torch.cat([t.detach().flatten().to(dtype) for t in tensors.values()])


def unflatten(flat: Tensor, like: NamedTensors) -> Tensors:
    """Cut a vector into tensors of the shapes and types of others."""
    pieces = flat.split([t.numel() for t in like.values()])
    tensors = {}
    for (name, t), piece in zip(like.items(), pieces, strict=True):
        tensors[name] = piece.view(t.shape).to(t.dtype)
    return tensors


def _device() -> torch.device:
    """Return the device from which small numbers are sent.

    It is the CPU, unless the group connects accelerators alone (NCCL).
    """
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], getattr(torch, kinds[0]).current_device())


def _portable_error(error: Exception) -> Exception:
    """Return an error that every process can rebuild.

    It keeps its type if that is a builtin or one of this package and takes a message.
    """
    kind = type(error)
    if kind.__module__ == "builtins" or kind.__module__.startswith("dpkfc."):
        try:
            return kind(str(error))
        except Exception:
            pass
    return RuntimeError(f"{kind.__name__}: {error}")


def _exchange(operation: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Run an exchange; turn what a backend says of a broken connection into one clear error."""
    try:
        operation(*args, **kwargs)
    except RuntimeError as error:
        raise _rank_lost(error) from error


def _rank_lost(error: Exception) -> RankLost:
    # Before it stand the address and the line of the backend's source.
    reason = first_line(error).split(". This is typically")[0].rsplit(": ", 1)[-1][:40]
    return RankLost(
        f"another process died or did not answer ({reason}); start all again and restore"
        " the checkpoint (docs/how-to-distributed.md)"
    )
