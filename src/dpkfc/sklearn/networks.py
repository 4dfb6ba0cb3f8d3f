"""Small neural networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from dpkfc.sklearn.classifier import PrivateClassifier
from dpkfc.sklearn.estimator import PrivateEstimator
from dpkfc.sklearn.regressor import PrivateRegressor
from dpkfc.sklearn.values import read_count


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateNetwork(PrivateEstimator):
    """Holds what estimators with a small neural network do."""

    hidden_layer_sizes: Sequence[int] = (32,)

    def _build_module(self, outputs: int) -> nn.Module:
        """Return linear layers with tanh between them.

        Raises:
            ValueError: a width that is not an integer >= 1.
        """
        layers: list[nn.Module] = []
        before = self.n_features_in_
        for width in np.atleast_1d(self.hidden_layer_sizes):
            after = read_count("a width of hidden_layer_sizes", width)
            layers += [nn.Linear(before, after), nn.Tanh()]
            before = after
        return nn.Sequential(*layers, nn.Linear(before, outputs))


@dataclass(kw_only=True, eq=False, repr=False)
class DPMLPClassifier(_PrivateNetwork, PrivateClassifier):
    """A small neural network for classes under (ε, δ)-differential privacy.

    Other arguments and all attributes are as in `DPLogisticRegression`, without weights.

    Args:
        hidden_layer_sizes: widths of the hidden layers, which have tanh.

    Guarantee: As of `DPLogisticRegression`.
    """

    _fastest = 3.0


@dataclass(kw_only=True, eq=False, repr=False)
class DPMLPRegressor(_PrivateNetwork, PrivateRegressor):
    """A small neural network for numbers under (ε, δ)-differential privacy.

    Other arguments and attributes are as in `DPAdditiveRegressor`, without effects.

    Args:
        hidden_layer_sizes: widths of the hidden layers, which have tanh.
        learning_rate: of descent with momentum 0.9.

    Guarantee: As of `DPLogisticRegression`.
    """

    learning_rate: float = 0.1
    max_grad_norm: float | None = 1.0

    # Steps that go on: a rate at which plain descent learns a network in 100 steps is unstable on
    # rows of dozens of features.
    _momentum = 0.9
