"""Numerical integrations of the privacy loss, as oracles: with numpy, and without dp-accounting.

Neighbours of every kind are pairs of Gaussian mixtures. `epsilon_of` convolves their losses by FFT
under a tilt: the trapezoidal rule makes atoms, whose error for Gaussian densities is below
rounding, and each atom is divided between two points of a grid. It is not a bound: its error,
mostly of the grid, is a few thousandths of ε at most. `contour_delta` knows no grid and no
convolution: it integrates the moment generating function of the loss along a line of complex
orders, which is δ itself (the inverse Laplace transform), to as many digits as the quadrature has
points.
"""

import contextlib
import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
import scipy
from scipy import special, stats

from dpkfc.privacy.events import is_truncated, neighbouring_sizes, two_parts
from dpkfc.privacy.gaussian_pairs import Floats, gaussian_epsilon

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

    def cumulant(self, tilt):
        """Return log E exp(tilt · loss)."""
        has_mass = self.mass > 0
        exponents = tilt * self.loss[has_mass]
        largest = float(exponents.max())
        total = float(self.mass[has_mass] @ np.exp(exponents - largest))
        return largest + math.log(total)


def sampled_losses(rate, stddev):
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


def integration_grid(stddev, shift=1):
    """Return points that hold Gaussians around 0 and `shift`, and the factor of each density."""
    step = stddev / _ATOMS_PER_STDDEV
    far = FAR * stddev
    points = np.arange(-far, shift + far, step)
    height = stddev * math.sqrt(2 * math.pi)
    return points, step / height


def epsilon_of(losses, count, delta):
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

    def excess(epsilon):
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


def _compose(tilted, count, points):
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


def integrated_epsilon(event, count, delta):
    """Return ε of `count` releases of an event of our samplers, None for any other event.

    For Poisson sampling (truncated or not) and full batches it integrates the pair of distributions
    that PLD and RDP bound. For batches of fixed size it is the cost of known neighbours, where
    every other example pulls the opposite way. No accountant may claim less.
    """
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


def _truncated_losses(event):
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


def _move_to_grid(loss, mass, h):
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


def _tilt(losses, count, delta):
    """Return about the tilt of the best Chernoff bound of δ."""

    def bound(log_tilt):
        tilt = math.exp(log_tilt)
        log_moment = count * losses.cumulant(tilt)
        return (log_moment - math.log(delta)) / tilt

    interval = (-14.0, 7.0)
    options = {"xatol": 0.01}
    best = scipy.optimize.minimize_scalar(bound, bounds=interval, method="bounded", options=options)
    log_tilt = float(best.x)
    return math.exp(log_tilt)


def _log_density(components, points, stddev):
    logs = []
    for weight, shift in components:
        square = sum(
            ((x - a) / stddev) ** 2 for x, a in zip(points, np.atleast_1d(shift), strict=True)
        )
        logs.append(math.log(weight) - 0.5 * square)
    return special.logsumexp(logs, axis=0) if len(logs) > 1 else logs[0]


def pair(p, q, stddev, fine=200):
    """The losses of p against q and of q against p, for mixtures of Gaussians of one standard
    deviation in any dimension.

    Args:
        p: components (weight, shift); those of weight 0 are left out.
        q: the same for the neighbour.
        stddev: of every component and coordinate.
        fine: points to a standard deviation and dimension.
    """
    p, q = ([(w, s) for w, s in side if w > 0] for side in (p, q))
    shifts = np.array([np.atleast_1d(s) for _, s in [*p, *q]], dtype=float)
    step = stddev / fine
    ends = zip(shifts.min(0) - FAR * stddev, shifts.max(0) + FAR * stddev, strict=True)
    points = list(np.meshgrid(*(np.arange(low, high, step) for low, high in ends), indexing="ij"))
    log_p, log_q = (_log_density(side, points, stddev).ravel() for side in (p, q))
    scale = len(points) * (math.log(step) - 0.5 * math.log(2 * math.pi) - math.log(stddev))
    made = []
    for above, below in ((log_p, log_q), (log_q, log_p)):
        mass = np.exp(above + scale)
        kept = mass > 1e-60
        made.append(Losses((above - below)[kept], mass[kept]))
    return made


def epsilon_of_pair(both, count, delta):
    """The larger ε of the two directions."""
    return max(epsilon_of(losses, count, delta) for losses in both)


