#!/usr/bin/env bash
# DP_epidemiology releases the days of less than a week without noise, and two weeks with the noise
# of one.
#
# Packages: DP_epidemiology 0.1.1, opendp 0.11.1, pandas 2.2.3, numpy 1.26.4, Python 3.11.
# Behaviour: hotspot_analyzer, mobility_analyzer and pandemic_adherence_analyzer multiply the noise
#   by (end - start).days // 7, which is 0 up to six days: the sums come back exact. Both ends
#   belong to the period, so that weekly records of 1 and 8 January are two weeks and get the noise
#   of one.
# Expected: the documented scale, 3 * time steps * 600 / ε with the number of weeks in the period.
# Why it matters here: an ε was asked for and none holds. The result has no field that shows it: the
#   sums are whole numbers, with noise and without.
# Instead: choose end so that (end - start).days // 7 is at least the number of weeks with records.
# Source: the package's documented analysis of sensitivity and ε.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==1.26.4' 'opendp==0.11.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dp-epidemiology==0.1.1'
cat > expected.txt <<'EXPECTED'
1 to 7 January, records of 1 weeks: noise for 0
1 to 8 January, records of 2 weeks: noise for 1
1 to 15 January, records of 3 weeks: noise for 2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime

import numpy as np
import pandas as pd
from DP_epidemiology.hotspot_analyzer import hotspot_analyzer

sums = {'11001': 60000, '11002': 30000, '11003': 0}


def measure(start, end, days):
    """Return the mean distance of 400 releases from a true sum, in scales of one week for ε = 1."""
    rows = [(code, 'OFFLINE', day, total // 100 // len(days))
            for code, total in sums.items() for day in days for _ in range(100)]
    table = pd.DataFrame(rows, columns=['merch_postal_code', 'transaction_type', 'date', 'nb_transactions'])
    exact = table.groupby('merch_postal_code')['nb_transactions'].sum()['11001']
    distances = []
    for _ in range(400):
        seen = hotspot_analyzer(table, start, end, 'Bogota', 1.0).set_index('merch_postal_code')
        distances.append(abs(seen.loc['11001', 'nb_transactions'] - exact))
    return np.mean(distances) / (3 * 600)


weeks = [datetime(2020, 1, day) for day in (1, 8, 15)]
for last, days in ((7, weeks[:1]), (8, weeks[:2]), (15, weeks)):
    print(f'1 to {last} January, records of {len(days)} weeks: noise for '
          f'{measure(datetime(2020, 1, 1), datetime(2020, 1, last), days):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
