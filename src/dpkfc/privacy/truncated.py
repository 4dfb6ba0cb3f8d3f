"""Truncated Poisson sampling: what an example costs when it may take another one's place in a full batch.

Of two neighbouring data sets let the larger have N examples, and let k be how many of the N - 1 that both have are drawn. For
k < B nothing is left out, with the example or without it: an ordinary Poisson step of sensitivity C. For k >= B both batches
are full; without the example the batch is a uniform subset T of size B, whatever k is, and with it, with probability p,
the example stands in T where another one would: a Poisson step of rate p and sensitivity 2 C. Whether k < B does not depend on
the example, and divergences are jointly convex, so that the loss of a step is at most that of the mixture of the two
(Ganesh 2025, arXiv 2508.15089). Both parts are dp-accounting's own, for PLD and for RDP. Its event of this name takes the
second part for the replacement of an example, which serves all its neighbouring relations and claims up to 40 % more ε.
"""

from __future__ import annotations

import dp_accounting
import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["divergence_of_mixture", "neighbouring_sizes", "two_parts"]

def neighbouring_sizes(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """The event for both kinds of neighbours of a data set of N examples.

    A truncated event speaks of the larger of two data sets: without an example of its own the data set has N - 1, with one
    more N + 1, and which of the two pairs costs more depends on the settings. Any other event stands alone.
    """
    kind = dp_accounting.TruncatedSubsampledGaussianDpEvent
    if not isinstance(event, kind):
        return [event]
    rate, most, noise = event.sampling_probability, event.truncated_batch_size, event.noise_multiplier
    return [event, kind(event.dataset_size + 1, rate, most, noise)]


def two_parts(
    event: dp_accounting.TruncatedSubsampledGaussianDpEvent,
) -> tuple[float, dp_accounting.DpEvent, dp_accounting.DpEvent]:
    """(probability of a full batch, event of a step whose batch is not full, event of one whose batch is)."""
    n, q, most = event.dataset_size, event.sampling_probability, event.truncated_batch_size
    full = float(stats.binom.sf(most - 1, n - 1, q))
    ordinary = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(event.noise_multiplier))
    if full == 0:
        return 0.0, ordinary, ordinary
    chance = min(1.0, float(stats.binom.sf(most, n, q)) * most / n / full)
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
