"""Ways to divide a dataset between clients. Every record goes to exactly one client; all of it is public bookkeeping of a study.

Partitions are index arrays, so that any dataset can be cut by them; `parts` cuts tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

__all__ = ["by_column", "dirichlet", "iid", "parts", "quantity_skew"]

Partition = list[NDArray[np.int64]]


def iid(size: int, clients: int, seed: int = 0) -> Partition:
    """Sizes that differ by one at most, records at random.

    Raises:
        ValueError: fewer records than clients.
    """
    _check(size, clients)
    order = np.random.default_rng(seed).permutation(size)
    return [np.sort(piece) for piece in np.array_split(order, clients)]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int = 0, least: int = 0) -> Partition:
    """Label skew: of every label the clients get shares drawn from Dirichlet(alpha, …, alpha).

    Args:
        labels: `[n]`, of any type.
        clients: n.
        alpha: > 0; 0.1 leaves most clients with few labels, ∞ is even.
        seed: of the draw.
        least: fewest records of a client; the draw is repeated until it holds (100 times).

    Raises:
        ValueError: alpha not positive, or `least` out of reach.
    """
    kinds = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    _check(kinds.size, clients)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    for _ in range(100):
        owner = np.empty(kinds.size, dtype=np.int64)
        for kind in range(int(kinds.max()) + 1):
            mine = generator.permutation(np.flatnonzero(kinds == kind))
            even = np.full(clients, 1 / clients)
            share = generator.dirichlet(np.full(clients, alpha)) if np.isfinite(alpha) else even
            owner[mine] = np.searchsorted(np.cumsum(share)[:-1], (np.arange(mine.size) + 0.5) / mine.size)
        found = [np.flatnonzero(owner == client) for client in range(clients)]
        if min(len(piece) for piece in found) >= least:
            return found
    raise ValueError(f"no draw of 100 gives every client {least} records; lower least, or raise alpha = {alpha}")


def quantity_skew(size: int, clients: int, alpha: float, seed: int = 0) -> Partition:
    """Sizes drawn from Dirichlet(alpha, …, alpha), records at random.

    Raises:
        ValueError: alpha not positive.
    """
    _check(size, clients)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    order = generator.permutation(size)
    cuts = np.round(np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1] * size).astype(np.int64)
    return [np.sort(piece) for piece in np.split(order, cuts)]


def by_column(values: ArrayLike) -> tuple[Partition, list[str]]:
    """One client a value of a column: a hospital, a scanner, an author.

    Returns:
        (records of each, names in sorted order).
    """
    names, owner = np.unique(np.asarray(values), return_inverse=True)
    owner = owner.reshape(-1)
    return [np.flatnonzero(owner == i) for i in range(len(names))], [str(name) for name in names]


def parts(tensors: Sequence[Tensor], partition: Partition) -> list[tuple[Tensor, ...]]:
    """Tensors with a common first axis, cut into one tuple a client."""
    return [tuple(x[piece] for x in tensors) for piece in partition]


def _check(size: int, clients: int) -> None:
    if clients < 1 or size < clients:
        raise ValueError(f"{size} records cannot be divided between {clients} clients")
