#!/usr/bin/env bash
# creditpy's chi-square test says that a perfectly calibrated rating scale did not pass.
#
# Packages: creditpy 2.7, gap-stat 2.0.3, pandas 2.2.3, numpy 1.26.4, scipy 1.13.1.
# Behaviour: chisquare_test calls a scale with a p-value above 1 - confidence_level one that did not
#   pass, which is turned round: a large p-value says that defaults and predictions agree. Its
#   statistic has a term for each grade and is compared with one degree of freedom, whatever their
#   number, so the p-value itself is too small.
# Expected: passed for observed defaults equal to the predicted ones; as many degrees of freedom as
#   grades; 5 % of fitting scales with a p-value below 0.05.
# Why it matters here: calibration of a private model is judged by this test and its verdict is
#   printed as a sentence.
# Instead: scipy.stats.chi2.sf(statistic, grades), with a large value for a good scale.
# Source: Hosmer and Lemeshow; Basel Committee on Banking Supervision, working paper 14, 2005.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'scikit-learn==1.5.2' 'matplotlib==3.11.2' 'setuptools==84.2.1' 'wheel==0.48.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation 'gap-stat==2.0.3' 'creditpy==2.7'
cat > expected.txt <<'EXPECTED'
exactly as predicted: The rating scale did not pass
three times as many defaults: The rating scale passed
2000 samples of a scale that fits: 53% have a p-value below 0.05
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from creditpy import chisquare_test

predicted, people = np.array([0.01, 0.02, 0.05, 0.1, 0.2]), 1000
for title, rates in {'exactly as predicted': predicted, 'three times as many defaults': 3 * predicted}.items():
    table = pd.DataFrame({'PD': predicted, 'bad': rates * people, 'n': people})
    print(f"{title}: {chisquare_test(table, 'PD', 'bad', 'n')['result'].split('.')[0].split(' the test')[0]}")
random = np.random.default_rng(0)
values = []
for _ in range(2000):
    table = pd.DataFrame({'PD': predicted, 'bad': random.binomial(people, predicted), 'n': people})
    values.append(chisquare_test(table, 'PD', 'bad', 'n')['p_value'])
print(f'2000 samples of a scale that fits: {np.mean(np.array(values) < 0.05):.0%} have a p-value below 0.05')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
