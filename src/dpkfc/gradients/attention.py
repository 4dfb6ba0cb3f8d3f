"""`nn.MultiheadAttention` as the two linear layers that its parameters are.

The module calls no layer for its projections, so the tape sees its inputs and its outputs alone. What lies between, attention
itself, has no parameters: it is run once more for the whole batch, from the projections on, with the random numbers of the call
(dropout of the attention weights), and differentiated down to the projections. Then each of the two has inputs and output
gradients like any linear layer, and takes the norms, the factors and the sums of one.
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

__all__ = ["ARGUMENTS", "IN", "OUT", "Attended", "expected_axis", "is_attention"]

ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
IN = {"weight": "in_proj_weight", "bias": "in_proj_bias"}
OUT = {"weight": "out_proj.weight", "bias": "out_proj.bias"}


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's attention with one weight for queries, keys and values, as it is by default."""
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


class Attended:
    """One call of attention.

    Args:
        module: for which `is_attention` holds.
        inputs: (args, kwargs) of the call, detached.
        states: of the generators when it began, where it draws random numbers.
    """

    def __init__(
        self, module: nn.MultiheadAttention, inputs: tuple[tuple[Any, ...], dict[str, Any]], states: Sequence[Tensor] | None
    ) -> None:
        self.module = module
        self.given = dict(zip(ARGUMENTS, inputs[0], strict=False)) | inputs[1]
        self.gradients: Sequence[Tensor | None] = ()  # at the outputs, once they are known
        self._states, self._training = states, module.training
        self._device = self.given["query"].device.type
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    @classmethod
    def begun(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attended | None:
        """Of a module that is about to be called; None where it is no such attention."""
        if not is_attention(module):
            return None
        assert isinstance(module, nn.MultiheadAttention)
        draws = module.training and module.dropout > 0
        detached = [{k: x.detach() if isinstance(x, Tensor) else x for k, x in kwargs.items()}]
        rest = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        return cls(module, (rest, detached[0]), random_states(module.in_proj_weight.device) if draws else None)

    def linear(self, layer: Layer, batch_size: int) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients of one of the two linear layers.

        Args:
            layer: of the projections, or of the output.
            batch_size: examples N.

        Returns:
            `[N, T, d_in]` and `[N, T, d_out]`. T counts the positions of queries, keys and values, each once where they differ.
        """
        axis = expected_axis(self.module).dim
        found = self._projections if layer.paths == IN else self._output
        a, b = (x.transpose(0, 1) if axis else x for x in found)
        return a, b

    @cached_property
    def _distinct(self) -> list[tuple[Tensor, list[int]]]:
        """The arguments that differ, each with which of queries (0), keys (1) and values (2) are made of it."""
        found: list[tuple[Tensor, list[int]]] = []
        for i, name in enumerate(ARGUMENTS[:3]):
            x = self.given[name]
            for other, places in found:
                if x.data_ptr() == other.data_ptr() and x.shape == other.shape and x.stride() == other.stride():
                    places.append(i)
                    break
            else:
                found.append((x, [i]))
        return found

    @property
    def _projections(self) -> tuple[Tensor, Tensor]:
        time = 1 if self.module.batch_first else 0
        at = self._differentiated[0]
        rows = []
        for _, places in self._distinct:
            zero = torch.zeros_like(at[places[0]])
            rows.append(torch.cat([at[i] if i in places else zero for i in range(3)], -1))
        return torch.cat([x for x, _ in self._distinct], time), torch.cat(rows, time)

    @property
    def _output(self) -> tuple[Tensor, Tensor]:
        inputs = self._differentiated[1]
        gradient = self.gradients[0] if self.gradients else None
        return inputs, torch.zeros_like(inputs) if gradient is None else gradient

    @cached_property
    def _differentiated(self) -> tuple[list[Tensor], Tensor]:
        """Gradients at queries, keys and values after their projection, and what the output layer has read."""
        m = self.module
        biases = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.detach().chunk(3)
        weights = m.in_proj_weight.detach().chunk(3)
        asked = any(g is not None for g in self.gradients)
        with self._as_it_was(), torch.set_grad_enabled(asked):
            with torch.no_grad():
                made = [F.linear(self.given[name], w, b) for name, w, b in zip(ARGUMENTS[:3], weights, biases, strict=True)]
            q, k, v = (x.requires_grad_(asked) for x in made)
            read, shown = self._attend(q, k, v)
        if not asked:
            return [torch.zeros_like(x) for x in made], read
        targets = list[Tensor]()
        starts = list[Tensor]()
        if self.gradients[0] is not None:
            starts.append(self.gradients[0].to(read.dtype) @ m.out_proj.weight.detach().to(read.dtype))
            targets.append(read)
        if shown is not None and len(self.gradients) > 1 and self.gradients[1] is not None:
            starts.append(self.gradients[1].to(shown.dtype))
            targets.append(shown)
        found = torch.autograd.grad(targets, [q, k, v], starts, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(made, found, strict=True)], read.detach()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attention by torch's own function, with identities in the place of the four projections."""
        m, first = self.module, self.module.batch_first
        q, k, v = (x.transpose(0, 1) for x in (q, k, v)) if first else (q, k, v)
        same = torch.eye(m.embed_dim, dtype=q.dtype, device=q.device)
        options = {name: self.given[name] for name in ARGUMENTS[3:] if name in self.given}
        read, shown = F.multi_head_attention_forward(
            q, k, v, m.embed_dim, m.num_heads, None, None, None, None, m.add_zero_attn, m.dropout, same, None,
            training=self._training, use_separate_proj_weight=True, q_proj_weight=same, k_proj_weight=same, v_proj_weight=same,
            **options,
        )  # fmt: skip
        return read.transpose(0, 1) if first else read, shown

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The precision and the random numbers of the call."""
        enabled, dtype = self._autocast
        device = self.module.in_proj_weight.device
        now = random_states(device)
        try:
            if self._states is not None:
                restore_states(device, self._states)
            with torch.autocast(self._device, dtype, enabled=enabled):
                yield
        finally:
            restore_states(device, now)
