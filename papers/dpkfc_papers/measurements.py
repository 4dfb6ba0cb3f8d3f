"""Curvature through one private training run: every checkpoint sees the same model with several sources beside the oracle.

The run itself is private, with noise and a ledger as any other. What is MEASURED on the way with the private examples (the
oracle) is a research measurement on public benchmark data: it is not in ε, never reaches the run, and every row says so.
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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkfc.app.assembly import read_public_data
from dpkfc.app.plots import SensitivityMap
from dpkfc.app.preparation import Prepared
from dpkfc.app.tuning.runs import Ended, Plain, Run, hardware, resolved
from dpkfc.curvature.diagnostics import PrivateOracle, inner_product, signal_to_noise
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor
from dpkfc.curvature.kfac import KFAC, randomize_directions
from dpkfc.curvature.layer_factors import LayerFactors
from dpkfc.curvature.probe_pass import ProbeSpec, preserve_model, public_generator, run_probe
from dpkfc.curvature.probes import FeatureNoise, PinkNoise, Probe, PublicData, WhiteNoise, examples
from dpkfc.gradients.clipped_sum import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.blocks import Outer

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
        """Sum of all eigenvalues, as the quadrature has it."""
        return float(self.dim * (self.nodes * self.weights).sum())

    def above(self) -> Tensor:
        """How many eigenvalues are at least as large as each node, float64 `[k]`."""
        return self.dim * self.weights.cumsum(0)


def fisher_product(model: nn.Module, inputs: Tensor, likelihood: str = "categorical") -> tuple[Product, int]:
    """v ↦ F v for the Fisher matrix of all trainable parameters, mean over the examples.

    Args:
        model: in evaluation mode; its parameters and their `.grad` are left as they are.
        inputs: `[n, ...]`; the model's outputs are `[n, c]`.
        likelihood: categorical, or gaussian with unit variance.

    Returns:
        The product, and the number d of parameters; vectors `[d]` are in the dtype of the parameters.

    Raises:
        ValueError: another likelihood, or outputs of another shape.
    """
    if likelihood not in ("categorical", "gaussian"):
        raise ValueError(f"likelihood must be categorical or gaussian, got {likelihood!r}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):  # the fused kernels of attention cannot be differentiated twice
        outputs = model(inputs)
        if outputs.dim() != 2:
            raise ValueError(f"the model's outputs have shape {tuple(outputs.shape)}; a Fisher product needs [examples, outputs]")
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, parameters, dummy, create_graph=True)
    shapes, probabilities = [p.shape for p in parameters], outputs.detach().softmax(-1)

    def product(vector: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in shapes])
        along = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        (moved,) = torch.autograd.grad(pulled, dummy, along, retain_graph=True)
        if likelihood == "categorical":
            moved = probabilities * (moved - (probabilities * moved).sum(-1, keepdim=True))
        back = torch.autograd.grad(outputs, parameters, moved / outputs.shape[0], retain_graph=True)
        return torch.cat([g.reshape(-1) for g in back])

    return product, sum(shape.numel() for shape in shapes)


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the quadrature from one start vector.

    Every new vector is made orthogonal to all earlier ones, twice: without that, eigenvalues that have converged come back.

    Args:
        product: v ↦ M v for a symmetric M.
        start: `[d]`, not zero.
        steps: at most this many products; fewer where an invariant subspace is found.

    Returns:
        (nodes, weights), float64, largest node first; the weights sum to 1.
    """
    basis = torch.zeros(min(steps, start.numel()), start.numel(), dtype=start.dtype, device=start.device)
    diagonal: list[float] = []
    beside: list[float] = []
    vector, largest = start / start.norm(), 0.0
    for step in range(len(basis)):
        basis[step] = vector
        following = product(vector)
        diagonal.append(float(following @ vector))
        for _ in range(2):
            following = following - basis[: step + 1].T @ (basis[: step + 1] @ following)
        norm = float(following.norm())
        largest = max(largest, abs(diagonal[-1]), norm)
        if norm <= 1e3 * torch.finfo(start.dtype).eps * largest or step + 1 == len(basis):
            break
        beside.append(norm)
        vector = following / norm
    off = torch.tensor(beside, dtype=torch.float64).diag(1)
    values, vectors = torch.linalg.eigh(torch.tensor(diagonal, dtype=torch.float64).diag() + off + off.T)
    return values.flip(0), vectors[0].square().flip(0)


