"""The pass over one logical batch: every micro-batch forward, backward, clipped and summed.

Nothing of a pass outlives it: the sum is built in local values, so an exception in its middle leaves no private tensor
behind and the whole batch can be done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.beside import check_draws, check_losses_of_rows
from dpkfc.gradients.finer import check_alone
from dpkfc.gradients.groups import Groups
from dpkfc.gradients.ids import unknown_row
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.loss_state import forgotten
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.model_state import check_memory, checked_state, kept_attributes, restored_state
from dpkfc.gradients.random_state import device_of, drawn_since_now, kept_numbers, restarter, unknown_numbers
from dpkfc.gradients.rules import Call, Calls, settled
from dpkfc.gradients.sharded import local
from dpkfc.gradients.tape import Tape, check_losses
from dpkfc.gradients.update import check_finite
from dpkfc.gradients.verify import as_long_as, check_mode, check_whole_batch, in_training_mode
from dpkfc.gradients.views import augmented, check_augment
from dpkfc.gradients.watch import differences, partners
from dpkfc.metric import Metric

__all__ = ["HERE", "MOST", "At", "LossFn", "Rows", "check_examples", "clipped_sum", "looked_at"]

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

MOST = 32  # examples of a batch that are looked at together, at most
_FEW = 6  # those whose gradients are compared
_EIGHT = 8  # a batch beyond the usual is filled up to a multiple of it, so that few graphs are compiled
_SOME = 3  # rows that do not all happen to be broken


def looked_at(expected_rows: int, max_physical_batch_size: int | None, *, varies: bool = True) -> int:
    """Rows that a look is filled up to: as many as a batch of the run may well have, so that they fit into memory.

    Of batches drawn by Poisson sampling one in forty has more than B + 2√B; all rows of such a one are looked at when it comes.
    Where batches are not drawn so, and their number of rows does not vary, that is the number.
    """
    usual = math.ceil(expected_rows + 2 * math.sqrt(expected_rows)) if varies else expected_rows
    return max(2, min(MOST, usual, max_physical_batch_size or MOST))


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


def clipped_sum(
    model: nn.Module,
    layers: Sequence[Layer],
    metric: Metric,
    clip: Clip,
    *,
    loss_fn: LossFn,
    micro_batches: Iterable[tuple[Any, Rows]],
    points: Sequence[At] = (HERE,),
    augment: Callable[[Any], Any] | None = None,
    counted: int | None = None,
    repeatable: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """The clipped sum of one logical batch; PRIVATE until noise has been added.

    Args:
        model: what is differentiated.
        layers: its layers.
        metric: the coordinates in which units are clipped and summed.
        clip: how.
        loss_fn: maps model and micro-batch to one loss a row `[n]`.
        micro_batches: batches with their rows, in any order; none for an empty logical batch.
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
        ValueError: bad losses, layers or data; weights that are not finite.
    """
    check_finite(layers)
    torch.clear_autocast_cache()  # weights cast for an earlier step would be stale under an autocast around the loop
    device = device_of(layers)
    summer = ClippedSummer(layers, metric, clip)
    norms: list[Tensor] = []
    with unknown_numbers(repeatable):
        for done, (loaded, rows) in enumerate(micro_batches):
            n = len(rows.records)
            batch = augmented(augment, _to(loaded, device), n)
            restart, calls = restarter(device), Calls()
            with kept_attributes(model):
                for i, point in enumerate(points):
                    if i:
                        restart()
                    with at(layers, point.parameters):
                        found = _one_pass(model, layers, loss_fn, batch, rows=rows, factor=point.weight)
                        if len(points) > 1 or point.parameters is not None:  # what depends on the parameters is computed here
                            found = kept_inputs(layers, settled(layers, found, n))
                    for name in list(found):  # moved: what two hold is not freed when the sum has used it
                        calls.setdefault(name, []).extend(found.pop(name))
                counts = counted is None or done < counted
                into = summer if counts else ClippedSummer(layers, metric, clip)
                found_norms = into.add(calls, n, Groups(rows.units, rows.group)).norms.detach()
                norms.extend([found_norms] if counts else [])
    return summer.result(), torch.cat([x.to(norms[-1]) for x in norms]) if norms else torch.zeros(0)


def kept_inputs(layers: Sequence[Layer], calls: Calls) -> Calls:
    """The calls with copies of inputs that are parameters themselves (a learnt query), whose values are about to change."""
    own = {local(layer.tensor(role)).untyped_storage().data_ptr() for layer in layers for role in layer.parameters} - {0}

    def kept(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in own else x

    def call_of(call: Any) -> Any:
        if not isinstance(call, Call):
            return call
        return replace(call, args=tree_map(kept, call.args), kwargs=tree_map(kept, call.kwargs))

    return {name: [call_of(call) for call in several] for name, several in calls.items()}


def _one_pass(
    model: nn.Module, layers: Sequence[Layer], loss_fn: LossFn, batch: Any, *, rows: Rows, factor: float
) -> Calls:
    """Forward and backward through one micro-batch, each row's loss times its weight and a factor."""
    n, device = len(rows.records), device_of(layers)
    tape = Tape(model, layers, batch_size=n)
    with restored_state(model):
        with torch.enable_grad(), tape:
            losses = _losses(loss_fn, model, batch)
        check_losses(losses, n)
        if rows.weights is not None:
            losses = losses * torch.from_numpy(rows.weights).to(losses)
        with torch.autocast(device.type, enabled=False):
            return tape.backward(losses if factor == 1 else losses * factor)


