"""The interface of Opacus 1.6: a script for a CNN, an LSTM or a transformer runs with only its import changed.

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

import math
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.layers import find_layers
from dpkfc.integrations._accountant import Accountant
from dpkfc.integrations._options import Options
from dpkfc.integrations._poisson_loader import Draws, PrivateLoader, check_loader
from dpkfc.integrations._stepping import PrivateStep
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import Ledger

__all__ = ["Accountant", "BatchMemoryManager", "Options", "PrivacyEngine"]


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, as `opacus.PrivacyEngine` does. One engine, one model.

    Args:
        accountant: "pld" (default), "prv" (the same) or "rdp".
        secure_mode: only False. On a CPU the noise comes from a cipher in every mode; what Opacus does beyond that under
            this name, against attacks on the rounding of floating-point numbers, is not done.

    Raises:
        ValueError: another accountant, or secure_mode=True.

    Guarantee:
        Each `optimizer.step()` that ends a logical batch is one release of the plan's event, in the ledger before it
        exists, provided the loss is a mean (or sum, as declared) of per-example losses.
    """

    def __init__(self, *, accountant: str = "pld", secure_mode: bool = False) -> None:
        if secure_mode:
            raise ValueError(
                "secure_mode=True is not supported; leave it out: noise comes from a cipher keyed by the operating system in "
                "every mode (on an accelerator from its own generator, seeded anew for each release), but the rounding of "
                "floating-point numbers is not guarded against"
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
            module: the model.
            optimizer: a torch optimizer of exactly its trainable parameters.
            data_loader: a torch DataLoader with a batch_size over a map-style dataset.
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
        config = self._config(chosen, data_loader, max_grad_norm, _length(chosen, data_loader))
        plan = config.with_noise(noise_multiplier, min(1e-5, 0.1 / size), size)
        return self._attach(plan, (module, optimizer, data_loader), chosen, None)

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
            module: as in `make_private`.
            optimizer: as in `make_private`.
            data_loader: as in `make_private`.
            target_epsilon: ε of the whole run.
            target_delta: δ of the whole run.
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
        steps = math.ceil(epochs * _length(chosen, data_loader))
        plan = self._config(chosen, data_loader, max_grad_norm, steps).calibrate(target_epsilon, target_delta, size)
        return self._attach(plan, (module, optimizer, data_loader), chosen, plan.steps)

    def _options(self, options: dict[str, Any]) -> Options:
        if self._step is not None:
            raise ValueError("this engine has made a model private already; use one PrivacyEngine for each model")
        return Options.of(options)

    def _config(
        self, options: Options, data_loader: DataLoader[Any], max_grad_norm: float, steps: int
    ) -> PrivacyConfig:
        if not isinstance(max_grad_norm, (int, float)):
            raise ValueError(
                f"max_grad_norm must be one number, for all layers together, got {type(max_grad_norm).__name__}"
            )
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
        parts: tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]],
        options: Options,
        limit: int | None,
    ) -> tuple[Any, ...]:
        """Open the ledger and put the hooks on, all or nothing."""
        plan.check_accounting()
        module, optimizer, source = parts
        header = {"certified": plan.certified, "rng": "repeatable" if plan.test_mode else "secure"}
        with ExitStack() as undo:
            if options.ledger_path is None:
                ledger = Ledger.in_memory(plan.hash, header, limit)
            else:
                ledger = Ledger.open(options.ledger_path, plan.hash, header, limit)
            undo.callback(ledger.close)
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
            loader = PrivateLoader(source, Draws(plan, _length(options, source)), step)
            undo.pop_all()
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

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module itself where it can be trained privately; nothing is replaced behind its owner's back.

        Raises:
            ValueError: naming the module that cannot, and the ways out.
        """
        find_layers(module)
        return module

    def save_checkpoint(self, **_: Any) -> NoReturn:
        """Refused: a checkpoint needs nothing of the engine.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "save model.state_dict() and optimizer.state_dict() as in plain torch; what was spent is in the ledger, which a "
            "later run continues with make_private(ledger_path=...)"
        )

    load_checkpoint = save_checkpoint

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
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is wrapped in {type(optimizer).__name__}, whose steps cannot be seen; pass the plain torch optimizer, "
            "and leave optimizer and loader out of accelerator.prepare"
        )
    check_loader(data_loader)
    find_layers(module)
    return len(data_loader.dataset)


def _length(options: Options, data_loader: DataLoader[Any]) -> int:
    """Logical batches in one pass: as many as the script's own loader has, drop_last included; shuffled, the whole ones."""
    size, batch_size = len(data_loader.dataset), data_loader.batch_size  # type: ignore[arg-type]
    assert batch_size is not None
    return max(1, len(data_loader) if options.poisson_sampling else size // batch_size)
