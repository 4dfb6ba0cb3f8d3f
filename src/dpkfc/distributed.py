"""One logical batch over several processes of torch.distributed: sums are reduced once, one process decides and releases.

Every rank clips its share of the sampled batch and the clipped sums are added up on the first rank, which alone draws the
batch, writes the ledger and adds the noise; what it releases goes back to all. Reduction and return are the two halves of
one all-reduce, with the noise between them: of the sum of all without it another process sees what its part of the reduction
passes on (gloo leaves it a segment), and keeps nothing. Without a process group all of this is the identity.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.fsdp import is_divided, reshard

# --------------------------------------------------------------------------------------------------
# What torchrun says to the processes that it starts, read from the environment: nothing of torch is
# imported for it.


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes_started() -> int:
    """Processes that torchrun has started, on all hosts; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def processes_on_this_host() -> int:
    """Processes that torchrun has started here, which share the memory of this host; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched() else 1


def is_first() -> bool:
    """Whether this process speaks for the run: alone, or the first of torchrun's."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def check_single(command: Sequence[str]) -> None:
    """Refuse a command of `dpkfc` that is not divided over processes: all but `train`.

    Raises:
        ValueError: torchrun has started it. Each process would spend the whole budget, and each restart once more.
    """
    if is_launched() and list(command) != ["train"]:
        raise ValueError(
            f"`{' '.join(['dpkfc', *command])}` runs on one process and is not continued by a restart: start it without torchrun "
            "(`dpkfc train` divides its batches over the processes of torchrun)"
        )


# --------------------------------------------------------------------------------------------------

if dist.is_available():
    # Its functions take the group that there is at their import for a default and never let go of it: imported later, as building
    # an optimizer does, the threads of a destroyed group outlive it, and may abort the process while the interpreter ends.
    import torch.distributed.nn.functional
T = TypeVar("T")
R = TypeVar("R", bound=Any)
_ABSENT = ("none", None)


class RankLost(RuntimeError):
    """Another process of the group is gone, or did not answer in time: the run cannot go on."""


