"""What an Opacus-shaped script asks for, as a plan; and a plan put on its model, optimizer and loader, all or nothing."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.distributed import Ranks
from dpkfc.integrations._options import Options
from dpkfc.integrations._poisson_loader import Draws, PrivateLoader, check_loader
from dpkfc.integrations._stepping import PrivateStep
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import Ledger

__all__ = ["Parts", "attached", "check_mode", "configured"]

Parts = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]
"""Model, optimizer and loader of a script."""


def check_mode(secure_mode: bool) -> None:
    """Refuse what Opacus calls secure mode.

    Raises:
        ValueError: it was asked for.
    """
    if secure_mode:
        raise ValueError(
            "secure_mode=True is not supported; leave it out: noise comes from a cipher keyed by the operating system in "
            "every mode (on an accelerator from its own generator, seeded anew for each release), but here the rounding of "
            "floating-point numbers is not guarded against; a Session does that, with PrivacyConfig(noise='rounded')"
        )


def configured(
    options: Options, accountant: str, parts: Parts, max_grad_norm: Any, epochs: float
) -> tuple[PrivacyConfig, int]:
    """The configuration behind a call, for passes over the loader, and the number of examples.

    Raises:
        ValueError: parts of a kind that cannot be made private, a bound a layer, a senseless number of passes.
    """
    size = _dataset_size(*parts)
    source = parts[2]
    if not (epochs > 0 and math.isfinite(epochs)):
        raise ValueError(f"epochs must be positive and finite, got {epochs}")
    if not isinstance(max_grad_norm, (int, float)):
        raise ValueError(f"max_grad_norm must be one number, for all layers together, got {type(max_grad_norm).__name__}")
    assert source.batch_size is not None
    config = PrivacyConfig(
        expected_batch_size=source.batch_size,
        steps=math.ceil(epochs * _length(options, source, size)),
        max_grad_norm=float(max_grad_norm),
        clipping=options.clipping,
        sampler="poisson" if options.poisson_sampling else "shuffle",
        uncertified=options.uncertified,
        accountant=accountant,
        preconditioner=options.preconditioner,
        readout=options.readout,
        test_mode_seed=options.test_mode_seed,
    )
    return config, size


def attached(plan: Plan, parts: Parts, options: Options, limit: int | None) -> tuple[PrivateStep, PrivateLoader]:
    """Open the ledger and put the hooks on.

    Raises:
        ValueError: what cannot be made private.
        LedgerError: the ledger cannot be written or belongs to another run.
    """
    plan.check_accounting()
    module, optimizer, source = parts
    header = {**plan.ledger_header, **({} if limit is None else {"steps": limit})}
    with ExitStack() as undo:
        if options.ledger_path is None:
            ledger = Ledger.in_memory(plan.hash, header, limit)
        else:
            ledger = Ledger.open(options.ledger_path, plan.hash, header, limit)
        undo.callback(ledger.close)
        step = PrivateStep(
            plan, module, optimizer, ledger, loss_reduction=options.loss_reduction, verify=options.verify, source=source,
        )  # fmt: skip
        undo.callback(step.close)
        loader = PrivateLoader(source, Draws(plan, _length(options, source, plan.dataset_size)), step)
        undo.pop_all()
    return step, loader


def _dataset_size(module: Any, optimizer: Any, data_loader: Any) -> int:
    """Number of examples, once the three objects are of a kind that can be made private, in one process."""
    if (processes := Ranks.current().world_size) > 1:
        raise ValueError(
            f"this script runs in {processes} processes, each of which would train alone on all data, and together they would "
            f"spend {processes} times the budget; run it in one, or use dpkfc.Session, which shares each batch over them"
        )
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch module, got {type(module).__name__}")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(module, parallel) or hasattr(module, "_orig_mod") or type(module).__name__.startswith("FSDP"):
        raise ValueError(
            f"module is wrapped in {type(module).__name__}; pass the plain module on one device, uncompiled"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"optimizer must be a torch optimizer that steps without a closure, got {type(optimizer).__name__}"
        )
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is wrapped in {type(optimizer).__name__}, whose steps cannot be seen; pass the plain torch optimizer, "
            "and leave optimizer and loader out of accelerator.prepare"
        )
    check_loader(data_loader)
    find_layers(module)
    return len(data_loader.dataset)


def _length(options: Options, data_loader: DataLoader[Any], size: int) -> int:
    """Logical batches in one pass: as many as the script's own loader has, drop_last included; shuffled, the whole ones."""
    assert data_loader.batch_size is not None
    return max(1, len(data_loader) if options.poisson_sampling else size // data_loader.batch_size)
