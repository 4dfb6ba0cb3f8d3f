"""What the processes of one run must have in common, as short texts that they exchange before anything is spent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpkfc.gradients.distributed import Ranks
from dpkfc.gradients.sharded import is_divided, reshard

__all__ = ["advice", "check_alike", "check_in_step"]

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
    ranks: Ranks,
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
    seen = ranks.everyone(ranks.together(lambda: _some_records(record, records)))
    drawn = {name for of in seen for name, digest in of.items() if not digest}
    some = {name: digest for name, digest in seen[ranks.rank].items() if name not in drawn}
    divided = any(is_divided(p) for p in model.parameters())
    counts = {name: (repr(value), None) for name, value in (passes or {}).items() if divided}
    ranks.agree(lambda: {**_description(plan, model, optimizer, records), **counts, "some records": ("", some)}, advice)


def check_in_step(ranks: Ranks, parameters: Mapping[str, Tensor], what: str) -> None:
    """Raise on every process where released parameters are not the same to the bit on all of them.

    Args:
        ranks: the processes.
        parameters: trainable ones, by name.
        what: the processes are about to do.

    Raises:
        RuntimeError: naming a rank and a parameter.
    """
    ranks.from_first(lambda: None, what)
    ranks.agree(lambda: _bit_sums(parameters), advice)


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
