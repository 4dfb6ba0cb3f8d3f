#!/usr/bin/env bash
# The Rosenbaum bounds of causal-lens call an effect fragile because it is negative: the same differences between pairs
# withstand a hidden bias of 3 with one sign, and with the other not even a bias of 1, which is none.
#
# Packages: causal-lens 0.3.1, statsmodels 0.14.4, scikit-learn 1.6.1, scipy 1.15.3, pandas 2.2.3, numpy 1.26.4,
#   matplotlib 3.10.1.
# Behaviour: the statistic is the sum of the ranks of the positive differences, compared with the upper tail. Where the
#   treatment lowers the outcome, the p-value is 1 for each bias.
# Expected: the tail on the side of the effect; the estimator accepts outcomes of both directions and reports its own
#   p-value for both.
# Why it matters here: drugs lower pressures, sugars and risks.
# Instead: turn the sign of the outcome round before.
# Source: Rosenbaum (2002), "Observational studies", section 4.3: for a gamma of 1, the signed rank test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'causal-lens==0.3.1' 'statsmodels==0.14.4' 'scikit-learn==1.6.1' 'scipy==1.15.3' 'pandas==2.2.3' 'numpy==1.26.4' 'matplotlib==3.10.1'
cat > expected.txt <<'EXPECTED'
a drug that raises the pressure: effect 7.8, p-value 0.0000, signed rank test 0.0000; bounds 1.0: 0.0000, 1.5: 0.0000, 2.0: 0.0000
a drug that lowers the pressure: effect -8.2, p-value 0.0000, signed rank test 0.0000; bounds 1.0: 1.0000, 1.5: 1.0000, 2.0: 1.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from causal_lens import PropensityMatcher
from scipy.stats import wilcoxon

random = np.random.default_rng(0)
age = random.normal(60, 8, 600)
treated = (random.random(600) < 1 / (1 + np.exp(-(age - 66) / 8))).astype(int)
for sign, name in ((1, 'raises'), (-1, 'lowers')):
    table = pd.DataFrame({'age': age, 'treated': treated})
    table['pressure'] = 100 + 0.5 * age + sign * 8 * treated + np.random.default_rng(1).normal(0, 8, 600)
    matcher = PropensityMatcher('treated', 'pressure', ['age'], bootstrap_repeats=2)
    estimate = matcher.fit(table)
    bounds = {bound.gamma: bound for bound in matcher.rosenbaum_sensitivity(table, [1.0, 1.5, 2.0])}
    pairs = matcher._matched_pairs(table, matcher._fit_propensity(table))
    differences = [table['pressure'][first] - table['pressure'][second] for first, second in pairs]
    print(f'a drug that {name} the pressure: effect {estimate.effect:.1f}, p-value {estimate.p_value:.4f}, signed rank '
          f'test {wilcoxon(differences).pvalue:.4f}; bounds '
          + ', '.join(f'{gamma}: {bound.p_upper:.4f}' for gamma, bound in bounds.items()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
