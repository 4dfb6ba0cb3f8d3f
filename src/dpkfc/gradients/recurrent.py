"""Per-example gradients of recurrent layers, from the recurrence run once more with plain operations.

What a weight matrix adds to the gates at one time step is `s_t = W r_t + bias`, with r_t the input or the state before. One
autograd call over the repeated recurrence gives ∂ℓ_n/∂s_nt for every matrix and step, and the gradient of example n is the
sum of outer products `Σ_t (∂ℓ_n/∂s_nt) r_ntᵀ`, as in a linear layer on a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.calls import Call
from dpkfc.gradients.layers import Layer
from dpkfc.tracking.axes import BatchAxis

__all__ = ["has_batch_in_place", "recurrent_gradients"]


@dataclass(frozen=True)
class _Sequence:
    """One call of a recurrent layer with the batch in front.

    Attributes:
        x: inputs `[N, T, d]`.
        state: initial h (and c of an LSTM), each `[layers * directions, N, width]`.
        gradients: at the outputs `[N, T, directions * width]` (None for a cell), then at the final h (and c).
    """

    x: Tensor
    state: tuple[Tensor, ...]
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class _Tap:
    """What one matrix has read and what it has added, step by step.

    Attributes:
        weight, bias: roles of the matrix and of the bias that is added with it.
        rows: T inputs `[N, d_in]`, detached.
        sums: T pre-activations `[N, d_out]` inside the graph.
    """

    weight: str
    bias: str
    rows: Sequence[Tensor]
    sums: Sequence[Tensor]


def has_batch_in_place(call: Call, batch_size: int) -> bool:
    """Return whether a call of a recurrent module has the batch where the module takes it.

    Args:
        call: packed sequences and inputs without a batch axis have it nowhere.
        batch_size: examples N. The tape names no axis in a batch of one, so the size decides there.
    """
    x = call.input
    is_cell = isinstance(call.module, nn.RNNCellBase)
    if not isinstance(x, Tensor) or x.dim() != (2 if is_cell else 3):
        return False
    is_first = is_cell or call.module.batch_first
    dim = 0 if is_first else 1
    if batch_size == 1:
        return x.shape[dim] == 1
    return call.axes[0] == BatchAxis(dim)


def recurrent_gradients(layer: Layer, calls: Sequence[Call], batch_size: int) -> dict[str, Tensor]:
    """Gradients of each example's loss with respect to the parameters of an LSTM, GRU or RNN, or of one of their cells.

    Args:
        layer: names the parameters.
        calls: its calls in one forward pass; their gradients add up.
        batch_size: examples N.

    Returns:
        Role to gradients `[N, *parameter.shape]`.

    """
    rows: dict[str, list[Tensor]] = {role: [] for role in layer.parameters}
    sums: dict[str, list[Tensor]] = {role: [] for role in layer.parameters}
    for call in calls:
        taps, gradients = _differentiated(call.module, _read(call))
        for tap, gradient in zip(taps, gradients, strict=True):
            if tap.weight in layer.parameters:
                rows[tap.weight].append(torch.stack(list(tap.rows), 1))
            for role in (tap.weight, tap.bias):
                if role in layer.parameters:
                    sums[role].append(gradient)
    result = {}
    for role in layer.parameters:
        b = torch.cat(sums[role], 1)
        result[role] = torch.bmm(b.transpose(1, 2), torch.cat(rows[role], 1)) if rows[role] else b.sum(1)
    return result


def _read(call: Call) -> _Sequence:
    """Return one call in the common form, with the batch in front; the tape has seen that it is where the module takes it."""
    given = dict(zip(("input", "hx"), call.args, strict=False)) | call.kwargs
    x, hx, module = given["input"], given.get("hx"), call.module
    gradients: list[Tensor | None] = [_precise(g) for g in call.outputs if g is not None]
    state = hx if isinstance(hx, tuple) else () if hx is None else (hx,)
    if isinstance(module, nn.RNNCellBase):
        x = x.unsqueeze(1)
        state = tuple(s.unsqueeze(0) for s in state)
        gradients = [None, *(g.unsqueeze(0) for g in gradients if g is not None)]
    elif not module.batch_first:
        x = x.transpose(0, 1)
        gradients = [None if g is None else g.transpose(0, 1) for g in gradients[:1]] + gradients[1:]
    x = _precise(x)
    state = tuple(s.to(x.dtype) for s in state)
    return _Sequence(x, state or _zero_state(module, x), gradients)


def _precise(x: Tensor) -> Tensor:
    """Sums over time live in float32 (float64 on request) whatever the model computes in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _zero_state(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    count = getattr(module, "num_layers", 1) * (1 + getattr(module, "bidirectional", False))
    width: Any = module.hidden_size
    widths = [getattr(module, "proj_size", 0) or width]
    widths += [width] if isinstance(module, (nn.LSTM, nn.LSTMCell)) else []
    return tuple(x.new_zeros(count, x.shape[0], width) for width in widths)


def _differentiated(module: nn.Module, sequence: _Sequence) -> tuple[list[_Tap], list[Tensor]]:
    """All taps of one call and ∂ℓ_n/∂s_nt of each, `[N, T, d_out]`."""
    taps: list[_Tap] = []
    with torch.enable_grad():
        ends = _recurrence(module, sequence, taps)
        pairs = [(y, g) for y, g in zip(ends, sequence.gradients, strict=True) if g is not None]
        nodes = [s for tap in taps for s in tap.sums]
        found = torch.autograd.grad([y for y, _ in pairs], nodes, [g.to(y.dtype) for y, g in pairs], allow_unused=True)
    gradients = iter(torch.zeros_like(s) if g is None else g for s, g in zip(nodes, found, strict=True))
    return taps, [torch.stack([next(gradients) for _ in tap.sums], 1) for tap in taps]


def _recurrence(module: nn.Module, sequence: _Sequence, taps: list[_Tap]) -> list[Tensor]:
    """Outputs `[N, T, directions * width]` and final states, with every pre-activation inside the graph."""
    x, ends = sequence.x, list[tuple[Tensor, ...]]()
    cell = isinstance(module, nn.RNNCellBase)
    directions = ("", "_reverse") if getattr(module, "bidirectional", False) else ("",)
    for index in range(getattr(module, "num_layers", 1)):
        outputs = []
        for direction in directions:
            state = tuple(s[len(ends)] for s in sequence.state)
            suffix = "" if cell else f"_l{index}{direction}"
            out, state = _direction(module, suffix, x, state, taps)
            outputs.append(out)
            ends.append(state)
        x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
    return [x, *(torch.stack(parts) for parts in zip(*ends, strict=True))]


def _direction(
    module: nn.Module, suffix: str, x: Tensor, state: tuple[Tensor, ...], taps: list[_Tap]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One pass of one layer over time, forwards or backwards."""
    projected = _weight(module, f"weight_hr{suffix}", x)
    w_hh, b_hh = _weight(module, f"weight_hh{suffix}", x), _weight(module, f"bias_hh{suffix}", x)
    given = _node(F.linear(x, _weight(module, f"weight_ih{suffix}", x), _weight(module, f"bias_ih{suffix}", x)))  # type: ignore[arg-type]
    steps = given.unbind(1)
    before: list[Tensor] = []
    fed: list[Tensor] = []
    inner: list[Tensor] = []
    new: list[Tensor] = []
    outputs: list[Tensor] = []
    times = range(x.shape[1])
    for t in reversed(times) if suffix.endswith("_reverse") else times:
        before.append(state[0].detach())
        fed.append(_node(F.linear(state[0], w_hh, b_hh)))  # type: ignore[arg-type]
        after = _step(module, steps[t], fed[-1], state)
        if projected is not None:
            inner.append(after[0].detach())
            new.append(F.linear(after[0], projected))
            after = (new[-1], *after[1:])
        state = after
        outputs.append(state[0])
    taps.append(_Tap(f"weight_ih{suffix}", f"bias_ih{suffix}", x.detach().unbind(1), steps))
    taps.append(_Tap(f"weight_hh{suffix}", f"bias_hh{suffix}", before, fed))
    if projected is not None:
        taps.append(_Tap(f"weight_hr{suffix}", "", inner, new))
    if suffix.endswith("_reverse"):
        outputs.reverse()
    return torch.stack(outputs, 1), state


def _weight(module: nn.Module, name: str, like: Tensor) -> Tensor | None:
    tensor = getattr(module, name, None)
    return tensor.detach().to(like.dtype) if isinstance(tensor, Tensor) else None


def _node(x: Tensor) -> Tensor:
    """x inside the graph, also where nothing before it is."""
    return x if x.requires_grad else x.requires_grad_()


def _step(module: nn.Module, given: Tensor, fed: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state after one step, from what input and state add to the gates (torch's own order of gates)."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        i, f, g, o = (given + fed).chunk(4, 1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        (r, z, n), (r_fed, z_fed, n_fed) = given.chunk(3, 1), fed.chunk(3, 1)
        new = torch.tanh(n + torch.sigmoid(r + r_fed) * n_fed)
        keep = torch.sigmoid(z + z_fed)
        return ((1 - keep) * new + keep * state[0],)
    return (torch.relu(given + fed) if module.nonlinearity == "relu" else torch.tanh(given + fed),)
