"""The clipped sum of one logical batch, by passes over its micro-batches.

No value of a pass outlives it: the sum is built in local values. An exception in the middle of a
pass leaves no private tensor behind, and the whole batch can be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from dpkfc.distributed.fsdp import to_local
from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer, Groups
from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint, swap_parameters
from dpkfc.gradients.layer_matrices import add_gradients, blocks_of_one
from dpkfc.gradients.layers import Call, Calls, Layer, device_of_layers, named_tensors
from dpkfc.gradients.loss_function import LossFn
from dpkfc.gradients.model_checks import check_finite, refuse_inference_mode
from dpkfc.gradients.one_pass import example_gradient, follow_augmentation, follow_pass, move_batch
from dpkfc.gradients.rules import form_blocks
from dpkfc.gradients.state import ends_run, own_pass
from dpkfc.linalg.metric import Metric
from dpkfc.rng_state import randomize_generators, restarter
from dpkfc.tensors import Tensors
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import Tracker


class Rows(Protocol):
    """The rows of a micro-batch, their groups and their weights; see `data.loading.Part`."""

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def weights(self) -> NDArray[np.float64] | None: ...  # noqa: D102
    @property
    def units(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102


@dataclass
class GradientMode:
    """The way in which a run computes the gradients of its examples, and why.

    Attributes:
        unproved_operation: why examples are computed one at a time, None where whole micro-batches
            are proved. Public: found on public rows.
        is_checked: the loss has accepted public rows. Then a private record that cannot be read, or
            on which user code raises an exception of any type, adds nothing, as one with a NaN, and
            does not end the run. Memory that runs out does, and a pass that changes the weights.
        failed_rows: private rows that added nothing for this reason. PRIVATE.
        unproved_on_private_rows: the first operation that the tracker could not follow on private
            rows, though it could on public rows. PRIVATE: control flow may have led there.
        graph: captures passes as graphs; None captures nothing.
    """

    unproved_operation: Unknown | None = None
    is_checked: bool = False
    failed_rows: int = 0
    unproved_on_private_rows: Unknown | None = None
    graph: Captured | None = None


class Captured(Protocol):
    """Captures passes as graphs; see `dpkfc.graph.passes`."""

    refusal: Unknown | None
    """Why no further pass is captured, None at the beginning."""

    def calls(
        self,
        loss_fn: LossFn,
        augment: Augmentation | None,
        batch: Any,
        size: int,
        weigh: Callable[[Tensor], Tensor],
        *,
        copies: bool,
    ) -> Calls | None:
        """Return the blocks of all layers, or None where the pass is not captured or proved."""
        ...


def clipped_sum(
    model: nn.Module,
    layers: Sequence[Layer],
    metric: Metric,
    clip: Clip,
    *,
    loss_fn: LossFn,
    micro_batches: Iterable[tuple[Any, Rows]],
    one_record: Callable[[int], Any],
    mode: GradientMode | None = None,
    points: Sequence[EvaluationPoint] = (AT_MODEL_PARAMETERS,),
    augment: Augmentation | None = None,
    num_summed: float = math.inf,
    repeatable: bool = False,
    by_row: Collection[str] = (),
) -> tuple[Tensors, Tensor]:
    """Return the clipped sum of one logical batch; PRIVATE until noise has been added.

    The gradient of an example is computed as in a micro-batch of its own. A whole micro-batch is
    differentiated at once where the tracker proves that this gives the same. Otherwise its examples
    are differentiated one at a time.

    Args:
        model: what is differentiated.
        layers: from `find_layers`.
        metric: the coordinates in which units are clipped and summed.
        clip: clipping rule and its norm C.
        loss_fn: maps model and micro-batch to one loss a row `[n]`.
        micro_batches: batches with their rows, in any order; none for an empty logical batch. An
            exception in place of a batch says that it could not be read.
        one_record: number of a record to a batch of that record alone.
        mode: the way that was found on public rows. What private rows needed is noted in it.
        points: where each example's gradient is taken. The weighted sum over all points is clipped
            as ONE gradient, and every point sees the same random numbers (dropout).
        augment: maps a batch to one with as many rows, each changed at random on its own.
        num_summed: only the first `num_summed` micro-batches enter the sum. The rest only run, so
            that all ranks of a sharded model make equally many passes.
        repeatable: dropout and `augment` take the numbers of the global generators as they stand,
            which a seed makes known. TEST MODE, NOT PRIVATE. Otherwise the numbers come from the
            operating system, and the generators are restored.
        by_row: names of embeddings, without an entry in the metric, whose sums come as sparse
            tensors of the rows that were read. Their tables show these rows alone.

    Returns:
        (parameter name to whitened clipped sum in float32 or float64, norms of all units `[U]`).

    Raises:
        RuntimeError: `torch.inference_mode()` is on.
        ValueError: losses of another shape than the rows; weights that are not finite.
    """
    refuse_inference_mode()
    check_finite([layer for layer in layers if layer.name not in by_row])
    # Weights cast for an earlier step would be stale under an autocast around the loop.
    torch.clear_autocast_cache()
    mode = mode or GradientMode()
    passes = _Passes(model, layers, loss_fn, points, augment, one_record, mode)
    summer = ClippedSummer(layers, metric, clip, by_row)
    norms: list[Tensor] = []
    with randomize_generators(repeatable):
        for i, (loaded, rows) in enumerate(micro_batches):
            is_summed = i < num_summed
            target = summer if is_summed else ClippedSummer(layers, metric, clip, by_row)
            for calls, batch_size, groups in passes.contributions(loaded, rows):
                part = target.add(calls, batch_size, groups).detach()
                if is_summed:
                    norms.append(part)
    return summer.result(), torch.cat(norms) if norms else torch.zeros(0)


@dataclass(frozen=True)
class _Passes:
    """The forward and backward passes over the micro-batches of one logical batch."""

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    points: Sequence[EvaluationPoint]
    augment: Augmentation | None
    one_record: Callable[[int], Any]
    mode: GradientMode

    def contributions(self, loaded: Any, rows: Rows) -> Iterator[tuple[Calls, int, Groups]]:
        """Yield calls or blocks, the number of their rows, and which rows are clipped together."""
        n = len(rows.records)
        calls = None
        if n > 1:
            try:
                calls = self._run_together(loaded, rows)
            except Exception as error:
                # One example may have caused it.
                if not self._may_go_on(error):
                    raise
        if calls is not None:
            yield calls, n, Groups(rows.units, rows.group)
            return
        for unit in range(rows.units):
            yield self._unit_alone(loaded, rows, unit), 1, Groups(1)

    # -- all rows of a micro-batch in one pass -----------------------------------------------------

    def _run_together(self, loaded: Any, rows: Rows) -> Calls | None:
        """Return the calls of a whole micro-batch, or None where its examples cannot be proved."""
        graph = self.mode.graph
        if graph is not None and graph.refusal is not None:
            graph = None
        is_proved = self.mode.unproved_operation is None
        if graph is None and not is_proved:
            return None
        batch = move_batch(_check_read(loaded), device_of_layers(self.layers))
        calls = None if graph is None else self._replay(graph, rows, batch)
        if calls is not None or not is_proved:
            return calls
        batch, tracker = follow_augmentation(self.augment, self.model, batch, len(rows.records))
        differentiate = partial(self._differentiate, rows, tracker)
        return self._join_points(differentiate, batch, partial(follow, tracker))

    def _join_points(
        self,
        differentiate: Callable[[Any, float], Calls | None],
        batch: Any,
        surround: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Calls | None:
        """Return the calls at all points, joined: an example is clipped once.

        Args:
            differentiate: maps a batch and the weight of a point to calls, or to None.
            batch: of which each point gets a copy.
            surround: around the copying.
        """
        joined: Calls = {}
        for point, own_batch in self._points_and_batches(batch, surround):
            with swap_parameters(self.layers, point.parameters):
                calls = differentiate(own_batch, point.weight)
            if calls is None:
                return None
            # Pop each entry: the memory of a call is freed only when no dictionary holds it.
            for name in list(calls):
                joined.setdefault(name, []).extend(calls.pop(name))
        return joined

    @property
    def _moves_parameters(self) -> bool:
        """Return whether parameters have other values at some point than afterwards."""
        return len(self.points) > 1 or self.points[0].parameters is not None

    def _replay(self, graph: Captured, rows: Rows, batch: Any) -> Calls | None:
        """Return the blocks of a micro-batch from its graph, or None without a graph.

        Whatever a replay raises, another way decides what becomes of these rows.
        """

        def differentiate(own_batch: Any, factor: float) -> Calls | None:
            return graph.calls(
                self.loss_fn,
                self.augment,
                own_batch,
                len(rows.records),
                partial(_weigh, rows, factor),
                copies=self._moves_parameters,
            )

        try:
            return self._join_points(differentiate, batch)
        except Exception as error:
            if ends_run(error):
                raise
            return None

    def _differentiate(
        self, rows: Rows, tracker: Tracker, batch: Any, factor: float
    ) -> Calls | None:
        """Return the calls of one proved pass, each row's loss times its weight and a factor."""
        device = device_of_layers(self.layers)
        with own_pass(self.model):
            tape, losses = follow_pass(self.loss_fn, self.model, self.layers, batch, tracker)
            failure = tape.failure(losses)
            if failure is None and losses.grad_fn is None:
                # All examples of this micro-batch may have a constant loss.
                failure = Unknown("loss", "it depends on no trainable layer")
            if failure is not None:
                self.mode.unproved_on_private_rows = self.mode.unproved_on_private_rows or failure
                return None
            total = _weigh(rows, factor, losses)
            with torch.autocast(device.type, enabled=False):
                calls = tape.gradients(total)
            if self._moves_parameters:
                # Whatever depends on the parameters is computed at this point.
                calls = copy_inputs(self.layers, form_blocks(self.layers, calls, len(losses)))
            return calls

    # -- one row at a time -------------------------------------------------------------------------

    def _unit_alone(self, loaded: Any, rows: Rows, unit: int) -> Calls:
        """Return the gradient of one privacy unit, each of its rows in a micro-batch of its own."""
        total: Tensors = {}
        first = unit * rows.group
        for row in range(first, first + rows.group):
            weight = 1.0 if rows.weights is None else float(rows.weights[row])
            if weight == 0.0:
                continue
            try:
                record = loaded
                if len(rows.records) > 1:
                    record = self.one_record(int(rows.records[row]))
                self._add_row(_check_read(record), weight, total)
            except Exception as error:
                if not self._may_go_on(error):
                    raise
                self.mode.failed_rows += 1
                add_gradients(total, self._fill_gradients(math.nan))
        return blocks_of_one(self.layers, total or self._fill_gradients(0.0))

    def _fill_gradients(self, value: float) -> Tensors:
        """Return gradients of all parameters with one value in every entry."""
        tensors = named_tensors(self.layers)
        return {name: torch.full_like(p, value) for name, p in tensors.items()}

    def _add_row(self, record: Any, weight: float, total: Tensors) -> None:
        """Add the gradient of one row, at all points, to its privacy unit's."""
        batch = move_batch(record, device_of_layers(self.layers))
        batch = augment_batch(self.augment, self.model, batch, 1)
        for point, own_batch in self._points_and_batches(batch):
            with (
                swap_parameters(self.layers, point.parameters),
                own_pass(self.model),
                torch.enable_grad(),
            ):
                factor = weight * point.weight
                gradients = example_gradient(self.model, self.loss_fn, own_batch, factor)
                add_gradients(total, gradients)

    def _may_go_on(self, error: Exception) -> bool:
        """Return whether an error may come from a record, which then adds nothing."""
        return self.mode.is_checked and not ends_run(error)

    def _points_and_batches(
        self, batch: Any, surround: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[tuple[EvaluationPoint, Any]]:
        """Yield each point with a batch of its own, into which its pass may write.

        All points see the same random numbers.
        """
        restart = restarter()
        for point in self.points:
            restart()
            own_batch = batch
            if point is not self.points[-1]:
                with surround():
                    own_batch = tree_map(_copy_value, batch)
            yield point, own_batch


def _weigh(rows: Rows, factor: float, losses: Tensor) -> Tensor:
    """Return the number that is differentiated: each row's loss times its weight."""
    if rows.weights is not None:
        losses = losses * torch.from_numpy(rows.weights).to(losses)
    return losses.sum() * factor


def _copy_value(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else deepcopy(x)


def _check_read(loaded: Any) -> Any:
    """Return a batch, or raise the exception that stands in its place."""
    if isinstance(loaded, Exception):
        raise loaded
    return loaded


def copy_inputs(layers: Sequence[Layer], calls: Calls) -> Calls:
    """Return the calls with copies of inputs that are parameters, whose values will change.

    A learnt query is such an input.
    """
    tensors = [to_local(p) for p in named_tensors(layers).values()]
    storages = {p.untyped_storage().data_ptr() for p in tensors} - {0}

    def copy_parameter(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in storages else x

    def copy_call(call: Any) -> Any:
        if not isinstance(call, Call):
            return call
        args, kwargs = tree_map_only(Tensor, copy_parameter, (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs)

    return {name: list(map(copy_call, several)) for name, several in calls.items()}
