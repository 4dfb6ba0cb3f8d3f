"""The signal-to-noise ratio of a release, measured on the probe, so that it is public."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from dpkfc._checks import check_positive
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.metric_scale import layer_norms
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, run_probe
from dpkfc.linalg.blocks import Blocks
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
    """Return, per layer, the energy of a clipped gradient over the energy of the noise added to it.

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
    plain: dict[str, float] = defaultdict(float)
    mapped: dict[str, float] = defaultdict(float)
    sizes = {}
    with preserve_model(model), torch.no_grad():
        spec = kfac.probe_spec(preconditioner.step)
        for microbatch in run_probe(model, capture, spec):
            blocks = {name: x for name, x in microbatch.blocks.items() if x.kind is not None}
            _add_clipped_energies(plain, blocks, {}, max_grad_norm)
            _add_clipped_energies(mapped, blocks, preconditioner.metric, max_grad_norm)
            for name, block in blocks.items():
                sizes[name] = block.num_entries
    stddev = noise_multiplier * max_grad_norm
    variance = stddev**2 * kfac.probe_size
    ratios = {}
    for name, size in sizes.items():
        noise = variance * size
        before = plain[name] / noise
        after = mapped[name] / noise
        ratios[name] = SignalToNoise(plain=before, preconditioned=after, parameters=size)
    return ratios


def _add_clipped_energies(
    energies: dict[str, float], blocks: Blocks, metric: Metric, clip: float
) -> None:
    """Add Σ_n ‖c_n P_l g_n,l‖² of each layer."""
    squares = {name: layer_norms(x, metric.get(name)).square() for name, x in blocks.items()}
    total = torch.stack([*squares.values()]).sum(0)
    norms = total.sqrt()
    norms = norms.clamp(min=1e-300)
    factors = clip / norms
    factors = factors.clamp(max=1.0)
    for name, square in squares.items():
        clipped = factors.square() * square
        energies[name] += float(clipped.sum())
