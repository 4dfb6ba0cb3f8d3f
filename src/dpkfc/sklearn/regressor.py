"""What regressors do: one output for a number between public bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sklearn.base import RegressorMixin
from torch import Tensor, nn

from dpkfc.sklearn.estimator import PrivateEstimator
from dpkfc.sklearn.values import (
    Floats,
    keep_types,
    parse_numbers,
    read_bounds,
    read_targets,
    scale,
)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):
    """Trains a module with one output for a number between public bounds."""

    target_bounds: Any = None

    def fit(self, X: Any, y: Any) -> Any:
        """Train under (ε, δ); each call spends its ε.

        Args:
            X: rows `[n, d]`. Values are clamped to `bounds`. NaN has an effect of its own in an
                additive model, and counts as their middle elsewhere.
            y: targets `[n]`, clamped to `target_bounds`. A record without a target (NaN)
                contributes nothing.

        Returns:
            The estimator itself.

        Raises:
            ValueError: shapes, types or settings that do not go together; before ε is spent.
        """
        rows = self._read_rows(X, reset=True)
        targets = parse_numbers(read_targets(self, keep_types(y), len(rows)))
        self._set_scale(keep_zero=False)
        bounds = self._set_target_scale()
        scaled = scale(targets, bounds, self.target_center_, self.target_half_width_)

        def loss_fn(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            features, targets = batch
            return 0.5 * (module(features).squeeze(1) - targets).square()

        self._train(
            rows,
            torch.as_tensor(scaled, dtype=torch.float32),
            loss_fn,
            outputs=1,
            likelihood="gaussian",
            public_targets=[torch.tensor(-0.5), torch.tensor(0.5)],
        )
        return self

    def _set_target_scale(self) -> Floats:
        """Set centre and half width of the target, and return its public bounds `[2]`."""
        bounds: Floats = read_bounds("target_bounds", self.target_bounds, 1)[0]
        low, high = bounds
        self.target_center_ = (low + high) / 2
        self.target_half_width_ = (high - low) / 2
        return bounds

    def predict(self, X: Any) -> Floats:
        """Return the predicted target of each row `[n]`, inside the target's bounds."""
        scaled = self._outputs(X)[:, 0].clip(-1.0, 1.0)
        predictions: Floats = scaled * self.target_half_width_ + self.target_center_
        return predictions
