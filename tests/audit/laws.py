"""Tests of numbers that ought to be independent and standard normal: name to two-sided p-value, for
a table `[steps, d]`.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

ALPHA = 1e-10  # of one p-value: all of a run together stay below one false alarm in a million runs
_SORTED = 300_000
_LAGS = 4096


def normal(score: float) -> float:
    return float(2 * stats.norm.sf(abs(score)))


def noise_battery(z: np.ndarray, layers: tuple[int, ...] = ()) -> dict[str, float]:
    """p-values.

    Args:
        z: one row a release, over its standard deviation `[steps, d]`.
        layers: sizes of the parts of a row, in order; two parts at least for the comparison of
            layers.
    """
    z = np.asarray(z, dtype=np.float64)
    flat = z.ravel()
    some = np.sort(flat[:: max(1, flat.size // _SORTED)])
    values = {
        "mean": normal(flat.sum() / math.sqrt(flat.size)),
        "variance": _both(stats.chi2(flat.size), float(flat @ flat)),
        "fourth moment": normal((float(np.mean(flat**4)) - 3) / math.sqrt(96 / flat.size)),
        "Kolmogorov-Smirnov": float(stats.kstest(some, "norm", method="asymp").pvalue),
        "Anderson-Darling": _anderson(some),
        "lags within a release": _within(z),
        "equal numbers": _equal(flat),
    }
    for bound in (3.0, 4.0, 5.0):
        found = int((np.abs(flat) > bound).sum())
        values[f"beyond {bound:g}"] = float(
            stats.binomtest(found, flat.size, 2 * stats.norm.sf(bound)).pvalue
        )
    if len(z) > 1:
        values["following releases"] = normal((z[1:] * z[:-1]).sum() / math.sqrt(z[1:].size))
        values["any two releases"] = _largest(z @ z.T, z.shape[1])
    if len(layers) > 1:
        values["layers"] = _layers(z, layers)
    return values


def against(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """p-values of the independence of two streams that were asked for as many numbers."""
    a, b = np.asarray(a, dtype=np.float64).ravel(), np.asarray(b, dtype=np.float64).ravel()
    spectrum = np.fft.rfft(a, 2 * a.size) * np.conj(np.fft.rfft(b, 2 * b.size))
    products = np.fft.irfft(spectrum)
    lags = np.concatenate([products[: a.size // 2], products[-(a.size // 2) :]])
    overlap = a.size - np.concatenate([np.arange(a.size // 2), np.arange(a.size // 2, 0, -1)])
    return {
        "correlation": normal(float(a @ b) / math.sqrt(a.size)),
        "correlation at any shift": min(
            1.0, lags.size * normal(float(np.max(np.abs(lags) / np.sqrt(overlap))))
        ),
        "equal numbers": _equal(np.concatenate([a, b])),
    }


def alarms(values: dict[str, float]) -> set[str]:
    return {name for name, p in values.items() if p < ALPHA}


def _both(law: stats.rv_continuous, value: float) -> float:
    return float(min(1.0, 2 * min(law.cdf(value), law.sf(value))))


def _anderson(some: np.ndarray) -> float:
    """A² for a law that is given; its far tail is that of the largest term of its series, times the
    square root of 3.
    """
    n = some.size
    weights = 2 * np.arange(1, n + 1) - 1
    a2 = -n - float(weights @ (stats.norm.logcdf(some) + stats.norm.logsf(some[::-1]))) / n
    return min(1.0, math.sqrt(3) * float(stats.chi2.sf(2 * a2, 1)))


def _within(z: np.ndarray) -> float:
    """The largest autocorrelation of a row over many lags, all rows together."""
    length = 1 << (2 * z.shape[1] - 1).bit_length()
    lags = min(_LAGS, z.shape[1] // 2)
    total = np.zeros(lags)
    for row in z:
        total += np.fft.irfft(np.abs(np.fft.rfft(row, length)) ** 2, length)[1 : lags + 1]
    scores = total / np.sqrt(len(z) * (z.shape[1] - np.arange(1, lags + 1)))
    return min(1.0, lags * normal(float(np.max(np.abs(scores)))))


def _largest(products: np.ndarray, size: int) -> float:
    pairs = len(products) * (len(products) - 1) // 2
    np.fill_diagonal(products, 0.0)
    return min(1.0, pairs * normal(float(np.max(np.abs(products))) / math.sqrt(size)))


def _layers(z: np.ndarray, layers: tuple[int, ...]) -> float:
    """The correlation of the parts of every row, number by number from their beginnings."""
    parts = np.split(z, np.cumsum(layers)[:-1], axis=1)
    scores = []
    for i, a in enumerate(parts):
        for b in parts[:i]:
            n = min(a.shape[1], b.shape[1])
            scores.append(float((a[:, :n] * b[:, :n]).sum()) / math.sqrt(n * len(z)))
    return min(1.0, len(scores) * normal(max(map(abs, scores))))


def _equal(flat: np.ndarray) -> float:
    """Numbers that came before, up to the sign; made of 53 bits, two are equal with a chance far
    below 2^-48.
    """
    found = flat.size - len(np.unique(np.abs(flat)))
    return float(stats.poisson.sf(found - 1, flat.size**2 / 2 * 2.0**-48)) if found else 1.0
