"""K-FAC on a probe: the settings, and how a refresh turns factors into a metric.

    factors on the probe → scale → damping and root of each side → metric → one scale for all of it

Nothing here can be given a private tensor. The metric depends on the probe, a public random stream
and the model's released parameters. It costs no privacy and leaves the sensitivity of the clipped
sum unchanged.

Source: DP-KFC, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpkfc._checks import (
    check_in_range,
    check_not_negative,
)
from dpkfc.curvature.base import (
    PreconditionerState,
    ProbePreconditioner,
    check_probe,
    choose_labels,
)
from dpkfc.curvature.changed_factors import combine_factors, randomize_directions
from dpkfc.curvature.damping import Damping
from dpkfc.curvature.factor_history import History, measure_drift
from dpkfc.curvature.factor_metric import (
    form_metric,
    layer_rows,
    report_identity_layers,
)
from dpkfc.curvature.layer_factors import (
    FactorOptions,
    Factors,
    LayerAccumulator,
    LayerFactors,
    Rules,
    fill_empty_sides,
)
from dpkfc.curvature.metric_scale import probe_scale
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, ProbeLoss, ProbeSpec
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh import (
    ProbeStatistics,
    decompose_layers,
    gather_layers,
    measure,
)
from dpkfc.curvature.refresh_group import RefreshGroup
from dpkfc.curvature.report import factor_letter
from dpkfc.linalg.metric import scale_metric

# Of the examples of the first refresh, one in so many is in a later one.
_LATER = 16
RULES = ("linear", "conv", "embedding", "tied", "norm", "recurrent", "fallback")
_ALLOWED_VALUES = {
    "sides": ("both", "input", "output"),
    "damping_mode": ("relative", "absolute"),
    "scale": ("probe", "trace", "balanced", "raw"),
    "sharing": ("expand", "reduce"),
    "oversize": ("diagonal", "identity", "low_rank"),
    "control": ("none", "random"),
}
# `describe` leaves out settings with these values.
_DEFAULTS_OMITTED_FROM_HASH: tuple[tuple[str, Any], ...] = (
    ("control", "none"),
    ("output_probe", None),
    ("tail_mass", 0.0),
    ("decay", 0.0),
    ("drift", 0.0),
)


@dataclass(frozen=True, kw_only=True)
class KFAC(ProbePreconditioner):
    """How curvature is measured and turned into a metric.

    Attributes:
        probe: source of inputs; see `probes`.
        probe_size: examples of a refresh. A public constant, never the size of a private batch. A
            refresh costs little more than their forward and backward pass. With `sides="input"`
            only the last 64 are differentiated. Input factors of a sequence model are good from
            few examples already. Its output factors are not if its positions have similar
            gradients.
        chunk: probe examples in one forward pass. It bounds memory and changes nothing else, except
            for a `loss` of your own that draws random numbers.
        labels: `model` draws labels from the model's predictive distribution (Fisher), `uniform`
            draws them at random, `given` takes the probe's. Given labels that do not fit the head
            are replaced by drawn ones, and the privacy card says so.
        likelihood: categorical, gaussian or bernoulli; see `likelihood`.
        loss: maps (model output, generator) to losses `[N]`, instead of a likelihood.
        sides: input (A only), both (the DP-KFC paper) or output (G only). The other side becomes
            the identity times the value of its mean eigenvalue. Every layer then keeps its scale
            and only the directions differ. Measurements: docs/results.md.
        damping: ρ of relative, π of absolute damping.
        damping_mode: relative (π-balanced, scale-free) or absolute (the paper's); see `Damping`.
        gamma: γ of absolute damping.
        exponent: root p in (0, 1/2] taken of each side.
        scale: `raw` takes the factors as they are. `trace` first divides each factor by its mean
            eigenvalue: layers keep their relative gradient sizes, directions are whitened within
            them. `probe` is raw times one number for the whole metric, which keeps the median norm
            over the probe; the clipping norm then means the same as in DP-SGD. `balanced` is trace
            with that number.
        every: steps between refreshes.
        sharing: expand or reduce, for layers with several positions; see `factors`.
        max_factor_size: largest matrix that is decomposed. Wider sides stay low-rank while the
            probe has few rows.
        oversize: form of other wider sides: diagonal, identity, or low_rank, which samples
            `max_factor_size` of their rows.
        layer_rules: rules of the layers to precondition (some of `RULES`), None for all. The others
            are only scaled, as the other side of `sides` is.
        rank_tolerance: eigenvalues below this fraction of the damping are dropped from low-rank
            sides.
        max_rank: eigenpairs k kept of a side. A side narrower than 4k keeps all, and so does every
            side with None. The mean of the dropped eigenvalues is kept, so the trace stays.
            Eigenvalues far below the first few are sampling noise of the probe.
        tail_mass: fraction of a factor's trace that may be dropped, 0 for none. A side keeps the
            fewest eigenpairs that hold the rest, at most `max_rank` of a wide side.
        decay: weight β in [0, 1) of the past in factors that are averaged over refreshes. About
            1/(1 − β) probes stand behind each factor, so every probe after the first can be small.
            0 takes the newest probe alone; see `factor_history`.
        later_probe_size: examples of every refresh after the first, at most `probe_size`, with
            averaged factors. None takes a sixteenth of `probe_size`.
        drift: if the factors have changed by less than this since the metric was built, a refresh
            keeps that metric and skips the eigenproblems. 0 always builds a new metric; see
            `factor_history.measure_drift`.
        rows_per_dim: with `sharing="expand"`, a factor of size d is formed from about this many
            times d positions (4096 or more) if the probe has more, and with averaged factors from
            1 − β of them at every refresh after the first. A public stream samples a few of every
            example, with weights that keep the estimate unbiased. None takes all.
        seed: of the probe's own random stream, one stream a step.
        output_probe: a second probe, for the output factors G; A then comes from `probe`. None
            takes both from one.
        control: `random` keeps every spectrum and takes random orthogonal directions. This tells
            curvature from scaling.
    """

    probe: Probe
    probe_size: int = 256
    chunk: int = 64
    labels: str = "model"
    likelihood: str = "categorical"
    loss: ProbeLoss | None = None
    sides: str = "input"
    damping: float = 0.1
    damping_mode: str = "relative"
    gamma: float = 0.0
    exponent: float = 0.5
    scale: str = "balanced"
    every: int = 50
    sharing: str = "expand"
    max_factor_size: int = 4096
    oversize: str = "diagonal"
    layer_rules: tuple[str, ...] | None = None
    rank_tolerance: float = 1e-2
    max_rank: int | None = 32
    tail_mass: float = 0.0
    decay: float = 0.9
    later_probe_size: int | None = None
    drift: float = 0.0
    rows_per_dim: float | None = 4.0
    seed: int = 0
    output_probe: Probe | None = None
    control: str = "none"

    counts = ("probe_size", "chunk", "every", "max_factor_size")
    optional_counts = ("later_probe_size",)
    takes_team = True

    def __post_init__(self) -> None:
        self._check(**_ALLOWED_VALUES)
        if self.output_probe is not None:
            check_probe(self.output_probe, "output_probe")
        if self.layer_rules is not None:
            object.__setattr__(self, "layer_rules", tuple(self.layer_rules))
            if not self.layer_rules or not set(self.layer_rules) <= set(RULES):
                raise ValueError(
                    f"layer_rules must name some of {', '.join(RULES)}; got "
                    f"{list(self.layer_rules)}"
                )
        if self.rows_per_dim is not None:
            check_in_range("rows_per_dim", self.rows_per_dim, "[1, inf)")
        check_in_range("decay", self.decay, "[0, 1)")
        later = self.later_probe_size
        if later is not None:
            if self.decay == 0 or later > self.probe_size:
                raise ValueError(
                    f"later_probe_size={later} needs decay above 0 (got {self.decay}) and at most "
                    f"probe_size={self.probe_size}"
                )
        check_not_negative("drift", self.drift)
        self._damping()

    @property
    def name(self) -> str:
        """Short name: kfac, kfac-a (inputs only) or kfac-g (output gradients only)."""
        return {"both": "kfac", "input": "kfac-a", "output": "kfac-g"}[self.sides]

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        description = self._describe(self.name)
        del description["later_probe_size"]
        if self.fewest_probe_examples < self.probe_size:
            description["later_probe_size"] = self.fewest_probe_examples
        if self.layer_rules is not None:
            description["layer_rules"] = list(self.layer_rules)
        omitted = _DEFAULTS_OMITTED_FROM_HASH
        return {name: value for name, value in description.items() if (name, value) not in omitted}

    def probe_spec(self, step: int, *, later: bool = False) -> ProbeSpec:
        """Return what a refresh runs on `probe`; `later` if it continues from an earlier one."""
        spec = super().probe_spec(step)
        if later:
            spec = replace(spec, size=self.fewest_probe_examples)
        if self.output_probe is not None:
            spec = replace(spec, labels=choose_labels(self.probe, self.labels))
        return spec

    def probe_specs(self, step: int, *, later: bool = False) -> list[ProbeSpec]:
        """Return what a refresh runs on `probe` and on `output_probe`."""
        specs = [self.probe_spec(step, later=later)]
        if self.output_probe is not None:
            labels = choose_labels(self.output_probe, self.labels)
            second = replace(specs[0], probe=self.output_probe, labels=labels)
            specs.append(second)
        return specs

    @property
    def fewest_probe_examples(self) -> int:
        """Examples of the smallest refresh: every one after the first, with averaged factors."""
        if self.decay == 0:
            return self.probe_size
        return self.later_probe_size or max(1, self.probe_size // _LATER)

    @property
    def uses_previous_state(self) -> bool:
        """Whether a refresh continues from the state of the one before."""
        return self.decay > 0 or self.drift > 0

    def factors(
        self,
        model: nn.Module,
        capture: Capture,
        step: int = 0,
        rules: Rules | None = None,
    ) -> dict[str, LayerFactors]:
        """Return undamped, unscaled factors of every layer that the probe reaches.

        Args:
            model: any module; left exactly as it is, and run in evaluation mode.
            capture: maps (model, loss) to layer name and block.
            step: names the random stream.
            rules: layer name to rule; needed for `layer_rules`.

        Raises:
            ValueError: as `build`.
        """
        with preserve_model(model), torch.no_grad():
            statistics = self._measure(model, capture, self.probe_specs(step), rules)
            factors, _ = self._decompose([each.layers for each in statistics], model)
            return dict(factors)

    def _measure(
        self,
        model: nn.Module,
        capture: Capture,
        specs: list[ProbeSpec],
        rules: Rules | None,
        team: RefreshGroup | None = None,
        *,
        row_share: float = 1.0,
    ) -> list[ProbeStatistics]:
        """Return the statistics of one pass over each probe."""
        if self.layer_rules is not None and rules is None:
            raise ValueError("layer_rules was set, so build() needs rules={layer name: rule}")
        options = FactorOptions(
            sharing=self.sharing,
            sides=self.sides,
            max_factor_size=self.max_factor_size,
            oversize=self.oversize,
            decays=self.decay > 0,
            only_rules=self.layer_rules,
            rules=rules or {},
            rows_per_dim=self.rows_per_dim,
            row_share=row_share,
        )
        return [measure(model, capture, spec, options, team) for spec in specs]

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
        team: RefreshGroup | None = None,
        *,
        previous: PreconditionerState | None = None,
    ) -> PreconditionerState:
        """Measure curvature on the probe at the model's present parameters.

        Args:
            model: any module; parameters, gradients, buffers, modes and the global random state
                stay as they are.
            capture: maps (model, loss) to layer name and block; `loss(model)` gives per-example
                losses `[N]`. Blocks are looked up one at a time, so the mapping may form them on
                demand. It is called under `torch.no_grad()` for examples that give input factors
                only; `b` of their blocks is not read.
            step: step of training; with `seed` it names the probe's random stream.
            rules: layer name to the rule of its gradients (`Layer.rule`); needed for
                `layer_rules`.
            team: the processes that share the refresh. Each runs a part of the probe and decomposes
                a part of the factors.
            previous: the state of the refresh before, with `uses_previous_state`.

        Returns:
            The state, never with a NaN in it; or the previous one with this step, if its factors
            have moved less than `drift`.

        Raises:
            ValueError: the model's output, loss or a layer's contribution on the probe is not
                finite or does not fit.
        """
        with preserve_model(model), torch.no_grad():
            past = () if previous is None else previous.running
            is_later = self.decay > 0 and any(past)
            specs = self.probe_specs(step, later=is_later)
            share = 1 - self.decay if is_later else 1.0
            statistics = self._measure(model, capture, specs, rules, team, row_share=share)
            sums = [gather_layers(each.layers, model, team) for each in statistics]
            drift = None
            if self.drift > 0 and any(past):
                pairs = zip(sums, past, strict=True)
                drift = max(measure_drift(*pair, team) for pair in pairs)
                if previous is not None and drift < self.drift:
                    return replace(previous, step=step, drift=drift)
            factors, histories = self._decompose(sums, model, past, self.max_rank, team)
            used = self._prepare(factors)
            damping = self._damping()
            metric = form_metric(used, damping, self.max_factor_size)
            scale = 1.0
            if self.scale in ("probe", "balanced"):
                last = statistics[0].last
                scale = probe_scale(model, capture, specs[0], metric, last=last, team=team)
                metric = scale_metric(metric, scale)
        report = []
        spectra = {}
        for name, layer in factors.items():
            report += layer_rows(name, layer, used[name], metric[name], damping)
            spectrum = {}
            for side, factor in layer.sides.items():
                spectrum[factor_letter(side)] = factor.spectrum.cpu()
            spectra[name] = spectrum
        report += report_identity_layers(metric, statistics[0].unknown, rules or {})
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            scale=scale,
            spectra=spectra,
            note=statistics[0].note,
            running=histories if self.uses_previous_state else (),
            drift=drift,
        )

    def _decompose(
        self,
        sums: Sequence[Mapping[str, LayerAccumulator]],
        model: nn.Module,
        past: Sequence[History] = (),
        max_pairs: int | None = None,
        team: RefreshGroup | None = None,
    ) -> tuple[Factors, tuple[History, ...]]:
        """Return the factors of all layers, and what the next refresh needs of each probe.

        Args:
            sums: of each probe.
            model: on whose device the factors are wanted.
            past: the histories of each probe; empty without earlier refreshes.
            max_pairs: as of `decompose_layers`.
            team: the processes that share the refresh.
        """
        by_probe = []
        histories = []
        for layers, history in zip(sums, past or [{}] * len(sums), strict=True):
            factors, kept = decompose_layers(
                layers,
                model,
                max_pairs,
                team,
                past=history,
                share=self.decay,
                is_kept=self.uses_previous_state,
            )
            by_probe.append(factors)
            histories.append(kept)
        return combine_factors(*by_probe), tuple(histories)

    def _prepare(self, factors: Factors) -> Factors:
        """Return the factors to damp: scaled, none empty, and randomised for the control."""
        if self.scale in ("trace", "balanced"):
            factors = {name: layer.normalise() for name, layer in factors.items()}
        if self.damping_mode == "relative":
            factors = fill_empty_sides(factors)
        if self.control == "random":
            factors = randomize_directions(factors, self.seed)
        return factors

    def _damping(self) -> Damping:
        return Damping(
            value=self.damping,
            mode=self.damping_mode,
            gamma=self.gamma,
            exponent=self.exponent,
            rank_tolerance=self.rank_tolerance,
            max_rank=self.max_rank,
            tail_mass=self.tail_mass,
        )