def density(product: Product, dim: int, *, steps: int, starts: int, generator: torch.Generator, like: Tensor) -> Density:
    """The spectral density of a symmetric positive semi-definite matrix.

    Args:
        product: v ↦ M v.
        dim: size d.
        steps: of Lanczos.
        starts: random start vectors.
        generator: of their signs, on the CPU.
        like: a tensor whose dtype and device vectors have.
    """
    signs = (2 * torch.randint(2, (dim,), generator=generator) - 1 for _ in range(starts))
    pairs = [lanczos(product, start.to(like), steps) for start in signs]
    nodes, weights = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    order = nodes.argsort(descending=True)
    return Density(nodes[order].clamp(min=0), weights[order] / starts, dim)


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
        mean_loss: whether G is that of a loss averaged over the probe, B² times smaller.
    """

    added: float = 0.0
    mean_loss: bool = False

    def scale(self, side: str, probe_size: int) -> float:
        """What a factor is multiplied by."""
        return float(probe_size) ** -2 if self.mean_loss and side == "G" else 1.0


UNDAMPED = Convention()
AUTHORS = Convention(added=1e-5, mean_loss=True)


@dataclass(frozen=True)
class Alike:
    """A matrix beside a reference.

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

    def times(self, second: _Products) -> _Products:
        """Those of the Kronecker products."""
        pairs = zip(vars(self).values(), vars(second).values(), strict=True)
        return _Products(*(a * b for a, b in pairs))

    def alike(self) -> Alike:
        if self.own <= 0 or self.other <= 0:
            return Alike(0.0, 1.0, 0.0)
        error = max(0.0, self.own + self.other - 2 * self.both)
        cosine = min(1.0, self.both / math.sqrt(self.own) / math.sqrt(self.other))
        return Alike(cosine, math.sqrt(error / self.own), self.other_trace / self.trace)


