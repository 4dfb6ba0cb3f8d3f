"""From settings to the preconditioner, and to the probes that its curvature comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpkfc.app.library_values import library_values
from dpkfc.app.public_data import read_public_data
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError
from dpkfc.curvature.base import Preconditioner
from dpkfc.curvature.diagonal import AdaDPS
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.ngd import NGD
from dpkfc.curvature.noise_probes import DeadLeaves, FeatureNoise, PinkNoise, WhiteNoise
from dpkfc.curvature.private_oracle import PrivateOracle
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.refined import Refined
from dpkfc.curvature.second_moments import SecondMoments


@dataclass(frozen=True)
class Facts:
    """What a plan depends on beside settings: facts of recipe, data and model.

    Attributes:
        input_shape: of one input.
        dataset_size: number of examples, or of units.
        probe: the recipe's own source of probe inputs, for `source = "tokens"`.
        private: the private training set, for `source = "private-oracle"`.
        unit: what ε protects.
        max_records_per_unit: most records of a unit that count in a step.
        private_bounds: number of columns whose bounds a release decides.
        scores_norm: the most that a test row adds to the counts of noisy scores; 0 for none.
        head_inputs: inputs of the trained layer, for the rule of C.
    """

    input_shape: tuple[int, ...]
    dataset_size: int = 0
    probe: Callable[[RunConfig], Probe] | None = None
    private: Any = None
    unit: str = "example"
    max_records_per_unit: int | None = None
    private_bounds: int = 0
    scores_norm: float = 0.0
    head_inputs: int = 1


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise what the library says about a setting as a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make_kfac(config: RunConfig, facts: Facts, inputs: Tensor | None = None) -> KFAC:
    """Return the K-FAC curvature that the settings describe, whether or not the method uses it.

    Args:
        config: settings.
        facts: of the recipe.
        inputs: public example inputs, instead of the source that the settings name.

    Raises:
        ConfigError: settings of the curvature that do not go together.
    """
    output_source = config.preconditioner.output_source
    output_probe = None
    with library_errors():
        if inputs is not None:
            probe: Probe = PublicData(inputs, provenance="example inputs")
        else:
            probe = _main_probe(config, facts)
            if output_source:
                output_probe = _make_probe(config, output_source, facts)
        values = library_values(config, KFAC)
        return KFAC(probe=probe, output_probe=output_probe, seed=config.run.seed, **values)


def make_preconditioner(config: RunConfig, facts: Facts, steps: int) -> Preconditioner | None:
    """Return the preconditioner of the method, None for a method without one.

    Args:
        config: settings.
        facts: of the recipe.
        steps: of the plan, for schedules.

    Raises:
        ConfigError: settings that do not go together.
    """
    preconditioner = config.preconditioner
    kind = preconditioner.preconditioner
    if kind == "none":
        return None
    if kind == "moments":
        return SecondMoments()
    if kind == "kfac":
        return make_kfac(config, facts)
    # A file of public data is used whole.
    size = None if preconditioner.source == "public" else preconditioner.probe_size
    common: dict[str, Any] = {
        "probe": _main_probe(config, facts),
        "probe_size": size,
        "seed": config.run.seed,
    }
    if kind == "adadps":
        batch_size = 20 if size is None else min(20, size)
        return AdaDPS(batch_size=batch_size, **common, **library_values(config, AdaDPS))
    if kind == "ngd":
        return NGD(steps=steps, **common, **library_values(config, NGD))
    return GEP(**common, **library_values(config, GEP))


def _main_probe(config: RunConfig, facts: Facts) -> Probe:
    """Return the probe of `source`, refined where the settings say so."""
    preconditioner = config.preconditioner
    probe = _make_probe(config, preconditioner.source, facts)
    if not preconditioner.refine:
        return probe
    _check_refine(config)
    return Refined(probe, steps=preconditioner.refine)


def _check_refine(config: RunConfig) -> None:
    preconditioner = config.preconditioner
    if preconditioner.source in ("tokens", "private-oracle"):
        raise ConfigError(
            f"refine moves images, and source = {preconditioner.source!r} gives others; "
            "leave it out, or take dead-leaves"
        )
    if preconditioner.labels == "given":
        raise ConfigError(
            "refine moves images to classes of its own, and labels = 'given' do not fit; take "
            "'model'"
        )
    if preconditioner.likelihood == "gaussian":
        raise ConfigError(
            "refine moves images towards classes, and likelihood = 'gaussian' has none; leave it "
            "out"
        )


NOISE_PROBES = {"pink": PinkNoise, "dead-leaves": DeadLeaves, "white": WhiteNoise}


def _make_probe(config: RunConfig, source: str, facts: Facts) -> Probe:
    """Return the probe of a source; every kind of noise is `FeatureNoise` for inputs `[d]`."""
    if source == "tokens":
        if facts.probe is None:
            raise ConfigError(
                f"source = 'tokens' is for text; the recipe {config.run.recipe!r} takes "
                f"{', '.join(NOISE_PROBES)} or public"
            )
        return facts.probe(config)
    if source == "private-oracle":
        if facts.private is None:
            raise ConfigError(
                "source = 'private-oracle' needs the private training set; use it with `dpkfc"
                " train`"
            )
        return PrivateOracle(facts.private)
    if source == "public":
        path = Path(config.data.public_data)
        inputs, labels = read_public_data(path, facts.input_shape)
        return PublicData(
            inputs, labels, provenance=f"file {path.name}, declared public by its user"
        )
    if len(facts.input_shape) == 1:
        return FeatureNoise(facts.input_shape[0])
    kind = NOISE_PROBES[source]
    return kind(facts.input_shape, **library_values(config, kind))
