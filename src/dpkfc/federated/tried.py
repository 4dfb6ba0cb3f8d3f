"""What a client sends where work on its records fails: whether it takes part must not depend on one of them.

An exception from the loss or the collate function is not told to the server. The round is charged and answered with the noise
that is owed, on a sum to which the records that failed add nothing:

    single examples   those that fail are found by halving; all others add what they add without them, so that one record moves
                      the sum by no more than its own clipped gradient, whatever it does to a batch
    clipped as one    zeros, as of a client without records: a contribution of norm C that is missing moves the sum by C
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dpkfc.federated.work import LocalModel, Records, Tensors

__all__ = ["Tried"]


class Tried:
    """One round's work of a client on its records, and what went wrong in it.

    Args:
        local: model of the client.
        records: of the client.

    Attributes:
        error: the first that was met, None where there was none; PRIVATE.
    """

    def __init__(self, local: LocalModel, records: Records) -> None:
        self._local, self._records = local, records
        self._worked = False
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """PRIVATE: whether nothing of the records is in what was sent."""
        return self.error is not None and not self._worked

    def examples(self, drawn: NDArray[np.int64]) -> Tensors:
        """PRIVATE: the sum of clipped gradients of the records drawn; where a batch fails, that of its halves.

        A record that fails alone adds zeros.

        Args:
            drawn: indices `[n]`.
        """
        if not drawn.size:
            return self._local.zeros()
        try:
            sums = self._local.clipped_sum(self._records, drawn)
        except Exception as error:
            self._met(error)
            if drawn.size == 1:
                return self._local.zeros()
            one, other = (self.examples(half) for half in np.array_split(drawn, 2))
            return {name: x + other[name] for name, x in one.items()}
        self._worked = True
        return sums

    def whole(self, work: Callable[[], Tensors]) -> Tensors:
        """PRIVATE: a contribution that is clipped as one; zeros where there are no records, or where it fails.

        Args:
            work: gives the clipped contribution.
        """
        if not len(self._records):
            return self._local.zeros()
        try:
            found = work()
        except Exception as error:
            self._met(error)
            return self._local.zeros()
        self._worked = True
        return found

    def _met(self, error: Exception) -> None:
        self.error = self.error or error
