#!/usr/bin/env bash
# The correlation of agate-stats adds the values of people whose other value is missing to the sums of
# the complete pairs.
#
# Packages: agate-stats 0.4.3, agate 1.14.2.
# Behaviour: PearsonCorrelation leaves out each row in which one of the two columns is missing, for the
#   squares and the products. The sums of the columns are taken from the whole table. With one missing
#   pressure among seven the correlation of changes, which are around 0, is another number, and the one
#   of the weights and pressures themselves asks for the root of a negative number.
# Expected: the correlation of the complete pairs.
# Instead: table.where with a function that keeps the complete rows first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'agate==1.14.2' 'agate-stats==0.4.3'
cat > expected.txt <<'EXPECTED'
changes of weight and pressure, nothing missing: 0.570, of the complete pairs 0.570
changes of weight and pressure, pressure 1 missing: 0.436, of the complete pairs 0.392
changes of weight and pressure, pressure 7 missing: 0.512, of the complete pairs 0.496
changes of weight and pressure, pressure 4 missing: 0.578, of the complete pairs 0.578
weights and pressures, nothing missing: 0.570, of the complete pairs 0.570
weights and pressures, pressure 1 missing: InvalidOperation, of the complete pairs 0.392
weights and pressures, pressure 7 missing: InvalidOperation, of the complete pairs 0.496
weights and pressures, pressure 4 missing: InvalidOperation, of the complete pairs 0.578
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import statistics

import agate
import agatestats

def correlation(rows):
    table = agate.Table(rows, ['weight', 'pressure'], [agate.Number(), agate.Number()])
    try:
        return f"{float(table.aggregate(agatestats.PearsonCorrelation('weight', 'pressure'))):.3f}"
    except ArithmeticError as error:
        return type(error).__name__

changes = [(-6, -3), (-4, 2), (-2, -4), (0, 1), (2, -1), (4, 3), (6, 2)]
weights = [(80 + one, 130 + other) for one, other in changes]
for name, rows in (('changes of weight and pressure', changes), ('weights and pressures', weights)):
    for missing in (None, 0, 6, 3):
        given = [(one, None if place == missing else other) for place, (one, other) in enumerate(rows)]
        pairs = [pair for pair in given if pair[1] is not None]
        what = 'nothing missing' if missing is None else f'pressure {missing + 1} missing'
        print(f'{name}, {what}: {correlation(given)}, of the complete pairs {statistics.correlation(*zip(*pairs)):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
