"""Random networks next to mean-field theory.

Compared are variances forwards and backwards, and the trace of every Fisher block.

Weights have variance σ_w² / fan-in and biases σ_b², q is the variance of pre-activations, p the
variance of a gradient in them, z a standard normal number; the loss is the mean over outputs of
half the squared error, with labels drawn from the model:

    forwards    q_1 = σ_w² E x² + σ_b²        q_l = σ_w² χ_{l−1} + σ_b²        χ_l = E φ(√q_l z)²
    backwards   p_L = 1 / n_L²                p_l = p_{l+1} · (n_{l+1} / n_l) σ_w² E φ'(√q_l z)²
    Fisher      tr F_l = n_l p_l (n_{l−1} χ_{l−1} + 1)             χ_0 = E x², + 1 for the bias

The last line is what equation (1) of the paper, Tr F_l ∝ d q_{l−1} q̃_l, stands for: the variance
of ACTIVATIONS χ, not of pre-activations q, is what a weight's gradient is multiplied by.

Weights are drawn uniformly, as torch draws them: theory knows their variance only. Inputs are
public Gaussian noise.

Source: Poole et al. (2016), Schoenholz et al. (2016), Karakida et al. (2019); DP-KFC, section 3.3
and appendix F.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.app.tuning.runs import Judge, Place, Run, hardware
from dpkfc.app.tuning.samples import round_value
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.curvature.probe_pass import ProbeSpec, public_generator, run_probe
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.linalg.blocks import Outer
from dpkfc_papers.rounding import round_all

Row = Mapping[str, Any]
# Plain values of a row that is made here.
Figures = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
# Variance of weights at which signals neither vanish nor explode with depth, about.
_GAINS = {"tanh": 1.3, "relu": 2.0, "gelu": 2.0, "silu": 2.4}
_SIZES = {
    "widths": (64, 256, 1024),
    "depths": (4, 16),
    "networks": 3,
    "examples": 64,
}
_SMOKE = {
    "widths": (32,),
    "depths": (3,),
    "networks": 2,
    "examples": 16,
}


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
        hidden = [self.width] * (self.depth - 1)
        return [self.inputs, *hidden, self.outputs]


@dataclass(frozen=True)
class Variances:
    """Of layers 1 to L: q forwards, p backwards (per unit), and tr F_l with bias."""

    forwards: Sequence[float]
    backwards: Sequence[float]
    traces: Sequence[float]


def _mean(function: Callable[[Tensor], Tensor], variance: float) -> float:
    """Return E f(√variance · z) over a standard normal z, by a fine sum.

    The number of points is even, so that no point lies on a kink at zero.
    """
    z = torch.linspace(-9, 9, 6000, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    values = function(math.sqrt(variance) * z)
    return float((values * density).sum() / density.sum())


def _slope(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    point = point.detach().requires_grad_(True)
    with torch.enable_grad():
        total = function(point).sum()
        (slope,) = torch.autograd.grad(total, point)
    return slope


def predict_variances(network: Network) -> Variances:
    """Return what theory says of a network of infinite width.

    Widths enter as the ratios n_{l+1} / n_l and in the traces.
    """
    phi = ACTIVATIONS[network.activation]()
    gain = network.weight_variance
    widths = network.widths
    forwards: list[float] = []
    chi = [network.input_variance]
    for _ in range(network.depth):
        q = gain * chi[-1] + network.bias_variance
        forwards.append(q)
        chi.append(_mean(lambda s: phi(s).square(), q))
    backwards = [network.outputs**-2.0]
    for layer in range(network.depth - 1, 0, -1):
        slope = _mean(lambda s: _slope(phi, s).square(), forwards[layer - 1])
        ratio = widths[layer + 1] / widths[layer]
        backwards.append(backwards[-1] * ratio * gain * slope)
    backwards.reverse()
    traces = []
    for layer, p in enumerate(backwards):
        squared_input = widths[layer] * chi[layer] + 1
        traces.append(widths[layer + 1] * p * squared_input)
    return Variances(forwards, backwards, traces)


def random_network(network: Network, generator: torch.Generator) -> nn.Sequential:
    """Return a network with weights of a generator."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(network.widths):
        if layers:
            layers.append(ACTIVATIONS[network.activation]())
        linear = nn.Linear(inputs, outputs)
        _fill_uniform(linear.weight, network.weight_variance / inputs, generator)
        _fill_uniform(linear.bias, network.bias_variance, generator)
        layers.append(linear)
    return nn.Sequential(*layers)


