"""One private step out of a script's own `model(x)`, `loss.backward()` and `optimizer.step()`.

From the loader to `loss.backward()` a tracker follows what the script does with a batch (`_recording`). A hook before the
optimizer's step turns the gradients of the examples into a clipped sum, charges the ledger and puts the release, and nothing
else, into `p.grad`.

    loader draws → forward → backward → optimizer.step():  clipped sum → (last physical batch?) → release → p.grad
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from dpkfc.config import Plan
from dpkfc.data.checks import check_probes
from dpkfc.gradients.clipping import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.state import (
    AttributeSnapshot,
    check_finite,
    checked_state,
    refuse_gradient_hooks,
    restore_attributes,
    restored_state,
)
from dpkfc.integrations._opacus_batch import BatchRecording, check_model, check_padding
from dpkfc.integrations._opacus_loader import Drawn
from dpkfc.postprocess.pipeline import Chain
from dpkfc.preconditioning import Coordinates
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.privacy.mechanism import ClippedSum, release
from dpkfc.rng_state import kept_numbers, renew
from dpkfc.session import GradientTally
from dpkfc.tracking.axes import Unknown

if TYPE_CHECKING:
    from dpkfc.curvature.kfac import Preconditioner


# --------------------------------------------------------------------------------------------------
# Which batch of the private loader has to be stepped next: a batch that was handed out may not be
# left out.
#
# Which batches a run leaves out could depend on what is in them, and then the sampler would not be
# the one that ε is computed for. A batch handed out in training mode therefore stays owed until it
# is released: leaving the loop, an error or a new pass do not take it away, and the next pass
# begins with it. A pass in which no batch is stepped, and that is handed out in evaluation mode,
# only looks at the data and owes nothing.

_EVALUATE = "evaluate in model.eval(), called before the loop over the loader"


class Owed:
    """Keeps the logical batch that must be released before any other.

    Attributes:
        batch: its indices, None where nothing is owed. PRIVATE.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self._for_good = False  # handed out in training mode, or in a pass with steps
        self._left_out = False  # by a pass in evaluation mode that was not finished
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._open = self._training = self._stepped = self._failed = self._skipped = False

    def begin(self) -> None:
        """A pass begins: it starts with what the last one owes."""
        self._left_out |= self._skipped
        self._for_good |= self._open and self._stepped
        self._begin_pass()

    def hand_out(self, batch: Any, training: bool) -> None:
        """A physical batch is about to be handed out.

        Args:
            batch: the indices of its logical batch, always the same object.
            training: whether the model is in training mode.

        Raises:
            RuntimeError: the last one was not stepped.
        """
        if self._failed or (self._open and (self._training or self._stepped)):
            self._for_good, self._open, self._failed = True, False, True
            raise RuntimeError(
                "the last batch of the private loader was not followed by optimizer.step(); a drawn batch may not be skipped "
                "or accumulated, because which ones are left out would depend on private data. Call step() for every batch, "
                f"empty ones included; for larger batches raise batch_size and use BatchMemoryManager; {_EVALUATE}. "
                "A new loop over the loader begins with the batch that is missing"
            )
        if self._open:
            self._skip()
        if self.batch is None:
            self.batch = batch
        if self.batch is batch:
            self._for_good |= training
        self._open, self._training = True, training

    def _skip(self) -> None:
        self._skipped, self._open = True, False
        if not self._for_good:
            self.batch = None

    def finish(self) -> None:
        """The pass has come to its end."""
        if self._open and not (self._training or self._stepped):
            self._skip()
        self._for_good |= self._open
        self._begin_pass()

    def check(self, batch: Any) -> None:
        """Raise unless the batch that was handed out last may be stepped.

        Args:
            batch: the indices of its logical batch.

        Raises:
            RuntimeError: another batch is owed, or one beside it was left out.
        """
        if self.batch is not batch:
            raise RuntimeError(
                "an earlier batch of the private loader was never stepped, and no other may be in its place; begin a new loop "
                f"over the loader, in training mode: the missing batch comes first. To look at the data, {_EVALUATE}"
            )
        if not self._training and (self._skipped or self._left_out):
            raise RuntimeError(
                "this batch was handed out in evaluation mode, in which an earlier one was left out: which batches are trained "
                "on would depend on private data. Call model.train() before the loop over the loader, and go through the whole "
                "loader where you evaluate on it"
            )

    def step_done(self, last: bool) -> None:
        """The physical batch was stepped; `last`: and its logical batch released."""
        self._open, self._stepped, self._for_good = False, True, not last
        if last:
            self.batch = None

    def fail(self) -> None:
        """A step ended in an error: nothing else is handed out in this pass."""
        self._failed |= self._open
        self._for_good |= self._open
        self._open = False


