"""Measure curvature during private training, of public examples and of the private ones.

The training runs are private, with noise and a ledger as any other. The private examples (the
oracle) are measured too. That is a research measurement on public benchmark data: it is not in ε,
never reaches the run, and every row says so.

Rows of studies name what made them by `dpkfc_papers.measurements:measure_…`, so `mean_field` is
found here too.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpkfc.app.assembly import Prepared
from dpkfc.app.curvature_settings import Facts, make_kfac
from dpkfc.app.public_data import read_public_data
from dpkfc.app.tuning.runs import Ended, Judge, Place, Run, hardware
from dpkfc.app.tuning.samples import round_value
from dpkfc.curvature.changed_factors import randomize_directions
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.layer_factors import LayerFactors
from dpkfc.curvature.model_inputs import examples
from dpkfc.curvature.noise_probes import PinkNoise, WhiteNoise
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.signal_to_noise import signal_to_noise
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc_papers.mean_field import measure_mean_field
from dpkfc_papers.public_examples import find_public_examples
from dpkfc_papers.rounding import round_all, round_values
from dpkfc_papers.similarity import (
    AUTHORS,
    SIDES,
    UNDAMPED,
    Realised,
    Similarity,
    kronecker_layers,
    multiply,
    realised,
    track_factors,
)
from dpkfc_papers.spectral_density import density, fisher_product

__all__ = ["measure_course", "measure_mean_field"]
# Plain values of a row that is made here.
Figures = dict[str, Any]

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
    from dpkfc.app.prepare import prepare
    from dpkfc.app.run_folder import RunFolder
    from dpkfc.app.train import measure

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

    def capture_found(model: nn.Module, loss: Any) -> Any:
        return capture(model, found_layers, loss)

    counts = [_number_of_examples(probe) for probe in sources.values()]
    probe_size = int(min(sizes.probe, *counts))
    base = replace(_uncut_factors(prepared), probe_size=probe_size)
    factors = {}
    for source, probe in sources.items():
        settings = replace(base, probe=probe)
        measured = settings.factors(model, capture_found, step, rules=rules)
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
    signal = _signal(prepared, sources, base, capture_found, step=step, rules=rules)
    return {
        "layers": layers,
        "signal": signal,
        "density": _densities(model, with_density, sizes, step),
    }


def _uncut_factors(prepared: Prepared) -> KFAC:
    """Return settings of factors of every position, every eigenpair and both sides."""
    config = prepared.config.change(source="pink", output_source="")
    return replace(
        make_kfac(config, Facts(prepared.recipe.input_shape)),
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
                similarities = track_factors(reference, layer, convention, probe_size)
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
    return {name: round_values(asdict(result)) for name, result in results.items()}


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
        scaled[layer] = round_values(of_batch)
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
            "nodes": round_all(quadrature.nodes),
            "above": round_all(quadrature.count_above()),
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
