"""A capture of its own for the curvature tests: plain torch.autograd on outputs, for small models
of a few kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.curvature import KFAC, FeatureNoise, PublicData
from dpkfc.curvature.eigen import Eigen
from dpkfc.linalg.blocks import Block, Lookup, Outer, PerExample

RULES = {nn.Linear: "linear", nn.Conv2d: "conv", nn.Embedding: "embedding", nn.LayerNorm: "norm"}


def capture(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Mapping[str, Block]:
    """Hooks on the modules of RULES, one call each; gradients of the SUM of per-example losses at
    their outputs.
    """
    calls: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name] = (module, args[0].detach(), output)

        return hook

    handles = [
        m.register_forward_hook(note(n)) for n, m in model.named_modules() if type(m) in RULES
    ]
    try:
        losses = loss(model)
    finally:
        for handle in handles:
            handle.remove()
    gradients = torch.autograd.grad(losses.sum(), [output for _, _, output in calls.values()])
    return {
        n: _block(m, x, b.detach())
        for (n, (m, x, _)), b in zip(calls.items(), gradients, strict=True)
    }


def _block(module: nn.Module, x: Tensor, b: Tensor) -> Block:
    n = b.shape[0]
    if isinstance(module, nn.Embedding):
        return Lookup(x.reshape(n, -1), b.reshape(n, -1, b.shape[-1]), module.num_embeddings)
    if isinstance(module, nn.LayerNorm):
        x_hat = F.layer_norm(x, module.normalized_shape, eps=module.eps)
        inner = tuple(range(1, b.dim() - 1))
        grads = {"weight": b * x_hat, "bias": b}
        return PerExample({role: g.sum(inner) if inner else g for role, g in grads.items()})
    groups = 1
    if isinstance(module, nn.Conv2d):
        groups = module.groups
        patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        a = patches.view(n * groups, patches.shape[1] // groups, -1).mT
        b = b.reshape(n * groups, b.shape[1] // groups, -1).mT
    else:
        a, b = x.reshape(n, -1, x.shape[-1]), b.reshape(n, -1, b.shape[-1])
    if module.bias is not None:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], -1)
    return Outer(a, b, groups)


def rules_of(model: nn.Module) -> dict[str, str]:
    return {name: RULES[type(m)] for name, m in model.named_modules() if type(m) in RULES}


def mlp(d_in: int = 12, width: int = 8, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, width), nn.Tanh(), nn.Linear(width, classes))


def cnn(groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=groups, dilation=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 1 * 2, 3),
    )


CNN_SHAPE = (2, 5, 6)


class Text(nn.Module):
    """Token ids to classes per position or per example, with an embedding and a LayerNorm."""

    def __init__(
        self, rows: int = 11, width: int = 6, classes: int = 3, pooled: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.pooled = pooled

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        return self.head(x.mean(1) if self.pooled else x)


def make_kfac(**fields: object) -> KFAC:
    """Return a small KFAC of both sides, on rows of 12 numbers unless told otherwise."""
    return KFAC(
        **{"probe": FeatureNoise(12), "sides": "both", "probe_size": 40, "chunk": 16, **fields}
    )


def token_ids(n: int = 30, rows: int = 11, length: int = 5) -> PublicData:
    return PublicData(torch.randint(rows, (n, length)), provenance="random ids")


def kronecker_factors(block: Outer, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """Return the factors of a matrix-shaped layer as dense matrices, by a loop over positions.

    Args:
        block: inputs and output gradients of N examples.
        sharing: expand or reduce.

    Returns:
        (A `[d_in, d_in]`, G `[d_out, d_out]`), undamped.
    """
    a, b = block.explicit().a, block.b
    d_in, d_out = a.shape[-1], b.shape[-1]
    a_sum = torch.zeros(d_in, d_in, dtype=torch.float64)
    g_sum = torch.zeros(d_out, d_out, dtype=torch.float64)
    n, t = a.shape[:2]
    for i in range(n):
        if sharing == "expand":
            for s in range(t):
                a_sum += torch.outer(a[i, s], a[i, s]) / n
                g_sum += torch.outer(b[i, s], b[i, s]) / (n * t)
        else:
            mean, total = a[i].mean(0), b[i].sum(0)
            a_sum += torch.outer(mean, mean) / n
            g_sum += torch.outer(total, total) / n
    return a_sum, g_sum


def dense_matrix(factor: Eigen) -> Tensor:
    """The matrix `[d, d]` in the dtype of the vectors."""
    above = factor.values - factor.floor
    above = above.to(factor.vectors.dtype)
    matrix = (factor.vectors * above) @ factor.vectors.T
    matrix.diagonal().add_(factor.floor)
    return matrix


def raise_to(matrix: Tensor, power: float, floor: float = 1e-300) -> Tensor:
    """Return a power of a symmetric matrix, whose eigenvalues are at least `floor`."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=floor).pow(power)) @ vectors.T
