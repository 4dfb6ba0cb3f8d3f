"""Micro-batches: every record once with its weight, no unit split, padding that counts nothing, few
shapes.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.data.loading import layout


def count_records(parts):
    """What each record counts over all micro-batches, padding included."""
    total = {}
    for part in parts:
        weights = np.ones(part.records.size) if part.weights is None else part.weights
        assert weights.shape == part.records.shape
        for record, weight in zip(part.records.tolist(), weights.tolist(), strict=True):
            total[record] = total.get(record, 0) + weight
    return total


@given(
    st.lists(st.integers(0, 99), max_size=40, unique=True),
    st.none() | st.integers(1, 12),
    st.sampled_from([None, 2]),
)
def test_single_records(records, bound, least):
    parts = layout(records, bound, least=least)
    assert count_records(parts) == dict.fromkeys(records, 1.0)
    assert [i for part in parts for i in part.records[: part.units].tolist()] == records
    for part in parts:
        assert part.group == 1
        assert bound is None or len(part.records) <= max(bound, least or 1)
        assert (part.weights is None) == (len(part.records) == part.units)
        # A row alone takes another path.
        assert (bound == 1 and not least) or len(part.records) > 1


@given(
    st.lists(st.integers(1, 5), max_size=12),
    st.none() | st.integers(5, 20),
    st.sampled_from(["mean", "sum"]),
)
def test_units(sizes, bound, reduction):
    width = max(sizes, default=1)
    starts = np.cumsum([0, *sizes])
    table = np.array(
        [[starts[u] + j if j < size else -1 for j in range(width)] for u, size in enumerate(sizes)],
        dtype=np.int64,
    ).reshape(len(sizes), width)
    parts = layout(table, bound, reduction)
    expected = {
        starts[u] + j: 1 / size if reduction == "mean" else 1.0
        for u, size in enumerate(sizes)
        for j in range(size)
    }
    assert count_records(parts) == pytest.approx(expected)
    seen = []
    for part in parts:
        assert bound is None or len(part.records) <= bound
        rows = part.records[: part.units * part.group].reshape(part.units, part.group)
        for row in rows:
            owner = {int(np.searchsorted(starts, r, side="right")) - 1 for r in row}
            assert len(owner) == 1  # a unit is never split, and filled up with its own record
            seen += owner
    assert sorted(seen) == list(range(len(sizes)))


def test_units_of_like_size_share_a_micro_batch():
    table = np.array([[0, -1, -1], [1, 2, 3], [4, -1, -1], [5, 6, 7]])
    parts = layout(table, 6)
    assert [(part.units, part.group) for part in parts] == [(2, 3), (2, 1)]
    assert parts[1].weights is None


def test_nothing_for_an_empty_batch():
    assert layout([]) == layout([], 3, least=3) == layout(np.zeros((0, 1)), 5) == []
