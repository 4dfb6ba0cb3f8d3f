"""The spectral density of the whole Fisher matrix by stochastic Lanczos quadrature.

It takes products with vectors alone.

The Fisher matrix of a model with outputs f over n examples is F = 1/n Σ Jᵀ H J, with H the
curvature of the loss in the outputs (diag p − p pᵀ for a softmax, 1 for squared error). A product
with v is J v, by a backward pass through a backward pass, then H, then one backward pass more;
the graph of both is built once. No Kronecker structure is assumed, and no block-diagonal one:
this is what the factors approximate.

For a start vector v of random signs, m steps of Lanczos give a tridiagonal matrix whose
eigenvalues θ_i, with the squared first entries of its eigenvectors as weights, are a quadrature
for the spectral density; over several v it is unbiased.

Source: Ghorbani, Krishnan and Xiao (2019); Ubaru, Chen and Saad (2017); DP-KFC, appendix F.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
        """Sum of all eigenvalues by the quadrature."""
        mean = (self.nodes * self.weights).sum()
        return float(self.dim * mean)

    def count_above(self) -> Tensor:
        """Return how many eigenvalues are at least as large as each node, float64 `[k]`."""
        return self.dim * self.weights.cumsum(0)


def fisher_product(model: nn.Module, inputs: Tensor) -> tuple[Product, int]:
    """Return v ↦ F v for the Fisher matrix of all trainable parameters, mean over the examples.

    Args:
        model: in evaluation mode; its parameters and their `.grad` are left as they are.
        inputs: `[n, ...]`; the model's outputs are logits `[n, c]`.

    Returns:
        The product, and the number d of parameters; vectors `[d]` have the parameters' dtype.

    Raises:
        ValueError: outputs of another shape.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    # The fused kernels of attention cannot be differentiated twice.
    with torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):
        outputs = model(inputs)
        if outputs.dim() != 2:
            raise ValueError(
                f"the model's outputs have shape {tuple(outputs.shape)}; "
                "a Fisher product needs [examples, outputs]"
            )
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, parameters, dummy, create_graph=True)
    shapes = [p.shape for p in parameters]
    sizes = [shape.numel() for shape in shapes]
    probabilities = outputs.detach().softmax(-1)

    def product(vector: Tensor) -> Tensor:
        pieces = zip(vector.split(sizes), shapes, strict=True)
        direction = [piece.view(shape) for piece, shape in pieces]
        (moved,) = torch.autograd.grad(pulled, dummy, direction, retain_graph=True)
        mean = (probabilities * moved).sum(-1, keepdim=True)
        scaled = probabilities * (moved - mean) / outputs.shape[0]
        gradients = torch.autograd.grad(outputs, parameters, scaled, retain_graph=True)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    return product, sum(sizes)


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the quadrature from one start vector.

    Every new vector is made orthogonal to all earlier ones, twice. Otherwise eigenvalues that have
    converged come back.

    Args:
        product: v ↦ M v for a symmetric M.
        start: `[d]`, not zero.
        steps: at most this many products; fewer where an invariant subspace is found.

    Returns:
        (nodes, weights), float64, largest node first; the weights sum to 1.
    """
    size = start.numel()
    basis = start.new_zeros(min(steps, size), size)
    tolerance = 1e3 * torch.finfo(start.dtype).eps
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    vector = start / start.norm()
    largest = 0.0
    for step in range(len(basis)):
        basis[step] = vector
        following = product(vector)
        diagonal.append(float(following @ vector))
        for _ in range(2):
            earlier = basis[: step + 1]
            following = following - earlier.T @ (earlier @ following)
        norm = float(following.norm())
        largest = max(largest, abs(diagonal[-1]), norm)
        if norm <= tolerance * largest or step + 1 == len(basis):
            break
        off_diagonal.append(norm)
        vector = following / norm
    middle = torch.tensor(diagonal, dtype=torch.float64).diag()
    upper = torch.tensor(off_diagonal, dtype=torch.float64).diag(1)
    tridiagonal = middle + upper + upper.T
    values, vectors = torch.linalg.eigh(tridiagonal)
    weights = vectors[0].square()
    return values.flip(0), weights.flip(0)


def density(
    product: Product, dim: int, *, steps: int, starts: int, generator: torch.Generator
) -> Density:
    """Return the spectral density of a symmetric positive semi-definite matrix.

    Args:
        product: v ↦ M v, in float64 on the CPU.
        dim: size d.
        steps: of Lanczos.
        starts: random start vectors.
        generator: of their signs, on the CPU.
    """
    all_nodes = []
    all_weights = []
    for _ in range(starts):
        bits = torch.randint(2, (dim,), generator=generator)
        signs = 2 * bits - 1
        nodes, weights = lanczos(product, signs.double(), steps)
        all_nodes.append(nodes)
        all_weights.append(weights)
    nodes = torch.cat(all_nodes)
    weights = torch.cat(all_weights) / starts
    order = nodes.argsort(descending=True)
    ordered = nodes[order].clamp(min=0)
    return Density(ordered, weights[order], dim)
