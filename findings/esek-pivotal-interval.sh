#!/usr/bin/env bash
# The pivotal interval of esek for the effect size of two groups is half of the right one and need not
# contain the effect size.
#
# Packages: esek 0.1.38, numpy 2.2.6, scipy 1.15.3, pandas 2.3.3, statsmodels 0.14.5,
#   scikit-learn 1.7.2, pingouin 0.5.5, arch 7.2.0, astropy 7.1.0.
# Behaviour: the pivotal interval is one of the noncentrality of t, which is turned into an effect size.
#   TwoIndependentTTests divides it by the root of all people, as for one sample. For two groups it has
#   to be multiplied by the root of 1 / n1 + 1 / n2, twice as much where the groups are equal: the
#   interval around an effect of 0.8 in two groups of 50 ends at 0.6. The central interval beside it is
#   right.
# Expected: intervals that contain the effect size.
# Instead: multiply both ends by the root of (n1 + n2) * (1 / n1 + 1 / n2).
# Source: Steiger and Fouladi, Noncentrality interval estimation, 1997.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'pandas==2.3.3' 'statsmodels==0.14.5' 'scikit-learn==1.7.2' 'pingouin==0.5.5' 'arch==7.2.0' 'astropy==7.1.0' 'esek==0.1.38'
cat > expected.txt <<'EXPECTED'
20 and 20 people, effect 0.8: pivotal 0.075 to 0.7202, central 0.1357 to 1.4643, by hand 0.1499 to 1.4403
50 and 50 people, effect 0.8: pivotal 0.1952 to 0.6029, central 0.3878 to 1.2122, by hand 0.3905 to 1.2057
15 and 60 people, effect 0.8: pivotal 0.0868 to 0.5511, central 0.211 to 1.389, by hand 0.2170 to 1.3778
30 and 30 people, effect -0.5: pivotal -0.506 to 0.0081, central -1.0235 to 0.0235, by hand -1.0121 to 0.0162
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from esek.calculators.two_independent_mean.two_independent_t import TwoIndependentTTests
from scipy import optimize, stats

def by_hand(effect, one, two):
    root = np.sqrt(1 / one + 1 / two)
    t, freedom = effect / root, one + two - 2
    ends = [optimize.brentq(lambda shift: stats.nct.cdf(t, freedom, shift) - level, t - 4, t + 4) for level in (0.975, 0.025)]
    return ends[0] * root, ends[1] * root

for difference, one, two in ((8.0, 20, 20), (8.0, 50, 50), (8.0, 15, 60), (-5.0, 30, 30)):
    result = TwoIndependentTTests.from_parameters(100 + difference, 100, 10, 10, one, two).cohens_d
    low, high = by_hand(difference / 10, one, two)
    print(f'{one} and {two} people, effect {result.value}: pivotal {result.pivotal_ci.lower} to {result.pivotal_ci.upper},',
          f'central {result.ci.lower} to {result.ci.upper}, by hand {low:.4f} to {high:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
