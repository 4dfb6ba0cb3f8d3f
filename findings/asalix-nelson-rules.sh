#!/usr/bin/env bash
# The Nelson rules of asalix do not look for what they describe: 20 values that go up and down by
# turns pass, and a smooth curve is called alternating.
#
# Packages: asalix 0.1.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: Rule 4, fourteen points that alternate in direction, compares each difference with
#   the one before, and counts how long the differences grow: it finds curves and never an
#   alternation. Rule 5, two of three points above two standard deviations, wants all three of
#   them, twice. Rules 7 and 8 leave out the last points, so that exactly fifteen points near the
#   mean are not tested at all.
# Expected: the rules as its documentation describes them, which are Nelson's.
# Instead: test the signs of the differences, and windows up to the last value.
# Source: Nelson, The Shewhart Control Chart - Tests for Special Causes, Journal of Quality
#   Technology 1984.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'asalix==0.1.3'
cat > expected.txt <<'EXPECTED'
20 values up and down by turns: rule 4 False, as described True
a parabola: rule 4 True, as described False
two of three high: rule 5 False, as described True
three of three high: rule 5 False, as described True
none high: rule 5 False, as described False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from asalix.numerical_methods import NumericalMethods

def alternates(values):
    signs = np.sign(np.diff(values))
    return any(np.all(signs[i:i + 13] * signs[i + 1:i + 14] < 0) for i in range(len(signs) - 13))

def two_of_three(values):
    z = (values - values.mean()) / values.std(ddof=1)
    return any(max(np.sum(z[i:i + 3] > 2), np.sum(z[i:i + 3] < -2)) >= 2 for i in range(len(z) - 2))

series = {'20 values up and down by turns': np.array([1.0, -1.0] * 10), 'a parabola': np.arange(20.0) ** 2}
for name, values in series.items():
    print(f'{name}: rule 4 {NumericalMethods.perform_nelson_rule_4_test(values)}, as described {alternates(values)}')
quiet = np.array([0.1, -0.1] * 20)
for name, high in (('two of three high', [5.0, 0.1, 5.0]), ('three of three high', [5.0, 5.0, 5.0]), ('none high', [0.1, 0.1, 0.1])):
    values = np.concatenate([quiet, high, quiet])
    print(f'{name}: rule 5 {NumericalMethods.perform_nelson_rule_5_test(values)}, as described {two_of_three(values)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
