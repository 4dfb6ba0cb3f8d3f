#!/usr/bin/env bash
# meliora's Brier score and Spiegelhalter test take the rates of grades for the people in them.
#
# Packages: meliora 0.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: brier_score is described as the mean squared error of each default outcome, with 0.113
#   for its example. It returns the sum over the grades of the squared difference between the mean
#   PD and the default rate, so its example has 0.0002, and a scale that gives everybody the same PD
#   has 0, which is perfect. spiegelhalter_test puts the same rates into a formula for single
#   outcomes and divides by the number of grades, so its statistic is below 0 wherever rates are
#   near PDs, and it rejects only above 1.96: PDs of 10, 15 and 20 % with 30, 35 and 40 % of
#   defaults pass.
# Expected: the mean over all people of (default - PD)², and Spiegelhalter's z of it, here 31.5.
# Instead: sklearn.metrics.brier_score_loss, and z by hand as below.
# Source: Basel Committee, Studies on the Validation of Internal Rating Systems, 2005, page 46;
#   Spiegelhalter, Statistics in Medicine 1986.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'meliora==0.1.2'
cat > expected.txt <<'EXPECTED'
as predicted: Brier score 0.0000, of people 0.1258; z -0.90, rejected False; by hand 0.00
twenty points more: Brier score 0.1200, of people 0.2658; z -2.21, rejected False; by hand 31.51
one grade: Brier score 0.0000, of people 0.1275; z -0.51, rejected False; by hand 0.00
two grades far apart: Brier score 0.0000, of people 0.1079; z -1.01, rejected False; by hand 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from meliora.core import brier_score, spiegelhalter_test

portfolios = {'as predicted': ((0.1, 0.15, 0.2), (0.1, 0.15, 0.2)),
              'twenty points more': ((0.1, 0.15, 0.2), (0.3, 0.35, 0.4)),
              'one grade': ((0.15,), (0.15,)), 'two grades far apart': ((0.01, 0.29), (0.01, 0.29))}
for name, (predicted, seen) in portfolios.items():
    people = [(grade, p, int(person < 1000 * rate))
              for grade, (p, rate) in enumerate(zip(predicted, seen)) for person in range(1000)]
    table = pd.DataFrame(people, columns=['grade', 'pd', 'default'])
    error, p = table['default'] - table['pd'], table['pd']
    z, rejected = spiegelhalter_test(table, 'grade', 'default', 'pd')
    by_hand = (error * (1 - 2 * p)).sum() / np.sqrt(((1 - 2 * p) ** 2 * p * (1 - p)).sum())
    print(f'{name}: Brier score {brier_score(table, "grade", "default", "pd"):.4f}, of people {(error**2).mean():.4f};',
          f'z {z:.2f}, rejected {bool(rejected)}; by hand {abs(by_hand):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
