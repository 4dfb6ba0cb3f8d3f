"""The scikit-learn estimators: what they release, refuse, and do not look at."""

import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.ensemble import VotingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.utils.estimator_checks import check_estimator

from dpkfc.report.verify import verify_ledger
from dpkfc.session import Session
from dpkfc.sklearn import (
    DPAdditiveClassifier,
    DPAdditiveRegressor,
    DPLogisticRegression,
    DPMLPClassifier,
    DPMLPRegressor,
    choose_clip,
    expected_failed_checks,
)

ESTIMATORS = [
    DPLogisticRegression,
    DPAdditiveClassifier,
    DPAdditiveRegressor,
    DPMLPClassifier,
    DPMLPRegressor,
]
QUIET = {"bounds": (-10, 10), "classes": [0, 1, 2]}


@pytest.fixture(scope="module")
def blobs():
    return make_blobs(200, centers=3, random_state=0, cluster_std=0.5)


@pytest.fixture(scope="module")
def fitted(blobs):
    return DPLogisticRegression(epsilon=3, steps=30, **QUIET).fit(*blobs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_scikit_learn_finds_no_fault_that_is_not_listed(kind, monkeypatch):
    # Its checks fit more than a hundred times; one step has the same interface.
    monkeypatch.setattr("dpkfc.sklearn.estimator._PROBE_SIZE", 64)
    estimator = kind(steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            estimator,
            expected_failed_checks=expected_failed_checks(estimator),
            on_fail=None,
            on_skip=None,
        )
    failed = [r["check_name"] for r in results if r["status"] == "failed"]
    assert not failed
    assert sum(r["status"] == "passed" for r in results) >= 35


def test_a_fit_states_what_it_spent(fitted, blobs):
    assert 2.9 < fitted.epsilon_ <= 3 and fitted.delta_ == 1e-5
    assert fitted.n_iter_ == 30 == fitted.plan_.steps
    assert fitted.plan_.certified
    assert fitted.score(*blobs) > 0.7
    assert fitted.predict_proba(blobs[0]).sum(axis=1) == pytest.approx(np.ones(200))
    assert fitted.plan_.epsilon(2 * 30) < 2 * fitted.epsilon_


def test_noise_has_no_seed(blobs):
    estimator = DPLogisticRegression(random_state=0, steps=3, **QUIET)
    first = clone(estimator).fit(*blobs)
    second = clone(estimator).fit(*blobs)
    assert not np.array_equal(first.coef_, second.coef_)
    assert first.plan_.hash == second.plan_.hash


def test_what_lies_outside_counts_as_the_bound_and_nan_as_the_middle(fitted):
    rows = np.array([[np.inf, -1e9], [10, -10], [np.nan, 2.0], [0.0, 2.0]])
    scores = fitted.decision_function(rows)
    assert np.array_equal(scores[0], scores[1])
    assert np.array_equal(scores[2], scores[3])


def test_a_classifier_keeps_the_zero_of_a_feature_that_can_be_zero():
    rows, labels = np.array([[0.0, 0, 5], [1, -4, 9], [np.nan, 4, 7]]), [0, 1, 1]
    settings = {"bounds": [(0, 1), (-4, 2), (5, 9)], "classes": [0, 1], "steps": 1}
    estimator = DPLogisticRegression(**settings).fit(rows, labels)
    assert np.array_equal(estimator._scale(rows), [[0, 0, -1], [1, -1, 1], [0, 0.5, 0]])
    scores = estimator.intercept_ + np.array([[0.0, 0, 5]]) @ estimator.coef_.T
    assert np.allclose(scores[:, 0], estimator.decision_function([[0.0, 0, 5]]))


def test_the_clip_norm_follows_from_public_numbers(blobs):
    assert choose_clip(7500, 31, 1.0) == pytest.approx((7500 / 32) ** 0.5 / 12)
    # No row of a linear model has a longer gradient.
    assert choose_clip(10**9, 7, 3.0) == 4.0
    settings = {"steps": 1, "epsilon": 2, "random_state": 0, **QUIET}
    estimator = DPLogisticRegression(**settings).fit(*blobs)
    assert estimator.plan_.config.max_grad_norm == choose_clip(200, 2, 2.0)
    again = DPLogisticRegression(**settings).fit(-blobs[0], 2 - blobs[1])
    assert again.plan_.hash == estimator.plan_.hash


def test_private_values_raise_no_error(blobs):
    rows, labels = blobs[0].copy(), blobs[1].copy()
    rows[:5] = np.nan
    labels[5:9] = 7
    DPLogisticRegression(steps=2, **QUIET).fit(rows, labels)
    targets = labels.astype(float)
    targets[:3] = np.nan
    targets[3] = np.inf
    regressor = DPMLPRegressor(bounds=(-10, 10), target_bounds=(0, 2), steps=2).fit(rows, targets)
    predictions = regressor.predict(rows)
    assert np.isfinite(predictions).all()
    assert predictions.min() >= 0 and predictions.max() <= 2


def test_no_message_tells_what_columns_and_targets_hold(blobs):
    """Rows decide it, so that a message would tell of them (docs/sklearn.md)."""
    regressor = DPMLPRegressor(bounds=(-10, 10), target_bounds=(0, 2), steps=1)
    rows = [[number, "ill"] for number in blobs[0][:, 0].tolist()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor.fit(rows, np.where(blobs[1] > 0, "ill", "well"))


def test_dates_and_durations_are_refused_by_their_types(blobs):
    pandas = pytest.importorskip("pandas")
    X, y = blobs
    days = pandas.to_datetime(np.arange(len(X)), unit="D")
    frame = pandas.DataFrame({"born": days.tz_localize("UTC"), "stay": days - days[0], "x": 1.0})
    model = DPLogisticRegression(bounds=(-1, 1), classes=(0, 1))
    for columns, name in ((["x", "born"], "born"), (["stay"], "stay")):
        with pytest.raises(ValueError, match=f"column '{name}' of X has type .*since a public"):
            model.fit(frame[columns], y)
    for rows in (days.to_numpy()[:, None], (days - days[0]).to_numpy()[:, None]):
        with pytest.raises(ValueError, match="X has type"):
            model.fit(rows, y)
    with pytest.raises(ValueError, match="y has type"):
        DPMLPRegressor(bounds=(-1, 1), target_bounds=(0, 1)).fit(X, frame["stay"])


def test_one_text_in_a_list_of_rows_changes_no_other_row(blobs):
    estimator = DPLogisticRegression(steps=1, **QUIET).fit(*blobs)
    rows = [[True, 1.0], [0.5, 2.0]]
    scores = estimator.decision_function(rows)
    rows[1][0] = "unknown"
    assert np.array_equal(estimator.decision_function(rows)[0], scores[0])
    rows[1][0] = 1j
    assert np.array_equal(estimator.decision_function(rows)[0], scores[0])


@pytest.mark.parametrize(
    "cell",
    ["HIV+", 10**400, 1.7e308, None, {"a": 1}, [1], "\ud800"],
    ids=lambda cell: f"{cell!a:.9}",
)
def test_a_cell_that_is_no_number_counts_as_missing(blobs, cell):
    rows = blobs[0].astype(object)
    rows[7, 1] = cell
    targets = blobs[0][:, 0].astype(object)
    targets[7] = cell
    narrow = {**QUIET, "bounds": (0, 1e-3)}
    regressor = DPMLPRegressor(bounds=(0, 1e-3), target_bounds=(0, 1e-3), steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator = DPLogisticRegression(steps=1, **narrow).fit(rows, blobs[1])
        scores = estimator.decision_function(rows)
        regressor.fit(rows, targets)
    rows[7, 1] = 1.0 if cell == 1.7e308 else np.nan
    assert np.array_equal(scores, estimator.decision_function(rows.astype(float)))


@pytest.mark.parametrize("odd", ["?", None, 7.5, [0, 1], float("nan")])
def test_a_label_of_another_type_turns_off_its_own_row_alone(blobs, monkeypatch, odd):
    seen = []
    monkeypatch.setattr(
        DPLogisticRegression, "_train", lambda self, rows, codes, *rest, **other: seen.append(codes)
    )
    labels = [int(label) for label in blobs[1]]
    estimator = DPLogisticRegression(**QUIET)
    estimator.fit(blobs[0], labels)
    estimator.fit(blobs[0], [*labels[:-1], odd])
    before, after = seen
    assert before.tolist() == labels
    assert after.tolist() == [*labels[:-1], -1]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [(["1", "0", "2", 1.5], [0, 1]), ([1, 0, 2, "x"], ["0", "1"]), (np.array([*"102x"]), [0, 1])],
)
def test_a_label_is_its_class_as_a_number_or_as_a_text(monkeypatch, labels, classes):
    seen = []
    monkeypatch.setattr(
        DPLogisticRegression, "_train", lambda self, rows, codes, *rest, **other: seen.append(codes)
    )
    DPLogisticRegression(bounds=(0, 1), classes=classes).fit(np.zeros((4, 1)), labels)
    assert seen[0].tolist() == [1, 0, -1, -1]


@pytest.mark.parametrize("cell", ["n/a", 1j, [1]])
def test_one_cell_in_a_list_of_rows_changes_no_other_row(monkeypatch, cell):
    """NumPy would make texts or complex numbers of all: then a True of another row is lost."""
    seen = []
    monkeypatch.setattr(
        DPLogisticRegression, "_train", lambda self, rows, *rest, **other: seen.append(rows)
    )
    rows = [[True, 0.5], [False, 1.0], [True, cell]]
    DPLogisticRegression(bounds=(0, 1), classes=[0, 1]).fit(rows, [0, 1, 1])
    assert np.array_equal(seen[0], [[1, 0.5], [0, 1], [1, np.nan]], equal_nan=True)


def test_a_label_outside_the_classes_contributes_nothing(blobs):
    """Without noise to speak of, such rows leave the weights where they began."""
    rows = blobs[0]
    settings = {**QUIET, "steps": 2, "epsilon": 100}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator = DPLogisticRegression(**settings).fit(rows, np.full(len(rows), 7))
    assert np.abs(estimator.decision_function(rows)).max() < 0.05


def test_texts_as_classes_are_refused_where_scikit_learn_has_numbered_labels(blobs):
    rows, labels = blobs[0], np.minimum(blobs[1], 1)
    settings = {"bounds": (-10, 10), "steps": 1}
    model = DPLogisticRegression(classes=["ill", "well"], **settings)
    with pytest.raises(ValueError, match=r"where scikit-learn numbers labels .*range\(K\)"):
        cross_val_predict(model, rows, np.take(["ill", "well"], labels), method="predict_proba")
    model.set_params(classes=range(2))
    names = VotingClassifier([("one", model)]).fit(rows, np.take(["ill", "well"], labels))
    assert set(names.predict(rows)) <= {"ill", "well"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bounds": (1, 1)}, "bounds of column 0 must be low < high"),
        ({"bounds": [(0, 1)] * 3}, r"bounds must be a pair or have shape \(2, 2\)"),
        ({"epsilon": 0}, "epsilon"),
        ({"method": "sgd"}, "method must be one of dp-kfc, dp-sgd"),
        ({"steps": 0}, "steps"),
        ({"learning_rate": -1}, "learning_rate must be positive"),
        ({"classes": [1]}, "two classes or more"),
        ({"classes": 3}, "classes must list labels of one type, as .0, 1., got 3"),
        ({"classes": ["a", 1]}, "classes must list labels of one type"),
        ({"classes": "01"}, "classes must list labels of one type, as .0, 1., got '01'"),
        ({"class_weights": {9: 1.0}}, "names 9, .*; leave it out or list it"),
        ({"class_weights": {0: -1.0}}, "must be finite and >= 0"),
        ({"class_weights": "balanced"}, "must map labels to public numbers, got 'balanced'"),
        ({"delta": "x"}, r"delta must be in \(0, 1\), got 'x'"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"batch_size": "all"}, "batch_size must be an integer >= 1, got 'all'"),
    ],
)
def test_bad_settings_are_one_error(blobs, settings, message):
    with pytest.raises(ValueError, match=message):
        DPLogisticRegression(**{**QUIET, **settings}).fit(*blobs)


