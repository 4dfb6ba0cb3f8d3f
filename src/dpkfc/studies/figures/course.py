"""Curvature through one private training run: every checkpoint sees the same model with several sources beside the oracle.

The run itself is private, with noise and a ledger as any other. What is MEASURED on the way with the private examples (the
oracle) is a research measurement on public benchmark data: it is not in ε, never reaches the run, and every row says so.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.diagnostics import signal_to_noise
from dpkfc.curvature.inputs import examples
from dpkfc.curvature.layers import LayerFactors
from dpkfc.curvature.oracle import PrivateOracle
from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probes import PinkNoise, Probe, PublicData, WhiteNoise
from dpkfc.curvature.probing import public_generator
from dpkfc.curvature.sources import randomised
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.recipes.axes import public_data
from dpkfc.recipes.prepared import Prepared
from dpkfc.studies.cell import Ended, Run, hardware
from dpkfc.studies.figures.lanczos import density, fisher_product
from dpkfc.studies.figures.similarity import AUTHORS, UNDAMPED, kronecker_layers, realised, tracked
from dpkfc.studies.public import resolved

__all__ = ["NOT_PRIVATE", "ORACLE", "Sizes", "figures_of", "measured"]

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


def measured(
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
    from dpkfc.recipes.train import measure, prepare
    from dpkfc.report.run_folder import RunFolder

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
        inputs, _ = public_data(path, shape)
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
    factors[RANDOM] = randomised(factors[ORACLE], 0)
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
    from dpkfc.recipes.axes import kfac

    settings = kfac(replace(prepared.config, source="pink", output_source=""), prepared.recipe.input_shape)
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
