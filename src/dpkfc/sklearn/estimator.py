"""What all estimators do: public scales, one session a fit, and the card."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from dpkfc._checks import check_one_of, check_positive
from dpkfc.checkpoint import StrPath
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.gradients.loss_function import LossFn
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import parse
from dpkfc.report.card import session_card
from dpkfc.report.card_files import LEDGER, ledger_bytes, write_weights_and_card
from dpkfc.rng_state import preserve_generators, seed_generators
from dpkfc.session import Session
from dpkfc.sklearn.values import (
    Floats,
    check_types,
    keep_types,
    parse_numbers,
    read_bounds,
    read_count,
    scale,
)
from dpkfc.weights import digest_weights

# The longest step of a classifier. Little noise makes C long, and a fast rate then made
# probabilities worse than a constant guess.
_LONGEST_STEP = 3.0

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
class PrivateEstimator(BaseEstimator):
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

    _methods: ClassVar[tuple[str, ...]] = ("dp-kfc", "dp-sgd")
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
        X = keep_types(X)
        shape = np.shape(X)
        if len(shape) != 2:
            raise ValueError(
                f"X has shape {shape}, not [n, d]. Reshape your data: X.reshape(-1, 1) for one"
                " feature, X.reshape(1, -1) for one row"
            )
        if np.iscomplexobj(X):
            raise ValueError("Complex data not supported: X holds complex numbers")
        check_types("X", X)
        if reset:
            # A fit that fails must not leave an earlier module behind new scales.
            self.__dict__.pop("module_", None)
        if hasattr(X, "iloc"):
            # pandas cannot put all of its types of columns into one array of another type.
            X = X.astype(object)
        rows = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
        return parse_numbers(np.asarray(rows))

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
        public = self._draw_public_inputs(len(public_targets), generator)
        head, inputs, public = self._split_off_features(module, inputs, public)
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
        self._note_noise(trained, session, generator)
        self.plan_ = plan
        self.epsilon_ = plan.epsilon(session.steps_done)
        self.delta_ = plan.delta
        self.n_iter_ = session.steps_done
        self.module_ = trained.double().eval()
        self.card_ = self._describe(session, seed)
        self._ledger_lines = ledger_bytes(session.ledger)
        self._released = digest_weights(self.module_.state_dict())

    def _split_off_features(
        self, module: nn.Module, inputs: Tensor, public: Tensor
    ) -> tuple[nn.Module, Tensor, Tensor]:
        """Return what is trained of a module, and its private and public inputs."""
        return module, inputs, public

    def _note_noise(self, trained: nn.Module, session: Session, generator: torch.Generator) -> None:
        """Note how large the noise in the trained weights is, where it is known."""

    def _draw_public_inputs(self, count: int, generator: torch.Generator) -> Tensor:
        """Return inputs of the module for rows that are uniform between the bounds."""
        drawn = 2 * torch.rand(count, self.n_features_in_, generator=generator) - 1
        return torch.as_tensor(self._encode_scaled(drawn.double().numpy()), dtype=torch.float32)

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
        check_one_of("method", self.method, self._methods)
        self._rate(likelihood, 1.0)
        check_positive("epsilon", self.epsilon)
        given: dict[str, Any] = {"steps": read_count("steps", self.steps)}
        if self.max_grad_norm is not None:
            check_positive("max_grad_norm", self.max_grad_norm)
            given["max_grad_norm"] = float(self.max_grad_norm)
        if self.batch_size is not None:
            given["expected_batch_size"] = min(count, read_count("batch_size", self.batch_size))
        config = self._make_config(
            count, seed, likelihood, max_physical_batch_size=_MOST_ROWS, **given
        )
        return config.calibrate(float(self.epsilon), self.delta, count)

    def _make_config(self, count: int, seed: int, likelihood: str, **given: Any) -> PrivacyConfig:
        """Return the configuration of one fit; settings that are given win."""
        settings = {
            "expected_batch_size": count,
            "max_grad_norm": choose_clip(count, self.n_features_in_, self.epsilon),
            "weight_average": _AVERAGE,
        }
        if self.method == "dp-kfc":
            settings["preconditioner"] = KFAC(
                probe=FeatureNoise(self.n_features_in_, std=_PROBE_STD),
                probe_size=_PROBE_SIZE,
                chunk=_PROBE_SIZE,
                likelihood=likelihood,
                every=given["steps"],
                seed=seed,
            )
        return PrivacyConfig(**{**settings, **given})

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


def choose_clip(count: int, features: int, epsilon: float) -> float:
    """Choose the clip norm from public numbers: √(n ε / (d + 1)) / 12.

    A small norm favours frequent classes, a large one brings more noise, which grows with
    (d + 1) / (n ε) over all weights. Without class weights no row of a linear model has a gradient
    above √(2 (d + 1)).

    Args:
        count: n, the rows of the fit.
        features: d.
        epsilon: of the fit.

    Source: the factor 12 was measured on generated tables and iris; see docs/sklearn.md.
    """
    chosen = math.sqrt(count * epsilon / (features + 1)) / 12
    return min(chosen, math.sqrt(2 * (features + 1)))
