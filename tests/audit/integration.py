"""Neighbours of every kind as pairs of Gaussian mixtures, and a second way to integrate: all with
numpy, without dp-accounting.

`dpkfc.privacy.integration` convolves the privacy loss by FFT. `contour_delta` knows no grid and no
convolution: it integrates the moment generating function of the loss along a line of complex
orders, which is δ itself (the inverse Laplace transform), to as many digits as the quadrature has
points.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

from dpkfc.privacy.integration import FAR, Losses, epsilon_of

Component = tuple[float, "float | tuple[float, ...]"]  # weight, shift of the mean


def _log_density(
    components: Sequence[Component], points: list[np.ndarray], stddev: float
) -> np.ndarray:
    logs = []
    for weight, shift in components:
        square = sum(
            ((x - a) / stddev) ** 2 for x, a in zip(points, np.atleast_1d(shift), strict=True)
        )
        logs.append(math.log(weight) - 0.5 * square)
    return special.logsumexp(logs, axis=0) if len(logs) > 1 else logs[0]


def pair(
    p: Sequence[Component], q: Sequence[Component], stddev: float, fine: int = 200
) -> list[Losses]:
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


def epsilon_of_pair(both: Sequence[Losses], count: int, delta: float) -> float:
    """The larger ε of the two directions."""
    return max(epsilon_of(losses, count, delta) for losses in both)


def poisson(q: float, stddev: float) -> list[Losses]:
    """One example that is in the batch with probability q and moves the sum by 1."""
    return pair([(1 - q, 0.0), (q, 1.0)], [(1.0, 0.0)], stddev)


def fixed_size(n: int, m: int, stddev: float) -> list[list[Losses]]:
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


def truncated(n: int, q: float, most: int, stddev: float, others: float) -> list[Losses]:
    """A data set of n examples against the same without one, under truncated Poisson sampling, in
    units of C.

    The example adds 1, every other one adds `others`.
    """
    drawn = np.arange(n)
    chance = stats.binom.pmf(drawn, n - 1, q)
    kept = chance > 1e-16
    p: list[Component] = []
    without: list[Component] = []
    for k, weight in zip(drawn[kept], chance[kept], strict=True):
        without.append((weight, min(k, most) * others))
        taken = q if k < most else q * most / (k + 1)
        p.append((weight * (1 - taken), min(k, most) * others))
        p.append((weight * taken, min(k, most - 1) * others + 1.0))
    return pair(_merged(p), _merged(without), stddev)


def _merged(components: Sequence[Component]) -> list[Component]:
    """Components of one shift together."""
    table: dict[float, float] = {}
    for weight, shift in components:
        table[shift] = table.get(shift, 0.0) + weight
    return [(weight, shift) for shift, weight in table.items()]


def contour_delta(
    losses: Losses, count: int, epsilon: float, tilt: float, points: int = 8000
) -> float:
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


def within(both: Sequence[Losses], count: int, epsilon: float, delta: float) -> bool:
    """Whether δ at ε is at most `delta` in either direction, by the integral that has no grid of
    losses.

    `epsilon_of_pair` rounds losses to a grid, which makes its ε too large by up to 1e-4; this
    decides where that matters.
    """
    return all(_sure_delta(losses, count, epsilon) <= delta for losses in both)


def _sure_delta(losses: Losses, count: int, epsilon: float) -> float:
    for tilt in (4.0, 2.0, 1.0, 0.5):
        with contextlib.suppress(ValueError, OverflowError):
            return contour_delta(losses, count, epsilon, tilt)
    return math.inf  # nothing is claimed where the quadrature does not hold


def one_release_delta(q: float, stddev: float, epsilon: float) -> float:
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
