"""The check of a script's model on public rows, drawn to the shapes of what the script calls it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader

from dpkfc.gradients.layers import Layer
from dpkfc.gradients.memory import is_out_of_memory
from dpkfc.gradients.micro import batch_tracker
from dpkfc.gradients.model_state import evaluation_mode, restored_state
from dpkfc.integrations._recording import one_example, unwrap_containers
from dpkfc.tracking import BatchAxis, Tracker, Unknown, example_first
from dpkfc.verification import PublicRows, Verdict, check_on_public_rows, public_rows

__all__ = ["check_model", "check_padding"]


@dataclass(frozen=True)
class _Call:
    """How a script calls its model.

    Attributes:
        leaves: the flattened arguments.
        spec: how they are put together.
        axes: batch axis of each, None for one without.
        size: examples in them.
    """

    leaves: list[Any]
    spec: Any
    axes: list[BatchAxis | None]
    size: int

    def record(self) -> list[Tensor]:
        """Return what belongs to the first example; only types and shapes of it are used."""
        pairs = zip(self.leaves, self.axes, strict=True)
        return [one_example(x, axis, self.size, 0) for x, axis in pairs if axis is not None]

    def collate(self, records: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return the batched arguments of some examples."""
        joined = []
        for place, axis in enumerate(axis for axis in self.axes if axis is not None):
            parts = [record[place].unflatten(axis.dim, (axis.pre, 1, axis.post)) for record in records]
            joined.append(torch.cat(parts, axis.dim + 1).flatten(axis.dim, axis.dim + 2))
        return joined

    def outputs(self, model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
        """Call the model with these rows; return its floating-point outputs that have axes."""
        given = iter(rows)
        leaves = [x if axis is None else next(given) for x, axis in zip(self.leaves, self.axes, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return [
            x
            for x in tree_leaves(model(*args, **kwargs))
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim()
        ]


def check_model(
    model: nn.Module, layers: Sequence[Layer], args: Any, kwargs: Any, tracker: Tracker, expected: int, strict: bool
) -> Verdict:
    """Check on public rows that a model gives every example outputs of its own.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        args: of a call by the script; types and shapes are read.
        kwargs: of that call.
        tracker: that knows where they have the batch.
        expected: rows of a logical batch.
        strict: raise where an operation has no batch rule.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix, by name of the operation; no argument has examples.
    """
    leaves, spec = tree_flatten((args, kwargs))
    states = [tracker.state(x) if isinstance(x, Tensor) else None for x in leaves]
    lost = next((state for state in states if isinstance(state, Unknown)), None)
    if lost is not None:
        return Verdict(operation=lost)
    axes = [state if isinstance(state, BatchAxis) else None for state in states]
    if not any(axes):
        raise ValueError("no argument of the model is of the loader's batch; call the model with the tensors of the batch")
    call = _Call(leaves, spec, axes, tracker.size)
    places = _output_axes(model, call)

    def losses(net: nn.Module, rows: list[Tensor]) -> Tensor:
        return _projected(call.outputs(net, rows), places, len(rows_of(call, rows)))

    attempts = [partial(_rows, call, integers) for integers in ("tokens", "bits", "ones")]
    return check_on_public_rows(model, layers, losses, attempts, expected=expected, strict=strict)


def rows_of(call: _Call, rows: list[Tensor]) -> range:
    """Return the numbers of the examples in batched arguments."""
    axis = next(axis for axis in call.axes if axis is not None)
    return range(rows[0].shape[axis.dim] // (axis.pre * axis.post))


def _rows(call: _Call, integers: str, count: int) -> PublicRows:
    return public_rows(call.record(), count, call.collate, integers)


def _output_axes(model: nn.Module, call: _Call) -> list[BatchAxis | None]:
    """Return where the outputs of a model have the batch: as a tracker finds, or the axis that grows with the batch."""
    for integers in ("bits", "ones"):
        rows = public_rows(call.record(), 3, call.collate, integers)
        try:
            three, two = rows.batch(range(3)), rows.batch(range(2))
            tracker = batch_tracker(model, None, 3)
            for x, given in zip(three, (axis for axis in call.axes if axis is not None), strict=True):
                tracker.set_state(x, given)
            with torch.no_grad(), restored_state(model), tracker.following():
                many = call.outputs(model, three)
            with torch.no_grad(), restored_state(model):
                few = call.outputs(model, two)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue
        found: list[BatchAxis | None] = []
        for x, y in zip(many, few, strict=True):
            axis = tracker.axis(x)
            grown = [d for d in range(x.dim()) if 2 * x.shape[d] == 3 * y.shape[d] and x.shape[d]]
            if axis is None and grown:
                axis = BatchAxis(grown[0], 1, x.shape[grown[0]] // 3)
            found.append(axis)
        return found
    return []


def _projected(outputs: Sequence[Tensor], places: Sequence[BatchAxis | None], size: int) -> Tensor:
    """Return a number for every example `[N]` that all outputs of the model enter, not linearly: a batch mean must show."""
    rows = [
        example_first(x, axis, size).reshape(size, -1)
        for x, axis in zip(outputs, places, strict=False)
        if axis is not None
    ]
    if not rows:
        raise ValueError("no output of the model has an axis for the examples")
    row = torch.cat([x.to(rows[0].dtype) for x in rows], 1)
    return (row + 0.5 * row.square()) @ torch.cos(torch.arange(row.shape[1], dtype=row.dtype, device=row.device))


def check_padding(model: nn.Module, args: Any, kwargs: Any, batch: Any, source: DataLoader[Any]) -> None:
    """Check on public records that the outputs for a short one do not depend on how far a longer one makes it padded.

    Args:
        model: the model.
        args: of a call by the script.
        kwargs: of that call.
        batch: what the loader has handed out.
        source: the script's own loader.

    Raises:
        ValueError: they do.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = _places(leaves, tree_leaves(unwrap_containers(batch)))
    if places is None:
        return
    for integers in ("tokens", "bits", "ones"):
        rows = public_rows(source.dataset[0], 0, source.collate_fn, integers)
        if len(rows.longer) < 2:
            return
        try:
            together, alone = (
                _outputs_of(model, leaves, spec, places, rows.collate(list(chosen)))
                for chosen in (rows.longer[:2], rows.longer[:1])
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue  # records of several lengths cannot be batched, or the model does not take these numbers
        if any(not _agree(x, y) for x, y in zip(together, alone, strict=True)):
            raise ValueError(
                "an example that is padded to the length of a longer one has other outputs than alone: mask the padding, or pad "
                "every batch to one length"
            )


def _places(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[int, int] | None:
    """Return which argument is which leaf of the batch; None where one cannot be told."""
    found = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not x.dim():
            continue
        same = [j for j, y in enumerate(batch) if y is x]
        alike = [j for j, y in enumerate(batch) if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype]
        chosen = same or alike
        if len(chosen) != 1:
            return None
        found[i] = chosen[0]
    return found or None


def _outputs_of(model: nn.Module, leaves: list[Any], spec: Any, places: dict[int, int], batch: Any) -> list[Tensor]:
    rows = tree_leaves(unwrap_containers(batch))
    given = [rows[places[i]].to(x.device) if i in places else x for i, x in enumerate(leaves)]
    args, kwargs = tree_unflatten(given, spec)
    with torch.no_grad(), restored_state(model), evaluation_mode(model):
        output = model(*args, **kwargs)
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]


def _agree(together: Tensor, alone: Tensor) -> bool:
    """Return whether the first row of a batch is that of the record alone where both have positions."""
    if together.dim() != alone.dim():  # squeeze() has taken the batch axis away
        alone = alone.reshape(1, *alone.shape) if alone.dim() == together.dim() - 1 else alone
    if together.dim() != alone.dim():
        return True
    together = together[:1]
    shortest = [min(a, b) for a, b in zip(together.shape, alone.shape, strict=True)]
    fronts = [z[tuple(slice(0, k) for k in shortest)] for z in (together, alone)]
    backs = [z[tuple(slice(n - k, n) for n, k in zip(z.shape, shortest, strict=True))] for z in (together, alone)]
    return any(torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in (fronts, backs))
