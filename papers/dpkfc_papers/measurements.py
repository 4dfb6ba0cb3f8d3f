"""What the figures of papers measure: curvature during training, random networks, settings, noise.

The training runs are private, with noise and a ledger as any other. Figures of curvature also
measure the private examples (the oracle). That is a research measurement on public benchmark data:
it is not in ε, never reaches the run, and every row says so.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkfc.app.assembly import Prepared, make_kfac, read_public_data
from dpkfc.app.html.groups import collect
from dpkfc.app.tuning.runs import Ended, Judge, Place, Plain, Run, hardware
from dpkfc.app.tuning.samples import round_value
from dpkfc.curvature.changed_factors import randomize_directions
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.layer_factors import LayerFactors
from dpkfc.curvature.model_inputs import examples
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.noise_probes import FeatureNoise, PinkNoise, WhiteNoise
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probe_pass import ProbeSpec, public_generator, run_probe
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.signal_to_noise import signal_to_noise
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.linalg.blocks import Outer
from dpkfc_papers.public_examples import find_public_examples

Row = Mapping[str, Any]
# Plain values of a row that is made here.
Figures = dict[str, Any]
T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# The spectral density of the whole Fisher matrix by stochastic Lanczos quadrature, from products
# with vectors alone.
#
# The Fisher matrix of a model with outputs f over n examples is F = 1/n Σ Jᵀ H J, with H the
# curvature of the loss in the outputs (diag p − p pᵀ for a softmax, 1 for squared error). A product
# with v is J v, by a backward pass through a backward pass, then H, then one backward pass more;
# the graph of both is built once. No Kronecker structure is assumed, and no block-diagonal one:
# this is what the factors approximate.
#
# For a start vector v of random signs, m steps of Lanczos give a tridiagonal matrix whose
# eigenvalues θ_i, with the squared first entries of its eigenvectors as weights, are a quadrature
# for the spectral density; over several v it is unbiased.
#
# Source: Ghorbani, Krishnan and Xiao (2019); Ubaru, Chen and Saad (2017); DP-KFC, appendix F.2.2.

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

    def above(self) -> Tensor:
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


# --------------------------------------------------------------------------------------------------
# How alike two sources of curvature are, layer by layer: similarity of A, G and A ⊗ G, and the map
# that one makes of the other.
#
# With a reference F = A ⊗ G (here: of private examples, for research alone) and a probe's F̃ = Ã ⊗
# G̃,
#
#     cos(F, F̃) = cos(A, Ã) · cos(G, G̃)          ‖F − F̃‖² = ‖A‖²‖G‖² + ‖Ã‖²‖G̃‖² − 2 ⟨A, Ã⟩⟨G, G̃⟩
#
# and the realised map F̃^(−1/2) F F̃^(−1/2) has the products of the eigenvalues of its two sides.
# All of it is of UNDAMPED factors unless a shift is asked for: `AUTHORS` repeats the sums of the
# DP-KFC authors' code, whose probe loss is a mean over the B examples of the probe (G is B² too
# small) and which adds 1e-5 · I to both factors before they are compared. Then the added identity
# is most of either G, and any two of them look alike.
#
# Source: DP-KFC, appendices F.2 and G.1, theorem 5.4.

SIDES = {"A": "input", "G": "output"}


@dataclass(frozen=True)
class Convention:
    """What is done to factors before they are compared.

    Attributes:
        added: multiple of the identity that is added to A and to G.
        mean_loss: whether G belongs to a loss averaged over the probe, B² times smaller.
    """

    added: float = 0.0
    mean_loss: bool = False

    def scale(self, side: str, probe_size: int) -> float:
        """Return what a factor is multiplied by."""
        return float(probe_size) ** -2 if self.mean_loss and side == "G" else 1.0


UNDAMPED = Convention()
AUTHORS = Convention(added=1e-5, mean_loss=True)


@dataclass(frozen=True)
class Similarity:
    """A matrix compared with a reference.

    Attributes:
        cosine: ⟨F, F̃⟩ / (‖F‖ ‖F̃‖), blind to scale.
        error: ‖F − F̃‖ / ‖F‖, of direction and scale.
        scale: tr F̃ / tr F.
    """

    cosine: float
    error: float
    scale: float


@dataclass(frozen=True)
class _Products:
    own: float
    other: float
    both: float
    trace: float
    other_trace: float

    def compare(self) -> Similarity:
        if self.own <= 0 or self.other <= 0:
            return Similarity(0.0, 1.0, 0.0)
        squared_error = max(0.0, self.own + self.other - 2 * self.both)
        norm = math.sqrt(self.own)
        other_norm = math.sqrt(self.other)
        cosine = self.both / norm / other_norm
        return Similarity(
            cosine=min(1.0, cosine),
            error=math.sqrt(squared_error / self.own),
            scale=self.other_trace / self.trace,
        )


def multiply(first: T, second: T) -> T:
    """Return what two factors have as a Kronecker product: the products of their figures."""
    products = {name: value * getattr(second, name) for name, value in vars(first).items()}
    return type(first)(**products)


def kronecker_layers(layers: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """Return the layers that have two sides, A and G."""
    return {name: factors for name, factors in layers.items() if factors.kind == "outer"}


def tracked(
    reference: LayerFactors, other: LayerFactors, convention: Convention, probe_size: int
) -> dict[str, Similarity]:
    """Compare A, G and F = A ⊗ G of one layer with the factors of a reference.

    Args:
        reference: undamped factors.
        other: undamped factors of another source, on the same model.
        convention: what is done to both before they are compared.
        probe_size: examples B of either probe.
    """
    products = {}
    for name, side in SIDES.items():
        scale = convention.scale(name, probe_size)
        pair = (reference.sides[side], other.sides[side])
        products[name] = _products(*pair, convention.added, scale)
    products["F"] = multiply(products["A"], products["G"])
    return {name: product.compare() for name, product in products.items()}


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
            cosines = first.vectors.double().T @ second.vectors.double()
            overlap = cosines.square()
            f = first.floor
            s = second.floor
            above = (first.values - f) @ overlap @ (second.values - s)
            # tr(F S) is tr(F' S') and this, for F = F' + f I and S = S' + s I.
            rest = f * (second.trace - s * first.dim)
            rest += s * (first.trace - f * first.dim)
            rest += f * s * first.dim
            return float(above) + rest
        case Eigen(), DiagonalFactor():
            squares = first.vectors.double().square()
            above = second.values @ squares @ (first.values - first.floor)
            return float(above) + first.floor * second.trace
        case _:
            return inner_product(second, first)


def _products(reference: Factor, other: Factor, added: float, scale: float) -> _Products:
    """Multiply two factors and add a multiple of the identity to both, then compare them."""
    first = reference.scaled(scale)
    second = other.scaled(scale)
    dim = first.dim

    def product(a: Factor, b: Factor) -> float:
        traces = a.trace + b.trace
        return inner_product(a, b) + added * traces + added * added * dim

    return _Products(
        own=product(first, first),
        other=product(second, second),
        both=product(first, second),
        trace=first.trace + added * dim,
        other_trace=second.trace + added * dim,
    )


@dataclass(frozen=True, kw_only=True)
class Realised:
    """Spectrum of F̃^(−p) F F̃^(−p), or of F itself where nothing is applied.

    Attributes:
        largest, smallest: λ_max and λ_min; λ_min is 0 where F is singular, as with fewer
            examples than columns.
        condition: their ratio, `inf` for a singular F.
        held: the condition number over the directions of F that hold 99 % of its trace on each
            side.
        flatness: tr / (√d ‖·‖), the cosine to the identity. It is 1 where the map is a multiple of
            the identity, which clipping norm and learning rate can absorb.
    """

    largest: float
    smallest: float
    condition: float
    held: float
    flatness: float


def realised(
    reference: Factor, other: Factor | None, *, damping: float = 0.1, exponent: float = 0.5
) -> Realised:
    """Return what a damped root of one factor makes of another.

    Args:
        reference: A (or G) of the examples that gradients come from.
        other: Ã of the probe; None applies nothing.
        damping: ρ, in units of the mean eigenvalue of Ã; 0 takes the root on the support of Ã.
        exponent: p of the root on each side.
    """
    values, vectors = _eigenpairs(reference)
    if other is None:
        gram = values.diag()
    else:
        gram = _precondition(values, vectors, other, damping, exponent)
    ascending = torch.linalg.eigvalsh(gram).clamp(min=0)
    spectrum = ascending.flip(0)
    is_full_rank = values.numel() == reference.dim
    largest = float(spectrum[0])
    smallest = float(spectrum[-1]) if is_full_rank else 0.0
    is_below = values.cumsum(0) < 0.99 * values.sum()
    most = int(is_below.sum()) + 1
    block = gram[:most, :most]
    main = torch.linalg.eigvalsh(block).clamp(min=0)
    norm = float(spectrum.square().sum().sqrt())
    flatness = 0.0
    if norm > 0:
        trace = float(spectrum.sum())
        flatness = trace / (math.sqrt(reference.dim) * norm)
    return Realised(
        largest=largest,
        smallest=smallest,
        condition=_ratio(largest, smallest),
        held=_ratio(float(main[-1]), float(main[0])),
        flatness=flatness,
    )


def _ratio(largest: float, smallest: float) -> float:
    return largest / smallest if smallest > 1e-14 * largest else math.inf


def _precondition(
    values: Tensor, vectors: Tensor, other: Factor, damping: float, exponent: float
) -> Tensor:
    """Return √λ Vᵀ R² V √λ, with R the damped root of the other factor.

    It has the non-zero eigenvalues of R V λ Vᵀ R.
    """
    theirs, directions = _eigenpairs(other)
    shift = damping * other.mean
    least = 0.0 if shift > 0 else 1e-13 * float(theirs[0])
    kept = theirs > least
    floor = getattr(other, "floor", 0.0) + shift
    power = -2 * exponent
    # R² is `tail` in all directions that have no eigenpair.
    tail = floor**power if floor > 0 else 0.0
    scale = (theirs[kept] + shift).pow(power) - tail
    overlap = directions[:, kept].T @ vectors
    identity = torch.eye(values.numel(), dtype=torch.float64)
    squared_root = overlap.T @ (scale[:, None] * overlap) + tail * identity
    root = values.sqrt()
    return root[:, None] * squared_root * root


def _eigenpairs(factor: Factor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, largest first, and their vectors, float64."""
    if isinstance(factor, Eigen):
        return factor.values.double().cpu(), factor.vectors.double().cpu()
    identity = torch.eye(factor.dim, dtype=torch.float64)
    if isinstance(factor, DiagonalFactor):
        order = factor.values.argsort(descending=True).cpu()
        values = factor.values.double().cpu()
        return values[order], identity[:, order]
    values = torch.full((factor.dim,), factor.mean, dtype=torch.float64)
    return values, identity