def kronecker_layers(layers: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """The layers that have two sides, A and G."""
    return {name: of for name, of in layers.items() if of.kind == "outer"}


def tracked(reference: LayerFactors, other: LayerFactors, convention: Convention, probe_size: int) -> dict[str, Alike]:
    """A, G and F = A ⊗ G of one layer beside those of a reference.

    Args:
        reference: undamped factors.
        other: undamped factors of another source, on the same model.
        convention: what is done to both before they are compared.
        probe_size: examples B of either probe.
    """
    products = {
        name: _products(reference.sides[side], other.sides[side], convention.added, convention.scale(name, probe_size))
        for name, side in SIDES.items()
    }
    products["F"] = products["A"].times(products["G"])
    return {name: one.alike() for name, one in products.items()}


def alike(reference: Factor, other: Factor, added: float = 0.0) -> Alike:
    """One factor beside another of its size, after a multiple of the identity is added to both."""
    return _products(reference, other, added, 1.0).alike()


def _products(reference: Factor, other: Factor, added: float, scale: float) -> _Products:
    first, second = reference.scaled(scale), other.scaled(scale)
    dim = first.dim

    def product(a: Factor, b: Factor) -> float:
        return inner_product(a, b) + added * (a.trace + b.trace) + added * added * dim

    return _Products(
        own=product(first, first), other=product(second, second), both=product(first, second),
        trace=first.trace + added * dim, other_trace=second.trace + added * dim,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Realised:
    """Spectrum of F̃^(−p) F F̃^(−p), or of F itself where nothing is applied.

    Attributes:
        largest, smallest: λ_max and λ_min; λ_min is 0 where F is singular, as with fewer examples than columns.
        condition: their ratio, `inf` for a singular F.
        held: the condition number over the directions of F that hold 99 % of its trace on each side.
        flatness: tr / (√d ‖·‖), the cosine to the identity: 1 where the map is a multiple of it, which is all that clipping
            norm and learning rate can absorb.
    """

    largest: float
    smallest: float
    condition: float
    held: float
    flatness: float

    def times(self, second: Realised) -> Realised:
        """That of the Kronecker product of both."""
        return Realised(
            largest=self.largest * second.largest, smallest=self.smallest * second.smallest,
            condition=self.condition * second.condition, held=self.held * second.held,
            flatness=self.flatness * second.flatness,
        )  # fmt: skip


def realised(reference: Factor, other: Factor | None, *, damping: float = 0.1, exponent: float = 0.5) -> Realised:
    """What a damped root of one factor makes of another.

    Args:
        reference: A (or G) of the examples that gradients come from.
        other: Ã of the probe; None applies nothing.
        damping: ρ, in units of the mean eigenvalue of Ã; 0 takes the root on the support of Ã alone.
        exponent: p of the root on each side.
    """
    values, vectors = _pairs(reference)
    gram = values.diag() if other is None else _mapped(values, vectors, other, damping, exponent)
    found = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0)
    full = values.numel() == reference.dim
    largest, smallest = float(found[0]), float(found[-1]) if full else 0.0
    most = int((values.cumsum(0) < 0.99 * values.sum()).sum()) + 1
    held = torch.linalg.eigvalsh(gram[:most, :most]).clamp(min=0)
    norm = float(found.square().sum().sqrt())
    return Realised(
        largest=largest, smallest=smallest, condition=_ratio(largest, smallest), held=_ratio(float(held[-1]), float(held[0])),
        flatness=float(found.sum()) / (math.sqrt(reference.dim) * norm) if norm > 0 else 0.0,
    )  # fmt: skip


def _ratio(largest: float, smallest: float) -> float:
    return largest / smallest if smallest > 1e-14 * largest else math.inf


def _mapped(values: Tensor, vectors: Tensor, other: Factor, damping: float, exponent: float) -> Tensor:
    """√λ Vᵀ R² V √λ, which has the eigenvalues of R V λ Vᵀ R that are not zero, R the damped root of the other factor."""
    theirs, directions = _pairs(other)
    shift = damping * other.mean
    kept = theirs > (0.0 if shift > 0 else 1e-13 * float(theirs[0]))
    floor = getattr(other, "floor", 0.0)
    tail = (floor + shift) ** (-2 * exponent) if floor + shift > 0 else 0.0
    scale = (theirs[kept] + shift).pow(-2 * exponent) - tail
    overlap = directions[:, kept].T @ vectors
    inside = overlap.T @ (scale[:, None] * overlap) + tail * torch.eye(values.numel(), dtype=torch.float64)
    root = values.sqrt()
    return root[:, None] * inside * root


def _pairs(factor: Factor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and their vectors, float64."""
    match factor:
        case Eigen():
            return factor.values.double().cpu(), factor.vectors.double().cpu()
        case DiagonalFactor():
            order = factor.values.argsort(descending=True).cpu()
            return factor.values.double().cpu()[order], torch.eye(factor.dim, dtype=torch.float64)[:, order]
        case _:
            return torch.full((factor.dim,), factor.mean, dtype=torch.float64), torch.eye(factor.dim, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------

NOT_PRIVATE = (
    "NOT PRIVATE: the oracle's factors are of the private training examples. A research measurement on public benchmark data; it "
    "is not covered by ε and no private run may look at it."
)
ORACLE, AGAIN, RANDOM = "oracle", "oracle, other examples", "random directions"
_OTHER = {"mnist": "fashion-mnist-cnn", "fashion-mnist": "mnist-cnn"}
_POINTS = 96


@dataclass(frozen=True)
class Sizes:
    """How much is looked at.

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


def measure_course(
    run: Run, folder: Path, *, data_dir: str = "", public: Path | None = None, report: Any = None
) -> dict[str, Any]:
    """A cell: train privately, and look at the curvature before the first step and at every evaluation.

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
    prepared = prepare(run.config(threads=1, data_dir=data_dir))
    sizes = SMOKE if prepared.config.smoke else Sizes()
    sources = _sources(prepared, public or folder / "public", data_dir)
    checkpoints = [{"step": 0, **figures_of(prepared, sources, sizes, 0)}]
    place = RunFolder.fresh(folder, run.hash)

    def watch(row: Any) -> bool:
        found = figures_of(prepared, sources, sizes, row.step)
        checkpoints.append({"step": row.step, "accuracy": row.accuracy, "epsilon": row.epsilon, **found})
        return report is None or bool(report(len(checkpoints), row.accuracy))

    result = measure(prepared, place, watch)
    if checkpoints[-1]["step"] < result.steps:  # the last evaluation is not watched
        found = figures_of(prepared, sources, sizes, result.steps)
        checkpoints.append({"step": result.steps, "accuracy": result.accuracy, "epsilon": result.epsilon, **found})
    row = {
        "run": run.describe(), "hash": run.hash, "private": NOT_PRIVATE, "sources": list(sources), "sizes": asdict(sizes),
        "authors": asdict(AUTHORS), "checkpoints": checkpoints, "final_accuracy": result.accuracy,
        "measured_on": result.measured_on, "epsilon": result.epsilon, "delta": prepared.plan.delta, "steps": result.steps,
        "wall_seconds": round(time.perf_counter() - started, 1), "hardware": hardware(),
    }  # fmt: skip
    if result.interrupted:
        raise Ended(row, asked=False)
    return row


def _sources(prepared: Prepared, public: Path, data_dir: str) -> dict[str, Probe]:
    """Name to probe; the last ones hold private examples."""
    config, shape = prepared.config, prepared.recipe.input_shape
    found: dict[str, Probe] = {
        "pink noise": PinkNoise(shape, power_exponent=config.power_exponent), "white noise": WhiteNoise(shape),
    }  # fmt: skip
    other = next((_OTHER[name] for name in _OTHER if config.recipe.startswith(f"{name}-")), "")
    if other:
        path = Path(resolved(f"@{other}:2000", public, data_dir))
        inputs, _ = read_public_data(path, shape)
        found["public"] = PublicData(inputs, provenance=f"2,000 training images of {other}")
    inputs, labels = prepared.data.train
    half = len(labels) // 2
    return found | {
        ORACLE: PrivateOracle((inputs[:half], labels[:half])), AGAIN: PrivateOracle((inputs[half:], labels[half:])),
    }  # fmt: skip


def figures_of(prepared: Prepared, sources: Mapping[str, Probe], sizes: Sizes, step: int) -> dict[str, Any]:
    """Everything that is measured at one checkpoint.

    Labels are drawn from the model for every source, so that all factors are of the same Fisher matrix.

    Returns:
        `layers`: name to `spectra`, `tracking` (undamped and as in the authors' code) and `realised`; `signal`: layer to
        signal-to-noise ratio under each source; `density`: source to the Lanczos quadrature of the whole Fisher matrix, at
        the first and the last step.
    """
    model = prepared.model
    every = find_layers(model)
    rules = {layer.name: layer.rule for layer in every}

    def capturing(m: nn.Module, loss: Any) -> Any:
        return capture(m, every, loss)

    base = replace(_base(prepared), probe_size=int(min(sizes.probe, *map(_most, sources.values()))))
    factors = {
        name: kronecker_layers(replace(base, probe=probe).factors(model, capturing, step, rules=rules))
        for name, probe in sources.items()
    }
    factors[RANDOM] = randomize_directions(factors[ORACLE], 0)
    modules = dict(model.named_modules())
    layers = {
        layer: {"module": type(modules[layer]).__name__}
        | _layer({source: found[layer] for source, found in factors.items()}, base.probe_size, base.damping)
        for layer in factors[ORACLE]
    }
    signal = _signal(prepared, sources, base, capturing, step=step, rules=rules)
    ends = step in (0, prepared.plan.steps)
    seen = {source: probe for source, probe in sources.items() if ends and source != AGAIN}
    return {"layers": layers, "signal": signal, "density": _densities(model, seen, sizes, step)}


def _base(prepared: Prepared) -> KFAC:
    """Factors without any cut: every position, every eigenpair, both sides."""
    from dpkfc.app.assembly import make_kfac

    settings = make_kfac(replace(prepared.config, source="pink", output_source=""), prepared.recipe.input_shape)
    return replace(
        settings, labels="model", sides="both", rows_per_dim=None, max_rank=None, control="none", layer_rules=None
    )


def _most(probe: Probe) -> float:
    """Examples that a probe has."""
    if isinstance(probe, PrivateOracle):
        return len(probe.dataset[0])
    return examples(probe.inputs) if isinstance(probe, PublicData) else math.inf


def _layer(of: Mapping[str, LayerFactors], probe_size: int, damping: float) -> dict[str, Any]:
    reference = of[ORACLE]
    others = {source: factors for source, factors in of.items() if source != ORACLE}
    spectra = {
        side: {source: _thinned(factors.sides[name].spectrum) for source, factors in of.items() if source != RANDOM}
        for side, name in (("A", "input"), ("G", "output"))
    }
    tracking = {
        label: {
            source: {side: _rounded(asdict(one)) for side, one in tracked(reference, x, convention, probe_size).items()}
            for source, x in others.items()
        }
        for label, convention in (("undamped", UNDAMPED), ("authors", AUTHORS))
    }
    return {
        "sizes": {"A": reference.sides["input"].dim, "G": reference.sides["output"].dim}, "spectra": spectra,
        "tracking": tracking, "realised": _realised(reference, of, damping),
    }  # fmt: skip


def _realised(reference: LayerFactors, of: Mapping[str, LayerFactors], damping: float) -> dict[str, Any]:
    """Source to the realised map of A, of G and of F; "nothing" is the oracle's F itself."""
    found = {}
    for source, factors in {"nothing": None, **of}.items():
        a, g = (
            realised(reference.sides[side], None if factors is None else factors.sides[side], damping=damping)
            for side in ("input", "output")
        )
        found[source] = {
            "A": _rounded(asdict(a)), "G": _rounded(asdict(g)), "F": _rounded(asdict(a.times(g)))
        }  # fmt: skip
    return found


def _signal(
    prepared: Prepared, sources: Mapping[str, Probe], base: KFAC, capturing: Any, *, step: int, rules: Mapping[str, str]
) -> dict[str, Any]:
    """Signal-to-noise ratios of the PRIVATE examples' gradients under the metric of each source."""
    plan = prepared.plan
    if plan.noise_multiplier <= 0:
        return {}
    on = replace(base, probe=sources[ORACLE], labels="given", probe_size=min(256, base.probe_size))
    found: dict[str, dict[str, float]] = {}
    for source, probe in sources.items():
        if source == AGAIN:
            continue
        built = replace(base, probe=probe, max_rank=64).build(prepared.model, capturing, step, rules=rules)
        ratios = signal_to_noise(
            on, prepared.model, capturing, built, max_grad_norm=plan.max_grad_norm, noise_multiplier=plan.noise_multiplier
        )
        for layer, ratio in ratios.items():
            row = found.setdefault(layer, {"none": math.sqrt(ratio.plain)})
            row[source] = math.sqrt(ratio.preconditioned)
    return {layer: _rounded({k: plan.expected_batch_size * v for k, v in row.items()}) for layer, row in found.items()}


def _densities(model: nn.Module, sources: Mapping[str, Probe], sizes: Sizes, step: int) -> dict[str, Any]:
    finer = copy.deepcopy(model).double().eval()
    found = {}
    for source, probe in sources.items():
        generator = public_generator(0, step, "density")
        inputs, _ = probe.sample(sizes.lanczos_examples, generator)
        assert isinstance(inputs, Tensor)
        product, dim = fisher_product(finer, inputs.double())
        one = density(
            product, dim, steps=sizes.lanczos_steps, starts=sizes.starts, generator=generator,
            like=torch.zeros((), dtype=torch.float64),
        )  # fmt: skip
        found[source] = {
            "dim": dim, "trace": float(f"{one.trace:.4g}"),
            "nodes": [float(f"{x:.4g}") for x in one.nodes.tolist()],
            "above": [float(f"{x:.4g}") for x in one.above().tolist()],
        }  # fmt: skip
    return found


def _thinned(values: Tensor) -> list[list[float]]:
    """[rank from 1, eigenvalue] of at most about 96 eigenvalues, evenly spaced in the logarithm of the rank."""
    ordered = values.double().sort(descending=True).values
    ranks: Sequence[int] = sorted({round(len(ordered) ** (k / (_POINTS - 1))) for k in range(_POINTS)})
    return [[rank, float(f"{float(ordered[rank - 1]):.4g}")] for rank in ranks]


def _rounded(values: Mapping[str, float]) -> dict[str, float | None]:
    """Four digits; None for infinity, which JSON does not have."""
    return {name: float(f"{value:.4g}") if math.isfinite(value) else None for name, value in values.items()}


# --------------------------------------------------------------------------------------------------
# Random networks beside mean-field theory: variances forwards and backwards, and the trace of every
# Fisher block.
#
# Weights have variance σ_w² / fan-in and biases σ_b², q is the variance of pre-activations, p that
# of a gradient in them, z a standard normal number; the loss is the mean over outputs of half the
# squared error, with labels drawn from the model:
#
#     forwards    q_1 = σ_w² E x² + σ_b²        q_l = σ_w² χ_{l−1} + σ_b²        χ_l = E φ(√q_l z)²
#     backwards   p_L = 1 / n_L²                p_l = p_{l+1} · (n_{l+1} / n_l) σ_w² E φ'(√q_l z)²
#     Fisher      tr F_l = n_l p_l (n_{l−1} χ_{l−1} + 1)                          χ_0 = E x², + 1 for the bias
#
# The last line is what equation (1) of the paper, Tr F_l ∝ d q_{l−1} q̃_l, stands for: the variance
# of ACTIVATIONS χ, not of pre-activations q, is what a weight's gradient is multiplied by.
#
# Weights are drawn uniformly, as torch draws them: theory knows their variance only. Inputs are
# public Gaussian noise.
#
# Source: Poole et al. (2016), Schoenholz et al. (2016), Karakida et al. (2019); DP-KFC, section 3.3
# and appendix F.

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
    run = ProbeSpec(
        probe=probe, size=examples, chunk=examples, labels="model", likelihood="gaussian", loss=None, seed=seed, step=0
    )
    linear = [module for module in model if isinstance(module, nn.Linear)]
    with preserve_model(model), torch.no_grad():
        piece = next(iter(run_probe(model, lambda m, loss: capture(m, layers, loss), run)))
        forwards, backwards, traces = [], [], []
        for module, layer in zip(linear, layers, strict=True):
            block = piece.blocks[layer.name]
            assert isinstance(block, Outer)
            a, b = block.explicit().a.flatten(1), block.b.flatten(1)
            forwards.append(float(F.linear(a[:, :-1], module.weight, module.bias).square().mean()))
            backwards.append(float(b.square().mean()))
            traces.append(float((a.square().sum(1) * b.square().sum(1)).mean()))
    return Variances(forwards, backwards, traces)


def measure_mean_field(
    run: Run, folder: Path, *, data_dir: str = "", public: Path | None = None, report: Any = None
) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------
# How sensitive accuracy is to settings: maps over clipping norm and learning rate, and the
# importance of each setting.
#
# Cells are plain private runs on a grid, or the trials of a tuning study; a validation split judges
# them, never a test set. Importance is the share of the variance of accuracy that the mean over the
# other settings explains (a first-order index of Sobol), beside the absolute rank correlation that
# the paper ranks by: that one misses a setting whose best value lies inside.

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
CLIPS = (0.1, 0.3, 1.0, 3.0, 10.0)
LANDSCAPE_METHODS = ("dp-sgd", "dp-kfc")
NAMES = {"lr": "learning rate", "max_grad_norm": "clipping norm"}
LANDSCAPE_NOT_PRIVATE = (
    "NOT PRIVATE: accuracies on examples cut from the private training set, which no ε protects; every run has its own ε, and "
    "looking at all of them is in none."
)


@dataclass(frozen=True)
class Importance:
    """Of one setting.

    Attributes:
        explained: share of the variance of accuracy that is explained by this setting alone, in [0, 1].
        rank_correlation: absolute, in [0, 1].
    """

    explained: float
    rank_correlation: float


def landscape_cells(recipe: str, settings: Mapping[str, Plain], *, seed: int = 0, small: bool = False) -> list[Run]:
    """The grid of both methods, SGD for both, judged on a validation split."""
    rates, clips = (LEARNING_RATES[1:3], CLIPS[:2]) if small else (LEARNING_RATES, CLIPS)
    shared: dict[str, Plain] = {"optimizer": "sgd", "validation_size": 287 if recipe == "digits" else 5000, **settings}
    return [
        Run.of(recipe, method, {**shared, "lr": lr, "max_grad_norm": clip}, seed=seed, evaluate_on="validation")
        for method, lr, clip in itertools.product(LANDSCAPE_METHODS, rates, clips)
    ]


def importance(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Importance]:
    """Of each setting over runs that differ in them.

    Args:
        rows: of finished runs, with `run.settings` and `accuracy`.
        names: of settings; one that does not vary has none.
    """
    held = list(rows)
    accuracy = np.array([row["accuracy"] for row in held], dtype=float)
    found = {}
    for name in names:
        values = np.array([float(row["run"]["settings"].get(name, math.nan)) for row in held])
        if len(set(values.tolist())) < 2 or np.isnan(values).any() or accuracy.var() == 0:
            continue
        groups = _groups(values)
        means = np.array([accuracy[groups == g].mean() for g in groups])
        correlation = np.corrcoef(_ranks(values), _ranks(accuracy))[0, 1]
        found[name] = Importance(float(means.var() / accuracy.var()), float(abs(correlation)))
    return found


def _groups(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equal values together; five groups of equal size where there are more than eight values."""
    if len(set(values.tolist())) <= 8:
        return np.asarray(np.unique(values, return_inverse=True)[1])
    return np.asarray((5 * values.argsort().argsort()) // len(values))


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ranks, ties at their mean."""
    order, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def maps(rows: Sequence[Mapping[str, Any]]) -> list[SensitivityMap]:
    """Accuracy over learning rate and clipping norm, a map for each recipe and method, with the importance of both."""
    held: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        held.setdefault((row["run"]["recipe"], row["run"]["method"]), []).append(row)
    return [_map(recipe, method, of) for (recipe, method), of in held.items()]


def _map(recipe: str, method: str, rows: Sequence[Mapping[str, Any]]) -> SensitivityMap:
    rates, clips = (sorted({float(row["run"]["settings"][name]) for row in rows}) for name in NAMES)
    values: list[list[float | None]] = [[None] * len(rates) for _ in clips]
    for row in rows:
        settings = row["run"]["settings"]
        values[clips.index(settings["max_grad_norm"])][rates.index(settings["lr"])] = row["accuracy"]
    found = importance(rows, list(NAMES))
    told = "; ".join(f"{NAMES[name]} {100 * one.explained:.0f} %" for name, one in found.items())
    note = f"{100 * plateau(rows):.0f} % of the cells are within 2 points of the best."
    note += f" Share of the variance that a setting explains alone: {told}." if told else ""
    return SensitivityMap(
        name=f"{recipe}, ε = {max(row['epsilon'] for row in rows):.2f}", method=method, x=NAMES["lr"], x_values=rates,
        y=NAMES["max_grad_norm"], y_values=clips, values=values, measured_on=rows[0]["measured_on"], note=note,
    )  # fmt: skip


def plateau(rows: Iterable[Mapping[str, Any]], within: float = 0.02) -> float:
    """Share of the runs whose accuracy is within so much of the best."""
    accuracy = [row["accuracy"] for row in rows]
    return sum(a >= max(accuracy) - within for a in accuracy) / len(accuracy) if accuracy else 0.0


# --------------------------------------------------------------------------------------------------
# Linear regression under more and more noise: no filter, a low-pass filter and DiSK at the same
# learning rates (DiSK, Fig. 6a).
#
# The paper prints no number of this figure and neither its rates nor its data, and says that DiSK
# has the lowest loss at all noise levels. A filter changes which rate is best, so every method is
# run at every rate, and beside them each stands at its own best. Examples are clipped as in every
# run here, noise is given as a multiple of that bound, and validation examples are the judge.

RECIPE = "linear-regression"
SWEEP_METHODS = ("dp-sgd", "doppler", "disk")
NOISES = (1.0, 4.0, 16.0, 64.0)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = 4
_SHARED: Mapping[str, Plain] = {"momentum": 0.0, "accountant": "rdp", "validation_size": 2000, "evaluate_every": 1_000_000}
Row = Mapping[str, Any]


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
    """One run a method, rate, noise multiplier and repetition; the noise of each is its own."""
    rates, noises, seeds = (RATES[1:3], NOISES[1:3], 1) if small else (RATES, NOISES, SEEDS)
    more: Mapping[str, Plain] = {"smoke": True} if small else {}
    return [
        Run.of(RECIPE, method, {**_SHARED, **more, "lr": lr, "noise_multiplier": noise}, seed=seed, evaluate_on="validation")
        for seed, noise, lr, method in itertools.product(range(seeds), noises, rates, SWEEP_METHODS)
    ]


def points(rows: Iterable[Row]) -> list[Point]:
    """Mean and deviation over repetitions; a run whose loss was not finite takes its point away."""
    found: dict[tuple[str, float, float], list[float | None]] = {}
    for row in rows:
        run = row["run"]
        key = (run["method"], run["settings"]["lr"], run["settings"]["noise_multiplier"])
        found.setdefault(key, []).append(row.get("loss"))
    made = []
    for key, values in found.items():
        losses = [value for value in values if value is not None]
        if len(losses) == len(values):
            std = statistics.stdev(losses) if len(losses) > 1 else 0.0
            made.append(Point(*key, mean=statistics.mean(losses), std=std, runs=len(losses)))
    return sorted(made, key=lambda one: (SWEEP_METHODS.index(one.method), one.lr, one.noise))


def best(found: Sequence[Point]) -> list[Point]:
    """Of every method and noise the point with the lowest mean."""
    keys = dict.fromkeys((one.method, one.noise) for one in found)
    return [min((one for one in found if (one.method, one.noise) == key), key=lambda one: one.mean) for key in keys]
