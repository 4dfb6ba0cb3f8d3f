"""The privacy loss of one release as masses on a grid, and their Fourier transform.

What lies between two multiples l and l + h, with masses p and q under the two distributions, moves
to its ends so that both sums stay: up (p − e^l q) / (1 − e^(−h)), the rest down. That dominates the
true pair ("connecting the dots", Doroshenko et al. 2022), so δ is never too small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from dpkfc.privacy.gaussian_pairs import Floats, Pair
from dpkfc.privacy.loss_grid import Grid, Release

Complexes = NDArray[np.complex128]


@dataclass(frozen=True)
class _Masses:
    """Masses `[n]` at the losses (first + 0 … n - 1) h, and the mass of infinite loss."""

    first: int
    mass: Floats
    infinite: float


def _move_to_grid(pair: Pair, grid: Grid, direction: int) -> _Masses:
    """Return the losses of one pair; those above the window count as infinite."""
    h = grid.interval
    is_present = direction == 0
    far = grid.far * pair.stddev
    right = pair.units + far if is_present else far
    lowest, highest = pair.losses(np.array([-far, right])).tolist()
    window_end = h * (grid.first[direction] + grid.points - 1)
    if is_present:
        highest = min(highest, window_end)
    else:
        # A loss without the example is the loss with it, negated.
        lowest = max(lowest, -window_end)
    start = math.floor(max(lowest, pair.log_weights[0]) / h)
    end = max(math.ceil(highest / h), start + 1)
    places = np.arange(start, end + 1, dtype=np.float64)
    edges: Floats = h * places
    p_logs, q_logs = pair.log_masses(pair.places(edges))
    low = edges[:-1]
    if not is_present:
        p_logs, q_logs = q_logs[::-1], p_logs[::-1]
        low = -edges[:0:-1]
        start = -int(places[-1])
    masses = np.exp(p_logs)
    below, inner, above = masses[0], masses[1:-1], masses[-1]
    with np.errstate(invalid="ignore"):
        ratio = np.exp(low + q_logs[1:-1] - p_logs[1:-1])  # e^l q / p
    share = np.clip((1 - ratio) / -math.expm1(-h), 0.0, 1.0)
    moved_up = np.where(inner > 0, inner * share, 0.0)
    mass = np.zeros(inner.size + 1)
    mass[:-1] = inner - moved_up
    mass[1:] += moved_up
    mass[0] += below
    return _Masses(start, mass, float(above))


@dataclass(frozen=True)
class Spectrum:
    """One release, transformed.

    Attributes:
        logs: logarithm of the Fourier transform `[points // 2 + 1]` of the tilted masses.
        centre: the multiple of h that the transform takes for 0; near the mean loss, so that the
            phases are small and their rounding is, too.
        scale: logarithm by which the masses were divided after the tilt; 0 without one.
        infinite: mass of infinite loss.
        cumulant: log E exp(t · loss), at the tilt t that bounds what lies above the window.
    """

    logs: Complexes
    centre: int
    scale: float
    infinite: float
    cumulant: float


@functools.lru_cache(maxsize=8)
def transform(release: Release, grid: Grid, direction: int) -> Spectrum:
    """Return the spectrum of a release, with the example (direction 0) or without it (1)."""
    parts = [(pair.weight, _move_to_grid(pair, grid, direction)) for pair in release]
    tilt = grid.tilts[direction]
    scale = _log_moment(parts, grid, tilt) if tilt else 0.0
    tilted = []
    mean = infinite = 0.0
    for weight, part in parts:
        places = part.first + np.arange(part.mass.size)
        mass = part.mass
        if tilt:
            mass = mass * np.exp(tilt * grid.interval * places - scale)
        tilted.append((places, weight * mass))
        mean += weight * float(mass @ places)
        infinite += weight * part.infinite
    centre = round(mean)
    circle = np.zeros(grid.points)
    for places, mass in tilted:
        circle += np.bincount((places - centre) % grid.points, mass, grid.points)
    with np.errstate(divide="ignore"):
        logs = np.log(scipy.fft.rfft(circle))
    cumulant = _log_moment(parts, grid, grid.tails[direction])
    return Spectrum(logs, centre, scale, infinite, cumulant)


def _log_moment(parts: Sequence[tuple[float, _Masses]], grid: Grid, tilt: float) -> float:
    """Return log E exp(tilt · loss) of the finite losses of a release."""
    logs = -math.inf
    for weight, part in parts:
        exponents = tilt * grid.interval * (part.first + np.arange(part.mass.size))
        largest = exponents[-1]
        moment = float(part.mass @ np.exp(exponents - largest))
        logs = np.logaddexp(logs, math.log(weight * moment) + largest)
    return float(logs)