# --------------------------------------------------------------------------------------------------

# This text is in committed results.
NOT_PRIVATE = (
    "NOT PRIVATE: the oracle's factors are of the private training examples. A research measurement"
    " on public benchmark data; it is not covered by ε and no private run may look at it."
)
ORACLE = "oracle"
AGAIN = "oracle, other examples"
RANDOM = "random directions"
# The recipe whose images are public, by the data of a run.
_OTHER = {"mnist": "fashion-mnist-cnn", "fashion-mnist": "mnist-cnn"}
_POINTS = 96


@dataclass(frozen=True)
class Sizes:
    """How many examples and steps are measured.

    Attributes:
        probe: examples behind every factor.
        lanczos_examples: of the whole Fisher matrix.
        lanczos_steps, starts: of the quadrature.
    """

    probe: int = 512
    lanczos_examples: int = 64
    lanczos_steps: int = 32
    starts: int = 2


SMOKE = Sizes(probe=64, lanczos_examples=16, lanczos_steps=8, starts=1)


def measure_course(run: Run, place: Place, judge: Judge | None = None) -> Figures:
    """Train privately, and measure curvature before the first step and at every evaluation.

    Returns:
        A row with one entry a checkpoint; see `figures_of`. NOT private.

    Raises:
        Ended: by a signal.
        ConfigError: settings that do not go together.
        DatasetError: missing or damaged data.
    """
    from dpkfc.app.run_folder import RunFolder
    from dpkfc.app.train import measure, prepare

    started = time.perf_counter()
    prepared = prepare(run.config(threads=1, data_dir=place.data_dir))
    sizes = SMOKE if prepared.config.run.smoke else Sizes()
    sources = find_sources(prepared, place)
    checkpoints: list[Figures] = []

    def measure_at(step: int, **scores: Any) -> None:
        curvature = figures_of(prepared, sources, sizes, step)
        checkpoints.append({"step": step, **scores, **curvature})

    measure_at(0)
    folder = RunFolder.fresh(place.folder / "runs", run.hash)

    def watch(row: Any) -> bool:
        measure_at(row.step, accuracy=row.accuracy, epsilon=row.epsilon)
        return judge is None or judge(len(checkpoints), row.accuracy)

    result = measure(prepared, folder, watch)
    # The last evaluation is not watched.
    if checkpoints[-1]["step"] < result.steps:
        measure_at(result.steps, accuracy=result.accuracy, epsilon=result.epsilon)
    row = {
        "run": run.describe(),
        "hash": run.hash,
        "private": NOT_PRIVATE,
        "sources": list(sources),
        "sizes": asdict(sizes),
        "authors": asdict(AUTHORS),
        "checkpoints": checkpoints,
        "final_accuracy": result.accuracy,
        "measured_on": result.measured_on,
        "epsilon": result.epsilon,
        "delta": prepared.plan.delta,
        "steps": result.steps,
        "wall_seconds": round(time.perf_counter() - started, 1),
        "hardware": hardware(),
    }
    if result.interrupted:
        raise Ended(row, is_deliberate=False)
    return row


