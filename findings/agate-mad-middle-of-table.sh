#!/usr/bin/env bash
# The median absolute deviation of agate is 0 for each odd number of values.
#
# Packages: agate 1.14.2.
# Behaviour: the deviations from the median are taken in the order of the values, from the smallest to the
#   largest, in which they fall to 0 and rise again. MAD passes them to a function that needs a sorted
#   list and takes the one in the middle, which is the deviation of the median from itself. With an even
#   number of values it is half of the distance between the two in the middle.
# Expected: 7 for the pressures of 13 people, and 1 deviation of 2 for the numbers from 1 to 9.
# Instead: statistics.median of the deviations.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'agate==1.14.2'
cat > expected.txt <<'EXPECTED'
pressures: median 129, median absolute deviation 0, by its definition 7
the same without the last: median 128, median absolute deviation 1, by its definition 6.5
1 to 9: median 5, median absolute deviation 0, by its definition 2
incomes: median 2100, median absolute deviation 0, by its definition 900
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import statistics

import agate

columns = {
    'pressures': [118, 121, 127, 131, 138, 142, 125, 129, 133, 122, 119, 136, 140],
    'the same without the last': [118, 121, 127, 131, 138, 142, 125, 129, 133, 122, 119, 136],
    '1 to 9': list(range(1, 10)),
    'incomes': [900, 1200, 1500, 2100, 2800, 4000, 90000],
}
for name, values in columns.items():
    table = agate.Table([(value,) for value in values], ['value'], [agate.Number()])
    middle = statistics.median(values)
    right = statistics.median(abs(value - middle) for value in values)
    print(f"{name}: median {table.aggregate(agate.Median('value'))},",
          f"median absolute deviation {table.aggregate(agate.MAD('value'))}, by its definition {right}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
