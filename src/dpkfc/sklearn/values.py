"""Values that users hand over: bounds, rows and targets, as numbers of public scales."""

from __future__ import annotations

import contextlib
import operator
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import column_or_1d

from dpkfc._checks import check_integer

Floats = NDArray[np.float64]
# The range of a feature, or of a target, that nobody has given bounds for.
STANDARD_BOUNDS = (-3.0, 3.0)


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
    except (TypeError, ValueError, OverflowError):
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


def read_count(name: str, value: Any) -> int:
    """Return a setting as an integer >= 1, of NumPy's types too.

    Raises:
        ValueError: the setting is something else.
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            value = operator.index(value)
    check_integer(name, value, 1)
    return int(value)


def read_targets(estimator: BaseEstimator, y: Any, count: int) -> NDArray[Any]:
    """Return y as an array `[n]`; only its shape and type are checked.

    Raises:
        ValueError: no y, another length or shape, complex numbers, or dates.
    """
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
    check_types("y", y)
    targets = column_or_1d(y, warn=True)
    if np.iscomplexobj(targets):
        raise ValueError("Complex data not supported: y holds complex numbers")
    if len(targets) != count:
        raise ValueError(f"X has {count} rows and y has {len(targets)}: give one target a row")
    return targets


def check_types(name: str, values: Any) -> None:
    """Refuse dates and durations by their types, which are public; they are not numbers.

    Raises:
        ValueError: naming the column, where it has a name, and the fix.
    """
    types = values.dtypes if hasattr(values, "iloc") else np.asarray(values).dtype
    for column, kind in types.items() if hasattr(types, "items") else [("", types)]:
        if kind.kind in "mM":
            where = f"column {column!r:.40} of {name}" if hasattr(types, "items") else name
            raise ValueError(
                f"{where} has type {kind!s:.40}, and numbers are wanted: give days or seconds since"
                " a public date"
            )


def keep_types(values: Any) -> Any:
    """Return a list as an array of objects: one text among numbers would make texts of all."""
    return np.asarray(values, dtype=object) if isinstance(values, list | tuple) else values


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
