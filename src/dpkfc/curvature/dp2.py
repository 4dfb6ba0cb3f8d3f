"""DP²: a diagonal metric made from the releases of the phase before, without public data.

Phases of s steps alternate, beginning with a plain one:

    plain      step g̃ (clipped to C₁);  G += g̃          at its end  v ← γ v + (1 − γ)(G/s)²
    adaptive   z_i = g_i ⊘ D,  D = √v,  clip_C₂(z_i),  + noise σ C₂;  the step is z̄

v is a function of releases alone, so every step costs what a step of DP-SGD does. v keeps the noise
of s averaged releases: its entries are too large by Φ/s, with Φ the variance of the noise in one
release. `corrected` subtracts that.

One C serves both phases: clipping g ⊘ D to C₂ is clipping (C₁/C₂) g ⊘ D to C₁, which gives the same
release up to that factor.

Source: Li et al. (2023), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_in_range, check_integer, check_one_of, check_positive
from dpkfc.curvature.base import Preconditioner, PreconditionerState, identity_row
from dpkfc.curvature.probe_pass import Capture
from dpkfc.linalg.metric import Metric

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

    def __post_init__(self) -> None:
        check_integer("phase", self.phase, 1)
        check_one_of("scale", self.scale, ("unit", "raw"))
        check_in_range("decay", self.decay, "[0, 1)")
        for name in ("floor", "clip_ratio", "ratio"):
            check_positive(name, getattr(self, name))

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        own: dict[str, Any] = {"name": "dp2", **asdict(self)}
        own["probe"] = dict(_PROBE)
        own["curvature_source"] = _PROBE["source"]
        own["uses_private_data"] = False
        return own

    @property
    def uses_past_releases(self) -> bool:
        """Whether a build reads what `observe` keeps of past releases: yes."""
        return True

    def is_adaptive(self, step: int) -> bool:
        """Return whether a step (from 0) lies in an adaptive phase."""
        return step // self.phase % 2 == 1

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, as `LambdaLR` takes it.

        The factor is 1 in plain phases and `ratio · clip_ratio` in adaptive ones, where a release
        is C₁/C₂ times that of the paper.
        """
        return self.ratio * self.clip_ratio if self.is_adaptive(step) else 1.0

    def is_due(self, step: int) -> bool:
        """Return whether a phase begins with this step (from 0)."""
        return step % self.phase == 0

    def observe(self, released: Any, past: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is kept of past releases after one more.

        Args:
            released: gradients, the variance of their noise, and their step.
            past: the last result of this function, empty at first.

        Returns:
            `sum/<parameter>` and `count` of the present plain phase; `v/<parameter>` and `updates`
            of the plain phases that have ended; `noise`, the variance of the noise in v.
        """
        if self.is_adaptive(released.step):
            return dict(past)
        zero = torch.zeros((), dtype=torch.float64)
        count = past.get("count", zero) + 1
        kept = {name: x for name, x in past.items() if not name.startswith("sum/")}
        sums: dict[str, Tensor] = {}
        for name, gradient in released.gradients.items():
            key = f"sum/{name}"
            sums[key] = gradient.detach() + past.get(key, 0.0)
        if not self.is_due(released.step + 1):
            return kept | {"count": count} | sums
        variance = torch.tensor(float(released.noise_variance), dtype=torch.float64)
        kept["noise"] = self._average(past.get("noise"), variance / count.cpu())
        kept["updates"] = past.get("updates", zero) + 1
        kept["count"] = zero
        for key, total in sums.items():
            moment = key.replace("sum/", "v/", 1)
            square = (total / float(count)).square()
            kept[moment] = self._average(past.get(moment), square)
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
        rules: Mapping[str, str] | None = None,
        *,
        past: Mapping[str, Tensor],
        diagonal: Callable[[Mapping[str, Tensor]], Metric],
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
        moments = {name.removeprefix("v/"): x for name, x in past.items() if name.startswith("v/")}
        if not is_adaptive or not moments:
            why = "no release of a plain phase was seen" if is_adaptive else "plain phase"
            report = tuple(identity_row(name, why) for name in rules or {})
            return PreconditionerState(metric={}, step=step, report=report)
        roots, floored = self._roots(moments, past)
        factor = 1 / self.clip_ratio
        metric = diagonal({name: factor / root for name, root in roots.items()})
        note = f"from past releases; {floored:.0%} of all entries at the floor"
        row = {"side": "weight", "kind": "diagonal"}
        report = tuple(identity_row(name, note) | row for name in metric)
        return PreconditionerState(metric=metric, step=step, report=report)

    def _roots(
        self, v: Mapping[str, Tensor], past: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], float]:
        """Return D of every parameter, and the fraction of entries at the floor."""
        noise = 0.0
        if self.corrected:
            bias = 1 - self.decay ** float(past["updates"])
            noise = float(past["noise"]) / bias
            v = {name: x / bias for name, x in v.items()}
        size = sum(x.numel() for x in v.values())
        mean = sum(float(x.sum(dtype=torch.float64)) for x in v.values()) / size
        least = max(self.floor * mean, 1e-300)
        moments: dict[str, Tensor] = {}
        total = 0.0
        floored = 0
        for name, x in v.items():
            moment = (x.double() - noise).clamp(min=least)
            moments[name] = moment
            total += float(moment.sum())
            floored += int((moment <= least).sum())
        unit = math.sqrt(total / size) if self.scale == "unit" else 1.0
        roots: dict[str, Tensor] = {}
        for name, moment in moments.items():
            root = moment.sqrt() / unit
            roots[name] = root.to(v[name].dtype)
        return roots, floored / size
