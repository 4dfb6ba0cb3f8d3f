"""From recorded calls to blocks: one function per rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.blocks import Lookup, Outer, PerExample, Tied
from dpkfc.gradients.attention import Attended
from dpkfc.gradients.computed import Computed, pulls_of
from dpkfc.gradients.conv import ConvBlock, conv_block, interleaved
from dpkfc.gradients.fallback import fallback_gradients
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.recurrent import recurrent_gradients
from dpkfc.gradients.sharded import gathered, refuse_let_go

__all__ = ["AnyBlock", "Call", "Calls", "blocks_of", "joined_calls", "settled"]

AnyBlock = Outer | Lookup | PerExample | Tied | ConvBlock


@dataclass(frozen=True)
class Call:
    """One call of a module: detached inputs and the gradients of the summed losses at its outputs.

    Attributes:
        module: the module called.
        args, kwargs: its inputs, detached.
        outputs: one gradient per tensor output, None where the output is not floating point.
        gradients: role to gradients `[N, ...]` of each example, where they are known already.
        attended: of torch's attention, from which its two linear layers are taken.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor | None]
    gradients: dict[str, Tensor] | None = None
    attended: Attended | None = None

    @property
    def input(self) -> Tensor:
        """The single tensor input of a module with a rule."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


Calls = dict[str, list[Any]]  # layer name to its calls, or to blocks where those were needed at once


def settled(layers: Sequence[Layer], calls: Calls, batch_size: int) -> Calls:
    """The calls, with blocks in place of those whose gradients are computed from the parameters in force now."""
    rules = {layer.name: layer for layer in layers if layer.rule in ("fallback", "recurrent", "computed") or layer.paths}
    return {
        name: [joined_calls(rules[name], several, batch_size)] if name in rules else several
        for name, several in calls.items()
    }


def blocks_of(layer: Layer, calls: Sequence[Any], batch_size: int) -> AnyBlock:
    """The contribution of a layer for a batch, all its calls joined (the gradient is their SUM).

    Arguments and errors are those of `joined_calls`.
    """
    found = joined_calls(layer, calls, batch_size)
    return found.per_example() if isinstance(found, Computed) else found


def joined_calls(layer: Layer, calls: Sequence[Any], batch_size: int) -> AnyBlock | Computed:
    """As `blocks_of`, except that computed weights are not pulled back yet: rows of one group may be added up before.

    Args:
        layer: the layer.
        calls: its calls in one forward pass, or in several whose gradients are to be added; or blocks of `settled`.
        batch_size: examples N.

    Raises:
        ValueError: an input or output whose leading axis is not the batch, naming the layer.
    """
    if calls and not isinstance(calls[0], Call):
        return _joined(calls)
    with gathered(layer):
        refuse_let_go(layer, [(call.args, call.kwargs) for call in calls])
        return _from_calls(layer, calls, batch_size)


def _from_calls(layer: Layer, calls: Sequence[Any], batch_size: int) -> AnyBlock | Computed:
    if layer.rule == "recurrent":
        return PerExample(recurrent_gradients(layer, calls, batch_size))
    checked = [_checked(layer, call, batch_size) for call in calls]
    if layer.rule == "tied":
        return _tied(layer, checked, batch_size)
    if layer.rule == "computed":
        return _computed(layer, checked, batch_size)
    return _joined([_RULES[layer.rule](layer, call, batch_size) for call in checked])


def _checked(layer: Layer, call: Call, batch_size: int) -> Call:
    gradient = call.outputs[0] if call.outputs else None
    if layer.rule == "fallback":
        return call
    if call.attended is not None:
        a, b = call.attended.linear(layer, batch_size)
        return replace(call, args=(a,), kwargs={}, outputs=[_accumulation_dtype(b)])
    call = _spread_input(call, gradient)
    for what, x in (("input", call.input), ("output", gradient)):
        if x is None or x.dim() < 1 or x.shape[0] != batch_size:
            shape = None if x is None else tuple(x.shape)
            raise ValueError(
                f"layer '{layer.display_name}' ({type(call.module).__name__}): its {what} has shape {shape}, but the leading "
                f"axis must be the batch of {batch_size} examples; use batch-first layouts and expand broadcast inputs"
            )
    return replace(call, outputs=[_accumulation_dtype(gradient)] if gradient is not None else call.outputs)


def _spread_input(call: Call, gradient: Tensor | None) -> Call:
    """The call with an input row an example where the tape has spread the output of an input that all examples share."""
    x = call.input
    if not isinstance(x, Tensor) or gradient is None or gradient.dim() < 2:
        return call
    if isinstance(call.module, nn.Embedding) and gradient.dim() == x.dim() + 2:
        x = x.unsqueeze(0)
    if x.dim() < 1 or x.shape[0] != 1:
        return call
    return replace(call, args=(x.expand(gradient.shape[0], *x.shape[1:]),), kwargs={})


def _accumulation_dtype(x: Tensor) -> Tensor:
    """Norms, sums and noise live in float32 (float64 on request) whatever the model computes in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _linear(layer: Layer, call: Call, batch_size: int) -> Outer:
    b = call.outputs[0]
    if call.input.dim() < 2:
        raise ValueError(f"layer '{layer.display_name}': a linear layer needs an input [batch, ..., features]")
    b = b.reshape(batch_size, -1, b.shape[-1])
    if "weight" not in layer.parameters:  # only the bias trains: the input is the homogeneous coordinate alone
        return Outer(b.new_ones(*b.shape[:2], 1), b)
    a = call.input.to(b.dtype).reshape(batch_size, -1, call.input.shape[-1])
    return Outer(a, b, homogeneous="bias" in layer.parameters)


