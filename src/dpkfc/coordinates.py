"""The coordinates of a run: the preconditioner that is in force, its metric at a step, and when it is rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dpkfc.curvature.preconditioner import Preconditioner
from dpkfc.gradients.diagonal import diagonal_metric
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.tape import capture
from dpkfc.metric import Metric
from dpkfc.privacy.mechanism import Released

__all__ = ["Coordinates"]


class Coordinates:
    """Holds what `PrivacyConfig.preconditioner` builds. Functions of probes, released weights, releases and the step only.

    Args:
        config: with `due(step)` and `build(...)`; optionally `metric_at(preconditioner, step)` for a metric that changes
            between refreshes, `observe(released, past)` for one that is made from past releases, and `continues` for one whose
            refresh takes up the one before. None: the identity.
        model, layers: the model and its layers.
    """

    def __init__(self, config: Any, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._config, self._model, self._layers = config, model, layers
        self.current: Preconditioner | None = None
        self.past: Mapping[str, Tensor] = {}
        self._step = 0

    @property
    def metric(self) -> Metric:
        """The metric in which this step clips and adds noise."""
        if self.current is None:
            return {}
        changing = getattr(self._config, "metric_at", None)
        return self.current.metric if changing is None else changing(self.current, self._step)

    def refresh(self, step: int) -> None:
        """Rebuild the metric before a step, when its interval has passed."""
        self._step = step
        if self._config is None or not (self.current is None or self._config.due(step)):
            return
        if self.current is not None and self.current.step == step:
            return
        more: dict[str, Any] = {"previous": self.current} if getattr(self._config, "continues", False) else {}
        if hasattr(self._config, "observe"):
            more |= {"past": self.past, "diagonal": lambda scales: diagonal_metric(self._layers, scales)}
        rules = {layer.name: layer.rule for layer in self._layers}
        self.current = self._config.build(
            self._model, lambda model, loss: capture(model, self._layers, loss), step, rules=rules, **more
        )

    def observe(self, released: Released) -> None:
        """Let a preconditioner that is made from past releases see this one, in the coordinates it was released in."""
        if hasattr(self._config, "observe"):
            self.past = self._config.observe(released, self.past)
