"""scikit-learn estimators that train under (ε, δ)-differential privacy.

Every call of `fit` is one session with its own plan, and spends its ε. Nothing that a fit does
before noise depends on statistics of the rows: bounds, classes and weights are public numbers.
"""

from __future__ import annotations

from dpkfc.sklearn.additive_models import DPAdditiveClassifier, DPAdditiveRegressor
from dpkfc.sklearn.estimator import choose_clip
from dpkfc.sklearn.linear import DPLogisticRegression
from dpkfc.sklearn.networks import DPMLPClassifier, DPMLPRegressor
from dpkfc.sklearn.sklearn_checks import expected_failed_checks

__all__ = [
    "DPAdditiveClassifier",
    "DPAdditiveRegressor",
    "DPLogisticRegression",
    "DPMLPClassifier",
    "DPMLPRegressor",
    "choose_clip",
    "expected_failed_checks",
]
