"""The read-out of a release along a public basis: the embedding is mapped back, and the residual added to it.

The step is S₁ / α · L w̃ + S₂ / β · r̃, and its noise has (S₁ / α)² diag(L Lᵀ) + (S₂ / β)² times the variance of the release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from dpkfc.gradients.accumulate import split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.subspace import spread
from dpkfc.privacy.mechanism import Released
from dpkfc.subspace import EMBEDDING, Subspace

__all__ = ["joined"]


def joined(released: Released, basis: Subspace, layers: Sequence[Layer]) -> Released:
    """A release of embedding and residual as gradients of the parameters.

    Args:
        released: the embedding under its own name, and the residual of each parameter unless it is dropped.
        basis: the one it was clipped along.
        layers: of the model.

    Raises:
        ValueError: a release whose noise is not that of a release, or that has no embedding.
    """
    variance = released.noise_variance
    if not isinstance(variance, float) or EMBEDDING not in released.gradients:
        raise ValueError("embedding and residual are joined in a release itself, before any other post-processing")
    embedding = released.gradients[EMBEDDING] / basis.embedding_scale
    along = spread(basis, layers, lambda span: span.combine(embedding), split_sum)
    diagonal = spread(basis, layers, lambda span: span.diagonal, split_sum)
    gradients: dict[str, Tensor] = dict(along)
    variances: dict[str, Tensor | float] = {
        name: x * (variance / basis.embedding_scale**2) for name, x in diagonal.items()
    }
    for name, residual in released.gradients.items():
        if name == EMBEDDING:
            continue
        own = residual / basis.residual_scale
        gradients[name] = own + along[name].to(own.dtype) if name in along else own
        variances[name] = variances.get(name, 0.0) + variance / basis.residual_scale**2
    return replace(released, gradients=gradients, noise_variance=variances)
