"""Work on a client's records that may fail, of which the server learns nothing.

Whether a client takes part must not depend on one of its records, so the server does not learn of
an exception from the loss or the collate function. The round is charged and answered with its
noise, on a sum to which the failing records add nothing:

    single examples   Halving finds the records that fail. All others add what they add without
                      them, so one record moves the sum by its own clipped gradient at most.
    clipped as one    The sum is zero, as for a client without records. A missing contribution of
                      norm C moves the sum by C.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpkfc.federated.local_model import ClientRecords, Indices, LocalModel
from dpkfc.tensors import Tensors


class GuardedLocalWork:
    """One round's work of a client on its records, and the first error in it.

    Args:
        local: model of the client.
        records: of the client.

    Attributes:
        error: the first error, None where there was none; PRIVATE.
    """

    def __init__(self, local: LocalModel, records: ClientRecords) -> None:
        self._local = local
        self._records = records
        self._has_contribution = False
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """PRIVATE: return whether no record contributed to the message because of an error."""
        return self.error is not None and not self._has_contribution

    def sum_examples(self, indices: Indices) -> Tensors:
        """PRIVATE: return the sum of clipped gradients; a record that fails adds zeros.

        Args:
            indices: of the records, `[n]`.
        """
        if not indices.size:
            return self._local.zeros()
        try:
            sums = self._local.clipped_sum(self._records, indices)
        except Exception as error:
            self.error = self.error or error
            if indices.size == 1:
                return self._local.zeros()
            first, second = (self.sum_examples(half) for half in np.array_split(indices, 2))
            return {name: x + second[name] for name, x in first.items()}
        self._has_contribution = True
        return sums

    def contribute_as_one(self, work: Callable[[], Tensors]) -> Tensors:
        """PRIVATE: return a contribution clipped as one; zeros without records or after an error.

        Args:
            work: returns the clipped contribution.
        """
        if not len(self._records):
            return self._local.zeros()
        try:
            contribution = work()
        except Exception as error:
            self.error = self.error or error
            return self._local.zeros()
        self._has_contribution = True
        return contribution
