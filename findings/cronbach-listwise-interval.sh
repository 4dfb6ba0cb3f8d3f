#!/usr/bin/env bash
# cronbach counts people for its interval whom it has left out.
#
# Packages: cronbach 0.6.0, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: alpha(..., nan_policy='listwise') removes rows with a missing value, and has counted n
#   before. The interval of Feldt has n - 1 degrees of freedom, with n documented as the number of
#   subjects, so an interval of 95 % is as narrow as if nobody had been removed. The coefficient
#   itself is of the complete rows.
# Expected: the interval of the same table without those rows.
# Instead: data.dropna() before the call.
# Source: Feldt, Woodruff and Salih, Applied Psychological Measurement 1987.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'cronbach==0.6.0'
cat > expected.txt <<'EXPECTED'
0 of 200 with a missing answer: alpha 0.84 from 0.80 to 0.87; dropped before 0.84 from 0.80 to 0.87
100 of 200 with a missing answer: alpha 0.80 from 0.76 to 0.84; dropped before 0.80 from 0.74 to 0.86
180 of 200 with a missing answer: alpha 0.71 from 0.64 to 0.77; dropped before 0.71 from 0.45 to 0.87
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from cronbach import alpha

draw = np.random.RandomState(0)
for missing in (0, 100, 180):
    answers = pd.DataFrame(draw.normal(size=(200, 1)) + draw.normal(size=(200, 5)))
    answers.iloc[200 - missing:, 0] = np.nan
    seen, interval = alpha(answers, nan_policy='listwise')
    right, right_interval = alpha(answers.dropna())
    print(f'{missing} of 200 with a missing answer: alpha {seen:.2f} from {interval[0]:.2f} to {interval[1]:.2f};',
          f'dropped before {right:.2f} from {right_interval[0]:.2f} to {right_interval[1]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
