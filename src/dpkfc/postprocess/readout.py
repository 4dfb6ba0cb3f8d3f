"""Read-outs: from the coordinates in which noise was added to the step that the optimizer takes.

    whitened   z itself: the step is P ḡ, noise is isotropic in it          (DP-KFC, Algorithm 1)
    natural    P z: the net map is P², the natural gradient; noise ∝ P²     (DP-NGD, Algorithm 1, Theorem 3.1)
    inverse    P⁻¹ z: the metric shapes clip and noise only; noise ∝ P⁻²

All of it happens after the noise. The variance of every entry is carried along: with P symmetric it is that of the release
times the diagonal of P² (natural) or P⁻² (inverse).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dpkfc.gradients.accumulate import matrix_of, on_groups, split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.metric import Elementwise, Entry, Metric
from dpkfc.postprocess.subspace import joined
from dpkfc.privacy.mechanism import Released
from dpkfc.subspace import Subspace

__all__ = ["READOUTS", "Map", "read_out"]

READOUTS = ("whitened", "natural", "inverse")


@dataclass(frozen=True)
class Map:
    """What a read-out needs of one entry of a metric: the map, and the variance of every entry for a release of variance `v`."""

    entry: Entry
    change: Entry
    v: float
    variances: Mapping[str, Tensor]


def read_out(
    released: Released, metric: Metric, layers: Sequence[Layer], how: str, maps: dict[str, Map] | None = None
) -> Released:
    """The release in another read-out.

    Args:
        released: in the coordinates of the metric.
        metric: the one it was clipped and noised in; a layer without an entry is left as it is.
        layers: of the model.
        how: whitened, natural or inverse.
        maps: kept from step to step, so that inverses and variances are formed once for an entry of a metric.

    Raises:
        ValueError: an unknown read-out, or a release whose noise is not that of a release.
    """
    if how not in READOUTS:
        raise ValueError(f"readout must be one of {', '.join(READOUTS)}; got {how!r}")
    if isinstance(metric, Subspace):  # has no entries to map by, so that all three are the same
        return joined(released, metric, layers)
    if how == "whitened" or not metric:
        return released
    if not isinstance(released.noise_variance, float):
        raise ValueError("a read-out is taken of a release itself, before any other post-processing")
    gradients = dict(released.gradients)
    variances: dict[str, Tensor | float] = dict.fromkeys(gradients, released.noise_variance)
    for layer in layers:
        entry = metric.get(layer.name)
        if entry is None:
            continue
        held = None if maps is None else maps.get(layer.name)
        if held is None or held.entry is not entry or held.v != released.noise_variance:
            change = entry if how == "natural" else entry.inverse()
            found = _variances(layer, gradients, change, released.noise_variance)
            held = Map(entry, change, released.noise_variance, found)
        if maps is not None:
            maps[layer.name] = held
        gradients.update(_mapped(layer, gradients, held.change))
        variances.update(held.variances)
    return replace(released, gradients=gradients, noise_variance=variances)


def _mapped(layer: Layer, tensors: Mapping[str, Tensor], entry: Entry) -> Mapping[str, Tensor]:
    if isinstance(entry, Elementwise):
        return {full: tensors[full] * entry.scale[role] for role, full in layer.parameters.items() if role in entry.scale}
    return _on_matrix(layer, tensors, entry.whiten)


def _variances(layer: Layer, tensors: Mapping[str, Tensor], entry: Entry, variance: float) -> dict[str, Tensor]:
    if isinstance(entry, Elementwise):
        own = {full: entry.scale[role] for role, full in layer.parameters.items() if role in entry.scale}
        return {full: variance * scale.square() for full, scale in own.items()}
    found = _on_matrix(layer, tensors, lambda g: (variance * entry.variance().to(g)).expand(g.shape))
    return {full: x.contiguous() for full, x in found.items()}


def _on_matrix(layer: Layer, tensors: Mapping[str, Tensor], work: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
    return split_sum(layer, on_groups(layer, matrix_of(layer, tensors), work))
