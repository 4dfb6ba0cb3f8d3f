"""The pass over one logical batch: every micro-batch forward, backward, clipped and summed.

Nothing of a pass outlives it: the sum is built in local values, so an exception in its middle leaves no private tensor
behind and the whole batch can be done again.
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
from torch.utils._pytree import tree_map

from dpkfc.fsdp import in_graph, local
from dpkfc.gradients.calls import Call, Calls
from dpkfc.gradients.clipping import Clip, ClippedSummer, Groups
from dpkfc.gradients.fallback import blocks_of_one, gradient_of
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.recurrent import has_batch_in_place
from dpkfc.gradients.rules import blocks_of, settled
from dpkfc.gradients.state import augmented, check_finite, forgotten, kept_attributes, restored_state
from dpkfc.gradients.tape import Tape, check_losses
from dpkfc.linalg.blocks import Block, ConvBlock, Formed, Outer
from dpkfc.linalg.metric import Metric
from dpkfc.rng_state import device_of, randomize_generators, restarter
from dpkfc.tracking.axes import Unknown
from dpkfc.tracking.tracker import Tracker

# --------------------------------------------------------------------------------------------------
# The gradient of an example by definition: plain autograd on a micro-batch of that example alone.
#
# Nothing can mix in a batch of one, and no layout matters. Every faster way must give the same
# result.


def example_gradient(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, weight: float = 1.0
) -> dict[str, Tensor]:
    """Return the gradient of the loss of one example.

    Args:
        model: in the mode in which it is trained.
        loss_fn: maps model and batch to losses `[1]`.
        batch: a batch of one example.
        weight: a factor of the loss.

    Returns:
        Parameter name to gradient, dense; parameters that the loss does not use are absent.

    Raises:
        ValueError: losses of another shape.
    """
    losses = loss_fn(model, batch)
    check_losses(losses, 1)
    return {} if losses.grad_fn is None else gradient_of(model, losses.sum() * weight)


def add_gradients(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Add the gradient of one row to that of its privacy unit, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient


# --------------------------------------------------------------------------------------------------
# What every layer contributes to a loss, for whoever looks at curvature: blocks that are formed
# when they are asked for.

_BY_INPUT = ("linear", "conv", "embedding")  # rules whose blocks hold the inputs as they are read


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: Callable[[nn.Module], Tensor],
    batch_size: int | None = None,
) -> Mapping[str, Block]:
    """Run a loss on a model and return every called layer's contribution in the normal form.

    For public probes: where the place of the examples is not proved, the leading axis is taken for it.

    Under `torch.no_grad()` there is no backward pass: linear layers, convolutions and embeddings show what they have read, with
    zeros for output gradients, and other layers are left out.

    Args:
        model: the model; its parameters and their `.grad` are left as they are.
        layers: from `find_layers`.
        loss: maps the model to per-example losses `[N]`.
        batch_size: examples N, as for `Tape`.

    Returns:
        Layer name to block, formed on access; `blocks.formed` writes out the patches of a convolution. `b` is
        the gradient of each example's own loss, whatever N is.

    Raises:
        ValueError: as `Tape.backward`.
    """
    differentiated = torch.is_grad_enabled()
    chosen = layers if differentiated else [layer for layer in layers if layer.rule in _BY_INPUT]
    tape = Tape(model, chosen, batch_size, lenient=True)
    with tape:
        losses = loss(model)
    tape.check_enabled()
    check_losses(losses)
    if tape.size is not None and tape.size % max(1, len(losses)):  # a loss may stand for several rows, never for a part of one
        check_losses(losses, tape.size)
    calls: Calls = tape.backward(losses) if differentiated else tape.inputs()
    return _Contributions(layers, calls, losses.shape[0])


class _Contributions(Mapping[str, Block]):
    """Layer name to block, each formed when it is asked for; of a convolution not even then are its patches."""

    def __init__(self, layers: Sequence[Layer], calls: dict[str, list[Call]], batch_size: int) -> None:
        self._layers = {layer.name: layer for layer in layers if _has_rows(layer, calls.get(layer.name), batch_size)}
        self._calls = calls
        self._batch_size = batch_size

    def __getitem__(self, name: str) -> Block:
        block = blocks_of(self._layers[name], self._calls[name], self._batch_size)
        assert not isinstance(block, Formed)
        if isinstance(block, ConvBlock):
            return block.patched()
        return block.explicit() if isinstance(block, Outer) else block

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _has_rows(layer: Layer, calls: Sequence[Call | Formed] | None, batch_size: int) -> bool:
    """Return whether a layer was called, and every call shows which rows belong to which example.

    A matrix that is used outside of its layer too has no rows from which a factor could be made.
    """
    if calls is None or any(isinstance(call, Formed) for call in calls):
        return False
    if layer.rule != "recurrent":
        return True
    return all(isinstance(call, Call) and has_batch_in_place(call, batch_size) for call in calls)


# --------------------------------------------------------------------------------------------------
# Which embedding was asked for a row that it does not have.


def unknown_row(model: nn.Module, error: BaseException) -> str | None:
    """A sentence on the embedding whose forward pass raised an IndexError; None where it was raised elsewhere.

    The offending id is private data and is not repeated.

    Args:
        model: whose modules are named.
        error: as caught; its traceback holds the module that was running.
    """
    trace = error.__traceback__
    found: nn.Embedding | None = None
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        found = own if isinstance(own, nn.Embedding) else found
        trace = trace.tb_next
    if found is None:
        return None
    name = next((name for name, module in model.named_modules() if module is found), type(found).__name__)
    return (
        f"embedding '{name}' has {found.num_embeddings} rows, and the batch holds an id outside 0 … "
        f"{found.num_embeddings - 1}. For token ids compare len(tokenizer) with num_embeddings (resize_token_embeddings before "
        "the optimizer and the session are created); for position ids shorten the sequences"
    )


# --------------------------------------------------------------------------------------------------

LossFn = Callable[[nn.Module, Any], Tensor]


class Rows(Protocol):
    """Which rows of a micro-batch belong together and what each counts: `data.layout.Part`."""

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def weights(self) -> NDArray[np.float64] | None: ...  # noqa: D102
    @property
    def units(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class At:
    """Where gradients are taken: at these parameters (None: the model's own), their losses times `weight`."""

    parameters: Mapping[str, Tensor] | None = None
    weight: float = 1.0


HERE = At()


@contextmanager
def at(layers: Sequence[Layer], parameters: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model at other values of its parameters; afterwards each has its own back, to the bit."""
    if parameters is None:
        yield
        return
    held = {full: layer.tensor(role) for layer in layers for role, full in layer.parameters.items()}
    own = {full: p.detach().clone() for full, p in held.items()}
    try:
        _write(held, parameters)
        yield
    finally:
        _write(held, own)


def _write(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    torch.clear_autocast_cache()  # casts of the weights as they were
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(values[name])


@dataclass
class Proof:
    """What is known of how the gradients of a run can be computed.

    Attributes:
        operation: why examples are computed one at a time, None where whole micro-batches are proved. Public: found on public
            rows.
        exact_rows: rows of private micro-batches that were computed one at a time. PRIVATE.
        private_operation: the first operation that a private micro-batch could not be proved for, though public rows could.
            PRIVATE: control flow may have led there.
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
    points: Sequence[At] = (HERE,),
    augment: Callable[[Any], Any] | None = None,
    counted: int | None = None,
    repeatable: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the clipped sum of one logical batch; PRIVATE until noise has been added.

    The gradient of an example is that of a micro-batch of its own. A whole micro-batch is differentiated at once where the
    tracker proves that this gives the same; otherwise its examples are differentiated one at a time.

    Args:
        model: what is differentiated.
        layers: its layers.
        metric: the coordinates in which units are clipped and summed.
        clip: how.
        loss_fn: maps model and micro-batch to one loss a row `[n]`.
        micro_batches: batches with their rows, in any order; none for an empty logical batch.
        one_record: number of a record to a batch of that record alone; None where every micro-batch is proved or has one row.
        proof: what public rows have shown, and where to note what private ones needed.
        points: where each example's gradient is taken. The weighted sum over all points is clipped as ONE gradient, and every
            point sees the same random numbers (dropout).
        augment: maps a batch to one with as many rows, each changed at random on its own.
        counted: micro-batches that are summed; those after them are passes alone, which keep processes in step that gather
            parameters together. None for all.
        repeatable: dropout and `augment` take the numbers of the global generators as they stand, which a seed makes known. TEST
            MODE, NOT PRIVATE. Otherwise numbers of the operating system, and the generators are put back.

    Returns:
        (parameter name to whitened clipped sum in float32 or float64, norms of all units `[U]`).

    Raises:
        ValueError: losses of another shape than the rows; weights that are not finite.
    """
    check_finite(layers)
    torch.clear_autocast_cache()  # weights cast for an earlier step would be stale under an autocast around the loop
    proof = proof or Proof()
    passes = _Passes(model, layers, loss_fn, points, augment, one_record, proof)
    summer = ClippedSummer(layers, metric, clip)
    norms: list[Tensor] = []
    with randomize_generators(repeatable):
        for done, (loaded, rows) in enumerate(micro_batches):
            counts = counted is None or done < counted
            into = summer if counts else ClippedSummer(layers, metric, clip)
            for calls, batch_size, groups in passes.contributions(loaded, rows):
                norms_of_part = into.add(calls, batch_size, groups).norms.detach()
                norms.extend([norms_of_part] if counts else [])
    return summer.result(), torch.cat([x.to(norms[-1]) for x in norms]) if norms else torch.zeros(0)


@dataclass(frozen=True)
class _Passes:
    """The forward and backward passes over the micro-batches of one logical batch."""

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    points: Sequence[At]
    augment: Callable[[Any], Any] | None
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
        """Return the calls of a whole micro-batch, or None where the tracker cannot tell its examples apart."""
        n, device = len(rows.records), device_of(self.layers)
        batch = _to(loaded, device)
        tracker = batch_tracker(self.model, batch, n)
        with tracker.following():
            batch = augmented(self.augment, self.model, batch, n)
        restart, calls = restarter(device), Calls()
        with kept_attributes(self.model):
            for i, point in enumerate(self.points):
                if i:
                    restart()
                with at(self.layers, point.parameters):
                    found = self._pass(batch, rows, point.weight, tracker)
                    if found is None:
                        return None
                    if (
                        len(self.points) > 1 or point.parameters is not None
                    ):  # what depends on the parameters is computed here
                        found = kept_inputs(self.layers, settled(self.layers, found, n))
                for name in list(found):  # moved: what two hold is not freed when the sum has used it
                    calls.setdefault(name, []).extend(found.pop(name))
        return calls

    def _pass(self, batch: Any, rows: Rows, factor: float, tracker: Tracker) -> Calls | None:
        """Go forward and backward through one micro-batch, each row's loss times its weight and a factor."""
        n, device = len(rows.records), device_of(self.layers)
        tape = Tape(self.model, self.layers, n, tracker=tracker)
        with restored_state(self.model):
            with torch.enable_grad(), tape, tracker.following():
                losses = losses_of(self.loss_fn, self.model, batch)
            check_losses(losses, n)
            tape.check_depends(losses)
            failure = tape.failure(losses)
            if failure is not None:
                self.proof.private_operation = self.proof.private_operation or failure
                return None
            if rows.weights is not None:
                losses = losses * torch.from_numpy(rows.weights).to(losses)
            with torch.autocast(device.type, enabled=False):
                return tape.backward(losses if factor == 1 else losses * factor)

    def _unit_alone(self, loaded: Any, rows: Rows, unit: int) -> Calls:
        """Return the gradient of one privacy unit, each of its rows in a micro-batch of its own."""
        device, total = device_of(self.layers), dict[str, Tensor]()
        first = unit * rows.group
        for row in range(first, first + rows.group):
            weight = 1.0 if rows.weights is None else float(rows.weights[row])
            if weight == 0.0:
                continue
            self.proof.exact_rows += 1
            record = loaded if len(rows.records) == 1 else self._record(int(rows.records[row]))
            batch = augmented(self.augment, self.model, _to(record, device), 1)
            restart = restarter(device)
            with kept_attributes(self.model):
                for i, point in enumerate(self.points):
                    if i:
                        restart()
                    with at(self.layers, point.parameters), restored_state(self.model), torch.enable_grad():
                        loss = partial(losses_of, self.loss_fn)
                        add_gradients(total, example_gradient(self.model, loss, batch, weight * point.weight))
        if not total:
            total = {
                full: torch.zeros_like(layer.tensor(role))
                for layer in self.layers
                for role, full in layer.parameters.items()
            }
        return blocks_of_one(self.layers, total)

    def _record(self, index: int) -> Any:
        if self.one_record is None:
            raise _missing(self.proof.operation or self.proof.private_operation)
        return self.one_record(index)


def _missing(failure: Unknown | None) -> ValueError:
    what = "the micro-batch" if failure is None else failure.operation
    return ValueError(
        f"{what} hides the batch axis, and clipped_sum was given no one_record to differentiate records alone"
    )


def batch_tracker(model: nn.Module, batch: Any, size: int) -> Tracker:
    """Return a tracker for a forward pass over a batch whose tensors have their examples in front."""
    tracker = Tracker(size, model.buffers())
    tracker.declare_batch(batch)
    tracker.declare_parameters(in_graph(p) for p in model.parameters() if p.requires_grad)
    return tracker


def kept_inputs(layers: Sequence[Layer], calls: Calls) -> Calls:
    """The calls with copies of inputs that are parameters themselves (a learnt query), whose values are about to change."""
    own = {local(layer.tensor(role)).untyped_storage().data_ptr() for layer in layers for role in layer.parameters} - {
        0
    }

    def kept(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in own else x

    def call_of(call: Any) -> Any:
        if not isinstance(call, Call):
            return call
        return replace(call, args=tree_map(kept, call.args), kwargs=tree_map(kept, call.kwargs))

    return {name: [call_of(call) for call in several] for name, several in calls.items()}


def losses_of(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    """Return the losses of a batch, with what loss_fn changes elsewhere undone.

    Raises:
        ValueError: a row outside of an embedding table, or a label outside of the range of the loss.
    """
    try:
        with forgotten(loss_fn, model):
            return loss_fn(model, batch)
    except IndexError as error:
        told = unknown_row(model, error)
        if told is None and any(text in str(error) for text in ("out of bounds", "out of range in self")):
            told = (
                f"loss_fn failed on a batch: {error}. A label or token id is outside the range the model was built for."
            )
        if told is None:
            raise  # a mistake of the function itself
        raise ValueError(told) from error


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)
