#!/usr/bin/env bash
# agate-stats keeps the outliers where it is asked to reject them, and drops them where it is asked for
# them.
#
# Packages: agate-stats 0.4.3, agate 1.14.2.
# Behaviour: stdev_outliers and mad_outliers are documented to filter a table to the rows that are more
#   than some deviations from the mean or median, and with reject=True to return everything except
#   these. They do the opposite: by default all rows but the outliers, and with reject=True nothing but
#   the outliers.
# Expected: the pressure of 410 by default, and all others with reject=True.
# Instead: pass the opposite of reject, and check the number of rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'agate==1.14.2' 'agate-stats==0.4.3'
cat > expected.txt <<'EXPECTED'
A wrapper around :meth:`Table.where <agate.table.Table.where>` that ... If :code:`True` then the new :class:`Table <agate.table.Table>` will contain everything *except* the outliers.
stdev_outliers, reject=False: [118, 121, 127, 131, 138, 142, 125, 129, 133, 122, 119, 136, 140]
stdev_outliers, reject=True: [410]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import agate
import agatestats

print(' '.join(agatestats.table.stdev_outliers.__doc__.split('\n')[1].split()), '...',
      ' '.join(agatestats.table.stdev_outliers.__doc__.split(':param reject:')[1].split(':returns:')[0].split()))
values = [118, 121, 127, 131, 138, 142, 125, 129, 133, 122, 119, 136, 410, 140]
table = agate.Table([(value,) for value in values], ['pressure'], [agate.Number()])
for reject in (False, True):
    print(f'stdev_outliers, reject={reject}:', [int(row[0]) for row in table.stdev_outliers('pressure', reject=reject).rows])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
