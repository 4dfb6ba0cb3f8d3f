"""Ways to divide a dataset between the clients of a study. Every record goes to exactly one client.

Partitions are index arrays, so that they can divide any dataset; `parts` divides tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Partition = list[NDArray[np.int64]]


def iid(size: int, clients: int, seed: int = 0) -> Partition:
    """Divide records at random into parts whose sizes differ by one at most.

    Raises:
        ValueError: fewer records than clients.
    """
    _check_size(size, clients)
    order = np.random.default_rng(seed).permutation(size)
    return [np.sort(piece) for piece in np.array_split(order, clients)]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int = 0) -> Partition:
    """Divide records with label skew: fractions of labels follow Dirichlet(alpha, …, alpha).

    Args:
        labels: `[n]`, of any type.
        clients: n.
        alpha: > 0; 0.1 leaves most clients with few labels, ∞ is even.
        seed: of the draw.

    Raises:
        ValueError: alpha not positive.
    """
    classes = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    _check_size(classes.size, clients)
    # It may be infinite.
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    generator = np.random.default_rng(seed)
    owner = np.empty(classes.size, dtype=np.int64)
    for label in range(int(classes.max()) + 1):
        indices = generator.permutation(np.flatnonzero(classes == label))
        fractions = np.full(clients, 1 / clients)
        if np.isfinite(alpha):
            fractions = generator.dirichlet(np.full(clients, alpha))
        positions = (np.arange(indices.size) + 0.5) / indices.size
        owner[indices] = np.searchsorted(np.cumsum(fractions)[:-1], positions)
    return [np.flatnonzero(owner == client) for client in range(clients)]


def parts(tensors: Sequence[Tensor], partition: Partition) -> list[tuple[Tensor, ...]]:
    """Divide tensors with a common first axis into one tuple a client."""
    return [tuple(x[piece] for x in tensors) for piece in partition]


def _check_size(size: int, clients: int) -> None:
    if clients < 1 or size < clients:
        raise ValueError(
            f"{size} records cannot be divided between {clients} clients; give each client one at "
            "least"
        )
