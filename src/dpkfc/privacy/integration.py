"""Integrate ε numerically, without dp-accounting, to check its accountants before a run.

The pair of distributions of one release becomes atoms of the privacy loss by the trapezoidal rule,
whose error for Gaussian densities is below rounding. Each atom is divided between the two nearest
points of a grid so that its probabilities under both distributions stay the same (Doroshenko et al.
2022). The atoms are convolved by FFT under an exponential tilt, which puts the middle of the
distribution where ε will be. A small δ then has as many correct digits as a large one. The result
is not a bound: its error, mostly of the grid, is a few thousandths of ε at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy
from numpy.typing import NDArray

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import DpEvent

Floats = NDArray[np.float64]

# --------------------------------------------------------------------------------------------------
# Truncated Poisson sampling: the cost of an example that may take the place of another one in a
# full batch.
#
# Of two neighbouring datasets let the larger one have N examples, and let k be how many of the N -
# 1 common examples are sampled. For k < B no example is cut, with the extra example or without it:
# an ordinary Poisson step of sensitivity C. For k >= B both batches are full. Without the extra
# example the batch is a uniform subset T of size B, whatever k is. With it, with probability p, the
# example replaces another one in T: a Poisson step of rate p and sensitivity 2 C. Whether k < B
# does not depend on the example, and divergences are jointly convex, so the loss of a step is at
# most the loss of the mixture of the two (Ganesh 2025, arXiv 2508.15089). Both parts are events of
# dp-accounting, for PLD and for RDP. Its own event of this name uses the second part for the
# replacement of an example. It serves all its neighbouring relations and claims up to 40 % more ε.


def is_truncated(event: DpEvent) -> bool:
    """Return whether the event is one release of truncated Poisson sampling."""
    import dp_accounting

    return isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent)


def neighbouring_sizes(event: DpEvent) -> list[DpEvent]:
    """Return the event for both kinds of neighbours of a dataset of N examples.

    A truncated event describes the larger of two datasets. Neighbours of N examples have N - 1 or N
    + 1 of them, and the settings decide which pair costs more. Any other event is returned alone.
    """
    import dp_accounting

    if not is_truncated(event):
        return [event]
    larger = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        event.dataset_size + 1,
        event.sampling_probability,
        event.truncated_batch_size,
        event.noise_multiplier,
    )
    return [event, larger]


def two_parts(
    event: dp_accounting.TruncatedSubsampledGaussianDpEvent,
) -> tuple[float, DpEvent, DpEvent]:
    """Return the two parts of a truncated event.

    Returns:
        The probability of a full batch, the event of a step with a smaller batch, and the event of
        a step with a full batch.
    """
    import dp_accounting

    n = event.dataset_size
    q = event.sampling_probability
    largest = event.truncated_batch_size
    noise = event.noise_multiplier
    others = n - 1
    full = float(scipy.stats.binom.sf(largest - 1, others, q))
    gaussian = dp_accounting.GaussianDpEvent(noise)
    ordinary = dp_accounting.PoissonSampledDpEvent(q, gaussian)
    if full == 0:
        return 0.0, ordinary, ordinary
    above = float(scipy.stats.binom.sf(largest, n, q))
    chance = min(1.0, above * largest / n / full)
    gaussian = dp_accounting.GaussianDpEvent(noise / 2)
    replacing = dp_accounting.PoissonSampledDpEvent(chance, gaussian)
    return full, ordinary, replacing


def divergence_of_mixture(
    orders: Floats,
    full: float,
    ordinary: Floats,
    replacing: Floats,
) -> Floats:
    """Return a bound of the Rényi divergences of a mixture of two pairs.

    Args:
        orders: α > 1 `[n]`.
        full: weight of the second pair.
        ordinary: divergences of the first pair `[n]`.
        replacing: divergences of the second pair `[n]`.
    """
    if full == 0:
        return ordinary
    if full == 1:
        return replacing
    powers = orders - 1
    with np.errstate(over="ignore", divide="ignore"):
        first = np.log1p(-full) + powers * ordinary
        second = np.log(full) + powers * replacing
        total = np.logaddexp(first, second)
        return np.asarray(total / powers)


# --------------------------------------------------------------------------------------------------

# Standard deviations beyond which a Gaussian has less than 1e-37.
FAR = 13.0
MOST_POINTS = 1 << 22
_ATOMS_PER_STDDEV = 200
_NEGLIGIBLE = 1e-18  # tilted probability of an atom
_NEGLIGIBLE_EXPONENT = 40.0  # e⁻⁴⁰ counts as zero


@dataclass(frozen=True)
class Losses:
    """Atoms of the privacy loss log(p / q) under p.

    Attributes:
        loss: values `[n]`.
        mass: their probabilities `[n]`.
    """

    loss: Floats
    mass: Floats

    def cumulant(self, tilt: float) -> float:
        """Return log E exp(tilt · loss)."""
        has_mass = self.mass > 0
        exponents = tilt * self.loss[has_mass]
        largest = float(exponents.max())
        total = float(self.mass[has_mass] @ np.exp(exponents - largest))
        return largest + math.log(total)


def sampled_losses(rate: float, stddev: float) -> Losses:
    """Return the losses of the presence of an example against its absence.

    The example is in the batch with probability `rate` and then moves the sum by 1. For ε >= 0
    this direction costs at least as much as the opposite one.
    """
    x, cell = integration_grid(stddev)
    # Logarithm of the ratio of the two densities.
    log_ratio = (x - 0.5) / stddev**2
    log_absence = -math.inf
    if rate < 1:
        log_absence = math.log1p(-rate)
    loss = np.logaddexp(log_absence, math.log(rate) + log_ratio)
    unit = x / stddev
    density = np.exp(loss - 0.5 * unit**2)
    return Losses(loss, density * cell)


def integration_grid(stddev: float, shift: float = 1) -> tuple[Floats, float]:
    """Return points that hold Gaussians around 0 and `shift`, and the factor of each density."""
    step = stddev / _ATOMS_PER_STDDEV
    far = FAR * stddev
    points = np.arange(-far, shift + far, step)
    height = stddev * math.sqrt(2 * math.pi)
    return points, step / height


def epsilon_of(losses: Losses, count: int, delta: float) -> float:
    """Return ε at δ of `count` independent losses, 0 where their δ at ε = 0 is smaller."""
    loss = losses.loss
    tilt = _tilt(losses, count, delta)
    log_weight = tilt * loss - losses.cumulant(tilt)
    weight = losses.mass * np.exp(log_weight)
    mean = float(weight @ loss)
    variance = float(weight @ (loss - mean) ** 2)
    spread = math.sqrt(count * variance)
    is_relevant = weight > _NEGLIGIBLE
    relevant = Losses(loss[is_relevant], losses.mass[is_relevant])
    reach = float(np.ptp(relevant.loss))
    width = 30 * spread + 3 * reach + 1.0
    # The interval h of the grid of losses.
    sharpness = count * (1 + tilt)
    finest = math.sqrt(1e-3 / sharpness)
    wanted = min(1e-3, spread / 100, finest)
    h = max(width / MOST_POINTS, wanted)
    first, mass = _move_to_grid(relevant.loss, relevant.mass, h)
    places = first + np.arange(mass.size, dtype=np.float64)
    moved = Losses(h * places, mass)
    scale = moved.cumulant(tilt)
    tilted = mass * np.exp(tilt * moved.loss - scale)
    needed = max(width / h, 2 * mass.size)
    points = scipy.fft.next_fast_len(math.ceil(needed), real=True)
    lowest, composed = _compose(tilted, count, points)
    start = h * (count * first + lowest)
    begin = int(np.argmax(composed > _NEGLIGIBLE))

    def excess(epsilon: float) -> float:
        """Return the logarithm of δ(ε) / δ."""
        above = math.floor((epsilon - start) / h) + 1
        index = max(begin, above)
        reach = math.ceil(_NEGLIGIBLE_EXPONENT / (tilt * h))
        end = min(points, index + reach + 1)
        away = start + h * np.arange(index, end) - epsilon
        if not away.size:
            return -math.inf
        nearest = away[0]
        decay = np.exp(-tilt * (away - nearest))
        factors = -np.expm1(-away) * decay
        masses = composed[index : index + away.size]
        tail = float(factors @ masses)
        log_tail = math.log(max(tail, 1e-300))
        untilted = count * scale - tilt * (epsilon + nearest)
        return untilted + log_tail - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = start + h * (points - 1)
    while excess(0.5 * high) < 0:
        high *= 0.5
    root = scipy.optimize.brentq(excess, 0.0, high, xtol=1e-9)
    return float(root)


def _compose(tilted: Floats, count: int, points: int) -> tuple[int, Floats]:
    """Return the losses of `count` releases, composed by a power of the Fourier transform.

    Args:
        tilted: masses on a grid from place 0.
        count: number of releases.
        points: length of the result, which holds the middle of the composed losses.

    Returns:
        The place of the first mass, and the masses.
    """
    spectrum = scipy.fft.rfft(tilted, points)
    composed = scipy.fft.irfft(spectrum**count, points)
    places = np.arange(tilted.size, dtype=np.float64)
    mean_place = float(tilted @ places)
    middle = round(count * mean_place)
    lowest = middle - points // 2
    shift = lowest % points
    composed = np.roll(composed, -shift)
    return lowest, np.maximum(composed, 0.0)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return ε of the Gaussian mechanism, from its closed form (Balle and Wang 2018)."""
    mu = 1 / noise_multiplier

    def excess(epsilon: float) -> float:
        place = epsilon / mu
        above = scipy.special.log_ndtr(mu / 2 - place)
        below = epsilon + scipy.special.log_ndtr(-mu / 2 - place)
        gap = min(below - above, -1e-300)
        log_delta = above + math.log(-math.expm1(gap))
        return float(log_delta) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root = scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12)
    return float(root)