# --------------------------------------------------------------------------------------------------
# What is checked of a script's model and optimizer before anything is released.


# Settings of the plan that scripts read from a private optimizer; a change of them is refused at the next step.
SHOWN = ("noise_multiplier", "max_grad_norm", "expected_batch_size")


class Hook:
    """A hook of the model that its copies and pickles do not carry on."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self.__name__ = "dpkfc_hook"

    def __call__(self, *arguments: Any) -> Any:
        return None if self._function is None else self._function(*arguments)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Asked for by torch.jit.script alone, which compiles the hooks of a module with it."""
        raise RuntimeError(
            "torch.jit.script would compile the hooks of the privacy engine with the model; call engine.close() first and script "
            "the model itself"
        )

    @property
    def alive(self) -> bool:
        """Whether it still does anything."""
        return self._function is not None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless the optimizer holds exactly the trainable parameters of the model.

    Raises:
        ValueError: naming the first parameter that only one of the two has.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items():
        if p not in held:
            raise ValueError(
                f"the optimizer does not hold trainable parameter '{name}'; pass it to the optimizer or freeze it with "
                "requires_grad_(False)"
            )
    own = set(parameters.values())
    for p in held:
        if p.requires_grad and p not in own:
            raise ValueError(
                f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not in the model, which would "
                "never get a private gradient; build the optimizer from model.parameters()"
            )


