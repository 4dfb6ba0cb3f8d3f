#!/usr/bin/env bash
# The percent of time in range of cgmquantify-updated is 100 % for everybody.
#
# Packages: cgmquantify-updated 0.5.3, pandas 2.2.3, numpy 2.2.6, statsmodels 0.14.4, matplotlib
#   3.10.3.
# Behaviour: PIR counts the readings that are below the upper end of the range or above its lower
#   end, which each reading is. The time in range, TIR, of the same readings combines both ends, and
#   POR, the percent outside the range, is right, so that PIR and POR add up to more than 100 %.
# Expected: PIR is TIR in per cent of the whole time, and PIR and POR add up to 100 %.
# Why it matters here: a feature that is the same for all patients says nothing and does not fail.
# Instead: 100 times TIR by the whole time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export MPLBACKEND=agg
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6' 'statsmodels==0.14.4' 'matplotlib==3.10.3' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cgmquantify-updated==0.5.3'
cat > expected.txt <<'EXPECTED'
steady, range of 1 standard deviations: PIR 100 %, POR 33 %, TIR 67% of the time
steady, range of 0.5 standard deviations: PIR 100 %, POR 62 %, TIR 38% of the time
half 60, half 250, range of 1 standard deviations: PIR 100 %, POR 100 %, TIR 100% of the time
half 60, half 250, range of 0.5 standard deviations: PIR 100 %, POR 100 %, TIR 0% of the time
skewed, range of 1 standard deviations: PIR 100 %, POR 14 %, TIR 86% of the time
skewed, range of 0.5 standard deviations: PIR 100 %, POR 62 %, TIR 38% of the time
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from cgmquantify import PIR, POR, TIR

random = np.random.default_rng(0)
time = pd.Series(pd.date_range('2026-03-01', periods=2016, freq='5min'))
for title, glucose in (('steady', random.normal(110, 10, 2016)),
                       ('half 60, half 250', np.where(np.arange(2016) < 1008, 60.0, 250.0)),
                       ('skewed', 80 + random.exponential(60, 2016))):
    table = pd.DataFrame({'Time': time, 'Glucose': glucose, 'Day': time.dt.date})
    for width in (1, 0.5):
        print(f'{title}, range of {width} standard deviations: PIR {PIR(table, width):.0f} %,',
              f'POR {POR(table, width):.0f} %, TIR {TIR(table, width) / (5 * 2016):.0%} of the time')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
