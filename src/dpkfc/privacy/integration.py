"""ε by numerical integration, without dp-accounting: the figure that its accountants are held against before a run.

The pair of distributions that an example can make of one release becomes atoms of the privacy loss by the trapezoidal rule,
whose error for Gaussian densities is below rounding. Each atom is divided between the two nearest points of a grid so that
its probabilities under both distributions stay what they are (Doroshenko et al. 2022), and the atoms are convolved by FFT.
This is done under an exponential tilt, which puts the middle of the distribution where ε will be: a small δ then has as many
correct digits as a large one. It is no bound: its error, mostly of the grid, is a few thousandths of ε at most.
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

# --------------------------------------------------------------------------------------------------
# Truncated Poisson sampling: what an example costs when it may take another one's place in a full
# batch.
#
# Of two neighbouring data sets let the larger have N examples, and let k be how many of the N - 1
# that both have are drawn. For k < B nothing is left out, with the example or without it: an
# ordinary Poisson step of sensitivity C. For k >= B both batches are full; without the example the
# batch is a uniform subset T of size B, whatever k is, and with it, with probability p, the example
# stands in T where another one would: a Poisson step of rate p and sensitivity 2 C. Whether k < B
# does not depend on the example, and divergences are jointly convex, so that the loss of a step is
# at most that of the mixture of the two (Ganesh 2025, arXiv 2508.15089). Both parts are
# dp-accounting's own, for PLD and for RDP. Its event of this name takes the second part for the
# replacement of an example, which serves all its neighbouring relations and claims up to 40 % more
# ε.


def neighbouring_sizes(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The event for both kinds of neighbours of a data set of N examples.

    A truncated event speaks of the larger of two data sets: without an example of its own the data set has N - 1, with one
    more N + 1, and which of the two pairs costs more depends on the settings. Any other event stands alone.
    """
    import dp_accounting

    kind = dp_accounting.TruncatedSubsampledGaussianDpEvent
    if not isinstance(event, kind):
        return [event]
    rate, most, noise = event.sampling_probability, event.truncated_batch_size, event.noise_multiplier
    return [event, kind(event.dataset_size + 1, rate, most, noise)]


def two_parts(
    event: dp_accounting.TruncatedSubsampledGaussianDpEvent,
) -> tuple[float, dp_accounting.DpEvent, dp_accounting.DpEvent]:
    """(probability of a full batch, event of a step whose batch is not full, event of one whose batch is)."""
    import dp_accounting

    n, q, most = event.dataset_size, event.sampling_probability, event.truncated_batch_size
    full = float(scipy.stats.binom.sf(most - 1, n - 1, q))
    ordinary = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(event.noise_multiplier))
    if full == 0:
        return 0.0, ordinary, ordinary
    chance = min(1.0, float(scipy.stats.binom.sf(most, n, q)) * most / n / full)
    replacing = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
    return full, ordinary, dp_accounting.PoissonSampledDpEvent(chance, replacing)