def check_untouched(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if another engine has its hooks on the model or its settings on the optimizer.

    Raises:
        ValueError: naming the fix.
    """
    if any(isinstance(hook, Hook) and hook.alive for hook in model._forward_pre_hooks.values()):
        raise ValueError("the module is private already; close() the engine that made it so first")
    for name in SHOWN:
        if hasattr(optimizer, name):
            raise ValueError(
                f"the optimizer has an attribute '{name}' already: it belongs to another privacy engine; pass a new torch "
                "optimizer"
            )


# --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class PrivateStep:
    """Makes `optimizer.step()` private for one model.

    Args:
        plan: sensitivity, noise and divisor.
        model, optimizer: the user's own objects; they get hooks, and nothing of them is replaced.
        ledger: of the same plan.
        loss_reduction: of the user's loss, "mean" or "sum". As in Opacus, "sum" also leaves the division of the
            gradient by the expected batch size out.
        verify: check on public rows, at the first call of the model, that examples do not mix. "strict" refuses operations whose
            batch axis cannot be followed.
        source: the script's own loader, whose collate function may pad; None leaves that out.

    Raises:
        ValueError: a model that is not covered, or an optimizer of other parameters.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        *,
        loss_reduction: str = "mean",
        verify: bool | str = True,
        source: DataLoader[Any] | None = None,
    ) -> None:
        self.plan, self.model, self.optimizer, self.ledger = plan, model, optimizer, ledger
        self.layers = find_layers(model)
        self._coordinates = Coordinates(plan.config.preconditioner, model, self.layers, rows=plan.config.refresh_rows())
        self._chain = Chain((), plan.config.readout)  # make_private takes no filters
        self.step = self._before = ledger.count
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_optimizer(optimizer, self._parameters)
        check_untouched(model, optimizer)
        if source is not None:
            check_probes(plan.config.preconditioner, source.dataset)
        self._clip = plan.config.clip(layer.name for layer in self.layers)
        self._noise = plan.noise_stream()
        self._reduction = loss_reduction
        self._verify, self._source = verify, source
        self._exact: Unknown | None = None
        self._entry_weight: float | None = None
        self._batch_recording: BatchRecording | None = None
        self._token: object = None
        self._ended = False
        self._owed, self._tally = Owed(), GradientTally()
        self._guards: ExitStack | None = None
        self._attributes: AttributeSnapshot | None = None
        self._busy = False
        self.forget()
        self._clear()
        for name in SHOWN:
            setattr(optimizer, name, getattr(plan, name))
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(Hook(self._after_forward), with_kwargs=True, always_call=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # -- the loader -----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the work on an unfinished batch: nothing of it can reach a later release. The batch itself stays owed."""
        self._drawn: Drawn | None = None
        self._summer: ClippedSummer | None = None
        self._batch: Any = None
        self._end_recording()
        self._end_guards()
        self._put_attributes_back()

    def _end_recording(self) -> None:
        recording = self._batch_recording
        if recording is not None:
            recording.end()
        self._batch_recording = self._batch = None

    def _put_attributes_back(self) -> None:
        """Of what passes left on modules, nothing outlives the step of their batch."""
        before, self._attributes = self._attributes, None
        if before is not None:
            restore_attributes(self.model, before)

    def _end_guards(self) -> None:
        """Check what a forward pass has left in the model, also one that an interrupt has ended."""
        guards, self._guards = self._guards, None
        if guards is not None:
            guards.close()

    def begin(self) -> object:
        """A pass over the loader begins, with the batch that is `missing`."""
        self._require_open()
        self.forget()
        self._owed.begin()
        self._token = object()
        return self._token

    @property
    def missing(self) -> Any:
        """Indices of the logical batch that was handed out to be trained on and never released; None where there is none."""
        return self._owed.batch

    def draw(self, drawn: Drawn, token: object, batch: Any) -> None:
        """The loader is about to hand out a batch.

        Raises:
            RuntimeError: the last batch was never stepped, or another pass over the loader has begun since.
        """
        self._require_open()
        if token is not self._token:
            raise RuntimeError("another pass over the private loader has begun; only the newest one can be continued")
        try:
            self._owed.hand_out(drawn.logical, self.model.training)
        except RuntimeError:
            self.forget()
            raise
        self._clear()
        self._end_recording()
        self._drawn, self._batch = drawn, batch
        self._batch_recording = BatchRecording(
            self.model,
            self.layers,
            drawn.size,
            batch,
            reduction=self._reduction,
            exact=self._exact,
            entry_weight=self._entry_weight,
        )

    def ends(self, handed: int) -> bool:
        """Whether a pass that has handed out so many batches has to end: a resumed run has no release left for the next.

        The releases that a crash has lost are spent, so such a run has fewer than its script asks for. It ends where they do,
        and with what it has: the script saves its weights. Where nothing was cut short, another pass is an error as ever.
        """
        if not (self._before and self.ledger.remaining == 0 and (handed or self._ended)):
            return False
        if not self._ended:
            warnings.warn(
                f"all {self.ledger.max_releases} releases of the plan are spent, {self._before} of them before this run went on: "
                "the loader ends here, and further passes over it are empty",
                UserWarning,
                stacklevel=3,
            )
        self._ended = True
        return True

    def finish(self, token: object) -> None:
        """A pass over the loader has come to its end."""
        if token is self._token:
            self._end_recording()
            self._owed.finish()
            self._tally.warn()

    # -- the model ------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare for a pass that may be differentiated."""
        recording = self._batch_recording
        if module is not self.model or self._is_busy() or recording is None or not torch.is_grad_enabled():
            return
        self._end_guards()  # torch calls no hook after a KeyboardInterrupt
        if not module.training:
            return
        self._check_unchanged()
        recording.before_forward()
        self._check_once(args, kwargs, recording)
        self._attributes = self._attributes or AttributeSnapshot(self.model)  # the script's loss may read them until its step
        guards = ExitStack()
        guards.enter_context(restored_state(self.model))
        self._guards = guards

    def _check_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], recording: BatchRecording) -> None:
        """Check the model and the padding of the loader on public rows, at the first call with two examples or more."""
        if not self._verify or recording.size < 2 or recording.tracker is None:
            return
        self._busy = True  # the check runs the model itself
        try:
            with recording.suspended(), checked_state(self.model), kept_numbers():
                strict = self._verify == "strict"
                expected = self.plan.config.expected_rows
                verdict = check_model(self.model, self.layers, args, kwargs, recording.tracker, expected, strict)
                if self._source is not None:
                    check_padding(self.model, args, kwargs, self._batch, self._source)
        finally:
            self._busy = False
        self._verify = False
        self._exact = recording.exact = verdict.operation
        if verdict.operation is not None:
            _log.warning("%s", self.gradients)
        verdict.warn(stacklevel=4)

    @property
    def gradients(self) -> str:
        """Say how the gradients of examples are computed, and what makes it so."""
        if self._exact is None:
            return "whole batches, with a proved batch axis"
        return f"one example at a time, since {self._exact.operation} hides the batch axis ({self._exact.reason})"

    def _is_busy(self) -> bool:
        """Return whether this library itself runs the model."""
        return self._busy or (self._batch_recording is not None and self._batch_recording.runs_single_examples)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take note of a pass; hand on the outputs of single examples where the batch axis is not proved."""
        recording = self._batch_recording
        if module is not self.model or self._is_busy():
            return None
        if recording is None or not torch.is_grad_enabled() or output is None:
            self._end_guards()
            return None
        self._busy = True  # single examples run the model itself
        try:
            return recording.after_forward(args, kwargs, output) if module.training else None
        finally:
            self._busy = False
            self._end_guards()

    # -- the optimizer --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace whatever is in `p.grad` by a release, or by nothing."""
        strays = self._strays()
        self._clear()
        self._busy = True  # the fallback runs the model again
        try:
            if any(x is not None for x in (*args[1:], *kwargs.values())):  # Accelerate passes closure=None on
                raise RuntimeError(
                    "optimizer.step(closure) is not supported; call loss.backward() before optimizer.step()"
                )
            self._check_unchanged()
            if hasattr(optimizer, "grad_scale"):  # a GradScaler leaves it to a fused optimizer to divide by the scale
                raise RuntimeError(
                    "a GradScaler steps this optimizer; leave it out and train in bfloat16, which needs none"
                )
            if self.ledger.remaining == 0:
                raise BudgetExhausted(
                    f"all {self.ledger.max_releases} releases of the plan are spent, {self._before} of them in the ledger before "
                    "this run; nothing was released. Train for no more epochs than make_private_with_epsilon was given, and end "
                    "the loop where engine.ledger.remaining is 0"
                )
            self._contribute(strays)
        except BaseException:
            self._owed.fail()
            self.forget()
            raise
        finally:
            self._busy = False
        if not self.plan.test_mode:
            renew()  # a state that somebody saves now (the Trainer does) tells no mask of this batch
        self._put_attributes_back()

    def _contribute(self, strays: list[str]) -> None:
        """Add the physical batch to the sum of its logical batch, and release that where it ends."""
        drawn = self._drawn
        if drawn is None:
            raise RuntimeError(
                "optimizer.step() without a new batch: each batch of the private loader is released once. Step once for every "
                "batch, inside the loop over the loader that make_private returned"
            )
        self._owed.check(drawn.logical)
        if not drawn.first and self._summer is None:
            raise RuntimeError(
                "an earlier part of this logical batch was lost or never stepped; begin a new loop over it"
            )
        recording = self._one_pass(drawn)
        self._entry_weight = recording.entry_weight
        if strays:
            raise RuntimeError(
                f"the gradient of '{strays[0]}' came from outside the forward pass of its own layer (a weight used elsewhere, a "
                "penalty on weights, a backward pass in eval mode), where it cannot be clipped for each example; use the "
                "optimizer's weight_decay for a penalty and zero_grad() after other backward passes"
            )
        if drawn.first:
            check_finite(self.layers)
            self._coordinates.refresh(self.step)  # of the probe, released weights, releases and the step only
            self._summer = ClippedSummer(self.layers, self._coordinates.metric, self._clip)
        assert self._summer is not None
        for norms in recording.add_to(self._summer):
            self._tally.add(norms)
        if drawn.last:
            self._release(self._summer)
        self._owed.step_done(drawn.last)
        self._drawn = None
        self._end_recording()

    def _one_pass(self, drawn: Drawn) -> BatchRecording:
        """Return the recording of the batch that was drawn, whose loss was differentiated once."""
        recording = self._batch_recording
        if recording is None:
            raise RuntimeError("optimizer.step() without a batch of the private loader; step inside the loop over it")
        if recording.passes > 1:
            raise RuntimeError(
                f"{recording.passes} losses were differentiated before one optimizer.step(); add them and call backward() once"
            )
        if drawn.size and not recording.passes:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the model in training mode; call model.train(), "
                "loss = criterion(model(x), y) on the model that make_private returned, and loss.backward()"
            )
        return recording

    def _release(self, summer: ClippedSummer) -> None:
        clipped = ClippedSum(summer.result(), self._clip.max_grad_norm, self._clip.clipping)
        self._summer = None
        released = release(clipped, self.plan, self._noise, self.ledger, self.step)
        self._coordinates.observe(released)
        handed = self._chain.apply(released, self._coordinates.metric, self.layers)
        self.step += 1
        factor = 1.0 if self._reduction == "mean" else float(self.plan.expected_batch_size)
        for name, p in self._parameters.items():
            p.grad = (handed.gradients[name] * factor).to(p.dtype)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clear()

    # -- the preconditioner ---------------------------------------------------------------------------------

    @property
    def preconditioner(self) -> Preconditioner | None:
        """The preconditioner in force; None before the first step, and without one."""
        return self._coordinates.current

    # -- care -----------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in [*self._parameters.values(), *held]:
            p.grad = None

    def _strays(self) -> list[str]:
        """Covered parameters with a gradient of autograd's own: the tape keeps it from computing any."""
        covered = [x for x in self.layers if x.rule != "fallback" and self.model not in x.modules]
        return [full for x in covered for full in x.parameters.values() if self._parameters[full].grad is not None]

    def _check_unchanged(self) -> None:
        """Raise if the model or the optimizer is not the one that was made private, or a hook is shown gradients."""
        refuse_gradient_hooks(self.model)
        for layer in self.layers:
            for role, full in layer.parameters.items():
                if layer.tensor(role) is not self._parameters[full] or not self._parameters[full].requires_grad:
                    raise RuntimeError(
                        f"parameter '{full}' was replaced or frozen after make_private; change the model before it"
                    )
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {id(p) for p in self._parameters.values()}
        if any(p.requires_grad and id(p) not in known for p in [*self.model.parameters(), *held]):
            raise RuntimeError("a parameter was unfrozen or added after make_private; make the model private again")
        for name in SHOWN:
            if getattr(self.optimizer, name) != getattr(self.plan, name):
                raise RuntimeError(
                    f"optimizer.{name} was changed after make_private; a plan is fixed for its whole run: noise, clip and batch "
                    "size have no schedules (a schedule of the learning rate is free)"
                )

    def _require_open(self) -> None:
        if not self._handles:
            raise RuntimeError("the privacy engine of this loader is closed; make the model private again")

    def close(self) -> None:
        """Take all hooks off again: model and optimizer are ordinary, and no longer private."""
        self._tally.warn()
        for handle in self._handles:
            handle.remove()
        for name in SHOWN if self._handles else ():
            delattr(self.optimizer, name)
        self._handles = []
        self.forget()
        self._clear()
