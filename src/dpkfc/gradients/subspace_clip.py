"""Embedding and residual of per-example gradients along a public basis L, each with its own clip.

    w = Lᵀ g,   r = g − L w,   ‖r‖² = ‖g‖² − ‖w‖²,   Σ c r = Σ c g − L Σ c w

The residual needs only the inner products with the k directions: no residual is formed. They are
bᵀ L_j a for one position. Otherwise they come from gradients that were formed for their norms, or
are formed in chunks.

In floating point the difference of the squares cancels. For computed w = Lᵀ g + e and
‖Lᵀ L − I‖ <= η the residual that enters the sum has a square of exactly
‖g‖² − ‖w‖² + 2 w·e + w·(Lᵀ L − I) w. It is clipped by an upper bound of that,
‖g‖² − (1 − η) ‖w‖² + 2 ‖w‖ ‖e‖. With u the unit roundoff, p entries, γ = min(p, 4 √p) u (Higham
and Mary 2019) and M the sum of the norms of T terms, ‖e‖ <= γ ‖L‖_F ‖g‖ + 2 T u M a layer. The
second term appears only where the gradient is formed once more for the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkfc.clipping import SPLIT
from dpkfc.distributed.context import widest_dtype
from dpkfc.gradients.clip import clip_factors
from dpkfc.gradients.layer_matrices import split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.magnitudes import product_error
from dpkfc.linalg.metric import Metric
from dpkfc.linalg.norm_bounds import LayerNorms
from dpkfc.linalg.subspace import EMBEDDING, Span, Subspace
from dpkfc.tensors import Tensors


def subspace_clipper_of(metric: Metric, clipping: str) -> SubspaceClipper | None:
    """Return the clipper of gradients along the basis of a metric, None for one without a basis.

    Raises:
        ValueError: metric and clipping do not belong together, so that the plan's sensitivity would
            be wrong.
    """
    if not isinstance(metric, Subspace):
        if clipping in SPLIT:
            raise ValueError(
                f"clipping='{clipping}' needs the basis of a preconditioner such as "
                "curvature.gep.GEP(...)"
            )
        return None
    if clipping != metric.clipping:
        raise ValueError(
            f"this basis is clipped with clipping='{metric.clipping}', not '{clipping}'"
        )
    return SubspaceClipper(metric)


class SubspaceClipper:
    """The two clips and sums, of embedding and residual, of ONE logical batch.

    Args:
        basis: along which gradients are split.
    """

    def __init__(self, basis: Subspace) -> None:
        self._basis = basis
        # The clipped, scaled sum of w `[K]`.
        self._embedding: Tensor | float = 0.0
        # The sum of w with the factors of the residual `[K]`.
        self._removed: Tensor | float = 0.0

    def clip_and_add(
        self, results: Mapping[str, LayerNorms], layer_norms: Tensors, norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Clip and add the embeddings of one micro-batch; return the factors of its gradients.

        Args:
            results: layer name to the block that its clipped sum will be taken of.
            layer_norms: upper bounds of the norms of each layer's gradient `[N]`.
            norms: of the whole gradient.

        Returns:
            First the larger of ‖w‖ / S₁ and ‖r‖ / S₂ `[N]`, NaN where a gradient is not finite.
            Then the factors of the gradients `[N]`, zero where the residual is dropped.
        """
        basis = self._basis
        norms = norms.double()
        w = norms.new_zeros(len(norms), basis.width)
        error = 8 * torch.finfo(torch.float64).eps * norms
        for name, result in results.items():
            span = basis.spans.get(name)
            if span is not None:
                block: Any = result.block
                w[:, span.columns] += block.inner_products(span)
                gain = 1 + basis.defect
                error = error + product_error(block, span, layer_norms[name], gain)
        wrong = ~(norms.isfinite() & w.isfinite().all(1))
        w = w.masked_fill(wrong.unsqueeze(1), 0.0)
        norms = norms.masked_fill(wrong, math.nan)
        w_norms = w.norm(dim=1) + 0 * norms
        factors = clip_factors(w_norms, basis.embedding_norm)
        factors = factors * basis.embedding_scale
        self._embedding = self._embedding + factors @ w
        relative = w_norms / basis.embedding_norm
        if basis.residual_norm is None:
            return relative, torch.zeros_like(relative)
        removed = (1 - basis.defect) * w_norms.square()
        slack = 2 * w_norms * error
        squares = norms.square() - removed + slack
        residuals = squares.clamp(min=0).sqrt()
        factors = clip_factors(residuals, basis.residual_norm)
        factors = factors * basis.residual_scale
        self._removed = self._removed + factors @ w
        return torch.maximum(relative, residuals / basis.residual_norm), factors

    @property
    def keeps_residual(self) -> bool:
        """Return whether gradients are summed at all."""
        return self._basis.residual_norm is not None

    def result(self, sums: Tensors, layers: Sequence[Layer]) -> Tensors:
        """Return the stacked clipped sum: the embedding under its own name, and the residuals.

        Args:
            sums: parameter name to the sum of gradients with the factors of `clip_and_add`.
            layers: of the model.
        """
        like = next(iter(sums.values()))
        zeros = like.new_zeros(self._basis.width, dtype=torch.float64)
        embedding = zeros + self._embedding
        stacked = {EMBEDDING: embedding.to(widest_dtype(sums))}
        if not self.keeps_residual:
            return stacked
        stacked.update(sums)
        removed = zeros + self._removed
        in_subspace = spread(self._basis, layers, lambda span: span.combine(removed))
        for name, x in in_subspace.items():
            stacked[name] = sums[name] - x.to(sums[name].dtype)
        return stacked


def spread(
    basis: Subspace,
    layers: Sequence[Layer],
    value: Callable[[Span], Tensor | Tensors],
) -> Tensors:
    """Return a value of every layer's rows of a basis, as parameter name to tensor.

    Layers without rows are absent.

    Args:
        basis: the basis.
        layers: of the model.
        value: `Span.combine` of an embedding, or `Span.diagonal`.
    """
    tensors: Tensors = {}
    for layer in layers:
        span = basis.spans.get(layer.name)
        if span is not None:
            tensors.update(split_sum(layer, value(span)))
    return tensors
