"""What one record of a dataset gives may depend on nothing that was read before it.

Augmentation is random, and is to draw from the global generators: those of a private pass begin at numbers that nobody knows
(`random_state`). A generator of the dataset's own is not restarted. Its numbers go to records in the order of reading, so that
one record more gives all that come after it other ones; a running statistic of the records read does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.gradients.random_state import begin_at, fresh_seed, kept_numbers

__all__ = ["check_steady"]

_READ = 8  # records that are read twice: one may be alike by chance
_DEPTH = 6
_LIKE = {"rtol": 1e-6, "atol": 1e-6}  # what a processor may round in another way, in another place of its memory


def check_steady(record: Callable[[int], Any], records: int) -> None:
    """Raise if a record, read twice under one state of the global generators, gives two things: others were read in between.

    Args:
        record: reads one, as it goes into a batch. One that fails is left to the pass that reads it.
        records: how many there are.

    Raises:
        ValueError: naming the record.
    """
    rows = np.unique(np.linspace(0, records - 1, min(records, _READ)).astype(np.int64)).tolist()
    with kept_numbers():
        seeds = {row: fresh_seed() for row in rows}

        def read(row: int) -> Any:
            begin_at(seeds[row])
            try:
                return record(row)
            except Exception:
                return None

        first = {row: read(row) for row in rows}
        for row in reversed(rows):  # so that each has others before it
            again = read(row)
            if first[row] is not None and again is not None and not _alike(first[row], again):
                raise ValueError(
                    f"record {row} of the dataset gave two different things when it was read twice under the same random "
                    "numbers: the dataset, or its collate function, draws from a generator of its own, or remembers what it has "
                    "read. One record would then change what others give, and ε would not hold. Draw from torch's, numpy's or "
                    "Python's global generator, or make your own from it at every reading: "
                    "np.random.default_rng(int(torch.randint(2**62, ())))"
                )


def _alike(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether two values hold the same, as far as can be looked into them."""
    if one is other or depth == 0:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (str, bytes)):
        return one == other
    if isinstance(one, Tensor) or _is_array(one):
        return _close(one, other)
    ours, theirs = _parts(one), _parts(other)
    return list(ours) == list(theirs) and all(_alike(ours[k], theirs[k], depth - 1) for k in ours)


def _is_array(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, np.generic)) or hasattr(x, "__array_interface__")  # an image of PIL has it


def _parts(x: Any) -> dict[Any, Any]:
    """What a container or an object holds, by name or number."""
    if isinstance(x, Mapping):
        return dict(x)
    return dict(enumerate(x)) if isinstance(x, (list, tuple)) else getattr(x, "__dict__", {})


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if one.layout != torch.strided or one.is_nested or one.is_quantized:
            return True  # not compared
        one, other = (x.detach().cpu() for x in (one, other))
        one, other = ((x.float() if x.dtype == torch.bfloat16 else x).numpy() for x in (one, other))
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind in "fc":
        return bool(np.allclose(one, other, **_LIKE, equal_nan=True))
    return one.dtype.hasobject or np.array_equal(one, other)
