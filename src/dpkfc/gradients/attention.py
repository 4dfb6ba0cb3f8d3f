"""`nn.MultiheadAttention` as the two linear layers that hold its parameters.

The module calls no layer for its projections, so the tape sees only its inputs and its outputs.
Attention itself, between the projections, has no parameters. It is run again for the whole batch
with the random numbers of the call (dropout of the attention weights), and differentiated down to
the projections. Then each of the two layers has inputs and output gradients like any linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpkfc.rng_state import random_states, restore_states
from dpkfc.tracking.axes import BatchAxis

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)
IN = {"weight": "in_proj_weight", "bias": "in_proj_bias"}
OUT = {"weight": "out_proj.weight", "bias": "out_proj.bias"}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is torch's attention with one weight for queries, keys and values."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(module)
        and not (is_parametrized(module) or is_parametrized(module.out_proj))
        and {name for name, _ in module.named_parameters()} <= {*IN.values(), *OUT.values()}
        and module.in_proj_weight is not None
    )


def expected_axis(module: nn.Module) -> BatchAxis:
    """Return where attention takes the batch to be in its arguments."""
    return BatchAxis(0 if getattr(module, "batch_first", False) else 1)


class AttentionCall:
    """One call of attention.

    Args:
        module: for which `is_attention` holds.
        arguments: of the call by name, detached.
        states: of the random generators at the beginning, where the call draws random numbers.

    Attributes:
        gradients: at the outputs, once they are known.
    """

    def __init__(
        self,
        module: nn.MultiheadAttention,
        arguments: dict[str, Any],
        states: Sequence[Tensor] | None,
    ) -> None:
        self.module = module
        self.arguments = arguments
        self.gradients: Sequence[Tensor | None] = ()
        self._states = states
        self._training = module.training
        self._device = arguments["query"].device.type
        self._is_autocast = torch.is_autocast_enabled(self._device)
        self._autocast_dtype = torch.get_autocast_dtype(self._device)

    @classmethod
    def record(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AttentionCall | None:
        """Return the record of a call that is about to happen, None for other attentions."""
        if not is_attention(module):
            return None
        assert isinstance(module, nn.MultiheadAttention)
        arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        for name, x in arguments.items():
            arguments[name] = x.detach() if isinstance(x, Tensor) else x
        draws = module.training and module.dropout > 0
        states = random_states(module.in_proj_weight.device) if draws else None
        return cls(module, arguments, states)

    def linear(self, layer: Layer, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and output gradients of one of the two linear layers.

        Args:
            layer: of the projections, or of the output.
            batch_size: examples N.

        Returns:
            `[N, T, d_in]` and `[N, T, d_out]`. T counts the positions of queries, keys and values,
            each once where they differ.
        """
        a, b = self._projections() if layer.paths == IN else self._output_layer()
        if expected_axis(self.module).dim == 1:
            return a.transpose(0, 1), b.transpose(0, 1)
        return a, b

    def _distinct_inputs(self) -> list[tuple[Tensor, list[int]]]:
        """Return the distinct inputs, with their uses as queries (0), keys (1), values (2)."""
        distinct: list[tuple[Tensor, list[int]]] = []
        for i, name in enumerate(ARGUMENTS[:3]):
            x = self.arguments[name]
            for other, places in distinct:
                if _is_same_memory(x, other):
                    places.append(i)
                    break
            else:
                distinct.append((x, [i]))
        return distinct

    def _projections(self) -> tuple[Tensor, Tensor]:
        time = 1 if self.module.batch_first else 0
        gradients = self._differentiated[0]
        distinct = self._distinct_inputs()
        rows = []
        for _, places in distinct:
            zero = torch.zeros_like(gradients[places[0]])
            columns = [gradients[i] if i in places else zero for i in range(3)]
            rows.append(torch.cat(columns, -1))
        return torch.cat([x for x, _ in distinct], time), torch.cat(rows, time)

    def _output_layer(self) -> tuple[Tensor, Tensor]:
        inputs = self._differentiated[1]
        gradient = self.gradients[0] if self.gradients else None
        return inputs, torch.zeros_like(inputs) if gradient is None else gradient

    @cached_property
    def _differentiated(self) -> tuple[list[Tensor], Tensor]:
        """The gradients at the projected queries, keys and values; the output layer's inputs."""
        m = self.module
        biases: Sequence[Tensor | None] = (None, None, None)
        if m.in_proj_bias is not None:
            biases = m.in_proj_bias.detach().chunk(3)
        weights = m.in_proj_weight.detach().chunk(3)
        has_gradient = any(g is not None for g in self.gradients)
        with self._restore_call_conditions(), torch.set_grad_enabled(has_gradient):
            with torch.no_grad():
                projected = []
                for name, w, b in zip(ARGUMENTS[:3], weights, biases, strict=True):
                    projected.append(F.linear(self.arguments[name], w, b))
            for x in projected:
                x.requires_grad_(has_gradient)
            mixed, attention_weights = self._attend(*projected)
        if not has_gradient:
            return [torch.zeros_like(x) for x in projected], mixed
        targets, starts = list[Tensor](), list[Tensor]()
        gradient, *others = self.gradients
        if gradient is not None:
            weight = m.out_proj.weight.detach()
            targets.append(mixed)
            starts.append(gradient.to(mixed.dtype) @ weight.to(mixed.dtype))
        if attention_weights is not None and others and others[0] is not None:
            targets.append(attention_weights)
            starts.append(others[0].to(attention_weights.dtype))
        gradients = torch.autograd.grad(targets, projected, starts, allow_unused=True)
        filled = []
        for x, g in zip(projected, gradients, strict=True):
            filled.append(torch.zeros_like(x) if g is None else g)
        return filled, mixed.detach()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return attention by torch's own function, with identities for the four projections."""
        m = self.module
        is_first = m.batch_first
        if is_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        same = torch.eye(m.embed_dim, dtype=q.dtype, device=q.device)
        options = {name: self.arguments[name] for name in ARGUMENTS[3:] if name in self.arguments}
        mixed, weights = F.multi_head_attention_forward(
            q,
            k,
            v,
            m.embed_dim,
            m.num_heads,
            None,
            None,
            None,
            None,
            m.add_zero_attn,
            m.dropout,
            same,
            None,
            training=self._training,
            use_separate_proj_weight=True,
            q_proj_weight=same,
            k_proj_weight=same,
            v_proj_weight=same,
            **options,
        )
        return mixed.transpose(0, 1) if is_first else mixed, weights

    @contextmanager
    def _restore_call_conditions(self) -> Iterator[None]:
        """Run the body with the precision and the random numbers of the call."""
        device = self.module.in_proj_weight.device
        now = random_states(device)
        try:
            if self._states is not None:
                restore_states(device, self._states)
            with torch.autocast(self._device, self._autocast_dtype, enabled=self._is_autocast):
                yield
        finally:
            restore_states(device, now)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    is_same_place = x.data_ptr() == y.data_ptr() and x.shape == y.shape
    return is_same_place and x.stride() == y.stride()