def poisson(q, stddev):
    """One example that is in the batch with probability q and moves the sum by 1."""
    return pair([(1 - q, 0.0), (q, 1.0)], [(1.0, 0.0)], stddev)


def fixed_size(n, m, stddev):
    """Neighbours under fixed-size batches, in units of C: the example that is replaced goes from
    one side to the other.

    The others are all -1 (so that it also matters whom it displaces), all 0, or all 1.
    """
    q = m / n
    pairs = []
    for others in (-1.0, 0.0, 1.0):
        p = [(1 - q, m * others), (q, (m - 1) * others + 1.0)]
        pairs.append(pair(p, [(1 - q, m * others), (q, (m - 1) * others - 1.0)], stddev))
    return pairs


def list_truncated_pairs(n, q, most, stddev, others):
    """A data set of n examples against the same without one, under truncated Poisson sampling, in
    units of C.

    The example adds 1, every other one adds `others`.
    """
    drawn = np.arange(n)
    chance = stats.binom.pmf(drawn, n - 1, q)
    kept = chance > 1e-16
    p = []
    without = []
    for k, weight in zip(drawn[kept], chance[kept], strict=True):
        without.append((weight, min(k, most) * others))
        taken = q if k < most else q * most / (k + 1)
        p.append((weight * (1 - taken), min(k, most) * others))
        p.append((weight * taken, min(k, most - 1) * others + 1.0))
    return pair(_merged(p), _merged(without), stddev)


def _merged(components):
    """Components of one shift together."""
    table = {}
    for weight, shift in components:
        table[shift] = table.get(shift, 0.0) + weight
    return [(weight, shift) for shift, weight in table.items()]


def contour_delta(losses, count, epsilon, tilt, points=8000):
    """δ at ε, as (1 / 2πi) ∫ exp(count · K(s) - s ε) / (s (s + 1)) ds along Re s = tilt > 0, K the
    cumulant function.
    """
    weight = losses.mass * np.exp(tilt * losses.loss - losses.cumulant(tilt))
    seen = weight > 1e-20
    weight, loss = weight[seen], losses.loss[seen]
    spread = math.sqrt(count * float(weight @ (loss - weight @ loss) ** 2))
    # the integrand is nearly a Gaussian of standard deviation 1 / spread
    heights = np.linspace(0, 40 / spread, points)
    transform = np.concatenate(
        [np.exp(1j * np.outer(u, loss)) @ weight for u in np.array_split(heights, points // 250)]
    )
    if abs(transform[-1]) ** count > 1e-12:
        raise ValueError("the integrand does not fade: too few releases for this quadrature")
    s = tilt + 1j * heights
    integrand = np.real(transform**count * np.exp(-1j * heights * epsilon) / (s * (s + 1)))
    area = (integrand.sum() - 0.5 * integrand[0]) * (heights[1] - heights[0]) / math.pi
    return float(area * math.exp(count * losses.cumulant(tilt) - tilt * epsilon))


def holds_delta(both, count, epsilon, delta):
    """Whether δ at ε is at most `delta` in either direction, by the integral that has no grid of
    losses.

    `epsilon_of_pair` rounds losses to a grid, which makes its ε too large by up to 1e-4; this
    decides where that matters.
    """
    return all(_sure_delta(losses, count, epsilon) <= delta for losses in both)


def _sure_delta(losses, count, epsilon):
    for tilt in (4.0, 2.0, 1.0, 0.5):
        with contextlib.suppress(ValueError, OverflowError):
            return contour_delta(losses, count, epsilon, tilt)
    return math.inf  # nothing is claimed where the quadrature does not hold


def one_release_delta(q, stddev, epsilon):
    """δ of one Poisson-sampled release, in closed form: the larger hockey-stick divergence of the
    two directions.
    """
    above = stddev**2 * math.log((math.expm1(epsilon) + q) / q) + 0.5
    tail, shifted = stats.norm.sf(above / stddev), stats.norm.sf((above - 1) / stddev)
    exact = (1 - q) * tail + q * shifted - math.exp(epsilon) * tail
    if math.exp(-epsilon) > 1 - q:
        below = stddev**2 * math.log((math.exp(-epsilon) - 1 + q) / q) + 0.5
        low, mixed = stats.norm.cdf(below / stddev), stats.norm.cdf((below - 1) / stddev)
        exact = max(exact, low - math.exp(epsilon) * ((1 - q) * low + q * mixed))
    return float(exact)
