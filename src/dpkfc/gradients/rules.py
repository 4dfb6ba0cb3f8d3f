"""From recorded calls to blocks: one function per rule, and the registry of users' own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from dpkfc.distributed.fsdp import check_not_freed, gather_layer
from dpkfc.gradients.fallback import fallback_gradients
from dpkfc.gradients.layers import Call, Calls, Layer
from dpkfc.gradients.recurrence import recurrent_gradients
from dpkfc.linalg.blocks import (
    AnyBlock,
    ConvBlock,
    Lookup,
    Outer,
    PerExample,
    Tied,
    conv_block,
    join_uses,
    raise_precision,
)
from dpkfc.tracking.states import example_first


class LayerRule(Protocol):
    """Computes the gradients of one example from one call of a module."""

    def __call__(self, call: Call) -> Mapping[str, Tensor]:
        """Return the gradients of one example's loss with respect to the module's own parameters.

        Args:
            call: the module, and the inputs and output gradients of ONE example, without the batch
                axis. Where an example has several rows, the rows are the first axis. An input that
                all examples share is as the module was called with.

        Returns:
            Name of each trainable parameter in the module to a gradient of the parameter's shape.
        """
        ...


_layer_rules: dict[type[nn.Module], LayerRule] = {}


def register_layer_rule(module_class: type[nn.Module], rule: LayerRule) -> None:
    """Register how the gradients of a module class are computed.

    The rule takes the place of the general method, which runs the module again for each example.
    It sees one example and is run for all of them by `torch.vmap`, so it cannot mix examples. It
    holds for modules of exactly this class, not for subclasses. Register it before a model is made
    private.

    Args:
        module_class: a subclass of `nn.Module` with its own forward function.
        rule: from one recorded call to the gradients of a single example, see `LayerRule`.

    Raises:
        TypeError: no class of modules.

    Example:
        def scale_rule(call):
            return {"weight": (call.gradient * call.input).flatten(0, -2).sum(0)}

        register_layer_rule(Scale, scale_rule)
    """
    is_class = isinstance(module_class, type)
    if not is_class or not issubclass(module_class, nn.Module):
        raise TypeError(f"a layer rule belongs to a subclass of nn.Module, got {module_class!r}")
    _layer_rules[module_class] = rule


def has_layer_rule(module: nn.Module) -> bool:
    """Return whether a rule is registered for exactly the class of a module."""
    return type(module) in _layer_rules


def form_blocks(layers: Sequence[Layer], calls: Calls, batch_size: int) -> Calls:
    """Return the calls, with blocks in place of those that depend on the present parameters."""
    result: Calls = dict(calls)
    for layer in layers:
        if layer.runs_again and layer.name in calls:
            result[layer.name] = [blocks_of(layer, calls[layer.name], batch_size)]
    return result


def blocks_of(layer: Layer, calls: Sequence[Any], batch_size: int) -> AnyBlock:
    """Return the contribution of a layer for a batch, all its calls joined.

    The gradient is the SUM over calls.

    Args:
        layer: the layer.
        calls: its calls in one forward pass, or in several whose gradients are to be added; or
            blocks of `form_blocks`.
        batch_size: examples N.

    Raises:
        ValueError: an input or output without the batch, naming the layer.
    """
    blocks = [call for call in calls if not isinstance(call, Call)]
    recorded = [call for call in calls if isinstance(call, Call)]
    if recorded:
        with gather_layer(layer):
            inputs = [(call.args, call.kwargs) for call in recorded]
            check_not_freed(layer, inputs)
            if layer.rule not in ("fallback", "custom", "recurrent"):
                recorded = [_example_first(layer, call, batch_size) for call in recorded]
            blocks.append(_RULES[layer.rule](layer, recorded, batch_size))
    return join_uses(blocks)


def _join_each(
    rule: Callable[[Layer, Call, int], AnyBlock],
    layer: Layer,
    calls: Sequence[Call],
    batch_size: int,
) -> Any:
    """Return the joined blocks of a rule that sees one call."""
    return join_uses([rule(layer, call, batch_size) for call in calls])


def _example_first(layer: Layer, call: Call, batch_size: int) -> Call:
    """Return the call of a ruled layer with inputs and output gradients `[N, ...]`.

    For convolutions and norms over channels, which read `[N, channels, ...]`, several rows of an
    example stay rows: `[N * views, ...]`.
    """
    if call.attention is not None:
        x, b = call.attention.linear(layer)
        return _plain_call(call, x, b)
    gradient = call.output_gradients[0]
    axis = call.axes[0]
    output_axis = call.output_axes[0]
    if gradient is None or axis is None or output_axis is None:
        raise ValueError(
            f"layer '{layer.display_name}': the batch of {batch_size} examples was not found in "
            "its input or output"
        )
    x = example_first(call.input, axis, batch_size)
    b = example_first(gradient, output_axis, batch_size)
    extra = axis.extra_dims
    may_have_channels = layer.rule in ("conv", "norm")
    if may_have_channels and not isinstance(call.module, _WITHOUT_CHANNELS):
        x = x.flatten(0, extra)
        b = b.flatten(0, extra)
    return _plain_call(call, x, b)


_WITHOUT_CHANNELS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


def _plain_call(call: Call, x: Tensor, b: Tensor) -> Call:
    """Return a call with one input and the gradient at its one output."""
    return replace(call, args=(x,), kwargs={}, output_gradients=[raise_precision(b)])


def _linear(layer: Layer, call: Call, batch_size: int) -> Outer:
    x = call.input if "weight" in layer.parameters else None
    return Outer.build(x, call.gradient, batch_size, homogeneous="bias" in layer.parameters)


def _conv(layer: Layer, call: Call, batch_size: int) -> ConvBlock:
    module: Any = call.module
    b = call.gradient
    block = conv_block(module, call.input.to(b.dtype), b)
    return replace(block, views=len(b) // batch_size)


def _embedding(layer: Layer, call: Call, batch_size: int) -> Lookup:
    module: Any = call.module
    rows, padding = module.num_embeddings, module.padding_idx
    return Lookup.build(call.input, call.gradient, batch_size, rows, padding)


def _make_tied(layer: Layer, calls: Sequence[Call], batch_size: int) -> Tied:
    lookups: list[Any] = []
    outers: list[Any] = []
    for call in calls:
        if isinstance(call.module, nn.Embedding):
            lookups.append(_embedding(layer, call, batch_size))
        else:
            outers.append(_linear(layer, call, batch_size))
    return tie_uses(layer, lookups, outers, batch_size)


def tie_uses(layer: Layer, lookups: list[Any], outers: list[Any], batch_size: int) -> Tied:
    """Return the uses of one weight `[V, d]` as an embedding and as a linear layer.

    Either use may be missing in a forward pass.
    """
    rows, d = layer.tensor("weight").shape
    like = [*lookups, *outers][0].b
    no_features = like.new_zeros(batch_size, 0, d)
    no_ids = like.new_zeros(batch_size, 0, dtype=torch.long)
    no_outputs = like.new_zeros(batch_size, 0, rows)
    lookup: Any = join_uses(lookups or [Lookup(no_ids, no_features, rows)])
    outer: Any = join_uses(outers or [Outer(no_features, no_outputs)])
    return Tied(lookup, outer)


def _norm(layer: Layer, call: Call, batch_size: int) -> PerExample:
    module = call.module
    b = call.gradient
    x = call.input.to(b.dtype)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        normalise: Any = F.rms_norm
        if isinstance(module, nn.LayerNorm):
            normalise = F.layer_norm
        shape = tuple(module.normalized_shape)
        x_hat = normalise(x, shape, eps=module.eps)
        shared_dims = range(1, x.dim() - len(shape))
    else:
        x_hat = _normalise_channels(module, x)
        shared_dims = range(2, x.dim())
    gradients = {"weight": x_hat.mul_(b), "bias": b}
    by_role = {}
    for role in layer.parameters:
        by_role[role] = gradients[role]
        if shared_dims:
            by_role[role] = gradients[role].sum([*shared_dims])
    # Several views of an example are consecutive rows.
    views = len(b) // batch_size
    return PerExample(by_role).merge_rows(batch_size, views)


def _normalise_channels(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    if module.track_running_stats:
        # BatchNorm or InstanceNorm with frozen statistics.
        trailing = [1] * (x.dim() - 2)
        shape = (1, -1, *trailing)
        mean = module.running_mean.view(shape)
        variance = module.running_var.view(shape)
        scale = torch.rsqrt(variance + module.eps)
        return (x - mean) * scale
    return F.instance_norm(x, eps=module.eps)


def _custom(layer: Layer, call: Call, batch_size: int) -> PerExample:
    """Return the gradients of a registered rule, which `torch.vmap` runs on each example alone.

    Raises:
        ValueError: gradients of other parameters or of another shape, naming the layer.
    """
    rule = _layer_rules[type(call.module)]
    inputs, spec, axes = call.batched_leaves()
    input_axes: list[int | None] = [None] * len(inputs)
    for i, axis in axes.items():
        input_axes[i] = 0
        inputs[i] = example_first(inputs[i], axis, batch_size)
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.is_floating_point():
            inputs[i] = raise_precision(x)
    output_gradients: list[Tensor | None] = [None] * len(call.output_gradients)
    gradient_axes: list[int | None] = [None] * len(output_gradients)
    for place, (gradient, axis) in call.batched_gradients().items():
        gradient_axes[place] = 0
        rows = example_first(gradient, axis, batch_size)
        output_gradients[place] = raise_precision(rows)

    def differentiate_one(inputs: list[Any], gradients: list[Any]) -> dict[str, Tensor]:
        args, kwargs = tree_unflatten(inputs, spec)
        own = replace(call, args=args, kwargs=kwargs, output_gradients=gradients)
        return dict(rule(own))

    run_all = torch.vmap(differentiate_one, in_dims=(input_axes, gradient_axes))
    gradients = run_all(inputs, output_gradients)
    by_role = {}
    for role in layer.parameters:
        expected = tuple(layer.tensor(role).shape)
        actual = None
        if role in gradients:
            actual = tuple(gradients[role].shape[1:])
        if actual != expected:
            raise ValueError(
                f"the rule of layer '{layer.display_name}' returned {actual} for '{role}'; "
                f"return the gradient of one example, of shape {expected}"
            )
        g = gradients[role].detach()
        by_role[role] = raise_precision(g)
    return PerExample(by_role)


def _fallback(layer: Layer, call: Call, batch_size: int) -> PerExample:
    gradients = fallback_gradients(layer, call, batch_size)
    return PerExample(gradients)


def _recurrent(layer: Layer, calls: Sequence[Call], batch_size: int) -> PerExample:
    return PerExample(recurrent_gradients(layer, calls))


_RULES: dict[str, Callable[[Layer, Sequence[Call], int], Any]] = {
    "linear": partial(_join_each, _linear),
    "conv": partial(_join_each, _conv),
    "embedding": partial(_join_each, _embedding),
    "norm": partial(_join_each, _norm),
    "custom": partial(_join_each, _custom),
    "fallback": partial(_join_each, _fallback),
    "recurrent": _recurrent,
    "tied": _make_tied,
}