def _conv(layer: Layer, call: Call, batch_size: int) -> ConvBlock:
    b = call.outputs[0]
    if call.input.dim() != len(call.module.kernel_size) + 2:
        raise ValueError(f"layer '{layer.display_name}': a convolution needs an input [batch, channels, *spatial]")
    return conv_block(call.module, call.input.to(b.dtype), b)


def _computed(layer: Layer, calls: Sequence[Call], batch_size: int) -> Computed:
    """An ordinary linear layer or convolution in its effective weight and bias, and the way back to what they are made of."""
    roles = list(layer.parameters)
    pulls = pulls_of(calls[0].module, roles)
    plain = replace(layer, parameters=dict.fromkeys(pulls, ""))
    if isinstance(calls[0].module, nn.Linear):
        return Computed(((_joined([_linear(plain, call, batch_size) for call in calls]), pulls),))
    blocks = [_conv(plain, call, batch_size) for call in calls]
    trained = [replace(block, weight="weight" in pulls, bias="bias" in pulls) for block in blocks]
    return Computed(((_joined(trained), pulls),))


def _embedding(layer: Layer, call: Call, batch_size: int) -> Lookup:
    ids = call.input.reshape(batch_size, -1).long()
    b = call.outputs[0].reshape(batch_size, ids.shape[1], -1)
    if call.module.padding_idx is not None:
        b = b.masked_fill(torch.eq(ids, call.module.padding_idx).unsqueeze(-1), 0.0)
    return Lookup(ids, b, call.module.num_embeddings)


def _tied(layer: Layer, calls: Sequence[Call], batch_size: int) -> Tied:
    """The uses of one weight `[V, d]` as an embedding and as a linear layer; either may be missing in a forward pass."""
    lookups = [_embedding(layer, call, batch_size) for call in calls if isinstance(call.module, nn.Embedding)]
    outers = [_linear(layer, call, batch_size) for call in calls if not isinstance(call.module, nn.Embedding)]
    v, d = layer.tensor("weight").shape
    like = (lookups + outers)[0].b
    none = like.new_zeros(batch_size, 0, dtype=torch.long)
    lookup = _joined(lookups) if lookups else Lookup(none, like.new_zeros(batch_size, 0, d), v)
    outer = _joined(outers) if outers else Outer(like.new_zeros(batch_size, 0, d), like.new_zeros(batch_size, 0, v))
    assert isinstance(lookup, Lookup) and isinstance(outer, Outer)
    return Tied(lookup, outer)


def _norm(layer: Layer, call: Call, batch_size: int) -> PerExample:
    module, b = call.module, call.outputs[0]
    x = call.input.to(b.dtype)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = tuple(module.normalized_shape)
        if isinstance(module, nn.LayerNorm):
            x_hat = F.layer_norm(x, shape, eps=module.eps)
        else:
            x_hat = F.rms_norm(x, shape, eps=module.eps)
        kept = tuple(range(1, x.dim() - len(shape)))
    else:
        x_hat = _channel_normalised(module, x)
        kept = tuple(range(2, x.dim()))
    grads = {}
    if "weight" in layer.parameters:
        grads["weight"] = (b * x_hat).sum(kept) if kept else b * x_hat
    if "bias" in layer.parameters:
        grads["bias"] = b.sum(kept) if kept else b
    return PerExample(grads)


def _channel_normalised(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    if module.track_running_stats:  # BatchNorm or InstanceNorm with frozen statistics
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, var = module.running_mean.view(shape), module.running_var.view(shape)
        return (x - mean) * torch.rsqrt(var + module.eps)
    return F.instance_norm(x, eps=module.eps)


def _fallback(layer: Layer, call: Call, batch_size: int) -> PerExample:
    if call.gradients is not None:
        return PerExample(call.gradients)
    return PerExample(
        fallback_gradients(layer, call.module, call.args, call.kwargs, call.outputs, batch_size=batch_size)
    )


_RULES: dict[str, Callable[[Layer, Call, int], AnyBlock]] = {
    "linear": _linear,
    "conv": _conv,
    "embedding": _embedding,
    "norm": _norm,
    "fallback": _fallback,
}


def _joined(blocks: Sequence[Any]) -> Any:
    """Several uses of one layer as one block: positions are concatenated, materialised gradients are added."""
    if len(blocks) == 1:
        return blocks[0]
    if isinstance(blocks[0], Computed):  # each at parameters of its own
        return Computed(tuple(part for block in blocks for part in block.parts))
    convolutions = [block for block in blocks if isinstance(block, ConvBlock)]
    if convolutions and (one := interleaved(convolutions)) is not None:
        return one
    outers = [block.outer() if isinstance(block, ConvBlock) else block for block in blocks]
    first = outers[0]
    if isinstance(first, Outer):
        a, b = torch.cat([o.a for o in outers], 1), torch.cat([o.b for o in outers], 1)
        return replace(first, a=a, b=b)
    if isinstance(first, Lookup):
        return Lookup(torch.cat([o.ids for o in outers], 1), torch.cat([o.b for o in outers], 1), first.num_rows)
    return PerExample({role: torch.stack([o.grads[role] for o in outers]).sum(0) for role in first.grads})
