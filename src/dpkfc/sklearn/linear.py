"""Logistic regression."""

from __future__ import annotations

from dataclasses import dataclass

from sklearn.utils.validation import check_is_fitted
from torch import nn

from dpkfc.sklearn.classifier import PrivateClassifier, merge_two_classes
from dpkfc.sklearn.values import Floats


@dataclass(kw_only=True, eq=False, repr=False)
class DPLogisticRegression(PrivateClassifier):
    """Logistic regression under (ε, δ)-differential privacy.

    Args:
        epsilon: ε of one `fit`.
        delta: δ of one `fit`. It should be far below 1 / n.
        bounds: public bounds of the features: one pair for all, or `[d, 2]`. Values outside are
            clamped. None warns and takes [-3, 3].
        classes: all labels that can occur. None warns and takes the labels of y as public.
        class_weights: label to a public number that multiplies the loss before the clip; 1 for
            labels that are left out.
        method: "dp-kfc" preconditions by curvature of noise, "dp-sgd" does not.
        steps: releases of one fit.
        batch_size: expected rows of a step. None takes all rows in every step.
        learning_rate: of gradient descent. None takes 4 (networks: 3), or less where C is long: a
            step is at most 3 long then.
        max_grad_norm: C, the norm to which the gradient of a row is clipped. None takes
            `choose_clip`.
        random_state: seed of initial weights and of the probe. Noise and sampling have no seed.

    Attributes:
        epsilon_: ε that the last fit has spent.
        delta_: δ of the last fit.
        classes_: the labels, in the order of probabilities.
        coef_, intercept_: weights `[K, d]` and `[K]` for features in their own units, inside the
            bounds; one row for two classes.
        n_features_in_: d.
        n_iter_: releases of the last fit.
        plan_: the plan of the last fit. `plan_.epsilon(k * plan_.steps)` is ε of k such fits.
        card_: the privacy card; `write_card` writes it with weights and ledger.
        module_: the trained module, on features that were mapped to [-1, 1].

    Guarantee: One `fit` is (`epsilon_`, `delta_`)-private for adding or removing one row. The
        number of rows, their types and all arguments are public.
    """

    def _build_module(self, outputs: int) -> nn.Module:
        layer = nn.Linear(self.n_features_in_, outputs)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    @property
    def coef_(self) -> Floats:
        """Return weights of the features in their own units `[K, d]`, `[1, d]` for two classes."""
        check_is_fitted(self, "module_")
        weight = self.module_.state_dict()["weight"].numpy()
        return merge_two_classes(weight / self.scales_)

    @property
    def intercept_(self) -> Floats:
        """Return intercepts `[K]`, `[1]` for two classes."""
        bias = self.module_.state_dict()["bias"].numpy()
        intercepts: Floats = merge_two_classes(bias) - self.coef_ @ self.centers_
        return intercepts