@pytest.mark.parametrize("widths", [0, (-3,), ("a",), (1.5,)])
def test_a_width_is_an_integer(blobs, widths):
    with pytest.raises(ValueError, match="hidden_layer_sizes must be an integer >= 1"):
        DPMLPClassifier(**QUIET, hidden_layer_sizes=widths).fit(*blobs)


@pytest.mark.parametrize(
    "rows", [np.full(9, 7.25), np.full((9, 2), 7.25j), 7.25 + np.zeros((1, 9, 2))]
)
def test_an_error_shows_no_row(rows):
    with pytest.raises(ValueError, match="shape|Complex data") as caught:
        DPLogisticRegression(**QUIET).fit(rows, np.zeros(9))
    assert "7.25" not in str(caught.value) and len(str(caught.value)) <= 160


def test_what_is_taken_as_public_is_said(blobs):
    with pytest.warns(UserWarning, match="labels in y is taken as public"):
        DPLogisticRegression(bounds=(-10, 10), steps=1).fit(*blobs)
    with pytest.warns(UserWarning, match="bounds= is not given"):
        DPLogisticRegression(classes=[0, 1, 2], steps=1).fit(*blobs)
    with pytest.warns(UserWarning, match="target_bounds= is not given") as caught:
        DPMLPRegressor(steps=1).fit(blobs[0], blobs[0][:, 0])
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


