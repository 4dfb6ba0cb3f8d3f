"""Compute ε of composed Gaussian releases, as an upper bound by an integral of its own.

A release is a pair of distributions of x: with one unit more (1 - q) N(0, σ²) + q N(1, σ²), without
it N(0, σ²). With k units more, N(i, σ²) has the binomial probability of i. The line is cut where
the privacy loss of x is a multiple of h, and the mass of each piece moves to its two ends so that
its probabilities under both distributions stay the same. Such a pair reveals no less than the true
one (Doroshenko et al. 2022, "Connect the Dots"), and neither do compositions of it. They are made
by a Fourier transform of losses weighted by exp(tilt · loss), which puts the digits where δ is.
What leaves the grid at its upper end, and an allowance for rounding, is added to δ. Both directions
are computed: units added, and units removed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, special

from dpkfc_verify.ledger import Mismatch, Unchecked

Floats = NDArray[np.float64]
Charges = Sequence[tuple[Mapping[str, Any], int]]
# The public alternatives of a release: probability, sampling rate q, noise multiplier σ, and how
# many units are sampled so.
Part = tuple[float, float, float, int]
Release = tuple[Part, ...]
Releases = Mapping[Release, int]

_NO_NOISE = 1e-3  # a multiplier below this is taken for none
_FAR = 10.0  # standard deviations; a Gaussian has less than 1e-23 beyond
_TOLERANCE = 2e-4  # of ε that the grid may add below ε = 10; in proportion above
_POINTS = 1 << 22
_CUT = 1e-9  # of δ, above the upper end of the grid
_WRAP = math.log(1e-9)  # of the weighted mass that comes in at the other end and only raises ε
_ROUNDING = 1e-13  # of the weighted mass, for each point that is added up
_EXPONENT = 600.0
_NODES = 1 << 17  # of a table that inverts the loss of a group


def read_releases(charges: Charges, larger: int = 0, units: int = 1) -> Releases:
    """Return the number of each kind of release.

    Args:
        charges: events as a ledger states them, each with its number.
        larger: 1 for the neighbour with one unit more than the data, of a truncated sampler.
        units: in how many units neighbours differ, each sampled on its own.

    Raises:
        Mismatch: a release without noise.
        Unchecked: an event that is not made of Poisson sampling and Gaussian noise, or truncated
            batches of several units.
    """
    counts: Counter[Release] = Counter()
    precision = 0.0
    left = list(charges)
    while left:
        event, count = left.pop()
        kind = event.get("type")
        if kind == "ComposedDpEvent":
            left += [(inner, count) for inner in event["events"]]
        elif kind == "SelfComposedDpEvent":
            left.append((event["event"], count * int(event["count"])))
        elif kind != "NoOpDpEvent" and count:
            release = _read_event(event, larger, units)
            if any(noise < _NO_NOISE for _, _, noise, _ in release):
                raise Mismatch("ε is infinite: a release has no noise to speak of")
            if len(release) == 1 and release[0][1] == 1:
                # Releases of everybody's data are together one release.
                precision += count / release[0][2] ** 2
            else:
                counts[release] += count
    if precision:
        counts[((1.0, 1.0, precision**-0.5, 1),)] += 1
    return dict(counts)


def _read_event(event: Mapping[str, Any], larger: int, units: int) -> Release:
    kind = event.get("type")
    rate = event.get("sampling_probability", 1.0)
    inner = event["event"] if kind == "PoissonSampledDpEvent" else event
    is_gaussian = inner.get("type") in ("GaussianDpEvent", "NonPrivateDpEvent")
    is_known = is_gaussian or (kind == "TruncatedSubsampledGaussianDpEvent" and units == 1)
    if not is_known or not 0 < rate <= 1:
        raise Unchecked(f"its integral does not cover releases of the kind {str(kind)[:50]}")
    noise = float(inner.get("noise_multiplier", 0.0))
    full = 0.0
    replaces = 0.0
    if not is_gaussian:
        # At most B units: a batch with room, or a full one in which the unit replaces another one,
        # at twice the distance (Ganesh 2025, arXiv 2508.15089).
        size = int(event["dataset_size"]) + larger
        most = int(event["truncated_batch_size"])
        if most < size:
            full = float(special.bdtrc(most - 1, size - 1, rate))
        if full:
            is_cut = float(special.bdtrc(most, size, rate))
            replaces = min(1.0, is_cut * most / size / full)
    if rate == 1:
        # All units of a group are sampled: one at their distance.
        noise, units = noise / units, 1
    parts = ((1 - full, float(rate), noise, units), (full, replaces, noise / 2, 1))
    return tuple(part for part in parts if part[0] > 0 and part[1] > 0)


def _read_directions(charges: Charges, units: int = 1) -> Iterator[tuple[Releases, int]]:
    """Yield the releases and a sign for each pair of neighbours that has to be looked at."""
    smaller = read_releases(charges, 0, units)
    larger = read_releases(charges, 1, units)
    for releases in (smaller,) if smaller == larger else (smaller, larger):
        if releases:
            yield releases, 1
            yield releases, -1


def epsilon(charges: Charges, delta: float, units: int = 1) -> float:
    """Return an upper bound of ε at δ of all these releases together; errors as above.

    Args:
        charges: as of `read_releases`.
        delta: δ.
        units: in how many units neighbours differ, each sampled on its own.
    """
    largest = 0.0
    for releases, sign in _read_directions(charges, units):
        if len(releases) == 1 and next(iter(releases))[0][1] == 1:
            ((_, _, noise, _),) = next(iter(releases))
            spent = _solve(functools.partial(_log_delta_of_gaussian, noise), delta, 1.0)
            largest = max(largest, spent)
            continue
        composed = Composition(releases, delta, sign)
        # Chernoff's bound of the other direction is often enough.
        if composed.bound * (1 + 1e-6) > largest:
            largest = max(largest, composed.epsilon())
    return largest


def group_epsilon(charges: Charges, delta: float, units: int, *, independent: bool) -> float:
    """Return the least ε at δ that may be stated for neighbours that differ in several units.

    It is the ε of the mechanism where that is known. Elsewhere the bound for groups,
    (k ε', δ' Σ e^(i ε')), is above k times ε at δ.

    Args:
        charges: as of `read_releases`.
        delta: δ, the same for the group.
        units: of the group, k.
        independent: each is sampled on its own.
    """
    if independent or all(rate == 1 for kind in read_releases(charges) for _, rate, *_ in kind):
        with contextlib.suppress(Unchecked):
            return epsilon(charges, delta, units)
    return units * epsilon(charges, delta)


def attack_rates(charges: Charges, largest: float) -> tuple[float, float]:
    """Return bounds of every attack that asks whether a unit was in the data.

    Returns:
        The share of right answers at even odds, and the share of members that are found where 1 of
        100 others is taken for one.
    """
    epsilons = np.linspace(0, max(1.0, min(largest, 100.0)), 200)
    deltas = np.zeros(200)
    for releases, sign in _read_directions(charges):
        # A large tilt would drown δ near ε = 0 in its allowance for rounding.
        composed = Composition(releases, 0.05, sign, 1 << 12, most=0.0)
        logs = [min(0.0, composed.log_delta(e)) for e in epsilons]
        deltas = np.maximum(deltas, np.exp(logs))
    # Each pair (ε, δ) is two bounds of every attack (Kairouz, Oh and Viswanath 2015).
    by_alarms = deltas + np.exp(epsilons) * 0.01
    by_misses = 1 - np.exp(-epsilons) * (0.99 - deltas)
    found = np.minimum(by_alarms, by_misses)
    return 0.5 + 0.5 * float(deltas[0]), float(min(found.min(), 1.0))


def round_up(value: float, decimals: int = 4) -> str:
    """Return a number with so many decimals, rounded up."""
    unit = 10**decimals
    units = round(value * unit)
    if units / unit < value:
        units = math.ceil(value * unit)
    return f"{units / unit:.{decimals}f}"


def _log_delta_of_gaussian(noise: float, epsilon: float) -> float:
    """Return log δ(ε) of one Gaussian release of everybody's data (Balle and Wang 2018)."""
    mu = 1 / noise
    above = special.log_ndtr(mu / 2 - epsilon / mu)
    below = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(above + math.log(-math.expm1(min(below - above, -1e-300))))


def _solve(log_delta: Callable[[float], float], delta: float, high: float) -> float:
    """Return the ε at which a falling log δ(ε) is log δ, or slightly more."""
    goal = math.log(delta)
    if log_delta(0.0) <= goal:
        return 0.0
    while log_delta(high) > goal:
        high *= 2
    root = optimize.brentq(lambda e: log_delta(e) - goal, 0.0, high, xtol=1e-9, rtol=1e-12)
    return float(root) * (1 + 1e-9) + 1e-8


class Composition:
    """The privacy loss of several releases together, on a grid that is made for ε at δ.

    Args:
        releases: number of each kind.
        delta: δ.
        sign: 1 for the presence of a unit against its absence, -1 for the opposite.
        points: the least number of points of the grid.
        most: the logarithm of the tilt is at most this.
    """

    def __init__(
        self, releases: Releases, delta: float, sign: int, points: int = 1 << 18, most: float = 12
    ) -> None:
        self.releases = releases
        self.delta = delta
        self.sign = sign
        self.points = points
        self._atoms = [(n, *_sample_losses(release, sign)) for release, n in releases.items()]
        best = optimize.minimize_scalar(self._exceed, bounds=(-14, most), method="bounded")
        self.tilt = math.exp(float(best.x))
        self.bound = max(float(best.fun), 0.0)

    def _cumulant(self, tilt: float) -> float:
        """Return log E exp(tilt · loss), by the trapezoidal rule."""
        each = (n * special.logsumexp(tilt * loss, b=mass) for n, loss, mass in self._atoms)
        return float(sum(each))

    def _exceed(self, log_tilt: float, share: float = 1.0) -> float:
        """Return a loss that is exceeded with probability share · δ at most (Chernoff)."""
        log_probability = math.log(share * self.delta)
        tilt = math.exp(log_tilt)
        return (self._cumulant(tilt) - log_probability) / tilt

    @functools.cached_property
    def _grid(self) -> tuple[float, int, Floats, float, float]:
        """Interval, first multiple, weights, log of their scale, share of infinite losses."""
        tilt = self.tilt
        lower_end, width = self._range()
        h = self._interval(width)
        points = fft.next_fast_len(math.ceil(width / h) + 2, real=True)
        spectrum = np.ones(points // 2 + 1, np.complex128)
        place = 0
        log_scale = 0.0
        infinite = _CUT * self.delta
        for release, count in self.releases.items():
            moved = [move_to_grid(part, self.sign, h) for part in release]
            places = np.concatenate([places for places, _, _ in moved])
            mass = np.concatenate([mass for _, mass, _ in moved])
            exponents = tilt * h * places
            scale = float(special.logsumexp(exponents, b=mass))
            with np.errstate(divide="ignore"):
                weighted = np.exp(exponents - scale + np.log(mass))
            # Around its middle, the phase of a power is small.
            middle = round(float(weighted @ places))
            on_grid = np.bincount((places - middle) % points, weighted, points)
            spectrum *= fft.rfft(on_grid) ** count
            place += count * middle
            log_scale += count * scale
            infinite += count * sum(lost for _, _, lost in moved)
        lowest = math.floor(lower_end / h)
        weights = np.maximum(fft.irfft(spectrum, points), 0.0)
        return h, lowest, np.roll(weights, (place - lowest) % points), log_scale, infinite

    def _range(self) -> tuple[float, float]:
        """Return lower end and width of a grid, beyond which little of the weighted mass lies."""
        tilt = self.tilt
        here = self._cumulant(tilt)
        shifts = tilt * np.exp(np.linspace(-6, 3, 37))
        by_delta = min(self._exceed(math.log(tilt) + x, _CUT) for x in np.linspace(-2, 4, 37))
        by_mass = min((self._cumulant(tilt + s) - here - _WRAP) / s for s in shifts)
        top = max(by_delta, by_mass)
        bottom = max((here - self._cumulant(tilt - s) + _WRAP) / s for s in shifts)
        width = max(top - bottom, 1e-6 * (1 + abs(top)))
        return top - width, width

    def _interval(self, width: float) -> float:
        """Return the distance h of the points of a grid."""
        number = sum(self.releases.values())
        # The grid adds about number · (1 + tilt) · h² / 8 to ε.
        allowed = _TOLERANCE * max(1.0, self.bound / 10)
        h = math.sqrt(8 * allowed / (number * (1 + self.tilt)))
        span = max(float(np.ptp(loss)) for _, loss, _ in self._atoms)
        return max(min(h, width / self.points), max(width, span) / _POINTS)

    def log_delta(self, epsilon: float) -> float:
        """Return an upper bound of log δ(ε)."""
        h, lowest, weights, log_scale, infinite = self._grid
        begin = max(0, math.floor(epsilon / h) + 1 - lowest)
        weights = weights[begin : begin + math.ceil(45 / (self.tilt * h)) + 2]
        away = h * (lowest + begin + np.arange(weights.size)) - epsilon
        shares = -np.expm1(-away) * np.exp(-self.tilt * away)
        tail = float(shares @ weights)
        log_tail = math.log(tail + _ROUNDING * (1 + weights.size))
        return float(np.logaddexp(log_scale - self.tilt * epsilon + log_tail, math.log(infinite)))

    def epsilon(self) -> float:
        """Return an upper bound of ε at δ."""
        return _solve(self.log_delta, self.delta, max(self.bound, 1e-6))


def _log_weights(rate: float, units: int) -> Floats:
    """Return the log probabilities that 0, 1, … of the units are sampled."""
    i = np.arange(units + 1)
    chosen = special.xlogy(i, rate) + special.xlog1py(units - i, -rate)
    return np.asarray(np.log(special.binom(units, i)) + chosen)


def _loss(x: Floats, rate: float, noise: float, units: int) -> Floats:
    logs = enumerate(_log_weights(rate, units))
    terms = (weight + (i * x - 0.5 * i * i) / noise**2 for i, weight in logs)
    return functools.reduce(np.logaddexp, terms)


def _invert(losses: Floats, rate: float, noise: float, units: int) -> Floats:
    """Return where each loss is; below the smallest one there is nothing."""
    if units > 1:
        x = np.linspace(-_FAR * noise, units + _FAR * noise, _NODES)
        return np.asarray(np.interp(losses, _loss(x, rate, noise, units), x))
    absence = math.log1p(-rate) if rate < 1 else -math.inf
    with np.errstate(divide="ignore"):
        # By exp(loss) - (1 - q).
        rest = np.log(-np.expm1(np.minimum(absence - losses, 0.0)))
    return np.asarray(0.5 + noise**2 * (losses + rest - math.log(rate)))


def _sample_losses(release: Release, sign: int) -> tuple[Floats, Floats]:
    losses, masses = [], []
    for share, rate, noise, units in release:
        points = 4000 + int(units * (200 / noise + 0.2 * units / noise**2))
        x = np.linspace(-_FAR * noise, units + _FAR * noise, points)
        loss = _loss(x, rate, noise, units)
        mass = np.exp(-0.5 * (x / noise) ** 2 + (loss if sign == 1 else 0.0))
        losses.append(sign * loss)
        masses.append(share * mass / mass.sum())
    return np.concatenate(losses), np.concatenate(masses)


def move_to_grid(part: Part, sign: int, h: float) -> tuple[NDArray[np.int64], Floats, float]:
    """Return losses that dominate the losses of a part: multiples of h, masses, infinite mass.

    Losses beyond the upper end are infinite, and those beyond the lower one are rounded up.
    """
    share, rate, noise, units = part
    ends = np.array([-_FAR * noise, units + _FAR * noise])
    low, high = _loss(ends, rate, noise, units)
    places = np.arange(math.floor(low / h), math.ceil(high / h) + 1)
    x = _invert(h * places, rate, noise, units)
    other, *absent = _masses(x / noise)
    mass, end, beyond = np.zeros_like(other), 0.0, 0.0
    for i, weight in enumerate(np.exp(_log_weights(rate, units))):
        shifted, before, after = _masses((x - i) / noise)
        mass, end, beyond = mass + weight * shifted, end + weight * before, beyond + weight * after
    if sign == -1:
        places = -places[::-1]
        mass, other = other[::-1], mass[::-1]
        beyond, end = absent
    # Far out all of it moves up, which is an upper bound too.
    start = np.exp(np.minimum(h * places[:-1], _EXPONENT))
    up = np.clip((mass - start * other) / -math.expm1(-h), 0.0, mass)
    at_lower_end = np.append(mass - up, 0.0)
    at_upper_end = np.insert(up, 0, end)
    return places, share * (at_lower_end + at_upper_end), share * beyond


def _masses(x: Floats) -> tuple[Floats, float, float]:
    """Return what a standard Gaussian has between points, before the first and after the last."""
    tail = special.ndtr(-np.abs(x))
    left, right = tail[:-1], tail[1:]
    holds_middle = (x[:-1] < 0) & (x[1:] > 0)
    masses = np.where(holds_middle, 1 - left - right, np.abs(left - right))
    return masses, float(special.ndtr(x[0])), float(special.ndtr(-x[-1]))
