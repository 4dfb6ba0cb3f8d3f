"""The pass over one logical batch: every micro-batch forward, backward, clipped and summed.

Nothing of a pass outlives it: the sum is built in local values. An exception in the middle of a
pass leaves no private tensor behind, and the whole batch can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpkfc.distributed import local, trainable_tensors
from dpkfc.gradients.clipping import Clip, ClippedSummer, Groups
from dpkfc.gradients.fallback import blocks_of_one, gradient_of
from dpkfc.gradients.internals import has_batch_in_place
from dpkfc.gradients.layers import MATRICES, Call, Calls, Layer, named_tensors
from dpkfc.gradients.rules import blocks_of, settled
from dpkfc.gradients.state import (
    Augmentation,
    augmented,
    check_finite,
    loss_state_restored,
    restored_attributes,
    restored_state,
)
from dpkfc.gradients.tape import Tape, check_losses
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric, NamedTensors
from dpkfc.rng_state import device_of, randomize_generators, restarter
from dpkfc.tracking import Tracker, Unknown

LossFn = Callable[[nn.Module, Any], Tensor]
"""Maps the model and a batch to one loss a row `[n]`."""

# --------------------------------------------------------------------------------------------------
# The gradient of an example by definition: plain autograd on a micro-batch of that example alone.
#
# Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same
# result.


def example_gradient(
    model: nn.Module, loss_fn: LossFn, batch: Any, weight: float = 1.0
) -> NamedTensors:
    """Return the gradient of the loss of one example.

    Args:
        model: in the mode in which it is trained.
        loss_fn: maps model and batch to losses `[1]`.
        batch: a batch of one example.
        weight: a factor of the loss.

    Returns:
        Parameter name to gradient, dense. Parameters that the loss does not use are absent.

    Raises:
        ValueError: losses of another shape.
    """
    losses = loss_fn(model, batch)
    check_losses(losses, 1)
    if losses.grad_fn is None:
        return {}
    return gradient_of(model, losses.sum() * weight)


def add_gradients(total: NamedTensors, gradients: Mapping[str, Tensor]) -> None:
    """Add the gradient of one row to that of its privacy unit, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient


# --------------------------------------------------------------------------------------------------
# The contribution of every layer to a loss, as curvature reads it.

_BY_INPUT = ("linear", "conv", "embedding")  # blocks that show inputs


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    For public probes: where the place of the examples is not proved, the leading axis is used.

    Under `torch.no_grad()` there is no backward pass. Linear layers, convolutions and embeddings
    then show their inputs, with zeros for output gradients. Other layers are left out.

    Args:
        model: the model. Its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.

    Returns:
        Layer name to block, formed on access. `blocks.write_out_patches` writes out the patches of
        a convolution. `b` is the gradient of each example's own loss, whatever N is.

    Raises:
        ValueError: as `Tape.backward`.
    """
    is_differentiated = torch.is_grad_enabled()
    recorded = layers
    if not is_differentiated:
        recorded = [layer for layer in layers if layer.rule in _BY_INPUT]
    tape = Tape(model, recorded, lenient=True)
    with tape:
        losses = loss(model)
    tape.check_enabled()
    check_losses(losses)
    # A loss may stand for several rows, but never for a part of one.
    if tape.size is not None and tape.size % max(1, len(losses)):
        check_losses(losses, tape.size)
    calls = tape.backward(losses) if is_differentiated else tape.inputs()
    return _Contributions(layers, calls, losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is read, without the patches of a convolution."""

    def __init__(self, layers: Sequence[Layer], calls: Calls, batch_size: int) -> None:
        self._layers: dict[str, Layer] = {}
        for layer in layers:
            if _has_rows(layer, calls.get(layer.name), batch_size):
                self._layers[layer.name] = layer
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block: Any = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        contribution: Block = block.make_factor_block()
        return contribution

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _has_rows(layer: Layer, calls: Sequence[Any] | None, batch_size: int) -> bool:
    """Return whether a layer was called, and every call shows which rows belong to which example.

    A matrix that is used outside of its layer too has no rows from which a factor could be made.
    """
    if calls is None:
        return False
    is_recorded = all(isinstance(call, Call) for call in calls)
    if layer.rule in MATRICES:
        return is_recorded
    if layer.rule != "recurrent":
        return True
    return is_recorded and all(has_batch_in_place(call, batch_size) for call in calls)


