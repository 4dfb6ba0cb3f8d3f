"""The spectral density of the whole Fisher matrix by stochastic Lanczos quadrature, from products with vectors alone.

The Fisher matrix of a model with outputs f over n examples is F = 1/n Σ Jᵀ H J, with H the curvature of the loss in the
outputs (diag p − p pᵀ for a softmax, 1 for squared error). A product with v is J v, by a backward pass through a backward
pass, then H, then one backward pass more; the graph of both is built once. No Kronecker structure is assumed, and no
block-diagonal one: this is what the factors approximate.

For a start vector v of random signs, m steps of Lanczos give a tridiagonal matrix whose eigenvalues θ_i, with the squared
first entries of its eigenvectors as weights, are a quadrature for the spectral density; over several v it is unbiased.

Source: Ghorbani, Krishnan and Xiao (2019); Ubaru, Chen and Saad (2017); DP-KFC, appendix F.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["Density", "density", "fisher_product", "lanczos"]

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Density:
    """A spectral density as weighted nodes.

    Attributes:
        nodes: eigenvalues, float64 `[k]`, largest first.
        weights: share of all eigenvalues that each stands for, float64 `[k]`; they sum to 1.
        dim: size of the matrix.
    """

    nodes: Tensor
    weights: Tensor
    dim: int

    @property
    def trace(self) -> float:
        """Sum of all eigenvalues, as the quadrature has it."""
        return float(self.dim * (self.nodes * self.weights).sum())

    def above(self) -> Tensor:
        """How many eigenvalues are at least as large as each node, float64 `[k]`."""
        return self.dim * self.weights.cumsum(0)


def fisher_product(model: nn.Module, inputs: Tensor, likelihood: str = "categorical") -> tuple[Product, int]:
    """v ↦ F v for the Fisher matrix of all trainable parameters, mean over the examples.

    Args:
        model: in evaluation mode; its parameters and their `.grad` are left as they are.
        inputs: `[n, ...]`; the model's outputs are `[n, c]`.
        likelihood: categorical, or gaussian with unit variance.

    Returns:
        The product, and the number d of parameters; vectors `[d]` are in the dtype of the parameters.

    Raises:
        ValueError: another likelihood, or outputs of another shape.
    """
    if likelihood not in ("categorical", "gaussian"):
        raise ValueError(f"likelihood must be categorical or gaussian, got {likelihood!r}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):  # the fused kernels of attention cannot be differentiated twice
        outputs = model(inputs)
        if outputs.dim() != 2:
            raise ValueError(f"the model's outputs have shape {tuple(outputs.shape)}; a Fisher product needs [examples, outputs]")
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, parameters, dummy, create_graph=True)
    shapes, probabilities = [p.shape for p in parameters], outputs.detach().softmax(-1)

    def product(vector: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in shapes])
        along = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        (moved,) = torch.autograd.grad(pulled, dummy, along, retain_graph=True)
        if likelihood == "categorical":
            moved = probabilities * (moved - (probabilities * moved).sum(-1, keepdim=True))
        back = torch.autograd.grad(outputs, parameters, moved / outputs.shape[0], retain_graph=True)
        return torch.cat([g.reshape(-1) for g in back])

    return product, sum(shape.numel() for shape in shapes)


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the quadrature from one start vector.

    Every new vector is made orthogonal to all earlier ones, twice: without that, eigenvalues that have converged come back.

    Args:
        product: v ↦ M v for a symmetric M.
        start: `[d]`, not zero.
        steps: at most this many products; fewer where an invariant subspace is found.

    Returns:
        (nodes, weights), float64, largest node first; the weights sum to 1.
    """
    basis = torch.zeros(min(steps, start.numel()), start.numel(), dtype=start.dtype, device=start.device)
    diagonal: list[float] = []
    beside: list[float] = []
    vector, largest = start / start.norm(), 0.0
    for step in range(len(basis)):
        basis[step] = vector
        following = product(vector)
        diagonal.append(float(following @ vector))
        for _ in range(2):
            following = following - basis[: step + 1].T @ (basis[: step + 1] @ following)
        norm = float(following.norm())
        largest = max(largest, abs(diagonal[-1]), norm)
        if norm <= 1e3 * torch.finfo(start.dtype).eps * largest or step + 1 == len(basis):
            break
        beside.append(norm)
        vector = following / norm
    off = torch.tensor(beside, dtype=torch.float64).diag(1)
    values, vectors = torch.linalg.eigh(torch.tensor(diagonal, dtype=torch.float64).diag() + off + off.T)
    return values.flip(0), vectors[0].square().flip(0)


def density(product: Product, dim: int, *, steps: int, starts: int, generator: torch.Generator, like: Tensor) -> Density:
    """The spectral density of a symmetric positive semi-definite matrix.

    Args:
        product: v ↦ M v.
        dim: size d.
        steps: of Lanczos.
        starts: random start vectors.
        generator: of their signs, on the CPU.
        like: a tensor whose dtype and device vectors have.
    """
    signs = (2 * torch.randint(2, (dim,), generator=generator) - 1 for _ in range(starts))
    pairs = [lanczos(product, start.to(like), steps) for start in signs]
    nodes, weights = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    order = nodes.argsort(descending=True)
    return Density(nodes[order].clamp(min=0), weights[order] / starts, dim)
