#!/usr/bin/env bash
# The mean amplitude of glycaemic excursions of cgmquantify-updated is a mean of the first readings.
#
# Packages: cgmquantify-updated 0.5.3, pandas 2.2.3, numpy 2.2.6, statsmodels 0.14.4, matplotlib
#   3.10.3.
# Behaviour: MAGE finds the positions of the peaks and valleys, and then looks their glucose up by a
#   counter that begins at 0: the tenth turning point has the glucose of the tenth reading. The
#   result is about the mean level of the first readings, whatever the excursions are. A constant
#   that is added to all readings changes it, and so does a quiet first morning.
# Expected: 150 for a curve that goes from 80 to 230 and back each day, at each level; and 0, or no
#   value, without excursions. An amplitude is a difference.
# Why it matters here: MAGE is a feature for the risk of complications, in mg/dL.
# Instead: iglu_python's mage, or the mean of the differences from peak to valley that are larger
#   than the standard deviation.
# Source: Service et al., Mean amplitude of glycemic excursions, Diabetes 1970.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export MPLBACKEND=agg
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6' 'statsmodels==0.14.4' 'matplotlib==3.10.3' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cgmquantify-updated==0.5.3'
cat > expected.txt <<'EXPECTED'
from 80 to 230: MAGE 81, mean of the differences of turning points 150
from 180 to 330: MAGE 181, mean of the differences of turning points 150
from 80 to 82: MAGE 80, mean of the differences of turning points 2
from 80 to 230, two first hours of 80: MAGE 80, mean of the differences of turning points 150
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from cgmquantify import MAGE

time = pd.Series(pd.date_range('2026-03-01', periods=8 * 288, freq='5min'))
phase = 2 * np.pi * np.arange(8 * 288) / 288  # one rise and one fall a day
for title, glucose in (('from 80 to 230', 155 - 75 * np.cos(phase)),
                       ('from 180 to 330', 255 - 75 * np.cos(phase)),
                       ('from 80 to 82', 81 - np.cos(phase)),
                       ('from 80 to 230, two first hours of 80',
                        np.r_[np.full(24, 80.0), 155 - 75 * np.cos(phase)][:8 * 288])):
    table = pd.DataFrame({'Time': time, 'Glucose': glucose, 'Day': time.dt.date})
    turns = np.flatnonzero(np.diff(np.sign(np.diff(glucose))) != 0) + 1
    amplitude = np.abs(np.diff(glucose[turns])).mean()
    print(f'{title}: MAGE {MAGE(table):.0f}, mean of the differences of turning points {amplitude:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
