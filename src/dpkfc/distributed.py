"""Share one logical batch over several processes of torch.distributed.

Every process clips its part of the sampled batch. The clipped sums are added up on rank 0, which
alone draws the batch, writes the ledger and adds the noise. Rank 0 then sends the release to all.

Reduction and broadcast are the two halves of one all-reduce, with the noise between them. Another
process sees only what its part of the reduction passes on (gloo leaves it a segment) and keeps
nothing. Without a process group everything here is the identity.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc.torchrun import read_number

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

# --------------------------------------------------------------------------------------------------
# What torchrun tells the processes that it starts. All of it is read from the environment.


# --------------------------------------------------------------------------------------------------

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
NamedTensors = Mapping[str, Tensor]
Tensors = dict[str, Tensor]
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
        """Return the default process group, or a single process if there is no group.

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


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error; the name of its class without one."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rank_lost(error: Exception) -> RankLost:
    reason = first_line(error).split(". This is typically")[0][:300]
    return RankLost(
        "another process of the group died or did not answer in time; start all processes again"
        f" and restore the last checkpoint (docs/how-to-distributed.md). The backend says: {reason}"
    )


# --------------------------------------------------------------------------------------------------
# What the processes of one run must have in common. They exchange it before anything is spent.

_COMPARED_RECORDS = 16
_READS = 3  # fields that differ between reads are random
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
# Names of things begin or end with a key. A parameter after steps is a matter of the steps.
_ADVICE = {
    "steps": "; change the model and the learning rate on every process alike",
    "plan": "; use the same PrivacyConfig, with the same probe, on every process",
    "parameter": "; call torch.manual_seed(0) before the model is built, or load one state_dict",
    "number of records": (
        "; give every process the WHOLE dataset, without a DistributedSampler: the session divides "
        "each batch"
    ),
    "optimizer": "; build it with the same settings on every process",
    "probe": "; its sample(n, generator) must depend on the generator only",
    "metric": "; run all processes on the same kind of processor and version of torch",
    "some records": (
        "; give every process the same records in the same order (sort file names, no "
        "DistributedSampler): a person could be in two parts"
    ),
}
_ADVICE["buffer"] = _ADVICE["parameter"]


def advice(name: str) -> str:
    """Return the fix where the thing of this name differs."""
    for kind, fix in _ADVICE.items():
        if name.startswith(kind) or name.endswith(kind):
            return fix
    return ""


def check_alike(
    ranks: DistributedContext,
    plan: str,
    model: nn.Module,
    optimizer: Any,
    *,
    records: int,
    record: Callable[[int], Any],
    passes: Mapping[str, Any],
) -> None:
    """Check, before anything is spent, that all processes train the same model in the same way.

    Args:
        ranks: the processes.
        plan: the hash of the plan.
        model: parameters and buffers are compared by shape, type and a hash of their values.
        optimizer: its kind and the settings of its groups are compared.
        records: the length of the dataset.
        record: reads one record. Some records are compared, without fields that change from one
            read to the next (random augmentation).
        passes: settings, by name, that decide how many passes a process makes. They are compared
            where a pass is an exchange.

    Raises:
        ValueError: the model is wrapped by torch's data parallelism.
        RuntimeError: naming a rank, the first thing in which it differs from rank 0, and the fix.
    """
    _refuse_wrapped(model)
    reshard(model)
    if ranks.world_size == 1:
        return
    digests = ranks.all_gather(ranks.run_on_all(lambda: _digest_records(record, records)))
    compared = dict(digests[ranks.rank])
    for fields in digests:
        for name, digest in fields.items():
            if not digest:  # random on some process
                compared.pop(name, None)
    counts: Description = {}
    if is_divided(model):
        counts = {name: (repr(value), None) for name, value in passes.items()}

    def describe() -> Description:
        description = _describe_run(plan, model, optimizer, records)
        return {**description, **counts, "some records": ("", compared)}

    ranks.check_consistent(describe, advice)


def check_in_step(ranks: DistributedContext, parameters: NamedTensors, what: str) -> None:
    """Check that released parameters are equal to the bit on all processes.

    Args:
        ranks: the processes.
        parameters: the trainable ones, by name.
        what: names what the processes are about to do.

    Raises:
        RuntimeError: on every process, naming a rank and a parameter.
    """
    ranks.broadcast_from_rank0(lambda: None, what)
    ranks.check_consistent(lambda: _bit_sums(parameters), advice)


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model with torch's own data parallelism around it or a part of it."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS:
            where = f"module '{name}'" if name else "the model"
            raise ValueError(
                f"{where} is wrapped in {kind}, which averages gradients before they are clipped; "
                "pass the bare module (model.module) on every process"
            )


