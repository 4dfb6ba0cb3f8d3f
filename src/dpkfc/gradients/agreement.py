"""What the processes of one run must have in common, as short texts that they exchange before anything is spent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.gradients.distributed import Ranks

__all__ = ["advice", "check_alike", "check_in_step"]

_SAMPLED = 16  # rows of a dataset of tensors that are compared
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
_ADVICE["some records"] = _ADVICE["number of records"]


def advice(name: str) -> str:
    """What to do where the thing of this name (its first words, or a name in quotes behind them) differs."""
    kinds = (kind for kind in _ADVICE if name.endswith(kind) or name.startswith(kind))
    return next((_ADVICE[kind] for kind in sorted(kinds, key=lambda kind: kind != "steps")), "")


def check_alike(
    ranks: Ranks, plan: str, model: nn.Module, optimizer: Any, *, records: int, dataset: tuple[Tensor, ...] | None
) -> None:
    """Raise on every process, before anything is spent, where they are not about to train the same model in the same way.

    Args:
        ranks: the processes.
        plan: hash of the plan.
        model: parameters and buffers are compared by shape, type and a hash of their values.
        optimizer: its kind and the settings of its groups.
        records: length of the dataset.
        dataset: its tensors, of which some rows are compared; None where it is not made of tensors (what is read of it may
            then be augmented at random).

    Raises:
        ValueError: the model is wrapped by torch's data parallelism, or divided by it.
        RuntimeError: naming a rank, the first thing in which it differs from rank 0, and the fix.
    """
    _refuse_wrapped(model)
    ranks.agree(lambda: _description(plan, model, optimizer, records, dataset), advice)


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
    """Raise where torch's own data parallelism is around the model or a part of it, or has divided its parameters."""
    for name, module in model.named_modules():
        if (kind := type(module).__name__) in _WRAPPERS:
            where = f"module '{name}'" if name else "the model"
            raise ValueError(
                f"{where} is wrapped in {kind}, which averages gradients before they are clipped and noised. Pass the bare "
                "module (of a wrapped one: model.module) on every process: the session shares each batch over the processes "
                "and adds up clipped sums by itself"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):  # a DTensor
            raise ValueError(
                f"parameter '{name}' is divided over processes (a DTensor, from fully_shard or tensor parallelism). Every "
                "process needs the whole model: leave fully_shard out, and train fewer parameters (LoRA, or freeze layers) "
                "where memory is short; docs/how-to-distributed.md says what stands in the way"
            )


def _description(
    plan: str, model: nn.Module, optimizer: Any, records: int, dataset: tuple[Tensor, ...] | None
) -> dict[str, tuple[str, Any]]:
    """Name to a text that may be shown and a hash that is not, in the order in which differences are looked for."""
    found: dict[str, tuple[str, Any]] = {"plan": (plan[:12], plan), "number of records": (str(records), None)}
    for name, p in model.named_parameters():
        found[f"parameter '{name}'"] = f"{_kind(p)}{'' if p.requires_grad else ', frozen'}", _hash(p)
    found |= {f"buffer '{name}'": (_kind(b), _hash(b)) for name, b in model.named_buffers()}
    found["optimizer"] = _settings(optimizer), None
    if dataset is not None:
        rows = torch.from_numpy(np.linspace(0, records - 1, min(records, _SAMPLED)).astype(np.int64))
        found["some records"] = "", _hash(*(x[rows.to(x.device)] for x in dataset))
    return found


def _bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """The bit patterns of each parameter added up: one pass over memory, and another number where a single bit differs."""
    found: dict[str, tuple[str, Any]] = {}
    for name, x in tensors.items():
        bits = x.detach().flatten().contiguous().view(_INTEGERS.get(x.element_size(), torch.uint8))
        found[f"parameter '{name}' after steps"] = "", int(bits.sum(dtype=torch.int64))
    return found


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(_kind(x).encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(optimizer: Any) -> str:
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    plain = [{k: v for k, v in g.items() if isinstance(v, (bool, int, float, str, tuple))} for g in groups]
    return f"{type(optimizer).__name__} {plain} of {[len(g['params']) for g in groups]} parameters"
