#!/usr/bin/env bash
# The Hauck-Anderson test of esek has another p-value where the two groups are exchanged.
#
# Packages: esek 0.1.38, numpy 2.2.6, scipy 1.15.3, pandas 2.3.3, statsmodels 0.14.5,
#   scikit-learn 1.7.2, pingouin 0.5.5, arch 7.2.0, astropy 7.1.0.
# Behaviour: the continuity correction of two proportions takes 1 / (2 min(n1, n2)) from the size of
#   their difference. TwoIndependentProportions takes it from the difference with its sign, so that a
#   negative difference grows: the same groups have a smaller p-value where the one with fewer cases is
#   named first, and groups with equal proportions one below 1.
# Expected: the same two-sided p-value in both orders, and 1 for equal proportions.
# Instead: name the group with the higher proportion first.
# Source: Hauck and Anderson, A Comparison of Large-Sample Confidence Interval Methods for the Difference
#   of Two Binomial Probabilities, 1986.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'pandas==2.3.3' 'statsmodels==0.14.5' 'scikit-learn==1.7.2' 'pingouin==0.5.5' 'arch==7.2.0' 'astropy==7.1.0' 'esek==0.1.38'
cat > expected.txt <<'EXPECTED'
50% and 30% of 40 people: p 0.0843, exchanged 0.0504; by hand 0.0843
60% and 30% of 30 people: p 0.0229, exchanged 0.0110; by hand 0.0229
55% and 45% of 20 people: p 0.6422, exchanged 0.4387; by hand 0.6422
50% and 50% of 20 people: p 0.8775, exchanged 0.8775; by hand 1.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import sqrt

from esek.calculators.proportions.two_independent_proportions import TwoIndependentProportions
from scipy import stats

for one, other, people in ((0.5, 0.3, 40), (0.6, 0.3, 30), (0.55, 0.45, 20), (0.5, 0.5, 20)):
    seen = [TwoIndependentProportions.from_parameters(first, second, people, people).z_hauck_anderson
            for first, second in ((one, other), (other, one))]
    error = sqrt(one * (1 - one) / (people - 1) + other * (1 - other) / (people - 1))
    z = max(0, abs(one - other) - 1 / (2 * people)) / error
    print(f'{one:.0%} and {other:.0%} of {people} people: p {seen[0].p_value:.4f}, exchanged {seen[1].p_value:.4f};',
          f'by hand {2 * stats.norm.sf(z):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
