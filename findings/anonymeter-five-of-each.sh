#!/usr/bin/env bash
# anonymeter singles people out of a table in which five people share each row.
#
# Packages: anonymeter 1.1.0, polars 2.1.0, pandas 2.3.3, numpy 1.26.4.
# Behaviour: SinglingOutEvaluator removes equal rows from the real, the synthetic and the control
#   table. Values that five people share then belong to one, and describing them counts as a
#   success, whose definition is that they match one record.
# Expected: 0 for a table that is 5-anonymous in all of its columns; no query can match one of five
#   equal rows.
# Why it matters here: rounding and grouping, which make people equal, are measured as if they had
#   done nothing.
# Instead: count the people a query matches in the real table: the queries are in judge.queries().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'anonymeter==1.1.0' 'polars==2.1.0' 'pandas==2.3.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
people with equal values: at least 5
risk of singling out: 0.14, successful attacks: 13 of 100
people that a whole row describes: at least 5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
import pandas as pd
from anonymeter.evaluators import SinglingOutEvaluator

logging.disable(logging.CRITICAL)
random = np.random.default_rng(0)
kinds = pd.DataFrame({'weight': random.normal(75, 12, 200).round(1), 'age': random.integers(20, 90, 200)})
people = pd.concat([kinds] * 5, ignore_index=True)
smallest = people.groupby(['weight', 'age']).size().min()
judge = SinglingOutEvaluator(people, people.copy(), n_attacks=100, n_cols=2, max_attempts=2000, seed=0)
judge.evaluate(mode='multivariate')
matches = [people.query('weight == @row.weight and age == @row.age').shape[0] for row in kinds.itertuples()]
print(f'people with equal values: at least {smallest}')
print(f'risk of singling out: {judge.risk().value:.2f}, successful attacks: {len(judge.queries())} of 100')
print('people that a whole row describes: at least', min(matches))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