# --------------------------------------------------------------------------------------------------


def unknown_row(model: nn.Module, error: BaseException) -> str | None:
    """Return a message on the embedding that was asked for a row that it does not have.

    The offending id is private data and is not repeated.

    Args:
        model: whose modules are named.
        error: an IndexError. Its traceback holds the module that was running.

    Returns:
        None where no embedding raised the error.
    """
    trace = error.__traceback__
    embedding: nn.Embedding | None = None
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Embedding):
            embedding = module
        trace = trace.tb_next
    if embedding is None:
        return None
    paths = [path for path, module in model.named_modules() if module is embedding]
    name = paths[0] if paths else type(embedding).__name__
    last = embedding.num_embeddings - 1
    return (
        f"embedding '{name}' has {embedding.num_embeddings} rows, and the batch holds an id "
        f"outside 0 … {last}. For token ids compare len(tokenizer) with num_embeddings "
        "(resize_token_embeddings before the optimizer and the session are created); for position "
        "ids shorten the sequences"
    )


# --------------------------------------------------------------------------------------------------


class Rows(Protocol):
    """The rows of a micro-batch, their groups and their weights; see `data.layout.Part`."""

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def weights(self) -> NDArray[np.float64] | None: ...  # noqa: D102
    @property
    def units(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class EvaluationPoint:
    """A point where gradients are taken.

    Attributes:
        parameters: values of the parameters, None for the model's own.
        weight: a factor of the losses.
    """

    parameters: Mapping[str, Tensor] | None = None
    weight: float = 1.0


HERE = EvaluationPoint()


@contextmanager
def swap_parameters(
    layers: Sequence[Layer], parameters: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """Run the body with other values of the parameters, and restore their own to the bit."""
    if parameters is None:
        yield
        return
    tensors = named_tensors(layers)
    before = {name: p.detach().clone() for name, p in tensors.items()}
    try:
        _write(tensors, parameters)
        yield
    finally:
        _write(tensors, before)


def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    # Autocast may have cached casts of the old values.
    torch.clear_autocast_cache()
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(values[name])


@dataclass
class Proof:
    """What is known of how the gradients of a run can be computed.

    Attributes:
        operation: why examples are computed one at a time, None where whole micro-batches are
            proved. Public: found on public rows.
        exact_rows: rows of private micro-batches that were computed one at a time. PRIVATE.
        private_operation: the first operation that a private micro-batch could not be proved for,
            though public rows could. PRIVATE: control flow may have led there.
    """

    operation: Unknown | None = None
    exact_rows: int = 0
    private_operation: Unknown | None = None


def clipped_sum(
    model: nn.Module,
    layers: Sequence[Layer],
    metric: Metric,
    clip: Clip,
    *,
    loss_fn: LossFn,
    micro_batches: Iterable[tuple[Any, Rows]],
    one_record: Callable[[int], Any] | None = None,
    proof: Proof | None = None,
    points: Sequence[EvaluationPoint] = (HERE,),
    augment: Augmentation | None = None,
    counted: int | None = None,
    repeatable: bool = False,
) -> tuple[NamedTensors, Tensor]:
    """Return the clipped sum of one logical batch; PRIVATE until noise has been added.

    The gradient of an example is that of a micro-batch of its own. A whole micro-batch is
    differentiated at once where the tracker proves that this gives the same. Otherwise its examples
    are differentiated one at a time.

    Args:
        model: what is differentiated.
        layers: its layers.
        metric: the coordinates in which units are clipped and summed.
        clip: how.
        loss_fn: maps model and micro-batch to one loss a row `[n]`.
        micro_batches: batches with their rows, in any order; none for an empty logical batch.
        one_record: number of a record to a batch of that record alone. None where every micro-batch
            is proved or has one row.
        proof: what public rows have shown, and where to note what private ones needed.
        points: where each example's gradient is taken. The weighted sum over all points is clipped
            as ONE gradient, and every point sees the same random numbers (dropout).
        augment: maps a batch to one with as many rows, each changed at random on its own.
        counted: micro-batches that are summed. Those after them are only passes, which keep
            processes in step that gather parameters together. None for all.
        repeatable: dropout and `augment` take the numbers of the global generators as they stand,
            which a seed makes known. TEST MODE, NOT PRIVATE. Otherwise the numbers come from the
            operating system, and the generators are restored.

    Returns:
        (parameter name to whitened clipped sum in float32 or float64, norms of all units `[U]`).

    Raises:
        ValueError: losses of another shape than the rows; weights that are not finite.
    """
    check_finite(layers)
    # Weights cast for an earlier step would be stale under an autocast around the loop.
    torch.clear_autocast_cache()
    proof = proof or Proof()
    passes = _Passes(model, layers, loss_fn, points, augment, one_record, proof)
    summer = ClippedSummer(layers, metric, clip)
    norms: list[Tensor] = []
    with randomize_generators(repeatable):
        for i, (loaded, rows) in enumerate(micro_batches):
            is_counted = counted is None or i < counted
            target = summer if is_counted else ClippedSummer(layers, metric, clip)
            for calls, batch_size, groups in passes.contributions(loaded, rows):
                part = target.add(calls, batch_size, groups).detach()
                if is_counted:
                    norms.append(part)
    if not norms:
        return summer.result(), torch.zeros(0)
    return summer.result(), torch.cat([x.to(norms[-1]) for x in norms])


@dataclass(frozen=True)
class _Passes:
    """The forward and backward passes over the micro-batches of one logical batch."""

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    points: Sequence[EvaluationPoint]
    augment: Augmentation | None
    one_record: Callable[[int], Any] | None
    proof: Proof

    def contributions(self, loaded: Any, rows: Rows) -> Iterator[tuple[Calls, int, Groups]]:
        """Yield calls or blocks, the number of their rows, and which rows are clipped together."""
        n = len(rows.records)
        if self.proof.operation is None and n > 1:
            calls = self._together(loaded, rows)
            if calls is not None:
                yield calls, n, Groups(rows.units, rows.group)
                return
        for unit in range(rows.units):
            yield self._unit_alone(loaded, rows, unit), 1, Groups(1)

    def _together(self, loaded: Any, rows: Rows) -> Calls | None:
        """Return the calls of a whole micro-batch, or None where its examples cannot be proved."""
        n = len(rows.records)
        device = device_of(self.layers)
        batch, tracker = follow_augmentation(
            self.augment, self.model, move_batch(loaded, device), n
        )
        restart = restarter(device)
        all_calls: Calls = {}
        with restored_attributes(self.model):
            for i, point in enumerate(self.points):
                if i:
                    restart()
                with swap_parameters(self.layers, point.parameters):
                    calls = self._pass(batch, rows, point.weight, tracker)
                    if calls is None:
                        return None
                    if len(self.points) > 1 or point.parameters is not None:
                        # Whatever depends on the parameters is computed at this point.
                        calls = copy_inputs(self.layers, settled(self.layers, calls, n))
                # Moved: a call that two dictionaries hold is not freed when the sum has used it.
                for name in list(calls):
                    all_calls.setdefault(name, []).extend(calls.pop(name))
        return all_calls

    def _pass(self, batch: Any, rows: Rows, factor: float, tracker: Tracker) -> Calls | None:
        """Differentiate one micro-batch, each row's loss times its weight and a factor."""
        device = device_of(self.layers)
        with restored_state(self.model):
            tape, losses = follow_pass(self.loss_fn, self.model, self.layers, batch, tracker)
            failure = tape.failure(losses)
            if failure is not None:
                self.proof.private_operation = self.proof.private_operation or failure
                return None
            if rows.weights is not None:
                losses = losses * torch.from_numpy(rows.weights).to(losses)
            if factor != 1:
                losses = losses * factor
            with torch.autocast(device.type, enabled=False):
                return tape.gradients(losses.sum())

    def _unit_alone(self, loaded: Any, rows: Rows, unit: int) -> Calls:
        """Return the gradient of one privacy unit, each of its rows in a micro-batch of its own."""
        total: NamedTensors = {}
        first = unit * rows.group
        for row in range(first, first + rows.group):
            weight = 1.0 if rows.weights is None else float(rows.weights[row])
            if weight == 0.0:
                continue
            self.proof.exact_rows += 1
            is_alone = len(rows.records) == 1
            record = loaded if is_alone else self._record(int(rows.records[row]))
            self._add_row(record, weight, total)
        if not total:
            for name, p in named_tensors(self.layers).items():
                total[name] = torch.zeros_like(p)
        return blocks_of_one(self.layers, total)

    def _add_row(self, record: Any, weight: float, total: NamedTensors) -> None:
        """Add the gradient of one row, at all points, to that of its privacy unit."""
        device = device_of(self.layers)
        batch = augmented(self.augment, self.model, move_batch(record, device), 1)
        loss = partial(losses_of, self.loss_fn)
        restart = restarter(device)
        with restored_attributes(self.model):
            for i, point in enumerate(self.points):
                if i:
                    restart()
                with (
                    swap_parameters(self.layers, point.parameters),
                    restored_state(self.model),
                    torch.enable_grad(),
                ):
                    factor = weight * point.weight
                    add_gradients(total, example_gradient(self.model, loss, batch, factor))

    def _record(self, index: int) -> Any:
        if self.one_record is None:
            failure = self.proof.operation or self.proof.private_operation
            what = "the micro-batch" if failure is None else failure.operation
            raise ValueError(
                f"{what} hides the batch axis, and clipped_sum was given no one_record to "
                "differentiate records alone"
            )
        return self.one_record(index)


def batch_tracker(model: nn.Module, batch: Any, size: int) -> Tracker:
    """Return a tracker for a batch whose tensors have their examples in front."""
    tracker = Tracker(size, model.buffers())
    tracker.declare_batch(batch)
    tracker.declare_parameters(trainable_tensors(model).values())
    return tracker


def follow_augmentation(
    augment: Augmentation | None, model: nn.Module, batch: Any, size: int
) -> tuple[Any, Tracker]:
    """Return the batch as `augment` changes it, and the tracker that has followed the change."""
    tracker = batch_tracker(model, batch, size)
    with tracker.following():
        batch = augmented(augment, model, batch, size)
    return batch, tracker


def follow_pass(
    loss_fn: LossFn, model: nn.Module, layers: Sequence[Layer], batch: Any, tracker: Tracker
) -> tuple[Tape, Tensor]:
    """Run a forward pass under a tracker.

    Args:
        loss_fn: maps model and batch to losses.
        model: the model.
        layers: its layers.
        batch: the batch.
        tracker: on which the batch is declared.

    Returns:
        The tape of the pass and its losses `[n]`.

    Raises:
        ValueError: losses of another shape, or that depend on no layer.
    """
    tape = Tape(model, layers, tracker.size, tracker=tracker)
    with torch.enable_grad(), tape, tracker.following():
        losses = losses_of(loss_fn, model, batch)
    check_losses(losses, tracker.size)
    tape.check_depends(losses)
    return tape, losses


def copy_inputs(layers: Sequence[Layer], calls: Calls) -> Calls:
    """Return the calls with copies of inputs that are parameters, whose values will change.

    A learnt query is such an input.
    """
    tensors = [local(p) for p in named_tensors(layers).values()]
    storages = {p.untyped_storage().data_ptr() for p in tensors} - {0}

    def copy(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in storages else x

    def copy_call(call: Any) -> Any:
        if not isinstance(call, Call):
            return call
        args, kwargs = tree_map_only(Tensor, copy, (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs)

    return {name: [copy_call(call) for call in several] for name, several in calls.items()}


def losses_of(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    """Return the losses of a batch, with what loss_fn changes elsewhere undone.

    Raises:
        ValueError: a row outside of an embedding table, or a label out of the range of the loss.
    """
    try:
        with loss_state_restored(loss_fn, model):
            return loss_fn(model, batch)
    except IndexError as error:
        message = unknown_row(model, error)
        texts = ("out of bounds", "out of range in self")
        if message is None and any(text in str(error) for text in texts):
            message = (
                f"loss_fn failed on a batch: {error}. A label or token id is outside the range the "
                "model was built for."
            )
        if message is None:
            raise  # a mistake of the function itself
        raise ValueError(message) from error


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    # The processor would read what an accelerator has not copied yet.
    non_blocking = device.type != "cpu"
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), batch)
