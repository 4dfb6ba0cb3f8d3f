"""scikit-learn estimators that train under (ε, δ)-differential privacy.

Every call of `fit` is one session with its own plan, and spends its ε. Nothing that a fit does
before noise depends on statistics of the rows: bounds, classes and weights are public numbers.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional

from dpkfc._checks import check_integer, check_not_negative, check_one_of, check_positive
from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.convex import STEPS, convex_config, convex_rate, mean_curvature, noise_covariance
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.features.additive import (
    AdditiveFeatures,
    AdditiveModel,
    Effect,
    InputColumn,
    choose_knots,
)
from dpkfc.gradients.clipped_sum import LossFn
from dpkfc.postprocess.pipeline import WeightEMA
from dpkfc.privacy.ledger import Ledger, parse
from dpkfc.report.card import LEDGER, ledger_bytes, session_card, write_weights_and_card
from dpkfc.rng_state import preserve_generators, seed_generators
from dpkfc.session import Session
from dpkfc.weights import digest_weights

__all__ = [
    "DPAdditiveClassifier",
    "DPAdditiveRegressor",
    "DPLogisticRegression",
    "DPMLPClassifier",
    "DPMLPRegressor",
    "expected_failed_checks",
]

Floats = NDArray[np.float64]
METHODS = ("dp-kfc", "dp-sgd")
# Of a linear head on rows of norm 1 at most.
MOMENTS = "dp-moments"

# The range of a feature, or of a target, that nobody has given bounds for.
STANDARD_BOUNDS = (-3.0, 3.0)

# The longest step of a classifier. Little noise makes C long, and a fast rate then made
# probabilities worse than a constant guess.
_LONGEST_STEP = 3.0

# The label of a record whose class is not among the public classes. Its loss and gradient are 0.
_NO_CLASS = -1

# The probe: noise with the spread of features between their bounds.
_PROBE_STD = 0.5
_PROBE_SIZE = 1024
# Weights of the last steps are averaged, which takes noise out. A release pays for all of it.
_AVERAGE = WeightEMA(0.95)
# Rows of a forward pass. It bounds memory and changes no result.
_MOST_ROWS = 4096

_FIXED_SETTINGS = "by the estimator's defaults and arguments; ε does not cover a search over them"
_NOT_PRIVATE = {
    "score, and what cross_val_score and GridSearchCV return": (
        "computed from the rows that they are given, without noise"
    )
}


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateEstimator(BaseEstimator):
    """Holds what all estimators do: public scales, one session a fit, and the card."""

    epsilon: float = 1.0
    delta: float = 1e-5
    bounds: Any = None
    method: str = "dp-kfc"
    steps: int = 100
    batch_size: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    random_state: Any = None

    # The rate where a setting leaves it open and C is short, and the momentum of all steps.
    _fastest = 4.0
    _momentum = 0.0

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: noise is never seeded; NaN and texts count as missing."""
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        return tags

    def _read_rows(self, X: Any, *, reset: bool) -> Floats:
        """Return the rows `[n, d]` in float64, NaN included; only shape and type are checked.

        Raises:
            ValueError: another shape or type. Messages of scikit-learn would print the rows.
        """
        shape = np.shape(X)
        if len(shape) != 2:
            raise ValueError(
                f"X has shape {shape}, not [n, d]. Reshape your data: X.reshape(-1, 1) for one"
                " feature, X.reshape(1, -1) for one row"
            )
        if np.iscomplexobj(X):
            raise ValueError("Complex data not supported: X holds complex numbers")
        if reset:
            # A fit that fails must not leave an earlier module behind new scales.
            self.__dict__.pop("module_", None)
        if hasattr(X, "iloc"):
            # pandas cannot put all of its types of columns into one array of another type.
            X = X.astype(object)
        rows = np.asarray(validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False))
        numbers = parse_numbers(rows)
        if reset and rows.dtype.kind not in "biuf":
            names = vars(self).get("feature_names_in_", range(numbers.shape[1]))
            _warn_of_texts(numbers, list(names))
        return numbers

    def _set_scale(self, *, keep_zero: bool) -> None:
        """Set bounds, centre and scale of every feature from public bounds alone.

        Args:
            keep_zero: whether 0 stays 0 in a feature that can be 0. Rows of indicators are then
                short, and clipped less.
        """
        pairs = read_bounds("bounds", self.bounds, self.n_features_in_)
        has_zero = pairs.prod(axis=1) <= 0
        self.bounds_ = pairs
        self.centers_ = np.where(keep_zero & has_zero, 0.0, pairs.mean(axis=1))
        self.scales_ = np.abs(pairs - self.centers_[:, None]).max(axis=1)

    def _scale(self, rows: Floats) -> Floats:
        """Return rows clamped to the bounds and mapped into [-1, 1]; NaN becomes 0."""
        return np.nan_to_num(scale(rows, self.bounds_.T, self.centers_, self.scales_))

    @abstractmethod
    def _build_module(self, outputs: int) -> nn.Module:
        """Return a module from `[n, d]` to `[n, outputs]` with its initial weights."""

    def _train(
        self,
        rows: Floats,
        targets: Tensor,
        loss_fn: LossFn,
        *,
        outputs: int,
        likelihood: str,
        public_targets: Sequence[Tensor],
    ) -> None:
        """Train a new module in one session, and store what was released.

        Args:
            rows: the private rows `[n, d]`.
            targets: the private targets `[n]`.
            loss_fn: of the session.
            outputs: width of the module's output.
            likelihood: of the preconditioner.
            public_targets: examples of targets, for the check on public rows.
        """
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        plan = self._plan(len(rows), seed, likelihood)
        fits = 1 + vars(self).get("_fits", 0)
        if fits > 1:
            warnings.warn(
                f"fit number {fits} of this estimator spends ε = {self.epsilon:g} again. On the"
                f" same rows {fits} such fits spend ε = {plan.epsilon(fits * plan.steps):.3g}.",
                UserWarning,
                stacklevel=3,
            )
        # The initial weights are a function of a public seed alone.
        with preserve_generators():
            seed_generators(seed)
            module = self._build_module(outputs)
        rate = self._rate(likelihood, plan.max_grad_norm)
        inputs = torch.as_tensor(self._encode(rows), dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        drawn = 2 * torch.rand(len(public_targets), self.n_features_in_, generator=generator) - 1
        public = torch.as_tensor(self._encode_scaled(drawn.double().numpy()), dtype=torch.float32)
        head: nn.Module = module
        if isinstance(module, AdditiveModel):
            _, public = module.split_off_features(public)
            head, inputs = module.split_off_features(inputs)
        optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=self._momentum)
        public_records = list(zip(public, public_targets, strict=True))
        with Session(
            plan, head, optimizer, (inputs, targets), public_records=public_records
        ) as session:
            # Before the first release, so that a fit that is cut off counts.
            self._fits = fits
            for batch in session.batches():
                session.step(batch, loss_fn)
            with session.averaged_weights():
                trained = copy.deepcopy(module)
            state = session.preconditioner
        if self.method == MOMENTS and state is not None:
            drawn = 2 * torch.rand(1024, self.n_features_in_, generator=generator) - 1
            encoded = self._encode_scaled(drawn.numpy())
            examples = torch.as_tensor(encoded, dtype=torch.float32)
            curvature = mean_curvature(trained, examples)
            self._covariance = noise_covariance(plan, state, rate, curvature)
        self.plan_ = plan
        self.epsilon_ = plan.epsilon(session.steps_done)
        self.delta_ = plan.delta
        self.n_iter_ = session.steps_done
        self.module_ = trained.double().eval()
        self.card_ = self._describe(session, seed)
        self._ledger_lines = ledger_bytes(session.ledger)
        self._released = digest_weights(self.module_.state_dict())

    def _encode(self, rows: Floats) -> Floats:
        """Return the inputs of the module for rows `[n, d]`, NaN included."""
        return self._scale(rows)

    def _encode_scaled(self, scaled: Floats) -> Floats:
        """Return the inputs of the module for rows in [-1, 1]."""
        return scaled

    def _rate(self, likelihood: str, clip: float) -> float:
        """Return the rate of gradient descent for a likelihood and C."""
        if self.learning_rate is None:
            return min(self._fastest, _LONGEST_STEP / clip)
        check_positive("learning_rate", self.learning_rate)
        return float(self.learning_rate)

    def _plan(self, count: int, seed: int, likelihood: str) -> Plan:
        """Return the plan of one fit of `count` rows."""
        check_one_of("method", self.method, METHODS)
        self._rate(likelihood, 1.0)
        check_positive("epsilon", self.epsilon)
        steps = read_count("steps", self.steps)
        preconditioner = None
        if self.method == "dp-kfc":
            preconditioner = KFAC(
                probe=FeatureNoise(self.n_features_in_, std=_PROBE_STD),
                probe_size=_PROBE_SIZE,
                chunk=_PROBE_SIZE,
                likelihood=likelihood,
                every=steps,
                seed=seed,
            )
        clip = self.max_grad_norm
        if clip is None:
            clip = choose_clip(count, self.n_features_in_, self.epsilon)
        check_positive("max_grad_norm", clip)
        batch_size = count
        if self.batch_size is not None:
            batch_size = read_count("batch_size", self.batch_size)
        return PrivacyConfig(
            expected_batch_size=min(batch_size, count),
            steps=steps,
            max_grad_norm=float(clip),
            preconditioner=preconditioner,
            weight_average=_AVERAGE,
            max_physical_batch_size=_MOST_ROWS,
        ).calibrate(float(self.epsilon), self.delta, count)

    def _describe(self, session: Session, seed: int) -> dict[str, Any]:
        """Return the privacy card of a fit."""
        settings = {name: str(value) for name, value in self.get_params(deep=False).items()}
        card = session_card(
            session,
            title=type(self).__name__,
            chosen_by=_FIXED_SETTINGS,
            not_private=_NOT_PRIVATE,
            settings=settings,
        )
        card["public_seeds"] = {"initial weights and probe": seed}
        return card

    def write_card(self, folder: StrPath) -> None:
        """Write ledger, weights and privacy card of the last fit into a folder.

        `dpkfc ledger verify FOLDER` compares the three. The ledger was in memory during the fit:
        a crash leaves no trace of what a fit had spent.

        Args:
            folder: a new or empty folder.

        Raises:
            NotFittedError: there was no fit.
            ValueError: the folder holds files, or `module_` holds weights that the fit did not
                make.
        """
        check_is_fitted(self, "module_")
        state = self.module_.state_dict()
        if digest_weights(state) != self._released:
            raise ValueError("module_ was changed since the fit, which a card is about; fit again")
        path = Path(folder)
        if path.is_dir() and any(path.iterdir()):
            raise ValueError(f"folder={str(path)!r} holds files; give a new or empty folder")
        ledger = Ledger(parse(self._ledger_lines, LEDGER), None, None, None)
        write_weights_and_card(path, state, ledger, self.card_)

    @torch.no_grad()
    def _outputs(self, X: Any) -> Floats:
        """Return the module's outputs `[n, outputs]` for rows."""
        check_is_fitted(self, "module_")
        rows = self._read_rows(X, reset=False)
        outputs: Floats = self.module_(torch.from_numpy(self._encode(rows))).numpy()
        return outputs


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateClassifier(ClassifierMixin, _PrivateEstimator):
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
                    f"y has type {labels.dtype} and classes are texts, so no label is a class: give"
                    " both as texts or both as numbers"
                )
            # One text among numbers made texts of all.
            return parse_numbers(labels) if labels.dtype.kind == "U" and not are_texts else labels
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


