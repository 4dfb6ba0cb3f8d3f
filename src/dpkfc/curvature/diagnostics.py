"""Figures of curvature: signal-to-noise ratios, inner products of factors, the private oracle.

What is measured on probes is public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_positive
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor, IsotropicFactor
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.probe_pass import Capture, preserve_model, run_probe
from dpkfc.curvature.probes import Probe, Sample
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric


@dataclass(frozen=True, kw_only=True)
class SignalToNoise:
    """Signal-to-noise ratio of one layer's release, per probe example.

    Attributes:
        plain: without the metric.
        preconditioned: with it.
        parameters: gradient entries of the layer.
    """

    plain: float
    preconditioned: float
    parameters: int


def signal_to_noise(
    kfac: KFAC,
    model: nn.Module,
    capture: Capture,
    preconditioner: PreconditionerState,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
) -> dict[str, SignalToNoise]:
    """Return, per layer, the energy of a clipped gradient over that of the noise added to it.

        SNR_l = mean_n ‖c_n P_l g_n,l‖² / (σ² C² d_l),  c_n = min(1, C / ‖P g_n‖) over all layers

    with the probe's gradients g, d_l entries in layer l and P the metric (or the identity). A sum
    over B examples with equal gradients has B² times this ratio. The DP-KFC paper shows such a
    ratio (Fig. 1) without a formula; this formula is ours.

    Args:
        kfac: whose probe to use.
        model: any module, left as it is.
        capture: as in `KFAC.build`.
        preconditioner: the metric; its step names the probe's random stream.
        max_grad_norm: C, positive.
        noise_multiplier: σ, positive.

    Raises:
        ValueError: C or σ that is not positive.
    """
    check_positive("max_grad_norm", max_grad_norm)
    check_positive("noise_multiplier", noise_multiplier)
    energies: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with preserve_model(model), torch.no_grad():
        for microbatch in run_probe(model, capture, kfac.probe_spec(preconditioner.step)):
            blocks = {name: x for name, x in microbatch.blocks.items() if x.kind is not None}
            for column, metric in enumerate(({}, preconditioner.metric)):
                for name, energy in _clipped_energies(blocks, metric, max_grad_norm).items():
                    energies.setdefault(name, [0.0, 0.0])[column] += energy
            sizes |= {name: block.num_entries for name, block in blocks.items()}
    variance = (noise_multiplier * max_grad_norm) ** 2 * kfac.probe_size
    return {
        name: SignalToNoise(
            plain=plain / (variance * sizes[name]),
            preconditioned=mapped / (variance * sizes[name]),
            parameters=sizes[name],
        )
        for name, (plain, mapped) in energies.items()
    }


def _clipped_energies(blocks: Mapping[str, Block], metric: Metric, clip: float) -> dict[str, float]:
    """Return Σ_n ‖c_n P_l g_n,l‖² per layer."""
    squares = {name: x.squared_norms(metric.get(name)) for name, x in blocks.items()}
    norms = torch.stack(list(squares.values())).sum(0).sqrt()
    factors = (clip / norms.clamp(min=1e-300)).clamp(max=1.0)
    return {name: float((factors.square() * square).sum()) for name, square in squares.items()}


def inner_product(first: Factor, second: Factor) -> float:
    """Return tr(F S) of two factors of the same size, without forming either."""
    match first, second:
        case IsotropicFactor(), _:
            return first.mean * second.trace
        case _, IsotropicFactor():
            return second.mean * first.trace
        case DiagonalFactor(), DiagonalFactor():
            return float(first.values @ second.values)
        case Eigen(), Eigen():
            overlap = first.vectors.double().T @ second.vectors.double()
            overlap = overlap.square()
            above = (first.values - first.floor) @ overlap @ (second.values - second.floor)
            return float(above) + _isotropic_part(first, second)
        case Eigen(), DiagonalFactor():
            above = second.values @ first.vectors.double().square() @ (first.values - first.floor)
            return float(above) + first.floor * second.trace
        case _:
            return inner_product(second, first)


def _isotropic_part(first: Eigen, second: Eigen) -> float:
    """Return tr(F S) − tr(F' S') for F = F' + f I and S = S' + s I.

    f and s are the means of the eigenvalues that are left out.
    """
    f, s, dim = first.floor, second.floor, first.dim
    return f * (second.trace - s * dim) + s * (first.trace - f * dim) + f * s * dim


# --------------------------------------------------------------------------------------------------
# The private data as a probe: an upper reference for experiments, which voids every guarantee.
#
# This is the one value under `curvature` that holds private tensors. Every user of it says so: the
# plan has a caveat, the reported ε is not valid and the card is marked NOT PRIVATE.


@dataclass(frozen=True, eq=False)
class PrivateOracle(Probe):
    """Curvature of the private data, with their labels with `labels="given"`. NOT PRIVATE.

    Attributes:
        dataset: the private dataset: a tuple (inputs, labels) of tensors, or a map-style dataset of
            such pairs.
    """

    dataset: Any

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Tensor) or not hasattr(self.dataset, "__len__"):
            raise ValueError(
                "PrivateOracle needs a tuple (inputs, labels) of tensors or a map-style dataset of "
                "such pairs"
            )
        if self._size < 1 or len(self._row(0)) != 2:
            raise ValueError(
                "PrivateOracle needs at least one example, each a pair of an input and a label"
            )

    @property
    def _columns(self) -> tuple[Tensor, ...] | None:
        data = self.dataset
        if isinstance(data, tuple) and all(isinstance(x, Tensor) for x in data):
            return data
        return None

    @property
    def _size(self) -> int:
        return len(self.dataset if self._columns is None else self._columns[0])

    def _row(self, index: int) -> tuple[Any, ...]:
        if self._columns is None:
            return tuple(self.dataset[index])
        return tuple(x[index] for x in self._columns)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return n private examples, distinct while there are enough, with replacement beyond."""
        # Both are drawn for every n, so that the stream advances by the same numbers.
        chosen = torch.randint(self._size, (n,), generator=generator)
        if n <= self._size:
            chosen = torch.randperm(self._size, generator=generator)[:n]
        rows = [self._row(int(i)) for i in chosen]
        inputs = torch.stack([torch.as_tensor(row[0]).detach().cpu() for row in rows])
        labels = torch.stack([torch.as_tensor(row[1]).detach().cpu() for row in rows])
        return inputs.float() if inputs.is_floating_point() else inputs, labels

    def describe(self) -> dict[str, Any]:
        """Return plain values, without a hash of the contents, which are private."""
        return {
            "kind": type(self).__name__,
            "source": "private",
            "provenance": "the private dataset itself",
            "examples": self._size,
            "labelled": True,
            "uses_private_data": True,
        }
