#!/usr/bin/env bash
# psmatching evaluates and writes the people before they were matched.
#
# Packages: psmatching 0.1.dev21, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, statsmodels 0.14.5.
# Behaviour: evaluate "verifies statistically that the cases and controls are well-matched", by
#   chi-square tests. It makes its tables of df, the whole data, and not of matched_data, so the
#   verdict is the same for any matching, and a good one "failed to match". The file that ends in
#   _matched_ps.csv, described as the matched data, has the whole data too, without the identifiers.
# Expected: tests and a file of the cases and their controls.
# Instead: crosstabs of matched_data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'psmatching==0.1.dev21'
cat > expected.txt <<'EXPECTED'
evaluate: False | Evaluating matches ... | OLD: FAILED | At least one variable failed to match!
all people: 1100 rows, old among others 0.15, among cases 0.80, p-value 1.4e-51
matched_data: 200 rows, old among others 0.80, among cases 0.80, p-value 1
rows of people_matched_ps.csv: 1100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from psmatching.match import PSMatch
from scipy.stats import chi2_contingency

np.random.seed(0)
old_cases, young_cases, old_others, young_others = 80, 20, 150, 850
people = pd.DataFrame({
    'OPTUM_LAB_ID': np.arange(old_cases + young_cases + old_others + young_others),
    'CASE': [1] * (old_cases + young_cases) + [0] * (old_others + young_others),
    'OLD': [1] * old_cases + [0] * young_cases + [1] * old_others + [0] * young_others})
people.to_csv('people.csv', index=False)
with contextlib.redirect_stdout(io.StringIO()) as text:
    match = PSMatch('people.csv', 'CASE ~ OLD', 1)
    match.prepare_data()
    match.match()
    passed = match.evaluate()
print('evaluate:', passed, '|', ' | '.join(line.strip() for line in text.getvalue().splitlines()[-4:] if line.strip()))
for name, table in (('all people', match.df), ('matched_data', match.matched_data)):
    old = table.groupby('CASE')['OLD'].mean()
    p_value = chi2_contingency(pd.crosstab(table['CASE'], table['OLD']))[1]
    print(f'{name}: {len(table)} rows, old among others {old[0]:.2f}, among cases {old[1]:.2f}, p-value {p_value:.2g}')
print('rows of people_matched_ps.csv:', len(pd.read_csv('people_matched_ps.csv')))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
