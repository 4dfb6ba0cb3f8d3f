"""ε from our own distribution of the loss: for searches, for what a run shows, and for checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpkfc.privacy.events import (
    has_no_noise,
    is_gaussian,
    is_of_a_sampler,
    is_truncated,
    merge,
    neighbouring_sizes,
    two_parts,
)
from dpkfc.privacy.gaussian_pairs import Pair, gaussian_epsilon
from dpkfc.privacy.loss_distribution import choose_grid, epsilon_of_releases
from dpkfc.privacy.loss_grid import ACCURACY, Grid, Release

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from dpkfc.privacy.events import Charges

_RARE = 1e-3  # of δ, for the loss of full batches


@dataclass(frozen=True)
class QuickEpsilon:
    """An upper bound of ε without dp-accounting, in milliseconds.

    Attributes:
        value: ε.
        grid: the losses it was computed on; None for a closed form.
    """

    value: float
    grid: Grid | None = None


def quick_epsilon(
    charges: Charges, delta: float, planned: Charges = (), accuracy: float = ACCURACY
) -> QuickEpsilon | None:
    """Return ε of releases on the same people together, from our own distribution of the loss.

    Args:
        charges: event of one release and number of such releases.
        delta: δ in (0, 1).
        planned: at least as many releases, whose grid is taken; by default the same. Values on one
            grid rise with the number of releases.
        accuracy: what the grid may add to ε, as a part of it.

    Returns:
        The bound; None for events that are not of a sampler.
    """
    parts, delta = simplify(merge(charges), delta)
    if any(has_no_noise(event) for event, _ in parts):
        return QuickEpsilon(math.inf)
    if not all(is_of_a_sampler(event) for event, _ in parts):
        return None
    if not parts:
        return QuickEpsilon(0.0)
    if len(parts) == 1 and is_gaussian(parts[0][0]):
        ((event, count),) = parts
        return QuickEpsilon(epsilon_of_gaussians(event.noise_multiplier, count, delta))
    wanted = simplify(merge(planned), delta)[0] if planned else parts
    found = []
    # Truncated batches have two kinds of neighbours: of one record less, and of one more.
    for kind in (0, -1) if any(is_truncated(event) for event, _ in parts) else (0,):
        grid = choose_grid(_make_releases(wanted, kind), delta, accuracy)
        epsilon = epsilon_of_releases(_make_releases(parts, kind), delta, grid)
        found.append(QuickEpsilon(epsilon, grid))
    return max(found, key=lambda one: one.value)


def simplify(
    parts: Sequence[tuple[DpEvent, int]], delta: float
) -> tuple[Sequence[tuple[DpEvent, int]], float]:
    """Return one event of truncated batches without its full batches, where δ may cover them."""
    if len(parts) == 1 and is_truncated(parts[0][0]):
        ((event, count),) = parts
        divided = [two_parts(neighbour) for neighbour in neighbouring_sizes(event)]
        full = count * max(share for share, _, _ in divided)
        if full <= _RARE * delta:
            _, ordinary, _ = divided[0]
            return [(ordinary, count)], delta - full
    return parts, delta


def epsilon_of_gaussians(noise: float, count: int, delta: float) -> float:
    """Return ε of releases of everybody's data, from its closed form and rounded up."""
    return gaussian_epsilon(noise / math.sqrt(count), delta) * (1 + 1e-9) + 1e-9


def _make_releases(
    parts: Sequence[tuple[DpEvent, int]], kind: int
) -> tuple[tuple[Release, int], ...]:
    """Return the releases of events for one kind of neighbours."""
    return tuple((_make_release(neighbouring_sizes(event)[kind]), count) for event, count in parts)


def _make_release(event: DpEvent) -> Release:
    """Return a release of a sampler as weighted pairs of distributions."""
    pairs = [(1.0, event)]
    if is_truncated(event):
        full, ordinary, replacing = two_parts(event)
        pairs = [(1 - full, ordinary), (full, replacing)]
    release = []
    for weight, part in pairs:
        if weight == 0:
            continue
        if is_gaussian(part):
            release.append(Pair(weight, 1.0, part.noise_multiplier))
        else:
            release.append(Pair(weight, part.sampling_probability, part.event.noise_multiplier))
    return tuple(release)