def test_complete_settings_give_no_warning_and_a_second_fit_does(blobs):
    estimator = DPLogisticRegression(steps=2, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.fit(*blobs)
    with pytest.warns(UserWarning, match="fit number 2 of this estimator spends ε = 1 again"):
        estimator.fit(*blobs)


def test_a_fit_that_is_cut_off_counts(blobs, monkeypatch):
    estimator = DPLogisticRegression(steps=2, **QUIET)

    def interrupt(session, batch, loss_fn):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Session, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(*blobs)
    with pytest.warns(UserWarning, match="fit number 2 of this estimator"):
        estimator.fit(*blobs)


def test_a_search_counts_every_fit(blobs):
    search = GridSearchCV(
        DPLogisticRegression(steps=2, **QUIET), {"learning_rate": [0.5, 1.0]}, cv=2
    )
    search.fit(*blobs)
    assert search.best_estimator_.epsilon_ <= 1


def test_the_card_and_its_ledger_agree(fitted, tmp_path):
    folder = tmp_path / "card"
    fitted.write_card(folder)
    facts = verify_ledger(folder / "ledger.jsonl")
    assert facts["releases"] == 30
    assert facts["privacy card"] == "states what the ledger shows"
    assert facts["weights"] == "equal to the card's (SHA-256)"
    card = json.loads((folder / "privacy_card.json").read_text("utf-8"))
    assert card["guarantee"]["epsilon"] == fitted.epsilon_
    assert card["public_seeds"]
    assert json.loads((folder / "card.json").read_text("utf-8"))
    with pytest.raises(ValueError, match="holds files"):
        fitted.write_card(folder)
    with pytest.raises(NotFittedError):
        DPLogisticRegression().write_card(tmp_path / "other")


def test_no_card_is_written_for_other_weights(blobs, tmp_path):
    estimator = DPLogisticRegression(steps=1, **QUIET).fit(*blobs)
    estimator.module_.weight.data.fill_(7)
    with pytest.raises(ValueError, match="module_ was changed since the fit"):
        estimator.write_card(tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_an_estimator_holds_no_row_and_survives_pickle(fitted, blobs):
    content = pickle.dumps(fitted)
    scaled = fitted._scale(blobs[0]).astype(np.float32)
    assert scaled[7].tobytes() not in content and blobs[0][7].tobytes() not in content
    again = pickle.loads(content)
    assert np.array_equal(again.predict(blobs[0]), fitted.predict(blobs[0]))


def test_curves_learn_what_no_line_can_and_give_its_noise():
    rng = np.random.default_rng(0)
    rows = rng.uniform(-3, 3, (3000, 2))
    labels = (np.abs(rows[:, 0]) > 1.5).astype(int)
    settings = {"epsilon": 3.0, "bounds": (-3, 3), "random_state": 0}
    estimator = DPAdditiveClassifier(classes=[0, 1], **settings).fit(rows, labels)
    line = DPLogisticRegression(classes=[0, 1], **settings).fit(rows, labels)
    assert estimator.score(rows, labels) > 0.9 > 0.65 > line.score(rows, labels)
    assert estimator.plan_.extra_counts == {"moments": 1}
    curve = estimator.effects()[0]
    middle = len(curve.values) // 2 - 1
    assert estimator.predict([[np.nan, 0.0]]).shape == (1,)
    assert curve.is_curve and curve.values[0, 1] > 0 > curve.values[middle, 1]
    assert np.isfinite(curve.deviation).all() and (curve.deviation > 0).all()
    targets = np.abs(rows[:, 0])
    numbers = DPAdditiveRegressor(target_bounds=(0, 3), **settings).fit(rows, targets)
    assert numbers.score(rows, targets) > 0.8


def test_rates_are_stable_without_much_noise():
    """At ε = 50 the former rate of 4 gave a higher loss than no model."""
    rng = np.random.default_rng(0)
    rows = (rng.random((2000, 40)) < 0.5).astype(float)
    labels = (rows[:, :3].sum(1) + rng.normal(size=2000) > 1.5).astype(int)
    for method in ("dp-sgd", "dp-kfc"):
        estimator = DPLogisticRegression(
            epsilon=50, bounds=(0, 1), classes=[0, 1], method=method, random_state=0
        ).fit(rows, labels)
        shares = estimator.predict_proba(rows)[np.arange(2000), labels]
        assert -np.log(shares).mean() < 0.6, method


def test_a_network_learns_a_number_from_many_indicators():
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 8, (2400, 5))
    indicators = 2.0 * (codes[:, :, None] == np.arange(8)).reshape(2400, -1) - 1
    X = np.hstack([indicators, generator.uniform(-1, 1, (2400, 4))])
    weights = generator.normal(size=44)
    weights[:40] *= 0.5
    y = X @ weights
    y = (y - y.mean()) / np.abs(y - y.mean()).max()
    model = DPMLPRegressor(epsilon=8.0, bounds=(-1, 1), target_bounds=(-1, 1), random_state=1)
    assert model.fit(X[:2000], y[:2000]).score(X[2000:], y[2000:]) > 0.95


@pytest.mark.parametrize("kind", [DPLogisticRegression, DPMLPClassifier])
def test_a_step_of_a_classifier_is_bounded_where_c_is_long(kind):
    estimator = kind(epsilon=50.0)
    assert estimator._rate("categorical", 6.0) == 0.5
    assert estimator._rate("categorical", 0.1) >= 3.0
