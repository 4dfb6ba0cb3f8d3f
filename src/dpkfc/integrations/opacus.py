"""The interface of Opacus 1.6: a script for a CNN or an MLP runs with only its import changed.

    from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager

The model and the optimizer that `make_private` returns are the very objects it was given: the model gets hooks that
record its forward passes in training mode, the optimizer hooks around its step, and `close()` takes them off again. What
Opacus offers and this library does otherwise is refused by name; nothing is accepted and ignored.

Differences that show:

* the preconditioner: `preconditioner=KFAC(...)`;
* q = batch_size / len(dataset) and the divisor is batch_size, exact where Opacus rounds through len(data_loader);
* noise and sampling are keyed by the operating system; no generator reaches them, `test_mode_seed` makes a run
  repeatable and not private;
* the accountant is PLD by default ("prv" names the same numerical composition and selects it);
* a loss that mixes examples, a skipped batch, two backward passes before a step, a weight used outside its layer: errors.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sized
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.clipping import CLIPPINGS
from dpkfc.gradients.layers import find_layers
from dpkfc.integrations._poisson_loader import Draws, PrivateLoader, check_loader
from dpkfc.integrations._stepping import PrivateStep
from dpkfc.plan import Plan
from dpkfc.privacy.events import EpsilonCurve
from dpkfc.privacy.ledger import Ledger

__all__ = ["Accountant", "BatchMemoryManager", "Options", "PrivacyEngine"]

_ACCOUNTANTS = {"pld": "pld", "prv": "pld", "rdp": "rdp"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The further keywords of `make_private` and `make_private_with_epsilon`, those of Opacus first.

    Attributes:
        criterion: the script's loss, only to check its reduction; returned as it is where `grad_sample_mode="ghost"`.
        batch_first: only True.
        loss_reduction: of the script's loss, "mean" or "sum"; with "sum" the gradient is not divided by the batch size.
        poisson_sampling: False shuffles, which needs `uncertified=True`.
        clipping: "flat", or this library's "normalised" or "automatic".
        noise_generator: only None.
        grad_sample_mode: "hooks", or "ghost" for the four return values of such a script; both compute the same.
        wrap_model: only True; the module itself is returned, no wrapper.
        rand_on_empty: only False; an empty batch has a leading axis of size 0.
        preconditioner: for example `curvature.KFAC(probe=PinkNoise((1, 28, 28)))`; None is plain DP-SGD.
        ledger_path: file of the privacy ledger, continued where it exists; None keeps it in memory.
        uncertified: accept shuffled batches, whose ε is no guarantee.
        test_mode_seed: repeatable noise and sampling; NOT PRIVATE.
        verify: compare per-example gradients of the model with plain autograd on two examples of the first batch.

    Raises:
        ValueError: a value that this library does not take, naming the fix.
    """

    criterion: nn.Module | None = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False
    preconditioner: Any = None
    ledger_path: str | os.PathLike[str] | None = None
    uncertified: bool = False
    test_mode_seed: int | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        for refused, message in (
            (not self.batch_first, "batch_first=False is not supported; put the batch on the leading axis"),
            (
                self.loss_reduction not in ("mean", "sum"),
                f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}",
            ),
            (
                not self.poisson_sampling and not self.uncertified,
                "poisson_sampling=False has no certified guarantee: leave it out, or set uncertified=True to run shuffled "
                "batches with that stamped on the ledger",
            ),
            (
                self.poisson_sampling and self.uncertified,
                "uncertified=True goes with poisson_sampling=False; leave it out for Poisson sampling",
            ),
            (
                self.clipping not in CLIPPINGS,
                f"clipping={self.clipping!r} is not supported; choose one of {', '.join(CLIPPINGS)} (a preconditioner balances "
                "the layers, which is what per-layer clipping is used for)",
            ),
            (
                self.noise_generator is not None,
                "noise_generator is not supported: the noise is keyed by the operating system; leave it out, or use "
                "test_mode_seed= for a repeatable run that is not private",
            ),
            (
                self.grad_sample_mode not in ("hooks", "ghost"),
                f"grad_sample_mode={self.grad_sample_mode!r} is not supported; leave it out: norms are taken without per-sample "
                "gradients, and modules without a rule are covered by torch.func, in every mode",
            ),
            (
                not self.wrap_model,
                "wrap_model=False: the model is never wrapped here; leave it out, detach with close()",
            ),
            (self.rand_on_empty, "rand_on_empty=True is not supported; an empty batch has a leading axis of size 0"),
            (
                getattr(self.criterion, "reduction", self.loss_reduction) != self.loss_reduction,
                f"criterion has reduction={getattr(self.criterion, 'reduction', None)!r} but "
                f"loss_reduction={self.loss_reduction!r}; make them equal",
            ),
        ):
            if refused:
                raise ValueError(message)


