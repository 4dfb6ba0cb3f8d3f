"""Read-outs: from the space in which noise was added to the step of the optimizer.

    whitened   z itself: the step is P ḡ, its noise is isotropic  (DP-KFC, Algorithm 1)
    natural    P z: the natural-gradient step P² ḡ, noise ∝ P²  (DP-NGD, Algorithm 1, Theorem 3.1)
    inverse    P⁻¹ z: P shapes clip and noise only, noise ∝ P⁻²

P is symmetric, so the variance of an entry is the release's times the diagonal of P² (natural) or
P⁻² (inverse).

Along a public basis L the step is S₁ / α · L w̃ + S₂ / β · r̃, where w̃ is the released embedding and
r̃ the released residual. The variance of its noise is the release's times (S₁ / α)² diag(L Lᵀ) +
(S₂ / β)².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dpkfc.gradients.layer_matrices import map_groups, matrix_of, split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.subspace_clip import spread
from dpkfc.linalg.metric import Entry, Metric
from dpkfc.linalg.subspace import EMBEDDING, Subspace
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import NamedTensors, Tensors

READOUTS = ("whitened", "natural", "inverse")


@dataclass(frozen=True)
class CachedReadout:
    """The map of one entry of a metric, with the variance of each number for one noise variance.

    Attributes:
        entry: P, the entry of the metric.
        map_to_step: maps a released gradient to the step: P or P⁻¹.
        noise_variance: the variance of the noise in every number of a release.
        variances: parameter name to the variance of the noise in each number of the step.
    """

    entry: Entry
    map_to_step: Entry
    noise_variance: float
    variances: NamedTensors


def read_out(
    released: Released,
    metric: Metric,
    layers: Sequence[Layer],
    how: str,
    cache: dict[str, CachedReadout] | None = None,
) -> Released:
    """Return the release in another read-out.

    Args:
        released: in the preconditioned space.
        metric: the metric of clip and noise; a layer without an entry is left as it is.
        layers: of the model.
        how: whitened, natural or inverse.
        cache: inverses and variances by layer, which stay valid while an entry stays the same
            object.

    Raises:
        ValueError: a release whose noise does not have one variance.
    """
    if isinstance(metric, Subspace):
        # A subspace has no entries, so that all three read-outs are the same.
        return combine_subspace_release(released, metric, layers)
    if how == "whitened" or not metric:
        return released
    variance = released.noise_variance
    if not isinstance(variance, float):
        raise ValueError("a read-out comes before any other post-processing")
    cache = {} if cache is None else cache
    gradients = dict(released.gradients)
    variances: dict[str, Tensor | float] = dict.fromkeys(gradients, variance)
    for layer in layers:
        entry = metric.get(layer.name)
        if entry is None:
            continue
        cached = cache.get(layer.name)
        if cached is None or cached.entry is not entry or cached.noise_variance != variance:
            map_to_step = entry if how == "natural" else entry.inverse()
            layer_variances = _variances(layer, gradients, map_to_step, variance)
            cached = CachedReadout(entry, map_to_step, variance, layer_variances)
            cache[layer.name] = cached
        gradients.update(_apply_entry(layer, gradients, cached.map_to_step))
        variances.update(cached.variances)
    return replace(released, gradients=gradients, noise_variance=variances)


def _scales(layer: Layer, entry: Entry) -> Tensors:
    """Return the factors of an elementwise entry by full parameter name."""
    scales = entry.scales
    return {name: scales[role] for role, name in layer.parameters.items() if role in scales}


def _apply_entry(layer: Layer, tensors: NamedTensors, entry: Entry) -> NamedTensors:
    if entry.is_elementwise:
        return {name: tensors[name] * scale for name, scale in _scales(layer, entry).items()}
    return _map_matrix(layer, tensors, entry.apply)


def _variances(layer: Layer, tensors: NamedTensors, entry: Any, variance: float) -> Tensors:
    if entry.is_elementwise:
        return {name: variance * scale.square() for name, scale in _scales(layer, entry).items()}

    def matrix_variance(gradient: Tensor) -> Tensor:
        return (variance * entry.variance().to(gradient)).expand(gradient.shape)

    variances = _map_matrix(layer, tensors, matrix_variance)
    return {name: value.contiguous() for name, value in variances.items()}


def _map_matrix(
    layer: Layer, tensors: NamedTensors, function: Callable[[Tensor], Tensor]
) -> NamedTensors:
    matrix = matrix_of(layer, tensors)
    return split_sum(layer, map_groups(layer, matrix, function))


def combine_subspace_release(
    released: Released, basis: Subspace, layers: Sequence[Layer]
) -> Released:
    """Return a release of embedding and residual as gradients of the parameters.

    Args:
        released: the embedding under its own name, and the residual of each parameter unless it is
            dropped.
        basis: the basis along which the sum was clipped.
        layers: of the model.

    Raises:
        ValueError: the noise does not have one variance, or the embedding is missing.
    """
    variance = released.noise_variance
    if not isinstance(variance, float) or EMBEDDING not in released.gradients:
        raise ValueError("embedding and residual are joined before any other post-processing")
    embedding = released.gradients[EMBEDDING] / basis.embedding_scale
    in_subspace = spread(basis, layers, lambda span: span.combine(embedding))
    diagonal = spread(basis, layers, lambda span: span.diagonal)
    gradients: Tensors = dict(in_subspace)
    variances: dict[str, Tensor | float] = {}
    for name, entries in diagonal.items():
        variances[name] = entries * (variance / basis.embedding_scale**2)
    for name, residual in released.gradients.items():
        if name == EMBEDDING:
            continue
        gradient = residual / basis.residual_scale
        if name in in_subspace:
            gradient = gradient + in_subspace[name].to(gradient.dtype)
        gradients[name] = gradient
        variances[name] = variances.get(name, 0.0) + variance / basis.residual_scale**2
    return replace(released, gradients=gradients, noise_variance=variances)