def find_sources(prepared: Prepared, place: Place) -> dict[str, Probe]:
    """Return probes by name; the last ones hold private examples."""
    config = prepared.config
    shape = prepared.recipe.input_shape
    sources: dict[str, Probe] = {
        "pink noise": PinkNoise(shape, power_exponent=config.preconditioner.power_exponent),
        "white noise": WhiteNoise(shape),
    }
    private_set, _, _ = config.run.recipe.rpartition("-")
    if private_set in _OTHER:
        other = _OTHER[private_set]
        folder = place.folder / "public"
        path = Path(find_public_examples(f"@{other}:2000", folder, place.data_dir))
        images, _ = read_public_data(path, shape)
        provenance = f"2,000 training images of {other}"
        sources["public"] = PublicData(images, provenance=provenance)
    inputs, labels = prepared.data.train
    half = len(labels) // 2
    first = (inputs[:half], labels[:half])
    second = (inputs[half:], labels[half:])
    sources[ORACLE] = PrivateOracle(first)
    sources[AGAIN] = PrivateOracle(second)
    return sources


def figures_of(
    prepared: Prepared, sources: Mapping[str, Probe], sizes: Sizes, step: int
) -> Figures:
    """Return everything that is measured at one checkpoint.

    Labels are drawn from the model for every source, so that all factors are of the same Fisher
    matrix.

    Returns:
        `layers`: name to `spectra`, `tracking` (undamped and as in the authors' code) and
        `realised`; `signal`: layer to signal-to-noise ratio under each source; `density`: source to
        the Lanczos quadrature of the whole Fisher matrix, at the first and the last step.
    """
    model = prepared.model
    found_layers = find_layers(model)
    rules = {layer.name: layer.rule for layer in found_layers}

    def capturing(model: nn.Module, loss: Any) -> Any:
        return capture(model, found_layers, loss)

    counts = [_number_of_examples(probe) for probe in sources.values()]
    probe_size = int(min(sizes.probe, *counts))
    base = replace(_uncut_factors(prepared), probe_size=probe_size)
    factors = {}
    for source, probe in sources.items():
        settings = replace(base, probe=probe)
        measured = settings.factors(model, capturing, step, rules=rules)
        factors[source] = kronecker_layers(measured)
    factors[RANDOM] = randomize_directions(factors[ORACLE], 0)
    modules = dict(model.named_modules())
    layers = {}
    for name in factors[ORACLE]:
        by_source = {source: of_layers[name] for source, of_layers in factors.items()}
        measured_layer = _measure_layer(by_source, base.probe_size, base.damping)
        layers[name] = {"module": type(modules[name]).__name__, **measured_layer}
    with_density = {}
    if step in (0, prepared.plan.steps):
        with_density = {name: probe for name, probe in sources.items() if name != AGAIN}
    signal = _signal(prepared, sources, base, capturing, step=step, rules=rules)
    return {
        "layers": layers,
        "signal": signal,
        "density": _densities(model, with_density, sizes, step),
    }


