"""DP²: a diagonal metric made from the releases of the phase before, without public data.

Phases of s steps alternate, beginning with a plain one:

    plain      step g̃ (clipped to C₁);  G += g̃          at its end  v ← γ v + (1 − γ)(G/s)²
    adaptive   z_i = g_i ⊘ D,  D = √v,  clip_C₂(z_i),  + noise σ C₂;  the step is z̄ (nothing is mapped back)

v is a function of releases alone, so every step costs what a step of DP-SGD does. The noise of s averaged releases is left in
v: its entries are too large by Φ/s with Φ the variance of the noise in one release; `corrected` subtracts it.

One C serves both phases: clipping g ⊘ D to C₂ is clipping (C₁/C₂) g ⊘ D to C₁, the same release but for that factor.

Source: Li et al. (2023), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import check_choices, check_positive
from dpkfc.curvature.damping import identity_row
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.curvature.probe_pass import Capture
from dpkfc.linalg.metric import Metric

_PROBE = {"kind": "past releases", "source": "past releases"}


@dataclass(frozen=True, kw_only=True)
class DP2:
    """How a delayed preconditioner is made.

    Attributes:
        phase: s, steps of a phase; plain and adaptive ones alternate.
        decay: γ of the second moments over phases.
        floor: least second moment, as a share of their mean over the model.
        clip_ratio: C₂ / C₁; `max_grad_norm` is C₁.
        ratio: learning rate of adaptive phases over that of plain ones; see `learning_rate_factor`.
        corrected: subtract Φ/s from the bias-corrected second moments before the floor.
        scale: `unit` divides D by its root mean square, so that C and learning rate keep their meaning; `raw` takes D.
    """

    phase: int
    decay: float = 0.9
    floor: float = 1e-2
    clip_ratio: float = 1.0
    ratio: float = 1.0
    corrected: bool = False
    scale: str = "unit"

    def __post_init__(self) -> None:
        check_positive(self, ("phase",))
        check_choices(self, {"scale": ("unit", "raw")})
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        for name in ("floor", "clip_ratio", "ratio"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        more = {"probe": dict(_PROBE), "curvature_source": _PROBE["source"], "uses_private_data": False}
        return {"name": "dp2", **asdict(self), **more}

    def is_adaptive(self, step: int) -> bool:
        """Whether a step (from 0) lies in an adaptive phase."""
        return step // self.phase % 2 == 1

    def learning_rate_factor(self, step: int) -> float:
        """What to multiply the learning rate of plain phases with at a step, as `LambdaLR` takes it.

        1 in plain phases; `ratio · clip_ratio` in adaptive ones, where a release is C₁/C₂ times that of the paper.
        """
        return self.ratio * self.clip_ratio if self.is_adaptive(step) else 1.0

    def due(self, step: int) -> bool:
        """Whether a phase begins with this step (from 0)."""
        return step % self.phase == 0

    def observe(self, released: Any, past: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is kept of the releases, after one more.

        Args:
            released: gradients, the variance of their noise, and the step they belong to.
            past: as this function returned it last, empty at first.

        Returns:
            `sum/<parameter>` and `count` of the plain phase that runs, `v/<parameter>` and `updates` of those that are
            over, and `noise`, the variance of the noise in v without its decay.
        """
        if self.is_adaptive(released.step):
            return dict(past)
        with torch.no_grad():
            kept = {name: x for name, x in past.items() if not name.startswith("sum/")}
            sums = {name: g.detach() + past.get(f"sum/{name}", 0.0) for name, g in released.gradients.items()}
            count = past.get("count", torch.zeros((), dtype=torch.float64)) + 1
            if not self.due(released.step + 1):
                return kept | {"count": count} | {f"sum/{name}": x for name, x in sums.items()}
            variance = torch.as_tensor(float(released.noise_variance), dtype=torch.float64) / count.cpu()
            kept["noise"] = self._averaged(past.get("noise"), variance)
            kept["updates"] = past.get("updates", torch.zeros((), dtype=torch.float64)) + 1
            kept["count"] = torch.zeros((), dtype=torch.float64)
            new = {f"v/{n}": self._averaged(past.get(f"v/{n}"), (x / float(count)).square()) for n, x in sums.items()}
        return kept | new

    def _averaged(self, before: Tensor | None, new: Tensor) -> Tensor:
        return (1 - self.decay) * new + (0.0 if before is None else self.decay * before.to(new.device))

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Mapping[str, str] | None = None,
        *,
        past: Mapping[str, Tensor],
        diagonal: Callable[[Mapping[str, Tensor]], Metric],
    ) -> Preconditioner:
        """The metric of the phase that this step begins: the identity, or 1/D.

        Args:
            model: not read.
            capture: not read.
            step: the first step of a phase.
            rules: layer name to kind.
            past: from `observe`.
            diagonal: makes a metric of positive factors, parameter name to tensor of its shape.
        """
        v = {name.removeprefix("v/"): x for name, x in past.items() if name.startswith("v/")}
        if not (self.is_adaptive(step) and v):
            why = "plain phase" if v or not self.is_adaptive(step) else "no release of a plain phase was seen"
            return Preconditioner(metric={}, step=step, report=tuple(identity_row(name, why) for name in rules or {}))
        roots, floored = self._roots(v, past)
        metric = diagonal({name: (1 / self.clip_ratio) / root for name, root in roots.items()})
        rows = (self._row(name, floored) for name in metric)
        return Preconditioner(metric=metric, step=step, report=tuple(rows))

    def _roots(self, v: Mapping[str, Tensor], past: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """D of every parameter, and the share of entries at the floor."""
        size = sum(x.numel() for x in v.values())
        if self.corrected:
            bias = 1 - self.decay ** float(past["updates"])
            v = {name: x / bias for name, x in v.items()}
        mean = sum(float(x.sum(dtype=torch.float64)) for x in v.values()) / size
        least = max(self.floor * mean, 1e-300)
        noise = float(past["noise"]) / bias if self.corrected else 0.0
        moments = {name: (x.double() - noise).clamp(min=least) for name, x in v.items()}
        floored = sum(float((m <= least).sum()) for m in moments.values()) / size
        unit = 1.0
        if self.scale == "unit":
            unit = math.sqrt(sum(float(m.sum()) for m in moments.values()) / size)
        return {name: (m.sqrt() / unit).to(v[name].dtype) for name, m in moments.items()}, floored

    def _row(self, name: str, floored: float) -> dict[str, Any]:
        note = f"from past releases; {floored:.0%} of all entries at the floor"
        return {**identity_row(name, note), "side": "weight", "kind": "diagonal"}
