"""What attention and recurrent layers of torch compute inside one call.

Attention (`nn.MultiheadAttention`) is taken as the two linear layers that hold its parameters. The
module calls no layer for its projections, so the tape sees only its inputs and its outputs.
Attention itself, between the projections, has no parameters. It is run again for the whole batch
with the random numbers of the call (dropout of the attention weights), and differentiated down to
the projections. Then each of the two layers has inputs and output gradients like any linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from dpkfc.gradients.autograd_graph import differentiate
from dpkfc.gradients.full_precision import same_autocast
from dpkfc.gradients.layers import (
    Arguments,
    Keywords,
    Layer,
    class_forward,
    name_arguments,
)
from dpkfc.rng_state import all_states, preserve_generators, restore_all_states
from dpkfc.tracking.states import BatchAxis

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
INPUTS = ARGUMENTS[:3]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is torch's attention with one weight for queries, keys and values."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    if is_parametrized(module) or is_parametrized(module.out_proj):
        return False
    names = dict(module.named_parameters()).keys()
    is_plain = names <= {*IN.values(), *OUT.values()} and module.in_proj_weight is not None
    return is_plain and class_forward(module) is nn.MultiheadAttention.forward


def expected_axis(module: nn.Module) -> BatchAxis:
    """Return where attention or a recurrent layer takes the batch to be in its first input."""
    return BatchAxis(0 if module.batch_first else 1)


class AttentionCall:
    """One call of attention.

    Args:
        module: for which `is_attention` holds.
        arguments: of the call by name, detached.
        states: of the random generators at the beginning, where the call draws random numbers.

    Attributes:
        gradients: at the outputs and at the weights of attention, once they are known.
    """

    def __init__(
        self,
        module: nn.MultiheadAttention,
        arguments: Keywords,
        states: tuple[Any, ...] | None,
    ) -> None:
        self.module = module
        self.arguments = arguments
        self.gradients: Sequence[Tensor | None] = (None, None)
        self._states = states
        self._training = module.training
        self._autocast = same_autocast(arguments["query"].device.type)

    @classmethod
    def record(cls, module: nn.Module, args: Arguments, kwargs: Keywords) -> AttentionCall | None:
        """Return the record of a call that is about to happen, None for other attentions."""
        if not is_attention(module):
            return None
        assert isinstance(module, nn.MultiheadAttention)
        given = name_arguments(ARGUMENTS, args, kwargs)
        arguments = tree_map_only(Tensor, Tensor.detach, given)
        states = None
        if module.training and module.dropout > 0:
            states = all_states()
        return cls(module, arguments, states)

    def linear(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return inputs and output gradients of one of the two linear layers.

        Args:
            layer: of the projections, or of the output.

        Returns:
            `[N, T, d_in]` and `[N, T, d_out]`. T counts the positions of queries, keys and values,
            each once where they differ.
        """
        if layer.paths == IN:
            a, b = self._projections()
        else:
            a = self._differentiated[1]
            arrived = self.gradients[0]
            b = torch.zeros_like(a) if arrived is None else arrived
        if expected_axis(self.module).dim == 1:
            return a.transpose(0, 1), b.transpose(0, 1)
        return a, b

    def _projections(self) -> tuple[Tensor, Tensor]:
        time = 1 - expected_axis(self.module).dim
        gradients = self._differentiated[0]
        # Where each distinct input is used: as queries (0), keys (1), values (2).
        uses: dict[Any, list[int]] = {}
        for i, name in enumerate(INPUTS):
            x = self.arguments[name]
            memory = (x.data_ptr(), x.shape, x.stride())
            uses.setdefault(memory, []).append(i)
        inputs = []
        rows = []
        for places in uses.values():
            first = places[0]
            columns = [torch.zeros_like(gradients[first])] * 3
            for i in places:
                columns[i] = gradients[i]
            inputs.append(self.arguments[INPUTS[first]])
            rows.append(torch.cat(columns, -1))
        return torch.cat(inputs, time), torch.cat(rows, time)

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
            projected = []
            for name, weight, bias in zip(INPUTS, weights, biases, strict=True):
                x = F.linear(self.arguments[name], weight, bias)
                x.requires_grad_(has_gradient)
                projected.append(x)
            mixed, attention_weights = self._attend(*projected)
        gradient, of_weights = self.gradients
        if gradient is not None:
            weight = m.out_proj.weight.detach()
            gradient = gradient.to(mixed.dtype) @ weight.to(mixed.dtype)
        outputs = (mixed, attention_weights)
        return differentiate(outputs, (gradient, of_weights), projected), mixed.detach()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """Return attention and its weights by torch's own function, the weights if asked for.

        The four projections are identities.
        """
        m = self.module
        if m.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        same = torch.eye(m.embed_dim, dtype=q.dtype, device=q.device)
        options = dict(self.arguments)
        for name in INPUTS:
            del options[name]
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
        if m.batch_first:
            mixed = mixed.transpose(0, 1)
        return mixed, weights

    @contextmanager
    def _restore_call_conditions(self) -> Iterator[None]:
        """Run the body with the precision and the random numbers of the call."""
        with preserve_generators(), self._autocast:
            if self._states is not None:
                restore_all_states(self._states)
            yield