def _uncut_factors(prepared: Prepared) -> KFAC:
    """Return settings of factors of every position, every eigenpair and both sides."""
    config = prepared.config.change(source="pink", output_source="")
    return replace(
        make_kfac(config, prepared.recipe.input_shape),
        labels="model",
        sides="both",
        rows_per_dim=None,
        max_rank=None,
        control="none",
        layer_rules=None,
    )


def _number_of_examples(probe: Probe) -> float:
    if isinstance(probe, PrivateOracle):
        return len(probe.dataset[0])
    if isinstance(probe, PublicData):
        return examples(probe.inputs)
    return math.inf


def _measure_layer(factors: Mapping[str, LayerFactors], probe_size: int, damping: float) -> Figures:
    reference = factors[ORACLE]
    spectra: Figures = {}
    for side, name in SIDES.items():
        spectra[side] = {}
        for source, layer in factors.items():
            if source != RANDOM:
                spectrum = layer.sides[name].spectrum
                spectra[side][source] = _thin_spectrum(spectrum)
    tracking: Figures = {}
    for label, convention in (("undamped", UNDAMPED), ("authors", AUTHORS)):
        tracking[label] = {}
        for source, layer in factors.items():
            if source != ORACLE:
                similarities = tracked(reference, layer, convention, probe_size)
                tracking[label][source] = _round_fields(similarities)
    return {
        "sizes": {side: reference.sides[name].dim for side, name in SIDES.items()},
        "spectra": spectra,
        "tracking": tracking,
        "realised": _measure_realised(reference, factors, damping),
    }


