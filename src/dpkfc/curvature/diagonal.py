"""AdaDPS: a diagonal metric from public data or synthetic inputs.

It divides every gradient entry by the root of its second moment on public data, then clips.

    v = mean over mini-batches of (mean gradient of a mini-batch)²      at the released parameters
    z_i = g_i ⊘ √(v + ε),   clip_C(z_i),   + noise;   the step is z̄

v reads public data or synthetic inputs only, so the privacy cost equals DP-SGD's. An entry without
any gradient on the probe has the factor 1/√ε. With an absolute ε of 1e-10 such entries are
multiplied by 1e5 and dominate every clipped gradient. Here ε is a fraction of the mean of v, and
one number for the whole map keeps the median gradient norm of the probe.

Source: Li et al. (2022), Algorithm 1 (RMSProp form, public data).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpkfc._checks import check_positive
from dpkfc.curvature.base import PreconditionerState, ProbePreconditioner, choose_labels
from dpkfc.curvature.fisher import condition
from dpkfc.curvature.gradient_moments import (
    Moments,
    Sums,
    summed_gradients,
)
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.likelihood import LABELS
from dpkfc.curvature.metric_scale import probe_scale, scale_microbatch
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, ProbeLoss, ProbeMicrobatch, ProbeSpec, run_probe
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.report import report_row
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric, scale_metric
from dpkfc.tensors import NamedTensors


@dataclass(frozen=True, kw_only=True)
class AdaDPS(ProbePreconditioner):
    """How a diagonal metric is made from public data or synthetic inputs.

    Attributes:
        probe: source of inputs: `PublicData(inputs, labels, ...)`, or noise (`PinkNoise(...)`,
            "pink AdaDPS").
        batch_size: examples of a public mini-batch, whose mean gradient is squared; None takes the
            whole probe as one.
        probe_size: examples of a refresh; None takes all of the probe (256 of an endless one). It
            is rounded down to whole mini-batches.
        floor: ε as a fraction of the mean of v over all entries of the model.
        every: steps between refreshes.
        labels: None takes the probe's labels if it has some, and draws them from the model
            otherwise; or as in `KFAC`.
        likelihood, loss: as in `KFAC`.
        scale: `probe` keeps the median norm on the probe, `raw` takes 1/√(v + ε) as it is.
        seed: of the probe's own random stream.
        chunk: examples of a mini-batch in one forward pass. It bounds memory and changes nothing
            else, except for a `loss` of your own that draws random numbers.
    """

    probe: Probe
    batch_size: int | None = 20
    probe_size: int | None = None
    floor: float = 1e-3
    every: int = 50
    labels: str | None = None
    likelihood: str = "categorical"
    loss: ProbeLoss | None = None
    scale: str = "probe"
    seed: int = 0
    chunk: int = 64

    optional_counts = ("probe_size", "batch_size")

    def __post_init__(self) -> None:
        self._check(
            labels=(None, *LABELS),
            scale=("probe", "raw"),
        )
        check_positive("floor", self.floor)

    @property
    def resolved_labels(self) -> str:
        """Where labels come from."""
        if self.labels is not None:
            return self.labels
        return choose_labels(self.probe, "given")

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        spec = self.probe_spec(0)
        fixed = {"decay": 0.0, "per": "batch"}
        return self._describe("adadps", probe_size=spec.size, labels=spec.labels, **fixed)

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
    ) -> PreconditionerState:
        """Measure second moments on the probe at the model's present parameters.

        Args:
            model: any module; left as it is.
            capture: maps (model, loss) to layer name and block.
            step: names the random stream.
            rules: layer name to rule.

        Raises:
            ValueError: what the model gives on the probe is not finite, or nothing has a gradient.
        """
        with preserve_model(model), torch.no_grad():
            layers, last, note = self._measure(model, capture, step)
            shift = self.floor * _mean(layers)
            if not shift > 0:
                raise ValueError(
                    "no parameter has a gradient on the probe; check its labels and the model's "
                    "output on it"
                )
            entries = {}
            for name, layer in layers.items():
                roots = {role: 1 / (v + shift).sqrt() for role, v in layer.mean.items()}
                entries[name] = layer.entry(roots)
            metric: Metric = entries
            scale = 1.0
            if self.scale == "probe":
                scale = probe_scale(model, capture, self.probe_spec(step), metric, last=last)
                metric = scale_metric(metric, scale)
        spectra = {}
        report = []
        for name, layer in layers.items():
            spectra[name] = layer.spectrum
            report += _report(name, layer.spectrum, shift)
        report += [report_row(name) for name in rules or {} if name not in metric]
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            scale=scale,
            spectra=spectra,
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
            if block.kind is not None:
                _add(pending, name, summed_gradients(block))

        for microbatch in run_probe(model, capture, spec):
            microbatch.visit(add)
            if microbatch.rows.stop % whole == 0:
                for name in list(pending):
                    try:
                        _add(moments, name, pending.pop(name).square(whole))
                    except ValueError as error:
                        raise ValueError(f"layer '{name}': {error}") from error
            last = scale_microbatch(microbatch, spec)
            note = microbatch.note
            del microbatch
        return moments, last, note


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


def _report(name: str, spectrum: NamedTensors, shift: float) -> list[dict[str, Any]]:
    rows = []
    for role, v in spectrum.items():
        note = ""
        if not bool((v > 0).all()):
            is_zero = (v == 0).double()
            note = f"{float(is_zero.mean()):.0%} without a gradient on the probe"
        row = report_row(
            name,
            side=role,
            kind="diagonal",
            dim=v.numel(),
            rank=int((v > 0).sum()),
            trace=float(v.sum()),
            conditions=(condition({role: v}), condition({role: v + shift})),
            note=note,
        )
        rows.append(row)
    return rows
