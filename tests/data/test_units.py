"""Units: every record belongs to one, at most so many count in a step, and which ones is drawn
anew.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.data.units import Units, read_unit_ids


def rng(seed=0):
    return np.random.default_rng(seed)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 70))
def test_records_of_every_unit(ids, limit):
    units = Units.from_ids(ids, limit)
    assert len(units) == len(set(ids))
    table = units.draw(np.arange(len(units)), rng())
    for unit, row in zip(sorted(set(ids)), table, strict=True):
        own = {i for i, x in enumerate(ids) if x == unit}
        drawn = [i for i in row.tolist() if i >= 0]
        assert len(drawn) == len(set(drawn)) == min(limit, len(own))
        assert set(drawn) <= own
        assert row.tolist() == drawn + [-1] * (len(row) - len(drawn))  # filled at the end only
    assert table.shape[1] == min(limit, max(ids.count(x) for x in ids))


def test_no_units_no_records():
    units = Units.from_ids([3, 3, 1], 2)
    assert units.draw(np.array([], dtype=np.int64), rng()).shape == (0, 1)
    assert units.draw(np.array([1, 1]), rng()).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    "ids",
    [
        [5, 9, 5],
        np.array([5, 9, 5]),
        torch.tensor([5, 9, 5]),
        ["p5", "p9", "p5"],
        np.array(["p5", "p9", "p5"], dtype=object),
        [0.5, 9.0, 0.5],
        np.array(["2020-01-01", "2021-01-01", "2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda x: f"{type(x).__name__}-{type(x[0]).__name__}",
)
def test_ids_of_any_kind(ids):
    assert Units.from_ids(ids, 3).draw(np.arange(2), rng()).tolist() == [[0, 2], [1, -1]]


# It names neither a record nor how many there are.
NO_UNIT = "^some records have no unit, so no guarantee covers them: leave them out, or give each a"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2]], r"vector with one id a record, got an array of shape \(1, 2\)"),
        ([], "vector with one id a record"),
        ([1.0, float("nan"), float("nan")], NO_UNIT),
        (["a", None], NO_UNIT),
        (np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"), NO_UNIT),
        (np.array(["a", 1], dtype=object), "mixed types"),
        (["p1", "p2", float("nan")], NO_UNIT),
        (["p1", "p2", " "], NO_UNIT),
        (np.array(["p1", "p2", float("nan")]), NO_UNIT),
        (np.ma.masked_array([1, 2, 3], mask=[False, True, False]), NO_UNIT),
        ([7, "7", 8], "mixed types"),
        ([2**53, 2**53 + 1, 0.5], "mixed types"),
    ],
)
def test_ids_that_protect_nobody_are_refused_without_naming_a_record(ids, message):
    with pytest.raises(ValueError, match=message):
        Units.from_ids(ids, 2)


@pytest.mark.parametrize(
    "ids", [[2**63 + 1, 2**63 + 3, -1], ["a", "a\0", "b"], [np.str_("a"), "b", "c"]]
)
def test_ids_that_numpy_would_change_stay_apart(ids):
    assert len(Units.from_ids(ids, 2)) == 3


@pytest.mark.parametrize("kind", ["string", "Int64", "object"])
def test_a_missing_id_of_pandas_is_found(kind):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(
        [1, 2, pandas.NA] if kind == "Int64" else ["a", "b", pandas.NA], dtype=kind
    )
    with pytest.raises(ValueError, match=NO_UNIT):
        Units.from_ids(column, 2)


def test_a_column_of_the_dataset():
    columns = {"patient": [1, 1, 2], "x": [0, 0, 0]}
    assert read_unit_ids(columns, "patient") == [1, 1, 2]
    assert read_unit_ids(columns, [4, 5, 6]) == [4, 5, 6]
    with pytest.raises(ValueError, match=r"no column 'user' \(KeyError\)"):
        read_unit_ids(columns, "user")
    with pytest.raises(ValueError, match=r"no column 'user' \(TypeError\)"):
        read_unit_ids([1, 2], "user")
