#!/usr/bin/env bash
# The sequential query of diff-priv-laplace-python spends the whole budget on each statistic of a column where
# it says that it divides it: a mean and a variance cost 2 ε, and all eight statistics 8 ε.
#
# Packages: diff-priv-laplace-python 1.0.5, numpy 1.26.4.
# Behaviour: the budget is divided where the kinds are a list, and not where they are one value, as in the
#   documented example for a single column. In a list, all eight statistics share seven parts of it from
#   Python 3.11 on, where a Flag does not count its aliases any more: they cost 8/7 ε.
# Expected: "we divide the provided privacy budget into the amount of queries performed", by its description:
#   the noise of each statistic is twice as large for two of them, and eight times for eight.
# Instead: a list without all, such as [kind.mean | kind.variance].
# Source: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, theorem 3.14.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'diff-priv-laplace-python==1.0.5'
cat > expected.txt <<'EXPECTED'
a mean, as one value: noise of the mean 1.0 times the one for the whole budget, by its description 1; ε spent by all 0.50 of 0.5
a mean, as a list: noise of the mean 1.0 times the one for the whole budget, by its description 1; ε spent by all 0.50 of 0.5
a mean and a variance, as one value: noise of the mean 1.0 times the one for the whole budget, by its description 2; ε spent by all 1.00 of 0.5
a mean and a variance, as a list: noise of the mean 2.0 times the one for the whole budget, by its description 2; ε spent by all 0.50 of 0.5
all eight, as one value: noise of the mean 1.0 times the one for the whole budget, by its description 8; ε spent by all 4.00 of 0.5
all eight, as a list: noise of the mean 7.0 times the one for the whole budget, by its description 8; ε spent by all 0.57 of 0.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from diffpriv_laplace import DiffPrivSequentialStatisticsQuery, DiffPrivStatisticKind

EPSILON, RELEASES = 0.5, 15_000
ages = np.linspace(0, 100, 1000)
whole = 100 / 1000 / EPSILON  # the scale of the noise of a mean with the whole budget
kind = DiffPrivStatisticKind
np.random.seed(0)
for name, kinds in (('a mean', kind.mean), ('a mean and a variance', kind.mean | kind.variance),
                    ('all eight', kind.all)):
    statistics = kinds.value.bit_count()
    for form, argument in (('one value', kinds), ('a list', [kinds])):
        releases = np.array([DiffPrivSequentialStatisticsQuery.query(ages, argument, EPSILON)[0][kind.mean]
                             for _ in range(RELEASES)])
        scale = np.abs(releases - ages.mean()).mean() / whole
        print(f'{name}, as {form}: noise of the mean {scale:.1f} times the one for the whole budget, '
              f'by its description {statistics}; ε spent by all {EPSILON * statistics / round(scale):.2f} of {EPSILON}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
