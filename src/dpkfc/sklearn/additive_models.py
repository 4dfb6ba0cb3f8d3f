"""Additive models: a curve for each feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.convex import STEPS, convex_config, convex_rate
from dpkfc.features.additive import (
    AdditiveFeatures,
    AdditiveModel,
    Effect,
    InputColumn,
    choose_knots,
)
from dpkfc.session import Session
from dpkfc.sklearn.classifier import PrivateClassifier
from dpkfc.sklearn.estimator import PrivateEstimator
from dpkfc.sklearn.regressor import PrivateRegressor
from dpkfc.sklearn.values import Floats, scale
from dpkfc.weight_noise import mean_curvature, noise_covariance

# Of a linear head on rows of norm 1 at most.
MOMENTS = "dp-moments"


@dataclass(kw_only=True, eq=False, repr=False)
class _AdditiveEstimator(PrivateEstimator):
    """Holds what additive models do: a linear head on features of norm 1 at most."""

    method: str = MOMENTS
    steps: int = STEPS

    _methods: ClassVar[tuple[str, ...]] = (MOMENTS,)

    @property
    def _columns(self) -> list[InputColumn]:
        names = vars(self).get("feature_names_in_", range(self.n_features_in_))
        return [InputColumn(str(name), 1, 1) for name in names]

    def _encode(self, rows: Floats) -> Floats:
        """Return each value in [-1, 1], and behind it 1 where it is missing `[n, 2 d]`."""
        return self._encode_scaled(scale(rows, self.bounds_.T, self.centers_, self.scales_))

    def _encode_scaled(self, scaled: Floats) -> Floats:
        is_missing = np.isnan(scaled)
        pairs = np.stack([np.nan_to_num(scaled), is_missing], axis=2)
        return pairs.reshape(len(scaled), -1).astype(np.float64)

    def _build_module(self, outputs: int) -> nn.Module:
        return AdditiveModel(self._columns, outputs)

    def _rate(self, likelihood: str, clip: float) -> float:
        if self.learning_rate is None:
            return convex_rate(likelihood)
        return super()._rate(likelihood, clip)

    def _make_config(self, count: int, seed: int, likelihood: str, **given: Any) -> PrivacyConfig:
        features = AdditiveFeatures(self._columns, choose_knots(self._columns)).features
        return convex_config(count, float(self.epsilon), self.delta, features, likelihood, **given)

    def _split_off_features(
        self, module: nn.Module, inputs: Tensor, public: Tensor
    ) -> tuple[nn.Module, Tensor, Tensor]:
        additive: Any = module
        head, features = additive.split_off_features(inputs)
        return head, features, additive.split_off_features(public)[1]

    def _note_noise(self, trained: nn.Module, session: Session, generator: torch.Generator) -> None:
        state = session.preconditioner
        if state is not None:
            examples = self._draw_public_inputs(1024, generator)
            curvature = mean_curvature(trained, examples)
            rate = session.optimizer.param_groups[0]["lr"]
            self._covariance = noise_covariance(session.plan, state, rate, curvature)

    def effects(self) -> list[Effect]:
        """Return what each feature adds to the outputs, with the deviation of its noise.

        The last value of each stands for a missing one. Classes are compared with their mean.

        Raises:
            NotFittedError: there was no fit.
        """
        check_is_fitted(self, "module_")
        module: Any = self.module_
        found: list[Effect] = module.effects(vars(self).get("_covariance"))
        return found


@dataclass(kw_only=True, eq=False, repr=False)
class DPAdditiveClassifier(_AdditiveEstimator, PrivateClassifier):
    """An additive model for classes under (ε, δ)-differential privacy: a curve for each feature.

    Arguments and attributes are as in `DPLogisticRegression`, without weights. 30 % of μ² buy noisy
    second moments of the features, in whose coordinates all steps go. `effects` returns the curves
    with the deviation of their noise. Bounds decide where a curve has its places.

    Guarantee: As of `DPLogisticRegression`.
    """

    _keeps_zero = False


@dataclass(kw_only=True, eq=False, repr=False)
class DPAdditiveRegressor(_AdditiveEstimator, PrivateRegressor):
    """An additive model for numbers under (ε, δ)-differential privacy: a curve for each feature.

    Other arguments and attributes are as in `DPAdditiveClassifier`, without classes.

    Args:
        target_bounds: public bounds of the target. Targets outside are clamped, and so are
            predictions. None warns and takes [-3, 3].

    Guarantee: As of `DPLogisticRegression`.
    """
