#!/usr/bin/env bash
# The nn50 of lubdub is documented as a number per hour and is the number in the whole series: 361 for 5 minutes and 8,673
# for two hours of the same heart.
#
# Packages: lubdub 0.0.2.6.1.
# Behaviour: nn50 counts the changes of more than 50 ms and returns the count. Neither the number of the intervals nor their
#   length is used.
# Expected: "the mean number of times per hour in which the change in consecutive normal sinus (NN) intervals exceeds 50
#   milliseconds", about 4,337 for each of the series.
# Why it matters here: a five-minute measurement of the morning is compared with values per hour, and has a twelfth.
# Instead: divide by sum(intervals) / 3600000.
# Source: the docstring, and the count over the length of the series.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lubdub==0.0.2.6.1'
cat > expected.txt <<'EXPECTED'
5 minutes: nn50 361, changes by more than 50 ms 361, an hour 4325
30 minutes: nn50 2167, changes by more than 50 ms 2167, an hour 4335
60 minutes: nn50 4337, changes by more than 50 ms 4337, an hour 4336
120 minutes: nn50 8673, changes by more than 50 ms 8673, an hour 4337
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lubdub.calc import nn50

beats = [800, 860]
for minutes in (5, 30, 60, 120):
    intervals = beats * int(minutes * 60000 / sum(beats) + 0.5)
    hours = sum(intervals) / 3600000
    count = sum(abs(second - first) > 50 for first, second in zip(intervals, intervals[1:]))
    print(f'{minutes} minutes: nn50 {nn50(intervals)}, changes by more than 50 ms {count}, an hour {count / hours:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