def _fill_uniform(tensor: Tensor, variance: float, generator: torch.Generator) -> None:
    bound = math.sqrt(3 * variance)
    with torch.no_grad():
        tensor.uniform_(-bound, bound, generator=generator)


def measure_network(network: Network, *, examples: int, seed: int) -> Variances:
    """Measure one random network: exact traces of the Fisher blocks, outputs from the model."""
    model = random_network(network, public_generator(seed, 0, "mean field"))
    layers = find_layers(model)
    run = ProbeSpec(
        probe=FeatureNoise(network.inputs, std=math.sqrt(network.input_variance)),
        size=examples,
        chunk=examples,
        labels="model",
        likelihood="gaussian",
        loss=None,
        seed=seed,
        step=0,
    )
    linear = [module for module in model if isinstance(module, nn.Linear)]
    forwards = []
    backwards = []
    traces = []
    with preserve_model(model), torch.no_grad():
        passes = run_probe(model, lambda m, loss: capture(m, layers, loss), run)
        microbatch = next(iter(passes))
        for module, layer in zip(linear, layers, strict=True):
            block = microbatch.blocks[layer.name]
            assert isinstance(block, Outer)
            a = block.explicit().a.flatten(1)
            b = block.b.flatten(1)
            inputs = a[:, :-1]
            outputs = F.linear(inputs, module.weight, module.bias)
            forwards.append(float(outputs.square().mean()))
            backwards.append(float(b.square().mean()))
            input_norms = a.square().sum(1)
            gradient_norms = b.square().sum(1)
            traces.append(float((input_norms * gradient_norms).mean()))
    return Variances(forwards, backwards, traces)


def measure_mean_field(run: Run, place: Place, judge: Judge | None = None) -> Figures:
    """Compare theory with networks of several activations, widths and depths. Reads no data.

    Returns:
        A row with one entry a kind of network: what is predicted, and mean and standard deviation
        over networks of measured ÷ predicted, layer by layer.
    """
    started = time.perf_counter()
    sizes: Figures = _SMOKE if run.config().run.smoke else _SIZES
    kinds = itertools.product(ACTIVATIONS, sizes["widths"], sizes["depths"])
    entries = []
    for activation, width, depth in kinds:
        gain = _GAINS[activation]
        network = Network(activation=activation, width=width, depth=depth, weight_variance=gain)
        theory = predict_variances(network)
        measured = []
        for k in range(sizes["networks"]):
            seed = run.seed + k
            measured.append(measure_network(network, examples=sizes["examples"], seed=seed))
        entry: Figures = {
            "activation": activation,
            "width": width,
            "depth": depth,
            "weight_variance": gain,
        }
        for quantity in ("forwards", "backwards", "traces"):
            expected = torch.tensor(getattr(theory, quantity), dtype=torch.float64)
            values = [getattr(one, quantity) for one in measured]
            ratios = torch.tensor(values, dtype=torch.float64) / expected
            entry[quantity] = {
                "predicted": round_all(expected),
                "ratio": round_all(ratios.mean(0)),
                "std": round_all(ratios.std(0)),
            }
        entries.append(entry)
    return {
        "run": run.describe(),
        "hash": run.hash,
        "networks": entries,
        "seeds": sizes["networks"],
        "examples": sizes["examples"],
        "contraction": _contraction(),
        "private": "no data were read",
        "wall_seconds": round(time.perf_counter() - started, 1),
        "hardware": hardware(),
    }


def _contraction() -> list[Figures]:
    """Return whether depth forgets the variance of the inputs (proposition F.1).

    Each ratio is q_l of inputs of variance 10 over q_l of inputs of variance 0.1.
    """
    entries = []
    for name, gain in _GAINS.items():
        network = Network(activation=name, width=256, depth=20, weight_variance=gain)
        low = predict_variances(replace(network, input_variance=0.1)).forwards
        high = predict_variances(replace(network, input_variance=10.0)).forwards
        pairs = zip(low, high, strict=True)
        ratios = [round_value(b / a) for a, b in pairs]
        entries.append({"activation": name, "weight_variance": gain, "ratio": ratios})
    return entries
