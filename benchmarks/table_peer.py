"""Fit one model of another library on rows that `tables_peers.py` has written, and write what it
predicts for the test rows. It runs in an environment of its own, without dpkfc.

    python table_peer.py ROWS.npz PEER EPSILON DELTA SEED OUT.npz
"""

from __future__ import annotations

import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np

warnings.simplefilter("ignore")


def main(rows: str, peer: str, epsilon: str, delta: str, seed: str, out: str) -> None:
    """Fit a peer and write log probabilities or numbers, seconds and versions."""
    data = dict(np.load(rows, allow_pickle=False))
    make, prepare = PEERS[peer]
    model = make(data, float(epsilon), float(delta), int(seed))
    train, test = prepare(data, "train"), prepare(data, "test")
    begun = time.process_time()
    model.fit(train, data["train_labels"])
    seconds = time.process_time() - begun
    if int(data["classes"]):
        with np.errstate(divide="ignore"):
            # A probability of 0 would have an infinite log loss.
            outputs = np.log(np.clip(model.predict_proba(test), 1e-9, 1.0))
    else:
        outputs = model.predict(test)
    packages = ("scikit-learn", "numpy", "interpret-core", "diffprivlib")
    found = [f"{name} {_version(name)}" for name in packages if _version(name)]
    np.savez(out, outputs=outputs, seconds=seconds, versions=found)


def _version(name: str) -> str:
    try:
        return version(name)
    except Exception:
        return ""


# --------------------------------------------------------------------------------------------------
# What a library is given: raw numbers, and codes of the schema's categories.


def _join_columns(data: dict[str, Any], part: str) -> np.ndarray:
    """Return numbers, NaN where they are missing, then codes of categories."""
    return np.hstack([data[f"{part}_numbers"], data[f"{part}_codes"].astype(float)])


def _texts(data: dict[str, Any], part: str) -> np.ndarray:
    """Return numbers, a missing one as the least of its bounds, then codes as texts."""
    numbers = _fill_missing(data, part)
    codes = np.char.add("c", data[f"{part}_codes"].astype(str))
    return np.hstack([numbers.astype(object), codes.astype(object)])


def _fill_missing(data: dict[str, Any], part: str) -> np.ndarray:
    """Return numbers clamped to the bounds, a missing one as the least."""
    low, high = data["bounds"].T
    numbers = data[f"{part}_numbers"]
    return np.clip(np.where(np.isnan(numbers), low, numbers), low, high)


def _one_hot(data: dict[str, Any], part: str) -> np.ndarray:
    codes = data[f"{part}_codes"]
    columns = [np.eye(size)[codes[:, place]] for place, size in enumerate(data["sizes"])]
    return np.hstack(columns) if columns else np.zeros((len(codes), 0))


def _scale(data: dict[str, Any], part: str) -> np.ndarray:
    """Return numbers between −1 and 1 by the bounds, and one-hot categories."""
    low, high = data["bounds"].T
    numbers = 2 * (_fill_missing(data, part) - low) / (high - low) - 1
    return np.hstack([numbers, _one_hot(data, part)])


def _standard(data: dict[str, Any], part: str) -> np.ndarray:
    """Return numbers with mean 0 and deviation 1 of the training rows, and one-hot categories."""
    train = _fill_missing(data, "train")
    spread = train.std(0)
    numbers = (_fill_missing(data, part) - train.mean(0)) / np.where(spread > 0, spread, 1.0)
    return np.hstack([numbers, _one_hot(data, part)])


# --------------------------------------------------------------------------------------------------
# The peers, with the defaults of their libraries.


def _boosting(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from sklearn import ensemble

    count = data["train_numbers"].shape[1]
    mask = [False] * count + [True] * len(data["sizes"])
    kind = ensemble.HistGradientBoostingRegressor
    if int(data["classes"]):
        kind = ensemble.HistGradientBoostingClassifier
    return kind(random_state=seed, categorical_features=mask)


def _linear(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    return LogisticRegression(max_iter=1000) if int(data["classes"]) else Ridge()


def _kinds(data: dict[str, Any]) -> list[str]:
    return ["continuous"] * len(data["bounds"]) + ["nominal"] * len(data["sizes"])


def _ebm(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from interpret import glassbox

    kind = glassbox.ExplainableBoostingRegressor
    if int(data["classes"]):
        kind = glassbox.ExplainableBoostingClassifier
    return kind(feature_types=_kinds(data), outer_bags=1, random_state=seed, n_jobs=1)


def _dp_ebm(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from interpret import privacy

    bounds = {place: tuple(pair) for place, pair in enumerate(data["bounds"].tolist())}
    settings: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "feature_types": _kinds(data),
        "privacy_bounds": bounds,
        "random_state": seed,
        "n_jobs": 1,
    }
    if int(data["classes"]):
        return privacy.DPExplainableBoostingClassifier(**settings)
    least, most = data["target_bounds"].tolist()
    return privacy.DPExplainableBoostingRegressor(
        privacy_target_min=least, privacy_target_max=most, **settings
    )


def _dp_linear(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from diffprivlib import models

    width = len(data["bounds"]) + int(data["sizes"].sum())
    if int(data["classes"]):
        longest = float(np.sqrt(len(data["bounds"]) + len(data["sizes"])))
        return models.LogisticRegression(
            epsilon=epsilon, data_norm=longest, max_iter=1000, random_state=seed
        )
    low = np.r_[-np.ones(len(data["bounds"])), np.zeros(width - len(data["bounds"]))]
    return models.LinearRegression(
        epsilon=epsilon,
        bounds_X=(low, np.ones(width)),
        bounds_y=tuple(data["target_bounds"].tolist()),
        random_state=seed,
    )


def _ranges(data: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    low, high = data["bounds"].T
    return np.r_[low, np.zeros(len(data["sizes"]))], np.r_[high, data["sizes"] - 1.0]


def _dp_bayes(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from diffprivlib import models

    return models.GaussianNB(epsilon=epsilon, bounds=_ranges(data), random_state=seed)


def _dp_forest(data: dict[str, Any], epsilon: float, delta: float, seed: int) -> Any:
    from diffprivlib import models

    return models.RandomForestClassifier(
        epsilon=epsilon,
        bounds=_ranges(data),
        classes=list(range(int(data["classes"]))),
        random_state=seed,
    )


def _codes(data: dict[str, Any], part: str) -> np.ndarray:
    return np.hstack([_fill_missing(data, part), data[f"{part}_codes"].astype(float)])


PEERS: dict[str, tuple[Any, Any]] = {
    "boosting": (_boosting, _join_columns),
    "linear": (_linear, _standard),
    "ebm": (_ebm, _texts),
    "dp-ebm": (_dp_ebm, _texts),
    "diffprivlib-linear": (_dp_linear, _scale),
    "diffprivlib-bayes": (_dp_bayes, _codes),
    "diffprivlib-forest": (_dp_forest, _codes),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
