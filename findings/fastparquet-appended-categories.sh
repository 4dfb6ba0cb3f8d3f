#!/usr/bin/env bash
# fastparquet reads appended categories with the labels of the last part, so that one diagnosis becomes
# another.
#
# Packages: fastparquet 2026.9.0, pandas 3.1.1, numpy 2.4.6; pyarrow 26.0.1 and polars 2.1.0 read the
#   same file.
# Behaviour: a categorical column is stored as codes with a dictionary for each row group. Where a file
#   was written in parts whose categories differ, with append=True of fastparquet or by pyarrow with
#   several row groups, fastparquet joins the codes and labels them with one dictionary. The text of
#   the file is right: pyarrow and polars read it. No warning or error follows.
# Expected: the values that were written, as from the other readers, or an error.
# Why it matters here: months of a register that are appended as they come have different categories,
#   and a label is one of the columns.
# Instead: read with pyarrow or polars, or write texts, not categories.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fastparquet==2026.9.0' 'pandas==3.1.1' 'numpy==2.4.6' 'pyarrow==26.0.1' 'polars==2.1.0'
cat > expected.txt <<'EXPECTED'
written: asthma gout asthma stroke asthma sepsis
pyarrow: asthma gout asthma stroke asthma sepsis
polars: asthma gout asthma stroke asthma sepsis
fastparquet: asthma sepsis asthma stroke asthma sepsis
pandas: asthma sepsis asthma stroke asthma sepsis
written by pyarrow, read by fastparquet: asthma sepsis asthma stroke asthma sepsis
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import fastparquet
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet

january = pd.DataFrame({'diagnosis': pd.Categorical(['asthma', 'gout', 'asthma'])})
february = pd.DataFrame({'diagnosis': pd.Categorical(['stroke', 'asthma', 'sepsis'])})
print('written:', *january['diagnosis'], *february['diagnosis'])
fastparquet.write('appended.parquet', january)
fastparquet.write('appended.parquet', february, append=True)
print('pyarrow:', *pa.parquet.read_table('appended.parquet')['diagnosis'].to_pylist())
print('polars:', *polars.read_parquet('appended.parquet')['diagnosis'])
print('fastparquet:', *fastparquet.ParquetFile('appended.parquet').to_pandas()['diagnosis'])
print('pandas:', *pd.read_parquet('appended.parquet', engine='fastparquet')['diagnosis'])
parts = [pa.Table.from_pandas(part, preserve_index=False) for part in (january, february)]
with pa.parquet.ParquetWriter('parts.parquet', parts[0].schema) as writer:
    for part in parts:
        writer.write_table(part)
print('written by pyarrow, read by fastparquet:',
      *fastparquet.ParquetFile('parts.parquet').to_pandas()['diagnosis'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
