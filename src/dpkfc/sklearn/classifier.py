"""What classifiers do: public classes, and logits as outputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn
from torch.nn import functional

from dpkfc._checks import check_not_negative
from dpkfc.sklearn.estimator import PrivateEstimator
from dpkfc.sklearn.values import Floats, keep_types, read_targets

# The label of a record whose class is not among the public classes. Its loss and gradient are 0.
_NO_CLASS = -1


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, PrivateEstimator):
    """Trains a module whose outputs are the logits of public classes."""

    classes: Any = None
    class_weights: Mapping[Any, float] | None = None

    # Whether 0 stays 0 in a feature that can be 0.
    _keeps_zero = True

    def fit(self, X: Any, y: Any) -> Any:
        """Train under (ε, δ); each call spends its ε.

        Args:
            X: rows `[n, d]`. Values are clamped to `bounds`. NaN has an effect of its own
                in an additive model; elsewhere it counts as 0, or as the middle of bounds without
                0.
            y: labels `[n]`. A record with a label outside `classes` contributes nothing.

        Returns:
            The estimator itself.

        Raises:
            ValueError: shapes, types or settings that do not go together; before ε is spent.
        """
        rows = self._read_rows(X, reset=True)
        labels = self._read_labels(y, len(rows))
        self._set_scale(keep_zero=self._keeps_zero)
        classes = self.classes_.tolist()
        if len(classes) < 2:
            raise ValueError(f"a classifier needs two classes or more, got 1 class: {classes}")
        weights = read_class_weights(self.class_weights, classes)
        codes = torch.tensor(encode_classes(labels.tolist(), classes))

        def loss_fn(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            features, codes = batch
            return functional.cross_entropy(
                module(features),
                codes,
                weight=weights,
                ignore_index=_NO_CLASS,
                reduction="none",
            )

        self._train(
            rows,
            codes,
            loss_fn,
            outputs=len(classes),
            likelihood="categorical",
            public_targets=list(torch.arange(len(classes))),
        )
        return self

    def _read_labels(self, y: Any, count: int) -> NDArray[Any]:
        """Return the labels `[n]`, and set `classes_`."""
        if self.classes is not None:
            try:
                if isinstance(self.classes, str):
                    raise TypeError  # its letters are not labels
                known = list(self.classes)
                np.sort(np.array(known, dtype=object))  # labels of two types have no order
            except TypeError:
                raise ValueError(
                    f"classes must list labels of one type, as [0, 1], got {self.classes!r:.60}"
                ) from None
            self.classes_ = np.unique(np.asarray(known))
            labels = read_targets(self, keep_types(y), count)
            are_texts = self.classes_.dtype.kind == "U"
            if are_texts and labels.dtype.kind in "biuf":
                raise ValueError(
                    f"y has type {labels.dtype} and classes are texts: give both as texts, or where"
                    " scikit-learn numbers labels (docs/sklearn.md) classes=range(K)"
                )
            return labels
        labels = read_targets(self, y, count)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels)
        warnings.warn(
            "classes= is not given: the set of labels in y is taken as public. Give all possible"
            " labels if whether one occurs is private.",
            UserWarning,
            stacklevel=3,
        )
        return labels

    def decision_function(self, X: Any) -> Floats:
        """Return logits `[n, K]`; for two classes log odds of the second `[n]`."""
        logits = merge_two_classes(self._outputs(X).T)
        return logits[0] if len(logits) == 1 else logits.T

    def predict_proba(self, X: Any) -> Floats:
        """Return the probabilities of `classes_` `[n, K]`."""
        return torch.from_numpy(self._outputs(X)).softmax(dim=1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label of each row `[n]`."""
        positions = self._outputs(X).argmax(axis=1)
        return self.classes_[positions]


def read_class_weights(weights: Mapping[Any, float] | None, classes: Sequence[Any]) -> Tensor:
    """Return one public weight a class `[K]`, 1 where no weight is given.

    Raises:
        ValueError: no mapping, a label that is not among the classes, or a weight that is negative.
    """
    weights = weights or {}
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"class_weights must map labels to public numbers, got {weights!r:.40}; counts of"
            " labels are private"
        )
    for label, weight in weights.items():
        if label not in classes:
            raise ValueError(
                f"class_weights names {label!r:.40}, which is not among the classes; leave it out"
                " or list it"
            )
        check_not_negative(f"class_weights[{label!r}]", weight)
    return torch.tensor([float(weights.get(label, 1.0)) for label in classes])


def merge_two_classes(rows: Floats) -> Floats:
    """Return the second row less the first, if the rows belong to two classes."""
    return rows[1:] - rows[:1] if len(rows) == 2 else rows


def encode_classes(labels: Sequence[Any], classes: Sequence[Any]) -> list[int]:
    """Return the place of each label among the classes, `_NO_CLASS` for another label.

    The text "1" is the class 1, and the number 1 the class "1". Each label is read alone.
    """
    positions = {label: position for position, label in enumerate(classes)}
    return [_find_class(positions, label) for label in labels]


def _find_class(positions: Mapping[Any, int], label: Any) -> int:
    # Whatever a label raises that is not a number, or has no hash.
    with suppress(Exception):
        if label in positions:
            return positions[label]
        return positions[float(label) if isinstance(label, str) else str(label)]
    return _NO_CLASS