def check_examples(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: LossFn,
    batch_of: Callable[..., Any],
    count: int,
    *,
    beside: Sequence[int] | None = None,
    augment: Callable[[Any], Any] | None = None,
    all_rows: bool = False,
    filled: int = 0,
) -> bool:
    """Does the tape agree with plain autograd, does a row not depend on those beside it, and do several rows add up?

    Args:
        model: in the mode it is trained in.
        layers: its layers.
        loss_fn: maps model and batch to one loss a row.
        batch_of: numbers of rows to the batch of them.
        count: rows there are. Two at a time are compared one by one; up to six are also looked at together, which finds what a
            pair cannot show (triplets, groups of four), and several times where random numbers are drawn (mixup). Of all of
            them the losses are compared.
        beside: which rows are compared beside the first, two at a time, so that there may be more than `count`; by default the
            second, and those that differ from the first in more than it does (another length, another label).
        augment: which must not mix rows; the gradients are compared without it.
        all_rows: running out of memory on more than two rows is an error: other processes make the same passes, of up to six
            rows. Otherwise what does not fit is left out, as the pair was found right.
        filled: rows whose losses are compared, where `count` is less: they are repeated, so that what is compiled for every
            number of rows sees one number more.

    Returns:
        Whether these rows could show a fault: two or more, and not all of their gradients zero.

    Raises:
        ValueError: naming the parameter whose gradient differs; a loss depends on other rows; no loss of three rows or more is
            finite.
        RuntimeError: not even two rows fit into memory.
    """
    check_finite(layers)
    torch.clear_autocast_cache()  # weights cast for an earlier step, as in `clipped_sum`
    device, loss, few = device_of(layers), partial(_losses, loss_fn), min(count, _FEW)

    def moved(*chosen: int) -> Any:
        return _to(batch_of(*chosen), device)

    with torch.enable_grad(), kept_numbers(), checked_state(model) as before, _named_norms(model):
        check_augment(augment, moved, few)
        alike, random = _collated_alike(moved, count, device)
        with _told_where_two_do_not_fit():
            chosen = _beside_the_first(alike, few) if beside is None else beside
            shown, drawing = _check_pairs(model, layers, loss, alike, chosen, comparable=not random)
            if count > 1:
                twins = (as_long_as(alike(0, 1), alike(i, i)) for i in range(few))
                check_memory(model, before, lambda x: loss(model, x), chain([alike(0, 1)], twins), device)
        try:
            if count > 1:
                check_whole_batch(model, layers, loss, alike(*range(few)), few)
            if random or drawing:
                check_draws(model, device, loss, moved, few)
        except Exception as error:
            if all_rows or not is_out_of_memory(error):
                raise
        if count > 1:
            together = filled if count <= filled or not filled else -(-count // _EIGHT) * _EIGHT
            sizes = (few,) if all_rows else (max(count, together), few)
            cycled = partial(_cycled, moved, count)
            check_losses_of_rows(model, device, loss, cycled, sizes, divided=all_rows, collated_at_random=random)
        if not shown and count >= _SOME:
            _check_some_loss(loss, model, alike(*range(few)))
    return shown and count > 1


def _collated_alike(
    batch_of: Callable[..., Any], count: int, device: torch.device
) -> tuple[Callable[..., Any], bool]:
    """The batches of rows, of which each is collated with the same random numbers, and whether there are any."""
    batch_of(*range(count))  # a data set may draw when it is read
    restart, drawn = restarter(device), drawn_since_now(device)
    batch_of(*range(count))

    def alike(*rows: int) -> Any:
        restart()
        return batch_of(*rows)

    return alike, drawn()


def _cycled(batch_of: Callable[..., Any], count: int, *rows: int) -> Any:
    return batch_of(*(row % count for row in rows))


@contextmanager
def _told_where_two_do_not_fit() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            "the check of per-example gradients needs two examples in memory at once, and they do not fit; "
            "verify=False leaves it out"
        ) from error


