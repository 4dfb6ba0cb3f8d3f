"""DP-NGD: natural gradients from public curvature with a floor on the eigenvalues that follows a schedule.

    every `every` steps   F = A ⊗ G of every layer on public data, F = Q Λ Qᵀ
    every step            Λ̃ = max(Λ, λ_t), λ_t by Eq. 18
    z_i = F̃^(−1/2) g_i,   clip_C(z_i),   + noise,   step F̃^(−1/2) z̄          `order="split"`, readout "natural"

F does not read private data, so the cost is that of DP-SGD. λ_t is absolute: losses are in the scale of one example, and
nothing rescales the metric. Norm layers, embeddings and every other parameter without a Kronecker product have the diagonal of
their Fisher information under the same floor, so that all parameters are in the same units.

Where the paper leaves things open: labels of the probe are drawn from the model (the Fisher information itself; public labels
need not fit the head); a layer with T positions has A = 1/n Σ a aᵀ and G = 1/(nT) Σ b bᵀ, so that tr(A ⊗ G) is E‖g‖²; the
clamp acts on the products Λ, not on the factors; F is measured anew at every refresh, on single views of the public data.

Source: DP-NGD, Algorithms 1 and 2, Eq. 16 to 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.eigenpairs import LayerFisher, clamped, condition, eigenvalues, fisher_of_layers, parted
from dpkfc.curvature.likelihood import LABELS, LIKELIHOODS
from dpkfc.curvature.preconditioner import Preconditioner
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.probing import Capture, ProbeRun, undisturbed
from dpkfc.curvature.settings import check_choices, check_positive, check_probe, described, run_of
from dpkfc.curvature.shares import Team
from dpkfc.metric import Entry, Kronecker, Metric

__all__ = ["NGD", "AfterClip"]

_READOUTS = {"split": ("natural", "whitened"), "after": ("whitened",), "before": ("inverse",)}
_LEAST = 1e-30  # eigenvalues below it are zero for the report


@dataclass(frozen=True)
class AfterClip(Kronecker):
    """The identity where examples are clipped; what `readout="inverse"` applies behind the noise is `back`."""

    back: Entry = field(kw_only=True)

    def inverse(self) -> Any:
        """`back`."""
        return self.back


@dataclass(frozen=True, kw_only=True)
class NGD:
    """How DP-NGD measures and clamps curvature. Use it with `PrivacyConfig(readout="natural")`.

    Attributes:
        probe: where inputs come from; the paper takes 500 public images, `PublicData(...)`.
        lambda_safe: λ_safe, the floor at the first and the last step; see `matched`.
        lambda_base: λ_base, the floor between them; None takes min(1e-4, 0.1 λ_safe). The same as λ_safe keeps it constant.
        steps: T, the length of the schedule; at most the steps of the plan.
        warm: share of T in which the floor sinks from λ_safe to λ_base.
        power: p, how late it rises again.
        every: steps between refreshes of F.
        labels: `model` draws them from the model's predictive distribution, `uniform` at random, `given` takes the probe's.
        likelihood, loss: as in `KFAC`.
        order: `split` clips F̃^(−1/2) g (DP-NGD with readout "natural"; with "whitened" the step is not mapped once more).
            The paper's ablations: `after` clips F̃⁻¹ g, with readout "whitened"; `before` clips g itself and maps by F̃⁻¹
            behind the noise, with readout "inverse".
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
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    order: str = "split"
    probe_size: int | None = None
    chunk: int = 64
    max_factor_size: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        check_probe(self.probe)
        check_choices(self, {"labels": LABELS, "likelihood": LIKELIHOODS, "order": tuple(_READOUTS)})
        check_positive(self, ("steps", "every", "probe_size", "chunk", "max_factor_size"))
        if not (self.lambda_safe > 0 and math.isfinite(self.lambda_safe)):
            raise ValueError(f"lambda_safe must be positive and finite, got {self.lambda_safe}; see NGD.matched")
        if not 0 < self.base <= self.lambda_safe:
            raise ValueError(f"lambda_base must lie in (0, lambda_safe = {self.lambda_safe}], got {self.lambda_base}")
        if not 0 <= self.warm < 1:
            raise ValueError(f"warm is a share of the steps in [0, 1), got {self.warm}")
        if not (self.power > 0 and math.isfinite(self.power)):
            raise ValueError(f"power must be positive and finite, got {self.power}")

    @classmethod
    def matched(cls, *, eta: float, clip: float, eta_sgd: float, clip_sgd: float, **settings: Any) -> NGD:
        """With the floor at which the largest step in parameter space is that of a tuned DP-SGD.

            λ_safe = (η C / (η_sgd C_sgd))²

        Args:
            eta: learning rate η of the run.
            clip: its `max_grad_norm`.
            eta_sgd: learning rate of DP-SGD on the same task and model.
            clip_sgd: its `max_grad_norm`.
            settings: of `NGD`.

        Source: DP-NGD, Eq. 16. It compares upper bounds: a heuristic, not a guarantee.

        Raises:
            ValueError: a number that is not positive and finite.
        """
        given = {"eta": eta, "clip": clip, "eta_sgd": eta_sgd, "clip_sgd": clip_sgd}
        for name, value in given.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        return cls(lambda_safe=(eta * clip / (eta_sgd * clip_sgd)) ** 2, **settings)

    @property
    def base(self) -> float:
        """λ_base in force."""
        return min(1e-4, 0.1 * self.lambda_safe) if self.lambda_base is None else self.lambda_base

    @property
    def exponent(self) -> float:
        """Power of F̃⁻¹ in one application of the map."""
        return 0.5 if self.order == "split" else 1.0

    def floor(self, step: int) -> float:
        """λ_t before a step (from 0); λ_safe from step T on (Eq. 18)."""
        safe, base, warm = self.lambda_safe, self.base, self.warm * self.steps
        if step < warm:
            return safe - (safe - base) * step / warm
        share = min(1.0, (step - warm) / (self.steps - warm))
        return base + (safe - base) * share**self.power

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        name = "ngd" if self.order == "split" else f"ngd-{self.order}"
        return described(self, name, lambda_base=self.base)

    def check_plan(self, steps: int, readout: str) -> None:
        """Raise where a plan and this schedule do not go together.

        Raises:
            ValueError: the schedule is longer than the run, or the read-out is not one of this order.
        """
        if self.steps > steps:
            raise ValueError(
                f"NGD(steps={self.steps}) is longer than the {steps} steps of the plan, so the floor would not come back to "
                f"lambda_safe; use steps={steps}"
            )
        if readout not in _READOUTS[self.order]:
            wanted = " or ".join(repr(r) for r in _READOUTS[self.order])
            raise ValueError(f"NGD(order={self.order!r}) needs PrivacyConfig(readout={wanted}), got {readout!r}")

    def due(self, step: int) -> bool:
        """Whether F is to be measured before this step (from 0)."""
        return step % self.every == 0

    def run_at(self, step: int) -> ProbeRun:
        """The probe of one refresh."""
        return run_of(self, step)

    @property
    def divides(self) -> bool:
        """Whether processes may each run a part of the probe; a loss that draws numbers of its own has to see all of it."""
        return self.loss is None

    def build(
        self, model: nn.Module, capture: Capture, step: int,
        rules: Mapping[str, str] | None = None, team: Team | None = None,
    ) -> Preconditioner:  # fmt: skip
        """Measure F on the probe at the model's present parameters; arguments as in `KFAC.build`.

        Returns:
            The bases, the eigenvalues and the metric of this very step; `metric_at` has that of every step until the next.

        Raises:
            ValueError: what the model gives on the probe is not finite, or the probe does not reach a layer.
        """
        with undisturbed(model), torch.no_grad():
            layers, note = fisher_of_layers(model, capture, self.run_at(step), self.max_factor_size, team)
        unreached = [name for name in rules or {} if name not in layers]
        if unreached:
            raise ValueError(
                f"the probe does not reach these layers: {', '.join(unreached)}. DP-NGD's scale is absolute, so a layer "
                "without curvature would be in other units; freeze it, or give a probe that reaches it"
            )
        floor = self.floor(step)
        return Preconditioner(
            metric={name: clamped(of.entry, of.spectrum, floor, self.exponent) for name, of in layers.items()},
            step=step,
            report=tuple(row for name, of in layers.items() for row in _rows(name, of, floor)),
            spectra={name: of.spectrum for name, of in layers.items()},
            shapes={name: of.shapes for name, of in layers.items()},
            note=note,
        )

    def metric_at(self, preconditioner: Preconditioner, step: int) -> Metric:
        """The metric of a step: the eigenvalues that are held, under this step's floor."""
        floor, spectra = self.floor(step), preconditioner.spectra
        entries = preconditioner.metric.items()
        metric = {name: parted(clamped(entry, spectra[name], floor, self.exponent)) for name, entry in entries}
        return {n: AfterClip(back=e) for n, e in metric.items()} if self.order == "before" else metric


def _rows(name: str, layer: LayerFisher, floor: float) -> list[dict[str, Any]]:
    """One row a side, with the condition number of the whole layer before and after the clamp."""
    values = eigenvalues(layer.entry, layer.spectrum)
    sides = {"A": "input", "G": "output"}
    low = sum(int((x <= floor).sum()) for x in values.values())
    total = sum(x.numel() for x in values.values())
    note = f"{low / total:.0%} of the eigenvalues at the floor {floor:.3g}"
    return [
        {
            "layer": name,
            "side": sides.get(side, side),
            "dim": spectrum.numel(),
            "kind": "eigenbasis" if side in sides else "diagonal",
            "rank": int((spectrum > _LEAST).sum()),
            "trace": float(spectrum.sum()),
            "condition_before": condition(values),
            "condition_after": condition(values, floor),
            "note": "; ".join(text for text in (layer.note, note) if text),
        }
        for side, spectrum in layer.spectrum.items()
    ]