def _digest_records(record: Callable[[int], Any], records: int) -> dict[str, str]:
    """Return a hash of each field over some records; an empty one if the field is random."""
    places = np.linspace(0, records - 1, min(records, _COMPARED_RECORDS))
    rows = places.astype(np.int64).tolist()
    with torch.random.fork_rng(devices=[]):
        first, *repeats = [
            _digest_fields([_read_record(record, i) for i in rows]) for _ in range(_READS)
        ]
    digests = {}
    for name, digest in first.items():
        is_stable = all(repeat.get(name) == digest for repeat in repeats)
        digests[name] = digest if is_stable else ""
    return digests


def _read_record(record: Callable[[int], Any], i: int) -> Any:
    """Return a record, or None for one that cannot be read, which adds nothing to any sum."""
    with suppress(Exception):
        return record(i)
    return None


def _digest_fields(records: Sequence[Any]) -> dict[str, str]:
    """Return a hash of all values of each field, by its name or number."""
    values: dict[str, list[Any]] = {}
    for record in records:
        fields: Iterable[tuple[Any, Any]] = [("", record)]
        if isinstance(record, Mapping):
            fields = record.items()
        elif isinstance(record, (tuple, list)):
            fields = enumerate(record)
        for name, value in fields:
            values.setdefault(str(name), []).append(value)
    return {name: _hash(*tree_flatten(column)[0]) for name, column in values.items()}


def _describe_run(plan: str, model: nn.Module, optimizer: Any, records: int) -> Description:
    """Return a text that may be shown and a hash that may not, by name of the thing."""
    description: Description = {
        "plan": (plan[:12], plan),
        "number of records": (str(records), None),
    }
    for name, p in model.named_parameters():
        frozen = "" if p.requires_grad else ", frozen"
        description[f"parameter '{name}'"] = (_kind(p) + frozen, _hash_parameter(p))
    for name, buffer in model.named_buffers():
        description[f"buffer '{name}'"] = (_kind(buffer), _hash(buffer))
    description["optimizer"] = (_describe_optimizer(optimizer), None)
    return description


def _bit_sums(tensors: NamedTensors) -> Description:
    """Return the sum of the bit patterns of each parameter, which changes with any single bit."""
    sums: Description = {}
    for name, x in tensors.items():
        if is_divided(x):
            continue  # each process holds another part
        integer = _INTEGERS.get(x.element_size(), torch.uint8)
        bits = x.detach().flatten().contiguous().view(integer)
        sums[f"parameter '{name}' after steps"] = ("", int(bits.sum(dtype=torch.int64)))
    return sums


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _hash_parameter(parameter: Any) -> str:
    """Return a hash of a whole parameter, or the layout of a sharded one, which has one copy."""
    return f"divided as {parameter.placements}" if is_divided(parameter) else _hash(parameter)


def _hash(*values: Any) -> str:
    digest = hashlib.sha256()
    for x in values:
        if isinstance(x, Tensor) and x.layout == torch.strided:
            digest.update(_kind(x).encode())
            content = x.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
        else:
            digest.update(f"{type(x).__name__} {_describe_value(x)}".encode())
    return digest.hexdigest()


def _describe_value(x: Any) -> str:
    """Return the content of a plain value, an array or an image; "" for any other value."""
    if isinstance(x, (bool, int, float, str, bytes)):
        return repr(x)
    if getattr(getattr(x, "dtype", None), "hasobject", False):
        return ""
    to_bytes = getattr(x, "tobytes", None)
    return hashlib.sha256(to_bytes()).hexdigest() if callable(to_bytes) else ""


def _describe_optimizer(optimizer: Any) -> str:
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    plain = (bool, int, float, str, tuple)
    settings = [
        {key: value for key, value in group.items() if isinstance(value, plain)} for group in groups
    ]
    sizes = [len(group["params"]) for group in groups]
    return f"{type(optimizer).__name__} {settings} of {sizes} parameters"


# --------------------------------------------------------------------------------------------------
# Models that the user has sharded with FSDP2 (`torch.distributed.fsdp.fully_shard`).
#
# Between passes every parameter is a DTensor, of which a process holds one part. FSDP2 gathers the
# parameters of a module before it runs and frees them afterwards. All other code reads and writes
# parameters through the functions below. Gathering is an exchange: all processes must do it equally
# often and in the same order, so each of them makes as many passes as any other.
#
# For a model that is not sharded, everything here is the identity.


