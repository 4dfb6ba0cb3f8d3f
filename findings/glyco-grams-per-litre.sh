#!/usr/bin/env bash
# glyco takes the readings of people with diabetes in g/L for mmol/L.
#
# Packages: glyco 0.0.1, numpy 2.4.6, pandas 2.3.3.
# Behaviour: autodetect_unit returns g/L where the mean is at most 6 and the standard deviation
#   below 0.4, and mmol/L otherwise. In g/L the spread of a person with diabetes is 0.5 to 0.7, so
#   that 1.8 g/L, which are 10 mmol/L, are read as 1.8, a severe hypoglycaemia. Fasting readings in
#   mmol/L with a spread of 0.3 are read as g/L, 5.2 as 29. No glucose in mmol/L has a mean below 3,
#   and none in g/L one above.
# Expected: g/L for a mean below 3.
# Instead: name the unit when reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'glyco==0.0.1' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
diabetes, in g/L: read as mmol/L, mean 1.8 mmol/L, is 10.0
diabetes, in mmol/L: read as mmol/L, mean 10.0 mmol/L, is 10.0
healthy, in g/L: read as g/L, mean 5.3 mmol/L, is 5.3
healthy, fasting, in mmol/L: read as g/L, mean 28.9 mmol/L, is 5.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
import pandas as pd

logging.disable(logging.WARNING)
from glyco.glucose import autodetect_unit, convert_to_mmoll

def spread(mean, deviation):
    values = np.linspace(-1, 1, 100)
    return pd.Series(mean + deviation * values / values.std(ddof=1))

people = [
    ('diabetes, in g/L', spread(1.8, 0.6), 'g/L'), ('diabetes, in mmol/L', spread(10.0, 3.3), 'mmol/L'),
    ('healthy, in g/L', spread(0.95, 0.15), 'g/L'), ('healthy, fasting, in mmol/L', spread(5.2, 0.3), 'mmol/L'),
]
for name, values, unit in people:
    found = autodetect_unit(values)
    print(f'{name}: read as {found}, mean {convert_to_mmoll(values.mean(), found):.1f} mmol/L,',
          f'is {convert_to_mmoll(values.mean(), unit):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