@dataclass(frozen=True)
class DistributedContext:
    """The processes that share a logical batch.

    All of them call the same methods in the same order, each of which waits for the others.

    Attributes:
        rank: of this process.
        world_size: number of processes; 1 without a process group.

    Raises:
        RankLost: from every method that sends, when a process of the group died or stayed silent beyond its timeout.
    """

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> DistributedContext:
        """The default process group, or a single process where none was initialised.

        Raises:
            RuntimeError: torchrun has started several processes, and no group was initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = processes_started()
            if started > 1:
                raise RuntimeError(
                    f"torchrun has started {started} processes that know nothing of each other: each would train alone on all "
                    f"data, and together they would spend {started} times the budget. Call "
                    "torch.distributed.init_process_group() before the session is built (of the commands, `dpkfc train` alone "
                    "does so)"
                )
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_rank0(self) -> bool:
        """Whether this process draws batches, writes the ledger and adds noise."""
        return self.rank == 0

    def shard(self, indices: Any) -> Any:
        """This rank's part of a logical batch; the parts of all ranks are disjoint and complete."""
        return self.shards(indices)[self.rank]

    def shards(self, indices: Any) -> list[Any]:
        """The parts of all ranks."""
        return [indices[rank :: self.world_size] for rank in range(self.world_size)]

    # -- tensors -------------------------------------------------------------------------------------------------------

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors added over all ranks, in one reduction to the first; zeros on the others."""
        if self.world_size == 1:
            return dict(tensors)
        wide = torch.tensor(float(_widest(tensors) == torch.float64), device=_device())
        with _answered():
            dist.all_reduce(wide, dist.ReduceOp.MAX)  # a rank without examples has zeros, of the parameters' types
        flat = _flat(tensors, torch.float64 if wide.item() else torch.float32)
        with _answered():
            dist.reduce(flat, dst=0)
        return _unflat(flat if self.is_rank0 else flat.zero_(), tensors)  # which holds a part of the sum there

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The first rank's tensors on every rank, in one broadcast.

        Args:
            tensors: read on the first rank alone.
            like: names, shapes and types of what is sent (tensors without values, device "meta", will do).
            device: where they arrive.
        """
        if self.world_size == 1:
            return dict(tensors)
        if self.is_rank0:
            flat = _flat({n: tensors[n] for n in like}, _widest(like))
        else:
            flat = torch.empty(sum(t.numel() for t in like.values()), dtype=_widest(like), device=device)
        with _answered():
            dist.broadcast(flat, src=0)
        return _unflat(flat, like)

    # -- values --------------------------------------------------------------------------------------------------------

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Do a piece of work on every rank; if it fails anywhere, raise everywhere.

        Raises:
            RuntimeError: on the ranks where it did not fail, with the message of one where it did; there the error itself.
        """
        if self.world_size == 1:
            return work()
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(work())
        except Exception as failure:
            error = failure
        failures = torch.tensor(float(error is not None), device=_device())
        with _answered():
            dist.all_reduce(failures)
        if failures.item():
            self._fail(error)
        return result[0]

    def run_collective(self, work: Callable[[], T]) -> T:
        """A piece of work that every rank does alike, and that is an exchange itself: passes through a divided model.

        An error is raised where it arises; ranks without it wait in the middle of a pass, and cannot be told.

        Raises:
            RankLost: on those, when the connection breaks or after the group's timeout.
        """
        try:
            return work()
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise _lost(error) from error
            raise

    def _fail(self, error: Exception | None) -> None:
        texts = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = next(i for i, text in enumerate(texts) if text is not None)
        raise RuntimeError(f"another process failed, rank {rank}, so nothing was released. It says: {texts[rank]}")

    def broadcast_from_rank0(self, decide: Callable[[], T], what: str = "") -> T:
        """The result of a piece of work done on the first rank alone, sent to all; its error is raised everywhere.

        Args:
            decide: the work; its result can be pickled.
            what: names the work, for the error where the ranks are not at the same point of the program.
        """
        if self.world_size == 1:
            return decide()
        message: list[Any] = [what, None, None]
        failure: Exception | None = None
        if self.is_rank0:
            try:
                message[1] = decide()
            except Exception as error:
                failure, message[2] = error, _portable(error)
        with _answered():
            dist.broadcast_object_list(message, src=0)
        if message[0] != what:
            raise RuntimeError(
                f"rank 0 is at '{message[0]}' and rank {self.rank} at '{what}': every process must call the same methods of the "
                "session in the same order (session.save() too: the first process alone writes)"
            )
        if message[2] is not None:
            raise failure or message[2]
        return message[1]

    def broadcast_release(self, make: Callable[[], R], device: torch.device) -> R:
        """`broadcast_from_rank0` for a value with tensors in a field `gradients`, which travel in one broadcast; `device`: to where."""
        if self.world_size == 1:
            return make()
        made: list[R] = []

        def decide() -> R:
            made.append(make())
            return replace(made[0], gradients={n: x.to("meta") for n, x in made[0].gradients.items()})

        value = self.broadcast_from_rank0(decide, "release")
        tensors = made[0].gradients if made else {}
        return replace(value, gradients=self.broadcast_tensors(tensors, value.gradients, device))

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on one rank or more."""
        if self.world_size == 1:
            return flag
        found = torch.tensor(float(flag), device=_device())
        with _answered():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with _answered():
            dist.all_gather_object(found, value)
        return found

    def gather(self, value: T, to: int) -> list[T] | None:
        """The values of all ranks on one of them; None on the others."""
        if self.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.rank == to else None
        with _answered():
            dist.gather_object(value, found, dst=to)
        return found

    def check_consistent(self, describe: Callable[[], Mapping[str, tuple[str, Any]]], advice: Callable[[str], str] = lambda _: "") -> None:
        """Raise on every rank, with the same message, unless all describe themselves alike.

        Args:
            describe: name of a thing to what describes it, in the order in which differences are looked for: a short text,
                which the error shows, and a hash or number, which it does not.
            advice: what to do where the thing of that name differs.

        Raises:
            RuntimeError: naming a rank and the first thing in which it differs from the first rank.
        """
        if self.world_size == 1:
            return
        first, *others = self.all_gather(dict(self.run_on_all(describe)))
        for rank, other in enumerate(others, 1):
            for name in dict.fromkeys([*first, *other]):
                mine, theirs = first.get(name, _ABSENT), other.get(name, _ABSENT)
                if mine != theirs:
                    shown = f" ({theirs[0]}, not {mine[0]})" if mine[0] != theirs[0] else ""
                    raise RuntimeError(f"rank {rank} has another {name} than rank 0{shown}{advice(name)}")


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def _flat(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """All entries in one vector."""
    return torch.cat([t.detach().flatten().to(dtype) for t in tensors.values()])


def _unflat(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = flat.split([t.numel() for t in like.values()])
    return {n: piece.view(t.shape).to(t.dtype) for (n, t), piece in zip(like.items(), pieces, strict=True)}


def _device() -> torch.device:
    """Where small numbers are sent from: the CPU, unless the group connects accelerators alone (NCCL)."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], getattr(torch, kinds[0]).current_device())


def _portable(error: Exception) -> Exception:
    """An error that every process can rebuild: of its own kind where that is Python's or ours and takes a message."""
    kind = type(error)
    if kind.__module__ == "builtins" or kind.__module__.startswith("dpkfc."):
        try:
            return kind(str(error))
        except Exception:
            pass
    return RuntimeError(f"{kind.__name__}: {error}")


@contextmanager
def _answered() -> Iterator[None]:
    """Around every exchange: what the backend says of a connection that broke becomes one clear error."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: Exception) -> RankLost:
    return RankLost(
        "another process of the group died or did not answer in time, so this one stops too. Releases in the ledger stay "
        "spent, and nothing left without one. Start all processes again and restore the last checkpoint "
        f"(torchrun --max-restarts=3 does both, see docs/how-to-distributed.md). The backend says: {_line(error)}"
    )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(". This is typically")[0][:300]


# --------------------------------------------------------------------------------------------------
# What the processes of one run must have in common, as short texts that they exchange before
# anything is spent.

_SAMPLED = 16  # records of a dataset that are compared
_READS = 3  # of the same records: what differs between them is drawn at random, and is not compared
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_ADVICE = {
    "plan": "; build it from the same PrivacyConfig, with the same probe, on every process",
    "parameter": "; build the model with the same seed on every process (torch.manual_seed(0) before it), load the same "
    "state_dict, or send rank 0's: for x in model.state_dict().values(): torch.distributed.broadcast(x, 0)",
    "number of records": "; give every process the WHOLE dataset, without a DistributedSampler: the session divides each batch",
    "optimizer": "; build it with the same settings on every process",
    "steps": "; between steps, change the model and the learning rate on every process alike",
    "probe": "; its sample(n, generator) must return the same inputs for the same generator on every process",
    "metric": "; it was made of equal factors, so the processes round differently: run all of them on the same kind of "
    "processor with the same version of torch",
}
_ADVICE["buffer"] = _ADVICE["parameter"]
_ADVICE["some records"] = (
    "; give every process the same records in the same order (sort file names, split with a seeded generator, no "
    "DistributedSampler): each process reads its own part of every batch, and a person could be in two parts"
)


def advice(name: str) -> str:
    """What to do where the thing of this name (its first words, or a name in quotes behind them) differs."""
    kinds = (kind for kind in _ADVICE if name.endswith(kind) or name.startswith(kind))
    return next((_ADVICE[kind] for kind in sorted(kinds, key=lambda kind: kind != "steps")), "")


def check_alike(
    ranks: DistributedContext,
    plan: str,
    model: nn.Module,
    optimizer: Any,
    *,
    records: int,
    record: Callable[[int], Any],
    passes: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every process, before anything is spent, where they are not about to train the same model in the same way.

    Args:
        ranks: the processes.
        plan: hash of the plan.
        model: parameters and buffers are compared by shape, type and a hash of their values.
        optimizer: its kind and the settings of its groups.
        records: length of the dataset.
        record: reads one of it. Some are compared, but for what is another each time they are read (augmented at random).
        passes: settings, by name, that decide how many passes a process makes: compared where a pass is an exchange.

    Raises:
        ValueError: the model is wrapped by torch's data parallelism.
        RuntimeError: naming a rank, the first thing in which it differs from rank 0, and the fix.
    """
    _refuse_wrapped(model)
    reshard(model)
    if ranks.world_size == 1:
        return
    seen = ranks.all_gather(ranks.run_on_all(lambda: _some_records(record, records)))
    drawn = {name for of in seen for name, digest in of.items() if not digest}
    some = {name: digest for name, digest in seen[ranks.rank].items() if name not in drawn}
    divided = any(is_divided(p) for p in model.parameters())
    counts = {name: (repr(value), None) for name, value in (passes or {}).items() if divided}
    ranks.check_consistent(lambda: {**_description(plan, model, optimizer, records), **counts, "some records": ("", some)}, advice)


def check_in_step(ranks: DistributedContext, parameters: Mapping[str, Tensor], what: str) -> None:
    """Raise on every process where released parameters are not the same to the bit on all of them.

    Args:
        ranks: the processes.
        parameters: trainable ones, by name.
        what: the processes are about to do.

    Raises:
        RuntimeError: naming a rank and a parameter.
    """
    ranks.broadcast_from_rank0(lambda: None, what)
    ranks.check_consistent(lambda: _bit_sums(parameters), advice)


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise where torch's own data parallelism is around the model or a part of it."""
    for name, module in model.named_modules():
        if (kind := type(module).__name__) in _WRAPPERS:
            where = f"module '{name}'" if name else "the model"
            raise ValueError(
                f"{where} is wrapped in {kind}, which averages gradients before they are clipped and noised. Pass the bare "
                "module (of a wrapped one: model.module) on every process: the session shares each batch over the processes "
                "and adds up clipped sums by itself"
            )


def _some_records(record: Callable[[int], Any], records: int) -> dict[str, str]:
    """Field of a record to a hash of it in some records, empty where reading them again gives something else."""
    rows = np.linspace(0, records - 1, min(records, _SAMPLED)).astype(np.int64).tolist()
    with torch.random.fork_rng(devices=[]):
        first, *others = [_fields([record(i) for i in rows]) for _ in range(_READS)]
    return {name: digest if all(of.get(name) == digest for of in others) else "" for name, digest in first.items()}


def _fields(records: Sequence[Any]) -> dict[str, str]:
    """Name or number of a field to a hash of all its values."""
    fields: dict[str, list[Any]] = {}
    for record in records:
        numbered = dict(enumerate(record)) if isinstance(record, (tuple, list)) else {"": record}
        for name, value in (record if isinstance(record, Mapping) else numbered).items():
            fields.setdefault(str(name), []).append(value)
    return {name: _hash(*tree_flatten(values)[0]) for name, values in fields.items()}


def _description(plan: str, model: nn.Module, optimizer: Any, records: int) -> dict[str, tuple[str, Any]]:
    """Name to a text that may be shown and a hash that is not, in the order in which differences are looked for."""
    found: dict[str, tuple[str, Any]] = {"plan": (plan[:12], plan), "number of records": (str(records), None)}
    for name, p in model.named_parameters():
        found[f"parameter '{name}'"] = f"{_kind(p)}{'' if p.requires_grad else ', frozen'}", _hash_of(p)
    found |= {f"buffer '{name}'": (_kind(b), _hash(b)) for name, b in model.named_buffers()}
    return found | {"optimizer": (_settings(optimizer), None)}


def _bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """The bit patterns of each parameter added up: one pass over memory, and another number where a single bit differs."""
    found: dict[str, tuple[str, Any]] = {}
    for name, x in tensors.items():
        if is_divided(x):
            continue  # no two processes hold the same part
        bits = x.detach().flatten().contiguous().view(_INTEGERS.get(x.element_size(), torch.uint8))
        found[f"parameter '{name}' after steps"] = "", int(bits.sum(dtype=torch.int64))
    return found


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _hash_of(parameter: Any) -> str:
    """Of a parameter that is whole on every process; of a divided one there is a single copy, and nothing to compare."""
    return f"divided as {parameter.placements}" if is_divided(parameter) else _hash(parameter)


def _hash(*values: Any) -> str:
    digest = hashlib.sha256()
    for x in values:
        if isinstance(x, Tensor) and x.layout == torch.strided:
            digest.update(_kind(x).encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{type(x).__name__} {_plain(x)}".encode())
    return digest.hexdigest()


def _plain(x: Any) -> str:
    """The content of a plain value, an array or an image; nothing of what is of another kind."""
    if isinstance(x, (bool, int, float, str, bytes)):
        return repr(x)
    made = None if getattr(getattr(x, "dtype", None), "hasobject", False) else getattr(x, "tobytes", None)
    return hashlib.sha256(made()).hexdigest() if callable(made) else ""


def _settings(optimizer: Any) -> str:
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    plain = [{k: v for k, v in g.items() if isinstance(v, (bool, int, float, str, tuple))} for g in groups]
    return f"{type(optimizer).__name__} {plain} of {[len(g['params']) for g in groups]} parameters"
