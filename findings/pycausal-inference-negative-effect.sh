#!/usr/bin/env bash
# The p-value of pycausal-inference is between 1 and 2 for a treatment that lowers the outcome: nothing that falls is
# ever significant.
#
# Packages: pycausal-inference 0.1.0, numpy 1.26.4, pandas 2.2.3, scipy 1.15.3, scikit-learn 1.6.1, lightgbm 4.6.0,
#   patsy 1.0.1.
# Behaviour: calculate_ate_pvalue doubles the upper tail of the statistic and not of its absolute value.
# Expected: a two-sided p-value between 0 and 1 that does not depend on which group is called treated; the interval
#   of calculate_ate_ci beside it leaves out 0.
# Why it matters here: a drug lowers a pressure.
# Instead: twice the upper tail of the absolute value, as below.
# Source: Neyman (1923), "On the application of probability theory to agricultural experiments"; any two-sided z-test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pycausal-inference==0.1.0' 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.15.3' 'scikit-learn==1.6.1' 'lightgbm==4.6.0' 'patsy==1.0.1'
cat > expected.txt <<'EXPECTED'
effect 8: estimate 9.84, interval 6.91 to 12.77, p-value 0.0000, by hand 0.0000
effect 2: estimate 2.87, interval -0.10 to 5.83, p-value 0.0579, by hand 0.0579
effect -2: estimate -1.37, interval -4.12 to 1.37, p-value 1.6730, by hand 0.3270
effect -8: estimate -10.10, interval -13.07 to -7.13, p-value 2.0000, by hand 0.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from pycausal_inference import calculate_ate_ci, calculate_ate_pvalue
from scipy.stats import norm

random = np.random.default_rng(0)
for effect in (8, 2, -2, -8):
    treated = np.arange(400) % 2
    pressure = random.normal(140, 15, 400) + effect * treated
    people = pd.DataFrame({'T': treated, 'Y': pressure})
    estimate, statistic, value = calculate_ate_pvalue(people)
    low, high = calculate_ate_ci(people)[1:]
    print(f'effect {effect}: estimate {estimate:.2f}, interval {low:.2f} to {high:.2f}, p-value {value:.4f}, '
          f'by hand {2 * norm.sf(abs(statistic)):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
