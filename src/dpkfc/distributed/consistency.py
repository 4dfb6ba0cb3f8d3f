"""Check what the processes of one run must have in common, before anything is spent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.distributed.context import Description, DistributedContext
from dpkfc.distributed.fsdp import is_divided, reshard
from dpkfc.tensors import NamedTensors, content_bytes

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


def fix_hint(name: str) -> str:
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

    ranks.check_consistent(describe, fix_hint)


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
    ranks.check_consistent(lambda: _bit_sums(parameters), fix_hint)


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
    reads = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(_READS):
            reads.append(_digest_fields([_read_record(record, i) for i in rows]))
    first, *repeats = reads
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
            digest.update(content_bytes(x))
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
    settings, sizes = [], []
    for group in groups:
        settings.append({key: value for key, value in group.items() if isinstance(value, plain)})
        sizes.append(len(group["params"]))
    return f"{type(optimizer).__name__} {settings} of {sizes} parameters"