def integrated_epsilon(event: DpEvent, count: int, delta: float) -> float | None:
    """Return ε of `count` releases of an event of our samplers, None for any other event.

    For Poisson sampling (truncated or not) and full batches it integrates the pair of distributions
    that PLD and RDP bound. For batches of fixed size it is the cost of known neighbours, where
    every other example pulls the opposite way. No accountant may claim less.
    """
    import dp_accounting

    if isinstance(event, dp_accounting.GaussianDpEvent):
        noise = event.noise_multiplier / math.sqrt(count)
        return gaussian_epsilon(noise, delta)
    if is_truncated(event):
        pairs = map(_truncated_losses, neighbouring_sizes(event))
        return max(epsilon_of(losses, count, delta) for losses in pairs)
    inner = getattr(event, "event", None)
    if not isinstance(inner, dp_accounting.GaussianDpEvent):
        return None
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        rate = event.sampling_probability
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = event.sample_size / event.source_dataset_size
    else:
        return None
    return epsilon_of(sampled_losses(rate, inner.noise_multiplier), count, delta)


def _truncated_losses(event: dp_accounting.TruncatedSubsampledGaussianDpEvent) -> Losses:
    """Return the weighted losses of both parts of the mixture; the part itself may be public."""
    full, *parts = two_parts(event)
    losses = []
    masses = []
    for weight, part in zip((1 - full, full), parts, strict=True):
        if weight > 0:
            part_losses = sampled_losses(part.sampling_probability, part.event.noise_multiplier)
            losses.append(part_losses.loss)
            masses.append(weight * part_losses.mass)
    loss = np.concatenate(losses)
    mass = np.concatenate(masses)
    return Losses(loss, mass)


def _move_to_grid(loss: Floats, mass: Floats, h: float) -> tuple[int, Floats]:
    """Return the first index and the masses on multiples of h.

    The fraction of each atom that moves up keeps its probability under both distributions.
    """
    low = np.floor(loss / h)
    rest = low * h - loss
    up = np.expm1(rest) / math.expm1(-h)
    first = int(low.min())
    index = low - first
    index = index.astype(np.int64)
    size = int(index.max()) + 2
    rising = mass * up
    lower = np.bincount(index, mass * (1 - up), size)
    upper = np.bincount(index + 1, rising, size)
    moved = lower + upper
    return first, np.asarray(moved, np.float64)


def _tilt(losses: Losses, count: int, delta: float) -> float:
    """Return about the tilt of the best Chernoff bound of δ."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        log_moment = count * losses.cumulant(tilt)
        return (log_moment - math.log(delta)) / tilt

    interval = (-14.0, 7.0)
    options = {"xatol": 0.01}
    best = scipy.optimize.minimize_scalar(bound, bounds=interval, method="bounded", options=options)
    log_tilt = float(best.x)
    return math.exp(log_tilt)
