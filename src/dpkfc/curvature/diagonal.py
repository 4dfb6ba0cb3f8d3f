"""Diagonal metrics: AdaDPS from public data, DP² from the releases of the phase before.

AdaDPS divides every gradient entry by the root of its second moment on public data, then clips.

    v = mean over mini-batches of (mean gradient of a mini-batch)²      at the released parameters
    z_i = g_i ⊘ √(v + ε),   clip_C(z_i),   + noise;   the step is z̄

v reads public data or synthetic inputs only, so the cost is that of DP-SGD. An entry without any
gradient on the probe has the factor 1/√ε. With an absolute ε of 1e-10 such entries are multiplied
by 1e5 and dominate every clipped gradient. Here ε is a fraction of the mean of v, and one number
for the whole map keeps the median gradient norm of the probe.

Source: Li et al. (2022), Algorithm 1 (RMSProp form, public data).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.curvature.base import (
    Preconditioner,
    PreconditionerState,
    ProbePreconditioner,
    choose_labels,
    identity_row,
)
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.ngd import (
    PER,
    Moments,
    Sums,
    condition,
    eigenvalues,
    make_fisher,
    squared_gradients,
    summed_gradients,
)
from dpkfc.curvature.probes import Probe, preserve_model
from dpkfc.curvature.refresh import (
    LABELS,
    Capture,
    ProbeLoss,
    ProbeMicrobatch,
    ProbeSpec,
    probe_scale,
    run_probe,
    scale_microbatch,
)
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric, NamedTensors, Tensors, scale_metric

# What published code adds inside the root and to the root, and whether it refreshes.
_RELEASED = {
    "adadps": (1e-10, 0.0, True),
    "dp2": (0.0, 1e-7, True),
    "dp-kfc": (1e-10, 0.0, False),
}


@dataclass(frozen=True, kw_only=True)
class AdaDPS(ProbePreconditioner):
    """How a diagonal metric is made from public data or synthetic inputs.

    Attributes:
        probe: source of inputs: `PublicData(inputs, labels, ...)`, or noise (`PinkNoise(...)`,
            "pink AdaDPS").
        batch_size: examples of a public mini-batch; None takes the whole probe as one.
        probe_size: examples of a refresh; None takes all of the probe (256 of an endless one). It
            is rounded down to whole mini-batches.
        floor: ε as a fraction of the mean of v over all entries of the model.
        every: steps between refreshes.
        decay: β of v ← β v + (1 − β) v_new over the refreshes; 0 keeps the last one alone.
        per: `batch` squares the mean gradient of a mini-batch, `example` every example's own.
        labels: None takes the probe's labels if it has some, and draws them from the model
            otherwise; or as in `KFAC`.
        likelihood, loss: as in `KFAC`.
        scale: `probe` keeps the median norm on the probe, `raw` takes 1/√(v + ε) as it is.
        as_released: the absolute ε and raw scale of published code, for reproductions: `adadps`
            (1e-10 inside the root), `dp2` (1e-7 added to the root; use batch_size=None, decay=0.9,
            every=1) or `dp-kfc` (as adadps, and never refreshed).
        seed: of the probe's own random stream.
        chunk: examples of a mini-batch in one forward pass. It bounds memory and changes nothing
            else, except for a `loss` of your own that draws random numbers.
    """

    probe: Probe
    batch_size: int | None = 20
    probe_size: int | None = None
    floor: float = 1e-3
    every: int = 50
    decay: float = 0.0
    per: str = "batch"
    labels: str | None = None
    likelihood: str = "categorical"
    loss: ProbeLoss | None = None
    scale: str = "probe"
    as_released: str | None = None
    seed: int = 0
    chunk: int = 64

    optional_counts = ("probe_size", "batch_size")

    def __post_init__(self) -> None:
        self._check(
            labels=(None, *LABELS),
            per=PER,
            scale=("probe", "raw"),
            as_released=(None, *_RELEASED),
        )
        check_positive("floor", self.floor)
        check_in_range("decay", self.decay, "[0, 1)")

    @property
    def uses_previous_state(self) -> bool:
        """Whether a refresh continues from the state of the one before."""
        return self.decay > 0

    @property
    def resolved_labels(self) -> str:
        """Where labels come from."""
        if self.labels is not None:
            return self.labels
        return choose_labels(self.probe, "given")

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        spec = self.probe_spec(0)
        name = "adadps"
        if self.as_released is not None:
            name = f"adadps as released by {self.as_released}"
        description = self._describe(name, probe_size=spec.size, labels=spec.labels)
        # Older plans have no such setting and keep their hash.
        if description["chunk"] == 64:
            del description["chunk"]
        return description

    def is_due(self, step: int) -> bool:
        """Return whether the metric is to be rebuilt before this step (from 0)."""
        if self.as_released is not None and not _RELEASED[self.as_released][2]:
            return step == 0
        return super().is_due(step)

    def probe_spec(self, step: int) -> ProbeSpec:
        """Return what a refresh runs, in whole mini-batches."""
        spec = super().probe_spec(step)
        batch = min(spec.size, self.batch_size or spec.size)
        whole = spec.size // batch
        return replace(
            spec,
            size=whole * batch,
            chunk=min(batch, self.chunk),
            labels=self.resolved_labels,
            within=batch,
        )

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
        previous: PreconditionerState | None = None,
    ) -> PreconditionerState:
        """Measure second moments on the probe at the model's present parameters.

        Args:
            model: any module; left as it is.
            capture: maps (model, loss) to layer name and block.
            step: names the random stream.
            rules: layer name to kind.
            previous: the state of the refresh before, read if `decay` is not 0.

        Raises:
            ValueError: what the model gives on the probe is not finite, or nothing has a gradient.
        """
        with preserve_model(model), torch.no_grad():
            layers, last, note = self._measure(model, capture, step)
            if previous is not None and self.decay:
                layers = self._average(layers, previous)
            shift = self.floor * _mean(layers)
            if not shift > 0:
                raise ValueError(
                    "no parameter has a gradient on the probe; check its labels and the model's "
                    "output on it"
                )
            entries = {}
            for name, layer in layers.items():
                roots = self._roots(layer.mean, shift)
                entries[name] = layer.entry(roots)
            metric: Metric = entries
            scale = 1.0
            if self.as_released is None and self.scale == "probe":
                scale = probe_scale(model, capture, self.probe_spec(step), metric, last=last)
                metric = scale_metric(metric, scale)
        spectra = {}
        shapes = {}
        report = []
        for name, layer in layers.items():
            fisher = make_fisher(layer)
            spectra[name] = fisher.spectrum
            shapes[name] = fisher.shapes
            report += _report(name, fisher.spectrum, shift)
        report += [identity_row(name) for name in rules or {} if name not in metric]
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            scale=scale,
            spectra=spectra,
            shapes=shapes,
            note=note,
        )

    def _measure(
        self, model: nn.Module, capture: Capture, step: int
    ) -> tuple[dict[str, Moments], ProbeMicrobatch | None, str]:
        """Return second moments of every layer, the micro-batch for the scale, a note on labels."""
        moments: dict[str, Moments] = {}
        # Sums of the mini-batch that has not ended.
        pending: dict[str, Sums] = {}
        last = None
        note = ""
        spec = self.probe_spec(step)
        whole = spec.within or spec.size

        def add(name: str, block: Block) -> None:
            if block.kind is None:
                return
            if self.per == "example":
                _add(moments, name, squared_gradients(block))
            else:
                _add(pending, name, summed_gradients(block))

        for microbatch in run_probe(model, capture, spec):
            microbatch.visit(add)
            if microbatch.rows.stop % whole == 0:
                for name in list(pending):
                    try:
                        _add(moments, name, pending.pop(name).squared(whole))
                    except ValueError as error:
                        raise ValueError(f"layer '{name}': {error}") from error
            last = scale_microbatch(microbatch, spec)
            note = microbatch.note
            del microbatch
        return moments, last, note

    def _average(
        self, layers: Mapping[str, Moments], previous: PreconditionerState
    ) -> dict[str, Moments]:
        """Return v of every layer, averaged with the refreshes before."""
        averaged = dict(layers)
        for name in layers.keys() & previous.spectra.keys():
            before = eigenvalues(previous.metric[name], previous.spectra[name])
            values = {}
            for role, x in layers[name].mean.items():
                past = self.decay * before[role].to(x)
                values[role] = past + (1 - self.decay) * x
            averaged[name] = replace(layers[name], values=values, count=1)
        return averaged

    def _roots(self, values: Tensors, shift: float) -> NamedTensors:
        """Return 1/√(v + ε) by role, or what published code makes of v."""
        inside = shift
        outside = 0.0
        if self.as_released is not None:
            inside, outside, _ = _RELEASED[self.as_released]
        roots = {}
        for role, v in values.items():
            root = (v + inside).sqrt() + outside
            roots[role] = 1 / root
        return roots


def _add(totals: dict[str, Any], name: str, new: Sums) -> None:
    if name in totals:
        new = totals[name] + new
    totals[name] = new


def _mean(layers: Mapping[str, Moments]) -> float:
    """Return the mean of v over all entries of the model."""
    total = 0.0
    count = 0
    for layer in layers.values():
        for x in layer.mean.values():
            total += float(x.sum())
            count += x.numel()
    return total / max(1, count)


def _report(name: str, spectrum: Tensors, shift: float) -> list[dict[str, Any]]:
    rows = []
    for role, v in spectrum.items():
        note = ""
        if not bool((v > 0).all()):
            is_zero = (v == 0).double()
            note = f"{float(is_zero.mean()):.0%} without a gradient on the probe"
        rows.append(
            {
                "layer": name,
                "side": role,
                "dim": v.numel(),
                "kind": "diagonal",
                "rank": int((v > 0).sum()),
                "trace": float(v.sum()),
                "condition_before": condition({role: v}),
                "condition_after": condition({role: v + shift}),
                "note": note,
            }
        )
    return rows


# --------------------------------------------------------------------------------------------------
# DP²: a diagonal metric made from the releases of the phase before, without public data.
#
# Phases of s steps alternate, beginning with a plain one:
#
#     plain      step g̃ (clipped to C₁);  G += g̃          at its end  v ← γ v + (1 − γ)(G/s)²
#     adaptive   z_i = g_i ⊘ D,  D = √v,  clip_C₂(z_i),  + noise σ C₂;  the step is z̄
#
# v is a function of releases alone, so every step costs what a step of DP-SGD does. v keeps the
# noise of s averaged releases: its entries are too large by Φ/s, with Φ the variance of the noise
# in one release. `corrected` subtracts that.
#
# One C serves both phases: clipping g ⊘ D to C₂ is clipping (C₁/C₂) g ⊘ D to C₁, which gives the
# same release up to that factor.
#
# Source: Li et al. (2023), Algorithm 1.


_PROBE = {"kind": "past releases", "source": "past releases"}


@dataclass(frozen=True, kw_only=True)
class DP2(Preconditioner):
    """How a delayed preconditioner is made.

    Attributes:
        phase: s, steps of a phase; plain and adaptive ones alternate.
        decay: γ of the second moments over phases.
        floor: least second moment, as a fraction of their mean over the model.
        clip_ratio: C₂ / C₁; `max_grad_norm` is C₁.
        ratio: learning rate of adaptive phases over that of plain ones; see
            `learning_rate_factor`.
        corrected: subtract Φ/s from the bias-corrected second moments before the floor.
        scale: `unit` divides D by its root mean square, so that C and learning rate keep their
            meaning; `raw` takes D.
    """

    phase: int
    decay: float = 0.9
    floor: float = 1e-2
    clip_ratio: float = 1.0
    ratio: float = 1.0
    corrected: bool = False
    scale: str = "unit"

    uses_past_releases = True

    def __post_init__(self) -> None:
        check_integer("phase", self.phase, 1)
        check_one_of("scale", self.scale, ("unit", "raw"))
        check_in_range("decay", self.decay, "[0, 1)")
        for name in ("floor", "clip_ratio", "ratio"):
            check_positive(name, getattr(self, name))

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        description: dict[str, Any] = {"name": "dp2", **asdict(self)}
        description["probe"] = dict(_PROBE)
        description["curvature_source"] = _PROBE["source"]
        description["uses_private_data"] = False
        return description

    def is_adaptive(self, step: int) -> bool:
        """Return whether a step (from 0) lies in an adaptive phase."""
        return step // self.phase % 2 == 1

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, as `LambdaLR` takes it.

        The factor is 1 in plain phases and `ratio · clip_ratio` in adaptive ones, where a release
        is C₁/C₂ times that of the paper.
        """
        if self.is_adaptive(step):
            return self.ratio * self.clip_ratio
        return 1.0

    def is_due(self, step: int) -> bool:
        """Return whether a phase begins with this step (from 0)."""
        return step % self.phase == 0

    def observe(self, released: Any, past: Tensors) -> NamedTensors:
        """Return what is kept of past releases after one more.

        Args:
            released: gradients, the variance of their noise, and their step.
            past: the last result of this function, empty at first.

        Returns:
            `sum/<parameter>` and `count` of the present plain phase; `v/<parameter>` and `updates`
            of the plain phases that have ended; `noise`, the variance of the noise in v.
        """
        kept = dict(past)
        if self.is_adaptive(released.step):
            return kept
        zero = torch.zeros((), dtype=torch.float64)
        count = past.get("count", zero) + 1
        kept["count"] = count
        for name, gradient in released.gradients.items():
            key = f"sum/{name}"
            kept[key] = gradient.detach() + past.get(key, 0.0)
        if not self.is_due(released.step + 1):
            return kept
        variance = torch.tensor(float(released.noise_variance), dtype=torch.float64)
        variance = variance / count.cpu()
        kept["noise"] = self._average(past.get("noise"), variance)
        kept["updates"] = past.get("updates", zero) + 1
        kept["count"] = zero
        for name in released.gradients:
            mean = kept.pop(f"sum/{name}") / float(count)
            moment = f"v/{name}"
            kept[moment] = self._average(past.get(moment), mean.square())
        return kept

    def _average(self, before: Tensor | None, new: Tensor) -> Tensor:
        """Return γ before + (1 − γ) new, from 0."""
        decayed = (1 - self.decay) * new
        if before is None:
            return decayed
        return decayed + self.decay * before.to(new.device)

    def build(  # type: ignore[override]
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
        *,
        past: Tensors,
        diagonal: Callable[[Tensors], Metric],
    ) -> PreconditionerState:
        """Return the metric of the phase that this step begins: the identity, or 1/D.

        Args:
            model: not read.
            capture: not read.
            step: the first step of a phase.
            rules: layer name to kind.
            past: from `observe`.
            diagonal: makes a metric of positive factors, parameter name to tensor of its shape.
        """
        is_adaptive = self.is_adaptive(step)
        moments = {name[2:]: x for name, x in past.items() if name.startswith("v/")}
        if not is_adaptive or not moments:
            why = "plain phase"
            if is_adaptive:
                why = "no release of a plain phase was seen"
            report = tuple(identity_row(name, why) for name in rules or {})
            return PreconditionerState(metric={}, step=step, report=report)
        roots, floored = self._roots(moments, past)
        factor = 1 / self.clip_ratio
        factors = {name: factor / root for name, root in roots.items()}
        metric = diagonal(factors)
        note = f"from past releases; {floored:.0%} of all entries at the floor"
        row = {"side": "weight", "kind": "diagonal"}
        report = tuple(identity_row(name, note) | row for name in metric)
        return PreconditionerState(metric=metric, step=step, report=report)

    def _roots(self, v: Tensors, past: Tensors) -> tuple[NamedTensors, float]:
        """Return D of every parameter, and the fraction of entries at the floor."""
        noise = 0.0
        if self.corrected:
            bias = 1 - self.decay ** float(past["updates"])
            noise = float(past["noise"]) / bias
            v = {name: x / bias for name, x in v.items()}
        size = sum(x.numel() for x in v.values())
        sums = [float(x.sum(dtype=torch.float64)) for x in v.values()]
        mean = sum(sums) / size
        least = max(self.floor * mean, 1e-300)
        moments = {}
        total = 0.0
        floored = 0
        for name, x in v.items():
            moment = x.double() - noise
            moment = moment.clamp(min=least)
            moments[name] = moment
            total += float(moment.sum())
            is_low = moment <= least
            floored += int(is_low.sum())
        unit = 1.0
        if self.scale == "unit":
            unit = math.sqrt(total / size)
        roots = {}
        for name, moment in moments.items():
            root = moment.sqrt() / unit
            roots[name] = root.to(v[name].dtype)
        return roots, floored / size
