"""Offer the interface of Opacus 1.6, so that a script runs with only its import changed.

    from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager

`make_private` returns the very model and optimizer that it was given. The model gets hooks that
record its forward passes in training mode, and the optimizer gets hooks around its step. `close()`
removes them. Options of Opacus that this library does not have are refused by name, never ignored.

How the lines of a script make a private step, and where to read it:

    make_private(...)         here, `PrivacyEngine`, and `_opacus_attach`: plan, ledger and hooks
    for x, y in loader:       `_opacus_loader`, `PrivateLoader`: draws and reports a batch
        out = model(x)        `_opacus_batch`, `BatchRecording`: a tracker follows the examples
        loss.backward()       the same: takes the gradient of every example, and writes no `p.grad`
        optimizer.step()      `_opacus_step`, `PrivateStep`: clips, charges and adds noise; then
                              the optimizer itself steps on the release in `p.grad`

`_opacus_model_check` checks the model on public rows at its first call, `_pending_batch` knows
which batch has to be stepped next, `_opacus_options` holds the keywords of `make_private`,
`_opacus_accountant` the accountant, and `_opacus_validator` the validator of models. This file ends
with the names of Opacus that a script must not import.

Visible differences:

* The preconditioner: `preconditioner=KFAC(...)`, with `readout="natural"` for the natural-gradient
  step.
* q = batch_size / len(dataset), and the divisor is batch_size. Opacus computes both from
  len(data_loader), which is rounded.
* Noise and sampling are keyed by the operating system, and no generator reaches them.
  `test_mode_seed` makes a run repeatable and not private.
* The accountant is PLD by default ("prv" names the same numerical composition and selects it).
* These raise an error: a model or loss that mixes examples, a skipped batch, two backward passes
  before a step, a penalty on weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpkfc import checkpoint, resume_checks
from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan
from dpkfc.gradients.discovery import find_layers
from dpkfc.integrations._opacus_accountant import Accountant
from dpkfc.integrations._opacus_attach import Parts, attach, make_config
from dpkfc.integrations._opacus_loader import BatchMemoryManager, find_source
from dpkfc.integrations._opacus_options import Options
from dpkfc.integrations._opacus_step import LINE_BY_LINE, PrivateStep
from dpkfc.integrations._opacus_validator import ModuleValidator
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import Ledger

__all__ = ["Accountant", "BatchMemoryManager", "ModuleValidator", "Options", "PrivacyEngine"]


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, as `opacus.PrivacyEngine` does.

    One engine serves one model.

    Args:
        accountant: "pld" (default), "prv" (the same) or "rdp".
        secure_mode: must be False. For protection against floating-point attacks use a `Session`
            with `noise="rounded"`. On a CPU the noise comes from a cipher without it.
        budget: of the people in the dataset. The whole plan of `make_private_with_epsilon` is
            charged to it once for each ledger, before the model runs on the first private batch. A
            model that mixes examples is refused before, a loss that does so after the charge.

    Raises:
        ValueError: another accountant, secure_mode=True, or what `make_private` takes.

    Guarantee:
        Each `optimizer.step()` that ends a logical batch is one release of the plan's event, in the
        ledger before it exists. A loss that is not a mean (or sum, as declared) of per-example
        losses is refused, before its batch contributes.
    """

    def __init__(
        self,
        *parts: Any,
        accountant: str = "pld",
        secure_mode: bool = False,
        budget: Budget | None = None,
        **others: Any,
    ) -> None:
        if parts or others:
            names = [*(type(part).__name__ for part in parts), *(f"{name}=" for name in others)]
            raise ValueError(
                f"PrivacyEngine takes accountant=, secure_mode= or budget=, not {names[0]:.30};"
                " model, optimizer, loader and noise go to make_private(module=, ...)"
            )
        if secure_mode:
            raise ValueError(
                "secure_mode=True is not supported; leave it out (noise is a cipher's), or take a"
                " Session with PrivacyConfig(noise='rounded')"
            )
        self._budget = budget
        self.secure_mode = secure_mode
        self.accountant = Accountant(accountant)
        self._step: PrivateStep | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with a given noise; steps have no limit, and ε grows with each.

        The plan in the ledger covers ONE pass over the loader, and its δ is only descriptive.
        `get_epsilon(delta)` counts what was released, at any δ.

        Args:
            module: the model.
            optimizer: a torch optimizer of exactly its trainable parameters.
            data_loader: a torch DataLoader with a batch_size over a map-style dataset.
            noise_multiplier: standard deviation of the noise over max_grad_norm; 0 means no noise
                and no privacy.
            max_grad_norm: clipping norm C, measured in the coordinates of the preconditioner.
            options: see `Options`.

        Returns:
            The same module, the same optimizer and a private loader. With grad_sample_mode="ghost"
            the criterion comes before the loader.

        Raises:
            ValueError: a part cannot be made private, naming the fix; nothing has been changed.
            LedgerError: the ledger cannot be written or belongs to another run.
        """
        parts = (module, optimizer, find_source(data_loader))
        chosen = self._parse(options)
        config, size = make_config(chosen, self.accountant.name, parts, max_grad_norm, 1.0)
        ledger_delta = min(1e-5, 0.1 / max(1, size))
        plan = config.with_noise(noise_multiplier, ledger_delta, size)
        return self._attach(plan, parts, chosen, None)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make training private with the least noise for `epochs` passes within (ε, δ).

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
        parts = (module, optimizer, find_source(data_loader))
        chosen = self._parse(options)
        config, size = make_config(chosen, self.accountant.name, parts, max_grad_norm, epochs)
        plan = config.calibrate(target_epsilon, target_delta, size)
        return self._attach(plan, parts, chosen, plan.steps)

    def _parse(self, options: dict[str, Any]) -> Options:
        if self._step is not None:
            raise ValueError(
                "this engine has made a model private already; use one PrivacyEngine for each"
                " model: engine = PrivacyEngine() before make_private"
            )
        return Options.parse(options)

    def _attach(
        self, plan: Plan, parts: Parts, options: Options, max_releases: int | None
    ) -> tuple[Any, ...]:
        module, optimizer, _ = parts
        self._step, loader = attach(plan, parts, options, max_releases, self._budget)
        self.accountant.attach(plan, self._step.ledger)
        if options.grad_sample_mode == "ghost":
            criterion = options.criterion or nn.CrossEntropyLoss(reduction=options.loss_reduction)
            return module, optimizer, criterion, loader
        return module, optimizer, loader

    def get_epsilon(self, delta: float) -> float:
        """Return ε of all releases so far at δ; 0 before `make_private`."""
        return self.accountant.get_epsilon(delta)

    @property
    def plan(self) -> Plan:
        """Return the plan, which is public; raise a RuntimeError before `make_private`."""
        return self._private.plan

    @property
    def ledger(self) -> Ledger:
        """Return the privacy ledger; raise a RuntimeError before `make_private`."""
        return self._private.ledger

    @property
    def _private(self) -> PrivateStep:
        if self._step is None:
            raise RuntimeError("call make_private or make_private_with_epsilon first")
        return self._step

    def write_card(self, folder: StrPath, **statements: Any) -> dict[str, Any]:
        """Write weights, ledger and privacy card, as `Session.write_card` does."""
        from dpkfc.report.card import session_card
        from dpkfc.report.card_files import write_weights_and_card

        card = session_card(self, **statements)
        return write_weights_and_card(folder, self._private.released_state(), self.ledger, card)

    def accept_weights(self) -> None:
        """Continue from weights that you have written between two releases; the card says so.

        As `Session.accept_weights`.
        """
        self._private.weights.accept(self.ledger.count)

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Check that a module can be trained privately; the ValueError names the fixes."""
        find_layers(module)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Return whether `validate` would pass."""
        return ModuleValidator.is_valid(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return what `ModuleValidator.fix_and_validate` returns."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: StrPath,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint without the ledger into the FOLDER `path`, without pickle.

        Args:
            path: a folder of its own; an earlier checkpoint in it is replaced.
            module: the model.
            optimizer: the optimizer.
            noise_scheduler: only None.
            grad_clip_scheduler: only None.
            checkpoint_dict: further plain values and tensors, which `load_checkpoint` returns.
            module_state_dict_kwargs: of `module.state_dict`.
            torch_save_kwargs: accepted and ignored.

        Raises:
            CheckpointError: the folder cannot be written or holds other files.
            ValueError: a schedule of noise or clip.
        """
        _refuse_schedules(noise_scheduler, grad_clip_scheduler)
        if not isinstance(path, (str, os.PathLike)) or os.path.isfile(path):
            raise checkpoint.CheckpointError(
                f"path={str(path)!r:.60} is a file; a checkpoint is a folder here, so give the name"
                " of a new one"
            )
        state = module.state_dict(**(module_state_dict_kwargs or {}))
        saved = {
            **(checkpoint_dict or {}),
            "module_state_dict": dict(state),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
        }
        if optimizer is not None:
            saved["optimizer_state_dict"] = optimizer.state_dict()
        checkpoint.write(path, {}, saved)

    def load_checkpoint(
        self,
        *,
        path: StrPath,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save_checkpoint`; the ledger must hold what was spent on it.

        Args:
            path: the folder.
            module: the model, after `make_private(..., ledger_path=..., resume=True)`.
            optimizer: the optimizer; None leaves its state out.
            noise_scheduler: only None.
            grad_clip_scheduler: only None.
            module_load_dict_kwargs: of `module.load_state_dict`.
            torch_load_kwargs: accepted and ignored.

        Returns:
            The checkpoint without the state of the optimizer.

        Raises:
            CheckpointError: missing, damaged, or of another model or optimizer.
            ValueError: the ledger does not hold the releases; nothing is loaded then.
        """
        _refuse_schedules(noise_scheduler, grad_clip_scheduler)
        _, saved = checkpoint.read(path)
        with resume_checks.explain_misfits(path):
            spent, weights = saved["privacy_accountant_state_dict"], saved["module_state_dict"]
        self.accountant.load_state_dict(spent)
        if not module_load_dict_kwargs:
            resume_checks.check_same_tensors(module.state_dict(), weights)
        with resume_checks.explain_misfits(path):
            module.load_state_dict(weights, **(module_load_dict_kwargs or {}))
        state = saved.pop("optimizer_state_dict", None)
        if optimizer is not None and state is not None:
            resume_checks.load_optimizer(optimizer, state)
        if self._step is not None and self._step.model is module:
            self._step.weights.record()
        return saved

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse a name that only an engine of Opacus has."""
        raise AttributeError(f"PrivacyEngine has no {name!r}; {LINE_BY_LINE}")

    def close(self) -> None:
        """Remove all hooks, record the weights next to the ledger and close it.

        Model and optimizer are then NOT private.
        """
        if self._step is not None:
            self._step.record_weights()
            self._step.close()
            self._step.ledger.close()

    def __enter__(self) -> PrivacyEngine:
        """Return the engine itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine."""
        self.close()


def _refuse_schedules(noise_scheduler: Any, grad_clip_scheduler: Any) -> None:
    """Refuse schedules of noise and clipping norm, since a plan fixes both."""
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "schedulers in a checkpoint are not supported: noise, clip and batch size are fixed "
            "for the whole run; leave them out"
        )


# --------------------------------------------------------------------------------------------------
# Names that scripts import from Opacus beside its engine.

# No other name may raise an ImportError: pickle asks all modules for names.
_OF_OPACUS = re.compile(
    "DP[A-Z]|GradSample|GradClip|DPOptimizer|Noise$|Accountant|DifferentiallyPrivate|AdaptiveClip"
    "|Sampler$|ModuleError|ConfigurationError|^register_|^wrap_|^prepare_module|^create_accountant"
    "|^get_optimizer_class|^get_noise_multiplier"
)


def __getattr__(name: str) -> NoReturn:
    """Refuse an import of a name that only Opacus has.

    Raises:
        ImportError: a name of Opacus.
        AttributeError: any other name.
    """
    if _OF_OPACUS.search(name):
        raise ImportError(f"dpkfc.integrations.opacus has no {name}; {LINE_BY_LINE}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