@dataclass(kw_only=True, eq=False, repr=False)
class _AdditiveEstimator(_PrivateEstimator):
    """Holds what additive models do: a linear head on features of norm 1 at most."""

    method: str = MOMENTS
    steps: int = STEPS

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

    def _plan(self, count: int, seed: int, likelihood: str) -> Plan:
        """Return the plan of one fit of `count` rows."""
        check_one_of("method", self.method, (MOMENTS,))
        self._rate(likelihood, 1.0)
        check_positive("epsilon", self.epsilon)
        settings: dict[str, Any] = {"steps": read_count("steps", self.steps)}
        if self.max_grad_norm is not None:
            check_positive("max_grad_norm", self.max_grad_norm)
            settings["max_grad_norm"] = float(self.max_grad_norm)
        if self.batch_size is not None:
            batch_size = read_count("batch_size", self.batch_size)
            settings["expected_batch_size"] = min(batch_size, count)
        features = AdditiveFeatures(self._columns, choose_knots(self._columns))
        return convex_config(
            count,
            float(self.epsilon),
            self.delta,
            features.features,
            likelihood,
            max_physical_batch_size=_MOST_ROWS,
            **settings,
        ).calibrate(float(self.epsilon), self.delta, count)

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
class _PrivateNetwork(_PrivateEstimator):
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
class DPLogisticRegression(_PrivateClassifier):
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


