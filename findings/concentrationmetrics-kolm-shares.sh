#!/usr/bin/env bash
# The Kolm index of concentrationMetrics subtracts the mean of the amounts from the shares: three people with
# 1000 each have an inequality of minus infinity in place of 0, and the sign of the difference is turned round.
#
# Packages: concentrationMetrics 0.6.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: kolm takes the exponential of alpha (share - mean of the data). The result is about minus the mean,
#   whatever the inequality is, and minus infinity for amounts above about 700 / alpha.
# Expected: ln of the mean of exp(alpha (mean - value)), divided by alpha: 0 for equal amounts, never negative,
#   and unchanged if everybody gets the same amount more.
# Why it matters here: a smaller value reads as less inequality, so richer is more equal.
# Instead: the formula, as it is computed here.
# Source: Kolm, Unequal inequalities, 1976.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'concentrationMetrics==0.6.0'
cat > expected.txt <<'EXPECTED'
equal, 1, 1, 1: -0.67, by its definition 0.00
equal, 10, 10, 10: -9.67, by its definition 0.00
equal, 1000, 1000, 1000: -inf, by its definition 0.00
unequal, 1, 2, 3: -1.66, by its definition 0.31
everybody 10 more, 11, 12, 13: -11.67, by its definition 0.31
very unequal, 0, 0, 36: -11.55, by its definition 11.59
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import concentrationMetrics
import numpy as np

index = concentrationMetrics.Index()
for name, values in (('equal', [1.0, 1, 1]), ('equal', [10.0, 10, 10]), ('equal', [1000.0, 1000, 1000]),
                     ('unequal', [1.0, 2, 3]), ('everybody 10 more', [11.0, 12, 13]), ('very unequal', [0.0, 0, 36])):
    values = np.array(values)
    right = np.log(np.mean(np.exp(values.mean() - values)))
    print(f'{name}, {", ".join(f"{value:g}" for value in values)}: {index.kolm(values, 1):.2f}, '
          f'by its definition {abs(right):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
