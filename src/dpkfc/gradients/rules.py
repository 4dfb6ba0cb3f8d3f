"""From recorded calls to blocks: one function per rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.fsdp import gathered, refuse_let_go
from dpkfc.gradients.calls import Call, Calls
from dpkfc.gradients.fallback import fallback_gradients
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.parametrized import Computed, pulls_of
from dpkfc.gradients.recurrent import recurrent_gradients
from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Formed, Lookup, Outer, PerExample, Tied, conv_block, interleaved
from dpkfc.tracking.axes import example_first

__all__ = ["blocks_of", "joined_calls", "settled"]


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
    blocks = [call for call in calls if not isinstance(call, Call)]
    rest = [call for call in calls if isinstance(call, Call)]
    if rest:
        with gathered(layer):
            refuse_let_go(layer, [(call.args, call.kwargs) for call in rest])
            blocks.append(_from_calls(layer, rest, batch_size))
    return _joined(blocks)


def _from_calls(layer: Layer, calls: Sequence[Any], batch_size: int) -> AnyBlock | Computed:
    if layer.rule == "recurrent":
        return PerExample(recurrent_gradients(layer, calls, batch_size))
    checked = [_example_first(layer, call, batch_size) for call in calls]
    if layer.rule == "tied":
        return _tied(layer, checked, batch_size)
    if layer.rule == "computed":
        return _computed(layer, checked, batch_size)
    return _joined([_RULES[layer.rule](layer, call, batch_size) for call in checked])


def _example_first(layer: Layer, call: Call, batch_size: int) -> Call:
    """Return the call of a ruled layer with inputs and output gradients `[N, ...]`.

    For convolutions and norms over channels, which read `[N, channels, ...]`, several rows of an example stay rows:
    `[N * views, ...]`.
    """
    if layer.rule == "fallback":
        return call
    if call.attended is not None:
        a, b = call.attended.linear(layer, batch_size)
        return replace(call, args=(a,), kwargs={}, outputs=[_accumulation_dtype(b)])
    gradient, axis, place = call.outputs[0], call.axes[0], call.output_axes[0]
    if gradient is None or axis is None or place is None:
        raise ValueError(f"layer '{layer.display_name}': the batch of {batch_size} examples was not found in its input or output")
    x, b = example_first(call.input, axis, batch_size), example_first(gradient, place, batch_size)
    if layer.rule in ("conv", "computed", "norm") and _has_channels(call.module) and (axis.pre > 1 or axis.post > 1):
        folded = (axis.pre > 1) + (axis.post > 1)
        x, b = x.flatten(0, folded), b.flatten(0, folded)
    return replace(call, args=(x,), kwargs={}, outputs=[_accumulation_dtype(b)])


def _has_channels(module: nn.Module) -> bool:
    return not isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding))


def _accumulation_dtype(x: Tensor) -> Tensor:
    """Norms, sums and noise live in float32 (float64 on request) whatever the model computes in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _linear(layer: Layer, call: Call, batch_size: int) -> Outer:
    b = call.outputs[0]
    b = b.reshape(batch_size, -1, b.shape[-1])
    if "weight" not in layer.parameters:  # only the bias trains: the input is the homogeneous coordinate alone
        return Outer(b.new_ones(*b.shape[:2], 1), b)
    a = call.input.to(b.dtype).reshape(batch_size, -1, call.input.shape[-1])
    return Outer(a, b, homogeneous="bias" in layer.parameters)


def _conv(layer: Layer, call: Call, batch_size: int) -> ConvBlock:
    b = call.outputs[0]
    block = conv_block(call.module, call.input.to(b.dtype), b)
    return replace(block, views=len(b) // batch_size)


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
    views = len(b) // batch_size
    if views > 1:
        grads = {role: g.view(batch_size, views, *g.shape[1:]).sum(1) for role, g in grads.items()}
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
    return PerExample(fallback_gradients(layer, call, batch_size))


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
    if all(isinstance(block, Computed) for block in blocks):  # each at parameters of its own
        return Computed(tuple(part for block in blocks for part in block.parts))
    blocks = [block.per_example() if isinstance(block, Computed) else block for block in blocks]
    formed = [block for block in blocks if isinstance(block, Formed)]
    if formed:
        total = torch.stack([block.per_example() for block in blocks]).sum(0)
        return replace(formed[0], gradients=total)
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