def _measure_realised(
    reference: LayerFactors, factors: Mapping[str, LayerFactors], damping: float
) -> Figures:
    """Return the realised map of A, of G and of F by source; "nothing" is the oracle's F itself."""
    by_source = {}
    with_nothing: dict[str, LayerFactors | None] = {"nothing": None, **factors}
    for source, layer in with_nothing.items():
        maps = {}
        for name, side in SIDES.items():
            other = None if layer is None else layer.sides[side]
            maps[name] = realised(reference.sides[side], other, damping=damping)
        maps["F"] = multiply(maps["A"], maps["G"])
        by_source[source] = _round_fields(maps)
    return by_source


def _round_fields(results: Mapping[str, Similarity] | Mapping[str, Realised]) -> Figures:
    return {name: _round_values(asdict(result)) for name, result in results.items()}


def _signal(
    prepared: Prepared,
    sources: Mapping[str, Probe],
    base: KFAC,
    capturing: Any,
    *,
    step: int,
    rules: Mapping[str, str],
) -> Figures:
    """Return signal-to-noise ratios of the PRIVATE examples' gradients under each metric."""
    plan = prepared.plan
    if plan.noise_multiplier <= 0:
        return {}
    probe_size = min(256, base.probe_size)
    private = replace(base, probe=sources[ORACLE], labels="given", probe_size=probe_size)
    by_layer: dict[str, dict[str, float]] = {}
    for source, probe in sources.items():
        if source == AGAIN:
            continue
        settings = replace(base, probe=probe, max_rank=64)
        preconditioner = settings.build(prepared.model, capturing, step, rules=rules)
        ratios = signal_to_noise(
            private,
            prepared.model,
            capturing,
            preconditioner,
            max_grad_norm=plan.max_grad_norm,
            noise_multiplier=plan.noise_multiplier,
        )
        for layer, ratio in ratios.items():
            row = by_layer.setdefault(layer, {"none": math.sqrt(ratio.plain)})
            row[source] = math.sqrt(ratio.preconditioned)
    scaled = {}
    for layer, row in by_layer.items():
        of_batch = {source: plan.expected_batch_size * ratio for source, ratio in row.items()}
        scaled[layer] = _round_values(of_batch)
    return scaled