def divergence_of_mixture(
    orders: NDArray[np.float64], full: float, ordinary: NDArray[np.float64], replacing: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A bound of the Rényi divergences of a mixture of two pairs.

    Args:
        orders: α > 1 `[n]`.
        full: weight of the second pair.
        ordinary: divergences of the first pair `[n]`.
        replacing: divergences of the second pair `[n]`.
    """
    if full in (0, 1):
        return replacing if full else ordinary
    with np.errstate(over="ignore", divide="ignore"):
        first = np.log1p(-full) + (orders - 1) * ordinary
        second = np.log(full) + (orders - 1) * replacing
        return np.asarray(np.logaddexp(first, second) / (orders - 1))


# --------------------------------------------------------------------------------------------------

FAR = 13.0  # standard deviations, beyond which a Gaussian has less than 1e-37
MOST_POINTS = 1 << 22
_FINE = 200  # atoms to a standard deviation
_SEEN = 1e-18  # tilted probability below which an atom plays no part
_FADED = 40.0  # e to the power of minus this is nothing
Floats = NDArray[np.float64]


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
        """log E exp(tilt · loss)."""
        return float(scipy.special.logsumexp(tilt * self.loss, b=self.mass))

    def part(self, weight: float) -> tuple[Floats, Floats]:
        """As a part of a mixture."""
        return self.loss, weight * self.mass


def sampled_losses(rate: float, stddev: float, shift: float = 1.0) -> Losses:
    """An example that is in the batch with probability `rate` and then moves the sum by `shift`, against its absence.

    For ε >= 0 this direction costs at least as much as the other one.
    """
    step = stddev / _FINE
    x = np.arange(-FAR * stddev, shift + FAR * stddev, step)
    ratio = shift * (x - shift / 2) / stddev**2  # log of the shifted density over the other
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + ratio)
    mass = np.exp(loss - 0.5 * (x / stddev) ** 2) * (step / (stddev * math.sqrt(2 * math.pi)))
    return Losses(loss, mass)


def epsilon_of(losses: Losses, count: int, delta: float) -> float:
    """ε at δ of `count` independent losses of this kind; 0 where their δ at ε = 0 is smaller."""
    tilt = _tilt(losses, count, delta)
    weight = losses.mass * np.exp(tilt * losses.loss - losses.cumulant(tilt))
    mean = float(weight @ losses.loss)
    spread = math.sqrt(count * float(weight @ (losses.loss - mean) ** 2))
    seen = weight > _SEEN
    reach = float(np.ptp(losses.loss[seen]))
    width = 30 * spread + 3 * reach + 1.0
    h = max(width / MOST_POINTS, min(1e-3, spread / 100, math.sqrt(1e-3 / (count * (1 + tilt)))))
    first, mass = _on_grid(losses.loss[seen], losses.mass[seen], h)
    at = h * (first + np.arange(mass.size))
    scale = float(scipy.special.logsumexp(tilt * at, b=mass))
    tilted = mass * np.exp(tilt * at - scale)
    points = scipy.fft.next_fast_len(math.ceil(max(width / h, 2 * mass.size)), real=True)
    composed = scipy.fft.irfft(scipy.fft.rfft(tilted, points) ** count, points)
    lowest = round(count * float(tilted @ np.arange(mass.size))) - points // 2
    composed = np.maximum(np.roll(composed, -(lowest % points)), 0.0)
    start, begin = h * (count * first + lowest), int(np.argmax(composed > _SEEN))

    def excess(epsilon: float) -> float:
        """The logarithm of δ(ε) / δ."""
        index = max(begin, math.floor((epsilon - start) / h) + 1)
        away = start + h * np.arange(index, min(points, index + math.ceil(_FADED / (tilt * h)) + 1)) - epsilon
        if not away.size:
            return -math.inf
        found = float((-np.expm1(-away) * np.exp(-tilt * (away - away[0]))) @ composed[index : index + away.size])
        return count * scale - tilt * (epsilon + away[0]) + math.log(max(found, 1e-300)) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = start + h * (points - 1)
    while excess(0.5 * high) < 0:
        high *= 0.5
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-9))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """ε of the Gaussian mechanism, from its closed form (Balle and Wang 2018)."""
    mu = 1 / noise_multiplier

    def excess(epsilon: float) -> float:
        above, below = scipy.special.log_ndtr(mu / 2 - epsilon / mu), epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(above + math.log(-math.expm1(min(below - above, -1e-300)))) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12))


def integrated_epsilon(event: dp_accounting.DpEvent, count: int, delta: float) -> float | None:
    """ε of `count` releases of an event of this package's samplers; None for any other event.

    For Poisson sampling (truncated or not) and full batches it integrates the pair of distributions that PLD and RDP bound.
    For batches of fixed size it is what known neighbours cost (every other example pulls the other way): no accountant may
    claim less.
    """
    import dp_accounting

    if isinstance(event, dp_accounting.GaussianDpEvent):
        return gaussian_epsilon(event.noise_multiplier / math.sqrt(count), delta)
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return max(epsilon_of(_truncated_losses(one), count, delta) for one in neighbouring_sizes(event))
    inner = getattr(event, "event", None)
    if not isinstance(inner, dp_accounting.GaussianDpEvent):
        return None
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return epsilon_of(sampled_losses(event.sampling_probability, inner.noise_multiplier), count, delta)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = event.sample_size / event.source_dataset_size
        return epsilon_of(sampled_losses(rate, inner.noise_multiplier), count, delta)
    return None


def _truncated_losses(event: dp_accounting.TruncatedSubsampledGaussianDpEvent) -> Losses:
    """Both parts of the mixture, weighted: which of them it was may as well be seen."""
    full, *both = two_parts(event)
    parts = [
        sampled_losses(part.sampling_probability, part.event.noise_multiplier).part(weight)
        for weight, part in zip((1 - full, full), both, strict=True)
        if weight > 0
    ]
    return Losses(np.concatenate([loss for loss, _ in parts]), np.concatenate([mass for _, mass in parts]))


def _on_grid(loss: Floats, mass: Floats, h: float) -> tuple[int, Floats]:
    """(first index, masses) on multiples of h: of each atom as much goes up as keeps its probability under q, too."""
    low = np.floor(loss / h)
    up = np.expm1(low * h - loss) / math.expm1(-h)
    first = int(low.min())
    index = (low - first).astype(np.int64)
    size = int(index.max()) + 2
    lower, upper = np.bincount(index, mass * (1 - up), size), np.bincount(index + 1, mass * up, size)
    return first, np.asarray(lower + upper, dtype=np.float64)


def _tilt(losses: Losses, count: int, delta: float) -> float:
    """About where the Chernoff bound of δ is best."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (count * losses.cumulant(tilt) - math.log(delta)) / tilt

    best = scipy.optimize.minimize_scalar(
        bound, bounds=(-14.0, 7.0), method="bounded", options={"xatol": 0.01}
    )
    return math.exp(float(best.x))
