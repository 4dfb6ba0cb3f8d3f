"""DP-NGD: natural gradients from public curvature, with a scheduled floor on the eigenvalues.

    every `every` steps   F = A ⊗ G of every layer on public data, F = Q Λ Qᵀ
    every step            Λ̃ = max(Λ, λ_t), λ_t by Eq. 18
    z_i = F̃^(−1/2) g_i,   clip_C(z_i),   + noise,   step F̃^(−1/2) z̄

with `order="split"` and readout "natural". F reads no private data, so the privacy cost equals
DP-SGD's. λ_t is absolute: losses have the scale of one example, and nothing rescales the metric.
Parameters without a Kronecker product (norm layers, embeddings) have the diagonal of their Fisher
information under the same floor. All parameters are then in the same units.

The paper leaves these choices open. Labels of the probe are drawn from the model, which gives the
Fisher information itself. A layer with T positions has A = 1/n Σ a aᵀ and G = 1/(nT) Σ b bᵀ, so
that tr(A ⊗ G) is E‖g‖². The clamp acts on the products Λ, not on the factors. Every refresh
measures F anew, on single views of the public data.

Source: DP-NGD, Algorithms 1 and 2, Eq. 16 to 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dpkfc._checks import check_in_range, check_positive, is_number, show_value
from dpkfc.curvature.base import PreconditionerState, ProbePreconditioner
from dpkfc.curvature.fisher import (
    LayerFisher,
    clamp_eigenvalues,
    condition,
    eigenvalues,
    measure_fisher,
)
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, ProbeLoss
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh_group import RefreshGroup
from dpkfc.curvature.report import FACTOR_LETTERS, report_row
from dpkfc.linalg.metric import Entry, Kronecker, Metric

_READOUTS = {"split": ("natural", "whitened"), "after": ("whitened",), "before": ("inverse",)}
_LEAST = 1e-30  # smaller eigenvalues count as zero


@dataclass(frozen=True)
class PostNoiseWhitening(Kronecker):
    """The identity for the clip; `readout="inverse"` applies `back` after the noise."""

    back: Entry = field(kw_only=True)

    def inverse(self) -> Any:
        """Return `back`."""
        return self.back


@dataclass(frozen=True, kw_only=True)
class NGD(ProbePreconditioner):
    """How DP-NGD measures and clamps curvature. Use it with `PrivacyConfig(readout="natural")`.

    Attributes:
        probe: where inputs come from; the paper takes 500 public images, `PublicData(...)`.
        lambda_safe: λ_safe, the floor at the first and the last step. It matches the steps of a
            tuned DP-SGD at (η C of DP-NGD / η C of DP-SGD)² (Eq. 16).
        lambda_base: λ_base, the floor between them; None takes min(1e-4, 0.1 λ_safe). λ_safe gives
            a constant floor.
        steps: T, the length of the schedule; at most the steps of the plan.
        warm: fraction of T in which the floor sinks from λ_safe to λ_base.
        power: p, how late it rises again.
        every: steps between refreshes of F.
        labels: `model` draws them from the model's predictive distribution, `uniform` at random,
            `given` takes the probe's.
        likelihood, loss: as in `KFAC`.
        order: `split` clips F̃^(−1/2) g. Readout "natural" is DP-NGD; "whitened" does not map the
            step again. The paper's ablations: `after` clips F̃⁻¹ g, with readout "whitened";
            `before` clips g itself and maps by F̃⁻¹ after the noise, with readout "inverse".
        probe_size: examples a refresh; None takes all that the probe holds (256 of an endless one).
        chunk: probe examples a forward pass.
        max_factor_size: wider sides keep the diagonal of their factor.
        seed: of the probe's own random stream.
    """

    probe: Probe
    lambda_safe: float
    steps: int
    lambda_base: float | None = None
    warm: float = 0.1
    power: float = 10.0
    every: int = 8
    labels: str = "model"
    likelihood: str = "categorical"
    loss: ProbeLoss | None = None
    order: str = "split"
    probe_size: int | None = None
    chunk: int = 64
    max_factor_size: int = 4096
    seed: int = 0

    counts = ("steps", "every", "chunk", "max_factor_size")
    takes_team = True

    def __post_init__(self) -> None:
        self._check(order=tuple(_READOUTS))
        check_positive("lambda_safe", self.lambda_safe)
        if not (is_number(self.base) and 0 < self.base <= self.lambda_safe):
            raise ValueError(
                f"lambda_base must lie in (0, lambda_safe = {self.lambda_safe}], got "
                f"{show_value(self.lambda_base)}"
            )
        check_in_range("warm", self.warm, "[0, 1)")
        check_positive("power", self.power)

    @property
    def base(self) -> float:
        """λ_base in force."""
        if self.lambda_base is None:
            return min(1e-4, 0.1 * self.lambda_safe)
        return self.lambda_base

    @property
    def exponent(self) -> float:
        """Power of F̃⁻¹ in one application of the map."""
        if self.order == "split":
            return 0.5
        return 1.0

    def floor(self, step: int) -> float:
        """Return λ_t before a step (from 0); λ_safe from step T on (Eq. 18)."""
        height = self.lambda_safe - self.base
        warm = self.warm * self.steps
        if step < warm:
            return self.lambda_safe - height * step / warm
        progress = (step - warm) / (self.steps - warm)
        progress = min(1.0, progress)
        return self.base + height * progress**self.power

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        name = "ngd"
        if self.order != "split":
            name = f"ngd-{self.order}"
        return self._describe(name, lambda_base=self.base)

    def check_plan(self, steps: int, readout: str) -> None:
        """Refuse a plan that does not fit this schedule.

        Raises:
            ValueError: the schedule is longer than the run, or `order` needs another read-out.
        """
        readouts = _READOUTS[self.order]
        wanted = " or ".join(map(repr, readouts))
        if self.steps > steps:
            raise ValueError(
                f"NGD(steps={self.steps}) is longer than the {steps} steps of the plan, so the "
                f"floor would not come back to lambda_safe; use steps={steps}"
            )
        if readout not in readouts:
            raise ValueError(
                f"NGD(order={self.order!r}) needs PrivacyConfig(readout={wanted}), got {readout!r}"
            )

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
        team: RefreshGroup | None = None,
    ) -> PreconditionerState:
        """Measure F on the probe at the model's present parameters; arguments as in `KFAC.build`.

        Returns:
            The bases, the eigenvalues and the metric of this step; `metric_at` gives the metric of
            every step until the next refresh.

        Raises:
            ValueError: what the model gives on the probe is not finite, or the probe does not reach
                a layer.
        """
        with preserve_model(model), torch.no_grad():
            spec = self.probe_spec(step)
            layers, note = measure_fisher(model, capture, spec, self.max_factor_size, team)
        unreached = [name for name in rules or {} if name not in layers]
        if unreached:
            raise ValueError(
                f"the probe does not reach these layers: {', '.join(unreached)}. DP-NGD's scale is "
                "absolute, so they would be in other units; freeze them or use another probe"
            )
        floor = self.floor(step)
        metric = {}
        report = []
        spectra = {}
        for name, layer in layers.items():
            metric[name] = clamp_eigenvalues(layer.entry, layer.spectrum, floor, self.exponent)
            report += _report(name, layer, floor)
            spectra[name] = layer.spectrum
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            spectra=spectra,
            note=note,
        )

    def metric_at(self, state: PreconditionerState, step: int) -> Metric:
        """Return the metric of a step: the eigenvalues of the state under this step's floor."""
        floor = self.floor(step)
        metric = {}
        bases: Mapping[str, Any] = state.metric
        for name, entry in bases.items():
            clamped = clamp_eigenvalues(entry, state.spectra[name], floor, self.exponent)
            metric[name] = clamped.compact()
            if self.order == "before":
                metric[name] = PostNoiseWhitening(back=metric[name])
        return metric


def _report(name: str, layer: LayerFisher, floor: float) -> list[dict[str, Any]]:
    """Return one row a side, with the condition number of the layer before and after the clamp."""
    values = eigenvalues(layer.entry, layer.spectrum)
    low = 0
    count = 0
    for x in values.values():
        is_low = x <= floor
        low += int(is_low.sum())
        count += x.numel()
    note = f"{low / count:.0%} of the eigenvalues at the floor {floor:.3g}"
    if layer.note:
        note = f"{layer.note}; {note}"
    conditions = (condition(values), condition(values, floor))
    sides = {letter: side for side, letter in FACTOR_LETTERS.items()}
    rows = []
    for key, spectrum in layer.spectrum.items():
        row = report_row(
            name,
            side=sides.get(key, key),
            kind="eigenbasis" if key in sides else "diagonal",
            dim=spectrum.numel(),
            rank=int((spectrum > _LEAST).sum()),
            trace=float(spectrum.sum()),
            conditions=conditions,
            note=note,
        )
        rows.append(row)
    return rows