class Accountant:
    """What was spent; the `accountant` attribute of an engine."""

    def __init__(self, name: str) -> None:
        if name not in _ACCOUNTANTS:
            raise ValueError(
                f"accountant={name!r} is not supported; choose one of {', '.join(_ACCOUNTANTS)} (a central-limit accountant "
                "as 'gdp' is no upper bound)"
            )
        self.name = _ACCOUNTANTS[name]
        self._run: tuple[Plan, Ledger] | None = None
        self._curves: dict[float, EpsilonCurve] = {}

    def attach(self, plan: Plan, ledger: Ledger) -> None:
        """Report the releases of this ledger from now on."""
        self._run, self._curves = (plan, ledger), {}

    def get_epsilon(self, delta: float) -> float:
        """ε of all releases so far, those that the ledger file held before included.

        Args:
            delta: any δ in (0, 1), not only the one a plan was made for.

        Raises:
            ValueError: δ outside (0, 1).
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        if self._run is None:
            return 0.0
        plan, ledger = self._run
        if delta not in self._curves:
            self._curves[delta] = EpsilonCurve(plan.event, delta, plan.neighbouring_relation, plan.accountant)
        return self._curves[delta].at(ledger.count)

    def mechanism(self) -> str:
        """Name of the accountant: "pld" or "rdp"."""
        return self.name

    def __len__(self) -> int:
        return 0 if self._run is None else self._run[1].count


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, as `opacus.PrivacyEngine` does. One engine, one model.

    Args:
        accountant: "pld" (default), "prv" (the same) or "rdp".
        secure_mode: only False. Noise is always keyed by the operating system, but not drawn from a cipher.

    Raises:
        ValueError: another accountant, or secure_mode=True.

    Guarantee:
        Each `optimizer.step()` that ends a logical batch is one release of the plan's event, in the ledger before it
        exists, provided the loss is a mean (or sum, as declared) of per-example losses.
    """

    def __init__(self, *, accountant: str = "pld", secure_mode: bool = False) -> None:
        if secure_mode:
            raise ValueError(
                "secure_mode=True is not supported: keys come from the operating system in every mode, but the noise is not "
                "drawn from a cipher; leave it out"
            )
        self.accountant = Accountant(accountant)
        self._step: PrivateStep | None = None

    # -- making things private -----------------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with a given noise; there is no limit of steps, ε grows with every one.

        The plan behind it is that of ONE pass over the loader, at a δ of its own choice: both only describe the run in
        the ledger. `get_epsilon(delta)` counts what was released, at any δ.

        Args:
            module, optimizer, data_loader: as in plain torch; the optimizer holds the module's trainable parameters.
            noise_multiplier: standard deviation of the noise over max_grad_norm; 0 is no noise and no privacy.
            max_grad_norm: C, in the coordinates of the preconditioner.
            options: see `Options`.

        Returns:
            The same module, the same optimizer and a private loader; with grad_sample_mode="ghost" the criterion before
            the loader.

        Raises:
            ValueError: what cannot be made private, naming the fix; nothing has been changed then.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        chosen = self._options(options)
        size = _dataset_size(module, optimizer, data_loader)
        config = self._config(chosen, data_loader, max_grad_norm, _length(chosen, data_loader, size))
        plan = config.with_noise(noise_multiplier, min(1e-5, 0.1 / size), size)
        return self._attach(plan, module, optimizer, data_loader, chosen, None)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with the least noise that keeps `epochs` passes over the loader within (ε, δ).

        A step beyond those passes raises `BudgetExhausted` and changes nothing.

        Args:
            module, optimizer, data_loader: as in `make_private`.
            target_epsilon, target_delta: the budget of the whole run.
            epochs: passes over the loader.
            max_grad_norm: C, in the coordinates of the preconditioner.
            options: see `Options`.

        Returns:
            As `make_private`.

        Raises:
            ValueError: as `make_private`, or a budget that no noise reaches.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        chosen = self._options(options)
        size = _dataset_size(module, optimizer, data_loader)
        if not (epochs > 0 and math.isfinite(epochs)):
            raise ValueError(f"epochs must be positive and finite, got {epochs}")
        steps = math.ceil(epochs * _length(chosen, data_loader, size))
        plan = self._config(chosen, data_loader, max_grad_norm, steps).calibrate(target_epsilon, target_delta, size)
        return self._attach(plan, module, optimizer, data_loader, chosen, plan.steps)

    def _options(self, options: dict[str, Any]) -> Options:
        if self._step is not None:
            raise ValueError("this engine has made a model private already; use one PrivacyEngine for each model")
        known = [field.name for field in fields(Options)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(known)}"
                raise ValueError(f"unknown keyword {name!r}; {hint}")
        return Options(**options)

    def _config(
        self, options: Options, data_loader: DataLoader[Any], max_grad_norm: float, steps: int
    ) -> PrivacyConfig:
        if not isinstance(max_grad_norm, (int, float)):
            raise ValueError(f"max_grad_norm must be one number (flat clipping), got {type(max_grad_norm).__name__}")
        assert data_loader.batch_size is not None
        return PrivacyConfig(
            expected_batch_size=data_loader.batch_size,
            steps=steps,
            max_grad_norm=float(max_grad_norm),
            clipping=options.clipping,
            sampler="poisson" if options.poisson_sampling else "shuffle",
            uncertified=options.uncertified,
            accountant=self.accountant.name,
            preconditioner=options.preconditioner,
            test_mode_seed=options.test_mode_seed,
        )

    def _attach(
        self,
        plan: Plan,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        options: Options,
        limit: int | None,
    ) -> tuple[Any, ...]:
        find_layers(module)
        header = {"certified": plan.certified, "rng": "repeatable" if plan.test_mode else "secure"}
        if options.ledger_path is None:
            ledger = Ledger.in_memory(plan.hash, header, limit)
        else:
            ledger = Ledger.open(options.ledger_path, plan.hash, header, limit)
        try:
            step = PrivateStep(
                plan, module, optimizer, ledger, loss_reduction=options.loss_reduction, verify=options.verify
            )
        except BaseException:
            ledger.close()
            raise
        draws = Draws(plan, _length(options, data_loader, plan.dataset_size))
        loader = PrivateLoader(data_loader, draws, step)
        self._step = step
        self.accountant.attach(plan, ledger)
        if options.grad_sample_mode == "ghost":
            criterion = options.criterion or nn.CrossEntropyLoss(reduction=options.loss_reduction)
            return module, optimizer, criterion, loader
        return module, optimizer, loader

    # -- what is known -------------------------------------------------------------------------------------------------

    def get_epsilon(self, delta: float) -> float:
        """ε of all releases so far at δ; 0 before anything was made private."""
        return self.accountant.get_epsilon(delta)

    @property
    def plan(self) -> Plan:
        """The plan; public.

        Raises:
            RuntimeError: nothing was made private yet.
        """
        return self._private.plan

    @property
    def ledger(self) -> Ledger:
        """The privacy ledger.

        Raises:
            RuntimeError: nothing was made private yet.
        """
        return self._private.ledger

    @property
    def _private(self) -> PrivateStep:
        if self._step is None:
            raise RuntimeError("call make_private or make_private_with_epsilon first")
        return self._step

    # -- validation ----------------------------------------------------------------------------------------------------

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise a ValueError, naming the module and the ways out, unless the module can be trained privately."""
        find_layers(module)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether `validate` would pass."""
        try:
            find_layers(module)
        except ValueError:
            return False
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take every hook off model and optimizer, which are then ordinary and NOT private, and close the ledger."""
        if self._step is not None:
            self._step.close()
            self._step.ledger.close()

    def __enter__(self) -> PrivacyEngine:
        """The engine itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the engine."""
        self.close()


class BatchMemoryManager:
    """Splits logical batches into physical ones, as `opacus.utils.batch_memory_manager.BatchMemoryManager` does.

    `optimizer.step()` after a physical batch that does not end its logical batch changes no parameter and no state.

    Args:
        data_loader: from `make_private`.
        max_physical_batch_size: largest physical batch.
        optimizer: from the same `make_private`.

    Raises:
        ValueError: a loader that is not private, another optimizer, a size below 1.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(data_loader.listener, PrivateStep):
            raise ValueError("data_loader is not private; pass the one that make_private returned")
        if data_loader.listener.optimizer is not optimizer:
            raise ValueError(
                "the optimizer belongs to another engine than data_loader; pass what make_private returned"
            )
        if isinstance(max_physical_batch_size, bool) or not isinstance(max_physical_batch_size, int):
            raise ValueError(f"max_physical_batch_size must be an integer, got {max_physical_batch_size!r}")
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be >= 1, got {max_physical_batch_size}")
        self._step, self._loader = data_loader.listener, data_loader.cut(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        """The loader of physical batches."""
        return self._loader

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drop an unfinished logical batch."""
        self._step.forget()


def _dataset_size(module: Any, optimizer: Any, data_loader: Any) -> int:
    """Number of examples, once the three objects are of a kind that can be made private."""
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
    check_loader(data_loader)
    dataset = data_loader.dataset
    assert isinstance(dataset, Sized)
    return len(dataset)


def _length(options: Options, data_loader: DataLoader[Any], size: int) -> int:
    """Logical batches in one pass: as many as the script's own loader has, drop_last included; only whole ones shuffled."""
    assert data_loader.batch_size is not None
    return max(1, len(data_loader) if options.poisson_sampling else size // data_loader.batch_size)
