"""Max pooling of a captured graph, in the layout that is faster on a processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from dpkfc.tracking.pooling import MAX_POOL, run_operation

_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_DEFAULTS: tuple[Any, ...] = ([], 0, 1, False)  # stride, padding, dilation, ceil_mode


def choose_pooling(graph: fx.Graph) -> None:
    """Let each max pooling of a graph choose the layout of its images."""
    for node in graph.find_nodes(op="call_function", target=MAX_POOL):
        if not node.kwargs:
            node.target = pool_images


def pool_images(x: Tensor, *options: Any) -> Any:
    """Return the largest values and their places, as `aten.max_pool2d_with_indices`."""
    return _Pooling.apply(x, options)


class _Pooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: tuple[Any, ...]) -> Any:
        values, places = run_operation(MAX_POOL, (x, *options), {})
        ctx.save_for_backward(x, places)
        kernel, *others = options
        ctx.options = (kernel, *others, *_DEFAULTS[len(others) :])
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, places = ctx.saved_tensors
        return _BACKWARD(gradient, x, *ctx.options, places), None
