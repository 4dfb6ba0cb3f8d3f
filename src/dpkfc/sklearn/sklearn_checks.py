"""The checks of scikit-learn that privacy excludes."""

from __future__ import annotations

from sklearn.base import BaseEstimator

from dpkfc.sklearn.classifier import PrivateClassifier


def expected_failed_checks(estimator: BaseEstimator) -> dict[str, str]:
    """Return the checks of scikit-learn that privacy excludes, each with its reason.

    Args:
        estimator: one of this module, for `check_estimator(estimator, expected_failed_checks=…)`.
    """
    two_fits = "compares two fits; noise is never seeded, so no two fits are equal"
    accuracy = "asks for an accuracy that ε does not allow on so few rows"
    checks = {
        "check_fit_idempotent": two_fits,
        "check_supervised_y_2d": two_fits,
        "check_classifier_data_not_an_array": two_fits,
        "check_regressor_data_not_an_array": two_fits,
        "check_regressors_int": two_fits,
        "check_classifiers_classes": accuracy,
        "check_classifiers_train": accuracy,
        "check_regressors_train": accuracy,
        "check_supervised_y_no_nan": "a private target must not decide whether a fit goes on",
    }
    if isinstance(estimator, PrivateClassifier):
        del checks["check_supervised_y_no_nan"]
    return checks
