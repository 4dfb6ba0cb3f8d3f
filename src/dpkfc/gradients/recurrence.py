"""Recurrent layers of torch: the recurrence runs again with plain operations.

A weight matrix adds `s_t = W r_t + bias` to the gates at a time step, with r_t the input or the
state before. One autograd call over the repeated recurrence gives ∂ℓ_n/∂s_nt for every matrix and
step. The gradient of example n is the sum of outer products `Σ_t (∂ℓ_n/∂s_nt) r_ntᵀ`, as in a
linear layer on a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.attention import expected_axis
from dpkfc.gradients.autograd_graph import differentiate
from dpkfc.gradients.layers import Call, Layer, name_arguments
from dpkfc.linalg.blocks import raise_precision
from dpkfc.tensors import Tensors
from dpkfc.tracking.batch_rules import tensors_in
from dpkfc.tracking.states import BatchAxis


@dataclass(frozen=True)
class _Sequence:
    """One call of a recurrent layer with the batch in front.

    Attributes:
        x: inputs `[N, T, d]`.
        state: initial h (and c of an LSTM), each `[layers * directions, N, width]`.
        gradients: at the outputs `[N, T, directions * width]` (None for a cell), then at the final
            h (and c).
    """

    x: Tensor
    state: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class _Matrices:
    """The matrices of a recurrent module, and what they are used on.

    Attributes:
        uses: role of a matrix and of its bias to the inputs `[N, T, d_in]` of each use, detached,
            and to the sums `[N, T, d_out]` that it adds, inside the graph.
    """

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self._module = module
        self._dtype = like.dtype
        self.uses: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}

    def has(self, role: str) -> bool:
        """Return whether the module has a matrix."""
        return isinstance(getattr(self._module, role, None), Tensor)

    def _read(self, role: str) -> Any:
        return getattr(self._module, role).detach().to(self._dtype) if self.has(role) else None

    def add(self, weight: str, bias: str, rows: Tensor) -> Tensor:
        """Return what `[N, T, d_in]` adds to the gates, inside the graph from here on."""
        sums = F.linear(rows, self._read(weight), self._read(bias)).requires_grad_()
        self.uses.setdefault((weight, bias), []).append((rows.detach(), sums))
        return sums


def expected_places(module: nn.Module) -> tuple[BatchAxis, BatchAxis, int]:
    """Return the axes of inputs and states of a recurrent module, and the rank of its inputs."""
    if isinstance(module, nn.RNNCellBase):
        return BatchAxis(0), BatchAxis(0), 2
    return expected_axis(module), BatchAxis(1), 3


def has_batch_in_place(call: Call, batch_size: int) -> bool:
    """Return whether a call of a recurrent module has the batch where the module takes it.

    Packed sequences and inputs without a batch axis do not have it.

    Args:
        call: the call.
        batch_size: examples N. The tape names no axis in a batch of one, so the size decides there.
    """
    x = call.input
    axis, _, rank = expected_places(call.module)
    if not isinstance(x, Tensor) or x.dim() != rank:
        return False
    if batch_size == 1:
        return x.shape[axis.dim] == 1
    return call.axes[0] == axis


def recurrent_gradients(layer: Layer, calls: Sequence[Call]) -> Tensors:
    """Return the gradients of each example's loss for an LSTM, GRU, RNN or one of their cells.

    Args:
        layer: names the parameters.
        calls: its calls in one forward pass, whose gradients are added.

    Returns:
        Role to gradients `[N, *parameter.shape]`.
    """
    inputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for call in calls:
        sequence = _read(call)
        matrices = _Matrices(call.module, sequence.x)
        with torch.enable_grad():
            outputs = _run_recurrence(call.module, sequence, matrices)
        sums = [y for several in matrices.uses.values() for _, y in several]
        found = iter(differentiate(outputs, sequence.gradients, sums))
        for (weight, bias), several in matrices.uses.items():
            for rows, _ in several:
                gradient = next(found)
                inputs.setdefault(weight, []).append(rows)
                for role in (weight, bias):
                    gradients.setdefault(role, []).append(gradient)
    result = {}
    for role in layer.parameters:
        b = torch.cat(gradients[role], 1)
        if role in inputs:
            result[role] = torch.bmm(b.mT, torch.cat(inputs[role], 1))
        else:
            result[role] = b.sum(1)
    return result


def _read(call: Call) -> _Sequence:
    """Return one call in the common form, with the batch in front.

    The tape has checked that the batch is where the module takes it.
    """
    module = call.module
    arguments = name_arguments(("input", "hx"), call.args, call.kwargs)
    x = raise_precision(arguments["input"])
    given = tensors_in((arguments.get("hx"),))
    state = [s.to(x.dtype) for s in given]
    gradients: list[Any] = [raise_precision(g) for g in call.output_gradients if g is not None]
    if isinstance(module, nn.RNNCellBase):
        x = x.unsqueeze(1)
        state = [s.unsqueeze(0) for s in state]
        # A cell has no outputs next to its states.
        gradients = [None, *(g.unsqueeze(0) for g in gradients)]
    elif not module.batch_first:
        x = x.transpose(0, 1)
        gradients[0] = gradients[0].transpose(0, 1)
    return _Sequence(x, tuple(state) or _zero_state(module, x), gradients)


def _zero_state(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros for h and c, which an LSTM alone reads."""
    count = 1
    hidden: Any = module.hidden_size
    width = hidden
    if isinstance(module, nn.RNNBase):
        count = module.num_layers * (1 + module.bidirectional)
        width = module.proj_size or hidden
    return x.new_zeros(count, len(x), width), x.new_zeros(count, len(x), hidden)


