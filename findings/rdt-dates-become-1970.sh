#!/usr/bin/env bash
# rdt returns dates of birth between 1950 and 2001 as days of December 1969 and January 1970 where the
# column does not count nanoseconds, which dates from a Parquet file do not.
#
# Packages: rdt 2.0.0, pandas 2.3.3, pyarrow 26.0.1, numpy 2.4.6, scikit-learn 1.7.2.
# Behaviour: its two encoders of dates take the whole numbers behind a date, in the unit of the column,
#   and read the numbers that come back as nanoseconds since 1970. The column is right for
#   datetime64[ns] only. pandas reads timestamps of a Parquet file in microseconds or milliseconds, and
#   fit_transform followed by reverse_transform, without any model between, loses them.
# Expected: the dates that went in, as for nanoseconds.
# Why it matters here: a synthetic table that SDV makes of such a file has patients who were all born
#   within three weeks, and its statistics of dates are compared with the real ones.
# Instead: table['born'].astype('datetime64[ns]') before the encoder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'rdt==2.0.0' 'pandas==2.3.3' 'pyarrow==26.0.1' 'numpy==2.4.6' 'scikit-learn==1.7.2'
cat > expected.txt <<'EXPECTED'
born: 1950-03-01 1984-12-24 2001-07-15
datetime64[ns], UnixTimestampEncoder: 1950-03-01 1984-12-24 2001-07-15
datetime64[ns], OptimizedTimestampEncoder: 1950-03-01 1984-12-24 2001-07-15
datetime64[us], UnixTimestampEncoder: 1969-12-24 1970-01-06 1970-01-12
datetime64[us], OptimizedTimestampEncoder: 1969-12-24 1970-01-06 1970-01-12
datetime64[ms], UnixTimestampEncoder: 1969-12-31 1970-01-01 1970-01-01
datetime64[ms], OptimizedTimestampEncoder: 1969-12-31 1970-01-01 1970-01-01
cast to nanoseconds: 1950-03-01 1984-12-24 2001-07-15
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rdt.transformers import OptimizedTimestampEncoder, UnixTimestampEncoder

born = pd.Series(pd.to_datetime(['1950-03-01', '1984-12-24', '2001-07-15']), name='born')
print('born:', *born.dt.date)
for unit in ('ns', 'us', 'ms'):
    pq.write_table(pa.table({'born': pa.array(born, pa.timestamp(unit))}), 'patients.parquet')
    table = pd.read_parquet('patients.parquet')
    for encoder in (UnixTimestampEncoder(), OptimizedTimestampEncoder()):
        returned = encoder.reverse_transform(encoder.fit_transform(table, 'born'))['born']
        print(f'{table.born.dtype}, {type(encoder).__name__}:', *returned.dt.date)
table['born'] = table['born'].astype('datetime64[ns]')
encoder = UnixTimestampEncoder()
print('cast to nanoseconds:', *encoder.reverse_transform(encoder.fit_transform(table, 'born'))['born'].dt.date)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
