"""The grid of privacy losses: its interval, and the window that holds nearly all of their mass.

Moving the mass between two multiples of h to its ends raises the cumulant of a release at t by
t (t + 1) h² / 8, which sets h. Chernoff bounds on the cumulants of all releases,

    P(L > l) ≤ exp(log E exp(t L) − t l)  for every t > 0,

set the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from dpkfc.privacy.gaussian_pairs import Floats, Pair

# The pairs among which public chance chooses; their weights add up to 1.
Release = tuple[Pair, ...]
Releases = Sequence[tuple[Release, int]]
ACCURACY = 1e-5  # what the grid adds to ε, as a part of it
MOST_POINTS = 1 << 22
_TILTS: Floats = np.exp2(np.arange(-16.0, 25.0))
_AROUND: Floats = np.exp2(np.linspace(-1, 1, 33))  # around the best of them
# δ is larger by the probability of losses beyond the window.
_LOG_TAIL = math.log(1e-20)
# Standard deviations; 1e-23 of a Gaussian lies beyond, and counts as infinite loss.
_FAR = 10.0
# The largest part of δ that either of them may be.
_LEAST_TAIL = 1e-9
# Below so many standard deviations of the rounding to the grid, ε depends on the grid.
_SMOOTH = 50.0


@dataclass(frozen=True)
class Grid:
    """The losses at which masses lie: multiples of `interval` in a window.

    A pair of values is for the two directions: with the example present, and with it absent.

    Attributes:
        interval: h.
        points: length of the window.
        first: the lowest multiple.
        tails: the tilts that bound what lies above the window.
        tilts: of the transforms; 0 where rounding does not hide δ.
        slope: the derivative of -log δ by ε, about.
        count: number of releases.
        far: standard deviations of the noise that are looked at.
    """

    interval: float
    points: int
    first: tuple[int, int]
    tails: tuple[float, float]
    tilts: tuple[float, float]
    slope: float
    count: int
    far: float

    def error(self, epsilon: float, interval: float = 0.0) -> float:
        """Estimate the most that a grid, by default this one, adds to ε."""
        h = interval or self.interval
        error = self.count * (1 + self.slope) * h**2 / 8
        if self.is_fine(epsilon, h):
            return error
        return error + self._walk(h)

    def is_fine(self, epsilon: float, interval: float = 0.0) -> bool:
        """Return whether an ε is so much larger than the rounding that it does not depend on it."""
        return epsilon > _SMOOTH * self._walk(interval or self.interval)

    def _walk(self, h: float) -> float:
        """Return the standard deviation of the rounding of all losses together."""
        return h * math.sqrt(self.count)

    def refine(self) -> Grid:
        """Return a grid of half the interval."""
        present, absent = self.first
        return replace(
            self,
            interval=self.interval / 2,
            points=scipy.fft.next_fast_len(2 * self.points, real=True),
            first=(2 * present, 2 * absent),
        )


def bound_rounding(count: int) -> float:
    """Return a bound of what rounding takes from δ in a power of a Fourier transform."""
    return 2.0**-52 * (count + 256)


def estimate_grid(releases: tuple[tuple[Release, int], ...], delta: float, accuracy: float) -> Grid:
    """Return the grid whose error is the accuracy for ε as Chernoff bounds it.

    Args:
        releases: each kind and its number.
        delta: δ in (0, 1).
        accuracy: what the grid may add to ε, as a part of it.
    """
    count = sum(number for _, number in releases)
    least_tail = _LEAST_TAIL * delta
    far = max(_FAR, -float(scipy.special.ndtri(least_tail / count)))
    # With the example, E exp(t L) is taken under P, which is the moment at 1 + t under Q.
    above = _cumulants(releases, 1 + _TILTS, far)
    below = _cumulants(releases, 1 - _TILTS, far)
    away = _cumulants(releases, -_TILTS, far)
    towards = _cumulants(releases, _TILTS, far)
    # Chernoff: the best bound of ε, and its tilt.
    bounds = (above - math.log(delta)) / _TILTS
    best = int(np.argmin(bounds))
    slope = float(_TILTS[best])
    epsilon = max(float(bounds[best]), 1e-6)
    # The h at which `Grid.error` is the wanted part of ε.
    wanted = math.sqrt(8 * accuracy * epsilon / (count * (1 + slope)))
    h = min(wanted, 0.3 / (1 + slope))
    log_tail = min(_LOG_TAIL, math.log(least_tail))
    while True:
        highest, lowest, tails = _window(h, count, (above, below, away, towards), log_tail)
        width = max(high - low for high, low in zip(highest, lowest, strict=True))
        if width <= h * MOST_POINTS:
            break
        h = 1.5 * max(h, width / MOST_POINTS)
    points = scipy.fft.next_fast_len(math.ceil(width / h) + 4, real=True)
    present, absent = (math.floor(low / h) - 1 for low in lowest)
    tilts = (0.0, 0.0)
    if delta <= 2 * bound_rounding(count):
        around = slope * _AROUND
        with_example = _best_tilt(around, _cumulants(releases, 1 + around, far), delta)
        around = _best_tilt(_TILTS, away, delta) * _AROUND
        without_example = _best_tilt(around, _cumulants(releases, -around, far), delta)
        tilts = (min(with_example, 1 / h), min(without_example, 1 / h))
    return Grid(
        interval=h,
        points=points,
        first=(present, absent),
        tails=tails,
        tilts=tilts,
        slope=slope,
        count=count,
        far=far,
    )


def _best_tilt(tilts: Floats, cumulants: Floats, delta: float) -> float:
    """Return the tilt of the best of these Chernoff bounds of ε."""
    bounds = (cumulants - math.log(delta)) / tilts
    return float(tilts[np.argmin(bounds)])


def _window(
    h: float, count: int, cumulants: Sequence[Floats], log_tail: float
) -> tuple[list[float], list[float], tuple[float, float]]:
    """Return the highest and the lowest losses of both directions, and the tilts of the former.

    Chernoff bounds on a grid of interval h, for up to `count` releases.
    """
    # About, for tilts below 1 / h.
    tilts = _TILTS[h * _TILTS <= 1]
    raised = count * tilts * (tilts + 1) * h**2 / 7
    places = []
    best = []
    for logs in cumulants:
        moments = np.maximum(logs[: tilts.size], 0.0) + raised
        bounds = (moments - log_tail) / tilts
        place = int(np.argmin(bounds))
        places.append(float(bounds[place]))
        best.append(float(tilts[place]))
    above, below, away, towards = places
    return [above, away], [-below, -towards], (best[0], best[2])


def _cumulants(releases: Releases, powers: Floats, far: float) -> Floats:
    """Return log E exp(power · L) without the example, of all releases."""
    total = np.zeros(powers.size)
    for release, count in releases:
        logs = [math.log(pair.weight) + pair.cumulants(powers, far) for pair in release]
        total += count * np.logaddexp.reduce(logs, axis=0)
    return total