def _densities(model: nn.Module, sources: Mapping[str, Probe], sizes: Sizes, step: int) -> Figures:
    model = copy.deepcopy(model).double().eval()
    densities = {}
    for source, probe in sources.items():
        generator = public_generator(0, step, "density")
        inputs, _ = probe.sample(sizes.lanczos_examples, generator)
        assert isinstance(inputs, Tensor)
        product, dim = fisher_product(model, inputs.double())
        quadrature = density(
            product,
            dim,
            steps=sizes.lanczos_steps,
            starts=sizes.starts,
            generator=generator,
        )
        densities[source] = {
            "dim": dim,
            "trace": round_value(quadrature.trace),
            "nodes": _round_all(quadrature.nodes),
            "above": _round_all(quadrature.above()),
        }
    return densities


def _thin_spectrum(values: Tensor) -> list[list[float]]:
    """Return [rank from 1, eigenvalue] of about 96 eigenvalues at most.

    Ranks are evenly spaced in their logarithm.
    """
    ordered = values.double().sort(descending=True).values
    exponents = [k / (_POINTS - 1) for k in range(_POINTS)]
    ranks = {round(len(ordered) ** exponent) for exponent in exponents}
    thinned = []
    for rank in sorted(ranks):
        value = float(ordered[rank - 1])
        thinned.append([rank, round_value(value)])
    return thinned


def _round_all(values: Tensor) -> list[float]:
    return [round_value(value) for value in values.tolist()]


