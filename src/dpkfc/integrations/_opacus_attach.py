"""From the keywords of a script to a plan, and from a plan to hooks on model and optimizer.

If a part is refused, nothing has been changed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sized
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from dpkfc._checks import check_positive
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.data.missing_values import warn_of_missing_values
from dpkfc.distributed.context import DistributedContext
from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.optimizer_step import check_optimizer
from dpkfc.integrations._opacus_loader import LogicalBatchSampler, PrivateLoader, check_loader
from dpkfc.integrations._opacus_options import Options
from dpkfc.integrations._opacus_step import PrivateStep
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import LedgerError

Parts = tuple[nn.Module, Optimizer, DataLoader[Any]]
"""Model, optimizer and loader of a script."""


def make_config(
    options: Options, accountant: str, parts: Parts, max_grad_norm: Any, epochs: float
) -> tuple[PrivacyConfig, int]:
    """Return the configuration behind a call and the number of examples.

    Raises:
        ValueError: a part cannot be made private, there is one bound per layer, or epochs <= 0.
    """
    module, optimizer, source = parts
    _check_parts(module, optimizer)
    check_loader(source)
    find_layers(module)
    check_optimizer(optimizer, trainable_tensors(module))
    size = len(cast(Sized, source.dataset))
    check_positive("epochs", epochs)
    if isinstance(max_grad_norm, (list, tuple)):
        raise ValueError(
            "max_grad_norm must be one number for all layers together; write"
            f" max_grad_norm={math.hypot(*max_grad_norm):.4g}, the norm of the list"
        )
    check_positive("max_grad_norm", max_grad_norm)
    config = PrivacyConfig(
        expected_batch_size=cast(int, source.batch_size),
        steps=math.ceil(epochs * _batches_per_pass(options, source, size)),
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


def attach(
    plan: Plan, parts: Parts, options: Options, max_releases: int | None, budget: Budget | None
) -> tuple[PrivateStep, PrivateLoader]:
    """Open the ledger, register the hooks and check the budget.

    Args:
        plan: for the dataset of the loader.
        parts: model, optimizer and the script's own loader.
        options: keywords of `make_private`.
        max_releases: most steps in the ledger, None for no limit.
        budget: charged with the whole plan when it begins; None for no budget.

    Returns:
        The step behind `optimizer.step()`, and the private loader.

    Raises:
        ValueError: a part cannot be made private.
        LedgerError: the ledger cannot be written or belongs to another run.
        BudgetExhausted: the ledger has spent the plan, or the plan does not fit into the budget.
    """
    plan.check_accounting()
    module, optimizer, source = parts
    header = {**plan.ledger_header, "steps": max_releases}
    with ExitStack() as undo:
        ledger = Ledger.open(options.ledger_path, plan.hash, header, max_releases)
        undo.callback(ledger.abandon)
        _check_resumed(ledger, options.resume)
        step = PrivateStep(
            plan,
            module,
            optimizer,
            ledger,
            loss_reduction=options.loss_reduction,
            verify=options.verify,
            source=source,
        )
        undo.callback(step.close)
        length = _batches_per_pass(options, source, plan.dataset_size)
        loader = PrivateLoader(source, LogicalBatchSampler(plan, length), step)
        warn_of_missing_values(stacklevel=4)
        if budget is not None:
            budget.charge_on_begin(plan, ledger)
        undo.pop_all()
    _warn_of_earlier_run(source.dataset, ledger, has_budget=budget is not None)
    return step, loader


# The datasets of this process that are alive, each with the ledgers of runs on it.
_runs = WeakIdKeyDictionary()


def _warn_of_earlier_run(dataset: Any, ledger: Ledger, *, has_budget: bool) -> None:
    """Warn that the ε of a second run is not the total, unless a file or a budget counts it."""
    earlier = 0
    with contextlib.suppress(TypeError):  # a list or a tuple has no weak reference
        ledgers: list[Ledger] = _runs.setdefault(dataset, [])
        earlier = sum(book.count for book in ledgers)
        ledgers.append(ledger)
    if earlier and ledger.path is None and not has_budget:
        warnings.warn(
            f"engines have made {earlier} releases of this dataset before: the ε of all runs add"
            " up. Name one Budget for them, or keep their ledgers and run dpkfc total",
            stacklevel=5,
        )


def _check_resumed(ledger: Ledger, resume: bool) -> None:
    """Refuse the ledger of an earlier run, unless the script says that it goes on with it.

    Raises:
        BudgetExhausted: the ledger has no release left.
        LedgerError: the ledger holds releases, and more may follow.
    """
    if resume or not ledger.count:
        return
    ledger.refuse_spent()
    raise LedgerError(
        f"{ledger.name} holds {ledger.count} releases of an earlier run: load its checkpoint and"
        " pass resume=True, or take another ledger_path"
    )


def _check_parts(module: Any, optimizer: Any) -> None:
    """Refuse a model or an optimizer that cannot be made private."""
    processes = DistributedContext.current().world_size
    if processes > 1:
        raise ValueError(
            f"this script runs in {processes} processes, which would spend {processes} times the"
            " budget; run it in one, or use dpkfc.Session, which shares each batch"
        )
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch module, got {kind}")
    if "_module" in module._modules and hasattr(module, "to_standard_module"):
        raise ValueError(
            f"module is a {kind} of Opacus; pass the model inside: "
            "module=model.to_standard_module()"
        )
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(module, parallel) or hasattr(module, "_orig_mod") or kind.startswith("FSDP"):
        raise ValueError(
            f"module is wrapped in {kind}; pass the plain module on one device, uncompiled"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"module is a {kind} of torch.jit, which takes no hooks; pass the plain one"
        )
    kind = type(optimizer).__name__
    if getattr(optimizer, "original_optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"optimizer is a {kind} of Opacus; pass the one inside:"
            " optimizer=optimizer.original_optimizer"
        )
    if callable(getattr(optimizer, "first_step", None)):
        raise ValueError(
            f"optimizer is a {kind}, which steps on gradients without noise before the release;"
            " pass a plain torch optimizer, such as its base_optimizer"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ValueError(
            f"optimizer is wrapped in {kind}, whose steps cannot be seen; pass the plain torch"
            " optimizer, and leave optimizer and loader out of accelerator.prepare"
        )


def _batches_per_pass(options: Options, data_loader: DataLoader[Any], size: int) -> int:
    """Return the number of logical batches in one pass over the script's own loader.

    Shuffled batches must be whole, so a smaller last batch does not count.
    """
    length = len(data_loader)
    if not options.poisson_sampling:
        length = size // cast(int, data_loader.batch_size)
    return max(1, length)