_FIX = "use plain fully_shard(module) over all processes, or leave the model whole on every process"
# Prefixes of names of parameters: in a state dict, in the state of a filter, in an average.
_PREFIXES = ("", "before.", "average.")
# A sharded parameter to the tensor that takes its place while a module runs.
_gathered = WeakIdKeyDictionary()
# A module to the module that gathers its parameters.
_gathered_by: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()


def is_divided(x: Any) -> bool:
    """Return whether a tensor, or a parameter of a model between passes, is sharded."""
    if isinstance(x, nn.Module):
        return any(is_divided(p) for p in x.parameters())
    return isinstance(x, Tensor) and hasattr(x, "placements")


def _units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to, outer ones first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    # fully_shard makes a subclass of every class that it is applied to.
    if kind is None or not kind.__subclasses__():
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters.

    After a forward pass without a backward pass, FSDP2 keeps those of the outermost module.
    """
    for unit in _units(model):
        unit.reshard()


@contextmanager
def resharded(model: nn.Module, work: AbstractContextManager[None]) -> Iterator[None]:
    """Run a context that writes parameters, each time into parts that FSDP2 gathers anew."""
    reshard(model)
    try:
        with work:
            yield
    finally:
        reshard(model)


def prepare(model: nn.Module, world_size: int, *, automatic: bool = False) -> bool:
    """Check how a model is sharded, and record the tensors that replace its parameters in a pass.

    Args:
        model: as `fully_shard` has left it.
        world_size: the processes of the run.
        automatic: the size of micro-batches is to be found by trying.

    Returns:
        Whether the model is sharded.

    Raises:
        ValueError: the model is sharded in a way that is not known to work, by name of a parameter.
    """
    units = _units(model)
    reshard(model)
    divided: dict[str, Any] = {n: p for n, p in model.named_parameters() if is_divided(p)}
    for name, p in divided.items():
        _check_placement(name, p, world_size, bool(units))
    if not divided:
        return False
    if automatic:
        raise ValueError(
            "max_physical_batch_size='auto' tries again on one process, but processes of a sharded"
            " model must make the same passes; give max_physical_batch_size as a number"
        )
    names = {id(p): name for name, p in divided.items()}
    for unit in units:
        _record_gathered(unit, names)
    for n, p in divided.items():
        if p not in _gathered:
            raise ValueError(_describe_refusal(n, _NOT_GATHERED))
    return True


def _record_gathered(unit: Any, names: Mapping[int, str]) -> None:
    """Gather the parameters of a unit once, and record the tensors that replace them.

    Args:
        unit: a module that `fully_shard` was applied to.
        names: of the sharded parameters, by their id.
    """
    sharded = []
    for module in unit.modules():
        for leaf, p in module._parameters.items():
            if is_divided(p):
                sharded.append((module, leaf, p))
    unit.unshard()
    try:
        for module, leaf, p in sharded:
            whole = module._parameters[leaf]
            if whole is p:
                continue  # an inner unit gathers it
            if whole.dtype != p.dtype:
                what = f"is computed with in {whole.dtype} and kept in {p.dtype} (mp_policy)"
                raise ValueError(_describe_refusal(names[id(p)], what))
            _gathered[p] = whole
            _gathered_by[module] = ref(unit)
    finally:
        unit.reshard()


def _check_placement(name: str, p: Any, world_size: int, sharded: bool) -> None:
    mesh = p.device_mesh
    shape = tuple(mesh.shape)
    stored = local(p).device.type
    used = mesh.device_type
    fault = ""
    if not sharded:
        fault = _NOT_GATHERED
    elif shape != (world_size,):
        fault = f"is divided over a mesh of shape {shape} in {world_size} processes"
    elif not all(x.is_shard(0) for x in p.placements):
        fault = f"is divided as {p.placements}"
    elif stored != used:
        fault = f"is kept on {stored} and computed with on {used} (an offload policy)"
    if fault:
        raise ValueError(_describe_refusal(name, fault))


_NOT_GATHERED = "is a DTensor that no fully_shard gathers (tensor parallelism?)"


def _describe_refusal(name: str, what: str) -> str:
    return f"parameter '{name}' {what}, which a session does not take; {_FIX}"


def refuse_layers(layers: Iterable[Layer]) -> None:
    """Refuse a sharded module that runs again for single examples, where FSDP2 would gather inside.

    Raises:
        ValueError: naming the module.
    """
    for layer in layers:
        if not layer.runs_again:
            continue
        if any(_units(module) for module in layer.modules):
            kind = type(layer.module).__name__
            raise ValueError(
                f"fully_shard was applied to the module '{layer.display_name}' ({kind}), which runs"
                " again for single examples; apply fully_shard to modules around it"
            )


@contextmanager
def gathered(layer: Layer) -> Iterator[None]:
    """Gather the parameters of a layer whose module runs again after the pass.

    This is an exchange if the parameters are sharded.
    """
    units: dict[Any, None] = {}
    if _gathered_by and layer.runs_again:
        for module in layer.modules:
            units |= {_gathered_by[x](): None for x in module.modules() if x in _gathered_by}
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def refuse_let_go(layer: Layer, inputs: Any) -> None:
    """Refuse a layer that was called with a parameter, which FSDP2 has freed before the gradient.

    Raises:
        ValueError: naming the layer.
    """
    if not _gathered_by:
        return
    for x in tree_flatten(inputs)[0]:
        if isinstance(x, Tensor) and x.numel() and not x.untyped_storage().nbytes():
            raise ValueError(
                f"layer '{layer.display_name}' is called with a parameter as its input, which "
                "fully_shard frees after the pass; pass parameter.clone(), or use ignored_params="
            )


def find_graph_tensor(p: Tensor) -> Tensor:
    """Return the tensor of a parameter in the graph of autograd: the gathered one if sharded."""
    tensor: Tensor = _gathered.get(p, p) if _gathered else p
    return tensor


def trainable_tensors(model: nn.Module) -> Tensors:
    """Return name to tensor of every trainable parameter, as a forward pass reads it."""
    named = model.named_parameters()
    return {name: find_graph_tensor(p) for name, p in named if p.requires_grad}


def list_group_members(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of an optimizer's groups, or their numbers in its state."""
    return [member for group in groups for member in group["params"]]


