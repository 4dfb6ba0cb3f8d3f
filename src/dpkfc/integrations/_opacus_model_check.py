"""The checks of a script's model on public rows: that examples do not mix, and padding no outputs.

Rows have the shapes of what the script calls the model with. Padded records come from the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpkfc.gradients.evaluation_mode import evaluation_mode
from dpkfc.gradients.layers import Layer, tensors_of
from dpkfc.gradients.one_pass import batch_tracker
from dpkfc.gradients.replica import replicate, replicate_variables
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.rows import PublicRows, draw_public_rows, unwrap_containers, warn_of_padding
from dpkfc.public_rows.template import Template
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import BatchAxis, Unknown, example_first
from dpkfc.tracking.tracker import Tracker
from dpkfc.verification.check import Verdict, check_on_public_rows
from dpkfc.verification.differences import have_equal_gradients

NO_BATCH = (
    "no argument of the model is of the loader's batch; call the model with the tensors of the"
    " batch"
)


@dataclass(frozen=True)
class _Call:
    """How a script calls its model.

    Attributes:
        leaves: the flattened arguments.
        spec: how the arguments are put together.
        axes: the batch axis of each argument, None for one without.
        size: the number of examples in the arguments.
        lengths: of the arguments to lengths of public rows; others stay.
    """

    leaves: list[Any]
    spec: Any
    axes: list[BatchAxis | None]
    size: int
    lengths: Mapping[int, int]

    @property
    def batch_axes(self) -> list[BatchAxis]:
        """Return the batch axes of public arguments."""
        return [
            replace(axis, post=self.lengths.get(axis.post, axis.post))
            for axis in self.axes
            if axis is not None
        ]

    def record(self) -> list[Tensor]:
        """Return zeros of the types and shapes of one public example."""
        batched = [x for x, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]
        rows = []
        for x, axis in zip(batched, self.batch_axes, strict=True):
            shape = [self.lengths.get(length, length) for length in x.shape]
            shape[axis.dim] = axis.length(1)
            rows.append(x.new_zeros(shape))
        return rows

    def collate(self, records: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return the batched arguments of some examples."""
        batched = []
        for place, axis in enumerate(self.batch_axes):
            dim = axis.dim
            parts = []
            for record in records:
                x = record[place]
                shape = list(x.shape)
                shape[dim : dim + 1] = axis.pre, 1, axis.post
                # An error of unflatten takes longer than a pass, and most padded records have one.
                parts.append(x.view(shape))
            joined = torch.cat(parts, dim + 1)
            batched.append(joined.flatten(dim, dim + 2))
        return batched

    def count(self, rows: list[Tensor]) -> int:
        """Return the number of examples in batched arguments."""
        axis = self.batch_axes[0]
        return rows[0].shape[axis.dim] // (axis.pre * axis.post)

    def public_rows(self, integers: str, count: int) -> PublicRows:
        """Return public rows with the shapes of the arguments."""
        return draw_public_rows(self.record(), count, self.collate, integers)

    def outputs(self, model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
        """Call the model with these rows; return its floating-point outputs that have axes."""
        given = iter(rows)
        leaves = list(self.leaves)
        for i, axis in enumerate(self.axes):
            if axis is not None:
                leaves[i] = next(given)
        return _call(model, leaves, self.spec)


def _call(model: nn.Module, leaves: list[Any], spec: Any) -> list[Tensor]:
    """Return the floating-point outputs with axes of a call with flattened arguments."""
    args, kwargs = tree_unflatten(leaves, spec)
    return [x for x in tensors_of(model(*args, **kwargs)) if x.is_floating_point() and x.dim()]


def check_model(
    model: nn.Module,
    layers: Sequence[Layer],
    args: Any,
    kwargs: Any,
    tracker: Tracker,
    lengths: Sequence[Mapping[int, int]],
    *,
    expected: int,
) -> Verdict:
    """Check on public rows that a model gives every example outputs of its own.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        args: the arguments of a call by the script. Only types and shapes are read.
        kwargs: the keyword arguments of that call.
        tracker: knows where the arguments have the batch.
        lengths: from `find_public_lengths`. The first with which the model runs are used.
        expected: the rows of a logical batch.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix, by name of the operation; or no argument has examples.
    """
    leaves, spec = tree_flatten((args, kwargs))
    for state in map(tracker.state, tensors_of(leaves)):
        if isinstance(state, Unknown):
            # A private batch has these shapes.
            return Verdict(replace(state, reason=state.reason.partition(" (shapes")[0]))
    axes = [tracker.axis(x) if isinstance(x, Tensor) else None for x in leaves]
    if not any(axes):
        raise ValueError(NO_BATCH)
    for own_lengths in lengths:
        call = _Call(leaves, spec, axes, tracker.size, own_lengths)
        output_axes = _output_axes(model, call)
        if output_axes:
            break

    def losses(net: nn.Module, rows: list[Tensor]) -> Tensor:
        return _project(call.outputs(net, rows), output_axes, call.count(rows))

    attempts = [partial(call.public_rows, integers) for integers in ("tokens", "bits", "ones")]
    return check_on_public_rows(model, layers, losses, attempts, expected=expected)


def find_public_lengths(
    batch: Any, template: Template, collate: Callable[[Any], Any]
) -> list[Mapping[int, int]]:
    """Return maps from lengths of a batch that follow its records to public lengths.

    The longest record of a batch is private. A script may call its model with one position less or
    more than the batch has.

    Args:
        batch: what the loader has yielded; only its shapes are read.
        template: of the data set.
        collate: of the loader.

    Returns:
        One map for each public length to try; an empty one where no length follows the records.
    """
    own = _shapes_of(batch)
    ranks = list(map(len, own))
    public_shapes = []
    for prototype in template.prototypes:
        # A collate function may refuse records of some length.
        with suppress(Exception):
            rows = draw_public_rows(prototype, 2, collate, "tokens").batch(range(2))
            shapes = _shapes_of(rows)
            if list(map(len, shapes)) == ranks:
                public_shapes.append(shapes)
    varied = []
    for i, rank in enumerate(ranks):
        for dim in range(1, rank):
            lengths_there = {shapes[i][dim] for shapes in public_shapes}
            if len(lengths_there) > 1:
                varied.append((i, dim))
    maps: list[Mapping[int, int]] = []
    for public in public_shapes:
        lengths: dict[int, int] = {}
        for step in (-1, 1, 0):
            lengths |= {own[i][dim] + step: public[i][dim] + step for i, dim in varied}
        maps.append(lengths)
    return maps or [{}]


def _shapes_of(batch: Any) -> list[torch.Size]:
    """Return the shapes of the tensors in a batch."""
    return [x.shape for x in tensors_of(unwrap_containers(batch))]


def _output_axes(model: nn.Module, call: _Call) -> list[BatchAxis | None]:
    """Return the batch axis of each output of a model.

    It is what a tracker finds, or the axis that grows with the batch.
    """
    for integers in ("bits", "ones"):
        rows = call.public_rows(integers, 3)
        try:
            three = rows.batch(range(3))
            two = rows.batch(range(2))
            tracker = batch_tracker(model, None, 3)
            for x, axis in zip(three, call.batch_axes, strict=True):
                tracker.set_state(x, axis)
            with torch.no_grad(), _replicate_all(model), follow(tracker):
                outputs_of_three = call.outputs(model, three)
            with torch.no_grad(), _replicate_all(model):
                outputs_of_two = call.outputs(model, two)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue
        axes: list[BatchAxis | None] = []
        for x, y in zip(outputs_of_three, outputs_of_two, strict=True):
            axes.append(tracker.axis(x) or _growing_axis(x, y))
        return axes
    return []


@contextmanager
def _replicate_all(model: nn.Module) -> Iterator[None]:
    """Run the body on a replica of a model and of the variables that its code reaches."""
    with replicate(model), replicate_variables(model, None):
        yield


def _growing_axis(of_three: Tensor, of_two: Tensor) -> BatchAxis | None:
    """Return the axis that is three halves as long for three examples as for two."""
    for dim, length in enumerate(of_three.shape):
        if length and 2 * length == 3 * of_two.shape[dim]:
            return BatchAxis(dim, 1, length // 3)
    return None


def _project(outputs: Sequence[Tensor], axes: Sequence[BatchAxis | None], size: int) -> Tensor:
    """Return a number for every example `[N]` that all outputs of the model enter.

    They do not enter linearly, so that a mean over the batch shows.
    """
    rows = [
        example_first(x, axis, size).reshape(size, -1)
        for x, axis in zip(outputs, axes, strict=False)
        if axis is not None
    ]
    if not rows:
        raise ValueError(
            "no output of the model has an axis for the examples; return one row for each example"
        )
    row = torch.cat(rows, 1)
    places = torch.arange(row.shape[1], dtype=row.dtype, device=row.device)
    curved = row + 0.5 * row.square()
    return curved @ places.cos()


# -- padding --------------------------------------------------------------------------------------


def check_padding(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    batch: Any,
    template: Template,
    collate: Callable[[Any], Any],
) -> None:
    """Check on public records that outputs for a short record do not depend on its padding.

    Args:
        model: the model.
        args: the arguments of a call by the script.
        kwargs: the keyword arguments of that call.
        batch: what the loader has yielded.
        template: of the data set.
        collate: of the loader. A longer record in a batch makes it pad shorter ones.

    Raises:
        ValueError: the outputs depend on the padding.
    """
    leaves, spec = tree_flatten((args, kwargs))
    matches = _match_leaves(leaves, tree_leaves(unwrap_containers(batch)))
    padded = _PaddedCall(model, leaves, spec, matches)
    for make_rows in template.attempts(collate, torch.device("cpu")):
        is_different = make_rows(0).depends_on_padding(padded.agree)
        if is_different:
            raise ValueError(
                "an example padded to the length of a longer one has other outputs than alone:"
                " write (h * mask).sum(1) / mask.sum(1), or pack in forward (examples/opacus)"
            )
        if is_different is False:
            return
    warn_of_padding(stacklevel=5)


@dataclass(frozen=True)
class _PaddedCall:
    """A call of the model, repeated on collated public records.

    Attributes:
        model: the model.
        leaves: the flattened arguments of the call by the script.
        spec: how the arguments are put together.
        matches: which argument may be which leaf of a batch.
    """

    model: nn.Module
    leaves: list[Any]
    spec: Any
    matches: list[_Match]

    def run(self, collated: Any, match: _Match) -> list[Tensor]:
        """Return the floating-point outputs for a collated batch."""
        rows = tree_leaves(unwrap_containers(collated))
        leaves = list(self.leaves)
        for i, (place, arrange) in match.items():
            leaves[i] = arrange(rows[place]).to(leaves[i])
        model = self.model
        # cuDNN differentiates no recurrent layer in evaluation mode.
        no_cudnn = torch.backends.cudnn.flags(enabled=False)
        with torch.enable_grad(), no_cudnn, _replicate_all(model), evaluation_mode(model):
            return _call(model, leaves, self.spec)

    def agree(self, batch: Any, alone: Any) -> bool:
        """Return whether a record has the same outputs and gradients in a batch and alone.

        Raises:
            ValueError: the model takes neither in any arrangement.
        """
        results = []
        for match in self.matches:
            with suppress(IndexError, RuntimeError, ValueError):
                outputs = self.run(batch, match)
                pairs = list(zip(outputs, self.run(alone, match), strict=True))
                # A collate function may sort its records by length.
                for first in (0, 1):
                    sums = [_sums(x[first:], y) for x, y in pairs]
                    results.append(None not in sums)
                    if results[-1]:
                        columns = zip(*filter(None, sums), strict=True)
                        one, other = (torch.stack(column).sum() for column in columns)
                        results[-1] = have_equal_gradients(self.model, one, other)
        if not results:
            raise ValueError("the model takes no such batch")
        return any(results)


# How a leaf of the batch became an argument of the model.
_Arrangement = Callable[[Tensor], Tensor]


# Place of an argument to the place of a leaf.
_Match = dict[int, tuple[int, _Arrangement]]


_MAX_MATCHES = 64


_ARRANGEMENTS: list[_Arrangement] = [
    torch.clone,
    partial(torch.transpose, dim0=0, dim1=1),
    partial(torch.unsqueeze, dim=1),
    partial(torch.unsqueeze, dim=-1),
]


def _match_leaves(arguments: Sequence[Any], batch: Sequence[Any]) -> list[_Match]:
    """Return which argument may be which leaf of the batch, for all arguments with axes."""
    choices: dict[int, list[tuple[int, _Arrangement]]] = {}
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor) and x.dim():
            own = [(j, _ARRANGEMENTS[0]) for j, y in enumerate(batch) if y is x]
            choices[i] = own or _find_leaves(x, batch)
    matches = []
    for chosen in islice(product(*choices.values()), _MAX_MATCHES):
        leaves = {j for j, _ in chosen}
        if len(leaves) == len(chosen):
            matches.append(dict(zip(choices, chosen, strict=True)))
    return matches


def _find_leaves(x: Tensor, batch: Sequence[Any]) -> list[tuple[int, _Arrangement]]:
    """Return the leaves of a batch that an argument has the shape of, by the least change."""
    arrangements = list(_ARRANGEMENTS)
    if x.dim() > 2:  # else labels could become anything
        arrangements.append(partial(_one_hot, classes=x.shape[-1]))
    for arrange in arrangements:
        places = []
        for j, y in enumerate(batch):
            with suppress(AttributeError, IndexError):
                if arrange(torch.empty(y.shape, device="meta")).shape == x.shape:
                    places.append((j, arrange))
        if places:
            return places
    return []


def _one_hot(x: Tensor, classes: int) -> Tensor:
    if x.is_meta:
        return x.unsqueeze(-1).expand(*x.shape, classes)
    return F.one_hot(x, classes)


def _sums(padded: Tensor, alone: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return sums over the first row of a batch and over the record alone, None where they differ.

    Only the positions that both have are compared, counted from the front or from the back.
    """
    if alone.dim() == padded.dim() - 1:
        alone = alone.unsqueeze(0)  # squeeze() has taken the batch axis away
    first = padded[:1]
    lengths = list(map(min, first.shape, alone.shape))
    front = tuple(slice(length) for length in lengths)
    back = tuple(slice(-length, None) for length in lengths)
    for part in (front, back):
        x, y = first[part], alone[part]
        if torch.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True):
            return x.sin().sum(), y.sin().sum()  # a sum of softmax has no gradient
    return None
