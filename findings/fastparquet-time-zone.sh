#!/usr/bin/env bash
# fastparquet drops the time zone of a timestamp that pyarrow wrote, and reads times of day as numbers.
#
# Packages: fastparquet 2026.9.0, pyarrow 26.0.1 (writes the file), pandas 3.1.1, numpy 2.4.6.
# Behaviour: Parquet says of a column that its instants are in UTC. pyarrow reads 14:00+02:00 back;
#   fastparquet returns 12:00 without a zone, two hours off for whoever takes it for local time. A
#   time of day becomes a whole number of microseconds, and a half-precision float two bytes.
# Expected: 12:00 with the zone UTC; times and half floats as such, or an error.
# Instead: tz_localize('UTC') such columns, or read the file with pyarrow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fastparquet==2026.9.0' 'pyarrow==26.0.1' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
seen: pyarrow 2024-07-01 14:00:00+02:00, fastparquet 2024-07-01 12:00:00
dose: pyarrow 23:59:00, fastparquet 86340000000
weight: pyarrow 1.5, fastparquet b'\x00>'
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

noon = datetime.datetime(2024, 7, 1, 12)
table = pa.table({
    'seen': pa.array([noon], pa.timestamp('us', tz='Europe/Berlin')),
    'dose': pa.array([datetime.time(23, 59)], pa.time64('us')),
    'weight': pa.array([np.float16(1.5)]),
})
pq.write_table(table, 'visits.parquet')
read = fastparquet.ParquetFile('visits.parquet').to_pandas()
for name in table.column_names:
    print(f"{name}: pyarrow {pq.read_table('visits.parquet')[name][0]}, fastparquet {read[name][0]}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