def _round_values(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return four digits of each value; None for infinity, which JSON does not have."""
    rounded: dict[str, float | None] = {}
    for name, value in values.items():
        rounded[name] = round_value(value) if math.isfinite(value) else None
    return rounded


# --------------------------------------------------------------------------------------------------
# Random networks next to mean-field theory: variances forwards and backwards, and the trace of
# every Fisher block.
#
# Weights have variance σ_w² / fan-in and biases σ_b², q is the variance of pre-activations, p the
# variance of a gradient in them, z a standard normal number; the loss is the mean over outputs of
# half the squared error, with labels drawn from the model:
#
#     forwards    q_1 = σ_w² E x² + σ_b²        q_l = σ_w² χ_{l−1} + σ_b²        χ_l = E φ(√q_l z)²
#     backwards   p_L = 1 / n_L²                p_l = p_{l+1} · (n_{l+1} / n_l) σ_w² E φ'(√q_l z)²
#     Fisher      tr F_l = n_l p_l (n_{l−1} χ_{l−1} + 1)             χ_0 = E x², + 1 for the bias
#
# The last line is what equation (1) of the paper, Tr F_l ∝ d q_{l−1} q̃_l, stands for: the variance
# of ACTIVATIONS χ, not of pre-activations q, is what a weight's gradient is multiplied by.
#
# Weights are drawn uniformly, as torch draws them: theory knows their variance only. Inputs are
# public Gaussian noise.
#
# Source: Poole et al. (2016), Schoenholz et al. (2016), Karakida et al. (2019); DP-KFC, section 3.3
# and appendix F.

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


def predicted(network: Network) -> Variances:
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


def observed(network: Network, *, examples: int, seed: int) -> Variances:
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
        theory = predicted(network)
        measured = []
        for k in range(sizes["networks"]):
            seed = run.seed + k
            measured.append(observed(network, examples=sizes["examples"], seed=seed))
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
                "predicted": _round_all(expected),
                "ratio": _round_all(ratios.mean(0)),
                "std": _round_all(ratios.std(0)),
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
        low = predicted(replace(network, input_variance=0.1)).forwards
        high = predicted(replace(network, input_variance=10.0)).forwards
        pairs = zip(low, high, strict=True)
        ratios = [round_value(b / a) for a, b in pairs]
        entries.append({"activation": name, "weight_variance": gain, "ratio": ratios})
    return entries


# --------------------------------------------------------------------------------------------------
# How sensitive accuracy is to settings: maps over clipping norm and learning rate, and the
# importance of each setting.
#
# Cells are plain private runs on a grid. A validation split judges them, never a test set.
# Importance is the share of the variance of accuracy that the mean over the other settings explains
# (a first-order index of Sobol). The paper ranks by the absolute rank correlation, which misses a
# setting whose best value lies inside.

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
CLIPS = (0.1, 0.3, 1.0, 3.0, 10.0)
LANDSCAPE_METHODS = ("dp-sgd", "dp-kfc")
NAMES = {"lr": "learning rate", "max_grad_norm": "clipping norm"}
# This text is in committed results.
LANDSCAPE_NOT_PRIVATE = (
    "NOT PRIVATE: accuracies on examples cut from the private training set, which no ε protects; "
    "every run has its own ε, and looking at all of them is in none."
)


def landscape_cells(
    recipe: str, settings: Mapping[str, Plain], *, small: bool = False
) -> list[Run]:
    """Return the grid of both methods, SGD for both, judged on a validation split."""
    rates = LEARNING_RATES[1:3] if small else LEARNING_RATES
    clips = CLIPS[:2] if small else CLIPS
    shared: dict[str, Plain] = {
        "optimizer": "sgd",
        "validation_size": 287 if recipe == "digits" else 5000,
        **settings,
    }
    return [
        Run.of(
            recipe, method, {**shared, "lr": lr, "max_grad_norm": clip}, evaluate_on="validation"
        )
        for method, lr, clip in itertools.product(LANDSCAPE_METHODS, rates, clips)
    ]


def importance(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    """Return the fraction of the variance of accuracy that each setting explains alone.

    Args:
        rows: of finished runs on a grid, with `run.settings` and `accuracy`.
        names: of settings; a setting that does not vary has no importance.
    """
    accuracies = np.array([row["accuracy"] for row in rows])
    settings = [row["run"]["settings"] for row in rows]
    variance = accuracies.var()
    explained = {}
    for name in names:
        values = np.array([of_run.get(name) for of_run in settings])
        means = [accuracies[values == value].mean() for value in set(values)]
        if len(means) > 1 and variance > 0:
            explained[name] = float(np.var(means) / variance)
    return explained


@dataclass(frozen=True, kw_only=True)
class SensitivityMap:
    """Accuracy of a method over two of its settings.

    Attributes:
        name: for example the task.
        method: of the runs.
        x: the setting that runs across.
        x_values: its values, from left to right.
        y: the setting that runs upwards.
        y_values: its values, the lowest line first.
        values: accuracies in [0, 1], a row for each value of `y`; None where a run is missing.
        measured_on: the set of the accuracies: "validation" or "test".
        note: a remark on the map.
    """

    name: str
    method: str
    x: str
    x_values: Sequence[float]
    y: str
    y_values: Sequence[float]
    values: Sequence[Sequence[float | None]]
    measured_on: str
    note: str = ""


def maps(rows: Sequence[Row]) -> list[SensitivityMap]:
    """Return accuracy over learning rate and clipping norm, with the importance of both.

    Each recipe and method has a map.
    """
    members = collect(rows, lambda row: (row["run"]["recipe"], row["run"]["method"]))
    return [_map(recipe, method, group) for (recipe, method), group in members.items()]


def _map(recipe: str, method: str, rows: Sequence[Row]) -> SensitivityMap:
    settings = [row["run"]["settings"] for row in rows]
    rates = sorted({float(one["lr"]) for one in settings})
    clips = sorted({float(one["max_grad_norm"]) for one in settings})
    values: list[list[float | None]] = [[None] * len(rates) for _ in clips]
    for row, one in zip(rows, settings, strict=True):
        line = clips.index(one["max_grad_norm"])
        column = rates.index(one["lr"])
        values[line][column] = row["accuracy"]
    explained = []
    for name, fraction in importance(rows, NAMES).items():
        explained.append(f"{NAMES[name]} {100 * fraction:.0f} %")
    note = f"{100 * plateau(rows):.0f} % of the cells are within 2 points of the best."
    if explained:
        note += f" Share of the variance that a setting explains alone: {'; '.join(explained)}."
    return SensitivityMap(
        name=f"{recipe}, ε = {max(row['epsilon'] for row in rows):.2f}",
        method=method,
        x=NAMES["lr"],
        x_values=rates,
        y=NAMES["max_grad_norm"],
        y_values=clips,
        values=values,
        measured_on=rows[0]["measured_on"],
        note=note,
    )


def plateau(rows: Iterable[Row]) -> float:
    """Return the fraction of runs whose accuracy is within two points of the best."""
    accuracies = [row["accuracy"] for row in rows]
    least = max(accuracies) - 0.02
    return sum(accuracy >= least for accuracy in accuracies) / len(accuracies)


# --------------------------------------------------------------------------------------------------
# Linear regression under more and more noise: no filter, a low-pass filter and DiSK at the same
# learning rates (DiSK, Fig. 6a).
#
# The paper prints no number of this figure and neither its rates nor its data, and says that DiSK
# has the lowest loss at all noise levels. A filter changes which rate is best, so every method is
# run at every rate, and next to them each stands at its own best. Examples are clipped as in every
# run here, noise is given as a multiple of that bound, and validation examples are the judge.

RECIPE = "linear-regression"
SWEEP_METHODS = ("dp-sgd", "doppler", "disk")
NOISES = (1.0, 4.0, 16.0, 64.0)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = 4
_SHARED: Mapping[str, Plain] = {
    "momentum": 0.0,
    "accountant": "rdp",
    "validation_size": 2000,
    "evaluate_every": 1_000_000,
}


@dataclass(frozen=True)
class Point:
    """What the runs of one method, rate and noise came to.

    Attributes:
        method: as of `dpkfc train --method`.
        lr: learning rate.
        noise: noise multiplier σ.
        mean: of the mean squared errors, over runs.
        std: of them, the sample's.
        runs: how many.
    """

    method: str
    lr: float
    noise: float
    mean: float
    std: float
    runs: int


def sweep_cells(small: bool = False) -> list[Run]:
    """Return a run for each method, rate, noise multiplier and repetition, with fresh noise."""
    rates = RATES[1:3] if small else RATES
    noises = NOISES[1:3] if small else NOISES
    seeds = 1 if small else SEEDS
    shared = dict(_SHARED)
    if small:
        shared["smoke"] = True
    runs = []
    for seed, noise, lr, method in itertools.product(range(seeds), noises, rates, SWEEP_METHODS):
        settings = {**shared, "lr": lr, "noise_multiplier": noise}
        runs.append(Run.of(RECIPE, method, settings, seed=seed, evaluate_on="validation"))
    return runs


def points(rows: Iterable[Row]) -> list[Point]:
    """Return mean and deviation over repetitions.

    A point with a run whose loss was not finite is left out.
    """

    def key(row: Row) -> tuple[str, float, float]:
        settings = row["run"]["settings"]
        return row["run"]["method"], settings["lr"], settings["noise_multiplier"]

    points = []
    for (method, lr, noise), repetitions in collect(rows, key).items():
        losses: list[Any] = [row.get("loss") for row in repetitions]
        if None in losses:
            continue
        mean = statistics.mean(losses)
        std = statistics.stdev(losses) if len(losses) > 1 else 0.0
        points.append(Point(method, lr, noise, mean, std, len(losses)))

    def order(point: Point) -> tuple[int, float, float]:
        return SWEEP_METHODS.index(point.method), point.lr, point.noise

    return sorted(points, key=order)


def best(points: Sequence[Point]) -> list[Point]:
    """Return the point with the lowest mean of every method and noise."""
    groups = collect(points, lambda point: (point.method, point.noise))
    return [min(group, key=lambda point: point.mean) for group in groups.values()]
