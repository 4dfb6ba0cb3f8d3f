#!/usr/bin/env bash
# MEDS: aligning a table to the schema merges people whose ids differ in leading zeros.
#
# Packages: meds 0.4.1, pyarrow 26.0.1.
# Behaviour: DataSchema.align casts texts of subject_id to integers, so 007, 07 and 7 become one
#   person; validate passes afterwards.
# Expected: an error for ids that are not integers already.
# Instead: number the people yourself, and compare the count of different ids before and after.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'meds==0.4.1' 'pyarrow==26.0.1'
cat > expected.txt <<'EXPECTED'
people before 3
people after 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime

import meds
import pyarrow as pa

day = datetime.datetime(2020, 1, 1)
events = pa.table({
    'subject_id': ['007', '07', '7'],
    'time': pa.array([day] * 3, pa.timestamp('us')),
    'code': ['A', 'B', 'C'],
    'numeric_value': pa.array([1.0, 2.0, 3.0], pa.float32()),
})
aligned = meds.DataSchema.align(events)
meds.DataSchema.validate(aligned)
print('people before', len(set(events['subject_id'].to_pylist())))
print('people after', len(set(aligned['subject_id'].to_pylist())))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
