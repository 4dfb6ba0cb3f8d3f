"""Make one private step of a script's own `model(x)`, `loss.backward()` and `optimizer.step()`.

`PrivateStep` has hooks on model and optimizer. Its methods stand in the order of a batch:

    the loader yields a batch     `register_batch`: its recording begins (`_opacus_batch`)
    model(x)                      `_begin_forward`, `_end_forward`: the recording follows the pass
    loss.backward()               the recording takes the gradient of every example
    optimizer.step()              `_begin_step`: clips the gradients and adds them up. After the
                                  last physical batch `_release` charges the ledger, adds noise
                                  and puts the release, and nothing else, into `p.grad`
    the optimizer's own step      reads the release; `_end_step` notes the weights as released

The release stays in `p.grad` until the loader yields the next batch, or the script clears it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from dpkfc.config import Plan
from dpkfc.data.loading import records_of
from dpkfc.distributed.fsdp import list_group_members, trainable_tensors
from dpkfc.gradients.autograd_graph import hide_saved_tensors_hooks
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.eager_mode import is_in_backward
from dpkfc.gradients.hook import Hook
from dpkfc.gradients.layers import Arguments, Keywords
from dpkfc.gradients.model_checks import check_finite, check_unchanged
from dpkfc.gradients.optimizer_step import is_nested_step, register_first_post_hook
from dpkfc.gradients.replica import Replica, replicate_variables
from dpkfc.gradients.state import StateChangedError, erase_written
from dpkfc.gradients.state_check import checked_state
from dpkfc.integrations._opacus_batch import BatchRecording, PhysicalBatch
from dpkfc.integrations._opacus_model_check import (
    check_model,
    check_padding,
    find_public_lengths,
)
from dpkfc.integrations._opacus_numbers import ScriptNumbers
from dpkfc.integrations._pending_batch import PendingBatchGuard
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.privacy.mechanism import ClippedSum
from dpkfc.public_rows.template import find_template
from dpkfc.release_pipeline import ReleasePipeline, set_gradients
from dpkfc.rng_state import preserve_generators, renew
from dpkfc.tensors import copy_tensors
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import forget_batches
from dpkfc.verification.own_generators import refuse_own_generators
from dpkfc.weights import ReleasedWeights, check_recorded_weights, record_weights
from dpkfc.weights_record import read_weights_record

if TYPE_CHECKING:
    from dpkfc.curvature.base import PreconditionerState

# Sees each release before the optimizer steps on it.
StepHook = Callable[[Optimizer], None]
# Scripts read these settings of the plan from a private optimizer. Changing one is refused.
SHOWN = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
_log = logging.getLogger(__name__)


class PrivateStep:
    """Makes `optimizer.step()` private for one model.

    Args:
        plan: sensitivity, noise and divisor.
        model, optimizer: the user's own objects. They get hooks, and no part is replaced.
        ledger: of the same plan.
        loss_reduction: of the user's loss, "mean" or "sum". As in Opacus, with "sum" the gradient
            is not divided by the expected batch size.
        verify: check on public rows, at the first call of the model, that examples do not mix.
        source: the script's own loader, whose collate function may pad.

    Raises:
        ValueError: a model that is not covered.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        ledger: Ledger,
        *,
        loss_reduction: str,
        verify: bool,
        source: DataLoader[Any],
    ) -> None:
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self.ledger = ledger
        self.layers = find_layers(model)
        config = plan.config
        preconditioning = PreconditionerManager(
            config.preconditioner, model, self.layers, probe_limit=config.refresh_rows()
        )
        self._pipeline = ReleasePipeline(
            plan,
            plan.noise_stream(),
            ledger,
            layers=self.layers,
            preconditioning=preconditioning,
            # make_private takes no filters.
            postprocess=PostprocessPipeline((), plan.config.readout),
        )
        self.step = ledger.count
        self._releases_before = ledger.count
        self._parameters = trainable_tensors(model)
        check_not_private(model, optimizer)
        self._clip = plan.config.clip
        self._reduction = loss_reduction
        self._verify = verify
        self._source = source
        self._exact: Unknown | None = None
        self._numbers = ScriptNumbers()
        self._recording: BatchRecording | None = None
        self._summer: ClippedSummer | None = None
        self._token: object = None
        self._has_ended = False
        self._pending_batch = PendingBatchGuard()
        past = read_weights_record(ledger.place) if ledger.place and ledger.count else None
        self.weights = ReleasedWeights(model, past.accepted if past else ())
        self._has_released = False  # in the optimizer's step that runs now
        # Of the passes over a batch. The script's loss may read attributes until its step.
        self._replica: Replica | None = None
        # Of the code of the model, in the passes over a batch. The loss may read what they change.
        self._variables = ExitStack()
        self._pass_variables: Replica | None = None
        self._is_running_model = False
        self._step_hook: StepHook | None = None
        self._clear_gradients()
        shown = {name: getattr(plan, name) for name in SHOWN}
        shown |= optimizer_attributes(optimizer, loss_reduction, self._attach_step_hook)
        wrapper = wrapper_attributes(model, loss_reduction, self._detach)
        self._added = {
            optimizer: add_attributes(optimizer, shown),
            model: add_attributes(model, wrapper),
        }
        begin = Hook(self._begin_forward)
        end = Hook(self._end_forward)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(end, with_kwargs=True, always_call=True),
            optimizer.register_step_pre_hook(self._begin_step),
            register_first_post_hook(optimizer, self._end_step),
        ]

    # -- the loader -------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the work on an unfinished batch, so that no later release contains a part of it.

        The batch itself stays pending.
        """
        self._summer = None
        self._end_recording()
        self._close_replica()

    def _end_recording(self) -> None:
        if self._recording is not None:
            self._recording.end()
        self._recording = None

    def _close_replica(self) -> None:
        """Throw away the replica that the passes of a batch ran on, at its step."""
        self._end_interrupted_pass()
        self._variables.close()
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.close()

    def begin_pass(self) -> object:
        """Begin a pass over the loader, which starts with the pending batch; return its token."""
        self._require_open()
        self.forget()
        self._pending_batch.begin_pass()
        self._token = object()
        return self._token

    @property
    def pending(self) -> Any:
        """Return the indices of the batch that was yielded for training and never released."""
        return self._pending_batch.batch

    def register_batch(self, physical: PhysicalBatch, token: object, batch: Any) -> None:
        """Record the batch that the loader is about to yield.

        Raises:
            RuntimeError: the last batch was never stepped, or another pass over the loader has
                started.
        """
        self._require_open()
        if token is not self._token:
            raise RuntimeError(
                "another pass over the private loader has started; continue the newest one only"
            )
        try:
            self._pending_batch.yield_batch(physical.logical, self.model.training)
        except RuntimeError:
            self.forget()
            raise
        self._clear_gradients()
        self._end_recording()
        self._recording = BatchRecording(
            self.model,
            self.layers,
            physical,
            batch,
            reduction=self._reduction,
            exact=self._exact,
            numbers=self._numbers,
        )

    def check_weights(self) -> None:
        """Check that the model holds weights that the ledger's releases have made.

        Raises:
            LedgerError: this process has made no release, and the record next to the ledger does
                not describe the weights.
        """
        if self._releases_before and self.ledger.count == self._releases_before:
            check_recorded_weights(self.ledger, self.model)

    def record_weights(self) -> None:
        """Record the weights next to the ledger, if this process has made them; never raise."""
        if not self._handles or self.ledger.count == self._releases_before:
            return
        try:
            record_weights(self.ledger, self.weights)
        except (RuntimeError, OSError) as error:
            _log.warning("no digest of the weights is kept next to the ledger: %s", error)

    def should_end(self, yielded: int) -> bool:
        """Return whether a resumed run has no release left for the next batch of a pass.

        The releases that a crash has lost are spent, so a resumed run has fewer than its script
        asks for. It ends early, and the script saves its weights. In a run that was not resumed, a
        further pass is an error.

        Args:
            yielded: the number of batches that the pass has yielded.
        """
        is_resumed = self._releases_before > 0
        has_begun = yielded > 0 or self._has_ended
        if not (is_resumed and self.ledger.remaining == 0 and has_begun):
            return False
        if not self._has_ended:
            warnings.warn(
                f"all {self.ledger.max_releases} releases of the plan are spent,"
                f" {self._releases_before} of them before this run went on: the loader ends here,"
                " and further passes over it are empty",
                UserWarning,
                stacklevel=3,
            )
        self._has_ended = True
        return True

    def finish_pass(self, token: object) -> None:
        """Record that a pass over the loader has come to its end."""
        if token is self._token:
            self._end_recording()
            self._pending_batch.finish_pass()

    # -- the model --------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Prepare for a pass that may be differentiated."""
        recording = self._recording
        if module is not self.model or self._is_busy() or recording is None:
            return
        if not module.training:
            return
        if not torch.is_grad_enabled():
            recording.called_disabled = True
            return
        try:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise ValueError(
                    "the model is called inside of torch.func, which hides its examples; train with"
                    " dpkfc.Session, whose losses may do so"
                )
            # No mode need see what is read of the model here: the script does not call it.
            with torch._C.DisableTorchFunction():
                self._check_unchanged()
                if recording.physical.first and not recording.passes:
                    self.weights.check_before_passes()
            recording.begin_forward()
            self._maybe_verify(args, kwargs, recording)
            # The script's loss is a line of its own, which private rows alone show.
            self.ledger.begin()
        except BaseException:
            self.forget()
            raise
        if self._replica is None:
            self._replica = Replica()
            with torch._C.DisableTorchFunction():
                self._replica.add_model(self.model, has_own_hooks=False)
        self._end_interrupted_pass()
        self._pass_variables = self._variables.enter_context(replicate_variables(self.model, None))
        recording.replica = self._replica
        recording.variables = self._variables
        if recording.size > 1:
            recording.tracker.declare_persistent(self.model.buffers())

    def _maybe_verify(self, args: Arguments, kwargs: Keywords, recording: BatchRecording) -> None:
        """Check the model and the padding on public rows, at the first call with two examples."""
        if not self._verify or recording.size < 2:
            return
        self._is_running_model = True
        try:
            with (
                recording.suspend(),
                hide_saved_tensors_hooks(),
                checked_state(self.model),
                preserve_generators(),
                forget_batches(),
            ):
                batch, collate = recording.batch, self._source.collate_fn
                records = records_of(self._source)
                refuse_own_generators(records, collate)
                template = find_template(records)
                template.warn(stacklevel=4)
                verdict = check_model(
                    self.model,
                    self.layers,
                    args,
                    kwargs,
                    recording.tracker,
                    find_public_lengths(batch, template, collate),
                    expected=self.plan.config.expected_rows,
                )
                check_padding(self.model, args, kwargs, batch, template, collate)
        finally:
            self._is_running_model = False
        self._verify = False
        self._exact = recording.exact = verdict.operation
        if verdict.operation is not None:
            _log.warning("%s", self.gradients)
        verdict.warn(stacklevel=4)

    @property
    def gradients(self) -> str:
        """Say how the gradients of examples are computed, and why."""
        if self._exact is None:
            return "whole batches, with a proved batch axis"
        return (
            f"one example at a time, since {self._exact.operation} hides the batch axis "
            f"({self._exact.reason})"
        )

    @property
    def unprotected_figures(self) -> dict[str, str]:
        """Return what ε does not cover: weights that other code has written."""
        return self.weights.unprotected_figures

    def _is_busy(self) -> bool:
        """Return whether this library itself runs the model, or a checkpoint repeats a pass."""
        recording = self._recording
        is_recording_busy = recording is not None and recording.runs_single_examples
        return self._is_running_model or is_recording_busy or is_in_backward()

    def _end_forward(
        self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any
    ) -> Any:
        """Record a pass; return the outputs of single examples if the batch axis is not proved."""
        recording = self._recording
        if module is not self.model or self._is_busy():
            return None
        try:
            is_followed = module.training and torch.is_grad_enabled() and output is not None
            if recording is None or not is_followed:
                return None
            return recording.end_forward(args, kwargs, output)
        except BaseException:
            self.forget()
            raise
        finally:
            self._end_pass()
            self._check_replica()

    def _end_interrupted_pass(self) -> None:
        """Leave variables as they are where torch called no hook, after a KeyboardInterrupt.

        What the pass has changed cannot be told from what the script has done since.
        """
        if self._pass_variables is not None:
            self._pass_variables.give_up()
            self._pass_variables = None

    def _end_pass(self) -> None:
        """Give back variables that a pass has reached and not changed; all without a proof."""
        replica, self._pass_variables = self._pass_variables, None
        recording = self._recording
        if replica is None or recording is None:
            return
        if recording.exact is not None:
            self._variables.close()
            return
        with recording.pause():
            replica.close_unchanged()

    def _check_replica(self) -> None:
        """Take back what a forward pass wrote into buffers, and refuse a written parameter."""
        if self._replica is None:
            return
        self._replica.renew_buffers()
        fault = erase_written(self._replica)
        if fault:
            raise StateChangedError(fault)

    # -- the optimizer ----------------------------------------------------------------------------

    def _begin_step(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
        """Make the private step of a batch: replace what is in `p.grad` by a release or nothing.

        torch calls this hook before the optimizer's own step.
        """
        if is_nested_step(optimizer):
            return
        if self._recording is not None:
            self._recording.modes.end()
        untracked = self._untracked_gradients()
        self._clear_gradients()
        self._is_running_model = True  # the fallback runs the model again
        try:
            self._check_unchanged()
            self._check_call(args, kwargs)
            self._contribute(untracked)
        except BaseException:
            self._pending_batch.record_failure()
            self.forget()
            raise
        finally:
            self._is_running_model = False
        if not self.plan.test_mode:
            # A generator state that is saved now (the Trainer does) reveals no mask of this batch.
            renew()
        self._close_replica()

    def _check_call(self, args: Arguments, kwargs: Keywords) -> None:
        """Check how `optimizer.step()` was called, and that the plan has a release left."""
        # Accelerate passes closure=None on.
        has_closure = any(x is not None for x in (*args[1:], *kwargs.values()))
        # A GradScaler sets this attribute on a fused optimizer, which divides by the scale.
        has_scale = hasattr(self.optimizer, "grad_scale")
        if has_closure:
            raise RuntimeError(
                "optimizer.step(closure) is not supported; call loss.backward() before "
                "optimizer.step()"
            )
        if has_scale:
            raise RuntimeError(
                "a GradScaler steps this optimizer; remove it and train in bfloat16, which"
                " needs none"
            )
        if self.ledger.remaining == 0:
            raise BudgetExhausted(
                f"all {self.ledger.max_releases} releases of the plan are spent,"
                f" {self._releases_before} of them before this run; stop where"
                " engine.ledger.remaining is 0 (docs/errors.md#budget)"
            )

    def _contribute(self, untracked: list[str]) -> None:
        """Add the physical batch to the sum of its logical batch, and release a complete sum.

        Args:
            untracked: parameters with a gradient that autograd itself has computed.
        """
        recording = self._recording
        if recording is None:
            raise RuntimeError(
                "optimizer.step() without a new batch: each batch of the private loader is released"
                " once; step once for every batch, inside the loop over the loader"
            )
        physical = recording.physical
        self._pending_batch.check(physical.logical)
        self._check_use(recording, untracked)
        if physical.first:
            check_finite(self.layers)
            self._pipeline.preconditioning.refresh(self.step)
            self._summer = ClippedSummer(
                self.layers, self._pipeline.preconditioning.metric, self._clip
            )
        summer = cast(ClippedSummer, self._summer)
        recording.add_to(summer)
        if physical.last:
            self.weights.check_parameters(after_passes=True)
            self._release(summer)
        self._pending_batch.record_step(physical.last)
        vars(self.optimizer)["_is_last_step_skipped"] = not physical.last
        self._end_recording()
        if physical.last and self._step_hook is not None:
            self._call_step_hook(self._step_hook)

    def _release(self, summer: ClippedSummer) -> None:
        """Release the sum of a logical batch: charge, add noise, and put the update in `p.grad`."""
        clipped = ClippedSum(summer.result(), self._clip.max_grad_norm, self._clip.clipping)
        self._summer = None
        released = self._pipeline.release(clipped, self.step)
        update = self._pipeline.make_update(released)
        self.step += 1
        scale = self.plan.expected_batch_size if self._reduction == "sum" else None
        set_gradients(self.optimizer, self._parameters, update, scale=scale)
        self._has_released = True

    def _check_use(self, recording: BatchRecording, untracked: list[str]) -> None:
        """Check what a script did before its step."""
        if self._summer is None and not recording.physical.first:
            raise RuntimeError(
                "an earlier part of this logical batch was lost or never stepped; begin a new loop "
                "over the loader"
            )
        if recording.passes > 1:
            raise RuntimeError(
                f"{recording.passes} losses were differentiated before one optimizer.step(); add"
                " them and call backward() once"
            )
        if recording.size > 0 and not recording.passes:
            recording.check_enabled()
            raise RuntimeError(
                "optimizer.step() without a backward pass through the model: call model.train(),"
                " model() itself and loss.backward(), in the thread that iterates over the loader"
            )
        if untracked:
            raise RuntimeError(
                f"the gradient of '{untracked[0]}' came from outside the forward pass of its own"
                " layer, where it cannot be clipped; a penalty: docs/how-to-opacus.md#penalties"
            )

    def _attach_step_hook(self, hook: StepHook | None) -> None:
        """Store a function that is called with the optimizer between a release and its step.

        It replaces an earlier function, as in Opacus. The ledger counts the releases, whatever the
        function does.
        """
        self._step_hook = hook

    def _call_step_hook(self, hook: StepHook) -> None:
        """Call the hook on a release, which it may read and not change.

        Raises:
            RuntimeError: the hook has changed a gradient, which might not be a release any more.
        """
        parameters = self._parameters
        released: dict[str, Any] = copy.deepcopy({name: p.grad for name, p in parameters.items()})
        hook(self.optimizer)
        for name, p in parameters.items():
            if p.grad is None or not torch.equal(p.grad, released[name]):
                self._clear_gradients()
                raise RuntimeError(
                    f"the step hook has changed the gradient of '{name}'; a hook may read releases"
                    " and change the learning rate only"
                )

    def _end_step(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
        if self._has_released and not is_nested_step(optimizer):
            self.weights.record()
            self._has_released = False

    # -- state ------------------------------------------------------------------------------------

    @property
    def preconditioner(self) -> PreconditionerState | None:
        """Return the preconditioner in force; None before the first step and without one."""
        return self._pipeline.preconditioning.current

    def check_released(self) -> None:
        """Check that the model holds the weights of the last release, as a card needs.

        Raises:
            RuntimeError: nothing was released, or a tensor differs, by its name.
        """
        self.weights.check()

    def released_state(self) -> dict[str, Tensor]:
        """Return the released weights.

        Raises:
            RuntimeError: as `check_released`, or a tensor that is neither a parameter nor a buffer.
        """
        self.check_released()
        state = self.model.state_dict()
        self.weights.check_state(state)
        return copy_tensors(state)

    def _clear_gradients(self) -> None:
        stepped = list_group_members(self.optimizer.param_groups)
        for p in [*self._parameters.values(), *stepped]:
            p.grad = None

    def _untracked_gradients(self) -> list[str]:
        """Return covered parameters with a gradient that autograd itself has computed.

        In the pass of a parameter's own layer, the tape prevents such a gradient.
        """
        untracked = []
        for layer in self.layers:
            if layer.rule == "fallback" or self.model in layer.modules:
                continue
            names = layer.parameters.values()
            untracked += [name for name in names if self._parameters[name].grad is not None]
        return untracked

    def _check_unchanged(self) -> None:
        """Check that model and optimizer are those that were made private, without new hooks.

        Raises:
            RuntimeError: a parameter or a shown setting was changed, by name.
            ValueError: a hook sees gradients.
        """
        check_unchanged(self.model, self.layers, self._parameters)
        members = list_group_members(self.optimizer.param_groups)
        stepped = {id(p) for p in members if p.requires_grad}
        if not stepped.issubset(map(id, self._parameters.values())):
            raise RuntimeError(
                "the optimizer was given a parameter after make_private; make the model private"
                " again"
            )
        for name in SHOWN:
            if getattr(self.optimizer, name) != getattr(self.plan, name):
                raise RuntimeError(
                    f"optimizer.{name} was changed after make_private, but a plan is fixed for its "
                    "whole run; change only the learning rate"
                )

    def _require_open(self) -> None:
        if not self._handles:
            raise RuntimeError(
                "the privacy engine of this loader is closed; make the model private again"
            )

    def close(self) -> None:
        """Remove all hooks. Model and optimizer are then ordinary, and no longer private."""
        self._detach()
        for owner, names in self._added.items():
            for name in names:
                vars(owner).pop(name, None)
        self._added = {}

    def _detach(self) -> None:
        """Remove all hooks and leave what a script may still read of model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()
        self._clear_gradients()


def check_not_private(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that no other engine has hooks on the model or settings on the optimizer.

    Raises:
        ValueError: naming the fix.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Hook) and hook.is_active:
            raise ValueError(
                "the module is private already; close() the engine that made it private"
            )
    for name in SHOWN:
        if hasattr(optimizer, name):
            raise ValueError(
                f"the optimizer has an attribute '{name}', so it belongs to another privacy engine;"
                " pass a new torch optimizer"
            )


# --------------------------------------------------------------------------------------------------
# Scripts read attributes of the wrappers that Opacus puts around model and optimizer. Here nothing
# is wrapped. Attributes that have a meaning here work, and every other one raises an error.

LINE_BY_LINE = "docs/how-to-opacus.md#from-opacus-line-by-line has the line to write"


class Refusal:
    """Stands for an attribute that only Opacus has; every use of it raises an error.

    Args:
        message: of the error.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError with the message."""
        raise RuntimeError(self.message)

    __call__ = __iter__ = __len__ = __getitem__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        # A pickle or copy asks before the message is there.
        raise AttributeError(vars(self).get("message", name))


class WrapperMethod:
    """A method of Opacus's wrapper, on the model itself. A copy or pickle of it has no action.

    Args:
        model: the model, which every call returns.
        action: called first; None where there is nothing to do.
    """

    def __init__(self, model: nn.Module, action: Callable[[], None] | None = None) -> None:
        self._model = model
        self._action = action

    def __call__(self) -> nn.Module:
        if self._action is not None:
            self._action()
        return self._model

    def __reduce__(self) -> tuple[type[WrapperMethod], tuple[nn.Module]]:
        return WrapperMethod, (self._model,)


def wrapper_attributes(
    model: nn.Module, reduction: str, close: Callable[[], None]
) -> dict[str, Any]:
    """Return the attributes of Opacus's `GradSampleModule` that scripts read, by name.

    Args:
        model: the model.
        reduction: of the loss, "mean" or "sum".
        close: removes the hooks of the engine.
    """
    closing = WrapperMethod(model, close)
    harmless = WrapperMethod(model)
    return {
        "_module": model,
        "loss_reduction": reduction,
        "to_standard_module": closing,
        "cleanup": closing,
        "remove_hooks": closing,
        "forbid_grad_accumulation": harmless,
        "set_grad_sample_to_none": harmless,
        "del_grad_sample": harmless,
        **_refusals("model", "allow_grad_accumulation", "enable_hooks", "disable_hooks"),
        **_refusals("model", "add_hooks", "trainable_modules", "trainable_parameters"),
        **_refusals("model", "get_clipping_coef", "get_norm_sample"),
    }


def optimizer_attributes(
    optimizer: Optimizer,
    reduction: str,
    attach_step_hook: Callable[[StepHook | None], None],
) -> dict[str, Any]:
    """Return the attributes of Opacus's `DPOptimizer` that scripts read, by name.

    The settings of the plan (`SHOWN`) are not among them.

    Args:
        optimizer: the script's own.
        reduction: of the loss, "mean" or "sum".
        attach_step_hook: takes a function that sees each release before the optimizer steps on it.
    """
    return {
        "original_optimizer": optimizer,
        "loss_reduction": reduction,
        "accumulated_iterations": 1,
        "_is_last_step_skipped": False,
        "secure_mode": False,
        "params": list_group_members(optimizer.param_groups),
        "attach_step_hook": attach_step_hook,
        # The script does not call this one itself: Opacus's BatchMemoryManager does.
        "signal_skip_step": Refusal(
            "the BatchMemoryManager of Opacus cannot split this loader; write: from"
            " dpkfc.integrations.opacus import BatchMemoryManager"
        ),
        **_refusals("optimizer", "virtual_step", "grad_samples", "clip_and_accumulate"),
        **_refusals("optimizer", "add_noise", "scale_grad", "pre_step", "privacy_engine"),
    }


def _refusals(owner: str, *names: str) -> dict[str, Refusal]:
    return {name: Refusal(f"dpkfc has no {owner}.{name}; {LINE_BY_LINE}") for name in names}


def add_attributes(owner: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Put attributes on an object, except where it has its own; return the names of those added."""
    added = []
    for name, value in attributes.items():
        present = vars(owner).get(name)
        is_ours = present is owner or isinstance(present, (Refusal, WrapperMethod))
        if is_ours or not hasattr(owner, name):
            # torch would take a module for a part of its owner, so the dictionary is written.
            vars(owner)[name] = value
            added.append(name)
    return added