def _run_recurrence(module: nn.Module, sequence: _Sequence, matrices: _Matrices) -> list[Tensor]:
    """Return outputs `[N, T, directions * width]` and final states."""
    x = sequence.x
    final: list[tuple[Tensor, ...]] = []
    layers = [""]
    directions = [""]
    if isinstance(module, nn.RNNBase):
        layers = [f"_l{index}" for index in range(module.num_layers)]
        if module.bidirectional:
            directions.append("_reverse")
    for layer in layers:
        outputs = []
        for direction in directions:
            state = tuple(s[len(final)] for s in sequence.state)
            output, state = _run_direction(module, layer + direction, x, state, matrices)
            outputs.append(output)
            final.append(state)
        x = torch.cat(outputs, 2)
    final_states = [torch.stack(parts) for parts in zip(*final, strict=True)]
    return [x, *final_states]


def _run_direction(
    module: nn.Module, suffix: str, x: Tensor, state: tuple[Tensor, ...], matrices: _Matrices
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs and the final state of one layer, forwards or backwards in time."""
    of_inputs = matrices.add(f"weight_ih{suffix}", f"bias_ih{suffix}", x).unbind(1)
    times = list(range(x.shape[1]))
    if suffix.endswith("_reverse"):
        times.reverse()
    projection = f"weight_hr{suffix}"
    outputs: list[Any] = [None] * len(times)
    for t in times:
        h = state[0].unsqueeze(1)
        of_hidden = matrices.add(f"weight_hh{suffix}", f"bias_hh{suffix}", h).squeeze(1)
        state = _step(module, of_inputs[t], of_hidden, state)
        if matrices.has(projection):
            h = matrices.add(projection, "", state[0].unsqueeze(1)).squeeze(1)
            state = (h, *state[1:])
        outputs[t] = state[0]
    return torch.stack(outputs, 1), state


def _step(
    module: nn.Module, of_input: Tensor, of_hidden: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the state after one step, from what input and state add to the gates.

    The gates are in torch's own order.
    """
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        gates = of_input + of_hidden
        i, f, g, o = gates.chunk(4, 1)
        new = i.sigmoid() * g.tanh()
        c = f.sigmoid() * state[1] + new
        h = o.sigmoid() * c.tanh()
        return h, c
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        r, z, n = of_input.chunk(3, 1)
        r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, 1)
        reset = (r + r_hidden).sigmoid()
        new = (n + reset * n_hidden).tanh()
        keep = (z + z_hidden).sigmoid()
        h = (1 - keep) * new + keep * state[0]
        return (h,)
    total = of_input + of_hidden
    if module.nonlinearity == "relu":
        return (total.relu(),)
    return (total.tanh(),)
