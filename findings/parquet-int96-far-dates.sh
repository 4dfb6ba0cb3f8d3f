#!/usr/bin/env bash
# pyarrow, pandas and fastparquet read far dates of Parquet's INT96 as other dates; polars and DuckDB
# read them right.
#
# Packages: pyarrow 26.0.1, pandas 3.1.1, fastparquet 2026.9.0, polars 2.1.0, duckdb 2.0.1,
#   numpy 2.4.6.
# Behaviour: Spark, Hive and Impala store timestamps as INT96. Readers that turn them into
#   nanoseconds of 64 bits wrap around outside of 1677 to 2262: the open end 9999-12-31 of a
#   hospital's table becomes the year 1816, and 1500 becomes 2084, without an error. fastparquet
#   does so with the type DATE too.
# Expected: 9999-12-31, or an error.
# Instead: pyarrow.parquet.read_table(..., coerce_int96_timestamp_unit='us').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyarrow==26.0.1' 'pandas==3.1.1' 'fastparquet==2026.9.0' 'polars==2.1.0' 'duckdb==2.0.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
pyarrow ['2084-07-20', '2024-07-01', '1816-03-29']
pandas ['2084-07-20', '2024-07-01', '1816-03-29']
fastparquet ['2084-07-20', '2024-07-01', '1816-03-29']
polars ['1500-01-01', '2024-07-01', '9999-12-31']
duckdb ['1500-01-01', '2024-07-01', '9999-12-31']
pyarrow, microseconds ['1500-01-01', '2024-07-01', '9999-12-31']
fastparquet, type DATE ['2084-07-20', '2024-07-01', '1816-03-29']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import duckdb
import fastparquet
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

ends = [datetime.datetime(1500, 1, 1), datetime.datetime(2024, 7, 1), datetime.datetime(9999, 12, 31)]
pq.write_table(
    pa.table({'end': pa.array(ends, pa.timestamp('us'))}), 'stays.parquet',
    use_deprecated_int96_timestamps=True,
)
pq.write_table(pa.table({'end': pa.array([end.date() for end in ends])}), 'days.parquet')
for name, values in (
    ('pyarrow', pq.read_table('stays.parquet')['end'].to_pylist()),
    ('pandas', pd.read_parquet('stays.parquet')['end']),
    ('fastparquet', fastparquet.ParquetFile('stays.parquet').to_pandas()['end']),
    ('polars', pl.read_parquet('stays.parquet')['end'].to_list()),
    ('duckdb', [row[0] for row in duckdb.sql("select * from 'stays.parquet'").fetchall()]),
    ('pyarrow, microseconds', pq.read_table(
        'stays.parquet', coerce_int96_timestamp_unit='us')['end'].to_pylist()),
    ('fastparquet, type DATE', fastparquet.ParquetFile('days.parquet').to_pandas()['end']),
):
    print(name, [str(value)[:10] for value in values])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
