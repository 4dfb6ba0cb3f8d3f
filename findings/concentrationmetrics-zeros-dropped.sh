#!/usr/bin/env bash
# The Theil index of concentrationMetrics leaves people with nothing out: it is 0, perfect equality, where one
# person has everything, and does not change where forty more people have nothing.
#
# Packages: concentrationMetrics 0.6.0, numpy 2.4.6, pandas 2.3.3.
# Behaviour: theil, gei with 0 and 1 and atkinson with 1 take the logarithm of the shares and drop shares of 0,
#   which is right for the sum of s ln s, and take the number of those who are left for the number of people.
# Expected: Theil's ln n where one of n people has everything; an Atkinson index of 1 and an infinite mean log
#   deviation as soon as somebody has nothing, as gini and hhi of the package find inequality in the same data.
# Why it matters here: exposures, incomes and claims of 0 are common.
# Instead: ln n plus the sum of s ln s over all shares, with 0 ln 0 = 0, as it is computed here.
# Source: Theil, Economics and information theory, 1967; Atkinson, On the measurement of inequality, 1970.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'concentrationMetrics==0.6.0'
cat > expected.txt <<'EXPECTED'
one of five has all: Theil 0.000, by its definition 1.609; Atkinson 0.000, by its definition 1.000; Gini 0.80
two of five have all: Theil 0.000, by its definition 0.916; Atkinson 0.000, by its definition 1.000; Gini 0.60
one of five has nothing: Theil 0.106, by its definition 0.330; Atkinson 0.115, by its definition 1.000; Gini 0.40
nobody has nothing: Theil 0.179, by its definition 0.179; Atkinson 0.200, by its definition 0.200; Gini 0.32
0 more people without anything: Theil 0.106, by its definition 0.106
4 more people without anything: Theil 0.106, by its definition 0.800
40 more people without anything: Theil 0.106, by its definition 2.504
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import concentrationMetrics
import numpy as np

index = concentrationMetrics.Index()


def compute_theil(values):
    shares = values / values.sum()
    return np.log(len(values)) + sum(share * np.log(share) for share in shares if share)


for name, values in (('one of five has all', [0, 0, 0, 0, 100]), ('two of five have all', [0, 0, 0, 50, 50]),
                     ('one of five has nothing', [0, 10, 20, 30, 40]), ('nobody has nothing', [5, 10, 20, 30, 35])):
    values = np.array(values, float)
    atkinson = 1 - np.exp(np.mean(np.log(np.maximum(values, 1e-300)))) / values.mean()
    print(f'{name}: Theil {index.theil(values):.3f}, by its definition {compute_theil(values):.3f}; '
          f'Atkinson {abs(index.atkinson(values, 1)):.3f}, by its definition {atkinson:.3f}; '
          f'Gini {index.gini(values):.2f}')
some = np.array([10.0, 20, 30, 40])
for poor in (0, 4, 40):
    values = np.append(np.zeros(poor), some)
    print(f'{poor} more people without anything: Theil {index.theil(values):.3f}, '
          f'by its definition {compute_theil(values):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
