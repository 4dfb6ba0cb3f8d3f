"""A private step written by hand, as cheap as we know how: a yardstick, not for use.

It clips exactly and adds noise of the right size, and leaves out what makes a step trustworthy:
no proof that examples are independent, no check of the model or of rounding, no secure noise, no
ledger. What DP-SGD costs beside it is the price of those. What it costs beside plain SGD no
implementation of the same passes in torch is likely to undercut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

# Gradients of examples are kept for the sum below this many numbers an example.
_KEPT = 1 << 14

Sum = Callable[[Tensor], list[Tensor]]


def _linear(module: nn.Linear, x: Tensor, g: Tensor) -> tuple[Tensor, Sum]:
    x = x.reshape(len(x), -1, x.shape[-1])
    g = g.reshape(len(g), -1, g.shape[-1])
    if x.shape[1] == 1:
        squares = (x.square().sum((1, 2)) + (module.bias is not None)) * g.square().sum((1, 2))
    else:
        products = torch.bmm(x, x.mT)
        if module.bias is not None:
            products += 1
        squares = (products * torch.bmm(g, g.mT)).sum((1, 2))

    def add_up(weights: Tensor) -> list[Tensor]:
        weighed = (g * weights.view(-1, 1, 1)).flatten(0, 1)
        sums = [weighed.T @ x.flatten(0, 1)]
        return sums if module.bias is None else [*sums, weighed.sum(0)]

    return squares, add_up


def _conv(module: nn.Conv2d, x: Tensor, g: Tensor) -> tuple[Tensor, Sum]:
    size, stride, padding = module.kernel_size, module.stride, module.padding
    rows = []
    for part, gradient in zip(x.split(32), g.flatten(2).split(32), strict=True):
        patches = F.unfold(part, size, padding=padding, stride=stride)
        rows.append(torch.bmm(gradient, patches.mT))
    is_kept = rows[0][0].numel() < _KEPT
    squares = torch.cat([part.square().sum((1, 2)) for part in rows])
    kept = torch.cat(rows) if is_kept else None
    if module.bias is not None:
        squares = squares + g.sum((2, 3)).square().sum(1)

    def add_up(weights: Tensor) -> list[Tensor]:
        if kept is not None:
            sums = [(weights @ kept.flatten(1)).view_as(module.weight)]
        else:
            weighed = g * weights.view(-1, 1, 1, 1)
            sums = [conv2d_weight(x, module.weight.shape, weighed, stride, padding)]
        return sums if module.bias is None else [*sums, weights @ g.sum((2, 3))]

    return squares, add_up


def _norm(module: nn.LayerNorm | nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Sum]:
    if isinstance(module, nn.LayerNorm):
        normal = F.layer_norm(x, module.normalized_shape, eps=module.eps)
        over = tuple(range(1, x.dim() - 1))
    else:
        normal = F.group_norm(x, module.num_groups, eps=module.eps)
        over = tuple(range(2, x.dim()))
    rows = (g * normal, g)
    scale, shift = (part.sum(over) for part in rows)
    squares = scale.square().sum(1) + shift.square().sum(1)
    return squares, lambda weights: [weights @ scale, weights @ shift]


def _embedding(module: nn.Embedding, ids: Tensor, g: Tensor) -> tuple[Tensor, Sum]:
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)).to(g.dtype)
    squares = (same * torch.bmm(g, g.mT)).sum((1, 2))

    def add_up(weights: Tensor) -> list[Tensor]:
        weighed = (g * weights.view(-1, 1, 1)).flatten(0, 1)
        return [torch.zeros_like(module.weight).index_add_(0, ids.flatten(), weighed)]

    return squares, add_up


RULES: dict[type[nn.Module], Callable[..., tuple[Tensor, Sum]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
    nn.Embedding: _embedding,
}


class HandWritten:
    """Puts the clipped, noisy mean of the gradients of single examples into `p.grad`.

    Args:
        model: its parameters lie in modules of `RULES`, each of which runs once a pass.
        max_grad_norm: C of the clip.
        noise_multiplier: σ, the noise has the standard deviation σ · C.

    Raises:
        ValueError: parameters in another module.
    """

    def __init__(self, model: nn.Module, max_grad_norm: float, noise_multiplier: float) -> None:
        self._bound, self._stddev = max_grad_norm, noise_multiplier * max_grad_norm
        self._model = model
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        for module in model.modules():
            if not list(module.parameters(recurse=False)):
                continue
            if type(module) not in RULES:
                raise ValueError(f"no rule for {type(module).__name__}: take another model")
            module.register_forward_hook(self._record)

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.requires_grad_()
        self._calls.append((module, inputs[0].detach(), output))

    def backward(self, losses: Callable[[nn.Module], Tensor]) -> None:
        """Make the gradients of one batch from its losses `[B]`."""
        self._model.requires_grad_(requires_grad=False)
        total = losses(self._model)
        outputs = [output for _, _, output in self._calls]
        gradients = torch.autograd.grad(total.sum(), outputs)
        found = []
        for (module, x, _), g in zip(self._calls, gradients, strict=True):
            found.append((module, *RULES[type(module)](module, x, g)))
        self._calls.clear()
        self._model.requires_grad_()
        squares = [square for _, square, _ in found]
        norms = functools.reduce(torch.add, squares).sqrt()
        weights = (self._bound / norms.clamp_min(1e-12)).clamp_max(1.0)
        for module, _, add_up in found:
            sums = add_up(weights)
            for parameter, value in zip(module.parameters(recurse=False), sums, strict=True):
                noise = torch.randn_like(value).mul_(self._stddev)
                parameter.grad = noise.add_(value).div_(len(norms))
