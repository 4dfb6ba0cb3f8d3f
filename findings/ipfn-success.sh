#!/usr/bin/env bash
# ipfn reports success for survey weights that miss the census by 40 %.
#
# Packages: ipfn 1.4.4, pandas 2.3.3, numpy 2.4.6.
# Behaviour: a survey has no old men, and the margins of the census cannot be met by weights. The
#   iteration ends as soon as its error no longer changes, prints "converged", and returns the
#   status 1, which is described as success; 0 is for 500 iterations only. The last margin of the
#   list is met, and the others are not. One of three groups of people has the weight 0.0000003.
# Expected: the status 0, as a largest error of 0.4 is above the convergence rate of 0.00001.
# Why it matters here: rates and fairness scores that are weighted to a population are those of
#   another one.
# Instead: verbose=2, and compare the last error of its table with the convergence rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ipfn==1.4.4' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
ipfn converged: convergence_rate not updating or below rate_tolerance
status: 1 after 21 of 500 iterations
sex: m 30.0 instead of 50.0, f 70.0 instead of 50.0
age: young 30.0 instead of 30.0, old 70.0 instead of 70.0
weight of the young women: 0.0000003
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from ipfn.ipfn import ipfn

survey = pd.DataFrame({'sex': ['m', 'm', 'f', 'f'], 'age': ['young', 'old'] * 2, 'total': [10.0, 0, 10, 10]})
census = {'sex': pd.Series({'m': 50.0, 'f': 50.0}), 'age': pd.Series({'young': 30.0, 'old': 70.0})}
result, status, steps = ipfn(survey, list(census.values()), [['sex'], ['age']], verbose=2).iteration()
print('status:', status, 'after', len(steps), 'of 500 iterations')
for column, margin in census.items():
    seen = result.groupby(column)['total'].sum()
    print(f'{column}:', ', '.join(f'{key} {seen[key]:.1f} instead of {value:.1f}' for key, value in margin.items()))
print('weight of the young women:', f'{result.loc[2, "total"]:.7f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
