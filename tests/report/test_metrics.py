"""Figures of a run: what goes in comes out, and each column says whether ε protects it."""

import math

import pyarrow.parquet as pq
import pytest

from dpkfc.app.metrics import Metrics, Row, list_unprotected


def test_rows_come_back(tmp_path):
    metrics = Metrics("validation", refreshes=[{"step": 0, "digest": "ab", "scale": 1.5}])
    metrics.add(Row(step=0, epsilon=0.0, accuracy=0.1, loss=2.3))
    metrics.add(
        Row(step=1, epsilon=0.5, seconds=0.1, batch_size=3, clipped_fraction=0.5, median_norm=1.0)
    )
    metrics.write(tmp_path / "metrics.parquet")
    again = Metrics.read(tmp_path / "metrics.parquet")
    assert again == metrics
    assert [row.step for row in again.select_evaluated()] == [0]


@pytest.mark.parametrize("measured_on", ["test", "validation"])
def test_every_column_says_whether_it_is_private(tmp_path, measured_on):
    metrics = Metrics(measured_on)
    metrics.add(Row(step=1, epsilon=0.5))
    metrics.write(tmp_path / "m.parquet")
    schema = pq.read_schema(tmp_path / "m.parquet")
    marks = {field.name: field.metadata[b"private"] == b"true" for field in schema}
    held_out = measured_on == "validation"
    assert marks == {
        "step": False,
        "epsilon": False,
        "accuracy": held_out,
        "loss": held_out,
        "seconds": True,
        "batch_size": True,
        "clipped_fraction": True,
        "nonfinite_fraction": True,
        "median_norm": True,
        "floor_fraction": False,
        "public_loss": False,
        "noisy_loss": False,
    }
    for field in schema:
        assert field.metadata[b"note"].decode() == list_unprotected(measured_on).get(field.name, "")


def test_a_figure_that_is_not_finite_is_not_known_but_epsilon_stays():
    metrics = Metrics()
    metrics.add(Row(step=1, epsilon=math.inf, median_norm=math.nan))
    assert metrics.rows[0].median_norm is None and metrics.rows[0].epsilon == math.inf


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "m.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"m\.parquet: is not a readable Parquet file"):
        Metrics.read(tmp_path / "m.parquet")
