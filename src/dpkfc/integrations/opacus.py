"""The interface of Opacus 1.6: a script for a CNN, an LSTM or a transformer runs with only its import changed.

    from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager

The model and the optimizer that `make_private` returns are the very objects it was given: the model gets hooks that
record its forward passes in training mode, the optimizer hooks around its step, and `close()` takes them off again. What
Opacus offers and this library does otherwise is refused by name; nothing is accepted and ignored.

Differences that show:

* the preconditioner: `preconditioner=KFAC(...)`, with `readout="natural"` to map the release back;
* q = batch_size / len(dataset) and the divisor is batch_size, exact where Opacus rounds through len(data_loader);
* noise and sampling are keyed by the operating system; no generator reaches them, `test_mode_seed` makes a run
  repeatable and not private;
* the accountant is PLD by default ("prv" names the same numerical composition and selects it);
* a model or loss that mixes examples, a skipped batch, two backward passes before a step, a penalty on weights: errors. A tracker
  follows each batch from the loader to `loss.backward()`, which is taken over (`_recording`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.gradients.discovery import find_layers
from dpkfc.integrations._accountant import Accountant
from dpkfc.integrations._memory_manager import BatchMemoryManager
from dpkfc.integrations._opacus_setup import Parts, attached, check_mode, configured
from dpkfc.integrations._options import Options
from dpkfc.integrations._stepping import PrivateStep
from dpkfc.plan import Plan
from dpkfc.privacy.ledger import Ledger

__all__ = ["Accountant", "BatchMemoryManager", "Options", "PrivacyEngine"]


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, as `opacus.PrivacyEngine` does. One engine, one model.

    Args:
        accountant: "pld" (default), "prv" (the same) or "rdp".
        secure_mode: only False. On a CPU the noise comes from a cipher in every mode; what Opacus does beyond that under
            this name, against attacks on the rounding of floating-point numbers, a `Session` does with `noise="rounded"`.

    Raises:
        ValueError: another accountant, or secure_mode=True.

    Guarantee:
        Each `optimizer.step()` that ends a logical batch is one release of the plan's event, in the ledger before it
        exists. A loss that is no mean (or sum, as declared) of per-example losses is refused, before its batch contributes.
    """

    def __init__(self, *, accountant: str = "pld", secure_mode: bool = False) -> None:
        check_mode(secure_mode)
        self.accountant = Accountant(accountant)
        self._step: PrivateStep | None = None

    def make_private(
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, data_loader: DataLoader[Any],
        noise_multiplier: float, max_grad_norm: float, **options: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
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
        config, size = configured(chosen, self.accountant.name, (module, optimizer, data_loader), max_grad_norm, 1.0)
        plan = config.with_noise(noise_multiplier, min(1e-5, 0.1 / size), size)
        return self._attach(plan, (module, optimizer, data_loader), chosen, None)

    def make_private_with_epsilon(
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, data_loader: DataLoader[Any],
        target_epsilon: float, target_delta: float, epochs: float, max_grad_norm: float, **options: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Make training private with the least noise that keeps `epochs` passes over the loader within (ε, δ).

        A step beyond those passes raises `BudgetExhausted` and changes nothing.

        Args:
            module: as in `make_private`.
            optimizer: as in `make_private`.
            data_loader: as in `make_private`.
            target_epsilon: ε of the whole run.
            target_delta: δ of the whole run.
            epochs: passes over the loader.
            max_grad_norm: as in `make_private`.
            options: see `Options`.

        Returns:
            As `make_private`.

        Raises:
            ValueError: as `make_private`, or a budget that no noise reaches.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        chosen = self._options(options)
        config, size = configured(chosen, self.accountant.name, (module, optimizer, data_loader), max_grad_norm, epochs)
        plan = config.calibrate(target_epsilon, target_delta, size)
        return self._attach(plan, (module, optimizer, data_loader), chosen, plan.steps)

    def _options(self, options: dict[str, Any]) -> Options:
        if self._step is not None:
            raise ValueError("this engine has made a model private already; use one PrivacyEngine for each model")
        return Options.of(options)

    def _attach(self, plan: Plan, parts: Parts, options: Options, limit: int | None) -> tuple[Any, ...]:
        module, optimizer, _ = parts
        self._step, loader = attached(plan, parts, options, limit)
        self.accountant.attach(plan, self._step.ledger)
        if options.grad_sample_mode == "ghost":
            criterion = options.criterion or nn.CrossEntropyLoss(reduction=options.loss_reduction)
            return module, optimizer, criterion, loader
        return module, optimizer, loader

    def get_epsilon(self, delta: float) -> float:
        """ε of all releases so far at δ; 0 before anything was made private."""
        return self.accountant.get_epsilon(delta)

    @property
    def plan(self) -> Plan:
        """The plan; public. A RuntimeError before anything was made private."""
        return self._private.plan

    @property
    def ledger(self) -> Ledger:
        """The privacy ledger. A RuntimeError before anything was made private."""
        return self._private.ledger

    @property
    def _private(self) -> PrivateStep:
        if self._step is None:
            raise RuntimeError("call make_private or make_private_with_epsilon first")
        return self._step

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
        """Refused by a NotImplementedError: a checkpoint needs nothing of the engine."""
        raise NotImplementedError(
            "save model.state_dict() and optimizer.state_dict() as in plain torch; what was spent is in the ledger, which a "
            "later run continues with make_private(ledger_path=...)"
        )

    load_checkpoint = save_checkpoint

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
