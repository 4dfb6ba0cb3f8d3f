"""Random networks beside mean-field theory: variances forwards and backwards, and the trace of every Fisher block.

Weights have variance σ_w² / fan-in and biases σ_b², q is the variance of pre-activations, p that
of a gradient in them, z a standard normal number; the loss is the mean over outputs of half the squared error, with labels
drawn from the model:

    forwards    q_1 = σ_w² E x² + σ_b²        q_l = σ_w² χ_{l−1} + σ_b²        χ_l = E φ(√q_l z)²
    backwards   p_L = 1 / n_L²                p_l = p_{l+1} · (n_{l+1} / n_l) σ_w² E φ'(√q_l z)²
    Fisher      tr F_l = n_l p_l (n_{l−1} χ_{l−1} + 1)                          χ_0 = E x², + 1 for the bias

The last line is what equation (1) of the paper, Tr F_l ∝ d q_{l−1} q̃_l, stands for: the variance of ACTIVATIONS χ, not of
pre-activations q, is what a weight's gradient is multiplied by.

Weights are drawn uniformly, as torch draws them: theory knows their variance only. Inputs are public Gaussian noise.

Source: Poole et al. (2016), Schoenholz et al. (2016), Karakida et al. (2019); DP-KFC, section 3.3 and appendix F.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.blocks import Outer
from dpkfc.curvature.probes import FeatureNoise
from dpkfc.curvature.probing import ProbeRun, blocks_on_probe, public_generator, undisturbed
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.studies.cell import Run, hardware

__all__ = ["ACTIVATIONS", "Network", "Variances", "measured", "predicted", "random_network"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
_MODULES: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
# Variance of weights at which signals neither vanish nor explode with depth, about.
_GAINS = {"tanh": 1.3, "relu": 2.0, "gelu": 2.0, "silu": 2.4}
_SIZES = {"widths": (64, 256, 1024), "depths": (4, 16), "networks": 3, "examples": 64}
_SMOKE = {"widths": (32,), "depths": (3,), "networks": 2, "examples": 16}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A random network: `depth` layers, all but the last of one width.

    Attributes:
        activation: a name of `ACTIVATIONS`.
        width: of hidden layers.
        depth: linear layers.
        inputs, outputs: sizes.
        weight_variance: σ_w².
        bias_variance: σ_b².
        input_variance: E x² of every input.
    """

    activation: str
    width: int
    depth: int
    inputs: int = 784
    outputs: int = 10
    weight_variance: float
    bias_variance: float = 0.05
    input_variance: float = 1.0

    @property
    def widths(self) -> list[int]:
        """n_0 to n_L."""
        return [self.inputs, *[self.width] * (self.depth - 1), self.outputs]


@dataclass(frozen=True)
class Variances:
    """Of layers 1 to L: q forwards, p backwards (per unit), and tr F_l with bias."""

    forwards: Sequence[float]
    backwards: Sequence[float]
    traces: Sequence[float]


def _mean(function: Callable[[Tensor], Tensor], variance: float) -> float:
    """E f(√variance · z) over a standard normal z, by a fine sum that kinks do not disturb."""
    z = torch.linspace(-9, 9, 6000, dtype=torch.float64)  # an even number: no point lies on the kink at zero
    density = torch.exp(-z.square() / 2)
    return float((function(math.sqrt(variance) * z) * density).sum() / density.sum())


def _slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(function(at).sum(), at)[0]


def predicted(network: Network) -> Variances:
    """What theory says of a network of infinite width, with the widths in the ratios n_{l+1} / n_l and the traces."""
    phi, gain = ACTIVATIONS[network.activation], network.weight_variance
    widths = network.widths
    forwards: list[float] = []
    chi = [network.input_variance]
    for _ in range(network.depth):
        forwards.append(gain * chi[-1] + network.bias_variance)
        chi.append(_mean(lambda s: phi(s).square(), forwards[-1]))
    backwards = [network.outputs**-2.0]
    for layer in range(network.depth - 1, 0, -1):
        slope = _mean(lambda s: _slope(phi, s).square(), forwards[layer - 1])
        backwards.append(backwards[-1] * widths[layer + 1] / widths[layer] * gain * slope)
    backwards.reverse()
    traces = [widths[layer + 1] * p * (widths[layer] * chi[layer] + 1) for layer, p in enumerate(backwards)]
    return Variances(forwards, backwards, traces)