@dataclass(kw_only=True, eq=False, repr=False)
class DPAdditiveClassifier(_AdditiveEstimator, _PrivateClassifier):
    """An additive model for classes under (ε, δ)-differential privacy: a curve for each feature.

    Arguments and attributes are as in `DPLogisticRegression`, without weights. 30 % of μ² buy noisy
    second moments of the features, in whose coordinates all steps go. `effects` returns the curves
    with the deviation of their noise. Bounds decide where a curve has its places.

    Guarantee: As of `DPLogisticRegression`.
    """

    _keeps_zero = False


@dataclass(kw_only=True, eq=False, repr=False)
class DPMLPClassifier(_PrivateNetwork, _PrivateClassifier):
    """A small neural network for classes under (ε, δ)-differential privacy.

    Other arguments and all attributes are as in `DPLogisticRegression`, without weights.

    Args:
        hidden_layer_sizes: widths of the hidden layers, which have tanh.

    Guarantee: As of `DPLogisticRegression`.
    """

    _fastest = 3.0


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateRegressor(RegressorMixin, _PrivateEstimator):
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


@dataclass(kw_only=True, eq=False, repr=False)
class DPAdditiveRegressor(_AdditiveEstimator, _PrivateRegressor):
    """An additive model for numbers under (ε, δ)-differential privacy: a curve for each feature.

    Other arguments and attributes are as in `DPAdditiveClassifier`, without classes.

    Args:
        target_bounds: public bounds of the target. Targets outside are clamped, and so are
            predictions. None warns and takes [-3, 3].

    Guarantee: As of `DPLogisticRegression`.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class DPMLPRegressor(_PrivateNetwork, _PrivateRegressor):
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


# --------------------------------------------------------------------------------------------------


def read_bounds(name: str, bounds: Any, count: int) -> Floats:
    """Return public bounds as pairs `[count, 2]`; warn and take a standard range without any.

    Raises:
        ValueError: another shape, or a pair that is not low < high and finite.
    """
    if bounds is None:
        warnings.warn(
            f"{name}= is not given: values are clamped to {list(STANDARD_BOUNDS)}. Give public"
            " bounds; bounds taken from the rows are private.",
            UserWarning,
            stacklevel=4,
        )
        bounds = STANDARD_BOUNDS
    try:
        pairs = np.asarray(bounds, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must hold numbers: a pair (low, high), or one a column") from None
    if pairs.shape == (2,):
        pairs = np.tile(pairs, (count, 1))
    if pairs.shape != (count, 2):
        raise ValueError(
            f"{name} must be a pair or have shape ({count}, 2), got shape {pairs.shape}"
        )
    is_wrong = ~(np.isfinite(pairs).all(axis=1) & (pairs[:, 0] < pairs[:, 1]))
    if is_wrong.any():
        column = int(is_wrong.argmax())
        raise ValueError(f"{name} of column {column} must be low < high, got {pairs[column]}")
    return pairs


def choose_clip(count: int, features: int, epsilon: float) -> float:
    """Choose the clip norm from public numbers: √(n ε / (d + 1)) / 12.

    A small norm favours frequent classes, a great one brings more noise; the noise of all weights
    goes with (d + 1) / (n ε). Without class weights no
    row of a linear model has a gradient above √(2 (d + 1)).

    Args:
        count: n, the rows of the fit.
        features: d.
        epsilon: of the fit.

    Source: the factor 12 was measured on generated tables and iris; see docs/sklearn.md.
    """
    chosen = math.sqrt(count * epsilon / (features + 1)) / 12
    return min(chosen, math.sqrt(2 * (features + 1)))


def read_count(name: str, value: Any) -> int:
    """Return a setting as an integer >= 1, of NumPy's types too.

    Raises:
        ValueError: the setting is something else.
    """
    with contextlib.suppress(TypeError):
        value = operator.index(value)
    check_integer(name, value, 1)
    return int(value)


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


def read_targets(estimator: BaseEstimator, y: Any, count: int) -> NDArray[Any]:
    """Return y as an array `[n]`; only its shape and type are checked.

    Raises:
        ValueError: no y, another length or shape, or complex numbers.
    """
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
    targets = column_or_1d(y, warn=True)
    if np.iscomplexobj(targets):
        raise ValueError("Complex data not supported: y holds complex numbers")
    if len(targets) != count:
        raise ValueError(f"X has {count} rows and y has {len(targets)}: give one target a row")
    return targets


def merge_two_classes(rows: Floats) -> Floats:
    """Return the second row less the first, if the rows belong to two classes."""
    return rows[1:] - rows[:1] if len(rows) == 2 else rows


def keep_types(y: Any) -> Any:
    """Return a list as an array of objects: one text among numbers would make texts of all."""
    return np.asarray(y, dtype=object) if isinstance(y, list | tuple) else y


def parse_numbers(values: NDArray[Any]) -> Floats:
    """Return numbers of the same shape, NaN where a value is not a number.

    Each value is read alone: one that is not a number gives neither an error nor a warning.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if values.dtype.kind in "biuf":
            return values.astype(np.float64)
        numbers = [_parse_number(value) for value in values.ravel().tolist()]
    return np.array(numbers, np.float64).reshape(values.shape)


