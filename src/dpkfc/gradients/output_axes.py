"""Tell where the outputs of a covered module have the batch, where its operations do not say.

The tracker follows what a layer computes, with three exceptions. A call on public inputs may still
have a row for each example, all of them equal. A recurrent layer runs in a kernel that is not
followed. The batch axis of a public probe may be guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpkfc.gradients.layers import Axes, Layer
from dpkfc.gradients.recorded_call import OpenCall
from dpkfc.gradients.recurrence import expected_places
from dpkfc.tracking.batch_rules import are_places_equal
from dpkfc.tracking.states import PARAMETRIC, BatchAxis, Parametric, State, Unknown
from dpkfc.tracking.tracker import Tracker

SINGLE_OUTPUT = ("linear", "conv", "embedding", "tied", "norm")
"""Rules of layers with one output, whose gradients come from that output alone."""


def declare_outputs(
    tracker: Tracker, layer: Layer, call: OpenCall, outputs: Sequence[Tensor], axes: Axes
) -> Axes:
    """Declare outputs that the tracker takes for public, and return the axes of all outputs.

    Args:
        tracker: follows the pass.
        layer: of the module.
        call: what the module was given; the axes of equal rows among its inputs are noted in it.
        outputs: of the call.
        axes: where the tracker says that the outputs have the batch.
    """
    is_public = not any((*call.axes, *axes))
    has_rows = is_public and _has_public_rows(tracker, layer, call, outputs)
    if has_rows:
        # The rows are followed from here.
        for i, x in enumerate(call.tensors):
            if x.shape[:1] == (tracker.size,):
                call.axes[i] = BatchAxis(0)
    elif not any(axes):
        has_rows = _has_equal_rows(tracker, layer, call, outputs)
    if has_rows:
        for x in outputs:
            tracker.set_state(x, BatchAxis(0))
        return [BatchAxis(0)] * len(outputs)
    for x, axis in zip(outputs, axes, strict=True):
        if axis is None and not isinstance(tracker.state(x), Unknown):
            # Without examples it depends on the parameters of its layer.
            tracker.set_state(x, PARAMETRIC)
            if layer.rule not in SINGLE_OUTPUT:
                # Their gradients come through the graph.
                tracker.read.update(map(id, call.parameters))
    return axes


def declare_recurrent(
    tracker: Tracker, module: nn.Module, call: OpenCall, outputs: Sequence[Tensor]
) -> None:
    """Declare where the outputs of a recurrent layer have the batch, from its inputs."""
    lost = Unknown(
        type(module).__name__,
        "its input is packed, has the batch in another place, or dropout is drawn between layers",
    )
    states: list[State] = [lost] * len(outputs)
    if _has_recurrent_batch(tracker, module, call):
        sequence_axis, state_axis, _ = expected_places(module)
        states = [sequence_axis, state_axis, state_axis]
    elif not any(call.axes) and Unknown not in call.kinds:
        states = [PARAMETRIC] * len(outputs)
    for x, state in zip(outputs, states, strict=False):
        tracker.set_state(x, state)


def _has_recurrent_batch(tracker: Tracker, module: nn.Module, call: OpenCall) -> bool:
    """Return whether the inputs of a recurrent layer have the batch where the layer takes it."""
    if module.training and getattr(module, "num_layers", 1) > 1 and module.dropout:
        return False  # dropout is drawn between layers
    sequence_axis, state_axis, rank = expected_places(module)
    if call.kinds & {Parametric, Unknown} or call.axes[:1] != [sequence_axis]:
        return False
    x, *states = call.tensors
    for state, axis in zip(states, call.axes[1:], strict=True):
        if axis not in (None, state_axis):
            return False
        if axis is None and not _has_equal_places(tracker, state, state_axis):
            return False
    return x.dim() == rank


def _has_equal_places(tracker: Tracker, x: Tensor, axis: BatchAxis) -> bool:
    """Return whether a public tensor is equal for all examples, or may hold undeclared ones."""
    return tracker.trusts_public_rows or are_places_equal(x, axis, tracker.size)


def _has_public_rows(
    tracker: Tracker, layer: Layer, call: OpenCall, outputs: Sequence[Tensor]
) -> bool:
    """Return whether a call on public inputs has a row for each example, equal for all of them.

    Position ids `[N, T]` have. Where the rows may be undeclared examples, their number decides.
    """
    if layer.rule not in SINGLE_OUTPUT or layer.paths or call.kinds & {Parametric, Unknown}:
        return False
    x = call.tensors[0]
    for rows in (x, outputs[0]):
        if rows.dim() < 2 or len(rows) != tracker.size:
            return False
    return _has_equal_places(tracker, x, BatchAxis(0))


def _has_equal_rows(
    tracker: Tracker, layer: Layer, call: OpenCall, outputs: Sequence[Tensor]
) -> bool:
    """Return whether a module that runs again for each example gives all of them equal rows.

    Positions in BART read the shape of the token ids alone. In Whisper they read public rows of
    ids, whose axes are noted. Another public tensor may be as long as the batch by chance.
    """
    if layer.rule != "fallback" or call.kinds & {Parametric, Unknown}:
        return False
    size = tracker.size
    rank = max((x.dim() for x in call.tensors), default=0)
    for x in outputs:
        has_rows = x.dim() >= rank and len(x) == size and tracker.state(x) is None
        if not has_rows or not are_places_equal(x, BatchAxis(0), size):
            return False
    for i, x in enumerate(call.tensors):
        is_row_each = x.shape[:1] == (size,) and are_places_equal(x, BatchAxis(0), size)
        if call.axes[i] is None and is_row_each:
            if x.dtype != torch.long or x.dim() < 2 or x.shape != outputs[0].shape[:-1]:
                return False
            call.axes[i] = BatchAxis(0)
    return any(call.axes)


def guess_axis(x: Tensor, size: int) -> BatchAxis | None:
    """Return the first place of a probe's tensor that can hold the batch, or None."""
    if x.dim() and x.shape[0] and x.shape[0] % size == 0:
        return BatchAxis(0, 1, x.shape[0] // size)
    for dim, length in enumerate(x.shape):
        if length == size:
            return BatchAxis(dim)
    return None