@contextmanager
def _named_norms(model: nn.Module) -> Iterator[None]:
    """An error of a model that normalises over its batch says so."""
    try:
        yield
    except ValueError as error:
        told = in_training_mode(model)
        if not told:
            raise
        raise ValueError(f"{error}{told}") from error


def _check_pairs(
    model: nn.Module,
    layers: Sequence[Layer],
    loss: LossFn,
    batch_of: Callable[..., Any],
    beside: Sequence[int],
    *,
    comparable: bool,
) -> tuple[bool, bool]:
    """Whether the first row and the one beside it could show a fault, and whether a pass draws random numbers."""
    if not beside:
        return check_alone(model, layers, loss, batch_of(0), [batch_of(0)]), False
    shown, drawn = list[bool](), False
    for other in beside:
        singles = [batch_of(0), batch_of(other)]
        shown.append(check_alone(model, layers, loss, batch_of(0, other), singles, comparable=comparable))
        drawn |= check_mode(model, layers, loss, batch_of(0, other), batch_of(0, 0))
    return shown[0], drawn


def _beside_the_first(batch_of: Callable[..., Any], count: int) -> list[int]:
    found = [differences(batch_of(0), batch_of(i)) for i in range(1, count)]
    return [1, *(1 + i for i in partners(found, count, found[0].union(*found) - found[0]))] if found else []


def _check_some_loss(loss_fn: LossFn, model: nn.Module, batch: Any) -> None:
    """One broken example adds nothing to a sum and stops nobody; where all are broken, every release would be noise alone."""
    with torch.no_grad():
        losses = loss_fn(model, batch)
    if not bool(losses.isfinite().any()):
        raise ValueError(
            f"the loss of every one of {len(losses)} examples is NaN or infinite; nothing was released. Look for missing values "
            "in the data, for a scale that overflows, and at the loss itself"
        )


def _losses(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    try:
        with forgotten(loss_fn, model):
            return loss_fn(model, batch)
    except IndexError as error:
        told = unknown_row(model, error)
        if told is None and any(text in str(error) for text in ("out of bounds", "out of range in self")):
            told = f"loss_fn failed on a batch: {error}. A label or token id is outside the range the model was built for."
        if told is None:
            raise  # a mistake of the function itself
        raise ValueError(told) from error


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)