def random_network(network: Network, generator: torch.Generator) -> nn.Sequential:
    """A network with weights of a generator."""
    layers: list[nn.Module] = []
    for index, (n, m) in enumerate(itertools.pairwise(network.widths)):
        linear = nn.Linear(n, m)
        with torch.no_grad():
            for tensor, variance in ((linear.weight, network.weight_variance / n), (linear.bias, network.bias_variance)):
                bound = math.sqrt(3 * variance)
                tensor.uniform_(-bound, bound, generator=generator)
        layers += [linear] if index == network.depth - 1 else [linear, _MODULES[network.activation]()]
    return nn.Sequential(*layers)


def observed(network: Network, *, examples: int, seed: int) -> Variances:
    """The same of one random network: exact traces of the Fisher blocks with outputs drawn from the model."""
    model = random_network(network, public_generator(seed, 0, "mean field"))
    layers = find_layers(model)
    probe = FeatureNoise(network.inputs, std=math.sqrt(network.input_variance))
    run = ProbeRun(
        probe=probe, size=examples, chunk=examples, labels="model", likelihood="gaussian", loss=None, seed=seed, step=0
    )
    linear = [module for module in model if isinstance(module, nn.Linear)]
    with undisturbed(model), torch.no_grad():
        piece = next(iter(blocks_on_probe(model, lambda m, loss: capture(m, layers, loss), run)))
        forwards, backwards, traces = [], [], []
        for module, layer in zip(linear, layers, strict=True):
            block = piece.blocks[layer.name]
            assert isinstance(block, Outer)
            a, b = block.explicit().a.flatten(1), block.b.flatten(1)
            forwards.append(float(F.linear(a[:, :-1], module.weight, module.bias).square().mean()))
            backwards.append(float(b.square().mean()))
            traces.append(float((a.square().sum(1) * b.square().sum(1)).mean()))
    return Variances(forwards, backwards, traces)


def measured(run: Run, folder: Path, *, data_dir: str = "", public: Path | None = None, report: Any = None) -> dict[str, Any]:
    """A cell: theory beside networks of several activations, widths and depths. Reads no data.

    Returns:
        A row with one entry a kind of network: what is predicted, and the mean and standard deviation over networks of what is
        measured ÷ predicted, layer by layer.
    """
    started = time.perf_counter()
    sizes: dict[str, Any] = _SMOKE if run.config().smoke else _SIZES
    found = []
    for name, width, depth in itertools.product(ACTIVATIONS, sizes["widths"], sizes["depths"]):
        network = Network(activation=name, width=width, depth=depth, weight_variance=_GAINS[name])
        theory = predicted(network)
        many = [observed(network, examples=sizes["examples"], seed=run.seed + k) for k in range(sizes["networks"])]
        entry: dict[str, Any] = {"activation": name, "width": width, "depth": depth, "weight_variance": _GAINS[name]}
        for what in ("forwards", "backwards", "traces"):
            expected = torch.tensor(getattr(theory, what), dtype=torch.float64)
            ratios = torch.tensor([getattr(one, what) for one in many], dtype=torch.float64) / expected
            entry[what] = {
                "predicted": _short(expected), "ratio": _short(ratios.mean(0)), "std": _short(ratios.std(0)),
            }  # fmt: skip
        found.append(entry)
    return {
        "run": run.describe(), "hash": run.hash, "networks": found, "seeds": sizes["networks"], "examples": sizes["examples"],
        "contraction": _contraction(), "private": "no data were read", "wall_seconds": round(time.perf_counter() - started, 1),
        "hardware": hardware(),
    }  # fmt: skip


def _contraction() -> list[dict[str, Any]]:
    """Whether the variance of the inputs is forgotten with depth (proposition F.1): q_l of inputs of variance 0.1 and of 10."""
    found = []
    for name, gain in _GAINS.items():
        pair = [
            predicted(Network(activation=name, width=256, depth=20, weight_variance=gain, input_variance=v)).forwards
            for v in (0.1, 10.0)
        ]
        ratio = [high / low for low, high in zip(*pair, strict=True)]
        found.append({"activation": name, "weight_variance": gain, "ratio": [float(f"{r:.4g}") for r in ratio]})
    return found


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