# -- values ----------------------------------------------------------------------------------------


def local(x: Tensor) -> Tensor:
    """Return the part of a tensor on this process, without a copy or an exchange; may be empty."""
    detached: Any = x.detach()
    part: Tensor = detached.to_local() if is_divided(x) else detached
    return part


def whole(tree: Any, keep: bool = True) -> Any:
    """Return dicts, lists and tuples with whole tensors on the CPU in place of sharded ones.

    Each sharded tensor is an exchange.

    Args:
        tree: the same structure on every process.
        keep: whether this process keeps the tensors. Others hold one at a time.
    """
    if not _gathered:  # no model is sharded
        return tree

    def gather(x: Any) -> Any:
        if not is_divided(x):
            return x
        full = x.detach().full_tensor()
        return full.cpu() if keep else torch.empty(0, dtype=x.dtype)

    return tree_map(gather, tree)


def divided_as(full: Tensor, like: Any) -> Tensor:
    """Return a whole tensor sharded like another one of its shape; no tensor is sent."""
    if not is_divided(like) or is_divided(full):
        return full
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    placements = like.placements
    size = -(-full.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, full.shape[0])
    # A copy lets the whole tensor be freed.
    part = full[start : start + size].to(
        local(like).device, copy=True, memory_format=torch.contiguous_format
    )
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def model_state(model: nn.Module) -> Tensors:
    """Return the state dict of a sharded model; tied parameters keep their first name only."""
    reshard(model)
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    repeated = names - dict(model.named_parameters()).keys()
    state = model.state_dict().items()
    return {name: x for name, x in state if name not in repeated and isinstance(x, Tensor)}


def divided_state(state: NamedTensors, model: nn.Module) -> Tensors:
    """Return named whole tensors, sharded if they are values of a sharded parameter.

    The value may be the parameter's own, an earlier one or an average.
    """
    parameters: dict[str, Any] = {}
    for name, p in model.named_parameters():
        parameters |= {prefix + name: p for prefix in _PREFIXES}
    return {name: divided_as(x, parameters.get(name)) for name, x in state.items()}


def divided_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of an optimizer, with tensors of a parameter's shape sharded like it.

    Raises:
        KeyError, IndexError: the state of an optimizer of other parameters.
    """
    own_parameters = list_group_members(optimizer.param_groups)
    if not any(is_divided(p) for p in own_parameters):
        return dict(state)
    numbers = list_group_members(state["param_groups"])
    parameters = dict(zip(numbers, own_parameters, strict=False))

    states = {}
    for i, values in state["state"].items():
        parameter = parameters.get(i)
        shape = getattr(parameter, "shape", None)
        own_state = dict(values)
        for name, x in values.items():
            if isinstance(x, Tensor) and x.shape == shape:
                own_state[name] = divided_as(x, parameter)
        states[i] = own_state
    return {**state, "state": states}