def _warn_of_texts(numbers: Floats, names: Sequence[Any]) -> None:
    """Warn the owner of columns that hardly hold a number, and so say nothing.

    The rows decide which, so the warning is marked private; one row cannot decide alone.
    """
    unread = np.isnan(numbers).mean(axis=0) > 0.5
    texts = [repr(name)[:30] for name, is_text in zip(names, unread, strict=True) if is_text]
    if texts:
        more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
        warnings.warn(
            f"for you alone (PRIVATE): {', '.join(texts[:2])}{more} of X hold hardly any number"
            " and count as missing; encode texts by public categories",
            UserWarning,
            stacklevel=4,
        )


def _parse_number(value: Any) -> float:
    try:
        return float(value)
    # Whatever an object raises that is not a number.
    except Exception:
        return float("nan")


def scale(values: Floats, bounds: Any, center: Any, half_width: Any) -> Floats:
    """Return values clamped to public bounds and mapped into [-1, 1]; NaN stays."""
    low, high = bounds
    with np.errstate(all="ignore"):
        scaled: Floats = (values.clip(low, high) - center) / half_width
    return scaled.clip(-1.0, 1.0)


def encode_classes(labels: Sequence[Any], classes: Sequence[Any]) -> list[int]:
    """Return the place of each label among the classes, `_NO_CLASS` for another label."""
    positions = {label: position for position, label in enumerate(classes)}
    codes = []
    for label in labels:
        try:
            code = positions.get(label, _NO_CLASS)
        except TypeError:
            # A label without a hash, such as a list.
            code = _NO_CLASS
        codes.append(code)
    return codes


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
    if isinstance(estimator, _PrivateClassifier):
        del checks["check_supervised_y_no_nan"]
    return checks
