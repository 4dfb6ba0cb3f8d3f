#!/usr/bin/env bash
# esvalues gives a variable no effect where exactly one person of the background has the same value: an age with
# an effect of 5.9 has 0, and the other variables share it.
#
# Packages: esvalues 0.4, numpy 1.26.4, scipy 1.17.1.
# Behaviour: a variable is left out as one that does not vary if the number of people with the value of the
#   explained person is the number of columns of the variable, 1, and not the number of people. Somebody who
#   is in the background with a value of their own, as in most tables, is such a case. Variables that do not
#   vary at all are kept.
# Expected: the Shapley value of each variable: the mean over all orders of what it adds to the mean output.
# Why it matters here: which variables a decision about a patient rests on.
# Instead: shap.KernelExplainer, the package that took its place, or the loop over subsets below.
# Source: Lundberg and Lee, A Unified Approach to Interpreting Model Predictions, NeurIPS 2017, equation 8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'esvalues==0.4'
cat > expected.txt <<'EXPECTED'
nobody of the age: esvalues age 8.40, weight 6.85, pulse 4.50 ; by hand age 8.40, weight 6.85, pulse 4.50
one of the age: esvalues age 0.00, weight 9.43, pulse 7.93 ; by hand age 5.89, weight 6.96, pulse 4.50
two of the age: esvalues age 4.24, weight 7.06, pulse 4.50 ; by hand age 4.24, weight 7.06, pulse 4.50
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import combinations
from math import factorial

import numpy as np
from esvalues import esvalues

NAMES = ('age', 'weight', 'pulse')


def model(people):
    return people @ np.array([3.0, 2.0, 1.0]) + 0.1 * people[:, 0] * people[:, 1]


def by_hand(person, background):
    def value(subset):
        mixed = background.copy()
        mixed[:, list(subset)] = person[0, list(subset)]
        return model(mixed).mean()
    count, effects = len(NAMES), []
    for variable in range(count):
        others = [i for i in range(count) if i != variable]
        effects.append(sum(factorial(size) * factorial(count - size - 1) / factorial(count)
                           * (value((*subset, variable)) - value(subset))
                           for size in range(count) for subset in combinations(others, size)))
    return effects


person = np.array([[4.0, 5.0, 6.0]])
others = np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 1.0], [0.0, 3.0, 2.0], [3.0, 2.0, 0.0]])
one_age, two_ages = others.copy(), others.copy()
one_age[0, 0] = 4.0
two_ages[:2, 0] = 4.0
for name, background in (('nobody of the age', others), ('one of the age', one_age), ('two of the age', two_ages)):
    seen = esvalues(person, model, background)[1]
    print(f'{name}: esvalues', ', '.join(f'{n} {v:.2f}' for n, v in zip(NAMES, seen)), '; by hand',
          ', '.join(f'{n} {v:.2f}' for n, v in zip(NAMES, by_hand(person, background))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
